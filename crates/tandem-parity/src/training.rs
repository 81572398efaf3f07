//! Whole training runs: loss and gradient norm of each step, and the final weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::numbers::data_file;
use crate::numbers::read_json;
use crate::report::{Report, length};
use crate::runner::{Run, Runner};
use crate::settings::Settings;
use crate::weights::Weights;

struct Tolerance {
    /// Loss, relative to the larger of 1 and the loss.
    loss: f64,
    /// Gradient norm, relative.
    grad_norm: f64,
    /// Norm of a final tensor, relative.
    norm: f64,
    /// Elements of a final tensor, relative to the largest step of an element.
    elements: f64,
}

const F32: Tolerance = Tolerance { loss: 1e-4, grad_norm: 1e-4, norm: 1e-5, elements: 2e-4 };
/// bf16 keeps 8 bits; TRL's own bf16 run is as far from its f32 run.
const BF16: Tolerance = Tolerance { loss: 1e-2, grad_norm: 5e-2, norm: 1e-4, elements: f64::INFINITY };

/// Checks everything under `train/`.
pub(crate) fn check(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let mut files: Vec<_> = std::fs::read_dir(folder.join("train"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_, std::io::Error>>()?;
    files.retain(|path| path.extension().is_some_and(|e| e == "json"));
    files.sort();
    let mut reference_curve = BTreeMap::new();
    for file in files {
        let expected = read_json(&file)?;
        let name = file.file_stem().and_then(|s| s.to_str()).context("a name that is not UTF-8")?.to_owned();
        let settings = match settings(folder, &name, &expected) {
            Ok(settings) => settings,
            Err(why) => {
                report.not_implemented(format!("train {name}"), why);
                continue;
            }
        };
        match runner.run(&settings) {
            Ok(run) => {
                compare(&name, &settings, &run, &expected, folder, report)?;
                if name == "full_8x1" {
                    reference_curve = run.curve("loss");
                } else if settings.dtype == "bf16" {
                    beside(&name, &run, &reference_curve, report);
                }
            }
            Err(error) => match runner.missing_feature(&error) {
                Some(why) => report.not_implemented(format!("train {name}"), why),
                None => report.broken(format!("train {name}"), format!("{error:#}")),
            },
        }
    }
    Ok(())
}

fn settings(folder: &Path, name: &str, expected: &Value) -> Result<Settings, String> {
    let model = folder.join("models/llama-small");
    let mut settings = Settings {
        reference: match name {
            "lora_r8" => "kind = \"base\"".to_owned(),
            "lora_two_adapters" => "kind = \"adapter\"".to_owned(),
            _ => format!("kind = \"model\"\nmodel = {model:?}"),
        },
        adapter: adapter(folder, name).map(|start| format!("start = {start:?}")),
        model,
        data: data_file(folder, if name.contains("data=plain") { "plain" } else { "conv" }),
        eval: None,
        objective: String::new(),
        batch_size: 0,
        micro_batch_size: 0,
        steps: 0,
        optimizer: "",
        learning_rate: 0.0,
        warmup_steps: 0,
        max_grad_norm: 0.0,
        dtype: "f32",
    };
    settings.apply(&expected["args"])?;
    // The batch is stated over all ranks.
    settings.batch_size *= expected["world"].as_u64().unwrap_or(1);
    Ok(settings)
}

/// Folder of the starting adapter.
fn adapter(folder: &Path, name: &str) -> Option<PathBuf> {
    let start = match name {
        "lora_r8" => "lora_r8_init",
        "lora_two_adapters" => "lora-pretrained",
        _ => return None,
    };
    Some(folder.join("adapters").join(start))
}

fn compare(
    name: &str,
    settings: &Settings,
    run: &Run,
    expected: &Value,
    folder: &Path,
    report: &mut Report,
) -> Result<()> {
    let allowed = if settings.dtype == "bf16" { BF16 } else { F32 };
    let steps = expected["steps"].as_array().context("a run without steps")?;
    if run.steps.len() != steps.len() {
        report
            .broken(format!("train {name}"), format!("{} steps, expected {}", run.steps.len(), steps.len()));
        return Ok(());
    }
    let worst = |key: &str, scale: fn(f64) -> f64| {
        run.steps.iter().zip(steps).fold(0.0f64, |worst, (ours, theirs)| {
            let theirs = theirs[key].as_f64().unwrap_or(f64::NAN);
            let error = (ours.get(key).unwrap_or(f64::NAN) - theirs).abs() / scale(theirs);
            if error.is_nan() { f64::INFINITY } else { worst.max(error) }
        })
    };
    report.within(
        format!("train {name} loss of {} steps", steps.len()),
        worst("loss", |l| l.abs().max(1.0)),
        allowed.loss,
    );
    report.within(format!("train {name} grad norm"), worst("grad_norm", f64::abs), allowed.grad_norm);
    report.within(format!("train {name} learning rate"), worst("learning_rate", |_| 1e-4), 1e-9);

    let ours = Weights::read(&run.final_folder())?;
    let mut error = 0.0f64;
    for (tensor, theirs) in expected["final"].as_object().into_iter().flatten() {
        let theirs = theirs["norm"].as_f64().unwrap_or(f64::NAN);
        // In memory peft puts the adapter's name into tensor names.
        let norm =
            ours.get(&tensor.replace(".default.", ".")).map_or(f64::NAN, |w| length(w.iter().copied()));
        error = error.max(((norm - theirs) / theirs).abs());
        if norm.is_nan() {
            error = f64::INFINITY;
        }
    }
    report.within(format!("train {name} norms of final tensors"), error, allowed.norm);

    let start = adapter(folder, name);
    let kind = if start.is_some() { "adapters" } else { "train" };
    let final_folder = folder.join(kind).join(format!("{name}_final"));
    if final_folder.exists() {
        let initial = start.as_ref().unwrap_or(&settings.model);
        let (theirs, initial) = (Weights::read(&final_folder)?, Weights::read(initial)?);
        for tensor in theirs.names() {
            let (t, i) = (theirs.get(tensor).unwrap_or_default(), initial.get(tensor).unwrap_or_default());
            elements(
                &format!("train {name} {tensor}"),
                &ours.get(tensor).unwrap_or_default(),
                &t,
                &i,
                &allowed,
                report,
            );
        }
    }
    Ok(())
}

/// A final tensor element by element, against the largest step that one of its elements took. AdamW
/// divides by the gradient's own size, so where a gradient is little more than rounding (rows of
/// rare tokens), so is the step: one element in a thousand may be further away, and all of them
/// together may not.
fn elements(
    name: &str,
    ours: &[f64],
    theirs: &[f64],
    initial: &[f64],
    allowed: &Tolerance,
    report: &mut Report,
) {
    if ours.len() != theirs.len() || theirs.len() != initial.len() {
        return report.broken(name, format!("{} elements, expected {}", ours.len(), theirs.len()));
    }
    let differences: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).collect();
    let steps: Vec<f64> = theirs.iter().zip(initial).map(|(a, b)| (a - b).abs()).collect();
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |m, v| m.max(*v));
    let limit = allowed.elements * largest(&steps);
    // Compared this way round, so that NaN fails.
    let within = differences.iter().filter(|&&d| d <= limit).count();
    let beyond = differences.len() - within;
    report.within(
        format!("{name}: share of elements beyond {:.0e}", allowed.elements),
        beyond as f64 / theirs.len() as f64,
        1e-3,
    );
    report.within(
        format!("{name}: distance over all elements"),
        length(differences.iter().copied()) / length(steps.iter().copied()),
        allowed.elements,
    );
    if beyond > 0 {
        let worst = largest(&differences) / largest(&steps);
        report.note(name, format_args!("{beyond} of {} elements, the furthest by {worst:.1e}", theirs.len()));
    }
}

/// Shows a bf16 run's losses beside the f32 run's.
fn beside(name: &str, run: &Run, f32_curve: &BTreeMap<u64, f64>, report: &Report) {
    for (step, loss) in run.curve("loss") {
        if let Some(exact) = f32_curve.get(&step) {
            report.note(format!("train {name} step {step}"), format!("loss {loss:.6}, in f32 {exact:.6}"));
        }
    }
}
