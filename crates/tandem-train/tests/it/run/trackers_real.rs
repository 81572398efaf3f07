//! Trackers of PyPI read what a run wrote: TensorBoard, an MLflow server, wandb and trackio offline.
//! `TANDEM_TEST_TRACKERS` names a Python that has them.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

/// Longer than anything here takes: a test that hangs fails instead.
const PATIENCE: Duration = Duration::from_secs(300);
const PATIENT: &str = "logging.grace_s=300";

fn python() -> Option<PathBuf> {
    let python = std::env::var_os("TANDEM_TEST_TRACKERS").map(PathBuf::from);
    if python.is_none() {
        eprintln!(
            "skipped: TANDEM_TEST_TRACKERS names no Python with tensorboard, mlflow, wandb and trackio"
        );
    }
    python
}

/// Runs a script, which prints JSON.
fn asked(python: &Path, script: &str, arguments: &[&str], variables: &[(&str, &Path)]) -> Value {
    let mut command = Command::new(python);
    command.arg("-c").arg(script).args(arguments).envs(variables.iter().copied());
    let output = command.stdin(Stdio::null()).output().expect("Python runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last)
        .unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// Values of a metric by step, as `[[step, value], …]`, from `metrics.jsonl`.
fn curve(small: &Small, name: &str, split: &str, metric: &str) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(small.path(name).join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_split = records.filter(|record| record["split"] == split);
    of_split.map(|record| (record["step"].as_u64().unwrap(), record[metric].as_f64().unwrap())).collect()
}

fn pairs(value: &Value) -> Vec<(u64, f64)> {
    let pair = |item: &Value| (item[0].as_f64().unwrap() as u64, item[1].as_f64().unwrap());
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(pair).collect()
}

/// Stops after step 5, loses what is newer than step 2, as a killed run would, and resumes.
fn interrupted(small: &Small, overrides: &[&str]) {
    let eval = format!(
        "data.eval={}",
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/pref_conv.jsonl").display()
    );
    let overrides = [overrides, &[&eval, "train.eval_every=2", "train.keep=0", PATIENT]].concat();
    small.run("run", RunDirPolicy::Fresh, Some(5), &overrides).1.unwrap();
    fs::remove_dir_all(small.path("run/checkpoints/step-000005")).unwrap();
    fs::remove_dir_all(small.path("run/checkpoints/step-000004")).unwrap();
    let heard = small.finish("run", RunDirPolicy::Resume, &overrides);
    assert!(heard.warnings.iter().all(|warning| !warning.starts_with("logging.")), "{:?}", heard.warnings);
}

const READ_EVENTS: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
text = events.Tensors("config/text_summary")[0] if "config/text_summary" in events.Tags()["tensors"] else events.Tensors("config")[0]
print(json.dumps({"scalars": scalars, "config": text.tensor_proto.string_val[0].decode(), "time": events.Scalars("train/loss")[0].wall_time}))
"#;

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn tensorboard_reads_each_step_once() {
    let Some(python) = python() else { return };
    let small = Small::new("dpo");
    interrupted(&small, &["logging.tensorboard=true"]);
    let folder = small.path("run/tensorboard");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    let read = asked(&python, READ_EVENTS, &[folder.to_str().unwrap()], &[]);
    for (split, metric) in [("train", "loss"), ("train", "rewards/margins"), ("eval", "loss")] {
        let expected = curve(&small, "run", split, metric);
        let found = pairs(&read["scalars"][format!("{split}/{metric}")]);
        // TensorBoard's scalars are f32.
        let rounded: Vec<_> =
            expected.iter().map(|(step, value)| (*step, f64::from(*value as f32))).collect();
        assert_eq!(found, rounded, "{split}/{metric}");
    }
    assert!(read["config"].as_str().unwrap().contains("| train.batch_size | `8` |"), "{read}");
    assert!(read["time"].as_f64().unwrap() > 1.6e9);
}

/// A tiny file system that is full after the first records: readers find what was there before.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_full_disk_costs_events_and_nothing_else() {
    let Some(python) = python() else { return };
    let small = Small::new("dpo");
    let folder = small.path("tiny");
    fs::create_dir(&folder).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8k", "tmpfs"])
        .arg(&folder)
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("skipped: a file system can be mounted by root only");
        return;
    }
    let overrides = [format!("logging.tensorboard={}", folder.display()), "train.steps=40".to_owned()];
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
    let plain = small.finish("plain", RunDirPolicy::Fresh, &overrides[1..]);
    let heard = small.finish("full", RunDirPolicy::Fresh, &overrides);
    let read = asked(&python, READ_EVENTS, &[folder.to_str().unwrap()], &[]);
    let unmounted = Command::new("umount").arg(&folder).status().unwrap();
    assert!(unmounted.success());
    assert_eq!(heard.steps, plain.steps);
    assert!(small.weights("full") == small.weights("plain"));
    let of_tracker: Vec<_> =
        heard.warnings.iter().filter(|warning| warning.starts_with("logging.")).collect();
    assert!(of_tracker.len() == 1 && of_tracker[0].contains("No space left"), "{of_tracker:?}");
    let found = pairs(&read["scalars"]["train/loss"]);
    assert!(!found.is_empty() && found.len() < 40, "{}", found.len());
}

/// A server's process group, killed at the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

