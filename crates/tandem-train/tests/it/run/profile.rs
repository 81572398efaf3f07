//! Profiles of whole runs: that every rank writes one, that it tells of what ran, and that nothing else changes.

use std::fs;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_comm::threads;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Event, Observer, Options, Outcome, Trainer};

use super::ranks::log;
use crate::small::Small;

/// Keeps the table that is shown.
#[derive(Default)]
struct Shown {
    tables: Vec<String>,
    warnings: Vec<String>,
}

impl Observer for Shown {
    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Profiled { report, .. } => self.tables.push(report.to_string()),
            Event::Warning(text) => self.warnings.push((*text).to_owned()),
            _ => {}
        }
    }
}

fn profiled(config: &Config) -> Shown {
    let mut shown = Shown::default();
    let options = Options { profile: true, ..RunDirPolicy::Overwrite.into() };
    let outcome = spawn::train(config, options, &mut shown, &AtomicBool::new(false)).unwrap();
    assert!(matches!(outcome, Outcome::Finished(_)));
    shown
}

fn read(small: &Small, file: &str) -> String {
    let path = small.path("run").join("profile").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(small: &Small, file: &str) -> Value {
    serde_json::from_str(&read(small, file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn names<'a>(list: &'a Value, key: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|item| item[key].as_str().unwrap()).collect()
}

fn sum(list: &Value) -> f64 {
    list.as_array().unwrap().iter().map(|item| item["ms"].as_f64().unwrap()).sum()
}

/// The lines of a trace that last: category, name, thread, and nanoseconds of beginning and end.
fn spans(trace: &Value) -> Vec<(String, String, u64, u64, u64)> {
    let ns = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as u64;
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
    let span = |event: &Value| {
        let start = ns(&event["ts"]);
        let thread = event["tid"].as_u64().unwrap();
        (text(&event["cat"]), text(&event["name"]), thread, start, start + ns(&event["dur"]))
    };
    events.map(span).collect()
}

/// Checks that spans of a thread nest or follow each other: step, phase, place, operation.
fn assert_nested(spans: &[(String, String, u64, u64, u64)]) {
    let mut open: Vec<&(String, String, u64, u64, u64)> = Vec::new();
    for span in spans {
        open.retain(|outer| outer.2 == span.2 && outer.4 > span.3);
        if let Some(outer) = open.last() {
            assert!(span.4 <= outer.4, "{span:?} begins in {outer:?} and ends after it");
            let order = ["step", "phase", "place", "operation"];
            let depth = |kind: &str| order.iter().position(|known| *known == kind).unwrap_or(3);
            assert!(depth(&outer.0) < depth(&span.0), "{span:?} in {outer:?}");
        }
        open.push(span);
    }
}

/// From a step's first phase to its end a phase follows a phase, and no operation comes before. How long it takes to come to the
/// first phase is the machine's affair.
fn assert_gapless(spans: &[(String, String, u64, u64, u64)]) {
    for step in spans.iter().filter(|span| span.0 == "step") {
        let within = |kind: &str| -> Vec<(u64, u64)> {
            let of_kind = spans.iter().filter(|span| span.0 == kind && span.2 == step.2);
            let times = of_kind.map(|span| (span.3, span.4));
            times.filter(|(begins, _)| (step.3..step.4).contains(begins)).collect()
        };
        let phases = within("phase");
        assert!(phases.windows(2).all(|pair| pair[0].1 == pair[1].0), "{step:?}: {phases:?}");
        assert_eq!(phases.last().unwrap().1, step.4, "{step:?}: {phases:?}");
        assert!(within("operation").iter().all(|(begins, _)| *begins >= phases[0].0), "{step:?}");
    }
}

#[test]
fn every_rank_writes_what_ran_and_the_bits_are_those_of_a_run_without_it() {
    let small = Small::new("dpo");
    let settings = ["reference.kind=model", "compute.devices=cpu:2", "train.steps=9", "compute.threads=1"];
    small.finish("run", RunDirPolicy::Fresh, &settings);
    let expected = (log(&small, "run"), small.weights("run"));
    let shown = profiled(&small.config("run", &settings));
    assert!((log(&small, "run"), small.weights("run")) == expected, "a profile changed the run");
    assert_eq!(shown.tables, [read(&small, "rank-0.txt")]);
    for rank in 0..2 {
        let report = json(&small, &format!("rank-{rank}.json"));
        assert_eq!((&report["rank"], &report["machine"]["num_ranks"]), (&rank.into(), &2.into()));
        let steps: Vec<_> = report["steps"].as_array().unwrap().iter().map(|step| step[0].as_u64()).collect();
        assert_eq!(steps, [3, 4, 5, 6, 7].map(Some));
        let operations = names(&report["operations"], "name");
        for expected in [
            "linear",
            "linear_backward_input",
            "linear_backward_weight",
            "attention",
            "attention_backward",
            "rms_norm",
            "rms_norm_backward",
            "gated",
            "gated_backward",
            "rope",
            "embedding",
            "embedding_backward",
            "head",
            "head_backward",
            "exact_sum",
            "block_squares",
            "adamw",
            "all_reduce",
        ] {
            assert!(operations.contains(&expected), "no {expected} in {operations:?}");
        }
        let phases = names(&report["phases"], "name");
        for expected in ["data", "reference pass", "forward", "forward head", "loss", "backward", "update"] {
            assert!(phases.contains(&expected), "no {expected} in {phases:?}");
        }
        // Whatever was measured: operations lie in phases, and these in steps.
        let (step, phases) = (report["ms"].as_f64().unwrap(), sum(&report["phases"]));
        assert!(sum(&report["operations"]) <= step, "{report}");
        assert!(phases <= step * (1.0 + 1e-9), "{phases} of {step} ms");
        for phase in report["phases"].as_array().unwrap() {
            assert!(phase["outside_ms"].as_f64().unwrap() >= -1e-9, "{phase}");
        }
        // The same steps take the same from the arena, and it does not grow.
        let memory = &report["memory"];
        assert_eq!((&memory["rise"], memory["allocations"].as_u64() > Some(10)), (&0.into(), true));
        assert_eq!(report["lost"], 0);
        let spans = spans(&json(&small, &format!("rank-{rank}.trace.json")));
        assert_nested(&spans);
        let steps: Vec<_> = spans.iter().filter(|span| span.0 == "step").map(|span| &span.1[..]).collect();
        assert_eq!(steps, ["step 3", "step 4", "step 5", "step 6", "step 7"]);
        assert_gapless(&spans);
        let linears = spans.iter().filter(|span| span.1 == "linear").count();
        let row = &report["operations"].as_array().unwrap()
            [operations.iter().position(|op| *op == "linear").unwrap()];
        assert!((row["calls"].as_f64().unwrap() * 5.0 - linears as f64).abs() < 1e-6, "{linears} and {row}");
    }
    // The next run without a profile leaves none of this one's.
    small.finish("run", RunDirPolicy::Overwrite, &settings);
    assert!(!small.path("run").join("profile").exists());
}

#[test]
fn what_goes_on_beside_training_has_threads_of_its_own() {
    let small = Small::new("sft");
    let settings = [
        "compute.devices=cpu:2",
        "compute.sharding=zero3",
        "compute.threads=1",
        "train.save_every=1",
        "train.steps=8",
    ];
    profiled(&small.config("run", &settings));
    let report = json(&small, "rank-1.json");
    let beside = report["beside"].as_array().unwrap();
    let of = |thread: &str| {
        let thread = beside.iter().find(|beside| beside["thread"] == thread);
        names(&thread.unwrap_or_else(|| panic!("no {thread:?}"))["rows"], "name")
    };
    assert!(of("rank 1 gather").contains(&"all_gather") && of("rank 1 gather").contains(&"cast"));
    assert_eq!(of("rank 1 reduce"), ["reduce_scatter"]);
    assert_eq!(of("checkpoint"), ["write"]);
    assert!(names(&report["phases"], "name").contains(&"checkpoint"));
    assert!(names(&report["operations"], "name").contains(&"wait"));
    let spans = spans(&json(&small, "rank-1.trace.json"));
    assert_nested(&spans);
    let threads: std::collections::HashSet<_> = spans.iter().map(|span| span.2).collect();
    assert!(threads.len() >= 4, "{threads:?}");
}

#[test]
fn a_long_run_is_recorded_no_longer_than_a_short_one_and_a_shorter_one_as_far_as_it_goes() {
    let small = Small::new("sft");
    let recorded = |steps: u64| {
        let steps = format!("train.steps={steps}");
        let settings = [&steps, "train.warmup_steps=0", "train.save_every=1000"];
        let shown = profiled(&small.config("run", &settings));
        assert_eq!((shown.tables.len(), shown.warnings.len()), (1, 0));
        let spans = spans(&json(&small, "rank-0.trace.json"));
        assert_nested(&spans);
        let steps = spans.iter().filter(|span| span.0 == "step").map(|span| span.1.clone());
        (steps.collect::<Vec<_>>(), spans.len())
    };
    let (steps, count) = recorded(40);
    assert_eq!((steps, count), recorded(8));
    assert_eq!(recorded(1).0, ["step 1"]);
    assert_eq!(recorded(2).0, ["step 2"]);
    assert_eq!(recorded(4).0, ["step 3", "step 4"]);
}

#[test]
fn a_run_that_is_stopped_tells_of_the_whole_steps_that_it_took() {
    let small = Small::new("sft");
    let config = small.config("run", &["train.steps=50"]);
    let options = |start| Options { profile: true, ..Options::from(start) };
    for (steps, tables, warnings) in [(4, 1, 0), (2, 0, 1)] {
        struct Stopping<'a>(Shown, &'a AtomicBool, u64);
        impl Observer for Stopping<'_> {
            fn event(&mut self, event: &Event<'_>) {
                if matches!(event, Event::Record(record) if record.step() == self.2) {
                    self.1.store(true, std::sync::atomic::Ordering::Relaxed);
                }
                self.0.event(event);
            }
        }
        let stop = AtomicBool::new(false);
        let mut stopping = Stopping(Shown::default(), &stop, steps);
        let outcome = spawn::train(&config, options(RunDirPolicy::Overwrite), &mut stopping, &stop).unwrap();
        assert!(matches!(outcome, Outcome::Stopped(_)));
        assert_eq!((stopping.0.tables.len(), stopping.0.warnings.len()), (tables, warnings));
        if tables > 0 {
            let report = json(&small, "rank-0.json");
            let steps: Vec<_> =
                report["steps"].as_array().unwrap().iter().map(|step| step[0].as_u64()).collect();
            assert_eq!(steps, [Some(3), Some(4)]);
        }
    }
}

#[test]
fn ranks_that_do_not_all_profile_are_refused() {
    let small = Small::new("sft");
    let config = small.config("run", &[]);
    let errors = std::thread::scope(|scope| {
        let groups = threads::groups(2, std::time::Duration::from_secs(600));
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let config = config.clone();
                scope.spawn(move || {
                    let options = Options { profile: group.rank() == 0, ..RunDirPolicy::Fresh.into() };
                    Trainer::on_rank(config, options, group, &mut Silent).err().map(|error| error.to_string())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        let error = error.expect("it is refused");
        assert_eq!(error, "--profile was given to some ranks and not to others: give it to all, or to none");
    }
    assert!(!small.path("run").exists(), "nothing is begun");
}
