//! A run computed again elsewhere has the same bits, and what differs is named.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_train::config::Config;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::verify::{CheckpointVerdict, ModelVerdict, RecordedRun, Request, Verdict};
use tandem_train::{Result, TrainError};

use super::ranks::held_out;
use crate::small::Small;

const THREAD: &str = "compute.threads=1";

/// Computes steps of a run again, with overrides as `tandem verify --set` takes them.
fn verify(small: &Small, name: &str, steps: (u64, u64), overrides: &[&str]) -> Result<Verdict> {
    ask(small, name, steps, overrides, |_| {})
}

fn ask(
    small: &Small,
    name: &str,
    (from, to): (u64, u64),
    overrides: &[&str],
    change: impl FnOnce(&mut Request),
) -> Result<Verdict> {
    let scratch = small.path("scratch");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).expect("removed");
    }
    let run = RecordedRun::open(&small.path(name))?;
    let stretch = run.stretch(Some(from), Some(to))?;
    let text = run.start(stretch).config.file_text();
    let config = Config::from_text(&text, Path::new("record")).map_err(TrainError::from)?;
    let config = config.with(overrides).map_err(TrainError::from)?;
    let key = |text: &&str| text.split_once('=').expect("key=value").0.to_owned();
    let mut request = Request {
        scratch,
        keeps_checkpoints: false,
        overridden: overrides.iter().map(key).collect(),
        force: false,
        runs_commands: false,
    };
    change(&mut request);
    let stop = AtomicBool::new(false);
    Ok(run.recompute(stretch, config, &request, &mut Silent, &stop)?.expect("nobody stops it"))
}

#[track_caller]
fn assert_same(verdict: &Verdict, steps: u64, checkpoints: &[u64]) {
    assert!(verdict.is_same(), "{verdict:?}");
    assert_eq!(verdict.num_steps, steps, "{verdict:?}");
    let compared: Vec<u64> = verdict.checkpoints.iter().map(|checkpoint| checkpoint.step).collect();
    assert_eq!(compared, checkpoints);
    for checkpoint in &verdict.checkpoints {
        assert_eq!(checkpoint.recorded, Some(checkpoint.state), "the run has recorded its hash");
    }
}

/// Content of every file of a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            found.extend(files(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else {
            found.insert(name, fs::read(&path).expect("readable"));
        }
    }
    found
}

fn refusal(verdict: Result<Verdict>) -> String {
    let error = verdict.expect_err("it cannot be compared");
    assert_eq!(error.exit_code(), 2, "{error}");
    tandem_train::chain(&error)
}

#[test]
fn a_run_has_the_same_bits_on_other_ranks_shardings_and_threads_and_stays_as_it_is() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_conv.jsonl");
    let all = [eval.as_str(), "reference.kind=model", "train.eval_every=2", "train.keep=0"];
    small.finish("run", RunDirPolicy::Fresh, &all);
    let before = files(&small.path("run"));
    assert!(before.contains_key("provenance.json") && before.contains_key("states.jsonl"));
    let two = ["compute.devices=cpu:2", "compute.sharding=zero3", THREAD];
    let verdict = verify(&small, "run", (0, 6), &two).unwrap_or_else(|e| panic!("{e}"));
    assert_same(&verdict, 6, &[2, 4, 6]);
    assert_eq!((verdict.ranks, verdict.num_evaluations), (2, 4));
    assert!(verdict.num_metrics > 10 && verdict.notes.is_empty(), "{verdict:?}");
    let three = ["compute.devices=cpu:3", "compute.sharding=zero1", "compute.threads=2"];
    assert_same(&verify(&small, "run", (2, 4), &three).unwrap_or_else(|e| panic!("{e}")), 2, &[4]);
    assert_same(&verify(&small, "run", (4, 6), &[]).unwrap_or_else(|e| panic!("{e}")), 2, &[6]);
    assert!(files(&small.path("run")) == before, "the run's folder was changed");
}

