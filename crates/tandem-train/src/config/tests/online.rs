//! What `method = "online"` takes, and what it refuses.

use super::*;

const ONLINE: &str = r#"
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

#[test]
fn little_is_needed() {
    let config = online(&[]);
    let own = config.online.as_ref().expect("an online run");
    assert_eq!((config.method, config.reference.kind), (Method::Online, ReferenceKind::Model));
    assert_eq!((own.num_answers, own.pairs, own.max_new_tokens), (2, Pairs::BestWorst, 64));
    assert_eq!((own.temperature, own.algorithm, config.judges.len()), (0.9, Algorithm::Dpo, 1));
    assert_eq!(online(&["adapter.rank=4"]).reference.kind, ReferenceKind::Base);
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
        let config = online(overrides);
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("again.toml");
        fs::write(&path, config.to_toml()).expect("written");
        let again = Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{overrides:?}: {e}"));
        assert_eq!(again, config, "{overrides:?}");
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
        (&["reference.kind=precompute"][..], "answers are generated while the policy trains"),
        (&["data.eval=e.jsonl"], "`tandem eval --judge`"),
        (&["data.truncation=keep_end"], "a prompt is answered whole"),
        (&["compute.pipeline=2"], "a model in stages does not generate yet"),
        (&["online.max_new_tokens=1024"], "leaves no room for a prompt"),
        (&["online.replay_per_step=2"], "replay_size keeps 0 prompts"),
        (&["online.answers=1"], "an integer from 2 to 64"),
        (&["online.anwsers=3"], "answers"),
        (&["online.alpha=1"], "only algorithm = \"xpo\" has it"),
        (&["online.algorithm=xpo", "online.answers=3"], "two answers to a prompt"),
        (&["online.algorithm=nash_md", "online.pairs=all"], "two answers to a prompt"),
        (&["online.algorithm=nash_md", "objective.loss=ipo"], "has one loss"),
        (&["online.algorithm=nash_md", "objective.label_smoothing=0.1"], "no meaning under online.algorithm"),
        (&["online.algorithm=xpo", "objective.reference_free=true"], "needs its reference"),
        (&["objective.beta_every=3"], "give `beta` a list"),
        (&["objective.beta=[]"], "a positive number, or a list of them"),
        (&["online.stop=[\"\"]"], "a string that is not empty"),
    ] {
        let (_folder, config) = load_with(ONLINE, overrides);
        let error = config.expect_err(expected).to_string();
        assert!(error.contains(expected), "{overrides:?}: {error}");
    }
    let without = ONLINE.split("[[judges]]").next().expect("what comes before");
    let (_folder, config) = load_with(without, &[]);
    let error = config.expect_err("nobody judges").to_string();
    assert!(error.contains("judges") && error.contains("a [[judges]] table"), "{error}");
    let (_folder, config) = load_with(SMALL_SFT, &["online.answers=2"]);
    let error = config.expect_err("no online run").to_string();
    assert!(error.contains("remove the [online] table"), "{error}");
    let (_folder, config) = load_with(SMALL_SFT, &["objective.beta=[0.1]"]);
    assert!(config.is_err());
}
