//! Keys that `method = "online"` accepts and refuses.

use super::*;

pub(super) const ONLINE: &str = r#"
method = "online"
model = "m"
output = "o"
data.train = "t.jsonl"
train = { batch_size = 2, steps = 3, learning_rate = 1 }
[[judges]]
kind = "missing_eos"
"#;

fn online(overrides: &[&str]) -> Config {
    let (_folder, config) = load_with(ONLINE, overrides);
    config.unwrap_or_else(|e| panic!("{e}"))
}

/// Writes a configuration and reads the same.
fn is_read_back(overrides: &[&str]) {
    let config = online(overrides);
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("again.toml");
    fs::write(&path, config.to_toml()).expect("written");
    let again = Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
    assert_eq!(again, config, "{overrides:?}");
}

#[test]
fn little_is_needed() {
    let config = online(&[]);
    let own = config.online.as_ref().expect("an online run");
    assert_eq!((config.method, config.reference.kind), (Method::Online, ReferenceKind::Model));
    assert_eq!((own.num_answers, own.pairs, own.max_new_tokens), (2, Pairs::BestWorst, 64));
    assert_eq!((own.temperature, own.algorithm, config.judges.len()), (0.9, Algorithm::Dpo, 1));
    assert_eq!(online(&["adapter.rank=4"]).reference.kind, ReferenceKind::Base);
    assert_eq!(online(&["adapter.start=runs/sft/final"]).reference.kind, ReferenceKind::Adapter);
}

#[test]
fn every_choice_is_written_and_read_back() {
    for overrides in [
        &[][..],
        &["online.algorithm=xpo", "online.alpha=0.5", "online.stop=[\"a\", \"\\n\"]", "online.top_k=5"],
        &["online.algorithm=nash_md", "online.mixture=0.25", "objective.beta=[0.1, 0.2]"],
        &["online.answers=4", "online.pairs=all", "objective.loss=ipo", "online.overlap=true"],
        &[
            "objective.beta=[1, 2, 3]",
            "objective.beta_every=7",
            "online.replay_size=9",
            "online.replay_per_step=3",
        ],
    ] {
        is_read_back(overrides);
    }
}

#[test]
fn betas_last_an_epoch_or_as_many_steps_as_is_said() {
    let of = |overrides: &[&str], steps: &[u64]| -> Vec<f64> {
        let objective = online(overrides).objective;
        steps.iter().map(|&step| objective.beta_at(step, 10)).collect()
    };
    assert_eq!(of(&["objective.beta=0.3"], &[0, 99]), [0.3, 0.3]);
    assert_eq!(of(&["objective.beta=[1, 2, 3]"], &[0, 9, 10, 29, 99]), [1.0, 1.0, 2.0, 3.0, 3.0]);
    assert_eq!(of(&["objective.beta=[1, 2]", "objective.beta_every=3"], &[2, 3, 50]), [1.0, 2.0, 2.0]);
}

#[test]
fn ipo_is_not_divided_by_lengths_as_in_trls_online_trainer() {
    assert_eq!(online(&["objective.loss=ipo"]).objective.terms[0].loss.name, "ipo_sum");
}

