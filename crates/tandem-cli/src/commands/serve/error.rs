//! Error responses in OpenAI's format.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    /// Name of the invalid field.
    field: Option<String>,
    message: String,
}

impl ApiError {
    /// An invalid request (400).
    pub(crate) fn invalid(field: Option<&str>, message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::BAD_REQUEST, "invalid_request_error");
        Self { status, kind, field: field.map(str::to_owned), message: message.into() }
    }

    /// An unknown model (404).
    pub(crate) fn no_model(asked: &str, served: &str) -> Self {
        let message = format!("the model {asked:?} is not served here; {served:?} is");
        let (status, kind) = (StatusCode::NOT_FOUND, "invalid_request_error");
        Self { status, kind, field: Some("model".to_owned()), message }
    }

    /// A missing or wrong key (401).
    pub(crate) fn no_key() -> Self {
        let message = "a key is needed: Authorization: Bearer KEY".to_owned();
        Self { status: StatusCode::UNAUTHORIZED, kind: "authentication_error", field: None, message }
    }

    /// A server error (500).
    pub(crate) fn own(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::INTERNAL_SERVER_ERROR, "server_error");
        Self { status, kind, field: None, message: message.into() }
    }

    /// JSON body.
    pub(crate) fn body(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.field, "code": null } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}
