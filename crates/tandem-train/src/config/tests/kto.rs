//! References that `method = "kto"` accepts and refuses.

use super::*;

fn kto() -> String {
    SMALL_SFT.replace("\"sft\"", "\"kto\"")
}

#[test]
fn a_loss_without_mismatched_completions_has_a_precomputed_reference() {
    use ReferenceKind::{Adapter, Base, Model, None as NoReference, Precompute, Sync};
    for (overrides, kind) in [
        (&[][..], Model),
        (&["adapter.rank=4"], Base),
        (&["adapter.start=runs/sft/final"], Adapter),
        (&["objective.loss={ bco = 1, kto = 0.5 }"], Model),
        (&["objective.loss=bco"], Precompute),
        (&["objective.loss=apo_zero_unpaired", "adapter.rank=4"], Precompute),
        (&["objective.loss={ bco = 1, apo_zero_unpaired = 0.5 }", "reference.kind=precompute"], Precompute),
        (&["objective.loss=bco", "reference.model=r"], Precompute),
        (&["objective.loss=bco", "reference.kind=model"], Model),
        (&["objective.loss=bco", "reference.kind=sync"], Sync),
        (&["objective.loss=bco", "adapter.rank=4", "reference.kind=base"], Base),
        (&["objective.loss=bco", "objective.reference_free=true"], NoReference),
    ] {
        let (folder, config) = load_with(&kto(), overrides);
        let config = config.unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
        assert_eq!(config.reference.kind, kind, "{overrides:?}");
        let path = folder.path().join("again.toml");
        fs::write(&path, config.to_toml()).expect("written");
        let again = Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
        assert_eq!(again, config, "{overrides:?}");
    }
    for loss in ["kto", "{ bco = 1, kto = 0.5 }"] {
        let found = refusal(&kto(), &[&format!("objective.loss={loss}"), "reference.kind=precompute"]);
        assert!(found.contains("the loss \"kto\" scores prompts with completions of other rows"), "{found}");
    }
}

#[test]
fn samples_are_refused_with_the_method_that_has_none() {
    for samples in ["train.samples=3", "train.samples=0"] {
        let found = refusal(&kto(), &[samples]);
        assert!(
            found.contains("`train.samples`: method = \"kto\" has no samples; `tandem generate`"),
            "{found}"
        );
    }
}
