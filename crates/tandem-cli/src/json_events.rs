//! A run's events on stdout, for a program: `tandem train --json`.

use serde_json::{Value, json};
use tandem_train::Event;

use crate::output::print_lines;

/// Prints an event as an object with a `kind`, if a program has a use for it.
///
/// # Errors
/// If stdout cannot be written.
pub(crate) fn print(event: &Event<'_>) -> anyhow::Result<()> {
    to_json(event).map_or(Ok(()), |value| print_lines(&[value.to_string()]))
}

fn to_json(event: &Event<'_>) -> Option<Value> {
    Some(match event {
        Event::Plan(plan) => json!({
            "kind": "plan",
            "arena_bytes": plan.arena_bytes(),
            "host_bytes": plan.host_bytes(),
            "file_bytes": plan.file_bytes(),
        }),
        Event::Started { step, steps, resumed_from, .. } => {
            json!({ "kind": "started", "step": step, "steps": steps, "resumed_from": resumed_from })
        }
        Event::Record(record) => {
            let kind = [("kind".to_owned(), Value::from("record"))];
            Value::Object(kind.into_iter().chain(record.object()).collect())
        }
        Event::Samples { step, samples } => json!({
            "kind": "samples",
            "step": step,
            "samples": samples.iter().map(|sample| sample.to_json(*step)).collect::<Vec<_>>(),
        }),
        Event::Skipped { step, reason, rows, in_a_row } => {
            json!({ "kind": "skipped", "step": step, "reason": reason, "rows": rows, "in_a_row": in_a_row })
        }
        Event::Saved(path) => json!({ "kind": "saved", "checkpoint": path.display().to_string() }),
        Event::Best { step, metric, value } => {
            json!({ "kind": "best", "step": step, "metric": metric, "value": value })
        }
        Event::StoppedEarly { step, evaluations } => {
            json!({ "kind": "stopped_early", "step": step, "evaluations": evaluations })
        }
        Event::Stopped { step } => json!({ "kind": "stopped", "step": step }),
        Event::Finished(path) => json!({ "kind": "finished", "model": path.display().to_string() }),
        Event::Advice(advice) => {
            json!({ "kind": "advice", "step": advice.step, "message": advice.to_string() })
        }
        Event::Warning(text) => json!({ "kind": "warning", "message": text }),
        Event::StartingGap { per_token } => json!({ "kind": "starting_gap", "nats_per_token": per_token }),
        Event::Tokenizing { .. } | Event::Data { .. } | Event::Reference { .. } | Event::Profiled { .. } => {
            return None;
        }
    })
}