#[test]
fn what_makes_no_sense_is_refused_with_a_sentence() {
    for (overrides, expected) in [
        (&["reference.kind=precompute"][..], "completions are generated while the policy trains"),
        (&["data.truncation=keep_end"], "prompts are never cut"),
        (&["online.max_new_tokens=1024"], "leaves no room for a prompt"),
        (&["online.replay_per_step=2"], "replay_size keeps only 0 prompts"),
        (&["online.replay_size=2"], "replayed prompts are never used"),
        (&["online.answers=1"], "completions are compared, which takes two; set 2 or more"),
        (&["online.answers=65"], "an integer from 1 to 64"),
        (&["online.anwsers=3"], "answers"),
        (&["online.alpha=1"], "only algorithm = \"xpo\" has it"),
        (
            &["online.algorithm=xpo", "online.answers=3"],
            "pairs one policy completion with one reference completion",
        ),
        (
            &["online.algorithm=nash_md", "online.pairs=all"],
            "pairs one policy completion with one reference completion",
        ),
        (&["online.algorithm=nash_md", "objective.loss=ipo"], "has a single loss"),
        (&["online.algorithm=nash_md", "objective.label_smoothing=0.1"], "no effect with online.algorithm"),
        (&["online.algorithm=xpo", "objective.reference_free=true"], "needs a reference"),
        (&["objective.beta_every=3"], "set `beta` to a list"),
        (&["objective.beta=[]"], "a positive number, or a list of them"),
        (&["online.stop=[\"\"]"], "a string that is not empty"),
    ] {
        let (_folder, config) = load_with(ONLINE, overrides);
        let error = config.expect_err(expected).to_string();
        assert!(error.contains(expected), "{overrides:?}: {error}");
    }
    let without = ONLINE.split("[[judges]]").next().expect("what comes before");
    let (_folder, config) = load_with(without, &[]);
    let error = config.expect_err("no judges").to_string();
    assert!(error.contains("judges") && error.contains("a [[judges]] table"), "{error}");
    let (_folder, config) = load_with(SMALL_SFT, &["online.answers=2"]);
    let error = config.expect_err("no online run").to_string();
    assert!(error.contains("remove the [online] table"), "{error}");
    let (_folder, config) = load_with(SMALL_SFT, &["objective.beta=[0.1]"]);
    assert!(config.is_err());
}

#[test]
fn policy_gradients_have_defaults_of_their_own_and_are_read_back() {
    for overrides in [
        &["method=grpo"][..],
        &["method=grpo", "grpo.loss=cispo", "objective.beta=0.1", "online.answers=4"],
        &["method=grpo", "grpo.loss=vespo", "grpo.vespo_k_neg=1", "grpo.scale_rewards=none"],
        &["method=grpo", "grpo.delta=2", "grpo.epsilon=0.1", "grpo.baseline=leave_one_out"],
        &["method=grpo", "adapter.rank=4", "objective.beta=0.1", "grpo.overlong_tokens=8"],
    ] {
        is_read_back(overrides);
    }
    let config = online(&["method=grpo"]);
    let own = config.online.as_ref().expect("it generates");
    assert_eq!(
        (config.method, config.reference.kind, config.objective.beta),
        (Method::Grpo, ReferenceKind::None, 0.0)
    );
    assert_eq!((own.num_answers, own.temperature, own.max_new_tokens), (8, 1.0, 64));
    let options = config.objective.grpo.expect("options");
    assert_eq!((options.epsilon, options.epsilon_high, options.max_new_tokens), (0.2, 0.2, 64));
    let cispo = online(&["method=grpo", "grpo.loss=cispo"]).objective.grpo.expect("options");
    assert_eq!(cispo.epsilon_high, 5.0);
    let kinds = [&["objective.beta=0.1"][..], &["objective.beta=0.1", "adapter.rank=4"]]
        .map(|own| online(&[&["method=grpo"], own].concat()).reference.kind);
    assert_eq!(kinds, [ReferenceKind::Model, ReferenceKind::Base]);
}

const COMMAND: &str = "online.environment.command=[\"sh\", \"play.sh\"]";

/// A run with an environment has no judges.
fn with_environment(overrides: &[&str]) -> Result<Config, ConfigError> {
    let without = ONLINE.split("[[judges]]").next().expect("what comes before");
    load_with(without, &[&["method=grpo", COMMAND], overrides].concat()).1
}

#[test]
fn an_environment_takes_the_place_of_judges_and_is_read_back() {
    for overrides in [&[][..], &["online.environment.max_turns=3", "online.environment.timeout_s=2.5"]] {
        let config = with_environment(overrides).unwrap_or_else(|e| panic!("{e}"));
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("again.toml");
        fs::write(&path, config.to_toml()).expect("written");
        assert_eq!(Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}")), config);
        let section = config.online.and_then(|online| online.environment).expect("an environment");
        assert_eq!(section.command.command, ["sh", "play.sh"]);
        assert_eq!(section.max_turns, if overrides.is_empty() { 8 } else { 3 });
        assert!(config.judges.is_empty());
    }
}

