//! Error responses in OpenAI's format.

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Most characters of a client's text that an error repeats.
const MOST_ECHO: usize = 200;
/// Most characters of a message: templates and tokenizers may repeat what they were given.
const MOST_MESSAGE: usize = 2000;

/// Reason for which a request was refused, a label of `tandem_rejected_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rejection {
    /// Field, body or path that cannot be served.
    Invalid,
    Key,
    /// Header that took too long.
    SlowHeader,
    SlowBody,
    LargeBody,
    /// Memory of all bodies.
    Bodies,
    Queue,
    Connections,
    Draining,
    /// Bytes that are not HTTP, or a header that is too long.
    NotHttp,
}

impl Rejection {
    /// Name in the metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Key => "key",
            Self::SlowHeader => "slow_header",
            Self::SlowBody => "slow_body",
            Self::LargeBody => "large_body",
            Self::Bodies => "bodies",
            Self::Queue => "queue",
            Self::Connections => "connections",
            Self::Draining => "draining",
            Self::NotHttp => "not_http",
        }
    }
}

/// An error response.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    /// Name of the invalid field.
    field: Option<String>,
    message: String,
    /// Why it was refused, unless the server failed.
    rejection: Option<Rejection>,
}

impl ApiError {
    fn refused(status: StatusCode, rejection: Rejection, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "invalid_request_error",
        };
        Self { status, kind, field: None, message: message.into(), rejection: Some(rejection) }
    }

    /// An invalid request (400).
    pub(crate) fn invalid(field: Option<&str>, message: impl Into<String>) -> Self {
        let field = field.map(clip);
        Self { field, ..Self::refused(StatusCode::BAD_REQUEST, Rejection::Invalid, message) }
    }

    /// An unknown model (404).
    pub(crate) fn no_model(asked: &str, served: &str) -> Self {
        let message = format!("the model {:?} is not served here; {served:?} is", clip(asked));
        let field = Some("model".to_owned());
        Self { field, ..Self::refused(StatusCode::NOT_FOUND, Rejection::Invalid, message) }
    }

    /// An unknown path (404).
    pub(crate) fn no_path(path: &str) -> Self {
        let message = format!(
            "there is no {:?} here; there are /v1/models, /v1/models/NAME, /v1/chat/completions, /v1/completions, /health and /metrics",
            clip(path)
        );
        Self::refused(StatusCode::NOT_FOUND, Rejection::Invalid, message)
    }

    /// A method that a path does not have (405).
    pub(crate) fn no_method(method: &str, path: &str) -> Self {
        let message =
            format!("{} is not allowed for {}; the header Allow has what is", clip(method), clip(path));
        Self::refused(StatusCode::METHOD_NOT_ALLOWED, Rejection::Invalid, message)
    }

    /// A missing or wrong key (401).
    pub(crate) fn no_key() -> Self {
        let message = "a key is needed: Authorization: Bearer KEY";
        Self::refused(StatusCode::UNAUTHORIZED, Rejection::Key, message)
    }

    /// A header that took too long (408).
    pub(crate) fn slow_header(seconds: u64) -> Self {
        let message = format!("the header of the request took more than {seconds} s (--header-timeout)");
        Self::refused(StatusCode::REQUEST_TIMEOUT, Rejection::SlowHeader, message)
    }

    /// A body that took too long (408).
    pub(crate) fn slow_body(seconds: u64) -> Self {
        let message = format!("the body of the request took more than {seconds} s (--body-timeout)");
        Self::refused(StatusCode::REQUEST_TIMEOUT, Rejection::SlowBody, message)
    }

    /// A body that is too large (413).
    pub(crate) fn large_body(most: usize) -> Self {
        let message = format!("the body of the request has more than {most} bytes (--max-body)");
        Self::refused(StatusCode::PAYLOAD_TOO_LARGE, Rejection::LargeBody, message)
    }

    /// A server at one of its limits (429).
    pub(crate) fn busy(rejection: Rejection, message: impl Into<String>) -> Self {
        Self::refused(StatusCode::TOO_MANY_REQUESTS, rejection, message)
    }

    /// A server that ends (503).
    pub(crate) fn draining() -> Self {
        let message = "this server is stopping and takes no new requests";
        Self::refused(StatusCode::SERVICE_UNAVAILABLE, Rejection::Draining, message)
    }

    /// A server error (500).
    pub(crate) fn own(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::INTERNAL_SERVER_ERROR, "server_error");
        Self { status, kind, field: None, message: message.into(), rejection: None }
    }

    /// Status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// JSON body.
    pub(crate) fn body(&self) -> Value {
        let message = clip_to(&self.message, MOST_MESSAGE);
        json!({ "error": { "message": message, "type": self.kind, "param": self.field, "code": null } })
    }

    /// Response as bytes, for a connection that has no request. It closes the connection.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let body = self.body().to_string();
        let retry = if self.may_retry() { "retry-after: 1\r\n" } else { "" };
        let (status, length) = (self.status, body.len());
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{retry}connection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }

    /// Returns whether the same request may be served a little later.
    fn may_retry(&self) -> bool {
        [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&self.status)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.may_retry() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(rejection) = self.rejection {
            response.extensions_mut().insert(rejection);
        }
        response
    }
}

/// Returns the beginning of a text that came from a client.
pub(crate) fn clip(text: &str) -> String {
    clip_to(text, MOST_ECHO)
}

fn clip_to(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_repeated_in_part() {
        assert_eq!(clip("short"), "short");
        assert_eq!(clip(&"é".repeat(200)), "é".repeat(200));
        assert_eq!(clip(&"é".repeat(201)), "é".repeat(200) + "…");
        let error = ApiError::invalid(Some(&"x".repeat(9000)), "no").body();
        assert!(error["error"]["param"].as_str().is_some_and(|param| param.len() < 300), "{error}");
        let error = ApiError::own("x".repeat(9000)).body();
        assert!(error["error"]["message"].as_str().is_some_and(|message| message.len() < 2100), "{error}");
    }

    #[test]
    fn a_response_of_bytes_has_its_length() {
        let bytes = ApiError::busy(Rejection::Connections, "all are taken").to_bytes();
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 429 Too Many Requests\r\n"), "{head}");
        assert!(head.contains("retry-after: 1\r\n") && head.contains("connection: close"), "{head}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["type"], "rate_limit_error");
    }
}
