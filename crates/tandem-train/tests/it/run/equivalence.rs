//! One effective batch, however many devices compute it and whatever is divided among them: the same bits over 20 steps.

use std::collections::HashSet;

use serde_json::{Map, Value};
use tandem_train::run::run_dir::RunDirPolicy;

use super::meshes::{self, Mesh};
use super::ranks::log;
use crate::small::Small;

const STEPS: usize = 20;
/// 32 rows a step, of which a device computes 4 at once.
const BATCH: [&str; 7] = [
    "train.batch_size=32",
    "train.micro_batch_size=4",
    "train.steps=20",
    "train.learning_rate=1e-3",
    "train.save_every=1000",
    "train.async_checkpoints=false",
    "compute.threads=1",
];

type Run = (Vec<Map<String, Value>>, Vec<u8>);

fn run(small: &Small, settings: &[&str]) -> Run {
    small.finish("run", RunDirPolicy::Overwrite, &[&BATCH, settings].concat());
    (log(small, "run"), small.weights("run"))
}

fn same_on_every_mesh(method: &'static str, settings: &[&str]) {
    let meshes: Vec<Mesh> = meshes::all().into_iter().filter(Mesh::has_whole_models).collect();
    assert_eq!(meshes.len(), 22, "23 with the single rank, as the pages say");
    same_on(&meshes, STEPS, method, settings);
}

pub(super) fn same_on(meshes: &[Mesh], steps: usize, method: &'static str, settings: &[&str]) {
    let number = format!("train.steps={steps}");
    let settings = [settings, &[number.as_str()]].concat();
    let small = Small::new(method);
    // Eight micro-batches one after another on one device; on eight devices, each has one.
    let expected = run(&small, &[&settings[..], &["compute.devices=cpu:1"]].concat());
    assert_eq!(expected.0.len(), steps);
    let losses: HashSet<_> = expected.0.iter().map(|line| line["loss"].to_string()).collect();
    assert!(losses.len() > steps / 2, "it learns: {losses:?}");
    for mesh in meshes {
        let divided = mesh.settings();
        let devices = format!("compute.devices=cpu:{}", mesh.ranks);
        let mesh: Vec<&str> = divided.iter().chain([&devices]).map(String::as_str).collect();
        let found = run(&small, &[&settings[..], &mesh].concat());
        assert_eq!(found.0, expected.0, "{settings:?} on {mesh:?}: the log");
        assert!(found.1 == expected.1, "{settings:?} on {mesh:?}: the final weights");
    }
}

#[test]
fn dpo_on_a_few_meshes() {
    let few = [(4, "zero1", 2), (4, "zero2", 2), (6, "zero3", 3), (8, "zero3", 4)];
    let few = few.map(|(ranks, sharding, replicate)| Mesh::data(ranks, sharding, replicate));
    same_on(&few, 5, "dpo", &["reference.kind=model"]);
}

/// Sorted values, tokens' weights and pairs' weights are of the whole batch or of a pair, wherever it is.
#[test]
fn losses_over_the_whole_batch_on_a_few_meshes() {
    let few = [(3, "ddp", 1), (4, "zero2", 2), (8, "zero3", 4)];
    let few = few.map(|(ranks, sharding, replicate)| Mesh::data(ranks, sharding, replicate));
    let mix = "objective.loss={ aot = 1, aot_unpaired = 0.5, sft = 0.1 }";
    same_on(&few, 3, "dpo", &["reference.kind=model", mix, "objective.ld_alpha=0.5"]);
    same_on(&few[..2], 3, "dpo", &["objective.use_weighting=true", "objective.ld_alpha=0.5"]);
    same_on(&few, 3, "kto", &["objective.undesirable_weight=2.0"]);
    same_on(&few[..2], 3, "kto", &["objective.loss={ bco = 1, apo_zero_unpaired = 0.5 }"]);
}

#[test]
fn distillation_on_a_few_meshes() {
    let few = [(3, "ddp", 1), (4, "zero2", 2), (6, "zero3", 3), (8, "zero3", 4)];
    let few = few.map(|(ranks, sharding, replicate)| Mesh::data(ranks, sharding, replicate));
    same_on(&few, 3, "distill", &[]);
    let adapted = ["adapter.rank=4", "compute.format=nf4", "distill.beta=1.0"];
    same_on(&few[3..], 3, "distill", &adapted);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn distillation_on_every_mesh() {
    same_on_every_mesh("distill", &[]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn sft_on_every_mesh() {
    same_on_every_mesh("sft", &[]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn dpo_with_a_reference_model_on_every_mesh() {
    same_on_every_mesh("dpo", &["reference.kind=model"]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn dpo_with_a_precomputed_reference_on_every_mesh() {
    same_on_every_mesh("dpo", &["reference.kind=precompute"]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn dpo_without_a_reference_on_every_mesh() {
    same_on_every_mesh("dpo", &["reference.kind=none", "objective.reference_free=true"]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn ipo_on_every_mesh() {
    same_on_every_mesh("dpo", &["reference.kind=model", "objective.loss=ipo"]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn reward_models_on_every_mesh() {
    same_on_every_mesh("reward", &["objective.center_rewards_coefficient=0.1"]);
}

/// All 32 rows at once are another cut, so other sums in f32: near, not the same bits.
#[test]
fn one_micro_batch_of_everything_is_near() {
    let small = Small::new("dpo");
    let (parts, _) = run(&small, &["reference.kind=model"]);
    small.finish(
        "whole",
        RunDirPolicy::Fresh,
        &[&BATCH[..], &["reference.kind=model", "train.micro_batch_size=32"]].concat(),
    );
    for (parts, whole) in parts.iter().zip(log(&small, "whole")) {
        for key in ["loss", "grad_norm"] {
            let [parts, whole] = [parts, &whole].map(|line| line[key].as_f64().unwrap());
            assert!((parts - whole).abs() <= 1e-5 * parts.abs(), "{key}: {parts} and {whole}");
        }
    }
}
