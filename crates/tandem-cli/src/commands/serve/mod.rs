//! `tandem serve`: a model behind OpenAI's HTTP interface.
//!
//! One thread generates for all requests (`generation/engine.rs`). Handlers convert JSON to its
//! jobs and back. Clients are not trusted: `limits.rs` bounds what they send, hold and wait for.

mod asked;
mod body;
mod completion;
mod connections;
mod error;
mod fields;
mod json;
mod kind;
pub(crate) mod limits;
mod metrics;
mod prepare;
mod requests;
mod routes;
mod state;
mod stream;
mod ticket;

use std::env::VarError;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::oneshot;

use self::connections::Connections;
pub use self::requests::Requests;
use self::state::{PREPARED_AT_ONCE, State};
use crate::args::ServeArguments;
use crate::exit::{Exit, mistake};
use crate::generation::loaded::{positions_of, tokenizer_of};
use crate::generation::{GenerationLimits, Loaded, engine};
use crate::hub;
use crate::signals;

/// Time of threads that prepare a request when the server ends.
const END_OF_THREADS: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: &ServeArguments) -> anyhow::Result<Exit> {
    let key = key(arguments)?;
    if key.is_none() && !arguments.host.is_loopback() {
        tracing::info!(
            "warning: whoever reaches {} can use this server: --key-env NAME asks for a key",
            arguments.host
        );
    }
    arguments.limits.allow_connections()?;
    let (model, name) = open(arguments)?;
    let (jobs, waiting) = channel();
    let (ended, end) = oneshot::channel();
    let engine = std::thread::Builder::new().name("engine".to_owned()).spawn({
        let model = Arc::clone(&model);
        // A closed channel means nobody waits.
        move || drop(ended.send(engine::run(&model, &waiting)))
    });
    let engine = engine.context("cannot start a thread")?;
    let state = Arc::new(State::new(model, name, key.as_deref(), jobs, arguments.limits.clone()));
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).max_blocking_threads(PREPARED_AT_ONCE + 1).enable_all();
    let runtime = runtime.build().context("cannot start threads")?;
    let served = runtime.block_on(serve(state, SocketAddr::new(arguments.host, arguments.port), end));
    // Requests that are left end with their tasks, and the engine with the last of them.
    runtime.shutdown_timeout(END_OF_THREADS);
    served?;
    engine.join().map_err(|_| anyhow::anyhow!("the engine has panicked"))?;
    Ok(Exit::Done)
}

/// Returns the key that requests must send.
fn key(arguments: &ServeArguments) -> anyhow::Result<Option<String>> {
    let Some(name) = &arguments.key_env else { return Ok(None) };
    match std::env::var(name) {
        Ok(key) if !key.is_empty() => Ok(Some(key)),
        Ok(_) => Err(mistake(format!("--key-env: the variable {name} is empty"))),
        Err(VarError::NotPresent) => {
            Err(mistake(format!("--key-env: the environment has no variable {name}")))
        }
        Err(VarError::NotUnicode(_)) => Err(mistake(format!("--key-env: the variable {name} is not UTF-8"))),
    }
}

/// Loads the model, and returns it with its name in requests.
fn open(arguments: &ServeArguments) -> anyhow::Result<(Arc<Loaded>, String)> {
    let weights = &hub::weights(&arguments.weights)?;
    let tokenizer = tokenizer_of(weights)?;
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
    Ok((model, name))
}

/// Last component of a path.
fn name_of(folder: &std::path::Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

/// Serves until a signal or the engine's end.
async fn serve(
    state: Arc<State>,
    address: SocketAddr,
    mut engine: oneshot::Receiver<tandem_model::Result<()>>,
) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.map_err(|error| {
        mistake(format!("cannot listen at {address}: {error}; --host and --port choose another address"))
    })?;
    let address = listener.local_addr().context("cannot listen")?;
    let stop = signals::stop_flag().context("cannot catch signals")?;
    tracing::info!("{} answers at http://{address}/v1; Ctrl-C ends it", state.name().0);
    let stopped = async move {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let mut stopped = std::pin::pin!(stopped);
    let mut connections = Connections::new(Arc::clone(&state), routes::router(Arc::clone(&state)));
    loop {
        tokio::select! {
            accepted = listener.accept() => connections.add(accepted.map(|(stream, _)| stream)).await,
            () = connections.reap() => {}
            () = &mut stopped => break,
            ended = &mut engine => return engine_ended(ended),
        }
    }
    drop(listener);
    let time = state.limits().drain_timeout;
    let under_way = state.metrics().under_way();
    if under_way > 0 {
        tracing::info!(
            "stopping: {under_way} in progress may take {} s more; a second signal ends at once",
            time.as_secs()
        );
    }
    state.draining().send_replace(true);
    tokio::select! {
        drained = tokio::time::timeout(time, connections.ended()) => {
            if drained.is_err() {
                tracing::warn!("{} requests were cut off (--drain-timeout)", state.metrics().under_way());
            }
            Ok(())
        }
        ended = &mut engine => engine_ended(ended),
    }
}

/// Returns the error that ended the engine while clients could still send jobs.
fn engine_ended(ended: Result<tandem_model::Result<()>, oneshot::error::RecvError>) -> anyhow::Result<()> {
    match ended {
        Ok(Err(error)) => Err(error.into()),
        Ok(Ok(())) | Err(_) => bail!("the engine has ended"),
    }
}