#[test]
fn runs_of_every_kind_have_the_same_bits_again() {
    let adapter = "adapter={ rank = 4, targets = \"all-linear\" }";
    for (method, overrides, here) in [
        ("sft", &["train.ema_decay=0.9", "compute.devices=cpu:2", "compute.sharding=zero2"][..], &[][..]),
        ("dpo", &[adapter][..], &["compute.devices=cpu:2"][..]),
        (
            "dpo",
            &[adapter, "compute.format=nf4", "reference.kind=sync", "train.optimizer_state=8bit"][..],
            &["compute.threads=1"][..],
        ),
        ("kto", &["train.optimizer=adafactor"][..], &["compute.devices=cpu:2", "compute.sharding=zero3"][..]),
        ("online", &["train.steps=4"][..], &["compute.devices=cpu:2"][..]),
        (
            "online",
            &["train.steps=4", "method=grpo", "train.batch_size=2", "online.overlap=true"][..],
            &["compute.devices=cpu:2", "compute.sharding=zero3"][..],
        ),
        ("distill", &["train.steps=4", "distill.lmbda=0.5"][..], &["compute.devices=cpu:2"][..]),
    ] {
        let small = Small::new(method);
        small.finish("run", RunDirPolicy::Fresh, &[overrides, &["train.keep=0"]].concat());
        let steps = if overrides.contains(&"train.steps=4") { 4 } else { 6 };
        let verdict =
            verify(&small, "run", (2, steps), here).unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
        let ends: Vec<u64> = (4..=steps).step_by(2).collect();
        assert_same(&verdict, steps - 2, &ends);
        assert_eq!(different_files(&verdict), Some(&[][..]), "{overrides:?}");
    }
}

#[test]
fn a_run_that_was_stopped_and_resumed_elsewhere_is_one_stretch() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_conv.jsonl");
    let all = [eval.as_str(), "train.keep_best=eval/loss", "train.eval_every=3", "train.keep=0"];
    small.run("run", RunDirPolicy::Fresh, Some(3), &all).1.expect("stopped");
    small.finish("run", RunDirPolicy::Resume, &[&all[..], &["compute.devices=cpu:2"]].concat());
    // Step 3 is no multiple of `save_every`.
    assert_same(&verify(&small, "run", (0, 6), &[]).unwrap_or_else(|e| panic!("{e}")), 6, &[2, 3, 4, 6]);
    assert_same(&verify(&small, "run", (3, 6), &[THREAD]).unwrap_or_else(|e| panic!("{e}")), 3, &[4, 6]);
}

/// A stop while answers are given or judged keeps them in another form.
#[test]
fn a_run_that_was_stopped_between_answers_and_scores_has_the_same_bits_again() {
    for more in [
        &["online.overlap=true"][..],
        &["online.overlap=true", "online.steps_per_round=2", "method=grpo", "train.batch_size=2"],
        &["online.steps_per_round=2"],
    ] {
        let small = Small::new("online");
        let all = [more, &["train.keep=0"]].concat();
        small.run("run", RunDirPolicy::Fresh, Some(3), &all).1.expect("stopped");
        small.finish("run", RunDirPolicy::Resume, &all);
        let verdict = verify(&small, "run", (0, 6), &[]).unwrap_or_else(|e| panic!("{more:?}: {e}"));
        assert_same(&verdict, 6, &[2, 3, 4, 6]);
        let verdict = verify(&small, "run", (3, 6), &[THREAD]).unwrap_or_else(|e| panic!("{more:?}: {e}"));
        assert_same(&verdict, 3, &[4, 6]);
    }
}

/// As a run does that goes on while it is verified.
#[test]
fn a_checkpoint_that_is_deleted_meanwhile_is_compared_by_its_hash() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=0"]);
    let gone = small.path("run/checkpoints/step-000004");
    let verdict = ask(&small, "run", (0, 6), &[], |_| fs::remove_dir_all(&gone).expect("deleted"));
    let verdict = verdict.unwrap_or_else(|e| panic!("{e}"));
    assert!(verdict.is_same(), "{verdict:?}");
    let compared =
        verdict.checkpoints.iter().map(|checkpoint| (checkpoint.step, checkpoint.comparison.is_some()));
    assert_eq!(compared.collect::<Vec<_>>(), [(2, true), (4, false), (6, true)]);
}

