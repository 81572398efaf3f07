//! `trackers.json` of a run's folder: names by which a resumed run finds itself again.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::STATE;
use crate::disk::replace;

/// The file's content.
pub(super) struct StateFile {
    path: PathBuf,
    id: String,
    /// Entry of MLflow: see there.
    mlflow: Value,
}

impl StateFile {
    /// Reads the file of a run that resumes, and begins one for another run.
    pub(super) fn open(output: &Path, resumes: bool) -> Self {
        let path = output.join(STATE);
        let text = if resumes { std::fs::read_to_string(&path).unwrap_or_default() } else { String::new() };
        let mut found: Value = serde_json::from_str(&text).unwrap_or_default();
        let id = found["id"].as_str().map_or_else(new_id, str::to_owned);
        let mlflow = found.get_mut("mlflow").map_or(Value::Null, Value::take);
        let state = Self { path, id, mlflow };
        state.write();
        state
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn mlflow(&self) -> &Value {
        &self.mlflow
    }

    pub(super) fn set_mlflow(&mut self, entry: Value) {
        self.mlflow = entry;
        self.write();
    }

    fn write(&self) {
        let text = format!("{:#}\n", json!({ "id": self.id, "mlflow": self.mlflow }));
        // Without the file a resumed run is a new run for its trackers. A disk that is full will be
        // reported by the run itself.
        let _ = replace(&self.path, text.as_bytes());
    }
}

/// Returns a name for a run: hexadecimal, different for every start.
///
/// Two starts may fall in one millisecond of one process: the keys of a [`RandomState`] come from
/// the system and differ from call to call.
fn new_id() -> String {
    format!("{:016x}", RandomState::new().hash_one((std::process::id(), SystemTime::now())))
}
