//! Judges that fail while a model trains: the run says so and ends, or goes on without their scores; it neither waits for ever nor
//! trains on a score that nobody gave.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Outcome, Result};

use super::ranks::log;
use crate::small::Small;

/// A run on so many ranks with these judges.
fn config(small: &Small, name: &str, judges: &str, ranks: usize, more: &[&str]) -> Config {
    let path = small.file(name);
    let text = fs::read_to_string(&path).unwrap();
    let without = text.split("[[judges]]").next().unwrap();
    fs::write(&path, format!("{without}{judges}")).unwrap();
    let devices = format!("compute.devices=cpu:{ranks}");
    let settings =
        ["train.steps=2", "train.batch_size=3", "compute.threads=1", "online.samples_every=1", &devices];
    Config::load(&path, &[&settings, more].concat()).unwrap_or_else(|e| panic!("{e}"))
}

fn train(small: &Small, judges: &str, ranks: usize) -> Result<Outcome> {
    let config = config(small, "run", judges, ranks, &[]);
    spawn::train(&config, RunDirPolicy::Overwrite, &mut Silent, &AtomicBool::new(false))
}

/// A judge that is this shell program, which finds the item's id in `$id`.
fn shell(for_each_line: &str, options: &str) -> String {
    let program = format!(
        "while read -r line; do id=$(printf %s \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/'); {for_each_line}; done"
    );
    format!(
        "[[judges]]\nname = \"own\"\nkind = \"command\"\ncommand = [\"sh\", \"-c\", '''{program}''']\n{options}"
    )
}

fn ends_with(judges: &str, expected: &[&str]) {
    for ranks in [1, 2] {
        let small = Small::new("online");
        let error = tandem_train::chain(&train(&small, judges, ranks).expect_err("it ends"));
        for part in expected {
            assert!(error.contains(part), "on {ranks} ranks: {error}");
        }
        let path = small.path("run/metrics.jsonl");
        let trained = fs::read_to_string(path).unwrap_or_default();
        assert_eq!(trained, "", "no step was taken");
    }
}

/// Every answer goes without a score; what is learned from nothing is nothing.
fn goes_on_without_scores(judges: &str) {
    let small = Small::new("online");
    let error = train(&small, judges, 2).expect_err("nothing was learned");
    let error = tandem_train::chain(&error);
    assert!(error.contains("nothing was learned in 2 steps: in none was an answer"), "{error}");
    let lines = log(&small, "run");
    assert_eq!(lines.len(), 2);
    for line in &lines {
        let count = |key: &str| line[key].as_u64().unwrap();
        assert_eq!((count("unscored"), count("pairs"), count("ties")), (6, 0, 0), "{line:?}");
        assert!(line.get("loss").is_none() && line.get("objective/scores").is_none(), "{line:?}");
    }
    let samples = fs::read_to_string(small.path("run/samples.jsonl")).unwrap();
    for line in samples.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        for answer in line["answers"].as_array().unwrap() {
            assert!(answer["score"].is_null() && !answer["judges"]["own"]["said"].is_null(), "{answer}");
        }
    }
}

#[test]
fn a_command_that_dies_ends_the_run() {
    let options = "restarts = 1\nfirst_pause_s = 0.01\nlongest_pause_s = 0.01\n";
    let judge = shell("echo its reason >&2; exit 3", options);
    ends_with(&judge, &["judge `own`", "its reason"]);
}

#[test]
fn a_command_that_hangs_ends_the_run() {
    let options = "timeout_s = 0.2\nstart_timeout_s = 0.2\nrestarts = 1\nfirst_pause_s = 0.01\nlongest_pause_s = 0.01\ngrace_s = 0.1\n";
    ends_with(&shell("sleep 100", options), &["judge `own`", "without an answer"]);
}

#[test]
fn a_command_that_cannot_be_started_ends_the_run() {
    let judge = "[[judges]]\nname = \"own\"\nkind = \"command\"\ncommand = [\"/no/such/program\"]\n";
    ends_with(judge, &["judge `own`", "/no/such/program"]);
}

/// Before anything is generated.
#[test]
fn a_row_without_the_right_answer_is_named() {
    let judge = "[[judges]]\nname = \"own\"\nkind = \"exact\"\nfield = \"answer\"\n";
    ends_with(judge, &["judge `own`", "prompts_conv.jsonl:2", "`answer` is not there"]);
}

