//! Conversations with an environment: the same turns, rewards, losses and weights on any number of ranks and after a stop, only the
//! policy's tokens in the loss, and failures of the program that cost what they concern.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Outcome, Result};

use super::ranks::log;
use crate::small::Small;

/// Finds in an item its id, the policy's turns, whether it must end, and a number that depends on its text.
const FIELDS: &str = "id=$(printf %s \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/'); \
     turn=$(printf %s \"$line\" | sed 's/.*\"turn\":\\([0-9]*\\).*/\\1/'); \
     last=$(printf %s \"$line\" | sed 's/.*\"is_last\":\\([a-z]*\\).*/\\1/'); n=$((${#line} - ${#id}))";

const END: &str = "echo \"{\\\"id\\\":$id,\\\"reward\\\":$((n % 7)),\\\"reason\\\":\\\"turn $turn\\\"}\"";

/// Goes on after the first turn and after two thirds of the others; gives some no reward.
fn game() -> String {
    let hint = "echo \"{\\\"id\\\":$id,\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"Hint $n.\\\"}]}\"";
    format!(
        "if [ $last = true ]; then {END}; elif [ $((n % 11)) -eq 0 ]; then echo \"{{\\\"id\\\":$id,\\\"reward\\\":null,\\\"reason\\\":\\\"lost\\\"}}\"; \
         elif [ $turn -eq 1 ] || [ $((n % 3)) -gt 0 ]; then {hint}; else {END}; fi"
    )
}

const COMMON: [&str; 9] = [
    "data.max_length=200",
    "method=grpo",
    "online.answers=3",
    "compute.threads=1",
    "online.samples_every=1",
    "train.learning_rate=3e-3",
    "train.batch_size=5",
    "online.environment.max_turns=4",
    "train.steps=4",
];

/// A run with an environment that is this shell program.
fn config(small: &Small, name: &str, each: &str, more: &[&str]) -> Config {
    let path = small.file(name);
    let text = fs::read_to_string(&path).unwrap();
    let without = text.split("[[judges]]").next().unwrap();
    let program = format!("while read -r line; do {FIELDS}; {each}; done");
    let table = format!("[online.environment]\ncommand = [\"sh\", \"-c\", '''{program}''']\n");
    fs::write(&path, format!("{without}{table}")).unwrap();
    Config::load(&path, &[&COMMON[..], more].concat()).unwrap_or_else(|e| panic!("{e}"))
}

fn train(config: &Config, start: RunDirPolicy) -> Result<Outcome> {
    spawn::train(config, start, &mut Silent, &AtomicBool::new(false))
}

/// Log, samples and final weights.
type Run = (Vec<Map<String, Value>>, Vec<Value>, Vec<u8>);

fn left(small: &Small, name: &str) -> Run {
    let text = fs::read_to_string(small.path(name).join("samples.jsonl")).unwrap();
    let samples = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (log(small, name), samples, small.weights(name))
}

fn run(small: &Small, name: &str, each: &str, more: &[&str]) -> Run {
    let config = config(small, name, each, more);
    train(&config, RunDirPolicy::Overwrite).unwrap_or_else(|e| panic!("{}", tandem_train::chain(&e)));
    left(small, name)
}

fn assert_same(found: &Run, expected: &Run, settings: &[&str]) {
    assert_eq!(found.1, expected.1, "{settings:?}: samples");
    assert_eq!(found.0, expected.0, "{settings:?}: the log");
    assert!(found.2 == expected.2, "{settings:?}: the final weights");
}

fn answers(run: &Run) -> impl Iterator<Item = &Value> {
    run.1.iter().flat_map(|line| line["answers"].as_array().unwrap())
}

#[test]
fn conversations_are_the_same_on_any_number_of_ranks() {
    let small = Small::new("online");
    let whole = run(&small, "one", &game(), &[]);
    for place in [
        &["compute.devices=cpu:2", "compute.sharding=zero3", "online.max_batch=2"][..],
        &["compute.devices=cpu:4", "online.environment.concurrency=1"],
        &["compute.devices=cpu:2", "compute.pipeline=2"],
    ] {
        assert_same(&run(&small, "other", &game(), place), &whole, place);
    }
    let later = ["online.steps_per_round=2", "grpo.num_iterations=2", "objective.beta=0.1"];
    let whole = run(&small, "one", &game(), &later);
    let place = [&later[..], &["compute.devices=cpu:3", "compute.sharding=zero3"]].concat();
    assert_same(&run(&small, "other", &game(), &place), &whole, &place);
}

