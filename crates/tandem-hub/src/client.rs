//! HTTP requests to the hub: redirects, the token, retries.

use std::time::Duration;

use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::error::{HubError, Result};
use crate::settings::{Settings, Token};

/// Most redirects of one request.
const REDIRECTS: usize = 10;
/// Attempts without progress before an error.
pub(crate) const ATTEMPTS: usize = 5;
/// Longest pause that a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Maximum bytes of a message or a listing.
const LONGEST_TEXT: u64 = 256 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// Stops at a redirect to another host, whose headers describe the file.
    Head,
    Get,
}

/// Request without a useful response.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No response, or none to the end.
    Network(String),
    /// A status of 400 or more.
    Status { status: u16, code: String, message: String, after: Option<Duration> },
    /// A redirect that cannot be followed.
    Redirect(String),
}

impl Failure {
    /// Returns whether a retry may succeed.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Network(_) => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            Self::Redirect(_) => false,
        }
    }

    pub(crate) fn in_words(&self) -> String {
        match self {
            Self::Network(reason) | Self::Redirect(reason) => reason.clone(),
            Self::Status { status, message, .. } if message.is_empty() => format!("HTTP {status}"),
            Self::Status { status, message, .. } => format!("HTTP {status}: {message}"),
        }
    }
}

/// Client of one endpoint.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    token: Option<Token>,
    /// Scheme, host and port that get the token.
    origin: String,
    pause: Duration,
}

impl Client {
    pub(crate) fn new(settings: &Settings) -> Self {
        let mut agent = Agent::config_builder()
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(30)))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")));
        let host = settings.endpoint.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        if matches!(host.as_deref(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            agent = agent.proxy(None);
        }
        Self {
            agent: agent.build().new_agent(),
            token: settings.token.clone(),
            origin: origin(&settings.endpoint).unwrap_or_default(),
            pause: settings.pause,
        }
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Sends one request and follows redirects. `from`: first byte wanted. `limit`: longest time of
    /// the body.
    pub(crate) fn send(
        &self,
        method: Method,
        url: &str,
        from: u64,
        limit: Option<Duration>,
    ) -> Result<Response<Body>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=REDIRECTS {
            let request = match method {
                Method::Head => self.agent.head(&url),
                Method::Get => self.agent.get(&url),
            };
            // A compressed body would have another size than the file.
            let mut request = request.header("Accept-Encoding", "identity");
            if from > 0 {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let own = origin(&url).is_some_and(|origin| origin == self.origin);
            if let (true, Some(Token(token))) = (own, &self.token) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let request = request.config().timeout_recv_body(limit).build();
            let mut response =
                request.call().map_err(|error| Failure::Network(self.hide(&error.to_string())))?;
            let status = response.status().as_u16();
            // What a redirect signs into the address is nobody's business.
            tracing::debug!("{method:?} {}: HTTP {status}", self.hide(url.split('?').next().unwrap_or(&url)));
            if status >= 400 {
                return Err(self.failure(status, method, &mut response));
            }
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location = header(&response, "location").unwrap_or_default();
            let Some(next) = join(&url, &location) else {
                return Err(Failure::Redirect(format!(
                    "redirected to {:?}, which is no address",
                    self.hide(&location)
                )));
            };
            if method == Method::Head && origin(&next) != origin(&url) {
                return Ok(response);
            }
            if url.starts_with("https:") && !next.starts_with("https:") {
                return Err(Failure::Redirect("redirected from https to an insecure address".to_owned()));
            }
            url = next;
        }
        Err(Failure::Redirect(format!("redirected more than {REDIRECTS} times")))
    }

    /// Sends a request up to `attempts` times where that may help.
    pub(crate) fn send_with_retries(
        &self,
        method: Method,
        url: &str,
        attempts: usize,
    ) -> Result<Response<Body>, (usize, Failure)> {
        let mut attempt = 1;
        loop {
            match self.send(method, url, 0, Some(Duration::from_secs(60))) {
                Ok(response) => return Ok(response),
                Err(failure) if failure.may_pass() && attempt < attempts => self.wait(attempt, &failure),
                Err(failure) => return Err((attempt, failure)),
            }
            attempt += 1;
        }
    }

    /// Pauses before the attempt after this 1-based one.
    pub(crate) fn wait(&self, attempt: usize, failure: &Failure) {
        let own = self.pause * (1 << (attempt - 1).min(5));
        let asked = match failure {
            Failure::Status { after, .. } => after.map(|after| after.min(LONGEST_PAUSE)),
            _ => None,
        };
        std::thread::sleep(asked.unwrap_or(own));
    }

    /// Gets a text of the hub with up to `attempts` requests.
    pub(crate) fn text(&self, url: &str, attempts: usize) -> Result<String, (usize, Failure)> {
        let mut response = self.send_with_retries(Method::Get, url, attempts)?;
        let text = response.body_mut().with_config().limit(LONGEST_TEXT).read_to_string();
        text.map_err(|error| (1, Failure::Network(self.hide(&error.to_string()))))
    }

    fn failure(&self, status: u16, method: Method, response: &mut Response<Body>) -> Failure {
        let code = header(response, "x-error-code").unwrap_or_default();
        let after = header(response, "retry-after").and_then(|after| after.trim().parse().ok());
        let after = after.and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok());
        let message = header(response, "x-error-message").unwrap_or_else(|| {
            let body = match method {
                Method::Head => None,
                Method::Get => {
                    response.body_mut().with_config().limit(1 << 16).lossy_utf8(true).read_to_string().ok()
                }
            };
            let json = body.and_then(|body| serde_json::from_str::<serde_json::Value>(&body).ok());
            json.and_then(|json| Some(json.get("error")?.as_str()?.to_owned())).unwrap_or_default()
        });
        // Hidden before it is cut: even a part of the token is too much.
        let message = self.hide(&message).chars().filter(|c| !c.is_control()).take(300).collect();
        Failure::Status { status, code, message, after }
    }

    fn hide(&self, text: &str) -> String {
        match &self.token {
            Some(Token(token)) => text.replace(token.as_str(), "…"),
            None => text.to_owned(),
        }
    }
}

pub(crate) fn header(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(str::to_owned)
}

impl HubError {
    pub(crate) fn network(what: &str, (attempts, failure): &(usize, Failure)) -> Self {
        Self::Network { what: what.to_owned(), attempts: *attempts, reason: failure.in_words() }
    }
}

/// Scheme, host and port, with the default port written out.
fn origin(url: &str) -> Option<String> {
    let uri = url.parse::<Uri>().ok()?;
    let (scheme, host) = (uri.scheme_str()?, uri.host()?);
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some(format!("{scheme}://{}:{port}", host.to_lowercase()))
}

/// Address of a redirect.
fn join(url: &str, location: &str) -> Option<String> {
    let next = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", url.parse::<Uri>().ok()?.scheme_str()?)
    } else if location.starts_with('/') {
        format!("{}{location}", origin(url)?)
    } else {
        return None;
    };
    next.parse::<Uri>().ok().map(|_| next)
}

/// Writes a path into an address; slashes stay.
pub(crate) fn encode(path: &str) -> String {
    encode_but(path, true)
}

/// Writes a revision into an address; a slash is escaped.
pub(crate) fn encode_whole(text: &str) -> String {
    encode_but(text, false)
}

fn encode_but(text: &str, keeps_slashes: bool) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(byte as char),
            b'/' if keeps_slashes => encoded.push('/'),
            _ => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}
