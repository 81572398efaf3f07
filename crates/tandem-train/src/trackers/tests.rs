//! Trackers of all kinds that hang, end, or are missing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::message::{Content, Message, Start};
use super::*;
use crate::config::LoggingConfig;
use crate::metrics::Split;

/// Facts about a run without a config.
pub(super) fn start(resumed: Option<u64>) -> Arc<Start> {
    Arc::new(Start {
        output: PathBuf::new(),
        name: "first".to_owned(),
        id: "0123456789abcdef".to_owned(),
        entries: vec![("train.steps".to_owned(), "3".to_owned())],
        config: Value::Null,
        resumed,
        grace: 1.0,
    })
}

/// A record of a step.
pub(super) fn record(step: u64) -> Arc<Message> {
    let mut record = Record::new(step, Split::Train);
    record.set("loss", 1.0 / step as f64);
    Arc::new(Message::now(Content::Record(record)))
}

/// Longer than anything here takes: a test that hangs fails instead.
const PATIENCE: Duration = Duration::from_secs(600);

/// A config whose trackers have a second after the end: they hang.
fn hanging(folder: &Path, logging: &str) -> Config {
    let config = config(folder, logging);
    Config { logging: LoggingConfig { grace_s: 1.0, ..config.logging }, ..config }
}

fn config(folder: &Path, logging: &str) -> Config {
    let path = folder.join("run.toml");
    let text = format!(
        "method = 'sft'\nmodel = 'm'\noutput = 'o'\ndata.train = 't.jsonl'\n\
         train = {{ batch_size = 2, steps = 3, learning_rate = 1 }}\n[logging]\ngrace_s = 600\n{logging}\n"
    );
    std::fs::write(&path, text).unwrap();
    Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}"))
}

/// Sends records of steps 1 to `steps` and the end to the trackers of a config; returns the sentences.
fn run(config: &Config, folder: &Path, steps: u64) -> Vec<String> {
    let mut trackers = Trackers::start(config, folder, None, Box::new(std::iter::empty()));
    for step in 1..=steps {
        let mut record = Record::new(step, Split::Train);
        record.set("loss", 1.0 / step as f64);
        trackers.record(&record);
    }
    trackers.end(&Ending::Finished);
    trackers.warnings()
}

fn command(script: &str) -> String {
    format!("command = [\"sh\", \"-c\", {script:?}]")
}

