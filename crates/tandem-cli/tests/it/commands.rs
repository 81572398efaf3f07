//! Commands that succeed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use crate::workshop::{Workshop, entries};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tandem_model::{Adapter, AdapterConfig, AdapterKind, Decoder, ModelFolder, Targets, adapter};

#[test]
fn train_writes_the_run_folder_and_a_line_per_step() {
    let shop = Workshop::new();
    let outcome = shop.run(&["train", "dpo.toml"]).expect(0);
    for step in 1..=6 {
        assert!(outcome.stderr.contains(&format!("step {step}/6")), "{}", outcome.stderr);
    }
    assert!(outcome.stderr.contains("margin") && outcome.stderr.contains("tokens/s"), "{}", outcome.stderr);
    let found = entries(&shop.path("run"));
    for name in ["checkpoints", "config.toml", "final", "log.txt", "metrics.jsonl", "plan.json"] {
        assert!(found.iter().any(|entry| entry == name), "no {name} among {found:?}");
    }
    // The lines that were shown, from the first to the last.
    let log = fs::read_to_string(shop.path("run/log.txt")).unwrap();
    assert!(outcome.stderr.contains(&log), "{log}\nis no part of\n{}", outcome.stderr);
    assert!(
        log.contains("rows read") && log.contains("step 6/6") && log.contains("the model is in"),
        "{log}"
    );
    assert_eq!(shop.metrics("run").iter().filter(|line| line["split"] == "train").count(), 6);
    let first = shop.metrics("run")[0]["loss"].as_f64().unwrap();
    assert!((first - std::f64::consts::LN_2).abs() < 1e-5, "the first loss is ln 2, not {first}");
}

/// Accuracy is 100 % and the loss nothing; what spoils the model is in other metrics.
#[test]
fn a_run_that_spoils_its_model_says_so_and_names_the_keys() {
    let shop = Workshop::new();
    let spoil =
        ["--set", "train.learning_rate=5", "--set", "train.steps=16", "--set", "train.warmup_steps=0"];
    let outcome = shop.run(&[&["train", "dpo.toml"][..], &spoil].concat()).expect(0);
    let [during, after] =
        outcome.stderr.split("look at its answers before you use the model:").collect::<Vec<_>>()[..]
    else {
        panic!("no trouble is repeated at the end: {}", outcome.stderr)
    };
    assert!(
        during.contains("warning: after step ") && during.contains("train.learning_rate (now 5e0)"),
        "{during}"
    );
    assert!(after.contains("\nwarning: * "), "{after}");
    // What was said is not said again.
    let resumed =
        ["train", "dpo.toml", "--resume", "--set", "train.learning_rate=5", "--set", "train.steps=16"];
    let again = shop.run(&[&resumed[..], &["--set", "train.warmup_steps=0"]].concat()).expect(0);
    assert!(!again.stderr.contains("warning: after step"), "{}", again.stderr);
    // The list at the end is that of the whole run.
    let list = |text: &str| text.lines().filter(|line| line.starts_with("warning: * ")).count();
    assert_eq!(list(&again.stderr), list(after), "{}", again.stderr);
    let log = fs::read_to_string(shop.path("run/log.txt")).unwrap();
    assert!(log.contains("warning: after step") && log.contains("continuing after step 16"), "{log}");
    let well = shop.run(&["train", "dpo.toml", "--overwrite"]).expect(0);
    assert!(!well.stderr.contains("warning: after step"), "{}", well.stderr);
}

