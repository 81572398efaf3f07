//! Every loss on the first eight pairs: value, metrics and gradient norm.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::forward::SUMS_OF_OTHER_WEIGHTS;
use crate::numbers::{data_file, floats, read_json};
use crate::report::Report;
use crate::runner::Runner;
use crate::settings::{Settings, objective};

/// Losses and metrics, relative to the larger of 1 and the value: TRL's own numbers are f32.
const LOSS: f64 = 1e-5;
/// A reward is β times the difference of two sums of about 500, which TRL holds in f32: their last bits are 6e-5.
/// With β = 0.5 and 1 its own losses are 1.3e-5 and 2.9e-5 away from what its f64 sums give.
const REWARD: f64 = 6e-5;
/// Gradient norms, relative.
const GRAD_NORM: f64 = 1e-4;

/// One optimiser step on the first eight rows, so that loss, metrics and gradient norm come from the training path.
fn settings(folder: &Path, model: &str, data: &str, objective: String) -> Settings {
    let models = folder.join("models");
    Settings {
        model: models.join(model),
        reference: format!("kind = \"model\"\nmodel = {:?}", models.join(format!("{model}-ref"))),
        data: data_file(folder, data),
        eval: None,
        objective,
        batch_size: 8,
        micro_batch_size: 8,
        steps: 1,
        optimizer: "adamw",
        learning_rate: 1e-4,
        warmup_steps: 0,
        max_grad_norm: 1.0,
        dtype: "f32",
    }
}

/// Checks everything in `losses.json`.
///
/// # Errors
/// If the folder's own files cannot be read.
pub fn check(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("losses.json"))?;
    let sums = read_json(&folder.join("forward.json"))?;
    for (model, by_data) in expected["losses"].as_object().context("losses.json holds no losses")? {
        for (data, by_loss) in by_data.as_object().into_iter().flatten() {
            for (loss, expected) in by_loss.as_object().into_iter().flatten() {
                let name = format!("loss {model} {data} {loss}");
                if loss.ends_with("_IGNORED") {
                    // This TRL ignores label smoothing under `sigmoid`; Tandem does not, and is compared with the
                    // original code's numbers instead.
                    continue;
                }
                if SUMS_OF_OTHER_WEIGHTS.contains(&model.as_str()) {
                    report.note(name, "not judged: the folder's numbers are not those of its weights");
                    continue;
                }
                match objective(&expected["config"]) {
                    Err(why) => report.not_implemented(name, why),
                    Ok(objective) => {
                        let exact = exact_loss(&expected["config"], &sums[model][data]);
                        let settings = settings(folder, model, data, objective);
                        one_step(&name, settings, expected, exact, runner, report);
                    }
                }
            }
        }
    }
    mitchell(folder, runner, report)
}

/// The loss in f64 from the folder's f64 sums, where TRL's f32 sums are too coarse for [`LOSS`]: at a large β. The
/// folder has two such losses.
fn exact_loss(config: &Value, sums: &Value) -> Option<f64> {
    let beta = config["beta"].as_f64().filter(|&beta| beta * REWARD / 2.0 > LOSS)?;
    let loss: fn(f64) -> f64 = match config["loss_type"][0].as_str() {
        None | Some("sigmoid") => |x| (-x.abs()).exp().ln_1p() + (-x).max(0.0),
        Some("hinge") => |x| (1.0 - x).max(0.0),
        Some(_) => return None,
    };
    let [chosen, rejected, ref_chosen, ref_rejected] =
        [("policy", "chosen"), ("policy", "rejected"), ("ref", "chosen"), ("ref", "rejected")]
            .map(|(side, answer)| floats(&sums[side][format!("sum_logps_{answer}")]));
    let losses = (0..chosen.len())
        .map(|i| loss(beta * ((chosen[i] - ref_chosen[i]) - (rejected[i] - ref_rejected[i]))));
    Some(losses.sum::<f64>() / chosen.len() as f64)
}

fn one_step(
    name: &str,
    settings: Settings,
    expected: &Value,
    exact: Option<f64>,
    runner: &mut Runner,
    report: &mut Report,
) {
    let run = match runner.run(&settings) {
        Ok(run) => run,
        Err(error) => match runner.missing_feature(&error) {
            Some(why) => return report.not_implemented(name, why),
            None => return report.broken(name, format!("{error:#}")),
        },
    };
    let step = &run.steps[0];
    let error = |key: &str, theirs: f64| {
        let error = (step.get(key).unwrap_or(f64::NAN) - theirs).abs() / theirs.abs().max(1.0);
        if error.is_nan() { f64::INFINITY } else { error }
    };
    let beta = expected["config"]["beta"].as_f64().unwrap_or(0.1);
    let limit = LOSS.max(beta * REWARD / 2.0);
    report.within(name, error("loss", expected["loss"].as_f64().unwrap_or(f64::NAN)), limit);
    if let Some(exact) = exact {
        report.within(format!("{name} against f64 sums"), error("loss", exact), LOSS);
    }
    let (mut worst, mut allowed, mut which) = (0.0, LOSS, "none");
    for key in METRICS {
        if let Some(theirs) = expected["metrics"][key].as_f64() {
            let limit = if key.starts_with("rewards") { LOSS.max(beta * REWARD) } else { LOSS };
            if error(key, theirs) / limit >= worst / allowed {
                (worst, allowed, which) = (error(key, theirs), limit, key);
            }
        }
    }
    if which != "none" {
        report.within(format!("metrics {name} (worst: {which})"), worst, allowed);
    }
    if let Some(theirs) = expected["grad_norm"].as_f64() {
        let error = error("grad_norm", theirs) * theirs.abs().max(1.0) / theirs;
        report.within(format!("grad norm {name}"), error, GRAD_NORM);
    }
}

const METRICS: [&str; 10] = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "logits/chosen",
    "logits/rejected",
    "entropy",
    "mean_token_accuracy",
];

/// The losses that the original DPO code computes and TRL does not.
fn mitchell(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("mitchell.json"))?;
    let cases = [
        ("dpo_beta0.1", "loss = \"sigmoid\"\nbeta = 0.1\n"),
        ("dpo_beta0.5", "loss = \"sigmoid\"\nbeta = 0.5\n"),
        ("cdpo_ls0.1", "loss = \"sigmoid\"\nbeta = 0.1\nlabel_smoothing = 0.1\n"),
        ("cdpo_ls0.3", "loss = \"sigmoid\"\nbeta = 0.1\nlabel_smoothing = 0.3\n"),
        ("reference_free", "loss = \"sigmoid\"\nbeta = 0.1\nreference_free = true\n"),
    ];
    for (name, objective) in cases {
        let mut settings = settings(folder, "llama-small", "plain", objective.to_owned());
        if name == "reference_free" {
            settings.reference = "kind = \"none\"".to_owned();
        }
        one_step(
            &format!("loss mitchell {name}"),
            settings,
            &json!({"loss": expected[name]["loss"]}),
            None,
            runner,
            report,
        );
    }
    report.not_implemented(
        "loss mitchell ipo_beta0.1_SUMMED_logps",
        "IPO here averages log-probs over the answer, as its paper and TRL do",
    );
    Ok(())
}
