//! `[logging]`: trackers that receive the records of a run.

use std::path::{Path, PathBuf};

use tandem_judge::http;
use toml::Value;

use super::error::Result;
use super::form::{Form, custom, filled, path_value, seconds, texts_value};
use super::keys::{Keys, group, keys};
use super::notes::GRACE;
use super::reader::Entry;

keys! {
    /// Trackers that receive the records of a run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct LoggingConfig(output: &Path) {
        /// Name of the run in trackers.
        run: String = filled("a name").or(name_of(output)).shown("the name of the folder `output`").free(),
        /// TensorBoard event files: `true` writes them to `tensorboard` in `output`, a path to that
        /// folder.
        tensorboard: Option<PathBuf> = tensorboard(output).or(None).shown("false").free(),
        /// Program and arguments that receive each record as [a line of JSON](trackers.md#any-other-tracker).
        /// It runs in the current folder, to which relative paths refer. An empty list starts none.
        command: Vec<String> = command().or(Vec::new()).free(),
        /// Time that trackers have after the end of the run; a program is then killed.
        grace_s: f64 = seconds(0.0..=3e7).or(GRACE).free(),
        /// MLflow server.
        mlflow: Option<MlflowConfig> = group(|now, keys: &mut Keys| {
            keys.optional_table("mlflow", now, |now, keys| MlflowConfig::visit(now, keys, &run))
        }),
    }
}

keys! {
    /// MLflow server, and the place of the run on it.
    #[derive(Clone, Debug, PartialEq)]
    pub struct MlflowConfig(name: &str) {
        /// Address of the server, as `"http://127.0.0.1:5000"`.
        uri: String = address().required("the server's address, as http://127.0.0.1:5000").free(),
        /// Experiment of the run; created if it does not exist.
        experiment: String = filled("a name").or("tandem".to_owned()).free(),
        /// Name of the run at the server.
        run: String = filled("a name").or(name.to_owned()).shown("`logging.run`").free(),
    }
}

fn name_of(output: &Path) -> String {
    output.file_name().map_or("run".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn tensorboard<'a>(output: &'a Path) -> Form<'a, Option<PathBuf>> {
    let read = |entry: Entry| match entry.boolean() {
        Ok(is_on) => Ok(is_on.then(|| output.join("tensorboard"))),
        Err(_) if entry.string().is_ok() => entry.path().map(Some),
        Err(_) => Err(entry.wrong("true, false or a folder")),
    };
    custom("boolean or path", read, |folder: &Option<PathBuf>| {
        folder.as_deref().map_or(Value::from(false), path_value)
    })
}

fn command<'a>() -> Form<'a, Vec<String>> {
    let read = |entry: Entry| {
        let wrong =
            entry.wrong("a list: a program and its arguments, for example [\"python3\", \"track.py\"]");
        let Some(items) = entry.items_of_list() else { return Err(wrong) };
        let texts = items.iter().map(|item| item.string().map(str::to_owned)).collect::<Result<Vec<_>>>();
        match texts {
            Ok(texts) if texts.first().is_none_or(|program| !program.is_empty()) => Ok(texts),
            _ => Err(wrong),
        }
    };
    custom("list", read, |texts: &Vec<String>| texts_value(texts))
}

fn address<'a>() -> Form<'a, String> {
    let read = |entry: Entry| {
        let text = entry.string()?.trim_end_matches('/').to_owned();
        let like = "http://127.0.0.1:5000 or https://mlflow.example.org";
        match http::wrong_with_any(&text, like, "MLFLOW_TRACKING_TOKEN") {
            Some(reason) => Err(entry.conflict(format!("it {reason}"))),
            None => Ok(text),
        }
    };
    custom("string", read, |text: &String| Value::from(text.clone()))
}
