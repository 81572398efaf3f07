//! Messages on stderr, results as JSON, checkpoints as models, and a checkpoint on demand.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::workshop::{Workshop, entries};

fn objects(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn a_run_tells_a_program_everything_on_stdout_and_a_quiet_one_says_nothing() {
    let shop = Workshop::new();
    let outcome = shop
        .run(&["train", "dpo.toml", "--json", "--quiet", "--set", "data.eval=preferences.jsonl"])
        .expect(0);
    assert_eq!(outcome.stderr, "");
    let events = objects(&outcome.stdout);
    let kinds: Vec<_> = events.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    let count = |kind: &str| kinds.iter().filter(|other| **other == kind).count();
    assert_eq!((kinds[0], kinds[1], *kinds.last().unwrap()), ("plan", "started", "finished"), "{kinds:?}");
    assert_eq!((count("record"), count("saved"), count("samples")), (8, 3, 2), "{kinds:?}");
    let model = events.last().unwrap()["model"].as_str().unwrap();
    assert!(model.ends_with("run/final"), "{model}");
    // The lines that nobody saw are in the folder all the same.
    let log = shop.read("run/log.txt");
    assert!(log.contains("step 6/6") && log.contains("next: tandem chat"), "{log}");
}

#[test]
fn messages_are_objects_where_a_program_reads_them() {
    let shop = Workshop::new();
    let outcome = shop.run(&["--log-format", "json", "train", "dpo.toml"]).expect(0);
    let lines = objects(&outcome.stderr);
    let step = lines.iter().find(|line| line["metrics"]["step"] == 3).expect("the third step");
    assert_eq!((step["level"].as_str(), step["rank"].as_u64()), (Some("info"), None));
    assert!(step["message"].as_str().unwrap().starts_with("step 3/6  loss "), "{step}");
    let launched = ["launch", "-n", "2", "--log-format", "json", "train", "dpo.toml", "--overwrite"];
    let outcome = shop.run(&launched).expect(0);
    let ranks: Vec<_> = objects(&outcome.stderr).iter().filter_map(|line| line["rank"].as_u64()).collect();
    assert!(ranks.contains(&0), "{}", outcome.stderr);
    let error = shop.run(&["--log-format", "json", "train", "nowhere.toml"]).expect(2).stderr;
    assert_eq!(objects(&error)[0]["level"], "error");
}

#[test]
fn a_verbose_command_says_what_it_found() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "-v"])
        .expect(0)
        .says(&["debug: train tokens made: 24 rows", "debug: rank 0: arena"]);
    shop.run(&["train", "dpo.toml", "-v", "--overwrite"]).expect(0).says(&["debug: train tokens found"]);
    shop.run(&["train", "dpo.toml", "-v", "-q"]).expect(2);
}

#[test]
fn commands_print_json() {
    let shop = Workshop::new();
    let rows = objects(&shop.run(&["data", "dpo.toml", "--json", "-n", "2", "-q"]).expect(0).stdout);
    assert_eq!(rows.len(), 2);
    assert!(rows[1]["prompt"]["text"].as_str().unwrap().ends_with("Count to 1:"), "{}", rows[1]);
    let ids = rows[1]["rejected"]["tokens"].as_array().unwrap();
    assert!(!ids.is_empty() && rows[1]["place"].as_str().unwrap().ends_with("preferences.jsonl:2"));
    let generated =
        shop.run(&["generate", "model", "Count", "Say", "--json", "--max-new-tokens", "4"]).expect(0);
    let generated = objects(&generated.stdout);
    assert_eq!((generated.len(), generated[0]["prompt"].as_str()), (2, Some("Count")));
    assert!(generated[1]["tokens"].as_u64().unwrap() <= 4 && generated[1]["ended"].is_boolean());
    let machine = objects(&shop.run(&["doctor", "--json"]).expect(0).stdout);
    let findings = machine[0]["findings"].as_array().unwrap();
    assert_eq!((findings[0]["what"].as_str(), findings[0]["works"].as_bool()), (Some("CPU"), Some(true)));
}