#[test]
fn checkpoints_that_were_deleted_are_compared_by_their_hash_alone() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=1"]);
    let verdict = verify(&small, "run", (0, 4), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_same(&verdict, 4, &[2, 4]);
    assert!(verdict.checkpoints.iter().all(|checkpoint| checkpoint.comparison.is_none()));
    let text = refusal(verify(&small, "run", (2, 4), &[]));
    assert!(text.contains("no checkpoint of step 2") && text.contains("there are: 6"), "{text}");
    let text = refusal(verify(&small, "run", (0, 5), &[]));
    assert!(text.contains("step 5") && text.contains("2, 4, 6"), "{text}");
    let text = refusal(verify(&small, "run", (6, 6), &[]));
    assert!(text.contains("no step between"), "{text}");
}

/// Changes an element of a tensor that lies whole in the one file of a checkpoint.
fn change_element(checkpoint: &Path, tensor: &str, element: usize, value: f32) {
    let path = checkpoint.join("state-00001-of-00001.safetensors");
    let mut bytes = fs::read(&path).expect("a part");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let found: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    let start = 8 + header + found[tensor]["data_offsets"][0].as_u64().expect("a tensor") as usize;
    bytes[start + 4 * element..][..4].copy_from_slice(&value.to_le_bytes());
    fs::write(&path, bytes).expect("written");
}

/// Gives the changed part its checksum.
fn forge_checksum(checkpoint: &Path) {
    let name = "state-00001-of-00001.safetensors";
    let (part, manifest) = (checkpoint.join(name), checkpoint.join("manifest.json"));
    let mut found: Value = serde_json::from_slice(&fs::read(&manifest).expect("a manifest")).expect("JSON");
    let hash = blake3::hash(&fs::read(part).expect("a part")).to_hex().to_string();
    for file in found["files"].as_array_mut().expect("files") {
        if file["name"] == name {
            file["blake3"] = hash.clone().into();
        }
    }
    fs::write(&manifest, found.to_string()).expect("written");
}

#[test]
fn a_changed_element_is_named_with_both_values() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=0"]);
    let checkpoint = small.path("run/checkpoints/step-000004");
    change_element(&checkpoint, "policy/head.head_weight", 65, 7.0);
    let first = |verdict: &Verdict| {
        assert!(!verdict.is_same() && verdict.metric.is_none());
        let last = verdict.checkpoints.last().expect("compared").clone();
        assert_eq!((last.step, last.recorded), (4, Some(last.state)));
        let comparison = last.comparison.expect("compared");
        let element = comparison.element.expect("a difference");
        assert_eq!((comparison.num_different, comparison.cursor, comparison.tensor), (1, None, None));
        assert_eq!((element.tensor.name.as_str(), element.element), ("policy/head.head_weight", 65));
        assert_eq!(element.recorded, 7.0);
        assert!(element.found != 7.0 && element.found.abs() < 1.0, "{element:?}");
        last.damage
    };
    let verdict = verify(&small, "run", (2, 6), &["compute.devices=cpu:2"]).unwrap_or_else(|e| panic!("{e}"));
    assert!(first(&verdict).expect("its checksum is another").contains("checksum"));
    forge_checksum(&checkpoint);
    let verdict = verify(&small, "run", (2, 6), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(first(&verdict), None);
    // Nothing can be computed from it.
    let text = refusal(verify(&small, "run", (4, 6), &[]));
    assert!(text.contains("step-000004") && text.contains("states.jsonl"), "{text}");
}

