//! `tandem watch`: a live page of runs, for browsers of this machine.
//!
//! One thread follows the files (`followed.rs`); handlers give the page and its updates. Nothing can be changed
//! through it.

mod followed;
mod host;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use self::followed::{Followed, Version};
use crate::args::WatchArguments;
use crate::exit::{Exit, mistake};
use crate::page::{self, Panel};
use crate::signals;

/// Port that is tried first, so that an ssh forwarding can stay.
const PORT: u16 = 8420;

const ICON: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 16 16\"><path d=\"M1 13 5 7l4 3 6-8\" \
                    fill=\"none\" stroke=\"#2563eb\" stroke-width=\"2\"/></svg>";

pub(crate) fn run(arguments: &WatchArguments) -> anyhow::Result<Exit> {
    let followed = Followed::find(&arguments.runs)?;
    if followed.num_left_out > 0 {
        tracing::info!(
            "{} more runs are there; the {} that were written last are shown: name those that you want",
            followed.num_left_out,
            page::MOST_RUNS
        );
    }
    if !arguments.address.is_loopback() {
        tracing::warn!(
            "whoever reaches {} can read these runs and their samples; with the default address, ssh -L \
             brings the page to another machine",
            arguments.address
        );
    }
    let stop = signals::stop_flag().context("cannot catch signals")?;
    let (versions, version) = watch::channel(Version::default());
    // Whoever looks subscribes; the channel itself is no onlooker.
    drop(version);
    let versions = Arc::new(versions);
    let follower = std::thread::Builder::new().name("follower".to_owned()).spawn({
        let (versions, stop) = (Arc::clone(&versions), Arc::clone(&stop));
        move || followed.follow(&versions, &stop)
    });
    let follower = follower.context("cannot start a thread")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("cannot start threads")?;
    let served = runtime.block_on(serve(arguments, versions, &stop));
    // Open streams end with their tasks.
    drop(runtime);
    stop.store(true, Ordering::Relaxed);
    follower.join().map_err(|_| anyhow::anyhow!("the follower has panicked"))?;
    served.map(|()| Exit::Done)
}

async fn serve(
    arguments: &WatchArguments,
    versions: Arc<watch::Sender<Version>>,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let listener = listen(arguments).await?;
    let address = listener.local_addr().context("cannot listen")?;
    let app = Router::new()
        .route("/", get(|| async { of_type("text/html; charset=utf-8", page::live()) }))
        .route("/page.css", get(|| async { of_type("text/css; charset=utf-8", page::STYLE) }))
        .route("/page.js", get(|| async { of_type("text/javascript; charset=utf-8", page::SCRIPT) }))
        .route("/live.js", get(|| async { of_type("text/javascript; charset=utf-8", page::LIVE_SCRIPT) }))
        .route("/icon.svg", get(|| async { of_type("image/svg+xml", ICON) }))
        .route("/events", get(events))
        .with_state(versions)
        .layer(middleware::from_fn_with_state(address.ip(), guard));
    tracing::info!("watching at http://{address}; Ctrl-C ends it");
    if address.ip().is_loopback() {
        let (port, host) = (address.port(), rustix::system::uname());
        tracing::info!(
            "from another machine: ssh -L {port}:{address} {}, then http://127.0.0.1:{port} there",
            host.nodename().to_string_lossy()
        );
    }
    let stopped = async {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        served = axum::serve(listener, app).into_future() => served.context("cannot serve"),
        () = stopped => Ok(()),
    }
}

/// Listens at the given port, or at the usual one if it is free, else at any.
async fn listen(arguments: &WatchArguments) -> anyhow::Result<TcpListener> {
    let bind = |port| TcpListener::bind(SocketAddr::new(arguments.address, port));
    let listener = match arguments.port {
        Some(port) => bind(port).await,
        None => match bind(PORT).await {
            Ok(listener) => Ok(listener),
            Err(_) => bind(0).await,
        },
    };
    listener.map_err(|error| {
        let address = SocketAddr::new(arguments.address, arguments.port.unwrap_or(PORT));
        mistake(format!("cannot listen at {address}: {error}; --address and --port choose another address"))
    })
}

fn of_type(kind: &'static str, body: impl IntoResponse) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static(kind))], body).into_response()
}

/// Refuses requests under foreign names, and forbids pages to load anything else.
async fn guard(State(address): State<IpAddr>, request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let mut response = match host {
        Some(name) if host::is_own(name, address) => next.run(request).await,
        _ => {
            (StatusCode::FORBIDDEN, "ask for this page by the server's address in numbers, or as localhost\n")
                .into_response()
        }
    };
    let headers = [
        (CONTENT_SECURITY_POLICY, page::CONTENT_POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Sends all panels, and then those that change. A slow reader gets fewer versions, not old ones.
async fn events(State(versions): State<Arc<watch::Sender<Version>>>) -> Response {
    let mut version = versions.subscribe();
    // What was made before may be old, but it is there at once.
    version.mark_changed();
    let (sender, updates) = mpsc::channel::<String>(1);
    tokio::spawn(async move {
        let mut known: Arc<Vec<Panel>> = Arc::default();
        while version.changed().await.is_ok() {
            let new = version.borrow_and_update().clone();
            if new.panels.is_empty() {
                continue;
            }
            let update = new.update_of(&known);
            known = new.panels;
            tokio::select! {
                sent = sender.send(update) => if sent.is_err() { break },
                () = sender.closed() => break,
            }
        }
    });
    let updates =
        ReceiverStream::new(updates).map(|update| Ok::<_, Infallible>(Event::default().data(update)));
    Sse::new(updates).keep_alive(KeepAlive::default()).into_response()
}
