//! Online runs: the same answers, scores, losses and weights wherever they are computed and however often they are stopped, and what
//! is left behind.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tandem_train::Outcome;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;

use super::ranks::log;
use crate::small::Small;

fn samples(small: &Small, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(small.path(name).join("samples.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Log, samples and final weights.
type Run = (Vec<Map<String, Value>>, Vec<Value>, Vec<u8>);

fn left(small: &Small, name: &str) -> Run {
    (log(small, name), samples(small, name), small.weights(name))
}

fn assert_same(found: &Run, expected: &Run, settings: &[&str]) {
    assert_eq!(found.1, expected.1, "{settings:?}: samples");
    assert_eq!(found.0, expected.0, "{settings:?}: the log");
    assert!(found.2 == expected.2, "{settings:?}: the final weights");
}

const COMMON: [&str; 4] =
    ["compute.threads=1", "online.samples_every=1", "train.learning_rate=3e-3", "train.batch_size=5"];

fn run(small: &Small, name: &str, settings: &[&str]) -> Run {
    small.finish(name, RunDirPolicy::Overwrite, &[&COMMON[..], settings].concat());
    left(small, name)
}

fn same_everywhere(own: &[&str], places: &[&[&str]]) {
    let small = Small::new("online");
    let expected = run(&small, "one", own);
    assert_eq!(expected.0.len(), 6);
    let has_lesson = |line: &Map<String, Value>| {
        line.get("pairs").is_none_or(|pairs| pairs.as_u64() > Some(0)) && line["grad_norm"] != 0.0
    };
    assert!(expected.0.iter().any(has_lesson), "there is something to learn from");
    for place in places {
        let found = run(&small, "other", &[own, place].concat());
        assert_eq!(found.1, expected.1, "{own:?} {place:?}: answers and scores");
        assert_eq!(found.0, expected.0, "{own:?} {place:?}: the log");
        assert!(found.2 == expected.2, "{own:?} {place:?}: the final weights");
    }
}

#[test]
fn answers_and_weights_are_the_same_on_any_number_of_ranks() {
    same_everywhere(
        &[],
        &[
            &["compute.devices=cpu:2"],
            &["compute.devices=cpu:4", "online.max_batch=3"],
            &["compute.devices=cpu:2", "compute.sharding=zero2"],
            &["compute.devices=cpu:3", "compute.sharding=zero3", "online.max_batch=2"],
            &["compute.devices=cpu:4", "compute.sharding=zero3", "compute.replicate=2"],
            &["compute.offload=host"],
        ],
    );
}

#[test]
fn all_pairs_of_four_answers_in_bf16_are_the_same_too() {
    same_everywhere(
        &["online.answers=4", "online.pairs=all", "compute.dtype=bf16", "online.steps_per_round=2"],
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.devices=cpu:4"]],
    );
}

#[test]
fn an_adapter_on_4_bit_weights_generates_on_any_number_of_ranks() {
    same_everywhere(
        &[
            "adapter.kind=lora",
            "adapter.rank=4",
            "compute.format=nf4",
            "online.pairs=random",
            "online.answers=3",
        ],
        &[&["compute.devices=cpu:2"], &["compute.devices=cpu:2", "compute.sharding=zero3"]],
    );
}

/// The reference answers too: weights of its own, or the policy's base without its adapter.
#[test]
fn xpo_is_the_same_on_any_number_of_ranks() {
    let own = ["online.algorithm=xpo", "online.alpha=0.01"];
    same_everywhere(
        &own,
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.devices=cpu:4"]],
    );
    let own = [&own[..], &["adapter.rank=4", "compute.format=int8"]].concat();
    same_everywhere(&own, &[&["compute.devices=cpu:2", "compute.sharding=zero3"]]);
}

#[test]
fn nash_md_is_the_same_on_any_number_of_ranks() {
    let own = ["online.algorithm=nash_md", "online.mixture=0.25"];
    same_everywhere(
        &own,
        &[&["compute.devices=cpu:3", "compute.sharding=zero3"], &["compute.devices=cpu:2"]],
    );
    let own = [&own[..], &["adapter.rank=4", "reference.kind=base"]].concat();
    same_everywhere(&own, &[&["compute.devices=cpu:2"]]);
}

#[test]
fn policy_gradients_are_the_same_on_any_number_of_ranks() {
    same_everywhere(
        &["method=grpo", "online.answers=3"],
        &[
            &["compute.devices=cpu:2"],
            &["compute.devices=cpu:4", "online.max_batch=3"],
            &["compute.devices=cpu:3", "compute.sharding=zero3", "online.max_batch=2"],
            &["compute.offload=host"],
        ],
    );
    let old = ["method=grpo", "online.answers=4", "online.steps_per_round=2", "objective.beta=0.1"];
    let level = ["compute.dtype=bf16", "grpo.importance_sampling_level=sequence", "grpo.loss=grpo"];
    same_everywhere(
        &[&old[..], &level].concat(),
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.devices=cpu:4"]],
    );
    let adapter =
        ["adapter.rank=4", "compute.format=nf4", "grpo.mask_truncated=true", "grpo.scale_rewards=batch"];
    same_everywhere(&[&old[..], &adapter].concat(), &[&["compute.devices=cpu:2", "compute.sharding=zero3"]]);
    let overlap = ["method=grpo", "online.answers=3", "online.overlap=true", "grpo.num_iterations=2"];
    same_everywhere(&overlap, &[&["compute.devices=cpu:2"]]);
    // The quantile of entropies and the deviation of sums are the whole batch's.
    let whole =
        ["grpo.top_entropy_quantile=0.3", "grpo.aggregation=normalize_then_sum", "train.micro_batch_size=2"];
    same_everywhere(
        &[&old[..], &whole].concat(),
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.devices=cpu:3"]],
    );
    same_everywhere(&RESAMPLES, &[&["compute.devices=cpu:2", "compute.sharding=zero3"]]);
    let divided = ["method=grpo", "online.answers=7", "train.micro_batch_tokens=60", "grpo.loss=bnpo"];
    same_everywhere(
        &divided,
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.devices=cpu:3"]],
    );
}

/// Also a model in stages, whose last one samples, and a reference that goes along.
#[test]
fn a_model_in_stages_generates_the_same() {
    let stages = ["compute.devices=cpu:2", "compute.pipeline=2"];
    let both = ["compute.devices=cpu:4", "compute.pipeline=2", "compute.sharding=zero3"];
    for own in [
        &["method=grpo", "online.answers=3", "objective.beta=0.1", "online.max_batch=4"][..],
        &["online.algorithm=nash_md", "online.mixture=0.25", "adapter.rank=4", "online.stop=[\"e\"]"],
        &["online.algorithm=xpo", "online.alpha=0.01", "online.overlap=true", "compute.dtype=bf16"],
    ] {
        same_everywhere(own, &[&stages, &both]);
    }
}

/// A slice of an adapter generates with the others; the texts of an untrained model do not show the order of sums.
#[test]
fn slices_of_an_adapter_generate_together() {
    let small = Small::new("online");
    let own = ["adapter.rank=4", "method=grpo", "online.answers=3", "train.steps=1"];
    let texts = |run: &Run| -> Vec<Value> {
        let answers = run.1.iter().flat_map(|line| line["answers"].as_array().unwrap());
        answers.map(|answer| json!([answer["text"], answer["score"]])).collect()
    };
    for format in [&[][..], &["compute.format=int8"]] {
        let whole = run(&small, "whole", &[&own[..], format].concat());
        for place in [
            &["compute.devices=cpu:2", "compute.tensor=2"][..],
            &["compute.devices=cpu:4", "compute.tensor=2", "compute.pipeline=2"],
        ] {
            let sliced = run(&small, "sliced", &[&own[..], format, place].concat());
            assert_eq!(texts(&sliced), texts(&whole), "{format:?} {place:?}");
        }
    }
}

/// Held-out prompts are answered before the first step, every other step and after the last, and change nothing of the training.
#[test]
fn held_out_prompts_are_answered_and_rewarded() {
    let small = Small::new("online");
    let prompts = format!("data.eval={}/../../goldens/online/prompts_conv.jsonl", env!("CARGO_MANIFEST_DIR"));
    for own in [
        &["method=grpo", "online.answers=3"][..],
        &["online.overlap=true", "online.steps_per_round=2"],
        &["online.algorithm=xpo", "online.alpha=0.01"],
    ] {
        let without = run(&small, "without", own);
        let settings =
            [own, &[&prompts, "train.eval_every=2", "train.keep_best=eval/reward", "online.eval_answers=2"]];
        let settings = settings.concat();
        let mut found = Vec::new();
        for place in [
            &[][..],
            &["compute.devices=cpu:3", "compute.sharding=zero3"],
            &["compute.devices=cpu:2", "compute.pipeline=2"],
        ] {
            let heard =
                small.finish("with", RunDirPolicy::Overwrite, &[&COMMON[..], &settings, place].concat());
            let (log, ..) = left(&small, "with");
            let (held_out, trained): (Vec<_>, Vec<_>) =
                log.into_iter().partition(|line| line["split"] == "eval");
            assert_eq!(trained, without.0, "{own:?} {place:?}");
            assert_eq!((held_out.len(), heard.eval_losses.len()), (4, 4));
            assert!(held_out.iter().all(|line| line["reward"].is_number() && line["num_rows"] == 12));
            found.push(held_out);
        }
        assert!(found[0][0]["reward"] != found[0][3]["reward"], "the weights have moved");
        assert!(found.iter().all(|other| *other == found[0]), "{own:?}");
    }
}

/// Every other group has equal rewards.
const RESAMPLES: [&str; 5] = [
    "method=grpo",
    "online.answers=2",
    "online.steps_per_round=2",
    "grpo.max_resamples=2",
    "judges=[{ kind = \"regex\", pattern = \"[aeiou].*[aeiou].*[aeiou].*[aeiou].*[aeiou]\" }]",
];

/// They are replaced by groups of other prompts, in their places, as long as prompts are left.
#[test]
fn groups_with_equal_rewards_are_replaced() {
    let small = Small::new("online");
    let (log, samples, _) = run(&small, "run", &RESAMPLES);
    let (without, before, _) = run(&small, "without", &[&RESAMPLES[..], &["grpo.max_resamples=0"]].concat());
    let sum = |log: &[serde_json::Map<String, Value>], key: &str| -> f64 {
        log.iter().map(|line| line[key].as_f64().unwrap()).sum()
    };
    assert!(sum(&log, "replaced_prompts") >= 3.0, "{log:?}");
    assert!(sum(&log, "frac_reward_zero_std") + 0.5 < sum(&without, "frac_reward_zero_std"));
    assert!(without.iter().all(|line| !line.contains_key("replaced_prompts")));
    // The weights of the first two steps are the same in both runs.
    let mut kept = 0;
    for (after, before) in
        samples.iter().zip(&before).take_while(|(line, _)| line["step"].as_u64() <= Some(2))
    {
        let is_uniform = before["answers"][0]["score"] == before["answers"][1]["score"];
        assert!(is_uniform || after == before, "a group with a lesson stays");
        kept += usize::from(after == before);
        if after != before {
            assert_ne!(after["row"], before["row"]);
            assert_ne!(after["answers"][0]["score"], after["answers"][1]["score"]);
        }
    }
    assert!(kept > 0);
    for step in 1..=6 {
        let mut rows: Vec<_> =
            samples.iter().filter(|line| line["step"] == step).map(|line| line["row"].as_u64()).collect();
        let count = rows.len();
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), count, "no prompt twice in a step");
    }
}

/// Another model as the reference is compared at the answers' temperature, as the policy is.
#[test]
fn a_reference_model_goes_with_any_temperature() {
    let small = Small::new("online");
    run(&small, "first", &["train.steps=2"]);
    let reference = format!("reference.model={}", small.path("first/final").display());
    let settings =
        ["method=grpo", "online.answers=3", "objective.beta=0.1", "train.steps=2", reference.as_str()];
    for temperature in ["online.temperature=1.0", "online.temperature=0.7"] {
        let (log, ..) = run(&small, "run", &[&settings[..], &[temperature]].concat());
        assert!(log[0]["kl"].as_f64().unwrap() > 0.0, "{temperature}: {log:?}");
    }
}

/// The ratio of an update on fresh answers is 1: the generator's numbers are the trainer's, in every type.
#[test]
fn an_answer_has_the_trainers_log_probabilities() {
    let small = Small::new("online");
    let settings: [&[&str]; 7] = [
        &["online.max_new_tokens=60"],
        &["online.max_batch=2"],
        &["online.stop=[\"e\", \"t\"]", "online.max_new_tokens=40"],
        &["adapter.rank=4", "compute.format=int8"],
        &["adapter.rank=4", "adapter.kind=dora", "online.max_batch=5"],
        &["adapter.rank=4", "compute.format=nf4", "compute.devices=cpu:2", "compute.sharding=zero3"],
        &["compute.devices=cpu:2", "compute.sharding=zero3", "online.max_batch=3"],
    ];
    for dtype in ["compute.dtype=f32", "compute.dtype=bf16"] {
        for temperature in ["online.temperature=1.0", "online.temperature=0.7"] {
            for own in settings {
                let settings = [&["method=grpo", "online.answers=3", dtype, temperature], own].concat();
                let (log, samples, _) = run(&small, "run", &settings);
                for line in &log {
                    let number = |key: &str| line[key].as_f64().unwrap();
                    let found = ["sampling/ratio", "sampling/sampling_logp_difference/max"].map(number);
                    assert_eq!(found, [1.0, 0.0], "{settings:?}: {line:?}");
                    assert_eq!((number("age"), number("clip_ratio/region_mean")), (0.0, 0.0));
                }
                let advantages = samples[0]["advantages"].as_array().unwrap();
                let sum: f64 = advantages.iter().map(|advantage| advantage.as_f64().unwrap()).sum();
                assert!(advantages.len() == 3 && sum.abs() < 1e-9, "{advantages:?}");
                let ended = samples.iter().any(|line| {
                    line["answers"].as_array().unwrap().iter().any(|answer| answer["ended"] == true)
                });
                assert!(ended || !own[0].starts_with("online.stop"), "a string stops an answer");
            }
        }
    }
    // Later steps of a round train on answers of weights that they have changed; the first rate is 0.
    let (log, ..) = run(&small, "run", &["method=grpo", "online.answers=3", "online.steps_per_round=2"]);
    let ratios: Vec<f64> = log.iter().map(|line| line["sampling/ratio"].as_f64().unwrap()).collect();
    assert!(ratios[0] == 1.0 && ratios[2] == 1.0 && ratios[3] != 1.0, "{ratios:?}");
    // Of two updates on the same answers the second finds other weights; then others are answered.
    let twice = ["method=grpo", "online.answers=3", "grpo.num_iterations=2", "train.steps=4"];
    let (log, samples, _) = run(&small, "run", &twice);
    let ratios: Vec<f64> = log.iter().map(|line| line["sampling/ratio"].as_f64().unwrap()).collect();
    assert!(ratios[0] == 1.0 && ratios[2] == 1.0 && ratios[3] != 1.0, "{ratios:?}");
    let of_step = |step: u64| {
        let rows = samples.iter().filter(move |line| line["step"] == step);
        rows.map(|line| (line["row"].clone(), line["answers"].clone())).collect::<Vec<_>>()
    };
    assert!(of_step(1) == of_step(2) && of_step(3) == of_step(4) && of_step(1) != of_step(3));
}

/// Also where the weights that generate are on their way to the passes that train at the same time.
#[test]
fn answers_that_come_while_a_step_trains_are_the_same_on_any_number_of_ranks() {
    same_everywhere(
        &["online.overlap=true"],
        &[
            &["compute.devices=cpu:2", "compute.threads=2"],
            &["compute.devices=cpu:3", "compute.sharding=zero3", "online.max_batch=2"],
            &["compute.devices=cpu:4", "compute.sharding=zero3", "compute.replicate=2"],
            &["compute.devices=cpu:2", "compute.sharding=zero2", "compute.offload=host"],
        ],
    );
    let adapter = ["adapter.rank=4", "compute.format=nf4", "online.overlap=true", "online.algorithm=xpo"];
    same_everywhere(
        &adapter,
        &[&["compute.devices=cpu:2", "compute.sharding=zero3"], &["compute.offload=host"]],
    );
    let followed = ["reference.kind=sync", "online.overlap=true", "compute.dtype=bf16"];
    let followed = [&followed[..], &["online.algorithm=nash_md", "reference.sync_steps=2"]].concat();
    same_everywhere(&followed, &[&["compute.devices=cpu:2", "compute.sharding=zero3"]]);
}

/// The first two steps' answers are by the weights before the first, the third's by those before the second, and so on.
#[test]
fn answers_that_come_while_a_step_trains_are_by_the_weights_before_it() {
    let small = Small::new("online");
    let steps = |name: &str, settings: &[&str]| {
        let (_, samples, _) = run(&small, name, settings);
        move |step: u64| {
            let of_step = samples.iter().filter(|line| line["step"] == step).cloned();
            of_step.collect::<Vec<Value>>()
        }
    };
    let (ahead, at_once) = (steps("a", &["online.overlap=true"]), steps("b", &["online.steps_per_round=2"]));
    assert_eq!((ahead(1), ahead(2)), (at_once(1), at_once(2)));
    for step in 2..=6 {
        assert!(ahead(step).iter().all(|line| line["answered_after"] == step - 2));
    }
    let texts = |lines: &[Value]| lines.iter().map(|line| line["answers"].clone()).collect::<Vec<_>>();
    assert_ne!(texts(&ahead(3)), texts(&at_once(3)), "weights moved between the first step and the second");
}

/// Slices add up in another order, which the texts of an untrained model do not show.
#[test]
fn slices_of_a_model_generate_together() {
    let small = Small::new("online");
    let settings = |devices| [devices, "train.steps=1", "online.answers=3"];
    let whole = run(&small, "whole", &settings("compute.devices=cpu:1"));
    let slices = [&settings("compute.devices=cpu:2")[..], &["compute.tensor=2"]].concat();
    let found = run(&small, "slices", &slices);
    let both =
        [&settings("compute.devices=cpu:4")[..], &["compute.tensor=2", "compute.sharding=zero3"]].concat();
    let both = run(&small, "both", &both);
    // What a slice computes of a row depends on the rows beside it, in the last bits.
    let texts = |run: &Run| -> Vec<Value> {
        let answers = run.1.iter().flat_map(|line| line["answers"].as_array().unwrap());
        answers.map(|answer| json!([answer["text"], answer["score"]])).collect()
    };
    assert_eq!(texts(&both), texts(&found));
    assert_eq!(texts(&found), texts(&whole));
    let ahead = [&slices[..], &["train.steps=2"]].concat();
    let before = [&ahead[..], &["online.steps_per_round=2"]].concat();
    let ahead = run(&small, "ahead", &[&ahead[..], &["online.overlap=true"]].concat());
    assert_eq!(texts(&ahead), texts(&run(&small, "before", &before)));
}

/// Killed or stopped after any step, also within a round and while judges work on the next.
#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been() {
    for own in [
        &[][..],
        &["online.steps_per_round=3"],
        &["online.algorithm=nash_md", "online.overlap=true"],
        &["method=grpo", "online.answers=3", "online.steps_per_round=2", "grpo.num_iterations=2"],
        &RESAMPLES,
        &[
            "online.overlap=true",
            "online.steps_per_round=2",
            "online.replay_size=7",
            "online.replay_per_step=2",
        ],
    ] {
        let small = Small::new("online");
        let whole = run(&small, "whole", own);
        let mut start = RunDirPolicy::Fresh;
        for (ranks, until) in [(1, Some(1)), (2, Some(3)), (3, Some(4)), (1, None)] {
            let devices = format!("compute.devices=cpu:{ranks}");
            let settings = [&COMMON[..], own, &[devices.as_str()]].concat();
            let (_, outcome) = small.run("parts", start, until, &settings);
            let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(matches!(outcome, Outcome::Finished(_)), until.is_none());
            start = RunDirPolicy::Resume;
        }
        assert_same(&left(&small, "parts"), &whole, own);
    }
}

