//! TRL's `OnlineDPOTrainer` on given answers and scores, step by step: loss, gradient norm, metrics and final weights.
//!
//! Numbers: `goldens/online/*.json`, made by `goldens/online_golden.py`. Weights: `goldens/formula.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::formula;
use serde_json::Value;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::online::{Answer, Batch, CompletedPrompt};
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Trainer};

/// Two correct f32 implementations; relative to the larger of 1 and the value.
const METRICS: f64 = 2e-5;
/// Relative error of a final tensor's norm.
const NORM: f64 = 1e-6;
/// Relative error of the length of a tensor's way from its initial to its final weights.
const WAY: f64 = 1e-3;

pub(crate) fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens")
}

/// A model's folder with weights by the formula.
pub(crate) fn model(golden: &Value, folder: &Path, make: fn(&str, usize) -> Vec<f32>) {
    fs::create_dir(folder).unwrap();
    for file in fs::read_dir(goldens().join("small/model")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let shape = |v: &Value| v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let tensors = golden["final"].as_object().unwrap();
    let tensors: Vec<(String, Vec<usize>)> =
        tensors.iter().map(|(name, v)| (name.clone(), shape(&v["shape"]))).collect();
    formula::write_safetensors(folder, &tensors, make).unwrap();
}

fn as_trl(golden: &Value, folder: &Path) -> Config {
    let arg = |key: &str| &golden["args"][key];
    let reference = if golden["reference"] == "other" { "model = \"other\"\n" } else { "" };
    let text = format!(
        "method = \"online\"\nmodel = \"model\"\noutput = \"run\"\n[reference]\nkind = \"model\"\n{reference}[data]\n\
         train = {:?}\ncache = \"cache\"\nmax_length = 96\norder = \"sequential\"\n[objective]\nloss = {}\nbeta = {}\n\
         [online]\nmax_new_tokens = {}\n[train]\nbatch_size = {}\nmicro_batch_size = 2\nsteps = {}\nlearning_rate = {}\n\
         schedule = {}\nwarmup_steps = {}\nmax_grad_norm = {}\nweight_decay = {}\n[compute]\ndevices = \"cpu\"\n\
         dtype = \"f32\"\nthreads = 2\n[[judges]]\nkind = \"missing_eos\"\n",
        goldens().join("online").join(format!("{}.jsonl", golden["data"].as_str().unwrap())),
        arg("loss_type"),
        arg("beta"),
        arg("max_new_tokens"),
        arg("per_device_train_batch_size"),
        arg("max_steps"),
        arg("learning_rate"),
        arg("lr_scheduler_type"),
        arg("warmup_steps"),
        arg("max_grad_norm"),
        arg("weight_decay"),
    );
    let path = folder.join("run.toml");
    fs::write(&path, text).unwrap();
    Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The batches that TRL trained on.
fn batches(golden: &Value) -> Vec<Batch> {
    const EOS: u32 = 2;
    let penalty = golden["args"]["missing_eos_penalty"].as_f64().unwrap_or(0.0);
    let answer = |(tokens, score): (&Value, &Value)| {
        let tokens = ids(tokens);
        let is_ended = tokens.last() == Some(&EOS);
        let score = score.as_f64().unwrap() - if is_ended { 0.0 } else { penalty };
        Answer { tokens, is_ended, score: Some(score), ..Answer::default() }
    };
    let answered = |row: u32| {
        let Value::Object(of_row) = &golden["rows"][row as usize] else { panic!("no row {row}") };
        let [tokens, scores] = ["completions", "scores"].map(|key| of_row[key].as_array().unwrap());
        CompletedPrompt { row, answers: tokens.iter().zip(scores).map(answer).collect() }
    };
    let all = golden["batches"].as_array().unwrap().iter().zip(0..);
    let batch = |(batch, step): (&Value, u64)| Batch {
        step,
        answered_after: step,
        prompts: ids(&batch["rows"]).into_iter().map(answered).collect(),
        replaced: 0,
    };
    all.map(batch).collect()
}

fn is_trl(name: &str) {
    let text = fs::read_to_string(goldens().join(format!("online/{name}.json"))).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    model(&golden, &folder.path().join("model"), formula::weight);
    model(&golden, &folder.path().join("other"), formula::perturbed);
    let config = as_trl(&golden, folder.path());
    let found = train_on(name, &golden, config, folder.path(), batches(&golden));
    let (steps, masked) = (golden["steps"].as_array().unwrap(), golden["masked"].as_array().unwrap());
    for (ours, (theirs, masked)) in found.iter().zip(steps.iter().zip(masked)) {
        // TRL also sums what stands behind the end of an answer; the script has the sums over answers alone.
        let theirs: serde_json::Map<_, _> = theirs
            .as_object()
            .unwrap()
            .clone()
            .into_iter()
            .chain(masked.as_object().unwrap().clone())
            .collect();
        for (key, theirs) in &theirs {
            metric_is_trls(name, key, &ours[key], theirs);
        }
    }
    final_weights_are_trls(name, &golden, folder.path());
}

/// Trains on given answers, after the prompts were compared with TRL's; returns the lines of the log.
pub(crate) fn train_on(
    name: &str,
    golden: &Value,
    config: Config,
    folder: &Path,
    batches: Vec<Batch>,
) -> Vec<Value> {
    let prepared = RunInputs::open(&config, &mut Silent).unwrap();
    for (row, theirs) in golden["rows"].as_array().unwrap().iter().enumerate() {
        assert_eq!(prepared.train.prompt(row).0, ids(&theirs["prompt"]), "{name}: row {row}");
    }
    let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut Silent).unwrap();
    trainer.answered(batches);
    trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
    let found = fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    let found: Vec<Value> = found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), golden["steps"].as_array().unwrap().len());
    found
}