#[test]
fn runs_are_listed_with_what_differs_between_them() {
    let shop = Workshop::new();
    shop.run(&["runs"]).expect(2).says(&["runs: no such folder"]);
    shop.run(&["runs", "model"]).expect(2).says(&["no run in model"]);
    shop.run(&["train", "dpo.toml", "--set", "output=runs/a"]).expect(0);
    let other =
        ["--set", "output=runs/deep/b", "--set", "train.learning_rate=3e-5", "--set", "train.steps=2"];
    shop.run(&[&["train", "dpo.toml"][..], &other].concat()).expect(0);
    let table = shop.run(&["runs"]).expect(0).stdout;
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..3], ["runs/a", "dpo", "6"], "{table}");
    assert_eq!(lines[2][..3], ["runs/deep/b", "dpo", "2"], "{table}");
    assert!(
        lines.iter().any(|line| line.first() == Some(&"train.learning_rate") && line[2] == "0.00003"),
        "{table}"
    );
    assert!(!table.contains("output") && !table.contains("objective.beta"), "{table}");
    let lines = shop.run(&["runs", "--json", "runs/deep"]).expect(0).stdout;
    let run: serde_json::Value = serde_json::from_str(lines.trim()).unwrap();
    assert_eq!((&run["finished"], &run["train"]["step"]), (&json!(true), &json!(2)));
    // A run that cannot be read hides no other.
    shop.write("runs/a/config.toml", "method = ");
    let outcome = shop.run(&["runs"]).expect(2).says(&["runs/a/config.toml"]);
    assert!(outcome.stdout.contains("runs/deep/b"), "{}", outcome.stdout);
}

#[test]
fn the_final_folder_is_a_model_that_every_command_takes() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    let found = entries(&shop.path("run/final"));
    for name in
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    {
        assert!(found.iter().any(|entry| entry == name), "no {name} among {found:?}");
    }
    let ask = |model: &str| shop.run(&["generate", model, "Count to 3:", "--raw", "--max-new-tokens", "4"]);
    assert_eq!(ask("run/final").expect(0).stdout, ask("run").expect(0).stdout, "a run's folder is its model");
    let again =
        ["train", "dpo.toml", "--set", "model=run/final", "--set", "output=second", "--set", "train.steps=1"];
    shop.run(&again).expect(0);
}

#[test]
fn the_saved_configuration_is_itself_a_run() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    fs::copy(shop.path("run/config.toml"), shop.path("copy.toml")).unwrap();
    shop.run(&["train", "copy.toml", "--set", "output=second"]).expect(0);
    assert_eq!(shop.metrics("run"), shop.metrics("second"));
}

#[test]
fn sft_trains_and_continues_into_dpo() {
    let shop = Workshop::new();
    shop.write_rows("sft.jsonl", 16, |i| {
        json!({"messages": [
            {"role": "user", "content": format!("Say {i}")},
            {"role": "assistant", "content": format!("{i} it is")},
        ]})
    });
    let sft = shop.dpo_toml("sft").replace("\"dpo\"", "\"sft\"").replace("preferences.jsonl", "sft.jsonl");
    shop.write("sft.toml", &sft);
    shop.run(&["train", "sft.toml"]).expect(0);
    shop.run(&["train", "dpo.toml", "--set", "model=sft/final"]).expect(0);
}

/// Scores that other instructions left are not the policy's: its first margin would be the difference of roundings.
#[test]
fn a_precomputed_reference_is_kept_by_the_instructions_that_computed_it() {
    let shop = Workshop::new();
    for isa in ["portable", "highest"] {
        let mut train = shop.command(&["train", "dpo.toml", "--set", "compute.dtype=bf16", "--overwrite"]);
        if isa == "portable" {
            train.env("TANDEM_ISA", isa);
        }
        assert!(train.output().unwrap().status.success(), "{isa}");
        assert_eq!(shop.metrics("run")[0]["rewards/margins"], 0.0, "{isa}");
    }
}

#[test]
fn eval_prints_the_metrics_of_the_held_out_rows() {
    let shop = Workshop::new();
    let outcome = shop.run(&["eval", "dpo.toml", "--set", "data.eval=preferences.jsonl"]).expect(0);
    let metrics: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("one JSON object");
    let loss = metrics["loss"].as_f64().unwrap();
    assert!((loss - std::f64::consts::LN_2).abs() < 1e-5, "{loss}");
    shop.run(&["eval", "dpo.toml"]).expect(2).says(&["data.eval"]);
}