/// Stops at arbitrary moments: while completions are generated or judged, or a step trains.
#[test]
fn a_run_that_is_stopped_anywhere_goes_on_as_if_it_had_not_been() {
    for own in [&["online.overlap=false"][..], &["online.overlap=true"], &RESAMPLES] {
        let small = Small::new("online");
        let own = [own, &["online.max_new_tokens=40", "online.answers=4"]].concat();
        let whole = run(&small, "whole", &own);
        let mut start = RunDirPolicy::Overwrite;
        for turn in 0..8 {
            let devices = format!("compute.devices=cpu:{}", 1 + turn % 3);
            let settings = [&COMMON[..], &own, &[devices.as_str()]].concat();
            let (config, stop) = (small.config("parts", &settings), AtomicBool::new(false));
            let outcome = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(60 + 37 * turn));
                    stop.store(true, Ordering::Relaxed);
                });
                spawn::train(&config, start, &mut Silent, &stop)
            });
            if let Outcome::Stopped(Some(_)) | Outcome::Finished(_) =
                outcome.unwrap_or_else(|e| panic!("{e}"))
            {
                start = RunDirPolicy::Resume;
            }
        }
        small.finish("parts", start, &[&COMMON[..], &own].concat());
        assert_same(&left(&small, "parts"), &whole, &own);
    }
}

