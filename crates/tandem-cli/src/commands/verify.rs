//! `tandem verify`: a run's steps, computed again.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tandem_hub::ModelFiles;
use tandem_train::metrics::Split;
use tandem_train::run::verify::{
    CheckpointVerdict, ModelVerdict, RecordedRun, Request, Start, Stretch, Verdict,
};

use crate::args::{Steps, VerifyArguments, overrides};
use crate::exit::{self, Exit, mistake};
use crate::output::{print_lines, printable};
use crate::watcher::Watcher;
use crate::{hub, signals};

/// Characters of a hash that are shown where nobody compares it.
const SHORT: usize = 16;

/// Verifies, and reports an error itself: exit code 1 says that bits differ, so every failure has 2.
pub(crate) fn run(arguments: &VerifyArguments) -> Exit {
    verify(arguments).unwrap_or_else(|error| match Exit::from_error(&exit::tell(error)) {
        Exit::Interrupted => Exit::Interrupted,
        _ => Exit::UserMistake,
    })
}

/// Returns whether a path that does not exist is below a folder that does.
fn is_below(path: &Path, folder: &Path) -> anyhow::Result<bool> {
    let (path, folder) = (std::path::absolute(path)?, folder.canonicalize()?);
    let existing = path.ancestors().find_map(|above| above.canonicalize().ok());
    Ok(existing.is_some_and(|existing| existing.starts_with(&folder)))
}

fn verify(arguments: &VerifyArguments) -> anyhow::Result<Exit> {
    let run = RecordedRun::open(&arguments.run)?;
    let Steps { from, to } = arguments.steps.unwrap_or(Steps { from: None, to: None });
    let stretch = run.stretch(from, to)?;
    let start = run.start(stretch);
    let overrides = overrides(
        &arguments.overrides,
        &[
            ("--devices", "compute.devices", arguments.devices.as_deref()),
            ("--sharding", "compute.sharding", arguments.sharding.as_deref()),
            ("--threads", "compute.threads", arguments.threads.map(|threads| threads.to_string()).as_deref()),
        ],
    )?;
    let config = hub::config_text(&start.config.file_text(), &overrides, ModelFiles::Whole)?;
    let folder = tempfile::Builder::new().prefix("tandem-verify-").tempdir();
    let folder = folder.context("cannot create a temporary folder; --out names another place")?;
    let scratch = match &arguments.out {
        Some(out) if out.exists() => {
            return Err(mistake(format!("--out: {} already exists; give a new folder", out.display())));
        }
        Some(out) if is_below(out, &arguments.run)? => {
            return Err(mistake(format!(
                "--out: {} is in the run's own folder, in which nothing is written; give another",
                out.display()
            )));
        }
        Some(out) => std::path::absolute(out).with_context(|| format!("--out {}", out.display()))?,
        None => folder.path().join("run"),
    };
    let key = |text: &String| text.split_once('=').map_or(text.clone(), |(key, _)| key.trim().to_owned());
    let request = Request {
        scratch: scratch.clone(),
        keeps_checkpoints: arguments.out.is_some(),
        overridden: overrides.iter().map(key).collect(),
        force: arguments.force,
        runs_commands: arguments.run_commands,
    };
    let stop = signals::stop_flag()?;
    let mut watcher = Watcher::every(1);
    let verdict = run.recompute(stretch, config, &request, &mut watcher, &stop);
    watcher.finish();
    let Some(verdict) = verdict? else {
        tracing::info!("stopped before step {}: nothing differed so far", stretch.to);
        return Ok(Exit::Interrupted);
    };
    let lines = lines(&run, start, stretch, &verdict, arguments.out.as_ref());
    print_lines(&lines.iter().map(|line| printable(line).into_owned()).collect::<Vec<_>>())?;
    Ok(if verdict.is_same() { Exit::Done } else { Exit::Different })
}

