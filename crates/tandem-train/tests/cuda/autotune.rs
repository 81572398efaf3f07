//! Algorithms of matmuls that were timed: the same on every rank, and those of the record in a run that goes on.
//!
//! On GPU 5 of the emulated machine the second of two algorithms is the faster one, on the others the first; they have other bits.

use std::fs;
use std::sync::atomic::AtomicBool;

use tandem_kernels::cuda;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::verify::{RecordedRun, Request};

use crate::small::Small;
use crate::{machine, skipped};

const SETTINGS: &[&str] = &["train.batch_size=4", "train.micro_batch_size=1", "train.steps=4"];
const SECOND: &[&str] = &["compute.devices=cuda:5"];
const FIRST: &[&str] = &["compute.devices=cuda:6"];

/// Returns whether the machine is emulated: others have no such GPUs.
fn has_both(test: &str) -> bool {
    machine();
    let is_emulated = cuda::is_stand_in();
    if !is_emulated {
        skipped(test, "it needs emulated GPUs");
    }
    is_emulated
}

fn run(small: &Small, name: &str, start: RunDirPolicy, until: Option<u64>, own: &[&str]) -> Vec<String> {
    let (heard, outcome) = small.run(name, start, until, &[SETTINGS, own].concat());
    outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
    heard.warnings
}

fn whole(small: &Small, name: &str, own: &[&str]) -> Vec<u8> {
    assert_eq!(run(small, name, RunDirPolicy::Fresh, None, own), [""; 0], "{name}");
    small.weights(name)
}

fn record(small: &Small, name: &str) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(small.path(name).join("provenance.json")).unwrap()).unwrap()
}

#[test]
fn ranks_compute_by_the_choice_of_the_first_one() {
    if !has_both("ranks_compute_by_the_choice_of_the_first_one") {
        return;
    }
    let small = Small::new("sft");
    let second = whole(&small, "second", SECOND);
    let first = whole(&small, "first", FIRST);
    assert!(second != first, "the algorithms have other bits");
    assert!(whole(&small, "pair", &["compute.devices=cuda:5,6"]) == second);
    assert!(whole(&small, "other-pair", &["compute.devices=cuda:0,5"]) == first);
    assert!(whole(&small, "stages", &["compute.devices=cuda:5,6", "compute.pipeline=2"]) == second);
    assert!(whole(&small, "off", &[SECOND, &["compute.matmul_autotune=false"]].concat()) == first);
    let [recorded, off] = ["second", "off"].map(|name| record(&small, name)["starts"][0]["matmuls"].clone());
    assert_eq!(off, serde_json::Value::Null);
    let shapes: Vec<&str> =
        recorded.as_array().unwrap().iter().map(|matmul| matmul["shape"].as_str().unwrap()).collect();
    assert!(shapes.iter().any(|shape| shape.contains("x512x64 ")), "the head: {shapes:?}");
    let all = |name: &str| record(&small, name)["starts"][0]["matmuls"].clone();
    assert_eq!([all("pair"), all("stages")], [recorded.clone(), recorded]);
}

#[test]
fn a_run_that_goes_on_has_the_algorithms_of_its_record() {
    if !has_both("a_run_that_goes_on_has_the_algorithms_of_its_record") {
        return;
    }
    let small = Small::new("sft");
    let second = whole(&small, "second", SECOND);
    let stop = |name: &str| run(&small, name, RunDirPolicy::Fresh, Some(2), SECOND);
    let resume = |name: &str| run(&small, name, RunDirPolicy::Resume, None, FIRST);
    stop("resumed");
    assert_eq!(resume("resumed"), [""; 0]);
    assert!(small.weights("resumed") == second);
    assert_eq!(record(&small, "resumed")["starts"].as_array().unwrap().len(), 1, "nothing has changed");

    // Again with the record's algorithms.
    let recorded = RecordedRun::open(&small.path("second")).unwrap();
    let stretch = recorded.stretch(None, None).unwrap();
    let request = Request {
        scratch: small.path("again"),
        keeps_checkpoints: false,
        overridden: vec!["compute.devices".to_owned()],
        force: false,
        runs_commands: false,
    };
    let config = small.config("second", &[SETTINGS, FIRST].concat());
    let verdict = recorded.recompute(stretch, config, &request, &mut Silent, &AtomicBool::new(false));
    assert!(verdict.unwrap().expect("nobody stops it").is_same());

    // An algorithm that this library does not have.
    stop("refused");
    let path = small.path("refused").join("provenance.json");
    let text = fs::read_to_string(&path).unwrap();
    let known = "0000000000000001".repeat(8);
    assert!(text.contains(&known), "{text}");
    fs::write(&path, text.replace(&known, &"000000000000000f".repeat(8))).unwrap();
    let warnings = resume("refused");
    let expected = "cuBLASLt refuses the algorithms that the run has used for";
    assert!(warnings.len() == 1 && warnings[0].starts_with(expected), "{warnings:?}");
    assert!(small.weights("refused") != second);
    let starts = record(&small, "refused")["starts"].clone();
    assert_eq!(
        (starts[1]["step"].clone(), starts[1]["matmuls"].clone()),
        (2.into(), serde_json::Value::Null)
    );
}
