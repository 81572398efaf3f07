//! HTTP requests to a user's address, with a key that is never shown.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use ureq::http::Uri;
use ureq::{Agent, Body, http::Response};

pub use crate::backoff::{Backoff, receive, sleep};
use crate::judge::beginning;

/// Maximum characters shown of a server's message.
const SHOWN: usize = 500;

/// API key, or a user's name and password; never shown.
#[derive(Clone)]
pub struct Key {
    /// Value of the header `Authorization`.
    authorization: String,
    /// Texts that no message may contain.
    secrets: Vec<String>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// Reads the key from the environment variable `name`.
    ///
    /// # Errors
    /// If the variable is not set or empty; the message follows the option's name.
    pub fn read(name: &str) -> Result<Self, String> {
        let key = std::env::var(name)
            .map_err(|_| format!("names the environment variable `{name}`, which is not set"))?;
        let key = key.trim();
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("names the environment variable `{name}`, which holds no key"));
        }
        Ok(Self { authorization: format!("Bearer {key}"), secrets: vec![key.to_owned()] })
    }

    /// Creates the key of a user with a password (RFC 7617).
    pub fn basic(user: &str, password: &str) -> Self {
        let encoded = BASE64_STANDARD.encode(format!("{user}:{password}"));
        let secrets = [encoded.clone(), password.to_owned()];
        let secrets = secrets.into_iter().filter(|secret| !secret.is_empty()).collect();
        Self { authorization: format!("Basic {encoded}"), secrets }
    }
}

/// HTTP client of one server.
#[derive(Debug)]
pub struct Http {
    agent: Agent,
    key: Option<Key>,
    /// Maximum bytes of a reply.
    longest: u64,
}

/// Reply of a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// `Retry-After`: the time before the next request.
    pub after: Option<Duration>,
    /// The body. It may contain the key ([`Http::hidden`]).
    pub text: String,
}

impl Http {
    /// Creates a client of the server at `address` with a timeout of `time` per request and at most
    /// this many idle connections. Certificates are checked against Mozilla's roots. The
    /// environment's proxy is used, except for this machine.
    pub fn new(address: &str, key: Option<Key>, time: Duration, connections: usize, longest: u64) -> Self {
        let mut agent = Agent::config_builder()
            .timeout_global(Some(time))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections_per_host(connections)
            .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")));
        let host = address.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        if matches!(host.as_deref(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            agent = agent.proxy(None);
        }
        Self { agent: agent.build().new_agent(), key, longest }
    }

    /// Posts JSON.
    ///
    /// # Errors
    /// The reason why no reply came, without the key.
    pub fn post(&self, url: &str, body: &str) -> Result<Reply, String> {
        let request = self.agent.post(url).header("Content-Type", "application/json");
        let request = match self.authorization() {
            Some(value) => request.header("Authorization", value),
            None => request,
        };
        self.read(request.send(body))
    }

    /// Gets a resource.
    pub fn get(&self, url: &str) -> Result<Reply, String> {
        let request = self.agent.get(url);
        let request = match self.authorization() {
            Some(value) => request.header("Authorization", value),
            None => request,
        };
        self.read(request.call())
    }

    /// Removes the key from a text; a server may have sent it back.
    pub fn hidden(&self, text: &str) -> String {
        let secrets = self.key.iter().flat_map(|key| &key.secrets);
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "…"))
    }

    /// Returns the server's error message, wherever the body has it.
    pub fn message(&self, reply: &Reply) -> String {
        // Hidden before truncation: even a part of the key is too much.
        beginning(&self.hidden(&message(&reply.text)), SHOWN)
    }

    /// Returns the beginning of a text, without the key.
    pub fn beginning(&self, text: &str) -> String {
        beginning(&self.hidden(text), SHOWN)
    }

    fn authorization(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.authorization.as_str())
    }

    fn read(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Reply, String> {
        let read = |mut response: Response<Body>| {
            let after = response.headers().get("retry-after");
            let after = after.and_then(|after| after.to_str().ok()?.trim().parse().ok());
            // A date, the other form of the header, is ignored: the caller then chooses the pauses.
            let after = after.and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok());
            let status = response.status().as_u16();
            let body = response.body_mut().with_config().limit(self.longest).lossy_utf8(true);
            Ok(Reply { status, after, text: body.read_to_string()? })
        };
        response.and_then(read).map_err(|error: ureq::Error| self.hidden(&error.to_string()))
    }
}

impl Reply {
    /// Returns whether a retry may succeed: too many requests, a timeout, or a server error.
    pub fn may_pass(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500..)
    }
}

/// Returns what is wrong with the address of a chat model. Messages show addresses, so they must contain
/// no secrets. `key` is the option that names the key's variable.
pub fn wrong_with(address: &str, key: &str) -> Option<String> {
    wrong_with_any(address, "https://api.openai.com/v1 or http://localhost:8000/v1", key)
}

/// Returns what is wrong with the address of a server, of which `like` is an example.
pub fn wrong_with_any(address: &str, like: &str, key: &str) -> Option<String> {
    let has_scheme = address.starts_with("http://") || address.starts_with("https://");
    let uri: Option<Uri> = address.parse().ok();
    let authority = uri.as_ref().and_then(Uri::authority).filter(|authority| !authority.host().is_empty());
    // A port that is too large would be read as none.
    let has_place = authority.is_some_and(|authority| {
        authority.as_str().ends_with(authority.host()) || authority.port_u16().is_some()
    });
    if !has_scheme || !has_place {
        return Some(format!("is no address; it should be like {like}"));
    }
    address
        .contains(['@', '?', '#'])
        .then(|| format!("has more than host, port and path; give the key by `{key}`"))
}

fn message(text: &str) -> String {
    let reply: Value = serde_json::from_str(text).unwrap_or_default();
    let places = ["/error/message", "/error", "/message", "/error_message", "/detail"];
    let found = places.iter().find_map(|at| reply.pointer(at)?.as_str());
    match found.unwrap_or(text).trim() {
        "" => "(no message)".to_owned(),
        message => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7617, section 2.
    #[test]
    fn a_password_is_sent_as_the_standard_says_and_never_shown() {
        let key = Key::basic("Aladdin", "open sesame");
        assert_eq!(key.authorization, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        let http = Http::new("http://localhost", Some(key), Duration::from_secs(1), 1, 1);
        let told = http.hidden("got QWxhZGRpbjpvcGVuIHNlc2FtZQ== for Aladdin with open sesame");
        assert_eq!(told, "got … for Aladdin with …");
    }
}
