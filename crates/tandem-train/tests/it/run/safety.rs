//! Conditions that must stop a run, and their messages.

use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Outcome, TrainError};

use crate::small::Small;

#[test]
fn equal_policy_and_reference_start_at_ln_2() {
    let small = Small::new("dpo");
    let heard = small.finish("run", RunDirPolicy::Fresh, &[]);
    assert!(heard.computed_reference);
    assert!((heard.losses[0] - std::f64::consts::LN_2).abs() < 1e-6, "{:?}", heard.losses);
    let again = small.finish("again", RunDirPolicy::Fresh, &[]);
    assert!(!again.computed_reference, "the second run reads the first one's numbers");
    assert_eq!(again.steps, heard.steps);
}

#[test]
fn the_reference_scores_the_rows_that_the_steps_read() {
    let small = Small::new("dpo");
    let run = |name: &str, steps: u64, more: &[&str]| {
        let steps = format!("train.steps={steps}");
        let settings = [&["train.batch_size=2", "train.warmup_steps=0", &steps], more].concat();
        small.finish(name, RunDirPolicy::Fresh, &settings)
    };
    assert_eq!(run("one", 1, &[]).scored_rows, 2);
    assert!(!run("one again", 1, &[]).computed_reference);
    let three = run("three", 3, &[]);
    assert_eq!(three.scored_rows, 6);
    assert_eq!(three.steps, run("model", 3, &["reference.kind=model"]).steps);
    // Other rows than those of the first run; the file keeps both.
    let other = run("other", 1, &["data.order=sequential"]);
    assert!(other.scored_rows <= 2);
    assert!(!run("three again", 3, &[]).computed_reference);
    assert_eq!(run("whole", 32, &[]).scored_rows, 64);
}

#[test]
fn a_wrong_reference_stops_the_run_at_its_first_step() {
    let small = Small::new("dpo");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    // A file of the right shape and checksum, but of another model.
    let file = std::fs::read_dir(small.path("cache"))
        .expect("the cache folder")
        .map(|entry| entry.expect("readable").path())
        .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("reference-")))
        .expect("precomputed scores");
    let bytes = std::fs::read(&file).expect("readable");
    let (magic, rest) = bytes.split_at(16);
    let mut body = rest[..rest.len() - 32].to_vec();
    for row in body.chunks_exact_mut(16) {
        row[..8].copy_from_slice(&(-1.0f64).to_le_bytes());
    }
    let forged = [magic, &body, blake3::hash(&body).as_bytes()].concat();
    std::fs::write(&file, forged).expect("writable");
    let (_, outcome) = small.run("wrong", RunDirPolicy::Fresh, None, &[]);
    assert!(matches!(outcome, Err(TrainError::WrongStart { .. })), "{outcome:?}");
    assert!(!small.path("wrong/final").exists());
}

#[test]
fn a_damaged_file_of_reference_scores_is_computed_again() {
    let small = Small::new("dpo");
    let first = small.finish("run", RunDirPolicy::Fresh, &[]);
    for entry in std::fs::read_dir(small.path("cache")).expect("the cache folder") {
        let path = entry.expect("readable").path();
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("reference-")) {
            let mut bytes = std::fs::read(&path).expect("readable");
            bytes[40] ^= 1;
            std::fs::write(&path, bytes).expect("writable");
        }
    }
    let second = small.finish("again", RunDirPolicy::Fresh, &[]);
    assert!(second.computed_reference);
    assert_eq!(second.steps, first.steps);
}

#[test]
fn steps_that_are_not_finite_are_skipped_and_too_many_stop_the_run_naming_rows() {
    let small = Small::new("dpo");
    let settings = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.max_skipped=2"];
    let (heard, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
    let error = outcome.expect_err("weights of 1e30 give no finite loss");
    assert!(matches!(error, TrainError::NotFinite { in_a_row: 3, .. }), "{error}");
    assert!(error.to_string().contains("pref_conv.jsonl:"), "{error}");
    assert_eq!(heard.skipped.len(), 3);
}

/// A log of steps is no success where each was left out.
#[test]
fn a_run_without_an_update_writes_no_model() {
    let small = Small::new("dpo");
    // The derivative by a log-probability overflows.
    let settings = ["objective.beta=3e38", "train.max_skipped=9"];
    let (heard, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
    let error = outcome.expect_err("no step has changed the model");
    assert!(matches!(error, TrainError::NothingLearned { steps: 6, .. }), "{error} {heard:?}");
    assert!(!small.path("run/final").exists());
    assert!(small.path("run/checkpoints").exists(), "a run with more steps may resume");
}

#[test]
fn a_rank_that_is_a_thread_says_where_it_was_when_it_failed() {
    let small = Small::new("dpo");
    let settings =
        ["train.learning_rate=1e30", "train.warmup_steps=0", "train.max_skipped=0", "compute.devices=cpu:2"];
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
    let error = outcome.expect_err("weights of 1e30 give no finite loss");
    let TrainError::OnRank { rank: 0, place, error: cause } = &error else { panic!("{error}") };
    assert!(place.step > 1 && matches!(**cause, TrainError::NotFinite { .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("rank 0, at step {}, in ", place.step)), "{error}");
    assert_eq!(error.fault(), cause.fault());
}

#[test]
fn a_used_folder_is_refused_and_overwritten_only_when_asked() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    let before = small.weights("run");
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &["seed=7"]);
    let error = outcome.expect_err("the folder holds a run").to_string();
    assert!(error.contains("--resume") && error.contains("--overwrite"), "{error}");
    assert!(small.weights("run") == before, "refusing changes nothing");
    small.finish("run", RunDirPolicy::Overwrite, &["seed=7"]);
    assert!(small.weights("run") != before);
}

#[test]
fn overwriting_with_broken_input_keeps_the_earlier_run() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    let before = small.weights("run");
    let (_, outcome) = small.run("run", RunDirPolicy::Overwrite, None, &["data.train=no-such-file.jsonl"]);
    outcome.expect_err("the file is missing");
    assert!(small.weights("run") == before);
}

