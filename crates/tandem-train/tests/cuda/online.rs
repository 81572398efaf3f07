//! Online runs on GPUs: the same answers and weights on any number of them, also while they train, in the memory that the plan says.

use std::fs;

use serde_json::Value;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;
use crate::{machine, placed};

const COMMON: [&str; 5] = [
    "train.steps=3",
    "train.batch_size=3",
    "online.max_new_tokens=7",
    "online.samples_every=1",
    "train.learning_rate=3e-3",
];

fn same_on(own: &[&str], places: &[&[&str]]) {
    machine();
    let small = Small::new("online");
    let run = |name: &str, place: &[&str]| {
        let steps = small.finish(name, RunDirPolicy::Overwrite, &[&COMMON, own, place].concat()).steps;
        let samples = fs::read_to_string(small.path(name).join("samples.jsonl")).unwrap();
        (steps, samples, small.weights(name))
    };
    let expected = run("here", &["compute.devices=cuda:0"]);
    let lines = || expected.0.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    assert!(lines().any(|line| line["pairs"].as_u64() > Some(0)), "there is something to learn from");
    for place in places.iter().filter_map(|place| placed(place)) {
        let found = run("there", &place);
        assert_eq!(found.0, expected.0, "{own:?} on {place:?}");
        assert_eq!(found.1, expected.1, "{own:?} on {place:?}: samples");
        assert!(found.2 == expected.2, "{own:?} on {place:?}: the final weights");
    }
}

#[test]
fn answers_are_the_same_on_any_number_of_gpus() {
    let zero3 = &["compute.devices=cuda:2,3", "compute.sharding=zero3"];
    same_on(&["compute.dtype=bf16"], &[zero3, &["compute.devices=cuda:1", "compute.offload=host"]]);
}

/// In a stream of its own, which reads what another stream writes before and after.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn so_are_those_that_come_while_a_step_trains() {
    let zero3 = &["compute.devices=cuda:0,1", "compute.sharding=zero3"];
    same_on(&["online.overlap=true"], &[zero3, &["compute.devices=cuda:2", "compute.offload=host"]]);
    let adapter = ["online.overlap=true", "adapter.rank=4", "compute.format=nf4", "online.algorithm=xpo"];
    same_on(&adapter, &[&["compute.devices=cuda:2,3", "compute.sharding=zero3"]]);
}

#[test]
fn weights_in_a_file_are_lent_too() {
    let folder = tempfile::tempdir().unwrap();
    let folder = format!("compute.offload_dir={}", folder.path().display());
    let file = &["compute.devices=cuda:1", "compute.offload=nvme", &folder];
    same_on(&["online.overlap=true"], &[&file[..]]);
}