/// The base of an adapter is found by the name in it.
#[test]
fn a_checkpoint_is_a_model() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    shop.run(&["train", "dpo.toml", "--set", "output=adapted", "--set", "adapter={rank=2}"]).expect(0);
    let ask = |model: &str| {
        shop.run(&["generate", model, "Count to 3:", "--raw", "--max-new-tokens", "6"]).expect(0).stdout
    };
    for run in ["run", "adapted"] {
        let checkpoint = format!("{run}/checkpoints/step-000006");
        assert_eq!(ask(&checkpoint), ask(&format!("{run}/final")), "{run}");
        assert!(entries(&shop.path(&checkpoint)).contains(&"model".to_owned()));
        let out = format!("{run}-exported");
        shop.run(&["checkpoint", "export", &checkpoint, "--out", &out]).expect(0);
        assert_eq!(ask(&out), ask(run), "{run}");
    }
    // A checkpoint with a model in it is resumed from, and pruned, as any other.
    shop.run(&["train", "dpo.toml", "--resume", "--set", "train.steps=10"]).expect(0);
    let left = entries(&shop.path("run/checkpoints"));
    assert_eq!(left, ["step-000008", "step-000010"]);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let shop = Workshop::new();
    let export = |checkpoint: &str, more: &[&str]| {
        shop.run(&[&["checkpoint", "export", checkpoint, "--out", "out"], more].concat())
    };
    export("model", &[]).expect(2).says(&["model is no checkpoint", "manifest.json"]);
    shop.run(&["train", "dpo.toml"]).expect(0);
    std::fs::rename(shop.path("run/checkpoints/step-000006"), shop.path("moved")).unwrap();
    export("moved", &[]).expect(2).says(&["--config"]);
    export("moved", &["--config", "run/config.toml"]).expect(0);
    export("moved", &["--config", "run/config.toml"]).expect(2).says(&["already exists"]);
    let damaged = shop.path("moved/state-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    std::fs::remove_dir_all(shop.path("out")).unwrap();
    shop.run(&["checkpoint", "export", "moved", "--out", "out", "--config", "run/config.toml"])
        .expect(2)
        .says(&["moved cannot be used"]);
    assert!(!shop.path("out").exists());
    // A run that has not ended has no model yet.
    std::fs::remove_dir_all(shop.path("run/final")).unwrap();
    shop.run(&["generate", "run", "x"]).expect(2).says(&["has not ended", "run/checkpoints"]);
}

#[test]
fn a_signal_asks_for_a_checkpoint_and_the_run_goes_on() {
    for launcher in [&[][..], &["launch", "-n", "2"]] {
        let shop = Workshop::new();
        let train = ["train", "dpo.toml", "--set", "train.steps=2000", "--set", "train.save_every=0"];
        let mut child = shop.start(&[launcher, &train].concat());
        let began = Instant::now();
        let is_there = |name: &str| shop.path("run").join(name).exists();
        let lines = |name: &str| {
            std::fs::read_to_string(shop.path("run").join(name)).map_or(0, |t| t.lines().count())
        };
        while lines("metrics.jsonl") < 3 {
            assert!(began.elapsed() < Duration::from_secs(600) && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(2));
        }
        let status = Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap();
        assert!(status.success());
        let saved = || is_there("checkpoints") && !entries(&shop.path("run/checkpoints")).is_empty();
        while !saved() && !is_there("final") {
            assert!(began.elapsed() < Duration::from_secs(600));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(!is_there("final"), "the run was over before it saved");
        let before = lines("metrics.jsonl");
        while lines("metrics.jsonl") <= before {
            assert!(child.try_wait().unwrap().is_none(), "the run ended");
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn host_memory_is_part_of_what_fits() {
    let shop = Workshop::new();
    let plan = |more: &[&str]| {
        let wanted = ["plan", "--model", "source", "--devices", "2xA10", "--set", "compute.offload=host"];
        shop.run(&[&wanted[..], more].concat())
    };
    let unknown = plan(&[]).expect(0).stdout;
    assert!(unknown.contains("host memory of 2 ranks on a machine: "), "{unknown}");
    assert!(plan(&["--host-memory", "64GiB"]).expect(0).stdout.contains("it fits: "));
    let little = plan(&["--host-memory", "1MiB"]).expect(2).stdout;
    assert!(little.contains("it does not fit: host memory of 2 ranks"), "{little}");
    let json: Value =
        serde_json::from_str(&plan(&["--host-memory", "1MiB", "--json"]).expect(2).stdout).unwrap();
    assert_eq!((json["fits"].as_bool(), json["host"]["fits"].as_bool()), (Some(false), Some(false)));
    plan(&["--host-memory", "much"]).expect(2).says(&["256GiB"]);
}
