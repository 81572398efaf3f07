//! Labelled completions whose reference is computed in advance.

use std::path::Path;

use tandem_train::Outcome;
use tandem_train::events::Silent;
use tandem_train::run::evaluation;
use tandem_train::run::run_dir::RunDirPolicy;

use super::evaluation::eval_losses;
use crate::small::Small;

/// The rewards' mean that BCO takes away is the checkpoint's.
#[test]
fn a_checkpoint_is_evaluated_as_its_run_evaluated_it() {
    let small = Small::new("kto");
    let labelled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/unpaired.jsonl");
    let data = ["train", "eval"].map(|key| format!("data.{key}={}", labelled.display()));
    let own = [
        "objective.loss=bco",
        "reference.kind=model",
        "train.eval_every=2",
        "train.save_every=2",
        "train.keep=9",
    ];
    let settings: Vec<&str> = own.into_iter().chain(data.iter().map(String::as_str)).collect();
    small.finish("run", RunDirPolicy::Fresh, &settings);
    let losses = eval_losses(&small, "run");
    let at = |step: u64| losses.iter().find(|(at, _)| *at == step).expect("it was evaluated").1;
    assert!(at(2) != at(4));
    for step in [2, 4] {
        let checkpoint = small.path(&format!("run/checkpoints/step-{step:06}"));
        let config = small.config("run", &settings);
        let record = evaluation::evaluate(&config, Some(&checkpoint), &mut Silent).unwrap();
        assert_eq!(record.get("loss").unwrap(), at(step), "step {step}");
    }
}

/// The same steps, evaluations and weights as with a second model, on one rank and two, and after a stop.
#[test]
fn a_precomputed_reference_gives_the_bits_of_a_model() {
    let small = Small::new("kto");
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
    let [labelled, pairs] = ["unpaired.jsonl", "pref_conv.jsonl"].map(|name| goldens.join(name));
    for (loss, rows) in
        [("bco", &labelled), ("apo_zero_unpaired", &pairs), ("{ bco = 1, apo_zero_unpaired = 0.5 }", &pairs)]
    {
        let settings = [
            format!("objective.loss={loss}"),
            format!("data.train={}", rows.display()),
            format!("data.eval={}", labelled.display()),
        ];
        let common =
            || settings.iter().map(String::as_str).chain(["train.eval_every=2", "train.batch_size=6"]);
        let with = |more: &[&'static str]| common().chain(more.iter().copied()).collect::<Vec<_>>();
        let model = small.finish("model", RunDirPolicy::Overwrite, &with(&["reference.kind=model"]));
        assert!(!model.computed_reference && model.eval_losses.len() > 2, "{loss}");
        for devices in ["compute.devices=cpu:1", "compute.devices=cpu:2"] {
            // A cache of its own: each number of ranks computes the reference itself.
            let cache = format!("data.cache={}", small.path(&format!("cache-{devices}-{loss}")).display());
            let settings: Vec<&str> =
                with(&["reference.kind=precompute", devices]).into_iter().chain([&cache[..]]).collect();
            let name = "precomputed";
            let found = small.finish(name, RunDirPolicy::Overwrite, &settings);
            assert!(found.computed_reference, "{loss} on {devices}");
            assert_eq!(found.steps, model.steps, "{loss} on {devices}");
            assert_eq!(found.eval_losses, model.eval_losses, "{loss} on {devices}");
            assert!(small.weights(name) == small.weights("model"), "{loss} on {devices}");
            let (before, outcome) = small.run(name, RunDirPolicy::Overwrite, Some(3), &settings);
            assert!(matches!(outcome, Ok(Outcome::Stopped(Some(_)))), "{outcome:?}");
            let after = small.finish(name, RunDirPolicy::Resume, &settings);
            assert_eq!([before.steps, after.steps].concat(), model.steps, "{loss} on {devices}, resumed");
            assert!(small.weights(name) == small.weights("model"), "{loss} on {devices}, resumed");
        }
    }
}
