//! Commands that work, and that fail in every way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Map, json};
use tandem_judge::{
    Candidate, CommandConfig, CommandJudge, Judge, Prompt, PromptWithCompletions, StderrLine,
};

use crate::support::{GO, group, judge, scores};

/// Longer than anything takes on a busy machine.
const EVER: f64 = 120.0;

/// Reads items one by one; `$line` is the item, `$id` its number. `for_each` runs for each.
fn script(each: &str) -> CommandConfig {
    let each = format!("while read -r line; do id=${{line#*\\\"id\\\":}}; id=${{id%%,*}}; {each}; done");
    sh(&each)
}

fn sh(script: &str) -> CommandConfig {
    CommandConfig {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        timeout_s: EVER,
        start_timeout_s: EVER,
        first_pause_s: 0.001,
        longest_pause_s: 0.01,
        ..CommandConfig::default()
    }
}

/// Answers with the item's number.
const ID: &str = r#"echo "{\"id\":$id,\"score\":$id}""#;

fn silent() -> StderrLine {
    Arc::new(|_: &str| {})
}

fn start(config: CommandConfig) -> CommandJudge {
    CommandJudge::new("command", config, silent()).unwrap()
}

/// Creates a judge, and the lines of its stderr, which end when no process of it is left.
fn with_stderr(config: CommandConfig) -> (CommandJudge, Receiver<String>) {
    let (send, lines) = channel();
    let send = Mutex::new(send);
    let on_line = Arc::new(move |line: &str| send.lock().unwrap().send(line.to_owned()).unwrap_or(()));
    (CommandJudge::new("command", config, on_line).unwrap(), lines)
}

/// Passes if no thread and no process holds the command's stderr open.
fn assert_no_orphan(lines: &Receiver<String>) {
    loop {
        match lines.recv_timeout(Duration::from_secs_f64(EVER)) {
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => panic!("a process is left"),
        }
    }
}

