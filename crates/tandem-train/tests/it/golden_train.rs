//! TRL's training runs on the small model, step by step: loss, gradient norm, metrics and final weights.
//!
//! Numbers: `goldens/small/train.json`, made by `goldens/train_golden.py`. Weights: `goldens/formula.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::formula;
use crate::teacher::write_teacher;
use serde_json::Value;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Trainer};

/// Two correct f32 implementations differ by 4e-7 in loss here (TRL's batch 8 × 1 against its 2 × 4); over twenty
/// steps AdamW amplifies that where gradients nearly vanish.
const LOSS: f64 = 1e-4;
/// Relative, for the same reason.
const GRAD_NORM: f64 = 1e-4;
/// Tolerance of metrics, relative to the larger of 1 and the value.
const METRICS: f64 = 1e-4;
/// Relative error of a final tensor's norm.
const NORM: f64 = 1e-5;
/// Relative error of the length of a tensor's way from its initial to its final weights.
const WAY: f64 = 1e-3;

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small")
}

fn golden() -> Value {
    read("train.json")
}

/// A file of numbers.
pub(crate) fn read(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(small().join(name)).unwrap()).unwrap()
}

/// Tensors of the small model, by name and shape.
fn tensors(golden: &Value) -> Vec<(String, Vec<usize>)> {
    let shape =
        |v: &Value| v["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let run = golden["runs"].as_object().unwrap().values().next().unwrap();
    let last = run["final"].as_object().unwrap();
    last.iter().map(|(name, v)| (name.clone(), shape(v))).collect()
}

/// A run of Tandem in a temporary folder.
struct Run {
    folder: tempfile::TempDir,
    steps: Vec<Value>,
    evaluations: Vec<Value>,
}

impl Run {
    /// Trains with TRL's arguments.
    fn new(golden: &Value, run: &Value, eval: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, make) in
            [("model", formula::weight as fn(&str, usize) -> Vec<f32>), ("other", formula::perturbed)]
        {
            let model = folder.path().join(name);
            fs::create_dir(&model).unwrap();
            for file in fs::read_dir(small().join("model")).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), model.join(file.file_name())).unwrap();
            }
            formula::write_safetensors(&model, &tensors(golden), make).unwrap();
        }
        if run["reference"] == "teacher" {
            write_teacher(&folder.path().join("teacher"));
        }
        let config = folder.path().join("run.toml");
        fs::write(&config, toml(golden, run, eval)).unwrap();
        let overrides: Vec<&str> =
            run["overrides"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let config = Config::load(&config, &overrides).unwrap();
        let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut Silent).unwrap();
        trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
        let lines = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let (evaluations, steps) = lines.partition(|m| m["split"] == "eval");
        Self { folder, steps, evaluations }
    }

    /// Name → (norm, distance from the initial weights), in f64.
    fn final_norms(&self, golden: &Value) -> BTreeMap<String, (f64, f64)> {
        let bytes = fs::read(self.folder.path().join("run/final/model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let norms = |(name, shape): (String, Vec<usize>)| {
            let tensor = file.tensor(&name).unwrap();
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
            let values = tensor
                .data()
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            let initial = formula::weight(&name, shape.iter().product());
            let (mut norm, mut way) = (0.0, 0.0);
            for (value, initial) in values.zip(initial) {
                norm += value * value;
                way += (value - f64::from(initial)).powi(2);
            }
            (name, (norm.sqrt(), way.sqrt()))
        };
        tensors(golden).into_iter().map(norms).collect()
    }
}

