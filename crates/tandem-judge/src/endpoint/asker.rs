//! Requests with cache, retries and budget.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::cache::{Cache, Reply};
use super::choice::Choice;
use super::client::{Client, Outcome};
use super::config::EndpointConfig;
use crate::backoff::{Backoff, sleep};
use crate::judge::beginning;
use crate::{Counts, JudgeError, Result};

/// Maximum characters kept of a reply.
const KEPT: usize = 2000;

/// State shared by all requests.
#[derive(Debug)]
pub(super) struct EndpointClient {
    judge: String,
    client: Client,
    cache: Option<Mutex<Cache>>,
    retries: usize,
    backoff: Backoff,
    budget: Option<u64>,
    num_sent: AtomicU64,
    num_retries: AtomicU64,
    num_hits: AtomicU64,
}

impl EndpointClient {
    /// Creates the state from checked options.
    pub(super) fn new(judge: String, config: &EndpointConfig) -> Result<Self> {
        let client = Client::new(&judge, config)?;
        let open = |folder| {
            Cache::open(folder).map(Mutex::new).map_err(|(path, source)| {
                let judge = judge.clone();
                JudgeError::Cache { judge, what: "opening", path, source }
            })
        };
        let cache = config.cache.as_deref().map(open).transpose()?;
        Ok(Self {
            judge,
            client,
            cache,
            retries: config.retries,
            backoff: config.backoff(),
            budget: config.budget,
            num_sent: AtomicU64::new(0),
            num_retries: AtomicU64::new(0),
            num_hits: AtomicU64::new(0),
        })
    }

    pub(super) fn judge(&self) -> &str {
        &self.judge
    }

    pub(super) fn address(&self) -> &str {
        self.client.address()
    }

    /// Returns the work so far.
    pub(super) fn counts(&self) -> Counts {
        Counts {
            retries: self.num_retries.load(Ordering::Relaxed),
            cache_hits: self.num_hits.load(Ordering::Relaxed),
            spent: self.num_sent.load(Ordering::Relaxed),
            ..Counts::default()
        }
    }

    /// Returns the reply to a request, or why all tries failed.
    ///
    /// # Errors
    /// If further requests make no sense, or `stop` is set.
    pub(super) fn ask(&self, body: &str, stop: &AtomicBool) -> Result<Result<Reply, String>> {
        // The body contains everything that the model sees. No address contains a NUL.
        let key = blake3::hash(format!("{}\0{body}", self.address()).as_bytes());
        if let Some(reply) = self.known(&key) {
            self.num_hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Ok(reply));
        }
        let mut failures = 0;
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(JudgeError::Stopped);
            }
            let (reason, after) = match self.send(body)? {
                Ok(reply) => {
                    self.keep(key, &reply)?;
                    return Ok(Ok(reply));
                }
                Err(failure) => failure,
            };
            failures += 1;
            if failures > self.retries {
                return Ok(Err(reason));
            }
            let after = after.unwrap_or_default();
            if after > self.backoff.longest {
                return Ok(Err(format!(
                    "{reason} (the server asks for a pause of {after:?}, longer than `longest_pause_s`)"
                )));
            }
            sleep(self.backoff.jittered(failures).max(after), stop)?;
            self.num_retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sends one request; a failure has its reason and the requested pause.
    fn send(&self, body: &str) -> Result<Result<Reply, (String, Option<Duration>)>> {
        let budget = self.budget.unwrap_or(u64::MAX);
        let spend = |sent| (sent < budget).then_some(sent + 1);
        if self.num_sent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_err() {
            return Err(JudgeError::Budget { judge: self.judge.clone(), budget });
        }
        match self.client.send(body) {
            Outcome::Reply(said) => Ok(match Choice::from_reply(&said) {
                Some(choice) => Ok(Reply { choice, said: beginning(&said, KEPT) }),
                None => Err((format!("the reply names neither A, B nor tie alone: {said:?}"), None)),
            }),
            Outcome::Failed { reason, after } => Ok(Err((reason, after))),
            Outcome::Refused { status, message } => Err(JudgeError::Refused {
                judge: self.judge.clone(),
                address: self.address().to_owned(),
                status,
                message,
            }),
        }
    }

    fn known(&self, key: &blake3::Hash) -> Option<Reply> {
        let cache = self.cache.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get(key).cloned()
    }

    fn keep(&self, key: blake3::Hash, reply: &Reply) -> Result<()> {
        let Some(cache) = &self.cache else { return Ok(()) };
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.put(key, reply.clone()).map_err(|source| JudgeError::Cache {
            judge: self.judge.clone(),
            what: "writing",
            path: cache.path().to_path_buf(),
            source,
        })
    }
}
