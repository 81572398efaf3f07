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
        &["distill.lmbda=0.5", "distill.average=sequence", "online.answers=3"],
        &["distill.lmbda=1.0", "distill.temperature=2.0", "online.overlap=true", "online.steps_per_round=2"],
        // Its own start, which is no reference to drop.
        &["reference.model=m", "adapter.rank=4"],
    ] {
        let (folder, config) = load_with(DISTILL, overrides);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.reference.kind, ReferenceKind::Model);
        assert!(config.reference.model.is_some());
        assert_eq!(config.objective.distill, config.distill.map(|distill| distill.options()));
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
    told("online.answers=2", "or set distill.lmbda above 0");
    told("judges=[{ kind = \"length\" }]", "learns from its teacher alone");
    let without = DISTILL.replace("reference.model = \"teacher\"\n", "");
    let found = refusal(&without, &[]);
    assert!(found.contains("method = \"distill\" has no teacher; set reference.model"), "{found}");
    let found = refusal(SMALL_SFT, &["distill.beta=0.5"]);
    assert!(found.contains("has no [distill] table; remove it, or set method = \"distill\""), "{found}");
}

#[test]
fn answers_are_sampled_at_the_temperature_of_the_loss_unless_told() {
    let temperature = |overrides: &[&str]| {
        let (_folder, config) = load_with(DISTILL, overrides);
        let online = config.unwrap_or_else(|e| panic!("{e}")).online.expect("it generates");
        (online.temperature, online.num_answers)
    };
    assert_eq!(temperature(&["distill.lmbda=1.0"]), (1.0, 1));
    assert_eq!(temperature(&["distill.lmbda=0.1", "distill.temperature=2.0"]), (2.0, 1));
    let given =
        ["distill.lmbda=0.1", "distill.temperature=2.0", "online.temperature=0.5", "online.answers=4"];
    assert_eq!(temperature(&given), (0.5, 4));
}

#[test]
fn options_without_a_use_for_own_answers_are_refused() {
    let told = |overrides: &[&str], text: &str| {
        let found = refusal(DISTILL, overrides);
        assert!(found.contains(text), "{overrides:?}: {found}");
    };
    told(&["distill.lmbda=0.5", "data.loss_on=all"], "a text that is learned whole has none");
    told(&["distill.lmbda=1.0", "data.take=chosen"], "prompts alone are read");
    told(&["distill.lmbda=1.0", "data.truncation=keep_end"], "which are never cut");
    told(&["distill.lmbda=1.0", "data.shape=alpaca"], "map their column with data.columns");
    told(&["distill.lmbda=0.5", "train.samples=2"], "the policy's own answers are kept");
    told(&["distill.lmbda=0.5", "online.algorithm=xpo"], "it is for method = \"online\"");
    told(&["distill.lmbda=0.5", "online.pairs=all"], "trains on every completion and not on pairs");
    told(&["distill.lmbda=0.5", "online.replay_size=4"], "\"distill\" replays no prompts");
    told(
        &["distill.lmbda=0.5", "online.environment.command=[\"x\"]"],
        "only method = \"grpo\" has conversations",
    );
    told(
        &["distill.lmbda=0.5", "data.eval=e.jsonl", "online.eval_answers=2"],
        "held-out completions are given ones",
    );
}
