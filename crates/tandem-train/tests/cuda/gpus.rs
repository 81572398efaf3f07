//! Several GPUs, and runs that were stopped: the same bits as one that went through.

use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;
use crate::{all_gpus, has_gpus};

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn the_same_bits_on_any_number_of_gpus() {
    if !has_gpus(4, "the_same_bits_on_any_number_of_gpus") {
        return;
    }
    let small = Small::new("dpo");
    let settings = ["train.micro_batch_size=2", "reference.kind=model", "train.steps=3"];
    let run = |name: &str, place: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[&settings, place].concat()).steps
    };
    let one = run("one", &["compute.devices=cuda:0"]);
    for (name, devices, sharding) in [
        ("ddp", "cuda:0,1", "ddp"),
        ("zero1", "cuda:1,2,3", "zero1"),
        ("zero2", "cuda:0,3", "zero2"),
        ("zero3", "cuda", "zero3"),
    ] {
        let place = [format!("compute.devices={devices}"), format!("compute.sharding={sharding}")];
        let _all = (devices == "cuda").then(all_gpus);
        let steps = run(name, &place.each_ref().map(String::as_str));
        assert_eq!(steps, one, "{name}");
        assert!(small.weights(name) == small.weights("one"), "{name}");
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn frozen_weights_are_divided_too() {
    if !has_gpus(2, "frozen_weights_are_divided_too") {
        return;
    }
    let small = Small::new("dpo");
    let settings = ["adapter.rank=4", "reference.kind=base", "compute.format=nf4", "train.steps=3"];
    let run = |name: &str, place: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[&settings, place].concat()).steps
    };
    let one = run("one", &["compute.devices=cuda:0"]);
    assert_eq!(run("two", &["compute.devices=cuda:0,1", "compute.sharding=zero3"]), one);
    let small = Small::new("distill");
    let run = |name: &str, place: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[&["train.steps=3"], place].concat()).steps
    };
    let one = run("one", &["compute.devices=cuda:0"]);
    assert_eq!(run("two", &["compute.devices=cuda:0,1", "compute.sharding=zero3"]), one);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_residual_stream_of_bf16_has_the_same_bits_and_is_near_in_slices() {
    if !has_gpus(2, "a_residual_stream_of_bf16_has_the_same_bits_and_is_near_in_slices") {
        return;
    }
    let small = Small::new("dpo");
    let settings = ["compute.dtype=bf16", "adapter.kind=dora", "adapter.rank=4", "train.steps=3"];
    let run =
        |name: &str, place: &[&str]| small.finish(name, RunDirPolicy::Fresh, &[&settings, place].concat());
    let wide = run("wide", &["compute.devices=cuda:0"]);
    let one = run("one", &["compute.devices=cuda:0", "compute.residual=bf16"]);
    assert!(one.steps != wide.steps, "sums of bf16 have other bits");
    let two = ["compute.devices=cuda:0,1", "compute.residual=bf16"];
    assert_eq!(run("two", &[&two[..], &["compute.sharding=zero3"]].concat()).steps, one.steps);
    for (name, division) in [("block", "compute.checkpointing=block"), ("offload", "compute.offload=host")] {
        let again = run(name, &["compute.devices=cuda:0", "compute.residual=bf16", division]);
        assert_eq!(again.steps, one.steps, "{name}");
    }
    let slices = run("slices", &[&two[..], &["compute.tensor=2"]].concat()).losses;
    for (a, b) in one.losses.iter().zip(&slices) {
        assert!((a - b).abs() <= 1e-2 * a.abs().max(1.0), "{a} and {b}");
    }
}

/// Largest difference of two runs' losses.
fn farthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn fp8_products_have_the_same_bits_on_any_number_of_gpus() {
    if !has_gpus(2, "fp8_products_have_the_same_bits_on_any_number_of_gpus") {
        return;
    }
    for kind in ["adapter.kind=lora", "adapter.kind=dora"] {
        let small = Small::new("dpo");
        let settings = ["adapter.rank=4", kind, "reference.kind=base", "compute.format=fp8", "train.steps=3"];
        let run =
            |name: &str, own: &[&str]| small.finish(name, RunDirPolicy::Fresh, &[&settings, own].concat());
        let without = run("without", &["compute.devices=cuda:0"]).losses;
        let forward = ["compute.fp8_matmul=true"];
        let both = ["compute.fp8_matmul=true", "compute.fp8_backward=true"];
        let all = [("forward", &forward[..]), ("both", &both)].map(|(products, fp8)| {
            let one = run(products, &[&["compute.devices=cuda:0"], fp8].concat());
            for (name, own) in [
                ("two", &["compute.devices=cuda:0,1", "compute.sharding=zero3"][..]),
                ("recomputed", &["compute.devices=cuda:0", "compute.checkpointing=block"]),
            ] {
                let name = format!("{products}-{name}");
                let other = run(&name, &[fp8, own].concat());
                assert_eq!(other.losses, one.losses, "{name}");
                assert!(small.weights(&name) == small.weights(products), "{name}");
            }
            assert!(without[1..] != one.losses[1..], "activations are rounded");
            assert!(farthest(&without, &one.losses) <= 0.02, "{without:?} and {:?}", one.losses);
            one.losses
        });
        assert!(all[0][0] == all[1][0] && all[0][1..] != all[1][1..], "gradients are rounded: {all:?}");
    }
}

