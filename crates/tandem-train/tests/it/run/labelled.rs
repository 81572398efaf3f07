//! Labelled completions whose reference is computed in advance.

use std::path::Path;

use tandem_train::Outcome;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

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
