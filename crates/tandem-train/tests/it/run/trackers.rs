//! Trackers beside a run: none of them changes it, and a service gets each record once.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tandem_train::run::run_dir::RunDirPolicy;

use super::fake::{Fake, Reply, Request, Said};
use crate::small::Small;

/// Longer than anything here takes: a test that hangs fails instead.
const PATIENT: &str = "logging.grace_s=600";

/// A store as MLflow's, with its limits.
#[derive(Default)]
struct Store {
    experiments: Vec<String>,
    runs: Vec<StoredRun>,
}

#[derive(Default)]
struct StoredRun {
    name: String,
    experiment: String,
    params: BTreeMap<String, String>,
    /// Values by metric, as step and value.
    metrics: BTreeMap<String, Vec<(u64, f64)>>,
    tags: BTreeMap<String, String>,
    statuses: Vec<String>,
}

type Shared = Arc<Mutex<Store>>;

fn error(status: u16, code: &str) -> Said {
    (status, json!({ "error_code": code, "message": "refused by the test" }).to_string())
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

impl Store {
    fn answer(&mut self, request: &Request) -> Said {
        let path = request.path.strip_prefix("api/2.0/mlflow/").expect("a path of MLflow");
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let found = |value: Value| (200, value.to_string());
        match path {
            "experiments/get-by-name" => {
                let name = query.strip_prefix("experiment_name=").unwrap().replace("%20", " ");
                match self.experiments.iter().position(|known| *known == name) {
                    Some(id) => found(json!({ "experiment": { "experiment_id": id.to_string() } })),
                    None => error(404, "RESOURCE_DOES_NOT_EXIST"),
                }
            }
            "experiments/create" => {
                self.experiments.push(text(&request.body["name"]));
                found(json!({ "experiment_id": (self.experiments.len() - 1).to_string() }))
            }
            "runs/create" => {
                let name = text(&request.body["run_name"]);
                let id: usize = text(&request.body["experiment_id"]).parse().unwrap();
                let experiment = self.experiments[id].clone();
                let tags = request.body["tags"].as_array().unwrap();
                let tags = tags.iter().map(|tag| (text(&tag["key"]), text(&tag["value"]))).collect();
                self.runs.push(StoredRun { name, experiment, tags, ..StoredRun::default() });
                found(json!({ "run": { "info": { "run_id": format!("run{}", self.runs.len() - 1) } } }))
            }
            "runs/get" => {
                let id: usize = query.strip_prefix("run_id=run").unwrap().parse().unwrap();
                let Some(run) = self.runs.get(id) else { return error(404, "RESOURCE_DOES_NOT_EXIST") };
                let last = |(key, values): (&String, &Vec<(u64, f64)>)| {
                    let (step, value) = values.iter().max_by_key(|(step, _)| *step).unwrap();
                    json!({ "key": key, "value": value, "step": step })
                };
                let metrics: Vec<_> = run.metrics.iter().map(last).collect();
                let params: Vec<_> = run.params.keys().map(|key| json!({ "key": key })).collect();
                let info = json!({ "lifecycle_stage": "active" });
                found(json!({ "run": { "info": info, "data": { "metrics": metrics, "params": params } } }))
            }
            "runs/update" => {
                let run = self.of(request);
                run.statuses.push(text(&request.body["status"]));
                found(json!({}))
            }
            "runs/log-batch" => self.log(request),
            other => panic!("no path of MLflow: {other}"),
        }
    }

    fn of(&mut self, request: &Request) -> &mut StoredRun {
        let id: usize = text(&request.body["run_id"]).strip_prefix("run").unwrap().parse().unwrap();
        &mut self.runs[id]
    }

    fn log(&mut self, request: &Request) -> Said {
        let list = |key: &str| request.body[key].as_array().expect("a list").clone();
        let (metrics, params, tags) = (list("metrics"), list("params"), list("tags"));
        if params.len() > 100 || tags.len() > 100 || metrics.len() + params.len() + tags.len() > 1000 {
            return error(400, "INVALID_PARAMETER_VALUE");
        }
        let run = self.of(request);
        for metric in metrics {
            let value = (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap());
            assert!(metric["timestamp"].as_u64().unwrap() > 1_600_000_000_000, "milliseconds");
            run.metrics.entry(text(&metric["key"])).or_default().push(value);
        }
        for param in params {
            let (key, value) = (text(&param["key"]), text(&param["value"]));
            if value.len() > 6000 || run.params.get(&key).is_some_and(|known| *known != value) {
                return error(400, "INVALID_PARAMETER_VALUE");
            }
            run.params.insert(key, value);
        }
        for tag in tags {
            run.tags.insert(text(&tag["key"]), text(&tag["value"]));
        }
        (200, "{}".to_owned())
    }
}

/// A server with a store, and `how` it departs from the usual.
fn mlflow(how: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> (Fake, Shared) {
    let store = Shared::default();
    let kept = store.clone();
    let fake = Fake::start("mlflow", "", move |request| kept.lock().unwrap().answer(request), how);
    (fake, store)
}

/// Losses of `metrics.jsonl` by step.
fn losses(small: &Small, name: &str) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(small.path(name).join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let train = records.filter(|record| record["split"] == "train");
    train.map(|record| (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap())).collect()
}

fn set(key: &str, value: impl std::fmt::Display) -> String {
    format!("logging.{key}={value}")
}

/// Runs with trackers; the records and weights have to be those of a run without.
fn changes_nothing(small: &Small, name: &str, trackers: &[String]) -> Vec<String> {
    let trackers: Vec<&str> = trackers.iter().map(String::as_str).collect();
    let plain = small.path("plain");
    let expected = match plain.exists() {
        true => None,
        false => Some(small.finish("plain", RunDirPolicy::Fresh, &[])),
    };
    let heard = small.finish(name, RunDirPolicy::Fresh, &trackers);
    if let Some(expected) = expected {
        assert_eq!(heard.steps, expected.steps);
    }
    assert_eq!(losses(small, name), losses(small, "plain"));
    assert!(small.weights(name) == small.weights("plain"), "{name}: weights differ");
    heard.warnings
}

/// A program that never reads, a server that accepts and never answers, and a folder that cannot be.
#[test]
fn trackers_that_hang_change_nothing() {
    let small = Small::new("dpo");
    let (silent, _) = mlflow(|_, _| Reply::Nothing);
    let trackers = [
        set("grace_s", 1),
        set("command", "[\"sleep\", \"1000\"]"),
        set("mlflow.uri", &silent.address),
        set("tensorboard", "/dev/null/events"),
    ];
    let mut warnings = changes_nothing(&small, "hanging", &trackers);
    warnings.sort();
    let keys: Vec<_> = warnings.iter().map(|warning| warning.split(':').next().unwrap()).collect();
    // The folder's trouble, and what was lost by it.
    let expected = ["logging.command", "logging.mlflow", "logging.tensorboard", "logging.tensorboard"];
    assert_eq!(keys, expected, "{warnings:?}");
    assert!(warnings[0].contains("was killed"), "{warnings:?}");
}

/// A program that ends at once, a server that refuses everything, and trackers that work beside them.
#[test]
fn trackers_that_fail_change_nothing() {
    let small = Small::new("dpo");
    let (refusing, _) = mlflow(|_, _| Reply::Http(403, "{\"message\": \"no entry\"}".to_owned()));
    let trackers = [
        set("grace_s", 1),
        set("command", "[\"sh\", \"-c\", \"echo broken; exit 3\"]"),
        set("mlflow.uri", &refusing.address),
        set("tensorboard", true),
    ];
    let warnings = changes_nothing(&small, "failing", &trackers);
    // Whether a dying program's pipe had taken the records is chance.
    let is_loss = |warning: &String| warning.contains("records did not reach it");
    let (losses, mut warnings): (Vec<_>, Vec<_>) = warnings.into_iter().partition(is_loss);
    assert!(
        losses.len() <= 1 && losses.iter().all(|loss| loss.starts_with("logging.command: ")),
        "{losses:?}"
    );
    warnings.sort();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("exit status: 3") && warnings[0].contains("broken"), "{warnings:?}");
    assert!(
        warnings[1].contains("no entry") && warnings[1].contains("MLFLOW_TRACKING_TOKEN"),
        "{warnings:?}"
    );
    let events = fs::read_dir(small.path("failing/tensorboard")).unwrap().count();
    assert_eq!(events, 1);
}

#[test]
fn a_program_that_is_missing_is_refused_and_leaves_no_folder() {
    let small = Small::new("dpo");
    let trackers = [set("command", "[\"./no-such-tracker\"]")];
    let trackers: Vec<&str> = trackers.iter().map(String::as_str).collect();
    let (_, outcome) = small.run("missing", RunDirPolicy::Fresh, None, &trackers);
    let error = outcome.unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("logging.command: cannot run `./no-such-tracker`"), "{error}");
    assert!(!small.path("missing").exists());
}