#[test]
fn a_stop_after_the_last_step_is_an_ordinary_end() {
    let small = Small::new("sft");
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, Some(6), &[]);
    assert!(matches!(outcome, Ok(Outcome::Finished(_))), "{outcome:?}");
}

#[test]
fn a_gradient_beyond_exact_sums_is_told_from_one_that_is_not_finite() {
    let small = Small::new("dpo");
    let steep = ["objective.beta=1e7", "train.steps=2", "train.warmup_steps=0", "train.max_skipped=0"];
    let (heard, outcome) = small.run("exact", RunDirPolicy::Fresh, None, &steep);
    let error = outcome.expect_err("its only limit").to_string();
    assert!(heard.skipped.len() == 1 && error.contains("too large for exact sums"), "{error}");
    assert!(error.contains("compute.reduction = \"fast\""), "{error}");
    small.finish("fast", RunDirPolicy::Fresh, &[&steep[..], &["compute.reduction=fast"]].concat());
}

#[test]
fn fewer_steps_than_were_done_are_refused() {
    let small = Small::new("dpo");
    small.finish("run", RunDirPolicy::Fresh, &["train.steps=4"]);
    let config = std::fs::read_to_string(small.path("run/config.toml")).expect("a config");
    let error =
        small.run("run", RunDirPolicy::Resume, None, &["train.steps=2"]).1.expect_err("too few").to_string();
    assert!(error.contains("4 steps are done") && error.contains("asks for 2 in all"), "{error}");
    assert_eq!(std::fs::read_to_string(small.path("run/config.toml")).expect("a config"), config);
    small.finish("run", RunDirPolicy::Resume, &["train.steps=4"]);
}

#[test]
fn a_reference_of_another_shape_is_told_by_what_differs_and_one_of_other_tokens_is_warned_of() {
    let small = Small::new("dpo");
    small.finish("base", RunDirPolicy::Fresh, &["train.steps=1"]);
    let changed = |name: &str, file: &str, change: &dyn Fn(&str) -> String| {
        let (from, to) = (small.path("base/final"), small.path(name));
        std::fs::create_dir(&to).expect("a folder");
        for entry in std::fs::read_dir(from).expect("listed") {
            let entry = entry.expect("listed");
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
        }
        let text = std::fs::read_to_string(to.join(file)).expect("readable");
        assert_ne!(change(&text), text);
        std::fs::write(to.join(file), change(&text)).expect("written");
        format!("reference.model={}", to.display())
    };
    let other = changed("other", "config.json", &|text| {
        text.replacen("\"rms_norm_eps\": 0.00001", "\"rms_norm_eps\": 0.00003", 1)
    });
    let error =
        small.run("a", RunDirPolicy::Fresh, None, &[&other]).1.expect_err("another model").to_string();
    assert!(error.contains("3e-5") && error.lines().count() == 1 && error.len() < 600, "{error}");
    let swapped = |text: &str| {
        let mut file: serde_json::Value = serde_json::from_str(text).expect("JSON");
        let vocab = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
        let names: Vec<String> = vocab
            .iter()
            .filter(|(_, id)| [40, 41].contains(&id.as_u64().unwrap()))
            .map(|(t, _)| t.clone())
            .collect();
        let [a, b] = [&names[0], &names[1]].map(|name| vocab[name].clone());
        (vocab[&names[0]], vocab[&names[1]]) = (b, a);
        file.to_string()
    };
    let renamed = changed("renamed", "tokenizer.json", &swapped);
    let heard = small.finish("b", RunDirPolicy::Fresh, &["train.steps=1", &renamed]);
    assert!(heard.warnings.iter().any(|warning| warning.starts_with("token 40 is ")), "{:?}", heard.warnings);
}
