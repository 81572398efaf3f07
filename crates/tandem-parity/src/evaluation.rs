//! Checks that evaluation does not depend on its batch size.

use std::path::Path;

use anyhow::{Context, Result};

use crate::numbers::data_file;
use crate::numbers::read_json;
use crate::report::Report;
use crate::runner::Runner;
use crate::settings::Settings;

/// Checks `eval_bias.json`: thirteen rows in batches of 13, 5, 12 and 1, each of which must give
/// what TRL's batches of one row give. The rows are the thirteen shortest lines of the
/// conversational data, shortest first.
pub(crate) fn check(folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("eval_bias.json"))?;
    let text = std::fs::read_to_string(data_file(folder, "conv"))?;
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_by_key(|line| line.chars().count());
    let rows = runner.file("thirteen.jsonl", &(lines[..13].join("\n") + "\n"))?;
    let single = expected["1"].as_object().context("eval_bias.json has no batch size 1")?;
    for batch in [13, 5, 12, 1] {
        let models = folder.join("models");
        let settings = Settings {
            model: models.join("llama-tiny-tied"),
            adapter: None,
            reference: format!("kind = \"model\"\nmodel = {:?}", models.join("llama-tiny-tied-ref")),
            data: rows.clone(),
            eval: Some(rows.clone()),
            objective: "loss = \"sigmoid\"\nbeta = 0.1\n".to_owned(),
            batch_size: batch,
            micro_batch_size: batch,
            steps: 1,
            optimizer: "adamw",
            // The evaluation after a step of size zero sees the weights it started with.
            learning_rate: 0.0,
            warmup_steps: 0,
            max_grad_norm: 1.0,
            dtype: "f32",
        };
        let name = format!("evaluation of 13 rows in batches of {batch}");
        let run = match runner.run(&settings) {
            Ok(run) => run,
            Err(error) => {
                report.broken(name, format!("{error:#}"));
                continue;
            }
        };
        let Some(ours) = run.evaluations.last() else {
            report.broken(name, "no evaluation was made");
            continue;
        };
        let mut worst = 0.0f64;
        for (key, theirs) in single {
            let theirs = theirs.as_f64().unwrap_or(f64::NAN);
            let key = key.trim_start_matches("eval_");
            let error = (ours.get(key).unwrap_or(f64::NAN) - theirs).abs() / theirs.abs().max(1.0);
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
        report.within(name, worst, 1e-5);
    }
    Ok(())
}
