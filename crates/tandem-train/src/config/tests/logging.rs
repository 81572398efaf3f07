//! Trackers.

use super::{EXAMPLE, load_with, refusal, set};
use crate::config::Config;

#[test]
fn a_run_has_no_trackers_unless_told() {
    let logging = set(&[]).logging;
    assert_eq!((logging.tensorboard, logging.command, logging.mlflow), (None, Vec::new(), None));
}

#[test]
fn trackers_read_back_from_the_resolved_config() {
    let (folder, config) = load_with(
        &format!(
            "{EXAMPLE}[logging]\ntensorboard = 'events'\ncommand = ['python3', 'track.py']\n\
             [logging.mlflow]\nuri = 'http://127.0.0.1:5000/'\n"
        ),
        &[],
    );
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    let logging = &config.logging;
    assert_eq!(logging.tensorboard, Some(folder.path().join("events")));
    assert_eq!(logging.command, ["python3", "track.py"]);
    let mlflow = logging.mlflow.as_ref().unwrap();
    let told = (mlflow.uri.as_str(), mlflow.experiment.as_str(), mlflow.run.as_str());
    assert_eq!(told, ("http://127.0.0.1:5000", "tandem", "first"));
    let path = folder.path().join("again.toml");
    std::fs::write(&path, config.to_toml()).unwrap();
    assert_eq!(Config::load::<&str>(&path, &[]).unwrap(), config);
}

#[test]
fn names_and_folders_follow_from_the_run_folder() {
    let logging = set(&["output=runs/second", "logging.tensorboard=true"]).logging;
    assert_eq!(logging.run, "second");
    assert!(logging.tensorboard.unwrap().ends_with("runs/second/tensorboard"));
    let logging = set(&["logging.run=mine", "logging.mlflow.uri=https://m.example"]).logging;
    assert_eq!(logging.mlflow.unwrap().run, "mine");
}

#[test]
fn trackers_may_change_on_resume() {
    let changes =
        set(&["logging.tensorboard=true", "logging.mlflow.uri=http://a", "logging.command=[\"sh\"]"])
            .changes_since(&set(&[]));
    let logging: Vec<_> = changes.iter().filter(|change| change.key.starts_with("logging.")).collect();
    assert!(logging.len() == 5 && logging.iter().all(|change| !change.alters_run), "{logging:?}");
}

#[test]
fn mistakes_are_told() {
    for (set, told) in [
        ("logging.tensorboard=3", "true, false or a folder"),
        ("logging.command=python3", "a list: a program and its arguments"),
        ("logging.command=[\"\"]", "a list: a program and its arguments"),
        ("logging.mlflow.uri=127.0.0.1:5000", "it should be like http://127.0.0.1:5000"),
        ("logging.mlflow.uri=http://me:secret@host", "MLFLOW_TRACKING_TOKEN"),
        ("logging.mlflow.experiment=x", "logging.mlflow.uri"),
        ("logging.wandb=true", "logging.wandb"),
    ] {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(told), "{set}: {text}");
    }
}
