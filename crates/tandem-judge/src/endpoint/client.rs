//! One request over HTTP, and what came of it.

use std::time::Duration;

use serde_json::Value;
use ureq::http::Uri;
use ureq::{Agent, Body, http::Response};

use super::EndpointConfig;
use crate::judge::beginning;
use crate::{JudgeError, Result};

/// A longer reply is not read.
const LONGEST_REPLY: u64 = 4 << 20;

/// How much of a server's message is shown.
const SHOWN: usize = 500;

/// Sends requests to one address.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    address: String,
    key: Option<Key>,
}

/// What is never shown.
struct Key(String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

/// What came of a request.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// The model's words.
    Reply(String),
    /// It may be better another time.
    Failed {
        /// Why.
        reason: String,
        /// When the server wants to be asked again.
        after: Option<Duration>,
    },
    /// It will never be better.
    Refused {
        /// The status.
        status: u16,
        /// The server's words.
        message: String,
    },
}

impl Client {
    /// Reads the key. Certificates are compared with Mozilla's roots. The proxy is the environment's, but for this machine.
    pub fn new(judge: &str, config: &EndpointConfig) -> Result<Self> {
        let key = config.api_key_env.as_deref().map(|name| Key::read(judge, name)).transpose()?;
        let address = config.address();
        let mut agent = Agent::config_builder()
            .timeout_global(Some(Duration::from_secs_f64(config.timeout_s)))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections_per_host(config.concurrency)
            .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")));
        let host = address.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        if matches!(host.as_deref(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            agent = agent.proxy(None);
        }
        Ok(Self { agent: agent.build().new_agent(), address, key })
    }

    /// Where requests go.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request and waits for what comes of it.
    pub fn send(&self, body: &str) -> Outcome {
        let mut request = self.agent.post(&self.address).header("Content-Type", "application/json");
        if let Some(Key(key)) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        match request.send(body).map_err(|error| error.to_string()).and_then(read) {
            Ok((status, after, text)) => self.outcome(status, after, &text),
            Err(reason) => Outcome::Failed { reason: self.hidden(&reason), after: None },
        }
    }

    fn outcome(&self, status: u16, after: Option<Duration>, text: &str) -> Outcome {
        if status == 200 {
            return match content(text) {
                Ok(content) => Outcome::Reply(self.hidden(&content)),
                Err(what) => {
                    let reason = format!("{what}: {}", beginning(&self.hidden(text), SHOWN));
                    Outcome::Failed { reason, after: None }
                }
            };
        }
        // Hidden before it is cut: a part of the key is too much.
        let message = beginning(&self.hidden(&message(text)), SHOWN);
        // Too many requests, a time that was over, a server in trouble; everything else will be the same another time.
        match matches!(status, 408 | 425 | 429 | 500..) {
            true => Outcome::Failed { reason: format!("HTTP {status}: {message}"), after },
            false => Outcome::Refused { status, message },
        }
    }

    /// A text without the key, which a server may have sent back.
    fn hidden(&self, text: &str) -> String {
        match &self.key {
            Some(Key(key)) => text.replace(key.as_str(), "…"),
            None => text.to_owned(),
        }
    }
}

impl Key {
    fn read(judge: &str, name: &str) -> Result<Self> {
        let bad = |reason: String| JudgeError::option(judge, "api_key_env", reason);
        let key = std::env::var(name)
            .map_err(|_| bad(format!("names the environment variable `{name}`, which is not set")))?;
        let key = key.trim();
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad(format!("names the environment variable `{name}`, which holds no key")));
        }
        Ok(Self(key.to_owned()))
    }
}

/// Status, the pause that is asked for, and body.
fn read(mut response: Response<Body>) -> Result<(u16, Option<Duration>, String), String> {
    let after =
        response.headers().get("retry-after").and_then(|after| after.to_str().ok()?.trim().parse().ok());
    // A date, which it may be too, is not understood: then pauses are the judge's own.
    let after = after.and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok());
    let body = response.body_mut().with_config().limit(LONGEST_REPLY).lossy_utf8(true).read_to_string();
    Ok((response.status().as_u16(), after, body.map_err(|error| error.to_string())?))
}

/// The model's words in a reply, or what is wrong with it.
fn content(text: &str) -> Result<String, &'static str> {
    let reply: Value = serde_json::from_str(text).map_err(|_| "the reply is not JSON")?;
    match reply.pointer("/choices/0/message/content") {
        Some(Value::String(content)) => Ok(content.clone()),
        _ => Err("the reply has no `choices[0].message.content`"),
    }
}

/// The server's words about an error, wherever they stand.
fn message(text: &str) -> String {
    let reply: Value = serde_json::from_str(text).unwrap_or_default();
    let found =
        ["/error/message", "/error", "/message", "/detail"].iter().find_map(|at| reply.pointer(at)?.as_str());
    match found.unwrap_or(text).trim() {
        "" => "(no message)".to_owned(),
        message => message.to_owned(),
    }
}