#[test]
fn items_are_what_the_protocol_says() {
    let mut command = start(script(r#"printf '%s\n' "{\"id\":$id,\"score\":0.5,\"reason\":$line}""#));
    let row = json!({ "answer": 42, "ä\n": ["x"] });
    let row = row.as_object().unwrap();
    let messages = [json!({ "role": "user", "content": "hi \"you\"\n" })];
    let answers = vec![Candidate { text: "one\ntwo", tokens: 2, is_ended: true }];
    let talk = PromptWithCompletions { place: "", prompt: Prompt::Messages(&messages), row, answers };
    let groups = [group("question\\", row, &["a", "b"]), talk];
    let verdicts = command.judge(&groups, &GO).unwrap();
    let item = |id: u64, prompt, messages, answer| json!({ "id": id, "prompt": prompt, "messages": messages, "answer": answer, "row": row });
    assert_eq!(verdicts.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(verdicts[0][0].said, item(0, json!("question\\"), json!(null), "a"));
    assert_eq!(verdicts[0][1].said, item(1, json!("question\\"), json!(null), "b"));
    assert_eq!(verdicts[1][0].said, item(2, json!(null), json!(messages), "one\ntwo"));
    assert!(verdicts.iter().flatten().all(|verdict| verdict.score == Some(0.5)));
}

#[test]
fn one_command_serves_many_calls() {
    let mut command = start(script(ID));
    assert_eq!(
        scores(&judge(&mut command, "?", &["a"; 40]).unwrap()),
        (0..40).map(|id| Some(f64::from(id))).collect::<Vec<_>>()
    );
    assert_eq!(scores(&judge(&mut command, "?", &["a", "b"]).unwrap()), [Some(40.0), Some(41.0)]);
    assert_eq!(judge(&mut command, "?", &[]).unwrap(), []);
    let counts = command.counts();
    assert_eq!((counts.judged, counts.unscored, counts.retries, counts.restarts), (42, 0, 0, 0));
}

#[test]
fn answers_may_come_in_any_order() {
    let answer = |id| format!(r#"echo '{{"id":{id},"score":{id}}}'"#);
    let answers = [2, 0, 3, 1].map(answer).join("; ");
    let mut command = start(sh(&format!("read a; read b; read c; read d; {answers}; cat")));
    assert_eq!(scores(&judge(&mut command, "?", &["a"; 4]).unwrap()), [0.0, 1.0, 2.0, 3.0].map(Some));
}

#[test]
fn a_command_that_is_not_there_is_an_error() {
    let config = CommandConfig { command: vec!["/no/such/judge".to_owned()], ..CommandConfig::default() };
    let error = CommandJudge::new("mine", config, silent()).err().unwrap();
    assert_eq!(error.to_string(), "judge `mine`: the command `/no/such/judge` cannot be started");
    assert!(std::error::Error::source(&error).is_some(), "the system's answer is the cause");
}

#[test]
fn a_command_that_always_ends_is_an_error_with_its_last_words() {
    let (mut command, lines) = with_stderr(CommandConfig { restarts: 2, ..sh("echo no model >&2; exit 7") });
    let error = judge(&mut command, "?", &["a"; 20]).unwrap_err().to_string();
    assert!(
        error.contains("ended 3 times in a row without an answer, the last time with exit status: 7"),
        "{error}"
    );
    assert!(error.ends_with("its last lines on stderr:\n  no model\n  no model\n  no model"), "{error}");
    assert_eq!(command.counts().restarts, 2);
    drop(command);
    assert_eq!(lines.iter().collect::<Vec<_>>(), ["no model"; 3]);
}

#[test]
fn an_item_that_kills_the_command_twice_has_no_score_and_the_others_have() {
    let each = format!("case $line in *poison*) exit 3;; esac; {ID}");
    let mut command = start(CommandConfig { concurrency: 4, ..script(&each) });
    let verdicts = judge(&mut command, "?", &["a", "b", "poison", "d", "e", "f", "g", "h"]).unwrap();
    let expected = [Some(0.0), Some(1.0), None, Some(3.0), Some(4.0), Some(5.0), Some(6.0), Some(7.0)];
    assert_eq!(scores(&verdicts), expected);
    assert_eq!(verdicts[2].said, "the command ended twice while it had this item (exit status: 3)");
    let counts = command.counts();
    assert_eq!((counts.judged, counts.unscored, counts.restarts), (8, 1, 2));
    assert!((1..=4).contains(&counts.retries), "{counts:?}");
}

#[test]
fn a_command_may_end_between_calls() {
    let mut command =
        start(sh(r#"read -r line; id=${line#*\"id\":}; echo "{\"id\":${id%%,*},\"score\":1}""#));
    for _ in 0..4 {
        assert_eq!(scores(&judge(&mut command, "?", &["a"]).unwrap()), [Some(1.0)]);
    }
}

#[test]
fn an_item_that_hangs_has_no_score_and_the_others_have() {
    let each = format!("case $line in *slow*) sleep 1000;; esac; {ID}");
    // `timeout_s` counts only after the first answer: items repeated after the restart have enough
    // time.
    let mut command = start(CommandConfig { timeout_s: 0.3, ..script(&each) });
    let verdicts = judge(&mut command, "?", &["a", "slow", "c"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(0.0), None, Some(2.0)]);
    assert_eq!(verdicts[1].said, "no answer within 0.3 s");
    assert_eq!(command.counts().restarts, 1);
}

#[test]
fn a_command_that_always_hangs_is_an_error() {
    let config = CommandConfig { timeout_s: 0.02, start_timeout_s: 0.05, restarts: 2, ..sh("sleep 1000") };
    let (mut command, lines) = with_stderr(config);
    let error = judge(&mut command, "?", &["a"; 20]).unwrap_err().to_string();
    assert!(
        error.contains("ended 3 times in a row without an answer, the last time with signal: 9"),
        "{error}"
    );
    assert!(error.ends_with("it wrote nothing to stderr"), "{error}");
    drop(command);
    assert_no_orphan(&lines);
}

#[test]
fn what_is_no_score_is_kept_as_said() {
    let each = r#"case $line in
        *noise*) echo "what?";;
        *stranger*) echo '{"id":999,"score":1}';;
        *nan*) echo "{\"id\": $id, \"score\": NaN}";;
        *huge*) echo "{\"id\":$id,\"score\":1e999}";;
        *absent*) echo "{\"id\":$id,\"value\":1}";;
        *words*) echo "{\"id\":$id,\"score\":\"high\"}";;
        *unsure*) echo "{\"id\":$id,\"score\":null,\"reason\":\"cannot say\"}";;
        *) echo; echo "{\"id\":$id,\"score\":1,\"reason\":\"fine\"}";;
    esac"#;
    // One at a time, so that a stray line belongs to a known item.
    let mut command = start(CommandConfig { concurrency: 1, ..script(each) });
    let answers = ["ok", "noise", "stranger", "nan", "huge", "absent", "words", "unsure", "ok"];
    let verdicts = judge(&mut command, "?", &answers).unwrap();
    let mut expected = [None; 9];
    (expected[0], expected[8]) = (Some(1.0), Some(1.0));
    assert_eq!(scores(&verdicts), expected);
    assert_eq!(verdicts[0].said, "fine");
    assert_eq!(verdicts[1].said, "received a line that answers no item: what?");
    assert_eq!(verdicts[2].said, r#"received a line that answers no item: {"id":999,"score":1}"#);
    let begin =
        [(3, "not JSON ("), (4, "not JSON ("), (5, "there is no `score`: "), (6, "the score is no number: ")];
    for (index, expected) in begin {
        let said = verdicts[index].said.as_str().unwrap();
        assert!(said.starts_with(expected), "{said}");
    }
    assert_eq!(verdicts[7].said, "cannot say");
    assert_eq!(command.counts().unscored, 7);
}

