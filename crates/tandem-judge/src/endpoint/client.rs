//! One request to a chat model, and what came of it.

use std::time::Duration;

use serde_json::Value;

use super::EndpointConfig;
use crate::http::{Http, Key};
use crate::{JudgeError, Result};

/// A longer reply is not read.
const LONGEST_REPLY: u64 = 4 << 20;

/// Sends requests to one address.
#[derive(Debug)]
pub struct Client {
    http: Http,
    address: String,
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
    /// Reads the key.
    pub fn new(judge: &str, config: &EndpointConfig) -> Result<Self> {
        let read = |name| Key::read(name).map_err(|reason| JudgeError::option(judge, "api_key_env", reason));
        let key = config.api_key_env.as_deref().map(read).transpose()?;
        let address = config.address();
        let time = Duration::from_secs_f64(config.timeout_s);
        Ok(Self { http: Http::new(&address, key, time, config.concurrency, LONGEST_REPLY), address })
    }

    /// Where requests go.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request and waits for what comes of it.
    pub fn send(&self, body: &str) -> Outcome {
        let reply = match self.http.post(&self.address, body) {
            Ok(reply) => reply,
            Err(reason) => return Outcome::Failed { reason, after: None },
        };
        if reply.status == 200 {
            return match content(&reply.text) {
                Ok(content) => Outcome::Reply(self.http.hidden(&content)),
                Err(what) => {
                    let reason = format!("{what}: {}", self.http.beginning(&reply.text));
                    Outcome::Failed { reason, after: None }
                }
            };
        }
        let (status, message) = (reply.status, self.http.message(&reply));
        match reply.may_pass() {
            true => Outcome::Failed { reason: format!("HTTP {status}: {message}"), after: reply.after },
            false => Outcome::Refused { status, message },
        }
    }
}

/// The model's words in a reply, or what is wrong with it.
fn content(text: &str) -> Result<String, &'static str> {
    let reply: Value = serde_json::from_str(text).map_err(|_| "the reply is not JSON")?;
    match reply.pointer("/choices/0/message/content") {
        Some(Value::String(content)) => Ok(content.clone()),
        _ => Err("the reply has no `choices[0].message.content`"),
    }
}
