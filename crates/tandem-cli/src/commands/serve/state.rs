//! State shared by all requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::error::ApiError;
use super::fields::Fields;
use super::kind::{Heading, Kind};
use crate::generation::Loaded;
use crate::generation::engine::Job;

/// The model, the engine's channel and the API key.
pub(crate) struct State {
    model: Arc<Loaded>,
    name: String,
    key: Option<String>,
    jobs: Sender<Job>,
    created: u64,
    completions: AtomicU64,
}

impl State {
    /// Creates the state of a model served as `name`.
    pub(crate) fn new(model: Arc<Loaded>, name: String, key: Option<String>, jobs: Sender<Job>) -> Self {
        Self { model, name, key, jobs, created: now(), completions: AtomicU64::new(0) }
    }

    pub(crate) fn model(&self) -> &Loaded {
        &self.model
    }

    /// Name and start of serving.
    pub(crate) fn name(&self) -> (&str, u64) {
        (&self.name, self.created)
    }

    pub(crate) fn ask(&self, job: Job) -> Result<(), ApiError> {
        self.jobs.send(job).map_err(|_| ApiError::own("the engine has ended"))
    }

    /// Checks the API key, if there is one.
    pub(crate) fn check_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = &self.key else { return Ok(()) };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        // Comparing hashes takes the same time for every key.
        let is_right =
            given.is_some_and(|given| blake3::hash(given.as_bytes()) == blake3::hash(key.as_bytes()));
        if is_right { Ok(()) } else { Err(ApiError::no_key()) }
    }

    /// Parses a completion request: its header and its fields without the model.
    pub(crate) fn open(
        &self,
        kind: Kind,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<(Heading, Fields), ApiError> {
        self.check_key(headers)?;
        let mut fields = Fields::read(body)?;
        Ok((self.heading(kind, &mut fields)?, fields))
    }

    /// Creates the completion header; a wrong model name is refused.
    fn heading(&self, kind: Kind, fields: &mut Fields) -> Result<Heading, ApiError> {
        let asked = fields.take("model");
        let asked = asked.as_ref().and_then(serde_json::Value::as_str).unwrap_or(&self.name);
        if asked != self.name {
            return Err(ApiError::no_model(asked, &self.name));
        }
        let (created, number) = (now(), self.completions.fetch_add(1, Ordering::Relaxed));
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        Ok(Heading {
            kind,
            id: format!("{prefix}-{created:x}-{number:x}"),
            created,
            model: self.name.clone(),
        })
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