#[test]
fn an_online_run_shows_scores_and_has_nothing_to_evaluate_on() {
    let shop = Workshop::new();
    shop.write_online("run");
    shop.run(&["train", "online.toml"]).expect(0).says(&["step 6/6  score ", "  length "]);
    shop.run(&["eval", "online.toml"]).expect(2).says(&["tandem eval --judge"]);
    let plan = shop.run(&["plan", "online.toml"]).expect(0).stdout;
    assert!(plan.contains("generate") && plan.contains("kv cache"), "{plan}");
    let rows = shop.run(&["data", "online.toml", "--rows", "1"]).expect(0).stdout;
    assert!(rows.contains("12 rows read, 12 kept") && rows.contains("  prompt "), "{rows}");
}

#[test]
fn plan_says_what_it_needs_and_writes_nothing() {
    let shop = Workshop::new();
    let outcome = shop.run(&["plan", "dpo.toml"]).expect(0);
    assert!(
        outcome.stdout.contains("optimizer") || outcome.stdout.contains("optimiser"),
        "{}",
        outcome.stdout
    );
    assert!(!shop.path("run").exists());
}

#[test]
fn data_shows_rows_with_the_scored_tokens_marked() {
    let shop = Workshop::new();
    let outcome = shop.run(&["data", "dpo.toml", "--rows", "2"]).expect(0);
    assert!(outcome.stdout.contains("24 rows read, 24 kept"), "{}", outcome.stdout);
    assert!(
        outcome.stdout.contains("preferences.jsonl:2") && !outcome.stdout.contains("preferences.jsonl:3"),
        "{}",
        outcome.stdout
    );
    assert!(!outcome.stdout.contains('\u{1b}'), "colour went into a pipe:\n{}", outcome.stdout);
}

#[test]
fn generate_takes_several_prompts_and_is_repeatable() {
    let shop = Workshop::new();
    let sample = [
        "generate",
        "model",
        "one",
        "two",
        "three",
        "--temperature",
        "1",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--seed",
        "5",
        "--max-new-tokens",
        "8",
    ];
    let first = shop.run(&sample).expect(0);
    assert_eq!(first.stdout, shop.run(&sample).expect(0).stdout);
    let other = shop
        .run(&[&sample[..sample.len() - 4], &["--seed", "6", "--max-new-tokens", "8"]].concat())
        .expect(0);
    assert_ne!(first.stdout, other.stdout, "the seed has no effect");
}

#[test]
fn options_that_have_no_effect_or_contradict_another_are_refused() {
    let shop = Workshop::new();
    for option in ["--top-k=5", "--top-p=0.9", "--min-p=0.1", "--seed=5"] {
        let name = option.split_once('=').unwrap().0;
        let expected = format!("{name} has no effect at temperature 0");
        shop.run(&["generate", "model", "one", option]).expect(2).says(&[&expected]);
        shop.run(&["generate", "model", "one", option, "--temperature", "0"]).expect(2).says(&[&expected]);
    }
    shop.run(&["launch", "-n", "2", "--ssh", "rsh", "train", "dpo.toml"]).expect(2).says(&["--hosts"]);
    for command in ["train", "plan"] {
        let limits = [command, "dpo.toml", "--memory", "5GiB", "--set", "compute.memory=1KiB"];
        shop.run(&limits)
            .expect(2)
            .says(&["--memory 5GiB and --set compute.memory=1KiB give `compute.memory` two values"]);
    }
    shop.run(&["plan", "dpo.toml", "--memory", "5GiB", "--set", "compute.memory = \"5GiB\""]).expect(0);
}

#[test]
fn a_prompt_generates_the_same_alone_and_among_others() {
    let shop = Workshop::new();
    let greedy = |prompts: &[&str]| {
        let arguments = [&["generate", "model", "--raw", "--max-new-tokens", "6"], prompts].concat();
        shop.run(&arguments).expect(0).stdout
    };
    let (alone, together) = (greedy(&["the quick"]), greedy(&["over the lazy brown dog", "the quick"]));
    let answer = alone.trim_end();
    assert!(!answer.is_empty() && together.contains(answer), "alone:\n{alone}\ntogether:\n{together}");
}

