//! Keys that `method = "distill"` accepts and refuses.

use super::*;

const DISTILL: &str = r#"
method = "distill"
model = "m"
output = "o"
data.train = "t.jsonl"
reference.model = "teacher"
train = { batch_size = 2, steps = 3, learning_rate = 1 }
"#;

#[test]
fn every_choice_is_written_and_read_back() {
    for overrides in [
        &[][..],
        &["distill.beta=0.0", "distill.temperature=2.0", "compute.format=nf4"],
        // Its own start, which is no reference to drop.
        &["reference.model=m", "adapter.rank=4"],
    ] {
        let (folder, config) = load_with(DISTILL, overrides);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.reference.kind, ReferenceKind::Model);
        assert!(config.reference.model.is_some());
        assert_eq!(config.objective.distill, config.distill.map(|distill| distill.beta));
        let path = folder.path().join("again.toml");
        fs::write(&path, config.to_toml()).expect("written");
        let again = Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
        assert_eq!(again, config, "{overrides:?}");
    }
}

#[test]
fn what_a_distillation_lacks_is_refused() {
    let told = |override_: &str, text: &str| {
        let found = refusal(DISTILL, &[override_]);
        assert!(found.contains(text), "{override_}: {found}");
    };
    told("distill.beta=1.5", "distill.beta");
    told("distill.temperature=0", "distill.temperature");
    told("objective.beta=0.1", "the divergence of method = \"distill\" is chosen by distill.beta");
    told("objective.loss=sft", "method = \"distill\" has a single loss");
    told("reference.kind=precompute", "set kind = \"model\", and reference.model");
    told("reference.kind=none", "set kind = \"model\", and reference.model");
    told("compute.tensor=2", "compares whole vocabularies of two models");
    told("compute.pipeline=2", "compares whole vocabularies of two models");
    told("online.answers=2", "method = \"distill\" generates nothing");
    let without = DISTILL.replace("reference.model = \"teacher\"\n", "");
    let found = refusal(&without, &[]);
    assert!(found.contains("method = \"distill\" has no teacher; set reference.model"), "{found}");
    let found = refusal(SMALL_SFT, &["distill.beta=0.5"]);
    assert!(found.contains("has no [distill] table; remove it, or set method = \"distill\""), "{found}");
}
