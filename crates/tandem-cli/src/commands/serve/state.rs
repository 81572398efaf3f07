//! State shared by all requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use tokio::sync::{Semaphore, watch};

use super::body::Bodies;
use super::error::ApiError;
use super::fields::Fields;
use super::kind::{Heading, Kind};
use super::limits::LimitArguments;
use super::metrics::Metrics;
use crate::generation::Loaded;
use crate::generation::engine::Job;

/// Requests that are parsed, rendered and tokenised at the same time, each on a thread of its own.
pub(super) const PREPARED_AT_ONCE: usize = 2;

/// The model, the engine's channel, the API key, limits and counters.
pub(crate) struct State {
    model: Arc<Loaded>,
    name: String,
    key: Option<blake3::Hash>,
    jobs: Sender<Job>,
    created: u64,
    completions: AtomicU64,
    limits: LimitArguments,
    metrics: Arc<Metrics>,
    bodies: Bodies,
    /// Number of requests that wait for their first token.
    queue: AtomicUsize,
    preparing: Arc<Semaphore>,
    /// True once the server is stopping.
    draining: watch::Sender<bool>,
}

impl State {
    /// Creates the state of a model served as `name`.
    pub(crate) fn new(
        model: Arc<Loaded>,
        name: String,
        key: Option<&str>,
        jobs: Sender<Job>,
        limits: LimitArguments,
    ) -> Self {
        Self {
            model,
            name,
            key: key.map(|key| blake3::hash(key.as_bytes())),
            jobs,
            created: now(),
            completions: AtomicU64::new(0),
            bodies: Bodies::new(limits.max_body, limits.body_timeout),
            limits,
            metrics: Arc::default(),
            queue: AtomicUsize::new(0),
            preparing: Arc::new(Semaphore::new(PREPARED_AT_ONCE)),
            draining: watch::Sender::new(false),
        }
    }

    pub(crate) fn model(&self) -> &Loaded {
        &self.model
    }

    /// Name and start of serving.
    pub(crate) fn name(&self) -> (&str, u64) {
        (&self.name, self.created)
    }

    pub(crate) fn limits(&self) -> &LimitArguments {
        &self.limits
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(crate) fn bodies(&self) -> &Bodies {
        &self.bodies
    }

    pub(crate) fn queue(&self) -> &AtomicUsize {
        &self.queue
    }

    pub(crate) fn draining(&self) -> &watch::Sender<bool> {
        &self.draining
    }

    pub(crate) fn ask(&self, job: Job) -> Result<(), ApiError> {
        self.jobs.send(job).map_err(|_| ApiError::own("the engine has ended"))
    }

    /// Runs `work` on a thread that may be busy for long. Further work waits in the order of requests.
    pub(crate) async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = Arc::clone(&self.preparing).acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        let done = tokio::task::spawn_blocking(move || {
            // Held until the work ends, also if its client leaves.
            let _permit = permit;
            work()
        });
        done.await.unwrap_or_else(|_| Err(ApiError::own("preparing the request has panicked")))
    }

    /// Checks the API key, if there is one.
    pub(crate) fn check_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = &self.key else { return Ok(()) };
        let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.to_str().ok()?));
        // Hashes are compared in the same time for every key.
        if given.is_some_and(|given| blake3::hash(given.as_bytes()) == *key) {
            Ok(())
        } else {
            Err(ApiError::no_key())
        }
    }

    /// Creates the completion header; a wrong model name is refused.
    pub(crate) fn heading(&self, kind: Kind, fields: &mut Fields) -> Result<Heading, ApiError> {
        if let Some(asked) = fields.text("model")?.filter(|asked| *asked != self.name) {
            return Err(ApiError::no_model(&asked, &self.name));
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

/// Returns the token of an `Authorization` header with the scheme `Bearer`, in any case.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim_start())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::bearer;

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        for header in ["Bearer a key", "bearer a key", "BEARER  a key", " bEaReR a key "] {
            assert_eq!(bearer(header), Some("a key"), "{header}");
        }
        for header in ["", "Bearer", "a key", "Basic a key", "Bearera key"] {
            assert_eq!(bearer(header), None, "{header}");
        }
    }
}
