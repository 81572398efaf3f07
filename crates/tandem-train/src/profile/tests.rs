//! Recordings that were made by hand, so that every sum is known.

use serde_json::Value;
use tandem_kernels::profile::{Event, EventKind, Recording};
use tandem_kernels::{DType, OpCost};

use super::report::Row;
use super::*;

/// One operation or byte a nanosecond; four operations of bf16.
const MACHINE: Machine = Machine {
    num_ranks: 2,
    threads: 1,
    instructions: "none",
    f32_peak: 1e9,
    bf16_peak: 4e9,
    fp8_peak: None,
    copy_rate: 1e9,
};

const MEMORY: Memory = Memory { allocations: 3, bytes: 2048, high_water: 1 << 20, rise: 0 };

fn operation(op: &'static str, dtype: DType, flops: f64, bytes: f64) -> EventKind {
    EventKind::Operation(OpCost { op, flops, bytes, dtype, shape: [4, 8, 0] })
}

/// Two steps of 1 and 2 ms, and the beginning of a third. Times are in microseconds.
fn recording() -> Recording {
    let linear = operation("linear", DType::F32, 2e5, 1e5);
    let scale = operation("scale", DType::F32, 1e3, 1e5);
    let head = operation("head", DType::Bf16, 8e5, 1e3);
    let all_reduce = EventKind::Other { name: "all_reduce", bytes: 5000 };
    let all_gather = EventKind::Other { name: "all_gather", bytes: 300 };
    let events = [
        (EventKind::Phase("data"), 0, 0, 100),
        (all_gather, 1, 200, 400),
        (linear, 0, 150, 450),
        (scale, 0, 450, 490),
        (EventKind::Place(0), 0, 100, 500),
        (head, 0, 500, 800),
        (EventKind::Place(1), 0, 500, 900),
        (EventKind::Phase("forward"), 0, 100, 900),
        (all_reduce, 0, 900, 960),
        (EventKind::Phase("reduction"), 0, 900, 1000),
        (EventKind::Step(3), 0, 0, 1000),
        (linear, 0, 1100, 1600),
        (EventKind::Place(0), 0, 1000, 3000),
        (EventKind::Phase("forward"), 0, 1000, 3000),
        (EventKind::Step(4), 0, 1000, 3000),
        // Of a step that was not taken to its end.
        (linear, 0, 3000, 3900),
        (all_gather, 1, 3000, 3900),
        (EventKind::Phase("forward"), 0, 3000, 4000),
        (EventKind::Step(5), 0, 3000, 4000),
    ];
    let event = |(what, thread, start, end): (EventKind, u32, u64, u64)| Event {
        launches: if matches!(what, EventKind::Operation(_)) { 2 } else { 0 },
        what,
        thread,
        start: 1000 * start,
        end: 1000 * end,
    };
    let names = |names: [&str; 2]| names.map(str::to_owned).to_vec();
    Recording {
        events: events.map(event).to_vec(),
        places: names(["forward block 0", "forward head"]),
        threads: names(["main", "rank 1 gather"]),
        lost: 0,
    }
}

#[track_caller]
fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{found}, expected {expected}");
}

#[track_caller]
fn is_row(row: &Row, name: &str, [calls, ms, flops, bytes]: [f64; 4], best_ms: Option<f64>) {
    assert_eq!(row.name, name);
    near(row.calls, calls);
    near(row.ms, ms);
    near(row.flops, flops);
    near(row.bytes, bytes);
    assert_eq!(row.best_ms.is_some(), best_ms.is_some());
    near(row.best_ms.unwrap_or(0.0), best_ms.unwrap_or(0.0));
}

