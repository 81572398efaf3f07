//! `method = "reward"`: what it takes, and what has no meaning with it.

use super::*;

const REWARD: &str = "method = \"reward\"\nmodel = \"m\"\noutput = \"o\"\n[data]\ntrain = \"d\"\n[train]\nbatch_size = 8\n\
                      steps = 1\nlearning_rate = 1e-4\n";

#[test]
fn a_reward_run_has_no_reference_and_one_loss() {
    let config = load(REWARD);
    assert_eq!((config.method, config.reference.kind), (Method::Reward, ReferenceKind::None));
    assert!(config.objective.terms.is_empty() && config.objective.center_rewards_coefficient.is_none());
    let set = load_with(REWARD, &["objective.center_rewards_coefficient=0.01"]).1.unwrap();
    assert_eq!(set.objective.center_rewards_coefficient, Some(0.01));
    for config in [config, set] {
        assert_eq!(load(&config.to_toml()), config, "{}", config.to_toml());
    }
}

#[test]
fn what_a_reward_run_has_not_is_refused_with_a_sentence() {
    for (set, expected) in [
        ("reference.kind=model", "method = \"reward\" has no reference; remove the [reference] table"),
        ("reference.model=m", "this run has no reference; remove it"),
        ("objective.loss=sigmoid", "method = \"reward\" has a single loss; remove it"),
        ("objective.beta=0.1", "has no effect with method = \"reward\"; remove it"),
        ("objective.label_smoothing=0.1", "has no effect with method = \"reward\"; remove it"),
        ("objective.center_rewards_coefficient=0", "a positive number"),
        ("data.truncation=keep_end", "rows with longer texts are dropped; remove it"),
        ("data.loss_on=all", "remove `loss_on`"),
    ] {
        let text = refusal(REWARD, &[set]);
        assert!(text.contains(expected), "{set}: {text}");
    }
    let text = refusal(EXAMPLE, &["objective.center_rewards_coefficient=0.1"]);
    assert!(text.contains("only method = \"reward\" has rewards to centre; remove it"), "{text}");
}