#[test]
fn what_an_environment_does_not_use_is_refused_with_a_sentence() {
    for (own, expected) in [
        (
            &["judges=[{ kind = \"json\" }]"][..],
            "the environment gives the reward; remove the [[judges]] tables",
        ),
        (&["method=online"], "only method = \"grpo\" has conversations"),
        (&["online.overlap=true"], "`online.overlap`: not supported with [online.environment]"),
        (&["data.eval=e.jsonl"], "held-out prompts are not given to an environment"),
        (&["grpo.max_resamples=2"], "not replaced by others"),
        (&["grpo.overlong_tokens=4"], "limits each turn"),
        (&["grpo.aggregation=normalize_then_sum"], "the only reward"),
        (&["online.environment.max_turns=0"], "an integer from 1 to 64"),
        (&["online.environment.command=[]"], "command"),
        (&["online.environment.concurrency=0"], "concurrency"),
        (
            &["adapter.rank=4", "online.server.base_url=http://a/v1", "online.server.model=m"],
            "a server answers a prompt once",
        ),
    ] {
        let error = with_environment(own).expect_err(expected).to_string();
        assert!(error.contains(expected), "{own:?}: {error}");
    }
}

#[test]
fn what_policy_gradients_do_not_use_is_refused_with_a_sentence() {
    for (own, expected) in [
        ("objective.loss=ipo", "are those of grpo.loss"),
        ("objective.label_smoothing=0.1", "no effect with method = \"grpo\""),
        ("objective.reference_free=true", "no effect with method = \"grpo\""),
        ("reference.kind=model", "objective.beta = 0 leaves the reference unused"),
        ("online.algorithm=xpo", "it is for method = \"online\""),
        ("online.pairs=all", "trains on every completion"),
        ("online.replay_size=3", "replays no prompts"),
        ("online.temperature=0", "would all be the same"),
        ("grpo.loss=ppo", "\"dapo\""),
        ("grpo.sapo_temperature_pos=2", "only loss = \"sapo\" has it"),
        ("grpo.delta=1.1", "above 1 + epsilon_high"),
        ("grpo.overlong_tokens=64", "before the first token"),
        ("grpo.use_bias_correction_kl=false", "there is no divergence to correct"),
        ("objective.beta=-1", "a number of at least 0"),
    ] {
        let (_folder, config) = load_with(ONLINE, &["method=grpo", own]);
        let error = config.expect_err(expected).to_string();
        assert!(error.contains(expected), "{own}: {error}");
    }
    let penalty = ["method=grpo", "grpo.overlong_tokens=4", "grpo.aggregation=normalize_then_sum"];
    let (_folder, config) = load_with(ONLINE, &penalty);
    let error = config.expect_err("a penalty that nothing takes").to_string();
    assert!(error.contains("each judge's scores are compared before"), "{error}");
    let (_folder, config) = load_with(ONLINE, &["method=grpo", "objective.beta=0.1", "reference.kind=none"]);
    let error = config.expect_err("a reference").to_string();
    assert!(error.contains("objective.beta must be 0"), "{error}");
    let (_folder, config) = load_with(ONLINE, &["grpo.loss=dapo"]);
    let error = config.expect_err("another method").to_string();
    assert!(error.contains("set method = \"grpo\""), "{error}");
    let (_folder, config) =
        load_with(ONLINE, &["method=grpo", "grpo.aggregation=normalize_then_sum", "grpo.baseline=mean"]);
    let error = config.expect_err("a baseline").to_string();
    assert!(error.contains("compares each judge's scores by group"), "{error}");
    let (_folder, config) =
        load_with(ONLINE, &["method=grpo", "grpo.max_resamples=2", "online.overlap=true"]);
    let error = config.expect_err("both").to_string();
    assert!(error.contains("remove one of the two"), "{error}");
    for (own, expected) in [
        (&["online.overlap=true", "online.server.importance_sampling=none"][..], "set \"policy_ratio\""),
        (
            &["grpo.loss=vespo", "online.server.importance_sampling=sequence_mask"],
            "weighs whole answers itself",
        ),
        (&["online.server.importance_sampling_min=4"], "below importance_sampling_max = 3"),
        (
            &["online.server.importance_sampling=none", "online.server.importance_sampling_max=4"],
            "no ratio of probabilities weighs the loss",
        ),
    ] {
        let (_folder, config) = load_with(ONLINE, &[&["method=grpo"], &SERVED[..], own].concat());
        let error = config.expect_err(expected).to_string();
        assert!(error.contains(expected), "{own:?}: {error}");
    }
    let (_folder, config) =
        load_with(ONLINE, &[&["method=grpo", "online.overlap=true"], &SERVED[..]].concat());
    let config = config.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.server().expect("a server").importance_sampling, ServerRatio::Policy);
    assert_eq!(config.objective.grpo.expect("options").correction, None);
}

