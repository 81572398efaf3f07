//! Models in which some blocks have linear attention: the same bits on any number of ranks, in every kind of run.

use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::log;
use super::tensor::{config_of, write_model};
use crate::small::Small;

/// Five blocks, the fourth with attention: shards and stages hold blocks of both kinds, and of one.
fn model(small: &Small) -> String {
    let mut config = config_of("qwen3.5");
    (config["num_hidden_layers"], config["full_attention_interval"]) = (5.into(), 4.into());
    write_model(small, "qwen3.5", &config)
}

/// Each place must end with the log and the weights of one rank.
pub fn same_everywhere(small: &Small, model: &str, own: &[&str], places: &[&[&str]]) {
    let common = [&[model, "compute.threads=1", "train.learning_rate=1e-3"][..], own].concat();
    small.finish("one", RunDirPolicy::Overwrite, &common);
    let expected = (log(small, "one"), small.weights("one"));
    for place in places {
        small.finish("other", RunDirPolicy::Overwrite, &[&common[..], place].concat());
        assert_eq!(log(small, "other"), expected.0, "{own:?} {place:?}: the log");
        assert!(small.weights("other") == expected.1, "{own:?} {place:?}: what was saved");
    }
}

pub const PLACES: [&[&str]; 5] = [
    &["compute.devices=cpu:2", "compute.sharding=zero3"],
    &["compute.devices=cpu:4", "compute.sharding=zero2"],
    &["compute.devices=cpu:2", "compute.pipeline=2"],
    &["compute.checkpointing=block"],
    &["compute.devices=cpu:2", "compute.sharding=zero1", "compute.checkpointing=selective"],
];

/// Settings of each kind of training.
const KINDS: [&[&str]; 4] = [
    &["reference.kind=model"],
    &["compute.dtype=bf16", "reference.kind=precompute"],
    &["adapter.rank=4", "reference.kind=base"],
    &["adapter.rank=4", "adapter.kind=dora", "reference.kind=base", "compute.format=nf4"],
];

/// Each kind is in every other place.
#[test]
fn full_training_and_adapters_end_with_the_same_bits() {
    for (first, kind) in KINDS.into_iter().enumerate() {
        let places: Vec<_> = PLACES.into_iter().skip(first % 2).step_by(2).collect();
        let small = Small::new("dpo");
        same_everywhere(&small, &model(&small), kind, &places);
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn every_kind_in_every_place_ends_with_the_same_bits() {
    for kind in KINDS {
        let small = Small::new("dpo");
        same_everywhere(&small, &model(&small), kind, &PLACES);
    }
}

#[test]
fn online_answers_and_weights_are_the_same_on_ranks() {
    let places = [&["compute.devices=cpu:2", "compute.sharding=zero3"][..], &["compute.devices=cpu:3"]];
    let small = Small::new("online");
    same_everywhere(&small, &model(&small), &["train.batch_size=6"], &places);
}
