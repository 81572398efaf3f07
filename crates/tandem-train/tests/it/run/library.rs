//! The examples of Tandem as a library, run.

use std::path::{Path, PathBuf};

use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Outcome};
use tempfile::TempDir;

#[path = "../../../examples/own_loop/main.rs"]
mod own_loop;
#[path = "../../../examples/own_loss/main.rs"]
mod own_loss;
#[path = "../../../examples/own_reward/main.rs"]
mod own_reward;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/{name}/run.toml"))
}

/// Overrides for a run in a folder of its own.
fn within(folder: &TempDir) -> [String; 2] {
    let path = folder.path().display();
    [format!("output={path}/run"), format!("data.cache={path}/cache")]
}

#[test]
fn a_loss_of_ones_own_trains_and_resumes() {
    let folder = TempDir::new().unwrap();
    let own = within(&folder);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let short = [&own[..], &["train.steps=4", "train.schedule=constant", "train.batch_size=64"]].concat();
    let long = [&own[..], &["train.steps=8", "train.schedule=constant", "train.batch_size=64"]].concat();
    let outcome = own_loss::train(&file("own_loss"), &short, RunDirPolicy::Fresh).unwrap();
    let done = Outcome::Finished(folder.path().join("run/final"));
    assert_eq!(outcome, done);
    assert_eq!(own_loss::train(&file("own_loss"), &long, RunDirPolicy::Resume).unwrap(), done);
    let metrics = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let losses: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap())
        .collect();
    assert_eq!((losses.len(), losses[0]), (8, 1.0), "{losses:?}");
    assert!(losses[7] < losses[0], "{losses:?}");
    let text = std::fs::read_to_string(folder.path().join("run/config.toml")).unwrap();
    assert!(text.contains("loss = \"squared_hinge\""), "{text}");
}

#[test]
fn a_reward_of_ones_own_judges_answers() {
    let folder = TempDir::new().unwrap();
    let own = within(&folder);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    own_reward::train(&file("own_reward"), &own, &mut Silent).unwrap();
    let samples = std::fs::read_to_string(folder.path().join("run/samples.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(samples.lines().next().unwrap()).unwrap();
    let score = &first["answers"][0]["judges"]["own"]["score"];
    assert!(score.as_f64().is_some_and(|score| (0.0..=1.0).contains(&score)) || score.is_null(), "{first}");
}

#[test]
fn a_loop_of_ones_own_ends_when_it_wants_to() {
    let folder = TempDir::new().unwrap();
    let own = within(&folder);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let (losses, outcome) = own_loop::train(&file("own_loop"), &own).unwrap();
    assert!(losses.len() > 2 && losses.len() < 11, "{losses:?}");
    assert!(losses.last().unwrap() < &(2.0 / 3.0 * losses[0]), "{losses:?}");
    assert_eq!(outcome, Outcome::Finished(folder.path().join("run/final")));
}

#[test]
fn a_function_that_is_not_registered_is_refused() {
    let error = Config::load(&file("own_reward"), &["judges=[{kind=\"own\", function=\"nobody\"}]"]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("function") && error.contains("\"nobody\""), "{error}");
}
