//! Paths of the server, and what comes before their handlers: the key, the count, the end.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State as Shared};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use super::completion::Completion;
use super::connections::Client;
use super::error::{ApiError, Rejection};
use super::kind::Kind;
use super::prepare;
use super::state::State;
use super::ticket::Ticket;

const MODELS: &str = "/v1/models";
/// Names may have slashes.
const MODEL: &str = "/v1/models/{*name}";
const CHAT_COMPLETIONS: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const HEALTH: &str = "/health";
const METRICS: &str = "/metrics";

/// Returns the paths and their handlers.
pub(super) fn router(state: Arc<State>) -> Router {
    let with_key = Router::new()
        .route(MODELS, get(models))
        .route(MODEL, get(model))
        .route(CHAT_COMPLETIONS, post(chat_completions))
        .route(COMPLETIONS, post(completions))
        .layer(from_fn_with_state(Arc::clone(&state), check_key));
    Router::new()
        .route(HEALTH, get(|| async { "ok" }))
        .route(METRICS, get(metrics))
        .merge(with_key)
        .fallback(|uri: Uri| async move { ApiError::no_path(uri.path()) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            ApiError::no_method(method.as_str(), uri.path())
        })
        .layer(from_fn_with_state(Arc::clone(&state), observe))
        .with_state(state)
}

/// Counts a response; refuses requests of a server that stops.
async fn observe(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let path = [MODELS, CHAT_COMPLETIONS, COMPLETIONS, HEALTH, METRICS];
    let path = path.into_iter().find(|path| *path == request.uri().path()).unwrap_or("other");
    let is_draining = *state.draining().borrow() && path != METRICS;
    let response = match is_draining {
        true => ApiError::draining().into_response(),
        false => next.run(request).await,
    };
    state.metrics().responded(path, response.status().as_u16());
    if let Some(rejection) = response.extensions().get::<Rejection>() {
        state.metrics().rejected(*rejection);
    }
    response
}

/// Refuses a request without the key before its body is read.
async fn check_key(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    match state.check_key(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn metrics(Shared(state): Shared<Arc<State>>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], state.metrics().text())
}

async fn models(Shared(state): Shared<Arc<State>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [served(&state)] }))
}

async fn model(
    Shared(state): Shared<Arc<State>>,
    uri: Uri,
    asked: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    // A name that is not UTF-8 is none.
    let Ok(Path(asked)) = asked else { return Err(ApiError::no_path(uri.path())) };
    match state.name() {
        (name, _) if name == asked => Ok(Json(served(&state))),
        (name, _) => Err(ApiError::no_model(&asked, name)),
    }
}

/// Returns the model as OpenAI's clients read it.
fn served(state: &State) -> Value {
    let (name, created) = state.name();
    json!({ "id": name, "object": "model", "created": created, "owned_by": "tandem" })
}

async fn chat_completions(
    state: Shared<Arc<State>>,
    client: Extension<Client>,
    request: Request,
) -> Result<Response, ApiError> {
    complete(state, client, Kind::Chat, request).await
}

async fn completions(
    state: Shared<Arc<State>>,
    client: Extension<Client>,
    request: Request,
) -> Result<Response, ApiError> {
    complete(state, client, Kind::Text, request).await
}

async fn complete(
    Shared(state): Shared<Arc<State>>,
    Extension(client): Extension<Client>,
    kind: Kind,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let (head, body) = request.into_parts();
    let body = state.bodies().read(state.metrics(), &head.headers, body).await?;
    if *state.draining().borrow() {
        return Err(ApiError::draining());
    }
    let ticket = Ticket::take(&state, arrived)?;
    let own = Arc::clone(&state);
    let parsed = state.prepare(move || prepare::parse(&own, kind, &body.bytes)).await?;
    Completion::begin(state, client, ticket, parsed).await?.respond().await
}