/// Completions that waited for steps of the old rounds are trained on where they still have a step.
#[test]
fn a_run_goes_on_with_more_steps_and_with_other_rounds() {
    let small = Small::new("online");
    let own = ["method=grpo", "online.answers=3", "grpo.num_iterations=2"];
    let keys = |iterations: usize, every: usize, steps: usize| {
        [
            format!("grpo.num_iterations={iterations}"),
            format!("online.steps_per_round={every}"),
            format!("train.steps={steps}"),
        ]
    };
    for (before, after) in [
        ((2, 2, 3), (2, 2, 7)),
        ((2, 2, 5), (2, 2, 8)),
        ((2, 3, 2), (2, 5, 9)),
        ((2, 3, 4), (4, 3, 11)),
        ((3, 1, 2), (1, 2, 6)),
        ((1, 4, 3), (2, 3, 7)),
    ] {
        for overlap in ["online.overlap=false", "online.overlap=true"] {
            for (policy, (iterations, every, steps)) in
                [(RunDirPolicy::Overwrite, before), (RunDirPolicy::Resume, after)]
            {
                let keys = keys(iterations, every, steps);
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                small.finish("run", policy, &[&COMMON[..], &own, &keys, &[overlap]].concat());
            }
            assert_eq!(log(&small, "run").len(), after.2, "{before:?} to {after:?}, {overlap}");
        }
    }
}