/// Activations keep 4 bits, with an error of 3 % at random: a loss near 6 moves in its fourth digit.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn fp8_products_learn_as_products_of_bf16_do() {
    if !has_gpus(1, "fp8_products_learn_as_products_of_bf16_do") {
        return;
    }
    let small = Small::new("sft");
    let settings = [
        "adapter.rank=8",
        "compute.dtype=bf16",
        "compute.devices=cuda:0",
        "compute.format=fp8",
        "train.learning_rate=3e-2",
        "train.steps=6",
    ];
    let run = |name: &str, fp8: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[&settings[..], fp8].concat()).losses
    };
    let without = run("without", &[]);
    let fall = |losses: &[f64]| losses[0] - losses[losses.len() - 1];
    let all = ["compute.fp8_matmul=true", "compute.fp8_backward=true"];
    for (name, fp8) in [("forward", &all[..1]), ("both", &all)] {
        let with = run(name, fp8);
        assert!(farthest(&without, &with) <= 0.01, "{name}: {without:?} and {with:?}");
        assert!(fall(&without) > 0.1 && fall(&with) > 0.9 * fall(&without), "{without:?} and {with:?}");
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn slices_and_stages_are_near() {
    if !has_gpus(2, "slices_and_stages_are_near") {
        return;
    }
    let small = Small::new("dpo");
    let settings = ["train.learning_rate=1e-3", "reference.kind=model", "train.steps=3"];
    let run = |name: &str, place: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[&settings, place].concat()).losses
    };
    let one = run("one", &["compute.devices=cuda:0"]);
    for (name, division) in [("slices", "compute.tensor=2"), ("stages", "compute.pipeline=2")] {
        let losses = run(name, &["compute.devices=cuda:0,1", division]);
        for (a, b) in one.iter().zip(&losses) {
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{name}: {a} and {b}");
        }
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn slices_of_an_adapter_are_near() {
    if !has_gpus(2, "slices_of_an_adapter_are_near") {
        return;
    }
    let targets = "adapter.targets=[\"q_proj\", \"o_proj\", \"down_proj\", \"embed_tokens\", \"lm_head\"]";
    for (kind, dtype, most) in
        [("adapter.kind=dora", "f32", 1e-5), (targets, "f32", 1e-5), ("adapter.kind=dora", "bf16", 1e-2)]
    {
        let small = Small::new("dpo");
        let dtype = format!("compute.dtype={dtype}");
        let settings = [kind, &dtype, "adapter.rank=4", "train.learning_rate=1e-3", "train.steps=3"];
        let run = |name: &str, place: &[&str]| {
            small.finish(name, RunDirPolicy::Fresh, &[&settings, place].concat()).losses
        };
        let one = run("one", &["compute.devices=cuda:0"]);
        let two = run("two", &["compute.devices=cuda:0,1", "compute.tensor=2"]);
        assert_eq!(one.len(), two.len());
        for (a, b) in one.iter().zip(&two) {
            assert!((a - b).abs() <= most * a.abs().max(1.0), "{kind} {dtype}: {a} and {b}");
        }
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    if !has_gpus(3, "a_run_that_was_stopped_goes_on_with_the_same_bits") {
        return;
    }
    let small = Small::new("dpo");
    let settings = ["compute.devices=cuda:0", "compute.dtype=bf16"];
    let whole = small.finish("whole", RunDirPolicy::Fresh, &settings);
    let (first, outcome) = small.run("parts", RunDirPolicy::Fresh, Some(3), &settings);
    outcome.unwrap();
    // On another number of them.
    let settings = ["compute.devices=cuda:1,2", "compute.dtype=bf16"];
    let rest = small.finish("parts", RunDirPolicy::Resume, &settings);
    assert_eq!([first.steps, rest.steps].concat(), whole.steps);
    assert!(small.weights("parts") == small.weights("whole"));
}
