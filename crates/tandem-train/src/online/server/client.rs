//! HTTP client common to all generation servers: completion requests and adapter loading.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};
use tandem_judge::http::{Backoff, Http, Key, Reply, receive, sleep};

use super::protocol::{self, Protocol, ServerMessages};
use crate::config::ServerConfig;
use crate::{Result, TrainError};

/// A longer reply is not read: 64 answers of many thousand tokens.
const LONGEST_REPLY: u64 = 1 << 28;

/// Path that unloads an adapter.
const UNLOAD: &str = "unload_lora_adapter";

/// Pauses before a request is sent again.
const PAUSES: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(60) };

/// Time that an unloading at a stop may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// Reason of a request that was given up, which nobody reads: a stop is no error.
const STOPPED: &str = "stopped";

/// Sends requests to a server, again and again if need be. Each waits on a thread of its own, so that a stop is heard
/// whatever the server does.
pub(crate) struct Client {
    http: Arc<Http>,
    server: ServerConfig,
    protocol: &'static dyn Protocol,
}

impl Client {
    /// Reads the key.
    pub(crate) fn new(server: &ServerConfig) -> Result<Self> {
        let error = |reason| TrainError::Server {
            address: server.base_url.clone(),
            reason: format!("online.server.api_key_env {reason}"),
        };
        let key = server.api_key_env.as_deref().map(Key::read).transpose().map_err(error)?;
        let time = Duration::from_secs_f64(server.timeout_s);
        let http = Http::new(&server.base_url, key, time, server.concurrency, LONGEST_REPLY);
        Ok(Self { http: Arc::new(http), server: server.clone(), protocol: protocol::for_kind(server.kind) })
    }

    pub(crate) fn concurrency(&self) -> usize {
        self.server.concurrency
    }

    /// The error that ends the run.
    pub(crate) fn error(&self, reason: String) -> TrainError {
        TrainError::Server { address: self.server.base_url.clone(), reason }
    }

    /// Has the adapter in a folder loaded under a name, and makes sure that the server has it.
    pub(crate) fn load(&self, name: &str, folder: &Path, stop: &AtomicBool) -> Result<()> {
        let ServerConfig { model, .. } = &self.server;
        let models = self.models(stop)?;
        if !models.iter().any(|id| id == model) {
            return Err(self.error(format!(
                "it serves {}, not {model:?}; set online.server.model to the name of the base",
                listed(&models)
            )));
        }
        if models.iter().any(|id| id == name) {
            // A run that was killed left it, and its folder may be gone.
            self.unload(name, stop)?;
        }
        self.refuse_unproven(name, stop)?;
        let body = json!({ "lora_name": name, "lora_path": folder }).to_string();
        let ServerMessages { needs, switches, already, .. } = self.protocol.words();
        let refused = |why: String| {
            self.error(format!("it does not load the adapter {}: {why}. {needs}", folder.display()))
        };
        let reply = self.send("load_lora_adapter", Some(&body), stop).map_err(refused)?;
        if is_good(&reply) {
            let wrong = |why| refused(format!("{why} ({})", self.said(&reply)));
            self.protocol.loaded(name, &reply).map_err(wrong)?;
        } else if !reply.text.contains(already) {
            // A load whose reply was lost is repeated. The adapter's name is a hash of its content.
            let has_no_such_path = matches!(reply.status, 404 | 405) && !reply.text.contains("adapter");
            return Err(match has_no_such_path {
                true => {
                    self.error(format!("it has no /load_lora_adapter ({}): {switches}", self.said(&reply)))
                }
                false => refused(self.said(&reply)),
            });
        }
        let models = self.models(stop)?;
        if models.iter().any(|id| id == name) {
            return Ok(());
        }
        Err(self.error(format!(
            "it accepted the adapter {name:?} but serves {}: its completions would come from other weights; is it behind a \
             proxy, or are there several servers?",
            listed(&models)
        )))
    }

    /// Refuses a server that does not say which adapter answers, and answers for one that does not
    /// exist.
    fn refuse_unproven(&self, name: &str, stop: &AtomicBool) -> Result<()> {
        let Some((name, body)) = self.protocol.impossible(name) else { return Ok(()) };
        let ServerMessages { answers, switches, .. } = self.protocol.words();
        let reply = self.send(answers, Some(&body.to_string()), stop).map_err(|reason| self.error(reason))?;
        if is_good(&reply) {
            return Err(self.error(format!(
                "it completes prompts with the adapter {name:?}, which does not exist: weights of another round would go \
                 unnoticed; start it with --enable-lora"
            )));
        }
        // Any other error would prove nothing.
        if (400..500).contains(&reply.status) && reply.text.contains(&name) {
            return Ok(());
        }
        let said = self.said(&reply);
        Err(self.error(match reply.status {
            404 | 405 => format!("it has no /{answers} ({said}): {switches}"),
            _ => {
                format!("it does not refuse the adapter {name:?} by name, although none such exists: {said}")
            }
        }))
    }

