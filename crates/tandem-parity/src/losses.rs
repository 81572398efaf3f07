//! Checks every loss on the first eight pairs: value, metrics and gradient norm.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tandem_train::objective::{
    BatchTotals, Loss, ObjectiveConfig, PairLogProbs, WholeBatch, preference_loss,
};

use crate::numbers::{data_file, floats, read_json};
use crate::qwen2::model_folder;
use crate::report::Report;
use crate::runner::Runner;
use crate::settings::{Settings, objective};

/// Losses and metrics, relative to the larger of 1 and the value. Besides, either program's losses
/// are off by what a rounding of its log-probabilities to f32 does to them, which is much where a
/// loss is steep: large β, exponentials of the ratio.
const LOSS: f64 = 1e-5;
/// A reward is β times the difference of two sums of about 500, which TRL holds in f32: their last
/// bits are 6e-5.
const REWARD: f64 = 6e-5;
/// Gradient norms, relative.
const GRAD_NORM: f64 = 1e-4;

/// One optimiser step on the first eight rows, so that loss, metrics and gradient norm come from
/// the training path.
fn settings(folder: &Path, model: &str, data: &str, objective: String, runner: &Runner) -> Result<Settings> {
    let reference = model_folder(folder, &format!("{model}-ref"), runner)?;
    Ok(Settings {
        model: model_folder(folder, model, runner)?,
        adapter: None,
        reference: format!("kind = \"model\"\nmodel = {reference:?}"),
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
    })
}

/// Checks everything in `losses.json`.
pub(crate) fn check(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("losses.json"))?;
    let sums = read_json(&folder.join("forward.json"))?;
    for (model, by_data) in expected["losses"].as_object().context("losses.json holds no losses")? {
        for (data, by_loss) in by_data.as_object().into_iter().flatten() {
            for (loss, expected) in by_loss.as_object().into_iter().flatten() {
                let name = format!("loss {model} {data} {loss}");
                if loss.ends_with("_IGNORED") {
                    // This TRL ignores label smoothing under `sigmoid`; Tandem does not, and is
                    // compared with the original code's numbers instead.
                    continue;
                }
                match objective(&expected["config"]) {
                    Err(why) => report.not_implemented(name, why),
                    // TRL's own loss is no number.
                    Ok(_) if expected["loss"].as_f64().is_none() => {}
                    Ok(objective) => {
                        // The sums do not say which tokens a weight counts.
                        let is_of_sums = ["ld_alpha", "use_weighting"]
                            .iter()
                            .all(|key| matches!(expected["config"][*key], Value::Null | Value::Bool(false)));
                        let settings = settings(folder, model, data, objective, runner)?;
                        let sums = Some(&sums[model][data]).filter(|_| is_of_sums);
                        one_step(&name, settings, expected, sums, runner, report);
                    }
                }
            }
        }
    }
    mitchell(folder, runner, report)
}

/// Loss from the folder's f64 sums.
struct Exact {
    /// The loss computed from them.
    loss: f64,
    /// Change of the loss by one unit in the last place of f32 sums.
    rounding: f64,
}

fn exact(objective: &ObjectiveConfig, sums: &Value) -> Exact {
    let pairwise = |side: &str, what: &str| -> Vec<f64> {
        let [chosen, rejected] =
            ["chosen", "rejected"].map(|answer| floats(&sums[side][format!("{what}_{answer}")]));
        chosen.into_iter().zip(rejected).flat_map(|(chosen, rejected)| [chosen, rejected]).collect()
    };
    let (policy, reference) = (pairwise("policy", "sum_logps"), pairwise("ref", "sum_logps"));
    let tokens: Vec<u32> = pairwise("policy", "n_completion_tokens").into_iter().map(|n| n as u32).collect();
    let totals = BatchTotals {
        pairs: policy.len() as u64 / 2,
        chosen_tokens: tokens.iter().step_by(2).map(|&n| u64::from(n)).sum(),
    };
    let pairs = PairLogProbs {
        policy: &policy,
        reference: Some(&reference),
        answer_tokens: &tokens,
        scored_tokens: &tokens,
        ..PairLogProbs::default()
    };
    let mut loss = Loss::default();
    let mut whole = WholeBatch::from(totals);
    whole.complete(objective, &pairs);
    preference_loss(&pairs, &whole, objective, objective.beta, &mut loss);
    let moved = loss.d_log_prob.iter().zip(&policy).map(|(d, sum)| (d * sum).abs()).sum::<f64>();
    Exact { loss: loss.mean(), rounding: f64::from(f32::EPSILON) * moved / loss.weight }
}

fn one_step(
    name: &str,
    settings: Settings,
    expected: &Value,
    sums: Option<&Value>,
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
    let theirs = expected["loss"].as_f64().unwrap_or(f64::NAN);
    let mut limit = LOSS;
    if let Some(exact) = sums.map(|sums| exact(&run.objective, sums)) {
        let rounding = exact.rounding / theirs.abs().max(1.0);
        report.within(format!("{name} against f64 sums"), error("loss", exact.loss), LOSS + rounding);
        limit += 2.0 * rounding;
    }
    report.within(name, error("loss", theirs), limit);
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

/// Losses of the original DPO code that TRL lacks.
fn mitchell(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("mitchell.json"))?;
    let cases = [
        ("dpo_beta0.1", "loss = \"sigmoid\"\nbeta = 0.1\n"),
        ("dpo_beta0.5", "loss = \"sigmoid\"\nbeta = 0.5\n"),
        ("cdpo_ls0.1", "loss = \"sigmoid\"\nbeta = 0.1\nlabel_smoothing = 0.1\n"),
        ("cdpo_ls0.3", "loss = \"sigmoid\"\nbeta = 0.1\nlabel_smoothing = 0.3\n"),
        ("reference_free", "loss = \"sigmoid\"\nbeta = 0.1\nreference_free = true\n"),
        ("ipo_beta0.1_SUMMED_logps", "loss = \"ipo_sum\"\nbeta = 0.1\n"),
    ];
    for (name, objective) in cases {
        let mut settings = settings(folder, "llama-small", "plain", objective.to_owned(), runner)?;
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
    Ok(())
}