#[test]
fn times_and_work_are_means_over_whole_steps_by_phase_and_operation() {
    let report = Report::new(&recording(), 3..5, 1, MACHINE, MEMORY);
    assert_eq!(report.steps, [(3, 1.0), (4, 2.0)]);
    near(report.ms, 1.5);
    let names: Vec<_> = report.phases.iter().map(|phase| &phase.name[..]).collect();
    assert_eq!(names, ["data", "forward", "forward head", "reduction"]);
    let [data, forward, head, reduction] = &report.phases[..] else { unreachable!("as said above") };
    for (phase, ms, outside) in
        [(data, 0.05, 0.05), (forward, 1.2, 0.78), (head, 0.2, 0.05), (reduction, 0.05, 0.02)]
    {
        near(phase.ms, ms);
        near(phase.outside_ms, outside);
    }
    // 0.2 ms of arithmetic at the peak, 0.1 of bytes.
    is_row(&forward.rows[0], "linear", [1.0, 0.4, 2e5, 1e5], Some(0.2));
    // Faster than a copy: what it touches was in the cache.
    is_row(&forward.rows[1], "scale", [0.5, 0.02, 500.0, 5e4], Some(0.05));
    assert_eq!([forward.rows[0].is_arithmetic, forward.rows[1].is_arithmetic], [true, false]);
    // A quarter of the time that f32 would take.
    is_row(&head.rows[0], "head", [0.5, 0.15, 4e5, 500.0], Some(0.1));
    is_row(&reduction.rows[0], "all_reduce", [0.5, 0.03, 0.0, 2500.0], None);
    let rows = [forward.rows.len(), head.rows.len(), reduction.rows.len(), report.operations.len()];
    assert_eq!(rows, [2, 1, 1, 4]);
    is_row(&report.operations[0], "linear", [1.0, 0.4, 2e5, 1e5], Some(0.2));
    near(report.operations[0].launches, 2.0);
    near(report.outside_ms, 0.9);
    near(report.arithmetic_ms, 0.3005);
    assert_eq!(report.beside.len(), 1);
    assert_eq!(report.beside[0].thread, "rank 1 gather");
    is_row(&report.beside[0].rows[0], "all_gather", [0.5, 0.1, 0.0, 150.0], None);
}

#[test]
fn time_in_no_phase_is_told() {
    let mut recording = recording();
    recording
        .events
        .retain(|event| event.what != EventKind::Phase("data") && event.what != EventKind::Place(1));
    let report = Report::new(&recording, 3..4, 1, MACHINE, MEMORY);
    let phases: Vec<_> = report.phases.iter().map(|phase| (&phase.name[..], phase.ms)).collect();
    let [("forward", forward), ("reduction", reduction), ("other", other)] = phases[..] else {
        panic!("{phases:?}")
    };
    // The head's part is told apart only where its place is.
    near(forward, 0.8);
    near(reduction, 0.1);
    near(other, 0.1);
}

#[test]
fn the_table_tells_rates_in_what_bounds_an_operation() {
    let mut recording = recording();
    recording.lost = 7;
    let text = Report::new(&recording, 3..5, 1, MACHINE, MEMORY).to_string();
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for expected in [
        "rank 1 of 2, steps 3 to 4: 1.50 ms a step (1.00 to 2.00); all numbers are means over these steps",
        "1 thread, none: products up to 1.0 GFLOP/s f32 and 4.0 GFLOP/s bf16, copies 1.00 GB/s",
        "forward 1.20 80.0 %",
        "linear 1.0 0.40 26.7 % 0.5 GFLOP/s 1.0 GFLOP/s 50 %",
        "scale 0.5 0.02 1.3 % 2.50 GB/s 1.00 GB/s 250 %",
        "head 0.5 0.15 10.0 % 2.7 GFLOP/s 4.0 GFLOP/s 67 %",
        "all_reduce 0.5 0.03 2.0 % 0.08 GB/s",
        "outside operations 0.90 60.0 %",
        "beside it, on thread \"rank 1 gather\"",
        "at the peak of its types the arithmetic of a step takes 0.30 ms, 20.0 % of it",
        "a step puts 4 kernels, matmuls and copies into the GPU's stream",
        "arena: 3 allocations a step of 2 KiB in all, given back again; high water 1024 KiB, which rose by 0 KiB in these steps",
        "there was no room to record 7 events: what they took is missing above",
    ] {
        assert!(lines.iter().any(|line| line == expected), "no {expected:?} in\n{text}");
    }
}

#[test]
fn a_trace_has_a_line_for_each_event_of_whole_steps_and_names_ranks_and_threads() {
    let bytes = trace::bytes(&recording(), 3..5, 1);
    let trace: Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |kind: &str| events.iter().filter(|event| event["ph"] == kind).collect::<Vec<_>>();
    let names: Vec<_> = of("M").iter().map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["rank 1", "main", "rank 1 gather"]);
    let lines = of("X");
    assert_eq!(lines.len(), 15);
    assert!(lines.iter().all(|line| line["pid"] == 1));
    // What begins together is nested: the outermost first.
    let first: Vec<_> = lines[..2].iter().map(|line| line["name"].as_str().unwrap()).collect();
    assert_eq!(first, ["step 3", "data"]);
    let linear = lines.iter().find(|line| line["name"] == "linear").unwrap();
    let args =
        serde_json::json!({"flops": 2e5, "bytes": 1e5, "shape": [4, 8], "dtype": "f32", "launches": 2});
    let found = [&linear["ts"], &linear["dur"], &linear["tid"], &linear["cat"], &linear["args"]];
    assert_eq!(found, [&Value::from(150.0), &300.0.into(), &0.into(), &"operation".into(), &args]);
}