#[test]
fn a_changed_metric_is_named_with_its_step() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    let path = small.path("run/metrics.jsonl");
    let text = fs::read_to_string(&path).expect("metrics");
    let change = |line: &str| {
        let mut line: Value = serde_json::from_str(line).expect("JSON");
        if line["step"] == 3 {
            line["grad_norm"] = 123.0.into();
        }
        line.to_string() + "\n"
    };
    fs::write(&path, text.lines().map(change).collect::<String>()).expect("written");
    let verdict = verify(&small, "run", (0, 6), &[]).unwrap_or_else(|e| panic!("{e}"));
    let metric = verdict.metric.expect("a difference");
    assert_eq!((metric.step, metric.name.as_str(), metric.recorded), (3, "grad_norm", Some(123.0)));
    assert!(metric.found.is_some_and(|found| found != 123.0));
    assert!(verdict.checkpoints.iter().all(CheckpointVerdict::is_same));
}

/// Files of weights of the trained model that have other bits; `None` if it was not compared.
fn different_files(verdict: &Verdict) -> Option<&[String]> {
    match &verdict.model {
        ModelVerdict::Compared { files, different, .. } => {
            assert!(!files.is_empty(), "nothing was compared");
            Some(different)
        }
        ModelVerdict::NotCompared(_) => None,
    }
}

#[test]
fn a_changed_model_is_named_and_one_that_is_not_compared_too() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=0"]);
    let ask = |steps| verify(&small, "run", steps, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(different_files(&ask((2, 6))), Some(&[][..]));
    assert_eq!(different_files(&ask((0, 4))), None, "the end of the run is not computed");
    let path = small.path("run/final/model.safetensors");
    let mut bytes = fs::read(&path).expect("weights");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(&path, bytes).expect("written");
    let verdict = ask((2, 6));
    assert_eq!(different_files(&verdict), Some(&["model.safetensors".to_owned()][..]));
    assert!(!verdict.is_same() && verdict.checkpoints.iter().all(CheckpointVerdict::is_same));
    fs::remove_file(&path).expect("removed");
    assert!(!ask((2, 6)).is_same());
    fs::remove_dir_all(small.path("run/final")).expect("removed");
    let verdict = ask((2, 6));
    assert!(verdict.is_same() && different_files(&verdict).is_none(), "{verdict:?}");
}

#[test]
fn the_model_of_the_best_step_is_compared_with_its_weights() {
    let small = Small::new("sft");
    let eval = held_out(&small, "sft_messages.jsonl");
    // The held-out loss falls first and rises then.
    let rises = ["train.eval_every=1", "train.learning_rate=3e-2", "train.steps=12"];
    let best = [&rises[..], &["train.keep_best=eval/loss", "train.keep=0", &eval]].concat();
    small.finish("run", RunDirPolicy::Fresh, &best);
    let verdict = verify(&small, "run", (0, 12), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(different_files(&verdict), Some(&[][..]), "{verdict:?}");
    assert!(matches!(verdict.model, ModelVerdict::Compared { step, .. } if step < 12), "{:?}", verdict.model);
    let verdict = verify(&small, "run", (10, 12), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert!(verdict.is_same() && different_files(&verdict).is_none(), "its step was not computed again");
}

#[test]
fn a_record_with_missing_lines_cannot_be_verified() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=0"]);
    let path = small.path("run/metrics.jsonl");
    let whole = fs::read_to_string(&path).expect("metrics");
    let without = |step: &str| -> String {
        whole.split_inclusive('\n').filter(|line| !line.contains(&format!("\"step\":{step},"))).collect()
    };
    let damaged = whole.replacen("{\"step\":3", "#\"step\":3", 1);
    for text in [without("3"), damaged] {
        fs::write(&path, text).expect("written");
        let refused = refusal(verify(&small, "run", (0, 6), &[]));
        assert!(
            refused.contains("metrics.jsonl lacks 1 of the records") && refused.contains("step 3"),
            "{refused}"
        );
    }
    fs::remove_file(&path).expect("removed");
    let refused = refusal(verify(&small, "run", (0, 6), &[]));
    assert!(refused.contains("metrics.jsonl lacks 6 of the records"), "{refused}");
    fs::write(&path, whole).expect("written");
    fs::remove_file(small.path("run/states.jsonl")).expect("removed");
    let refused = refusal(verify(&small, "run", (0, 6), &[]));
    assert!(refused.contains("states.jsonl has no hash"), "{refused}");
}

/// It is no stretch that somebody stopped.
#[test]
fn a_state_beyond_the_end_of_the_run_is_refused() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.keep=0"]);
    let path = small.path("run/states.jsonl");
    let states = fs::read_to_string(&path).expect("states");
    let last = states.lines().last().expect("a line");
    fs::write(&path, format!("{states}{}\n", last.replace("\"step\":6", "\"step\":9"))).expect("written");
    let refused = refusal(verify(&small, "run", (0, 9), &[]));
    assert!(refused.contains("the run ends before step 9"), "{refused}");
}

