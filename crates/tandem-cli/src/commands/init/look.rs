//! A look at the model and the rows, and the plan of the run.

use std::path::Path;

use tandem_hub::ModelFiles;
use tandem_train::config::{ConfigError, Draft, Problem, Translation};
use tandem_train::inputs::RunInputs;
use tandem_train::plan::advise::advice::{advise, possible};
use tandem_train::plan::estimate::device::{DeviceTable, Devices};
use tandem_train::plan::{PlanInputs, RunPlan};
use tandem_train::{Config, size};
use toml::Value;

use crate::commands::plan;
use crate::hub;
use crate::watcher::Watcher;

/// Outcome of a look.
pub(super) enum Look {
    /// Model or rows cannot be had now, for this reason.
    NotHere(String),
    /// The plan.
    Planned { lines: Vec<String>, fits: bool, changed: bool },
}

/// Opens model and rows, plans the run, and makes it fit. `from`: the other program's run.
///
/// # Errors
/// A mistake in the file, the model or the rows.
pub(super) fn look(
    file: &Path,
    planned: Option<&Devices>,
    draft: &mut Draft,
    from: Option<&Translation>,
) -> anyhow::Result<Look> {
    let mut config = match hub::config(file, &[], ModelFiles::WithoutWeights) {
        Ok(config) => config,
        Err(error) => return unreachable(error),
    };
    let devices = plan::devices(&mut config, planned.cloned(), &DeviceTable::built_in())?;
    let mut watcher = Watcher::every(1);
    let inputs = RunInputs::open(&config, &mut watcher)?;
    watcher.finish();
    let mut lines = vec![about(&inputs)];
    let mut changed = without_idle_warmup(draft, &config, &inputs);
    if let Some(from) = from
        && let Some(tokens) = from.packed
        && let Some(line) = unpack(draft, &mut config, &inputs, tokens)
    {
        let steps = inputs.train.num_rows().div_ceil(config.train.batch_size) as u64;
        from.per_epoch.iter().for_each(|due| due.set(draft, steps));
        lines.push(line);
        changed = true;
    }
    let outline = PlanInputs::new(&inputs);
    let Devices { count, kind } = &devices;
    let plan = RunPlan::make(&config, &outline, *count, kind)?;
    if plan.fits() {
        lines.push(plan.verdict());
        return Ok(Look::Planned { lines, fits: true, changed });
    }
    // Micro-batches and checkpointing first, then shards, then host memory: never what trains.
    let keeping: Vec<_> =
        possible(&config, *count > 1).into_iter().filter(|change| !change.alters_what_trains()).collect();
    let Some(advice) = advise(&config, &outline, *count, kind, &keeping) else {
        lines.push(plan.verdict());
        lines.push(tandem_train::plan::advise::advice::in_words(&config, &outline, *count, kind));
        return Ok(Look::Planned { lines, fits: false, changed });
    };
    let needed = size::in_words(plan.fit().needed);
    let names: Vec<_> = advice.changes.iter().map(|change| change.name).collect();
    lines.push(format!(
        "without changes it needs {needed} a rank, which does not fit; changed: {}",
        names.join(", ")
    ));
    for text in &advice.overrides {
        apply(draft, text);
    }
    lines.push(advice.plan.verdict());
    Ok(Look::Planned { lines, fits: true, changed: true })
}

/// Leaves out the warm-up of a run of one step, whose learning rate would be 0.
fn without_idle_warmup(draft: &mut Draft, config: &Config, inputs: &RunInputs) -> bool {
    if !config.is_all_warmup(config.total_steps(inputs.train.num_rows())) {
        return false;
    }
    draft.remove("train.warmup_steps");
    draft.set("train.warmup_ratio", 0.0, "the rows make one step, and that of a warm-up learns nothing");
    true
}

/// A failure of the network is no mistake of the file.
fn unreachable(error: anyhow::Error) -> anyhow::Result<Look> {
    match error.downcast_ref::<ConfigError>() {
        Some(ConfigError { problem: Problem::Hub { .. }, .. }) => Ok(Look::NotHere(format!("{error:#}"))),
        _ => Err(error),
    }
}

/// One line about the model and the rows.
fn about(inputs: &RunInputs) -> String {
    let parameters = inputs.decoder.num_parameters();
    let rows = inputs.train.num_rows();
    let tokens: u64 = (0..rows.min(1000)).map(|row| inputs.train.num_tokens(row, true) as u64).sum();
    format!(
        "model: {parameters} parameters; rows: {rows}, of {} tokens on average",
        tokens.checked_div(rows.min(1000) as u64).unwrap_or(0)
    )
}

/// Counts rows where the other program's batch counts sequences of packed rows.
fn unpack(draft: &mut Draft, config: &mut Config, inputs: &RunInputs, packed: u64) -> Option<String> {
    let rows = inputs.train.num_rows();
    let tokens: u64 = (0..rows).map(|row| inputs.train.num_tokens(row, false) as u64).sum();
    let rows_per_sequence = (packed * rows as u64) as f64 / tokens.max(1) as f64;
    let sequences = draft.get("train.batch_size").and_then(Value::as_integer)?;
    let batch = (sequences as f64 * rows_per_sequence).round().max(1.0) as i64;
    let each = draft.get("train.micro_batch_size").and_then(Value::as_integer);
    draft.set(
        "train.batch_size",
        batch,
        format!("{sequences} packed sequences of {packed} tokens, {rows_per_sequence:.1} rows each"),
    );
    config.train.batch_size = batch as usize;
    if let Some(each) = each {
        draft.remove("train.micro_batch_size");
        let tokens = (each as u64 * packed) as i64;
        draft.set("train.micro_batch_tokens", tokens, format!("{each} packed sequences"));
        config.train.micro_batch = tandem_train::config::MicroBatchSize::Tokens(tokens as usize);
    }
    Some(format!("packed there: a batch of {sequences} sequences holds about {batch} rows"))
}

/// Sets a key of an override, `key=value`.
fn apply(draft: &mut Draft, text: &str) {
    let Some((key, value)) = text.split_once('=') else { return };
    let value = match (value.parse::<i64>(), value.parse::<bool>()) {
        (Ok(number), _) => Value::from(number),
        (_, Ok(flag)) => Value::from(flag),
        _ => Value::from(value),
    };
    if key.starts_with("train.micro_batch_") {
        draft.remove("train.micro_batch_size");
        draft.remove("train.micro_batch_tokens");
    }
    draft.set(key, value, "so that it fits");
}