/// The turns of the policy and what lies between them, as they were trained on.
#[test]
fn only_the_policys_tokens_are_trained_on() {
    let small = Small::new("online");
    let found = run(&small, "run", &game(), &[]);
    for line in &found.0 {
        let number = |key: &str| line[key].as_f64().unwrap();
        // Of each sampled token, the trainer has the log-probability that the generator had. A later turn attends to one
        // text there and to prompt and answer here, which differ in the last bits. Of another token, it is off by more.
        assert!(number("sampling/sampling_logp_difference/max") < 1e-5, "{line:?}");
        assert!((number("sampling/ratio") - 1.0).abs() < 1e-6, "{line:?}");
        let of_step: Vec<&Value> = found
            .1
            .iter()
            .filter(|sample| sample["step"] == line["step"])
            .flat_map(|sample| sample["answers"].as_array().unwrap())
            .collect();
        let turns = |answer: &&&Value| {
            let messages = answer["conversation"].as_array().unwrap();
            messages.iter().filter(|message| message["role"] == "assistant").count()
        };
        let all: usize = of_step.iter().map(|answer| turns(&answer)).sum();
        assert_eq!(number("environment/turns"), all as f64 / of_step.len() as f64);
        assert!(number("environment/turns") > 1.0);
        // Twelve tokens at most each.
        assert!(number("completions/max_length") <= 48.0, "{line:?}");
        assert!(number("generated_tokens") <= (12 * all) as f64 && number("generated_tokens") >= all as f64);
        let dropped = of_step.iter().filter(|answer| answer["score"].is_null()).count();
        assert_eq!([number("environment/dropped"), number("unscored")], [dropped as f64; 2]);
        let scores: Vec<f64> = of_step.iter().filter_map(|answer| answer["score"].as_f64()).collect();
        let mean = scores.iter().sum::<f64>() / scores.len() as f64;
        assert!((number("rewards/environment/mean") - mean).abs() < 1e-12);
        assert!((number("reward") - mean).abs() < 1e-12);
    }
    let said = |answer: &Value| answer["judges"]["environment"]["said"].as_str().unwrap().to_owned();
    assert!(answers(&found).any(|answer| said(answer) == "turn 4"), "the limit of turns ends some");
    assert!(answers(&found).any(|answer| said(answer) == "turn 2"));
    assert!(answers(&found).any(|answer| said(answer) == "lost"), "some are dropped");
    for answer in answers(&found) {
        let roles: Vec<&str> = answer["conversation"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| message["role"].as_str().unwrap())
            .collect();
        let expected: Vec<&str> = ["assistant", "user"].into_iter().cycle().take(roles.len()).collect();
        assert_eq!(roles, expected);
        let score = answer["score"].as_f64();
        assert_eq!(score.is_none(), said(answer) == "lost", "{answer}");
    }
}

/// A conversation that its next messages would make too long ends instead, within the limit.
#[test]
fn a_conversation_ends_at_the_greatest_length() {
    let small = Small::new("online");
    let long = "one two three four five six seven eight nine ten eleven twelve ".repeat(4);
    let each = format!(
        "if [ $last = true ]; then {END}; else \
         echo \"{{\\\"id\\\":$id,\\\"messages\\\":[{{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"{long}\\\"}}]}}\"; fi"
    );
    let found = run(&small, "run", &each, &["data.max_length=96", "train.steps=2"]);
    for answer in answers(&found) {
        assert_eq!(answer["conversation"].as_array().unwrap().len(), 1, "{answer}");
        assert_eq!(answer["judges"]["environment"]["said"], "turn 1");
    }
}

#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been() {
    for more in [&[][..], &["online.steps_per_round=3"]] {
        let small = Small::new("online");
        let whole = run(&small, "whole", &game(), more);
        let mut start = RunDirPolicy::Fresh;
        for (ranks, until) in [(1, Some(1)), (2, Some(2)), (3, None)] {
            let devices = format!("compute.devices=cpu:{ranks}");
            config(&small, "parts", &game(), &[]);
            let settings = [&COMMON[..], more, &[devices.as_str()]].concat();
            let outcome =
                stop_after(&Config::load(&small.path("parts.toml"), &settings).unwrap(), start, until);
            assert_eq!(matches!(outcome, Outcome::Finished(_)), until.is_none());
            start = RunDirPolicy::Resume;
        }
        assert_same(&left(&small, "parts"), &whole, more);
    }
}

/// Trains until a step has a record.
fn stop_after(config: &Config, start: RunDirPolicy, step: Option<u64>) -> Outcome {
    struct Watcher<'a>(&'a AtomicBool, Option<u64>);
    impl tandem_train::Observer for Watcher<'_> {
        fn event(&mut self, event: &tandem_train::Event<'_>) {
            if let tandem_train::Event::Record(record) = event
                && self.1 == Some(record.step())
            {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }
    let stop = AtomicBool::new(false);
    spawn::train(config, start, &mut Watcher(&stop, step), &stop).unwrap_or_else(|e| panic!("{e}"))
}

