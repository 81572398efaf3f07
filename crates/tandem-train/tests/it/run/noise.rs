//! Noise on embeddings: the same wherever a row is computed, and in training alone.

use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::{held_out, log};
use crate::small::Small;

/// Large, so that other draws would be seen.
const NOISE: &str = "train.neftune_noise_alpha=50";

#[test]
fn every_mesh_draws_the_same() {
    for (method, own) in [
        ("dpo", &["reference.kind=model"][..]),
        ("dpo", &["adapter.rank=4", "reference.kind=base"]),
        ("sft", &["compute.checkpointing=block"]),
        ("kto", &[]),
    ] {
        let small = Small::new(method);
        let common = [&[NOISE, "compute.threads=1", "train.learning_rate=1e-3"], own].concat();
        small.finish("one", RunDirPolicy::Fresh, &common);
        let expected = (log(&small, "one"), small.weights("one"));
        for mesh in [
            &["compute.devices=cpu:3"][..],
            &["compute.devices=cpu:3", "compute.sharding=zero3"],
            &["compute.devices=cpu:2", "compute.sharding=zero2", "compute.pipeline=2", "train.samples=0"],
            &["compute.devices=cpu:2", "compute.tensor=2"],
        ] {
            if mesh.contains(&"compute.pipeline=2") && method == "kto" {
                continue;
            }
            small.finish("many", RunDirPolicy::Overwrite, &[&common[..], mesh].concat());
            assert_eq!(log(&small, "many"), expected.0, "{method} {own:?} on {mesh:?}: the log");
            assert!(small.weights("many") == expected.1, "{method} {own:?} on {mesh:?}: the weights");
        }
        small.run("parts", RunDirPolicy::Fresh, Some(3), &common).1.unwrap();
        small.finish("parts", RunDirPolicy::Resume, &common);
        assert_eq!(log(&small, "parts"), expected.0, "{method} {own:?}: stopped");
        small.finish("still", RunDirPolicy::Fresh, &common[1..]);
        assert!(log(&small, "still") != expected.0, "{method} {own:?}: noise changes the losses");
    }
}

/// Losses at the first weights differ by rounding alone, however rows are cut, and whether a prompt is shared.
#[test]
fn cuts_and_shared_prompts_draw_the_same() {
    for method in ["dpo", "sft"] {
        let small = Small::new(method);
        let run = |name: &str, more: &[&str]| {
            let common = [NOISE, "train.learning_rate=0", "train.samples=0"];
            small.finish(name, RunDirPolicy::Fresh, &[&common[..], more].concat()).losses
        };
        let expected = run("all", &["train.micro_batch_size=8"]);
        // The noise of a step is another step's no more.
        assert!(expected.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 1e-4), "{expected:?}");
        for (name, more) in [("one", "train.micro_batch_size=1"), ("three", "train.micro_batch_size=3")] {
            for (found, expected) in run(name, &[more]).iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 1e-5 * expected.abs().max(1.0),
                    "{more}: {found}, {expected}"
                );
            }
        }
        if method == "dpo" {
            for (found, expected) in run("apart", &["data.share_prefix=false"]).iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{found}, {expected}");
            }
        }
    }
}

/// Rows of a distillation that are given, and those that the policy answers.
#[test]
fn given_and_generated_completions_have_noise() {
    for lmbda in ["distill.lmbda=0", "distill.lmbda=0.5"] {
        let small = Small::new("distill");
        let losses = |name: &str, own: &str| {
            let common =
                ["train.learning_rate=0", "online.max_new_tokens=8", "train.steps=3", "train.warmup_steps=0"];
            let more = if lmbda.ends_with("=0") { &common[..1] } else { &common[..] };
            small.finish(name, RunDirPolicy::Fresh, &[more, &[lmbda, own]].concat()).losses
        };
        let (still, noisy) = (losses("still", "train.samples=0"), losses("noisy", NOISE));
        assert!(
            still.iter().zip(&noisy).all(|(still, noisy)| still != noisy),
            "{lmbda}: {still:?} and {noisy:?}"
        );
    }
}

#[test]
fn evaluations_have_no_noise() {
    let small = Small::new("sft");
    let eval = held_out(&small, "sft_messages.jsonl");
    let run = |name: &str, more: &[&str]| {
        let common = ["train.learning_rate=0", eval.as_str()];
        small.finish(name, RunDirPolicy::Fresh, &[&common[..], more].concat())
    };
    let (still, noisy) = (run("still", &[]), run("noisy", &[NOISE]));
    assert_eq!(still.eval_losses, noisy.eval_losses);
    assert!(still.losses != noisy.losses);
}