#[test]
fn a_program_gets_start_records_and_end_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &command("cat; echo done >&2"));
    assert_eq!(run(&config, folder.path(), 1000), [""; 0]);
    let text = std::fs::read_to_string(folder.path().join(OUTPUT)).unwrap();
    let mut lines = text.lines();
    let start: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    assert_eq!(
        (&start["kind"], &start["run"], &start["restarts"]),
        (&"start".into(), &"o".into(), &0.into())
    );
    assert_eq!(start["config"]["train"]["steps"], 3);
    for step in 1..=1000 {
        let line: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
        assert_eq!((&line["kind"], &line["step"]), (&"record".into(), &step.into()));
    }
    assert_eq!(lines.next(), Some(r#"{"kind":"end","step":1000,"outcome":"finished","reason":null}"#));
    assert_eq!((lines.next(), lines.next()), (Some("done"), None));
}

#[test]
fn a_program_that_never_reads_is_killed_after_the_end() {
    let folder = tempfile::tempdir().unwrap();
    // The sleeping child has the pipes too; both are of the group.
    let config = hanging(folder.path(), &command("sleep 1000 & echo $!; sleep 1000"));
    for (steps, expected) in
        [(10, &["had not ended"][..]), (50_000, &["10000 records wait", "did not reach it"])]
    {
        let warnings = run(&config, folder.path(), steps);
        assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
        for (warning, words) in warnings.iter().zip(expected) {
            assert!(warning.starts_with("logging.command: ") && warning.contains(words), "{warnings:?}");
        }
        let text = std::fs::read_to_string(folder.path().join(OUTPUT)).unwrap();
        let child = text.lines().last().unwrap();
        let began = Instant::now();
        while is_running(child) {
            assert!(began.elapsed() < PATIENCE, "{child} goes on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns whether a process is neither gone nor a zombie.
fn is_running(id: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

#[test]
fn a_program_that_ends_is_restarted_and_then_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &command("read line; echo started; echo no module >&2; exit 3"));
    let mut trackers = Trackers::start(&config, folder.path(), None, Box::new(std::iter::empty()));
    let warning = trackers.warnings.recv_timeout(PATIENCE).unwrap();
    assert!(warning.contains("exit status: 3") && warning.contains("no module"), "{warning}");
    assert!(warning.contains("6 times in a row") && warning.contains(OUTPUT), "{warning}");
    trackers.record(&Record::new(1, Split::Train));
    trackers.end(&Ending::Finished);
    assert_eq!(trackers.warnings(), [""; 0]);
    let text = std::fs::read_to_string(folder.path().join(OUTPUT)).unwrap();
    assert_eq!(text.matches("started").count(), 6);
}

/// What the pipe had taken is lost with the program; the line that was torn is not.
#[test]
fn a_record_that_a_dying_program_did_not_take_goes_to_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let script = "if mkdir here 2>/dev/null; then sleep 0.2; exit 1; fi; cat";
    let config = config(folder.path(), &command(&format!("cd {}; {script}", folder.path().display())));
    assert_eq!(run(&config, folder.path(), 5000), [""; 0]);
    let text = std::fs::read_to_string(folder.path().join(OUTPUT)).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [start, records @ .., end] = &lines[..] else { panic!("{text}") };
    assert_eq!((&start["kind"], &start["restarts"]), (&"start".into(), &1.into()));
    assert_eq!((&end["kind"], &end["step"]), (&"end".into(), &5000.into()));
    let steps: Vec<_> = records.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    let first = steps[0];
    assert!(1 < first && first < 3000, "a pipe has 64 KiB: {first}");
    assert_eq!(steps, (first..=5000).collect::<Vec<_>>());
}

#[test]
fn a_program_that_fails_at_its_end_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &command("cat >/dev/null; echo upload failed; exit 4"));
    let warnings = run(&config, folder.path(), 2);
    assert!(warnings[0].contains("exit status: 4; its last line: upload failed"), "{warnings:?}");
    assert_eq!(warnings.len(), 1);
}

#[test]
fn a_missing_program_is_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    for program in ["no-such-program-of-any-kind", "./no/such/program", "/etc/passwd"] {
        let config = config(folder.path(), &format!("command = [{program:?}]"));
        let error = check(&config).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(program), "{error}");
    }
    check(&config(folder.path(), "command = [\"sh\"]")).unwrap();
    check(&config(folder.path(), "command = []")).unwrap();
}

#[test]
fn a_server_that_is_missing_is_told_and_what_it_has_lost() {
    let folder = tempfile::tempdir().unwrap();
    // A port that was free a moment ago.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = hanging(folder.path(), &format!("mlflow.uri = \"http://{address}\""));
    let warnings = run(&config, folder.path(), 50);
    let [trouble, loss] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(trouble.contains(&address.to_string()) && trouble.contains("tries again"), "{warnings:?}");
    assert!(loss.contains("records did not reach it"), "{warnings:?}");
}

#[test]
fn a_folder_that_cannot_be_is_told_and_what_it_has_lost() {
    let folder = tempfile::tempdir().unwrap();
    let config = hanging(folder.path(), "tensorboard = '/dev/null/events'");
    let warnings = run(&config, folder.path(), 50);
    let [trouble, loss] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(trouble.contains("/dev/null/events"), "{warnings:?}");
    assert!(loss.contains("records did not reach it"), "{warnings:?}");
}

#[test]
fn a_full_queue_drops_its_oldest() {
    let queue = queue::Queue::default();
    let dropped: Vec<u64> = (1..=10_003).filter(|&step| queue.push(record(step))).collect();
    assert_eq!(dropped, [10_001, 10_002, 10_003]);
    let mut hand = VecDeque::new();
    queue.take(&mut hand, Duration::ZERO);
    let Content::Record(first) = &hand[0].content else { panic!("a record") };
    assert_eq!((first.step(), queue.undelivered()), (4, 10_003));
}

#[test]
fn a_resumed_run_keeps_its_id() {
    let folder = tempfile::tempdir().unwrap();
    let id = |resumes| StateFile::open(folder.path(), resumes).id().to_owned();
    let first = id(false);
    assert_eq!(id(true), first);
    // Starts within one millisecond differ as well.
    let ids: std::collections::HashSet<String> = (0..100).map(|_| id(false)).chain([first]).collect();
    assert_eq!(ids.len(), 101);
}