/// The round that waits for it is discarded, and begins again.
#[test]
fn a_run_does_not_wait_for_its_environment_when_it_is_to_stop() {
    let small = Small::new("online");
    let (busy, gate) = (small.path("busy"), small.path("gate"));
    let wait = "k=$((k+1)); if [ $k -gt 60 ] && [ ! -e GATE ]; then echo > BUSY; sleep 3600; fi";
    let wait = wait.replace("GATE", gate.to_str().unwrap()).replace("BUSY", busy.to_str().unwrap());
    let each = format!("{wait}; {}", game());
    let (stop, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let more = ["online.environment.timeout_s=7200.0"];
    let parts = config(&small, "parts", &each, &[&more[..], &["compute.devices=cpu:2"]].concat());
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !busy.exists() && !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let outcome = spawn::train(&parts, RunDirPolicy::Fresh, &mut Silent, &stop);
        is_over.store(true, Ordering::Relaxed);
        outcome
    });
    assert!(busy.exists() && matches!(outcome, Ok(Outcome::Stopped(Some(_)))), "{outcome:?}");
    fs::write(&gate, "").unwrap();
    let rest = config(&small, "parts", &each, &more);
    assert!(matches!(train(&rest, RunDirPolicy::Resume), Ok(Outcome::Finished(_))));
    assert_same(&left(&small, "parts"), &run(&small, "whole", &each, &more), &more);
}

/// Continues every conversation.
const GO: &str =
    "echo \"{\\\"id\\\":$id,\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"Go.\\\"}]}\"";

/// Only one reply in all ends a conversation as it should.
#[test]
fn messages_to_a_conversation_that_must_end_drop_it() {
    let small = Small::new("online");
    let each = format!("k=$((k+1)); if [ $k -eq 16 ]; then {END}; else {GO}; fi");
    let more = ["online.environment.max_turns=2", "online.environment.concurrency=1", "train.steps=1"];
    let config = config(&small, "run", &each, &more);
    let error = tandem_train::chain(&train(&config, RunDirPolicy::Fresh).expect_err("nothing was learned"));
    assert!(error.contains("nothing was learned in 1 steps: in none was an answer"), "{error}");
    for line in &log(&small, "run") {
        assert_eq!((&line["environment/dropped"], &line["unscored"]), (&14.into(), &14.into()), "{line:?}");
    }
    let samples = fs::read_to_string(small.path("run/samples.jsonl")).unwrap();
    let samples: Vec<Value> = samples.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let all = samples.iter().flat_map(|line| line["answers"].as_array().unwrap());
    assert_eq!(all.filter(|answer| answer["score"].is_null()).count(), 14, "{samples:?}");
}

/// A program none of whose replies is usable ends the run in its first step, with the reason.
#[test]
fn an_environment_that_rewards_nothing_ends_the_run() {
    for ranks in ["compute.devices=cpu:1", "compute.devices=cpu:2"] {
        let end = "{\\\"id\\\":$id,\\\"reward\\\":";
        let of_first_turn = format!("if [ $turn -eq 1 ]; then {GO}; else echo \"{end}true}}\"; fi");
        for (each, reason) in [
            (GO.to_owned(), "the environment gave messages, not a reward, to a conversation that had to end"),
            (of_first_turn, "the reward is no number"),
            (format!("echo \"{end}null,\\\"reason\\\":\\\"no game\\\"}}\""), "no game"),
        ] {
            let small = Small::new("online");
            let config = config(&small, "run", &each, &["online.environment.max_turns=3", ranks]);
            let error = tandem_train::chain(&train(&config, RunDirPolicy::Fresh).expect_err("it ends"));
            let says = "environment: 0 of 15 conversations rewarded; the last reason: ";
            assert!(error.contains(says) && error.contains(reason), "{error}");
            assert!(log(&small, "run").is_empty(), "no step is trained");
        }
    }
}

#[test]
fn an_environment_that_dies_ends_the_run() {
    for ranks in ["compute.devices=cpu:1", "compute.devices=cpu:2"] {
        let small = Small::new("online");
        let restarts = [
            "online.environment.restarts=1",
            "online.environment.first_pause_s=0.01",
            "online.environment.longest_pause_s=0.01",
            ranks,
        ];
        let config = config(&small, "run", "echo its reason >&2; exit 3", &restarts);
        let error = tandem_train::chain(&train(&config, RunDirPolicy::Fresh).expect_err("it ends"));
        assert!(error.contains("environment: the command `sh ") && error.contains("its reason"), "{error}");
    }
}

/// The contents of messages follow a text as they are.
#[test]
fn texts_are_continued_too() {
    let small = Small::new("online");
    let prompts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/online/prompts_plain.jsonl");
    let data = format!("data.train={prompts}");
    let whole = run(&small, "one", &game(), &[&data]);
    let difference =
        |line: &Map<String, Value>| line["sampling/sampling_logp_difference/max"].as_f64().unwrap();
    assert!(whole.0.iter().all(|line| difference(line) < 1e-5), "{:?}", whole.0);
    assert!(answers(&whole).any(|answer| answer["text"].as_str().unwrap().contains("Hint ")));
    let place = [&data, "compute.devices=cpu:2"];
    assert_same(&run(&small, "other", &game(), &place), &whole, &place);
}