/// TRL's arguments as a `run.toml`.
fn toml(golden: &Value, run: &Value, eval: Option<&str>) -> String {
    let arg = |key: &str| run["args"].get(key).unwrap_or(&golden["defaults"][key]);
    let sft = run["method"] == "sft" || run["method"] == "distill";
    let reference = match (run["reference"].as_str().unwrap(), arg("precompute_ref_log_probs") == true) {
        ("none", _) => "",
        ("same", false) => "[reference]\nkind = \"model\"\n",
        ("other", false) => "[reference]\nkind = \"model\"\nmodel = \"other\"\n",
        ("teacher", _) => "[reference]\nkind = \"model\"\nmodel = \"teacher\"\n",
        ("other", true) => "[reference]\nkind = \"precompute\"\nmodel = \"other\"\n",
        (reference, _) => panic!("reference {reference}"),
    };
    let micro = arg("per_device_train_batch_size").as_u64().unwrap();
    let objective = if sft {
        String::new()
    } else if run.get("overrides").is_some() {
        format!("[objective]\nbeta = {:?}\n", arg("beta").as_f64().unwrap())
    } else {
        let loss = arg("loss_type").get(0).and_then(Value::as_str).unwrap_or("sigmoid");
        let smoothing =
            arg("label_smoothing").as_f64().map_or(String::new(), |s| format!("label_smoothing = {s:?}\n"));
        format!("[objective]\nloss = {loss:?}\nbeta = 0.1\n{smoothing}")
    };
    let data = small();
    let eval = eval.map_or(String::new(), |path| format!("eval = {path:?}\n"));
    format!(
        "method = {:?}\nmodel = \"model\"\noutput = \"run\"\nseed = {}\n{reference}\
         [data]\ntrain = {:?}\n{eval}cache = \"cache\"\nmax_length = {}\norder = {:?}\n{objective}\
         [train]\nbatch_size = {}\nmicro_batch_size = {micro}\nsteps = {}\noptimizer = {:?}\nlearning_rate = {:?}\n\
         schedule = {:?}\nwarmup_steps = {}\nmax_grad_norm = {:?}\nweight_decay = {:?}\n\
         [compute]\ndevices = \"cpu\"\ndtype = {:?}\nthreads = 2\n",
        run["method"].as_str().unwrap(),
        arg("seed"),
        data.join(format!("{}.jsonl", run["data"].as_str().unwrap())),
        arg("max_length"),
        if arg("train_sampling_strategy") == "random" { "shuffled" } else { "sequential" },
        micro * arg("gradient_accumulation_steps").as_u64().unwrap(),
        arg("max_steps"),
        if arg("optim") == "rmsprop" { "rmsprop" } else { "adamw" },
        arg("learning_rate").as_f64().unwrap(),
        arg("lr_scheduler_type").as_str().unwrap().trim_end_matches("_with_warmup"),
        arg("warmup_steps"),
        arg("max_grad_norm").as_f64().unwrap(),
        arg("weight_decay").as_f64().unwrap(),
        if arg("bf16") == true { "bf16" } else { "f32" },
    )
}

/// |ours − theirs| relative to the larger of 1 and theirs; infinite if ours is missing.
fn error(ours: &Value, theirs: f64) -> f64 {
    ours.as_f64().map_or(f64::INFINITY, |ours| (ours - theirs).abs() / theirs.abs().max(1.0))
}

/// Metrics that TRL averages over tokens within a micro-batch and then over micro-batches: they depend on how a
/// batch is cut. Tandem's are over the whole batch's tokens: TRL's where it has one micro-batch.
pub(crate) const TOKEN_MEANS: [&str; 4] =
    ["entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"];

/// Every step of a run against TRL's.
fn compare_steps(name: &str, run: &Run, expected: &Value, loss: f64, grad_norm: f64, metrics: f64) {
    let steps = expected["steps"].as_array().unwrap();
    assert_eq!(run.steps.len(), steps.len(), "{name}: number of steps");
    for (ours, theirs) in run.steps.iter().zip(steps) {
        let step = &theirs["step"];
        for (key, theirs) in theirs.as_object().unwrap() {
            let theirs = theirs.as_f64().unwrap();
            let (error, allowed) = match key.as_str() {
                "loss" => (error(&ours[key], theirs), loss),
                "grad_norm" => (error(&ours[key], theirs) * theirs.abs().max(1.0) / theirs, grad_norm),
                "learning_rate" => (error(&ours[key], theirs), 1e-12),
                // TRL's count of tokens includes the prompt twice, ours is of what was computed.
                "num_tokens" | "step" | "epoch" => continue,
                // A difference of log-probabilities near -150, in which f32 has steps of 1.5e-5.
                "kl" => (error(&ours[key], theirs), 2.0 * metrics),
                // A share of eight pairs: in bf16 the margin of one may be on the other side of zero.
                "rewards/accuracies" if metrics > 1e-2 => (error(&ours[key], theirs), 1.0 / 8.0),
                _ => (error(&ours[key], theirs), metrics),
            };
            assert!(
                error <= allowed,
                "{name} step {step}: {key} is {}, TRL has {theirs}; {error:.1e} > {allowed:.0e}",
                ours[key]
            );
        }
    }
}

fn check(name: &str) {
    check_cut(name, name);
}

/// Checks the run `name`, which cuts the batches of the run `whole` into pieces.
fn check_cut(name: &str, whole: &str) {
    let golden = golden();
    let mut expected = golden["runs"][name].clone();
    for (step, whole) in golden["runs"][whole]["steps"].as_array().unwrap().iter().enumerate() {
        for key in TOKEN_MEANS.into_iter().filter(|key| whole.get(key).is_some()) {
            expected["steps"][step][key] = whole[key].clone();
        }
    }
    let run = Run::new(&golden, &expected, None);
    compare_steps(name, &run, &expected, LOSS, GRAD_NORM, METRICS);
    compare_weights(name, &run, &golden, &expected);
}

/// Checks a short run of a file of numbers: fewer steps amplify less.
pub(crate) fn check_short(golden: &Value, name: &str, expected: &Value) {
    let run = Run::new(golden, expected, None);
    compare_steps(name, &run, expected, 1e-5, GRAD_NORM, 1e-5);
    compare_weights(name, &run, golden, expected);
}