const SERVED: [&str; 3] =
    ["adapter.rank=4", "online.server.base_url=http://127.0.0.1:8000/v1/", "online.server.model=base"];

fn served(more: &[&str]) -> (TempDir, Result<Config, ConfigError>) {
    load_with(ONLINE, &[&SERVED, more].concat())
}

#[test]
fn a_server_needs_an_address_and_a_model_and_is_read_back() {
    let config = served(&[]).1.unwrap_or_else(|e| panic!("{e}"));
    let server = config.server().expect("a server");
    assert_eq!((server.base_url.as_str(), server.model.as_str()), ("http://127.0.0.1:8000/v1", "base"));
    assert_eq!(server.adapters, config.output.join("adapters"));
    assert_eq!(server.kind, ServerKind::Vllm);
    let other = served(&["adapter.rslora=true"]).1.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(other.server().expect("a server").kind, ServerKind::Vllm, "which knows how it is scaled");
    let more = [
        "online.server.api_key_env=KEY",
        "online.server.timeout_s=2.5",
        "online.server.retries=0",
        "online.server.concurrency=3",
        "online.server.adapters=/tmp/elsewhere",
    ];
    let changed = served(&more).1.unwrap_or_else(|e| panic!("{e}"));
    let server = changed.server().expect("a server");
    assert_eq!((server.timeout_s, server.retries, server.concurrency), (2.5, 0, 3));
    let sglang = ["online.server.kind=sglang", "online.server.base_url=http://127.0.0.1:30000"];
    let sglang = served(&sglang).1.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(sglang.server().expect("a server").kind, ServerKind::Sglang);
    assert!(sglang.changes_since(&config).iter().any(|c| c.key == "online.server.kind" && c.alters_run));
    for config in [&config, &changed, &sglang] {
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("again.toml");
        fs::write(&path, config.to_toml()).expect("written");
        assert_eq!(&Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}")), config);
    }
    let mut changes = changed.changes_since(&config);
    changes.retain(|change| change.key.starts_with("online"));
    assert!(changes.len() == 5 && changes.iter().all(|change| !change.alters_run), "{changes:?}");
    let other = served(&["online.server.model=other"]).1.unwrap_or_else(|e| panic!("{e}"));
    assert!(other.changes_since(&config).iter().any(|c| c.key == "online.server.model" && c.alters_run));
}

#[test]
fn what_a_server_cannot_be_told_is_refused() {
    for (overrides, expected) in [
        (&["adapter.kind=dora"][..], "LoRA adapters only"),
        (&["adapter.modules_to_save=[\"lm_head\"]"], "modules that train whole (lm_head)"),
        (&["online.algorithm=xpo"], "also generates from the reference"),
        (&["online.algorithm=nash_md"], "also generates from the reference"),
        (&["online.temperature=0"], "repeats one completion"),
        (&["online.max_batch=3"], "a server limits its own batch"),
        (&["online.server.base_url=localhost:8000"], "is no address"),
        (&["online.server.base_url=http://localhost:99999"], "is no address"),
        (&["online.server.base_url=http://me:secret@host/v1"], "give the key by `online.server.api_key_env`"),
        (&["online.server.model=\"\""], "a name"),
        (&["online.server.timeout_s=0"], "a number of seconds above 0"),
        (&["online.server.concurrency=0"], "an integer from 1"),
        (&["online.server.base_ulr=x"], "base_url"),
        (&["online.server.kind=tgi"], "one of \"vllm\", \"sglang\""),
        (&["online.server.kind=sglang"], "not under /v1"),
        (&["online.server.kind=sglang", "adapter.rslora=true"], "alpha / rank"),
    ] {
        let error = served(overrides).1.expect_err(expected).to_string();
        assert!(error.contains(expected), "{overrides:?}: {error}");
    }
    let error = load_with(ONLINE, &SERVED[1..]).1.expect_err("every weight trains").to_string();
    assert!(error.contains("add an [adapter] table"), "{error}");
    let error = load_with(ONLINE, &SERVED[..2]).1.expect_err("no model").to_string();
    assert!(error.contains("online.server.model"), "{error}");
}