#[test]
fn completions_of_a_checkpoint_that_could_not_be_trained_on_are_refused() {
    let small = Small::new("online");
    let own = [&COMMON[..], &["online.steps_per_round=3", "online.answers=3"]].concat();
    // Two steps' completions wait.
    small.run("run", RunDirPolicy::Fresh, Some(1), &own).1.unwrap_or_else(|e| panic!("{e}"));
    for (key, reason) in [
        ("online.max_new_tokens=2", "online.max_new_tokens: 2 is less than the "),
        (
            "online.algorithm=nash_md",
            "online.algorithm: \"nash_md\" compares two, and there are prompts with 3 ",
        ),
    ] {
        let answers = if key.contains("nash") { "online.answers=2" } else { "online.answers=3" };
        let settings = [&own[..], &[key, answers]].concat();
        let error = small.run("run", RunDirPolicy::Resume, None, &settings).1.unwrap_err();
        assert!(error.to_string().contains(reason), "{key}: {error}");
    }
}

#[test]
fn what_generated_an_answer_is_what_trains_on_it() {
    let small = Small::new("online");
    let (log, samples, _) = run(&small, "run", &["online.answers=2"]);
    for (line, step) in log.iter().zip(1..) {
        let number = |key: &str| line[key].as_f64().unwrap();
        let of_step: Vec<&Value> = samples.iter().filter(|line| line["step"] == step).collect();
        assert_eq!(of_step.len(), if step % 3 == 0 { 2 } else { 5 }, "12 rows in batches of 5");
        let answers = || of_step.iter().flat_map(|line| line["answers"].as_array().unwrap());
        let mean = |key: &str| {
            let all: Vec<f64> = answers().map(|answer| answer[key].as_f64().unwrap()).collect();
            all.iter().sum::<f64>() / all.len() as f64
        };
        assert_eq!(number("objective/scores"), mean("score"));
        assert!(number("completions/mean_length") <= 12.0);
        assert_eq!((number("age"), number("unscored")), (0.0, 0.0));
        if line["ties"] == 0 {
            // All answers are in pairs: the pass that trains says what the generator said, to the bit.
            let entropy: f64 = answers().map(|answer| answer["log_prob"].as_f64().unwrap()).sum();
            let entropy = -entropy / answers().count() as f64;
            assert!((number("objective/entropy") - entropy).abs() <= 1e-12 * entropy, "step {step}");
        }
        for answer in answers() {
            let judges = &answer["judges"];
            let [length, ending] =
                ["length", "missing_eos"].map(|name| judges[name]["score"].as_f64().unwrap());
            assert_eq!(length, 0.5 * answer["text"].as_str().unwrap().chars().count() as f64);
            assert_eq!(ending, if answer["ended"] == true { 0.0 } else { -2.0 });
            assert_eq!(answer["score"].as_f64().unwrap(), length + ending);
        }
    }
}