/// Returns the report.
fn lines(
    run: &RecordedRun,
    start: &Start,
    stretch: Stretch,
    verdict: &Verdict,
    out: Option<&PathBuf>,
) -> Vec<String> {
    let Stretch { from, to } = stretch;
    let row = |name: &str, text: String| format!("  {name:<10} {text}");
    let executable = start.program.executable.as_deref().map_or("not known", short);
    let mut lines = vec![
        format!("{}, steps {from} to {to}", run.folder().display()),
        row("program", format!("tandem {} (executable {executable})", start.program.version)),
        row("arithmetic", format!("{}, {}", start.arithmetic.join(" and "), start.dtype)),
        row("ranks", format!("{} then, {} now", start.ranks, verdict.ranks)),
        row("config", short(&start.config.blake3).to_owned()),
    ];
    let inputs = start.tokens.iter().chain(start.files.iter().flatten());
    lines.extend(inputs.map(|input| {
        let name = if input.file.is_empty() { &input.name } else { &input.file };
        row("input", format!("{} {name}", short(&input.blake3)))
    }));
    lines.push(row(
        "compared",
        format!(
            "{} steps and {} evaluations, up to {} metrics each",
            verdict.num_steps, verdict.num_evaluations, verdict.num_metrics
        ),
    ));
    for checkpoint in &verdict.checkpoints {
        let compared = match &checkpoint.comparison {
            Some(comparison) => {
                format!("{} tensors, {} elements", comparison.num_tensors, comparison.num_elements)
            }
            None => "its hash, for the run has deleted it".to_owned(),
        };
        lines.push(row("compared", format!("checkpoint of step {}: {compared}", checkpoint.step)));
        lines.push(row("state", format!("{} here", checkpoint.state)));
        lines.extend(checkpoint.recorded.iter().map(|state| row("", format!("{state} in the run"))));
    }
    lines.push(match &verdict.model {
        ModelVerdict::NotCompared(reason) => row("note", format!("final/ is not compared: {reason}")),
        ModelVerdict::Compared { step, files, .. } => {
            row("compared", format!("final/, the weights after step {step}: {}", files.join(", ")))
        }
    });
    lines.extend(verdict.notes.iter().map(|note| row("note", note.clone())));
    lines.extend(out.iter().map(|out| row("kept", out.display().to_string())));
    if verdict.is_same() {
        lines.push("the same bits".to_owned());
    } else {
        lines.extend(differences(verdict));
    }
    lines
}

/// Returns the first differences: of metrics, then of a checkpoint.
fn differences(verdict: &Verdict) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(metric) = &verdict.metric {
        let number = |value: Option<f64>| value.map_or("not a number".to_owned(), |value| value.to_string());
        let split = if metric.split == Split::Eval { "the evaluation after step" } else { "step" };
        lines.push(format!(
            "other bits: the first difference is in {split} {}: {} was {} in the run, and is {} here",
            metric.step,
            metric.name,
            number(metric.recorded),
            number(metric.found)
        ));
    }
    lines.extend(
        verdict.checkpoints.iter().filter(|checkpoint| !checkpoint.is_same()).flat_map(of_checkpoint),
    );
    if let ModelVerdict::Compared { step, different, .. } = &verdict.model {
        lines.extend(different.iter().map(|name| {
            format!("other bits: final/{name} is missing or not what the weights after step {step} give")
        }));
    }
    lines
}

fn of_checkpoint(checkpoint: &CheckpointVerdict) -> Vec<String> {
    let CheckpointVerdict { step, state, recorded, comparison, damage } = checkpoint;
    let mut lines = Vec::new();
    let mut add = |text: String| lines.push(format!("other bits: checkpoint of step {step}: {text}"));
    let comparison = comparison.as_ref();
    if let Some(element) = comparison.and_then(|comparison| comparison.element.as_ref()) {
        let (index, columns) = (element.element, element.tensor.columns().max(1));
        add(format!(
            "tensor {}, element {index} (row {}, column {}) was {} ({:#010x}) in the run, and is {} ({:#010x}) here; {} of {} \
             tensors differ",
            element.tensor.name,
            index / columns,
            index % columns,
            element.recorded,
            element.recorded.to_bits(),
            element.found,
            element.found.to_bits(),
            comparison.map_or(0, |comparison| comparison.num_different),
            comparison.map_or(0, |comparison| comparison.num_tensors)
        ));
    }
    if let Some(tensor) = comparison.and_then(|comparison| comparison.tensor.as_ref()) {
        add(tensor.clone());
    }
    if let Some((key, recorded, found)) = comparison.and_then(|comparison| comparison.cursor.as_ref()) {
        add(format!("`{key}` of cursor.json was {recorded} in the run, and is {found} here"));
    }
    if let Some(recorded) = recorded.filter(|recorded| recorded != state) {
        add(format!("the hash of all state was {recorded} in the run, and is {state} here"));
    }
    if let Some(damage) = damage {
        add(format!("the run's files were changed after they were written: {damage}"));
    }
    lines
}

fn short(hash: &str) -> &str {
    hash.get(..SHORT).unwrap_or(hash)
}