#[test]
fn another_config_is_told() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    let text = refusal(verify(&small, "run", (0, 6), &["train.learning_rate=2e-2"]));
    assert!(text.contains("train.learning_rate: the run had 0.01, and 0.02"), "{text}");
    let path = small.path("run/config.toml");
    let config = fs::read_to_string(&path).expect("a config");
    assert!(config.contains("learning_rate = 0.01"), "{config}");
    fs::write(&path, config.replace("learning_rate = 0.01", "learning_rate = 0.02")).expect("written");
    let text = refusal(verify(&small, "run", (0, 6), &[]));
    for part in ["config.toml was changed", "train.learning_rate is 0.02", "made with 0.01"] {
        assert!(text.contains(part), "{text}");
    }
    fs::write(&path, config).expect("written");
    let record = small.path("run/provenance.json");
    let text = fs::read_to_string(&record).expect("a record");
    fs::write(&record, text.replace("learning_rate = 0.01", "learning_rate = 0.02")).expect("written");
    let text = refusal(verify(&small, "run", (0, 6), &[]));
    assert!(text.contains("one of the two was changed"), "{text}");
}

#[test]
fn other_rows_and_other_weights_are_named_with_both_hashes() {
    let small = Small::new("dpo");
    small.finish("reference", RunDirPolicy::Fresh, &["train.steps=1"]);
    let reference = small.path("reference/final");
    let elsewhere = format!("reference.model={}", reference.display());
    small.finish("run", RunDirPolicy::Fresh, &[&elsewhere]);
    let rows = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/pref_conv.jsonl");
    let rows = fs::read_to_string(rows).expect("rows");
    let path = small.path("other.jsonl");
    let other = format!("data.train={}", path.display());
    // Another file of the same rows is the same data.
    fs::write(&path, rows.replace("{\"", "{ \"")).expect("written");
    assert_same(&verify(&small, "run", (0, 2), &[&other]).unwrap_or_else(|e| panic!("{e}")), 2, &[2]);
    fs::write(&path, rows.lines().rev().map(|line| format!("{line}\n")).collect::<String>())
        .expect("written");
    let text = refusal(verify(&small, "run", (0, 2), &[&other]));
    for part in ["data.train: BLAKE3 ", " in the record, ", "other.jsonl", "--set"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let gone = small.path("gone");
    fs::rename(&reference, &gone).expect("renamed");
    let text = refusal(verify(&small, "run", (0, 2), &[]));
    assert!(text.contains("reference.model: ") && text.contains("--set reference.model=PATH"), "{text}");
    let given = format!("reference.model={}", gone.display());
    assert_same(&verify(&small, "run", (0, 2), &[&given]).unwrap_or_else(|e| panic!("{e}")), 2, &[2]);
    let weights = gone.join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(&weights, bytes).expect("written");
    let text = refusal(verify(&small, "run", (0, 2), &[&given]));
    assert!(text.contains("reference.model: model.safetensors") && text.contains("BLAKE3"), "{text}");
}

/// Writes another value into the record of a run's only start.
fn record_says(small: &Small, key: &str, value: &Value) {
    let path = small.path("run/provenance.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).expect("a record")).expect("JSON");
    record["starts"][0][key] = value.clone();
    fs::write(&path, record.to_string()).expect("written");
}

#[test]
fn another_arithmetic_is_named_before_anything_is_computed() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    record_says(&small, "arithmetic", &serde_json::json!(["portable 1"]));
    let text = refusal(verify(&small, "run", (0, 2), &[]));
    for part in ["other bits are expected", "portable with kernels of revision 1", "version of Tandem"] {
        assert!(text.contains(part), "{text}");
    }
    let verdict = ask(&small, "run", (0, 2), &[], |request| request.force = true);
    let verdict = verdict.unwrap_or_else(|e| panic!("{e}"));
    assert!(verdict.is_same() && verdict.notes[0].contains("other bits are expected"), "{verdict:?}");
    record_says(&small, "arithmetic", &serde_json::json!(["cuda sm_90 x132 12.8 9"]));
    assert!(refusal(verify(&small, "run", (0, 2), &[])).contains("cuda sm_90"));
    record_says(&small, "arithmetic", &serde_json::json!(["avx2 8", "amx 8"]));
    assert!(refusal(verify(&small, "run", (0, 2), &[])).contains("avx2 with kernels of revision 8 and amx"));
    fs::remove_file(small.path("run/provenance.json")).expect("removed");
    assert!(refusal(verify(&small, "run", (0, 2), &[])).contains("has no provenance.json"));
}

#[test]
fn a_resumption_that_changes_the_run_divides_it() {
    let small = Small::new("sft");
    small.run("run", RunDirPolicy::Fresh, Some(3), &[]).1.expect("stopped");
    small.finish("run", RunDirPolicy::Resume, &["train.learning_rate=2e-2", "train.keep=0"]);
    let text = refusal(verify(&small, "run", (0, 6), &[]));
    assert!(text.contains("verify --steps 0..3 and --steps 3..6"), "{text}");
    assert_same(&verify(&small, "run", (0, 3), &[]).unwrap_or_else(|e| panic!("{e}")), 3, &[2, 3]);
    assert_same(&verify(&small, "run", (3, 6), &[]).unwrap_or_else(|e| panic!("{e}")), 3, &[4, 6]);
}

#[test]
fn sums_in_f32_need_the_same_number_of_ranks() {
    let small = Small::new("sft");
    let overrides = ["compute.reduction=fast", "compute.devices=cpu:2", THREAD];
    small.finish("run", RunDirPolicy::Fresh, &overrides);
    assert_same(&verify(&small, "run", (0, 2), &[]).unwrap_or_else(|e| panic!("{e}")), 2, &[2]);
    let text = refusal(verify(&small, "run", (0, 2), &["compute.devices=cpu"]));
    assert!(text.contains("--devices cpu:2 gives the same"), "{text}");
}

#[test]
fn programs_of_a_run_are_not_started_unasked() {
    let small = Small::new("online");
    let judge = "judges=[{ kind = \"command\", command = [\"python3\", \"judge.py\"] }]";
    small.finish("run", RunDirPolicy::Fresh, &["train.steps=2"]);
    let text = fs::read_to_string(small.path("run/config.toml")).expect("a config");
    let config = Config::from_text(&text, Path::new("run")).expect("valid");
    let changed = config.with(&[judge]).expect("valid").to_toml();
    assert!(changed.contains("judge.py"), "{changed}");
    // A record as a run with this judge leaves it.
    let header = text.lines().next().expect("a header");
    fs::write(small.path("run/config.toml"), format!("{header}\n{changed}")).expect("written");
    let record: Value =
        serde_json::from_slice(&fs::read(small.path("run/provenance.json")).expect("a record"))
            .expect("JSON");
    let mut start = record["starts"][0]["config"].clone();
    start["text"] = changed.into();
    record_says(&small, "config", &start);
    // Of another version, whose hash says nothing here.
    record_says(&small, "program", &serde_json::json!({ "version": "0.0.0", "executable": null }));
    let text = refusal(verify(&small, "run", (0, 2), &[]));
    assert!(text.contains("judge `command`") && text.contains("--run-commands"), "{text}");
}