#[test]
fn groups_with_equal_rewards_leave_nothing_to_learn_which_is_no_success() {
    let small = Small::new("online");
    // A judge that wants an object with a key, which no answer of one token is.
    let settings = [
        "method=grpo",
        "online.answers=2",
        "online.max_new_tokens=1",
        "train.steps=2",
        "judges=[{kind=\"json\", keys=[\"name\"]}]",
    ];
    learns_nothing(&small, &[&COMMON[..], &settings].concat(), "in none was an answer");
    for line in log(&small, "run") {
        assert_eq!(
            (&line["frac_reward_zero_std"], &line["grad_norm"]),
            (&json!(1.0), &json!(0.0)),
            "{line:?}"
        );
    }
}

#[test]
fn answers_that_are_all_alike_leave_nothing_to_learn_which_is_no_success() {
    let small = Small::new("online");
    let settings = [&COMMON[..], &["online.temperature=0", "train.steps=2"]].concat();
    learns_nothing(&small, &settings, "in none was an answer");
    let log = log(&small, "run");
    assert_eq!(log.len(), 2);
    for line in &log {
        let count = |key: &str| line[key].as_u64().unwrap();
        assert_eq!((count("pairs"), count("ties"), line.get("loss")), (0, 5, None), "{line:?}");
    }
    // More steps may find a lesson: the state is there.
    assert!(small.path("run/checkpoints/step-000002").exists());
}

#[test]
fn answers_that_are_all_cut_and_masked_leave_nothing_to_learn() {
    let small = Small::new("online");
    let cut = ["method=grpo", "online.answers=4", "online.max_new_tokens=1", "grpo.mask_truncated=true"];
    let settings = [&COMMON[..], &cut, &["train.steps=2"]].concat();
    learns_nothing(
        &small,
        &settings,
        "answers to a prompt were better than others, but all of them were cut",
    );
}

/// Runs all steps, of which none changes the model.
fn learns_nothing(small: &Small, settings: &[&str], reason: &str) {
    let (_, outcome) = small.run("run", RunDirPolicy::Overwrite, None, settings);
    let error = outcome.expect_err("no answer is better than another");
    assert_eq!(error.fault(), tandem_train::Fault::Own);
    let error = tandem_train::chain(&error);
    assert!(error.starts_with(&format!("nothing was learned in 2 steps: {reason}")), "{error}");
    assert!(!small.path("run/final").exists());
}