#[test]
fn a_line_for_people_costs_no_score_while_answers_follow() {
    let mut command = start(sh(&format!("echo loading; {}", script(ID).command[2])));
    assert_eq!(scores(&judge(&mut command, "?", &["a"; 3]).unwrap()), [0.0, 1.0, 2.0].map(Some));
}

#[test]
fn large_items_and_many_of_them() {
    let each = r#"grep -o --line-buffered '^{"id":[0-9]*' | while read -r start; do echo "$start,\"score\":1}"; done"#;
    let mut command = start(sh(each));
    let prompt = "x".repeat(1 << 20);
    assert_eq!(scores(&judge(&mut command, &prompt, &["a"; 200]).unwrap()), [Some(1.0); 200]);
}

#[test]
fn full_pipes_stop_nobody() {
    // 300 kB to both before it reads anything, and as much with each answer; a pipe holds 64 kB.
    let noise = "noise=$(head -c 300000 /dev/zero | tr '\\0' x); echo $noise; echo $noise >&2";
    let each = r#"echo "{\"id\":$id,\"score\":1,\"reason\":\"$noise\"}"; echo $noise >&2"#;
    let mut command = start(sh(&format!("{noise}; {}", script(each).command[2])));
    let prompt = "x".repeat(100_000);
    let verdicts = judge(&mut command, &prompt, &["a"; 20]).unwrap();
    assert_eq!(scores(&verdicts), [Some(1.0); 20]);
    assert!(verdicts.iter().all(|verdict| verdict.said.as_str().unwrap().len() == 300_000));
}

#[test]
fn no_process_is_left_when_the_judge_is_dropped() {
    // It starts another process, and both ignore that stdin was closed.
    let script = format!("sleep 1000 & {}; sleep 1000", script(ID).command[2]);
    let (mut command, lines) = with_stderr(CommandConfig { grace_s: 0.05, ..sh(&script) });
    judge(&mut command, "?", &["a"]).unwrap();
    drop(command);
    assert_no_orphan(&lines);
}

#[test]
fn a_command_may_say_goodbye() {
    let script = format!("{}; echo bye >&2", script(ID).command[2]);
    let (mut command, lines) = with_stderr(CommandConfig { grace_s: EVER, ..sh(&script) });
    judge(&mut command, "?", &["a"]).unwrap();
    drop(command);
    assert_eq!(lines.iter().collect::<Vec<_>>(), ["bye"]);
}

#[test]
fn a_command_is_left_alone_when_it_is_stopped() {
    let stop = Arc::new(AtomicBool::new(false));
    let (send, ended) = channel::<()>();
    let (seen, send) = (Arc::clone(&stop), Mutex::new(send));
    let on_line = Arc::new(move |line: &str| {
        let _held = &send;
        seen.store(line == "asked", Ordering::Relaxed);
    });
    let mut command = CommandJudge::new("command", script("echo asked >&2; sleep 1000"), on_line).unwrap();
    let row = Map::new();
    for _ in 0..2 {
        stop.store(false, Ordering::Relaxed);
        let stopped = command.judge(&[group("?", &row, &["a"])], &stop);
        assert_eq!(stopped.unwrap_err().to_string(), "judging was stopped");
    }
    drop(command);
    assert_eq!(ended.recv_timeout(Duration::from_secs_f64(EVER)), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn options_that_make_no_sense_are_named() {
    let good = || sh("cat");
    let cases = [
        ("command", CommandConfig { command: vec![], ..good() }),
        ("command", CommandConfig { command: vec![String::new()], ..good() }),
        ("concurrency", CommandConfig { concurrency: 0, ..good() }),
        ("timeout_s", CommandConfig { timeout_s: 0.0, ..good() }),
        ("start_timeout_s", CommandConfig { start_timeout_s: f64::NAN, ..good() }),
        ("first_pause_s", CommandConfig { first_pause_s: -1.0, ..good() }),
        ("longest_pause_s", CommandConfig { longest_pause_s: f64::INFINITY, ..good() }),
        ("grace_s", CommandConfig { grace_s: -0.1, ..good() }),
    ];
    for (key, config) in cases {
        let error = config.check("mine").unwrap_err().to_string();
        assert!(error.starts_with(&format!("judge `mine`: `{key}` is ")), "{error}");
    }
    good().check("mine").unwrap();
}