    /// Has the adapter of that name unloaded.
    pub(crate) fn unload(&self, name: &str, stop: &AtomicBool) -> Result<()> {
        let body = json!({ "lora_name": name }).to_string();
        let reply = self.send(UNLOAD, Some(&body), stop).map_err(|reason| self.error(reason))?;
        // A missing adapter was unloaded by a request whose reply was lost.
        if is_good(&reply) || self.protocol.is_gone(name, &reply) {
            return Ok(());
        }
        Err(self.error(format!("it does not unload the adapter {name:?}: {}", self.said(&reply))))
    }

    /// Has the adapter unloaded if the server is quick about it; else the next run does.
    pub(crate) fn leave(&self, name: &str) {
        let body = json!({ "lora_name": name }).to_string();
        // Without an answer nothing is to be done.
        let _ = self.begin(UNLOAD, Some(&body)).recv_timeout(FAREWELL);
    }

    /// Parsed completion reply, or its defect.
    pub(crate) fn complete(&self, body: &str, stop: &AtomicBool) -> Result<Value, String> {
        let reply = self.send(self.protocol.words().answers, Some(body), stop)?;
        if !is_good(&reply) {
            return Err(format!("it refuses a completion request: {}", self.said(&reply)));
        }
        serde_json::from_str(&reply.text).map_err(|_| self.not_json(&reply))
    }

    fn models(&self, stop: &AtomicBool) -> Result<Vec<String>> {
        let models = || {
            let reply = self.send(self.protocol.words().models, None, stop)?;
            if !is_good(&reply) {
                let (said, switches) = (self.said(&reply), self.protocol.words().switches);
                return Err(match reply.status {
                    404 | 405 => format!("it does not list its models ({said}): {switches}"),
                    _ => format!("it does not list its models: {said}"),
                });
            }
            let list: Value = serde_json::from_str(&reply.text).map_err(|_| self.not_json(&reply))?;
            let list = list["data"].as_array().ok_or_else(|| self.not_json(&reply))?;
            Ok(list.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
        };
        models().map_err(|reason| self.error(reason))
    }

    /// Any reply but one that may be better another time, or why there is none after all tries. A stop ends it.
    fn send(&self, path: &str, body: Option<&str>, stop: &AtomicBool) -> Result<Reply, String> {
        let ServerConfig { timeout_s, retries, .. } = &self.server;
        let mut failures = 0;
        loop {
            let found = receive(&self.begin(path, body), stop).map_err(|_| STOPPED)?;
            let (reason, after) = match found.expect("the thread sends what it finds") {
                Ok(reply) if !reply.may_pass() => return Ok(reply),
                Ok(reply) => (self.said(&reply), reply.after.unwrap_or_default()),
                Err(reason) => (reason, Duration::ZERO),
            };
            failures += 1;
            if failures > *retries {
                let tries = if failures == 1 { "try" } else { "tries" };
                return Err(format!(
                    "no answer to /{path} after {failures} {tries} of at most {timeout_s} s (online.server.retries, \
                     online.server.timeout_s): {reason}"
                ));
            }
            // A server that asks for more time than a reply may take gets that.
            let after = after.min(Duration::from_secs_f64(*timeout_s));
            sleep(PAUSES.jittered(failures).max(after), stop).map_err(|_| STOPPED)?;
        }
    }

    /// Sends a request on a thread of its own.
    fn begin(&self, path: &str, body: Option<&str>) -> Receiver<Result<Reply, String>> {
        let (http, url) = (Arc::clone(&self.http), format!("{}/{path}", self.server.base_url));
        let (body, (send, receiver)) = (body.map(str::to_owned), channel());
        std::thread::spawn(move || {
            let found = body.map_or_else(|| http.get(&url), |body| http.post(&url, &body));
            // After a stop nobody receives.
            let _ = send.send(found);
        });
        receiver
    }

    fn said(&self, reply: &Reply) -> String {
        format!("HTTP {}: {}", reply.status, self.http.message(reply))
    }

    fn not_json(&self, reply: &Reply) -> String {
        format!(
            "its reply (HTTP {}) is not a reply of {}: {}; are online.server.base_url and online.server.kind right?",
            reply.status,
            self.protocol.words().name,
            self.http.beginning(&reply.text)
        )
    }
}

fn is_good(reply: &Reply) -> bool {
    (200..300).contains(&reply.status)
}

fn listed(models: &[String]) -> String {
    match models {
        [] => "nothing".to_owned(),
        _ => models.iter().map(|id| format!("{id:?}")).collect::<Vec<_>>().join(", "),
    }
}