#[test]
fn one_of_several_ranks_has_the_trackers() {
    let small = Small::new("dpo");
    let trackers = [
        set("command", "[\"cat\"]"),
        set("tensorboard", true),
        "compute.devices=cpu:3".to_owned(),
        PATIENT.to_owned(),
    ];
    assert_eq!(changes_nothing(&small, "ranks", &trackers), [""; 0]);
    let text = fs::read_to_string(small.path("ranks/tracker.log")).unwrap();
    let kinds: Vec<_> =
        text.lines().map(|line| text_of(&serde_json::from_str(line).unwrap(), "kind")).collect();
    assert_eq!(kinds, [&["start"][..], &["record"; 6], &["end"]].concat());
    assert_eq!(fs::read_dir(small.path("ranks/tensorboard")).unwrap().count(), 1);
}

fn text_of(line: &Value, key: &str) -> String {
    text(&line[key])
}

/// Stopped after step 3 and resumed: one run, whose steps are there once.
#[test]
fn mlflow_has_a_resumed_run_once() {
    let small = Small::new("dpo");
    let (server, store) = mlflow(|_, _| Reply::Usual);
    let trackers = [
        set("mlflow.uri", format!("{}/", server.address)),
        set("mlflow.experiment", "\"two words\""),
        PATIENT.to_owned(),
    ];
    let trackers: Vec<&str> = trackers.iter().map(String::as_str).collect();
    small.run("run", RunDirPolicy::Fresh, Some(3), &trackers).1.unwrap();
    // A killed process had sent steps that are run again.
    let known = losses(&small, "run");
    store.lock().unwrap().runs[0].metrics.get_mut("train/loss").unwrap().push((4, -1.0));
    let heard = small.finish("run", RunDirPolicy::Resume, &trackers);
    assert_eq!(heard.warnings, [""; 0]);
    let store = store.lock().unwrap();
    assert_eq!((store.runs.len(), &store.experiments[..]), (1, &["two words".to_owned()][..]));
    let run = &store.runs[0];
    assert_eq!((run.name.as_str(), run.experiment.as_str()), ("run", "two words"));
    assert_eq!(run.statuses, ["KILLED", "RUNNING", "FINISHED"]);
    let expected = [&known[..], &[(4, -1.0)], &losses(&small, "run")[4..]].concat();
    assert_eq!(run.metrics["train/loss"], expected);
    assert_eq!(run.metrics["train/rewards/margins"].len(), 6);
    assert_eq!((&run.params["method"][..], &run.params["train.batch_size"][..]), ("dpo", "8"));
    assert_eq!(run.tags["mlflow.source.name"], "tandem train");
}

