//! Stopped and resumed equals never stopped, bit for bit.

use tandem_train::Outcome;
use tandem_train::run::run_dir::RunDirPolicy;

use super::tensor;
use crate::small::{Heard, Small};

pub(super) fn resumed_equals_unstopped(method: &'static str, overrides: &[&str]) {
    let small = Small::new(method);
    let whole = small.finish("whole", RunDirPolicy::Fresh, overrides);
    // Odd steps are not checkpoints of their own: stopping makes one.
    for stop_after in [1, 3] {
        let name = format!("stopped-{stop_after}");
        let (before, outcome) = small.run(&name, RunDirPolicy::Fresh, Some(stop_after), overrides);
        assert!(matches!(outcome, Ok(Outcome::Stopped(Some(_)))), "{outcome:?}");
        let after = small.finish(&name, RunDirPolicy::Resume, overrides);
        assert_eq!([before.steps, after.steps].concat(), whole.steps);
        assert!(
            small.weights(&name) == small.weights("whole"),
            "weights differ after a stop at {stop_after}"
        );
    }
}

#[test]
fn dpo_with_precomputed_reference_resumes_bit_for_bit() {
    resumed_equals_unstopped("dpo", &[]);
}

#[test]
fn dpo_in_bf16_with_rmsprop_resumes_bit_for_bit() {
    resumed_equals_unstopped(
        "dpo",
        &["compute.dtype=bf16", "train.optimizer=rmsprop", "train.learning_rate=1e-3"],
    );
}

/// BCO's mean of rewards is part of the checkpoint.
#[test]
fn labelled_completions_resume_bit_for_bit() {
    resumed_equals_unstopped("kto", &["objective.loss={ bco = 1, kto = 0.5 }"]);
}

#[test]
fn distillation_resumes_bit_for_bit() {
    resumed_equals_unstopped("distill", &["distill.beta=0.2", "distill.temperature=2.0"]);
}

#[test]
fn sft_resumes_bit_for_bit() {
    resumed_equals_unstopped("sft", &[]);
}

#[test]
fn a_torn_newest_checkpoint_is_passed_over_and_the_run_ends_the_same() {
    let small = Small::new("dpo");
    small.finish("whole", RunDirPolicy::Fresh, &[]);
    small.run("torn", RunDirPolicy::Fresh, Some(4), &[]).1.unwrap_or_else(|e| panic!("{e}"));
    let newest = small.path("torn/checkpoints/step-000004/state-00001-of-00001.safetensors");
    let bytes = std::fs::read(&newest).expect("a checkpoint was saved");
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).expect("writable");
    let after = small.finish("torn", RunDirPolicy::Resume, &[]);
    assert!(after.warnings.iter().any(|w| w.contains("step-000004")), "{:?}", after.warnings);
    assert_eq!(after.steps.len(), 4, "steps 3 to 6 are run again");
    assert!(small.weights("torn") == small.weights("whole"));
}

#[test]
fn metrics_have_each_step_once_after_a_resume() {
    let small = Small::new("dpo");
    small.run("run", RunDirPolicy::Fresh, Some(3), &[]).1.unwrap_or_else(|e| panic!("{e}"));
    // What a killed process wrote after its last checkpoint is run, and written, again.
    let path = small.path("run/metrics.jsonl");
    let mut text = std::fs::read_to_string(&path).expect("written");
    text.push_str("{\"step\":4,\"split\":\"train\",\"loss\":0.5}\n{\"step\":5,\"spl");
    std::fs::write(&path, text).expect("writable");
    small.finish("run", RunDirPolicy::Resume, &[]);
    let text = std::fs::read_to_string(&path).expect("written");
    let steps: Vec<u64> = text
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("whole lines")["step"]
                .as_u64()
                .expect("a step")
        })
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn other_data_is_refused_on_resume() {
    let small = Small::new("dpo");
    small.run("run", RunDirPolicy::Fresh, Some(2), &[]).1.unwrap_or_else(|e| panic!("{e}"));
    let (_, outcome) = small.run("run", RunDirPolicy::Resume, None, &["data.max_length=80"]);
    let error = outcome.expect_err("rows are not the ones the run was started with").to_string();
    assert!(error.contains("training data") && error.contains("--overwrite"), "{error}");
}

#[test]
fn another_model_is_told_on_resume() {
    let small = Small::new("dpo");
    let mut config = tensor::config_of("llama");
    let model = tensor::write_model(&small, "model", &config);
    let adapter = ["adapter.rank=2", model.as_str()];
    small.finish("run", RunDirPolicy::Fresh, &[&adapter[..], &["train.steps=2"]].concat());
    let more = |steps: &str| small.finish("run", RunDirPolicy::Resume, &[&adapter[..], &[steps]].concat());
    let of_files = |heard: &Heard| {
        let warnings = heard.warnings.iter().filter(|warning| warning.contains("files that the run reads"));
        warnings.cloned().collect::<Vec<_>>()
    };
    assert_eq!(of_files(&more("train.steps=4")), [""; 0]);
    config["rms_norm_eps"] = 1e-2.into();
    std::fs::write(small.path("model/config.json"), config.to_string()).unwrap();
    let found = of_files(&more("train.steps=6"));
    assert!(found.len() == 1 && found[0].contains("model: config.json"), "{found:?}");
}
