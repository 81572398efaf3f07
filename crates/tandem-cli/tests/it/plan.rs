//! `tandem plan`, and the cap that it tells of.

use std::fs;
use std::process::Command;

use crate::workshop::{Workshop, skip};
use serde_json::Value;

/// A folder in which nothing is but a config.json, and a run of it.
fn bare(shop: &Workshop) {
    shop.write_config("bare");
    let toml =
        shop.dpo_toml("run").replace("\"model\"", "\"bare\"").replace("preferences.jsonl", "nowhere.jsonl");
    shop.write("bare.toml", &toml);
}

#[test]
fn a_config_json_is_enough_to_plan_for_devices_that_are_not_here() {
    let shop = Workshop::new();
    bare(&shop);
    let wanted = ["plan", "bare.toml", "--devices", "4xA10", "--assume-tokens", "200"];
    let outcome = shop.run(&[&wanted[..], &["--json", "--html", "plan.html"]].concat()).expect(0);
    let plan: Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {}", outcome.stdout));
    let rank = &plan["ranks"][0];
    assert_eq!((plan["device"].as_str(), plan["fits"].as_bool()), (Some("A10"), Some(true)));
    assert_eq!((rank["plan"]["ranks"].as_u64(), rank["plan"]["dtype"].as_str()), (Some(4), Some("f32")));
    let page = shop.read("plan.html");
    assert!(page.contains("<svg") && page.contains("master weights"), "{page}");
    let text =
        shop.run(&[&wanted[..], &["--search", "--set", "compute.dtype=auto"]].concat()).expect(0).stdout;
    for part in
        ["compute in bf16", "are assumed", "it fits", "plans of this search fit", "compute.sharding=zero3"]
    {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    assert!(!text.contains('\x1b'), "no colours where nobody looks");
    assert!(!shop.path("run").exists() && !shop.path("cache").exists());
}

#[test]
fn what_makes_no_sense_is_refused_with_what_does() {
    let shop = Workshop::new();
    bare(&shop);
    let refused =
        |more: &[&str]| shop.run(&[&["plan", "bare.toml", "--assume-tokens", "64"], more].concat()).expect(2);
    refused(&["--devices", "2xA9"]).says(&["no device is called \"A9\"", "H200-141GB"]);
    refused(&["--device-table", "bare.toml"]).says(&["bare.toml is not a table of devices"]);
    refused(&["--device-table", "nowhere.toml"]).says(&["cannot read nowhere.toml"]);
    refused(&["--memory", "lots"]).says(&["`compute.memory`: expected a size with its unit"]);
    refused(&["--assume-scored", "65"]).says(&["a micro-batch of 64 tokens cannot have 65 scored tokens"]);
    shop.run(&["plan", "bare.toml"]).expect(2);
    shop.run(&["plan"]).expect(2);
}

#[test]
fn a_run_beyond_its_cap_is_refused_with_the_picture_and_what_to_change() {
    let shop = Workshop::new();
    let plan = shop.run(&["plan", "dpo.toml", "--json"]).expect(0).stdout;
    let needed = serde_json::from_str::<Value>(&plan).unwrap()["needed_bytes"].as_u64().unwrap();
    let cap = format!("{}B", needed - 1);
    let planned = shop.run(&["plan", "dpo.toml", "--memory", &cap]).expect(2).stdout;
    let advice =
        planned.split("or on the command line: ").nth(1).unwrap_or_else(|| panic!("{planned}")).trim();
    shop.run(&["train", "dpo.toml", "--memory", &cap]).expect(2).says(&[
        "nothing was loaded",
        "it does not fit",
        "train is fullest in",
        "█",
        advice,
    ]);
    let left = fs::read_dir(shop.path("run"))
        .map_or(0, |files| files.filter(|f| f.as_ref().unwrap().file_name() != ".lock").count());
    assert_eq!(left, 0, "nothing is written");
    let mut changed = vec!["train", "dpo.toml", "--memory", &cap];
    changed.extend(advice.split_whitespace());
    shop.run(&changed).expect(0);
    shop.run(&["train", "dpo.toml", "--overwrite", "--memory", &format!("{needed}B")]).expect(0);
}

#[test]
fn the_folder_of_what_is_offloaded_is_looked_at_as_a_run_does() {
    let shop = Workshop::new();
    shop.write("file", "");
    fs::create_dir(shop.path("there")).unwrap();
    let with = |command: &[&str], folder: &str, more: &[&str]| {
        let folder = format!("compute.offload_dir={}", shop.path(folder).display());
        let settings = ["dpo.toml", "--set", "compute.offload=nvme", "--set", &folder];
        shop.run(&[command, &settings, more].concat())
    };
    for (folder, expected) in [("missing", "it does not exist"), ("file", "it is not a folder")] {
        let refused = with(&["train"], folder, &[]).expect(2).says(&[expected]);
        let planned = with(&["plan"], folder, &[]).expect(2);
        assert_eq!(planned.stderr, refused.stderr);
        assert_eq!(planned.stdout, "");
        // Elsewhere it may be another.
        let sentence = refused.stderr.trim_end().split_once("error: ").expect("an error").1;
        with(&["plan"], folder, &["--devices", "2xA10"])
            .expect(0)
            .says(&["on this machine the run would be refused", sentence]);
    }
    let planned = with(&["plan"], "there", &[]).expect(0);
    assert!(planned.stdout.contains("in the file:") && !planned.stderr.contains("offload"), "{planned:?}");
    assert_eq!(fs::read_dir(shop.path("there")).unwrap().count(), 0, "nothing is left in it");
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_disk_that_is_too_small_for_the_plan_is_told_after_it() {
    let shop = Workshop::new();
    bare(&shop);
    let config = shop.read("bare/config.json");
    let large = config
        .replace("\"hidden_size\":32", "\"hidden_size\":131072")
        .replace("\"num_attention_heads\":2", "\"num_attention_heads\":1024");
    shop.write("bare/config.json", &large);
    let settings = ["plan", "bare.toml", "--assume-tokens", "16", "--json", "--set", "compute.offload=nvme"];
    let more = ["--set", "compute.devices=cpu:2", "--set", "compute.offload_dir=there"];
    fs::create_dir(shop.path("there")).unwrap();
    let told = shop.run(&[&settings[..], &more].concat());
    let plan: Value = serde_json::from_str(&told.stdout).unwrap();
    let needed = plan["ranks"].as_array().unwrap().iter().map(|rank| {
        rank["ranks"].as_array().unwrap().len() as u64 * rank["plan"]["file_bytes"].as_u64().unwrap()
    });
    let needed: u64 = needed.sum();
    let disk = Command::new("df").args(["-B1", "--output=avail"]).arg(shop.path("there")).output().unwrap();
    let free = String::from_utf8(disk.stdout).unwrap();
    let free: u64 = free.split_whitespace().last().unwrap().parse().unwrap();
    if free > needed {
        // Memory of this machine may still be too small.
        told.expect(if plan["fits"].as_bool().unwrap() { 0 } else { 2 });
        return skip(&format!("{free} bytes are free, more than a plan of {needed}"));
    }
    let sentence = format!("offloaded tensors take {needed} bytes in ");
    told.expect(1)
        .says(&[&sentence, "bytes are free: make room, or set compute.offload_dir to another folder"]);
    // The disk of other devices is not this one. Their memory is too small for the model.
    let elsewhere = shop.run(&[&settings[..], &more, &["--devices", "2xA10"]].concat()).expect(2);
    assert!(!elsewhere.stderr.contains("offloaded tensors take"), "{elsewhere:?}");
}

#[test]
fn a_folder_in_memory_is_warned_of_by_the_plan() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return skip("there is no /dev/shm") };
    let shop = Workshop::new();
    let folder = format!("compute.offload_dir={}", memory.path().display());
    let settings = ["plan", "dpo.toml", "--set", "compute.offload=nvme", "--set", &folder];
    shop.run(&settings).expect(0).says(&["is a folder in memory, so offloaded tensors would stay in memory"]);
}

