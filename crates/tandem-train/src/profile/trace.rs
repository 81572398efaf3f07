//! A recording on a line of time, in the format that chrome://tracing and Perfetto read.
//!
//! A process is a rank, a thread a thread; steps hold phases, these hold places, and these
//! operations. Times are microseconds from the first profiled step, which all ranks begin together.

use std::ops::Range;

use serde_json::{Value, json};
use tandem_kernels::profile::{Event, EventKind, Recording};

use super::report::step_times;

/// Serialises the whole steps of a recording.
pub(crate) fn bytes(recording: &Recording, steps: Range<u64>, rank: usize) -> Vec<u8> {
    let times = step_times(recording, &steps);
    let is_inside = |event: &&Event| times.iter().any(|(_, time)| time.contains(&event.start));
    let mut events: Vec<&Event> = recording.events.iter().filter(is_inside).collect();
    // Outer events come first among equal starts.
    events.sort_by_key(|event| (event.thread, event.start, std::cmp::Reverse(event.end), depth(&event.what)));
    let names = recording.threads.iter().enumerate().map(|(thread, name)| {
        json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
    });
    let process =
        json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": format!("rank {rank}")}});
    let lines = std::iter::once(process).chain(names);
    let lines = lines.chain(events.into_iter().map(|event| line(recording, rank, event)));
    let mut bytes = b"{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n".to_vec();
    for (index, line) in lines.enumerate() {
        if index > 0 {
            bytes.extend(b",\n");
        }
        serde_json::to_writer(&mut bytes, &line).expect("memory takes everything");
    }
    bytes.extend(b"\n]}\n");
    bytes
}

fn depth(what: &EventKind) -> u8 {
    match what {
        EventKind::Step(_) => 0,
        EventKind::Phase(_) => 1,
        EventKind::Place(_) => 2,
        EventKind::Operation(_) | EventKind::Other { .. } => 3,
    }
}

fn line(recording: &Recording, rank: usize, event: &Event) -> Value {
    let (kind, name, more) = match event.what {
        EventKind::Step(step) => ("step", format!("step {step}"), Value::Null),
        EventKind::Phase(name) => ("phase", name.to_owned(), Value::Null),
        EventKind::Place(index) => ("place", recording.places[index as usize].clone(), Value::Null),
        EventKind::Operation(work) => {
            let shape = work.shape.iter().filter(|&&size| size > 0).collect::<Vec<_>>();
            let mut more = json!({"flops": work.flops, "bytes": work.bytes, "shape": shape, "dtype": work.dtype.to_string()});
            if event.launches > 0 {
                more["launches"] = json!(event.launches);
            }
            ("operation", work.op.to_owned(), more)
        }
        EventKind::Other { name, bytes } => ("other", name.to_owned(), json!({"bytes": bytes})),
    };
    let microseconds = |ns: u64| ns as f64 / 1e3;
    let mut line = json!({
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": rank,
        "tid": event.thread,
        "ts": microseconds(event.start),
        "dur": microseconds(event.end - event.start),
    });
    if !more.is_null() {
        line["args"] = more;
    }
    line
}
