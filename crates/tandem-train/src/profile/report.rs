//! Profile report: events summed by phase and operation.

use std::ops::Range;

use serde::Serialize;
use tandem_kernels::Device;
use tandem_kernels::profile::{Event, EventKind, Recording};

use crate::plan::estimate::Machine;

/// Arena statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Memory {
    /// How often a range was taken from it, a step.
    pub allocations: u64,
    /// Bytes of these; most are given back in the same step.
    pub bytes: u64,
    /// One past the highest byte ever taken or made resident.
    pub high_water: u64,
    /// Bytes by which that rose in the profiled steps.
    pub rise: u64,
}

impl Memory {
    /// Since the device began.
    pub(super) fn new(device: &Device) -> Self {
        let (allocations, bytes) = device.taken();
        Self { allocations, bytes, high_water: device.high_water() as u64, rise: 0 }
    }

    /// Per step since `before`.
    pub(super) fn since(self, before: &Self, steps: u64) -> Self {
        Self {
            allocations: (self.allocations - before.allocations) / steps,
            bytes: (self.bytes - before.bytes) / steps,
            high_water: self.high_water,
            rise: self.high_water - before.high_water,
        }
    }
}

/// An operation, or a call between ranks, in one phase: means over the steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Row {
    /// Name.
    pub name: &'static str,
    /// Calls a step.
    pub calls: f64,
    /// Kernels, matmuls, copies and clears that they put into a GPU's stream, a step.
    pub launches: f64,
    /// Milliseconds a step.
    pub ms: f64,
    /// Operations a step.
    pub flops: f64,
    /// Bytes a step.
    pub bytes: f64,
    /// Milliseconds that it would take at best; none of a call between ranks.
    pub best_ms: Option<f64>,
    /// Whether arithmetic, not memory, is the bound.
    pub is_arithmetic: bool,
    /// Milliseconds at best of arithmetic and of bytes alone, to tell which.
    #[serde(skip)]
    bounds: (f64, f64),
}

/// A phase of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Phase {
    /// Name.
    pub name: String,
    /// Milliseconds a step.
    pub ms: f64,
    /// Operations, the longest first.
    pub rows: Vec<Row>,
    /// Milliseconds in none of these.
    pub outside_ms: f64,
}

/// Concurrent work of another thread of the rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Beside {
    /// Name.
    pub thread: String,
    /// Name of the work.
    pub rows: Vec<Row>,
}

/// A rank's profile. All times are means over the steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    /// The rank.
    pub rank: usize,
    /// Device.
    pub machine: Machine,
    /// The profiled steps, counted from 1, and milliseconds of each.
    pub steps: Vec<(u64, f64)>,
    /// Milliseconds of a step.
    pub ms: f64,
    /// In order of first start.
    pub phases: Vec<Phase>,
    /// Totals over all phases.
    pub operations: Vec<Row>,
    /// Milliseconds of the thread that trains in no operation.
    pub outside_ms: f64,
    /// Milliseconds that the arithmetic of a step would take at the peak of its types.
    pub arithmetic_ms: f64,
    /// Other threads of the rank.
    pub beside: Vec<Beside>,
    /// The device's arena.
    pub memory: Memory,
    /// Dropped events; their time is missing above.
    pub lost: u64,
}

/// The thread that trains.
const TRAINING: u32 = 0;

/// Events outside a phase.
const OTHER: &str = "other";

impl Report {
    /// Sums the whole steps of a recording.
    pub(crate) fn new(
        recording: &Recording,
        steps: Range<u64>,
        rank: usize,
        machine: Machine,
        memory: Memory,
    ) -> Self {
        let sums = Sums { recording, machine, times: step_times(recording, &steps) };
        let each = 1.0 / sums.times.len().max(1) as f64;
        let mut phases = sums.phases();
        let mut operations = Vec::new();
        for Phase { rows, .. } in &phases {
            rows.iter().for_each(|row| row_of(&mut operations, row.name).add(row));
        }
        let mut beside = sums.beside();
        let lists = phases.iter_mut().map(|phase| &mut phase.rows);
        for rows in lists.chain(beside.iter_mut().map(|thread| &mut thread.rows)).chain([&mut operations]) {
            rows.iter_mut().for_each(|row| row.finish(each));
            rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        }
        for phase in &mut phases {
            phase.ms *= each;
            phase.outside_ms = phase.ms - phase.rows.iter().map(|row| row.ms).sum::<f64>();
        }
        let steps: Vec<_> = sums.times.iter().map(|(step, time)| (*step, ms(time))).collect();
        let mean = steps.iter().map(|(_, ms)| ms).sum::<f64>() * each;
        Self {
            rank,
            machine,
            steps,
            ms: mean,
            outside_ms: mean - operations.iter().map(|row| row.ms).sum::<f64>(),
            arithmetic_ms: operations.iter().map(|row| row.bounds.0).sum(),
            phases,
            operations,
            beside,
            memory,
            lost: recording.lost,
        }
    }
}

/// When each of the steps ran.
pub(super) fn step_times(recording: &Recording, steps: &Range<u64>) -> Vec<(u64, Range<u64>)> {
    let time = |event: &Event| match event.what {
        EventKind::Step(step) if steps.contains(&step) => Some((step, event.start..event.end)),
        _ => None,
    };
    recording.events.iter().filter_map(time).collect()
}

fn ms(time: &Range<u64>) -> f64 {
    (time.end - time.start) as f64 * 1e-6
}

struct Sums<'a> {
    recording: &'a Recording,
    machine: Machine,
    times: Vec<(u64, Range<u64>)>,
}

