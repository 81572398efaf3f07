//! Single requests to a chat model.

use std::time::Duration;

use serde_json::Value;

use super::EndpointConfig;
use crate::http::{Http, Key};
use crate::{JudgeError, Result};

const LONGEST_REPLY: u64 = 4 << 20;

#[derive(Debug)]
pub(super) struct Client {
    http: Http,
    address: String,
}

#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// The model's text.
    Reply(String),
    /// A failure that a retry may avoid.
    Failed {
        reason: String,
        /// The pause that the server asks for.
        after: Option<Duration>,
    },
    /// A failure that no retry avoids.
    Refused { status: u16, message: String },
}

impl Client {
    /// Creates a client and reads the key.
    pub(super) fn new(judge: &str, config: &EndpointConfig) -> Result<Self> {
        let read = |name| Key::read(name).map_err(|reason| JudgeError::option(judge, "api_key_env", reason));
        let key = config.api_key_env.as_deref().map(read).transpose()?;
        let address = config.address();
        let time = Duration::from_secs_f64(config.timeout_s);
        Ok(Self { http: Http::new(&address, key, time, config.concurrency, LONGEST_REPLY), address })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn send(&self, body: &str) -> Outcome {
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

/// Returns the model's text in a reply, or what is wrong with the reply.
fn content(text: &str) -> Result<String, &'static str> {
    let reply: Value = serde_json::from_str(text).map_err(|_| "the reply is not JSON")?;
    match reply.pointer("/choices/0/message/content") {
        Some(Value::String(content)) => Ok(content.clone()),
        _ => Err("the reply has no `choices[0].message.content`"),
    }
}