fn compare_weights(name: &str, run: &Run, golden: &Value, expected: &Value) {
    for (tensor, (norm, way)) in run.final_norms(golden) {
        let theirs = &expected["final"][&tensor];
        let relative = |ours: f64, key: &str| (ours / theirs[key].as_f64().unwrap() - 1.0).abs();
        assert!(
            relative(norm, "norm") <= NORM,
            "{name} {tensor}: final norm {norm}, TRL has {}",
            theirs["norm"]
        );
        assert!(relative(way, "step") <= WAY, "{name} {tensor}: moved by {way}, TRL by {}", theirs["step"]);
    }
}

#[test]
fn twenty_steps_in_one_piece() {
    check("full_8x1");
}

#[test]
fn twenty_steps_in_two_pieces() {
    check_cut("full_4x2", "full_8x1");
}

#[test]
fn twenty_steps_in_four_pieces() {
    check_cut("full_2x4", "full_8x1");
}

#[test]
fn plain_text() {
    check("plain");
}

#[test]
fn a_reference_with_other_weights() {
    check("other_reference");
}

#[test]
fn a_precomputed_reference() {
    check("precompute");
}

#[test]
fn ipo() {
    check("ipo");
}

#[test]
fn hinge() {
    check("hinge");
}

#[test]
fn robust_with_label_smoothing() {
    check("robust");
}

#[test]
fn rmsprop() {
    check("rmsprop");
}

#[test]
fn weight_decay_spares_norms() {
    check("weight_decay");
}

#[test]
fn cosine_schedule() {
    check("cosine");
}

#[test]
fn constant_schedule() {
    check("constant");
}

#[test]
fn long_rows_are_cut_and_dropped() {
    check("truncated");
}

#[test]
fn shuffled_order_over_two_epochs() {
    check("shuffled");
}

#[test]
fn sft_on_completions() {
    check("sft_completion");
}

#[test]
fn sft_means_over_the_tokens_of_the_whole_batch() {
    check_cut("sft_completion_2x4", "sft_completion");
}

#[test]
fn sft_on_the_assistants_turns() {
    check("sft_messages");
}

/// bf16 products have 8 bits: TRL's autocast is as far from its own f32 run.
#[test]
fn bf16_follows_trl_and_f32() {
    let golden = golden();
    let expected = &golden["runs"]["autocast"];
    let run = Run::new(&golden, expected, None);
    compare_steps("autocast", &run, expected, 1e-2, 5e-2, 1e-1);
    for (ours, exact) in run.steps.iter().zip(golden["runs"]["full_8x1"]["steps"].as_array().unwrap()) {
        let error = error(&ours["loss"], exact["loss"].as_f64().unwrap());
        assert!(
            error <= 1e-2,
            "step {}: loss {} in bf16, {} in f32",
            exact["step"],
            ours["loss"],
            exact["loss"]
        );
    }
}

/// TRL's own metrics change with the evaluation's batch size; one row at a time is what they should be.
#[test]
fn evaluation_does_not_depend_on_its_batch_size() {
    let golden = golden();
    let expected = golden["evaluation"]["metrics"].as_object().unwrap();
    let rows = fs::read_to_string(small().join("pref_conv.jsonl")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let eval = folder.path().join("thirteen.jsonl");
    fs::write(&eval, rows.lines().take(13).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let mut whole: Option<Value> = None;
    for batch in [13, 5, 12, 1] {
        let mut settings = golden["runs"]["other_reference"].clone();
        // The evaluation after a step of size zero sees the weights the run started with.
        settings["args"] = serde_json::json!({
            "max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": batch, "warmup_steps": 0,
        });
        let run = Run::new(&golden, &settings, Some(eval.to_str().unwrap()));
        let ours = run.evaluations.last().expect("an evaluation at the end");
        for (key, theirs) in expected.iter().map(|(key, theirs)| (key.trim_start_matches("eval_"), theirs)) {
            // Token means over rows of different lengths are not comparable row by row: see TOKEN_MEANS.
            if key == "epoch" || key == "num_tokens" {
                continue;
            } else if !TOKEN_MEANS.contains(&key) {
                let error = error(&ours[key], theirs.as_f64().unwrap());
                // f32 sums of a hundred token log-probs; everything else is smaller.
                assert!(
                    error <= 1e-5,
                    "batches of {batch}: {key} is {}, TRL has {theirs} row by row",
                    ours[key]
                );
            }
            if let Some(whole) = &whole {
                let error = error(&ours[key], whole[key].as_f64().unwrap());
                assert!(
                    error <= 1e-6,
                    "batches of {batch}: {key} is {}, in one batch {}",
                    ours[key],
                    whole[key]
                );
            }
        }
        whole.get_or_insert_with(|| ours.clone());
    }
}