#[test]
fn generate_reads_prompts_from_standard_input() {
    let shop = Workshop::new();
    let mut command = shop.command(&["generate", "model", "--raw", "--max-new-tokens", "3"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"the quick\n\nbrown fox\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let argued = shop.run(&["generate", "model", "the quick", "brown fox", "--raw", "--max-new-tokens", "3"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), argued.stdout);
}

/// Completions are printed while others are generated, so Ctrl-C loses those in progress alone.
#[test]
fn generate_prints_what_is_finished_before_it_is_stopped() {
    let shop = Workshop::new();
    let prompts: String = (0..20_000).map(|i| format!("the quick {i}\n")).collect();
    std::fs::write(shop.path("prompts.txt"), &prompts).unwrap();
    let mut command = shop.command(&["generate", "model", "--raw", "--json", "--max-new-tokens", "40"]);
    let file = std::fs::File::open(shop.path("prompts.txt")).unwrap();
    let mut child = command.stdin(file).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next().expect("a completion").unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.len() < 10_000, "it went on");
    let number = |line: &String| -> usize {
        let answer: serde_json::Value = serde_json::from_str(line).unwrap();
        answer["prompt"].as_str().unwrap().strip_prefix("the quick ").unwrap().parse().unwrap()
    };
    let numbers: Vec<usize> = std::iter::once(&first).chain(&rest).map(number).collect();
    assert!(
        numbers[0] == 0 && numbers.is_sorted_by(|a, b| a < b),
        "not in the order of prompts: {numbers:?}"
    );
}

#[test]
fn init_depends_on_the_seed_and_on_nothing_else() {
    let shop = Workshop::new();
    shop.run(&["init-weights", "source/config.json", "again", "--seed", "3"]).expect(0);
    assert!(shop.bytes("model/model.safetensors") == shop.bytes("again/model.safetensors"));
    shop.run(&["init-weights", "source", "other", "--seed", "4"]).expect(0);
    assert!(shop.bytes("model/model.safetensors") != shop.bytes("other/model.safetensors"));
    shop.run(&["init-weights", "source", "model"]).expect(2).says(&["model", "already"]);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let shop = Workshop::new();
    let mut command = shop.command(&["data", "dpo.toml", "--rows", "24"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// An adapter of `model` in `folder`, none of whose factors is zero.
fn write_adapter(shop: &Workshop, model: &str, folder: &str) {
    let base = ModelFolder::open(&shop.path(model)).unwrap();
    let config = AdapterConfig {
        kind: AdapterKind::Lora,
        rank: 4,
        alpha: 64.0,
        rank_stabilized: false,
        dropout: 0.0,
        targets: Targets::AllLinear,
        modules_to_save: Vec::new(),
        file: None,
    };
    let adapter = Adapter::new(config, base.spec()).unwrap();
    let decoder = Decoder::new(base.spec().clone(), 1).unwrap().with_adapter(adapter);
    let write = &mut |layer, flat: &mut [f32]| {
        adapter::init_layer(&decoder, layer, 5, flat);
        for param in &decoder.trained(layer).params {
            let values = flat[param.range()].iter_mut().enumerate();
            values.filter(|(_, value)| **value == 0.0).for_each(|(i, value)| *value = (i as f32).sin());
        }
        Ok(())
    };
    adapter::save_adapter(&shop.path(folder), &base, &decoder, write).unwrap();
}

#[test]
fn a_merged_model_answers_as_model_and_adapter() {
    let shop = Workshop::new();
    write_adapter(&shop, "model", "adapter");
    let ask = |arguments: &[&str]| {
        let tail = ["Count to 3:", "--raw", "--max-new-tokens", "12"];
        shop.run(&[&["generate"], arguments, &tail].concat()).expect(0).stdout
    };
    shop.run(&["merge", "adapter", "merged"]).expect(0).says(&[]);
    let answer = ask(&["merged"]);
    assert_eq!(answer, ask(&["model", "--adapter", "adapter"]));
    // An adapter's folder names its base model.
    assert_eq!(answer, ask(&["adapter"]));
    let twice = ["generate", "adapter", "--adapter", "adapter", "Count:", "--raw"];
    shop.run(&twice).expect(2).says(&["adapter is an adapter's folder, and so is --adapter adapter"]);
    assert_ne!(answer, ask(&["model"]));
    shop.run(&["merge", "adapter", "half", "--base", "model", "--dtype", "bf16"]).expect(0);
    let size = |name: &str| shop.bytes(&format!("{name}/model.safetensors")).len();
    assert!(size("half") * 100 < size("merged") * 55, "{} of {}", size("half"), size("merged"));
    assert!(entries(&shop.path("half")).contains(&"tokenizer.json".to_owned()));
}

#[test]
fn an_adapters_chat_template_is_used_and_merged() {
    let shop = Workshop::new();
    write_adapter(&shop, "model", "adapter");
    let ask = |arguments: &[&str]| {
        shop.run(&[&["generate"], arguments, &["--max-new-tokens", "12"]].concat()).expect(0).stdout
    };
    let raw = ask(&["adapter", "Count: up", "--raw"]);
    shop.write("adapter/chat_template.jinja", "Count: {{ messages[0].content }}");
    assert_eq!(ask(&["adapter", "up"]), raw);
    assert_eq!(ask(&["model", "--adapter", "adapter", "up"]), raw);
    shop.run(&["merge", "adapter", "merged"]).expect(0);
    assert_eq!(shop.read("merged/chat_template.jinja"), "Count: {{ messages[0].content }}");
    assert_eq!(ask(&["merged", "up"]), raw);
    // A tokenizer of other tokens does not belong to the base.
    let tokenizer = shop.read("model/tokenizer.json");
    let tokens: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let token = tokens["added_tokens"][0]["content"].as_str().unwrap();
    shop.write("adapter/tokenizer.json", &tokenizer.replace(token, "<|other|>"));
    for command in [&["generate", "adapter", "up"][..], &["merge", "adapter", "again"], &["chat", "adapter"]]
    {
        let said = ["adapter/tokenizer.json", "is \"<|other|>\"", "in the base model"];
        shop.run(command).expect(2).says(&said);
    }
}

#[test]
fn the_quickstart_changes_nothing_of_the_users_own() {
    let shop = Workshop::new();
    let own = [("own/data/mine.txt", "precious"), ("own/model/x", "y"), ("own/sft.toml", "z")];
    ["own/data", "own/model"].iter().for_each(|folder| fs::create_dir_all(shop.path(folder)).unwrap());
    own.iter().for_each(|(file, text)| shop.write(file, text));
    shop.run(&["quickstart", "--prepare-only", "--output", "own"])
        .expect(2)
        .says(&["own is not empty", "--output"]);
    assert!(own.iter().all(|(file, text)| shop.read(file) == *text) && !shop.path("own/dpo.toml").exists());
    for _ in 0..2 {
        shop.run(&["quickstart", "--prepare-only", "--output", "quick"]).expect(0);
        fs::create_dir_all(shop.path("quick/sft")).unwrap();
        shop.write("quick/sft/notes.txt", "mine");
    }
    assert_eq!(shop.read("quick/sft/notes.txt"), "mine");
}

#[test]
fn merge_says_what_it_lacks() {
    let shop = Workshop::new();
    write_adapter(&shop, "model", "adapter");
    shop.run(&["merge", "adapter", "model"]).expect(2).says(&["model already exists"]);
    shop.run(&["merge", "model", "merged"]).expect(2).says(&["model", "holds no adapter_config.json"]);
    let mut config: serde_json::Value =
        serde_json::from_str(&shop.read("adapter/adapter_config.json")).unwrap();
    config["base_model_name_or_path"] = "somebody/base".into();
    shop.write("adapter/adapter_config.json", &config.to_string());
    shop.run(&["merge", "adapter", "merged"]).expect(2).says(&["somebody/base", "--base"]);
    let lost = shop.run(&["generate", "adapter", "Count:", "--raw"]).expect(2);
    lost.says(&[
        "adapter is an adapter's folder",
        "--adapter adapter takes another base model",
        "somebody/base",
    ]);
    shop.run(&["merge", "adapter", "merged", "--base", "nowhere"]).expect(2).says(&["nowhere"]);
    shop.run(&["merge", "adapter", "merged", "--base", "model"]).expect(0);
    // The key of the file, not that of a run.
    config["target_modules"] = r".*\.0\..*q_proj".into();
    shop.write("adapter/adapter_config.json", &config.to_string());
    let part = shop.run(&["merge", "adapter", "part", "--base", "model"]).expect(2);
    assert!(part.stderr.contains("adapter_config.json: target_modules: "), "{}", part.stderr);
    fs::create_dir(shop.path("tree")).unwrap();
    fs::rename(shop.path("adapter"), shop.path("tree/ref")).unwrap();
    shop.run(&["merge", "tree", "other", "--base", "model"]).expect(2).says(&["ref; name one"]);
    assert!(!shop.path("other").exists());
}

#[test]
fn export_writes_a_policy_pt_once() {
    let shop = Workshop::new();
    shop.run(&["export", "model", "--to", "policy.pt"]).expect(0);
    assert!(shop.bytes("policy.pt").starts_with(b"PK"));
    shop.run(&["export", "model", "--to", "policy.pt"]).expect(2).says(&["policy.pt already exists"]);
    shop.run(&["export", "model", "--to", "model.onnx"]).expect(2).says(&["model.onnx", "policy.pt"]);
    shop.run(&["export", "model", "--to", "half.pt", "--dtype", "bf16"]).expect(0);
    assert!(shop.bytes("half.pt").len() * 100 < shop.bytes("policy.pt").len() * 55);
    write_adapter(&shop, "model", "adapter");
    shop.run(&["export", "adapter", "--to", "adapter.pt"]).expect(2).says(&["adapter", "tandem merge"]);
    fs::create_dir(shop.path("run")).unwrap();
    fs::rename(shop.path("model"), shop.path("run/final")).unwrap();
    shop.run(&["export", "run", "--to", "again.pt"]).expect(0);
    assert!(shop.bytes("again.pt") == shop.bytes("policy.pt"));
    assert!(!shop.path("adapter.pt").exists() && !shop.path("model.onnx").exists());
}

#[test]
fn doctor_has_a_line_for_each_library_there_or_not() {
    let shop = Workshop::new();
    let output = shop.command(&["doctor"]).env("TANDEM_NCCL", "/nowhere/libnccl.so.2").output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for (library, package) in [
        ("driver", "NVIDIA's driver"),
        ("NVML", "NVIDIA's driver"),
        ("NVRTC", "nvidia-cuda-nvrtc"),
        ("cuBLASLt", "nvidia-cublas"),
        ("NCCL", "libnccl2"),
    ] {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(&format!("{library:<10} ")));
        let line = lines.next().unwrap_or_else(|| panic!("no line for {library}:\n{text}"));
        assert_eq!(lines.next(), None, "{text}");
        let is_found = !line.starts_with("missing: ") && line.contains(", ");
        assert!(is_found || line.contains(package), "{library}: {line}");
        assert!(library != "NCCL" || line.starts_with("missing: TANDEM_NCCL names /nowhere"), "{line}");
    }
    for other in ["CPU", "Processes"] {
        assert_eq!(text.lines().filter(|line| line.starts_with(other)).count(), 1, "{text}");
    }
}

#[test]
fn completions_and_manual_pages_know_every_subcommand() {
    let shop = Workshop::new();
    let subcommands = ["train", "plan", "init-weights", "launch", "man"];
    for shell in ["bash", "fish", "zsh"] {
        let script = shop.run(&["completions", shell]).expect(0).stdout;
        assert!(subcommands.iter().all(|name| script.contains(name)), "{shell}: {script}");
    }
    shop.run(&["man", "share/man1"]).expect(0);
    let pages = entries(&shop.path("share/man1"));
    for name in subcommands {
        assert!(pages.contains(&format!("tandem-{name}.1")), "{pages:?}");
    }
    let page = fs::read_to_string(shop.path("share/man1/tandem.1")).unwrap();
    assert!(page.contains("Exit codes") && page.contains("stopped by SIGTERM after saving"), "{page}");
}