#[test]
fn an_endpoint_where_nobody_listens_ends_the_run() {
    let judge = "[[judges]]\nname = \"own\"\nkind = \"endpoint\"\nbase_url = \"http://127.0.0.1:9/v1\"\nmodel = \"m\"\n\
                 retries = 0\n";
    ends_with(judge, &["judge `own`", "127.0.0.1:9"]);
}

#[test]
fn a_judge_that_scores_nothing_ends_the_run_in_its_first_step() {
    let none = |reply: &str, why: &str| {
        let scored = format!("judge `own`: 0 of 6 answers scored: {why}: ");
        ends_with(&shell(reply, ""), &[&scored, "`may_abstain = true`"]);
    };
    none("echo \"{\\\"id\\\":$id}\"", "there is no `score`");
    none("echo \"{\\\"id\\\":$id,\\\"score\\\":NaN}\"", "not JSON (expected value at line 1 column 17)");
    none("echo \"{\\\"id\\\":$id,\\\"score\\\":\\\"NaN\\\"}\"", "the score is no number");
}

#[test]
fn a_judge_that_may_abstain_may_score_nothing() {
    let abstains = "may_abstain = true\n";
    goes_on_without_scores(&shell("echo \"{\\\"id\\\":$id,\\\"score\\\":1e999}\"", abstains));
    goes_on_without_scores(&shell("echo \"{wrong\"", abstains));
}

#[test]
fn a_slow_command_is_waited_for() {
    let small = Small::new("online");
    let judge = shell("sleep 0.05; echo \"{\\\"id\\\":$id,\\\"score\\\":$id}\"", "");
    train(&small, &judge, 2).unwrap_or_else(|e| panic!("{e}"));
    let lines = log(&small, "run");
    assert!(lines.iter().all(|line| line["pairs"] == 3 && line["unscored"] == 0), "{lines:?}");
}

/// A stopped run does not wait for a slow judge; its completions are judged when it resumes.
#[test]
fn a_run_does_not_wait_for_its_judges_when_it_is_to_stop() {
    for more in [&["train.steps=4"][..], &["train.steps=4", "online.overlap=true"]] {
        let small = Small::new("online");
        let (busy, gate) = (small.path("busy"), small.path("gate"));
        let score = "echo \"{\\\"id\\\":$id,\\\"score\\\":$((${#line} - ${#id}))}\"";
        let lines = "n=$((n+1)); if [ $n -gt 14 ] && [ ! -e GATE ]; then echo > BUSY; sleep 3600; fi";
        let lines = lines.replace("GATE", gate.to_str().unwrap()).replace("BUSY", busy.to_str().unwrap());
        let judge = shell(&format!("{lines}; {score}"), "timeout_s = 7200\n");
        let (stop, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let parts = config(&small, "parts", &judge, 2, more);
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
        assert!(matches!(outcome, Ok(Outcome::Stopped(Some(_)))), "{outcome:?}");
        fs::write(&gate, "").unwrap();
        let rest = config(&small, "parts", &judge, 1, more);
        let go = |config: &Config, start| spawn::train(config, start, &mut Silent, &AtomicBool::new(false));
        assert!(matches!(go(&rest, RunDirPolicy::Resume), Ok(Outcome::Finished(_))));
        go(&config(&small, "whole", &judge, 1, more), RunDirPolicy::Fresh).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(log(&small, "parts"), log(&small, "whole"), "{more:?}");
        assert!(small.weights("parts") == small.weights("whole"), "{more:?}");
    }
}

/// A judge of weight 0 has its say and no vote.
#[test]
fn a_judge_that_does_not_count_may_have_no_score() {
    let small = Small::new("online");
    let silent = shell("echo \"{\\\"id\\\":$id}\"", "weight = 0\n");
    train(
        &small,
        &format!("{silent}[[judges]]\nkind = \"length\"\nunit = \"characters\"\nper_unit = 1\n"),
        1,
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let lines = log(&small, "run");
    assert!(lines.iter().all(|line| line["unscored"] == 0 && line.get("judges/own").is_none()), "{lines:?}");
}
