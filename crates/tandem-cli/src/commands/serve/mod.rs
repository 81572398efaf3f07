//! `tandem serve`: a model behind OpenAI's HTTP interface.
//!
//! One thread generates for all requests (`generation/engine.rs`). Handlers convert JSON to its
//! jobs and back.

mod asked;
mod completion;
mod error;
mod fields;
mod kind;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::{Context, bail};
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State as Shared};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tandem_data::tokenizer::Tokenizer;
use tandem_train::chain;
use tokio::sync::oneshot;

use self::asked::CompletionRequest;
use self::completion::Completion;
use self::error::ApiError;
use self::kind::Kind;
use self::state::State;
use crate::args::ServeArguments;
use crate::exit::{Exit, mistake};
use crate::generation::loaded::{encode_chat, positions_of};
use crate::generation::{GenerationLimits, Loaded, engine};
use crate::hub;
use crate::signals;

const MOST_BYTES: usize = 16 << 20;

pub(crate) fn run(arguments: &ServeArguments) -> anyhow::Result<Exit> {
    let key = match &arguments.key_env {
        None => None,
        Some(name) => match std::env::var(name) {
            Ok(key) if !key.is_empty() => Some(key),
            _ => return Err(mistake(format!("--key-env: the environment has no variable {name}"))),
        },
    };
    if key.is_none() && !arguments.host.is_loopback() {
        tracing::info!(
            "warning: whoever reaches {} can use this server: --key-env NAME asks for a key",
            arguments.host
        );
    }
    let weights = &hub::weights(&arguments.weights)?;
    let tokenizer = Tokenizer::from_folder(&weights.model)?;
    let positions = positions_of(&weights.model, arguments.context)?;
    let cache_tokens = arguments.cache_tokens.unwrap_or(4 * positions);
    if cache_tokens < positions {
        return Err(mistake(format!(
            "--cache-tokens {cache_tokens} holds no text of {positions} tokens, which --context allows: raise the one or lower \
             the other"
        )));
    }
    let room = GenerationLimits { positions, cache_tokens, max_batch: arguments.max_batch, log_probs: true };
    let model = Arc::new(Loaded::open(weights, tokenizer, room, &arguments.compute)?);
    let name = arguments.name.clone().unwrap_or_else(|| {
        hub::repository(&arguments.weights.model).unwrap_or_else(|| name_of(&weights.model))
    });
    let (jobs, waiting) = channel();
    let (ended, end) = oneshot::channel();
    let engine = std::thread::Builder::new().name("engine".to_owned()).spawn({
        let model = Arc::clone(&model);
        // A closed channel means nobody waits.
        move || drop(ended.send(engine::run(&model, &waiting)))
    });
    let engine = engine.context("cannot start a thread")?;
    let state = Arc::new(State::new(model, name, key, jobs));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("cannot start threads")?;
    runtime.block_on(serve(state, SocketAddr::new(arguments.host, arguments.port), end))?;
    // Open streams end with their tasks, and the engine with the last of them.
    drop(runtime);
    engine.join().map_err(|_| anyhow::anyhow!("the engine has panicked"))?;
    Ok(Exit::Done)
}

/// Last component of a path.
fn name_of(folder: &std::path::Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

async fn serve(
    state: Arc<State>,
    address: SocketAddr,
    engine: oneshot::Receiver<tandem_model::Result<()>>,
) -> anyhow::Result<()> {
    let (name, _) = state.name();
    let name = name.to_owned();
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/health", get(|| async { "ok" }))
        .fallback(|| async {
            ApiError::invalid(
                None,
                "there is no such address here: /v1/models, /v1/chat/completions, /v1/completions",
            )
        })
        .layer(DefaultBodyLimit::max(MOST_BYTES))
        .with_state(state);
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.map_err(|error| {
        mistake(format!("cannot listen at {address}: {error}; --host and --port choose another address"))
    })?;
    let address = listener.local_addr().context("cannot listen")?;
    tracing::info!("{name} answers at http://{address}/v1; Ctrl-C ends it");
    let stop = signals::stop_flag().context("cannot catch signals")?;
    let stopped = async move {
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    // Requests in progress are dropped: a stopping server does not wait for long texts.
    tokio::select! {
        served = axum::serve(listener, app).into_future() => served.context("cannot serve"),
        () = stopped => Ok(()),
        ended = engine => {
            if let Ok(Err(error)) = ended {
                return Err(error.into());
            }
            // Unreachable while clients can still send jobs.
            bail!("the engine has ended")
        }
    }
}

async fn models(Shared(state): Shared<Arc<State>>, headers: HeaderMap) -> Result<Json<Value>, ApiError> {
    state.check_key(&headers)?;
    let (name, created) = state.name();
    let model = json!({ "id": name, "object": "model", "created": created, "owned_by": "tandem" });
    Ok(Json(json!({ "object": "list", "data": [model] })))
}

async fn chat_completions(
    Shared(state): Shared<Arc<State>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let (heading, mut fields) = state.open(Kind::Chat, &headers, &body)?;
    let messages = fields.messages()?;
    let asked = CompletionRequest::take(&mut fields)?;
    let log_probs = fields.switch("logprobs")?;
    fields.end()?;
    let prompt = encode_chat(state.model().tokenizer(), &messages)
        .map_err(|error| ApiError::invalid(Some("messages"), chain(&error)))?;
    Completion::begin(state, heading, asked, log_probs, vec![prompt])?.respond().await
}

async fn completions(
    Shared(state): Shared<Arc<State>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let (heading, mut fields) = state.open(Kind::Text, &headers, &body)?;
    let prompts = prompts(state.model().tokenizer(), fields.take("prompt"))?;
    let asked = CompletionRequest::take(&mut fields)?;
    // Log-probability of the sampled token; those of other tokens are not computed.
    let log_probs = fields.count("logprobs", 0, 1)?.is_some();
    fields.end()?;
    Completion::begin(state, heading, asked, log_probs, prompts)?.respond().await
}

/// A text, token ids, or a list of either.
fn prompts(tokenizer: &Tokenizer, prompt: Option<Value>) -> Result<Vec<Vec<u32>>, ApiError> {
    let invalid = |why: String| ApiError::invalid(Some("prompt"), why);
    let tokens = |list: &[Value]| -> Option<Vec<u32>> {
        list.iter().map(|token| u32::try_from(token.as_u64()?).ok()).collect()
    };
    let one = |value: &Value| match value {
        Value::String(text) => tokenizer.encode(text).map_err(|error| invalid(chain(&error))),
        Value::Array(list) if !list.is_empty() => {
            tokens(list).ok_or_else(|| invalid("`prompt` must be text, tokens, or a list of them".to_owned()))
        }
        _ => Err(invalid("`prompt` must be text, tokens, or a list of them".to_owned())),
    };
    match prompt {
        Some(Value::Array(list)) if list.first().is_some_and(|first| !first.is_number()) => {
            list.iter().map(one).collect()
        }
        Some(value) => Ok(vec![one(&value)?]),
        None => Err(invalid("`prompt` is missing".to_owned())),
    }
}