impl Sums<'_> {
    /// Returns whether an event began within the steps.
    fn contains(&self, event: &Event) -> bool {
        self.times.iter().any(|(_, time)| time.contains(&event.start))
    }

    /// Events of the steps on a thread.
    fn events(&self, is_on: impl Fn(u32) -> bool) -> impl Iterator<Item = &Event> {
        self.recording.events.iter().filter(move |event| is_on(event.thread) && self.contains(event))
    }

    /// Sums over all steps.
    fn phases(&self) -> Vec<Phase> {
        let mut spans = self.spans();
        spans.sort_by_key(|span| span.time.start);
        let mut phases: Vec<Phase> = Vec::new();
        for span in &spans {
            phase_of(&mut phases, &span.name).ms += ms(&span.time);
        }
        let in_steps: f64 = self.times.iter().map(|(_, time)| ms(time)).sum();
        let in_phases: f64 = phases.iter().map(|phase| phase.ms).sum();
        // A microsecond between two phases is no phase.
        let is_worth_telling = in_steps - in_phases > 1e-3 * in_steps;
        if is_worth_telling {
            phase_of(&mut phases, OTHER).ms += in_steps - in_phases;
        }
        for event in self.events(|thread| thread == TRAINING) {
            let before = spans.partition_point(|span| span.time.start <= event.start);
            let span =
                spans[..before].last().filter(|span| event.start < span.time.end.max(span.time.start + 1));
            let name = span.map_or(OTHER, |span| &span.name);
            self.add(event, || &mut phase_of(&mut phases, name).rows);
        }
        phases
    }

    /// The phases of all steps one after another, and the head's part of a pass as a phase of its
    /// own.
    fn spans(&self) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut heads = Vec::new();
        for event in self.events(|thread| thread == TRAINING) {
            let time = event.start..event.end;
            match event.what {
                EventKind::Phase(name) => {
                    // Events within a phase end before it.
                    let mut start = time.start;
                    for head in heads.drain(..) {
                        let Span { name: head_name, time: head } = head;
                        // Only training passes report the head separately.
                        if !["forward", "backward"].contains(&name) {
                            continue;
                        }
                        spans.push(Span { name: name.to_owned(), time: start..head.start });
                        start = head.end;
                        spans.push(Span { name: head_name, time: head });
                    }
                    spans.push(Span { name: name.to_owned(), time: start..time.end });
                }
                EventKind::Place(index) => {
                    let name = &self.recording.places[index as usize];
                    if name.ends_with(" head") {
                        heads.push(Span { name: name.clone(), time });
                    }
                }
                _ => {}
            }
        }
        spans.retain(|span| !span.time.is_empty());
        spans
    }

    /// Sums over all steps, by thread.
    fn beside(&self) -> Vec<Beside> {
        let mut threads: Vec<Beside> = Vec::new();
        for event in self.events(|thread| thread != TRAINING) {
            let name = &self.recording.threads[event.thread as usize];
            self.add(event, || {
                let known = threads.iter().position(|thread| thread.thread == *name);
                let index = known.unwrap_or_else(|| {
                    threads.push(Beside { thread: name.clone(), rows: Vec::new() });
                    threads.len() - 1
                });
                &mut threads[index].rows
            });
        }
        threads
    }

    /// Adds an operation or a call to some rows.
    fn add<'r>(&self, event: &Event, rows: impl FnOnce() -> &'r mut Vec<Row>) {
        let time = ms(&(event.start..event.end));
        let row = match event.what {
            EventKind::Operation(work) => {
                let bounds = self.machine.best(&work);
                Row {
                    name: work.op,
                    calls: 1.0,
                    launches: f64::from(event.launches),
                    ms: time,
                    flops: work.flops,
                    bytes: work.bytes,
                    best_ms: Some(1e3 * bounds.0.max(bounds.1)),
                    is_arithmetic: false,
                    bounds: (1e3 * bounds.0, 1e3 * bounds.1),
                }
            }
            EventKind::Other { name, bytes } => {
                Row { name, calls: 1.0, ms: time, bytes: bytes as f64, ..Row::default() }
            }
            EventKind::Step(_) | EventKind::Phase(_) | EventKind::Place(_) => return,
        };
        row_of(rows(), row.name).add(&row);
    }
}

/// A stretch of a phase.
struct Span {
    name: String,
    time: Range<u64>,
}

impl Row {
    fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.launches += other.launches;
        self.ms += other.ms;
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.bounds = (self.bounds.0 + other.bounds.0, self.bounds.1 + other.bounds.1);
        if let Some(best) = other.best_ms {
            *self.best_ms.get_or_insert_default() += best;
        }
    }

    /// From sums to means.
    fn finish(&mut self, each: f64) {
        let Self { calls, launches, ms, flops, bytes, best_ms, is_arithmetic, bounds, .. } = self;
        for sum in
            [calls, launches, ms, flops, bytes, &mut bounds.0, &mut bounds.1].into_iter().chain(best_ms)
        {
            *sum *= each;
        }
        *is_arithmetic = bounds.0 > bounds.1;
    }
}

fn phase_of<'p>(phases: &'p mut Vec<Phase>, name: &str) -> &'p mut Phase {
    let known = phases.iter().position(|phase| phase.name == name);
    let index = known.unwrap_or_else(|| {
        phases.push(Phase { name: name.to_owned(), ms: 0.0, rows: Vec::new(), outside_ms: 0.0 });
        phases.len() - 1
    });
    &mut phases[index]
}

fn row_of<'r>(rows: &'r mut Vec<Row>, name: &'static str) -> &'r mut Row {
    let known = rows.iter().position(|row| row.name == name);
    let index = known.unwrap_or_else(|| {
        rows.push(Row { name, ..Row::default() });
        rows.len() - 1
    });
    &mut rows[index]
}