/// `plan.json` is what `tandem plan --json` had said of the first rank, and the configuration that a run saves has the same plan.
#[test]
fn what_runs_is_what_was_planned() {
    let shop = Workshop::new();
    for (ranks, settings) in [
        (1, &["reference.kind=model", "compute.checkpointing=block"][..]),
        (1, &["adapter.rank=4", "reference.kind=base", "compute.format=nf4"]),
        (2, &["reference.kind=model", "train.optimizer_state=8bit"]),
        (2, &["adapter.kind=dora", "compute.format=int8"]),
    ] {
        let devices = format!("compute.devices=cpu:{ranks}");
        let mut changed = vec!["dpo.toml", "--set", &devices];
        changed.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let told = shop.run(&[&["plan", "--json"], &changed[..]].concat()).expect(0).stdout;
        shop.run(&[&["train", "--overwrite"], &changed[..]].concat()).expect(0);
        let json = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(json(&shop.read("run/plan.json")), json(&told)["ranks"][0]["plan"], "{settings:?}");
        fs::copy(shop.path("run/config.toml"), shop.path("saved.toml")).unwrap();
        let again = shop.run(&["plan", "--json", "saved.toml"]).expect(0).stdout;
        assert_eq!(json(&again), json(&told), "{settings:?}");
    }
}

/// Nothing but config.json is there, as before a download.
#[test]
fn a_model_without_weights_or_rows_is_planned_from_its_config() {
    let shop = Workshop::new();
    std::fs::create_dir(shop.path("bare")).unwrap();
    shop.write("bare/config.json", &shop.read("model/config.json"));
    let plan = |more: &[&str]| {
        let wanted = ["plan", "--model", "bare", "--devices", "2xA10", "--json"];
        let text = shop.run(&[&wanted[..], more].concat()).expect(0).stdout;
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let (full, adapter) = (plan(&[]), plan(&["--train", "qlora"]));
    assert_ne!(full, adapter);
    let sft = plan(&["--method", "sft", "--assume-tokens", "512", "--set", "compute.sharding=zero2"]);
    assert_ne!(full, sft);
    for method in ["kto", "reward", "online", "grpo", "distill"] {
        assert_ne!(full, plan(&["--method", method]), "{method}");
    }
    let tight = ["plan", "--model", "bare", "--memory", "1MiB"];
    shop.run(&tight).expect(2);
    shop.run(&["plan", "--model", "nowhere"]).expect(2).says(&["nowhere: no such model folder"]);
    shop.run(&["plan", "--model", "bare", "run.toml"]).expect(2).says(&["cannot be used with"]);
    shop.run(&["plan", "run.toml", "--method", "sft"]).expect(2).says(&["--method", "cannot be used with"]);
    shop.run(&["plan"]).expect(2).says(&["RUN.TOML"]);
    assert!(!shop.path("runs").exists());
}