/// What a server missed while it was away is sent when the run is resumed.
#[test]
fn mlflow_gets_what_it_missed() {
    let small = Small::new("dpo");
    let away = Arc::new(Mutex::new(true));
    let is_away = away.clone();
    let (server, store) = mlflow(move |request, _| match *is_away.lock().unwrap() {
        true if request.path.ends_with("log-batch") => Reply::Http(503, "away".to_owned()),
        _ => Reply::Usual,
    });
    let trackers = [set("mlflow.uri", &server.address), set("grace_s", 5)];
    let trackers: Vec<&str> = trackers.iter().map(String::as_str).collect();
    let (heard, outcome) = small.run("run", RunDirPolicy::Fresh, Some(3), &trackers);
    outcome.unwrap();
    let [trouble, loss] = &heard.warnings[..] else { panic!("{:?}", heard.warnings) };
    assert!(trouble.contains("503") && trouble.contains("away"), "{trouble}");
    assert!(loss.contains("3 records did not reach it"), "{loss}");
    *away.lock().unwrap() = false;
    small.finish("run", RunDirPolicy::Resume, &[trackers[0], PATIENT]);
    let store = store.lock().unwrap();
    assert_eq!(store.runs.len(), 1);
    assert_eq!(store.runs[0].metrics["train/loss"], losses(&small, "run"));
    assert!(!store.runs[0].params.is_empty());
}

/// The end is sent again, too, and why a server is given up is told beside an earlier trouble.
#[test]
fn mlflow_hears_of_the_end_and_a_refusal_is_told() {
    let small = Small::new("dpo");
    let (server, store) =
        mlflow(|request, number| match request.path.ends_with("runs/update") && number < 3 {
            true => Reply::Http(503, "busy".to_owned()),
            false => Reply::Usual,
        });
    let uri = set("mlflow.uri", &server.address);
    let heard = small.finish("run", RunDirPolicy::Fresh, &[&uri, PATIENT]);
    assert!(heard.warnings.len() == 1 && heard.warnings[0].contains("busy"), "{:?}", heard.warnings);
    assert_eq!(store.lock().unwrap().runs[0].statuses, ["FINISHED"]);

    let (server, _) = mlflow(|_, number| match number {
        0 => Reply::Http(503, "busy".to_owned()),
        _ => Reply::Http(401, "{\"message\": \"who are you\"}".to_owned()),
    });
    let uri = set("mlflow.uri", &server.address);
    let heard = small.finish("refused", RunDirPolicy::Fresh, &[&uri, PATIENT]);
    let told = |words: &str| heard.warnings.iter().any(|warning| warning.contains(words));
    assert!(told("busy") && told("who are you"), "{:?}", heard.warnings);
}

/// A run that fails says so.
#[test]
fn mlflow_and_a_program_hear_of_a_failure() {
    let small = Small::new("dpo");
    let (server, store) = mlflow(|_, _| Reply::Usual);
    let trackers = [
        set("mlflow.uri", &server.address),
        set("command", "[\"cat\"]"),
        "train.learning_rate=1e30".to_owned(),
        "train.max_skipped=0".to_owned(),
        PATIENT.to_owned(),
    ];
    let trackers: Vec<&str> = trackers.iter().map(String::as_str).collect();
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &trackers);
    let error = outcome.unwrap_err().to_string();
    let store = store.lock().unwrap();
    assert_eq!(store.runs[0].statuses, ["FAILED"]);
    assert_eq!(store.runs[0].tags["tandem.error"], error);
    let text = fs::read_to_string(small.path("run/tracker.log")).unwrap();
    let end: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((text_of(&end, "outcome"), text_of(&end, "reason")), ("failed".to_owned(), error));
}