fn mlflow(python: &Path, folder: &Path) -> (Server, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    fs::create_dir(folder).unwrap();
    let log = fs::File::create(folder.join("log")).unwrap();
    let server = Command::new(python)
        .args([
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--workers",
            "1",
        ])
        .args(["--backend-store-uri", "sqlite:///mlflow.db", "--default-artifact-root", "artifacts"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .process_group(0)
        .spawn()
        .unwrap();
    let (server, began) = (Server(server), Instant::now());
    let http = tandem_judge::http::Http::new("http://127.0.0.1", None, Duration::from_secs(10), 1, 1 << 20);
    let uri = format!("http://127.0.0.1:{port}");
    while !http.get(&format!("{uri}/health")).is_ok_and(|reply| reply.status == 200) {
        let text = || fs::read_to_string(folder.join("log")).unwrap();
        assert!(began.elapsed() < PATIENCE, "the server does not answer:\n{}", text());
        std::thread::sleep(Duration::from_millis(200));
    }
    (server, uri)
}

const READ_MLFLOW: &str = r#"
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name(sys.argv[2])
runs = client.search_runs([experiment.experiment_id])
history = lambda tag: [[m.step, m.value] for m in client.get_metric_history(runs[0].info.run_id, tag)]
print(json.dumps({"runs": len(runs), "name": runs[0].info.run_name, "status": runs[0].info.status, "params": runs[0].data.params,
                  "tags": runs[0].data.tags, "train": history("train/loss"), "eval": history("eval/loss")}))
"#;

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn mlflows_server_has_a_resumed_run_once() {
    let Some(python) = python() else { return };
    let small = Small::new("dpo");
    let (_server, uri) = mlflow(&python, &small.path("server"));
    let uri_key = format!("logging.mlflow.uri={uri}");
    interrupted(&small, &[&uri_key, "logging.mlflow.experiment=\"a & b = ü\"", "logging.run=first"]);
    let read = asked(&python, READ_MLFLOW, &[&uri, "a & b = ü"], &[]);
    assert_eq!(
        (&read["runs"], &read["name"], &read["status"]),
        (&1.into(), &"first".into(), &"FINISHED".into())
    );
    for split in ["train", "eval"] {
        assert_eq!(pairs(&read[split]), curve(&small, "run", split, "loss"), "{split}");
    }
    assert_eq!((&read["params"]["method"], &read["params"]["train.steps"]), (&"dpo".into(), &"6".into()));
    assert_eq!(read["tags"]["mlflow.source.name"], "tandem train");
}

/// A script of `tools/trackers` as `logging.command`.
fn script(python: &Path, name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/trackers").join(name);
    let path = path.canonicalize().unwrap();
    format!("logging.command=[{:?}, {:?}]", python.display().to_string(), path.display().to_string())
}

/// W&B's files are LevelDB's logs behind a header of 7 bytes.
const READ_WANDB: &str = r#"
import json, pathlib, sys
from wandb.proto import wandb_internal_pb2

def records(data):
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""

path, = pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
losses, config = [], {}
for record in records(path.read_bytes()):
    if record.HasField("run"):
        run = record.run
        config = config or {item.key: json.loads(item.value_json) for item in run.config.update}
    if record.HasField("history"):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        losses.append([items["_step"], items["train/loss"]])
print(json.dumps({"losses": losses, "id": run.run_id, "name": run.display_name, "config": config}))
"#;

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn wandb_gets_a_run_offline() {
    let Some(python) = python() else { return };
    let small = Small::new("dpo");
    let command = script(&python, "wandb.py");
    with_variables(&small, &[("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")], &command);
    let read = asked(&python, READ_WANDB, &[small.path("run").to_str().unwrap()], &[]);
    assert_eq!(pairs(&read["losses"]), curve(&small, "run", "train", "loss"), "{read}");
    let state = fs::read_to_string(small.path("run/trackers.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!((&read["id"], &read["name"]), (&state["id"], &"run".into()));
    assert_eq!(read["config"]["train"]["batch_size"], 8, "{read}");
}

const READ_TRACKIO: &str = r#"
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage
run, = trackio.Api().runs("tandem")
rows = SQLiteStorage.get_logs("tandem", run.name)
history = [[row["step"], row["train/loss"]] for row in rows if "train/loss" in row]
print(json.dumps({"name": run.name, "config": run.config, "train": history}))
"#;

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn trackio_gets_a_run() {
    let Some(python) = python() else { return };
    let small = Small::new("dpo");
    let folder = small.path("trackio");
    let command = script(&python, "trackio.py");
    with_variables(&small, &[("TRACKIO_DIR", folder.to_str().unwrap())], &command);
    let read = asked(&python, READ_TRACKIO, &[], &[("TRACKIO_DIR", &folder)]);
    assert_eq!(pairs(&read["train"]), curve(&small, "run", "train", "loss"), "{read}");
    assert!(read["name"].as_str().unwrap().starts_with("run-"), "{read}");
    assert_eq!(read["config"]["train"]["batch_size"], 8, "{read}");
}

/// Runs with a program that has further variables.
fn with_variables(small: &Small, variables: &[(&str, &str)], command: &str) {
    let variables: String = variables.iter().map(|(name, value)| format!("\"{name}={value}\", ")).collect();
    let command = command.replacen('[', &format!("[\"env\", {variables}"), 1);
    let heard = small.finish("run", RunDirPolicy::Fresh, &[&command, PATIENT]);
    let text = fs::read_to_string(small.path("run/tracker.log")).unwrap_or_default();
    assert_eq!(heard.warnings, [""; 0], "{text}");
}