/// Compares a metric of a step with TRL's.
pub(crate) fn metric_is_trls(name: &str, key: &str, ours: &Value, theirs: &Value) {
    let [ours, theirs] = [ours, theirs].map(|v| v.as_f64().unwrap_or(f64::NAN));
    let error = (ours - theirs).abs() / theirs.abs().max(1.0);
    assert!(error <= METRICS, "{name}: {key} is {ours}, TRL has {theirs}: {error:.1e}");
}

/// Compares the final weights of a run in a folder with TRL's, and their ways.
pub(crate) fn final_weights_are_trls(name: &str, golden: &Value, folder: &Path) {
    let bytes = fs::read(folder.join("run/final/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (tensor, theirs) in golden["final"].as_object().unwrap() {
        let values = file.tensor(tensor).unwrap_or_else(|e| panic!("{tensor}: {e}")).data().to_vec();
        let values: Vec<f64> =
            values.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
        let initial = formula::weight(tensor, values.len());
        let squares = values.iter().zip(initial).map(|(v, i)| (v * v, (v - f64::from(i)).powi(2)));
        let (norm, way) = squares.fold((0.0, 0.0), |(norm, way), (n, w)| (norm + n, way + w));
        for (what, ours, allowed) in [("norm", norm, NORM), ("step", way, WAY)] {
            let theirs = theirs[what].as_f64().unwrap();
            let error = (ours.sqrt() - theirs).abs() / theirs;
            assert!(error <= allowed, "{name}: {what} of {tensor}: {error:.1e}");
        }
    }
}

#[test]
fn sigmoid_steps_are_trls() {
    is_trl("sigmoid");
}

#[test]
fn ipo_steps_are_trls() {
    is_trl("ipo");
}

#[test]
fn steps_with_a_penalty_for_answers_without_an_end_are_trls() {
    is_trl("missing_eos");
}

#[test]
fn steps_with_another_beta_in_each_epoch_are_trls() {
    is_trl("beta_by_epoch");
}

#[test]
fn steps_from_plain_prompts_are_trls() {
    is_trl("plain");
}

#[test]
fn steps_against_another_reference_are_trls() {
    is_trl("other_reference");
}
