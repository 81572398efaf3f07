//! Connections: accepted up to a limit, closed when they take too long, and drained at the end.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::error::{ApiError, Rejection};
use super::state::State;
use super::stream::{ClientStream, Deadline, Phase, ResponseBody};

/// Largest header, and bytes that are buffered of a connection.
const BUFFER: usize = 64 << 10;
/// Connections beyond the limit that are told so at the same time.
const REFUSED_AT_ONCE: usize = 32;
/// Time and bytes of a client that still sends when it is answered. Closing at once would reset the
/// connection, and the client would not see the answer.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Number of the connection that sent a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client(pub u64);

/// Connections of the server.
pub(super) struct Connections {
    state: Arc<State>,
    app: Router,
    room: Arc<Semaphore>,
    refused: Arc<Semaphore>,
    tasks: JoinSet<()>,
    next: u64,
}

impl Connections {
    pub(super) fn new(state: Arc<State>, app: Router) -> Self {
        let room = Arc::new(Semaphore::new(state.limits().max_connections.get()));
        let refused = Arc::new(Semaphore::new(REFUSED_AT_ONCE));
        Self { state, app, room, refused, tasks: JoinSet::new(), next: 0 }
    }

    /// Serves a connection that was accepted, if there is room.
    pub(super) async fn add(&mut self, accepted: io::Result<TcpStream>) {
        let stream = match accepted {
            Ok(stream) => stream,
            // The client left before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return,
            Err(error) => {
                tracing::warn!("cannot accept connections: {error}");
                return sleep(ACCEPT_PAUSE).await;
            }
        };
        let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() else { return self.refuse(stream) };
        // Parts of a stream are small and wait for nothing.
        let _ = stream.set_nodelay(true);
        let (state, app, client) = (Arc::clone(&self.state), self.app.clone(), Client(self.next));
        self.next += 1;
        self.tasks.spawn(async move {
            state.metrics().connections.add(1);
            let end = serve(&state, app, stream, client).await;
            state.metrics().connections.add(-1);
            // A client that lingers holds its place no longer than LINGER.
            close(end.stream, &end.last_words).await;
            drop(permit);
        });
    }

    /// Tells a client that there is no room.
    fn refuse(&mut self, stream: TcpStream) {
        self.state.metrics().rejected(Rejection::Connections);
        let Ok(permit) = Arc::clone(&self.refused).try_acquire_owned() else { return };
        let most = self.state.limits().max_connections;
        let error = ApiError::busy(
            Rejection::Connections,
            format!("{most} connections are open (--max-connections); try again later"),
        );
        self.tasks.spawn(async move {
            close(stream, &error.to_bytes()).await;
            drop(permit);
        });
    }

    /// Waits until a connection has ended; forever if there is none.
    pub(super) async fn reap(&mut self) {
        if self.tasks.join_next().await.is_none() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until all connections have ended.
    pub(super) async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// A connection that is no longer served.
struct Ended {
    stream: TcpStream,
    /// Response without a request.
    last_words: Vec<u8>,
}

async fn serve(state: &State, app: Router, stream: TcpStream, client: Client) -> Ended {
    let (limits, phase) = (state.limits(), Phase::new());
    let stream = ClientStream::new(stream, phase.clone(), limits.idle_timeout);
    let (app, begun) = (TowerToHyperService::new(app), phase.clone());
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(client);
        let (busy, response) = (begun.begin(), app.call(request));
        Box::pin(async move {
            let response = response.await?;
            Ok::<_, Infallible>(response.map(|body| ResponseBody { body, _busy: busy }))
        })
    });
    // Headers are timed by `phase`: hyper would close without a response.
    let mut builder = http1::Builder::new();
    builder.header_read_timeout(None).max_buf_size(BUFFER);
    let mut connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut draining = state.draining().subscribe();
    let (mut drain, mut timer) = (pin!(draining.wait_for(|is_draining| *is_draining)), pin!(sleep(LINGER)));
    let mut is_drained = false;
    let end = poll_fn(|context| {
        if !is_drained && drain.as_mut().poll(context).is_ready() {
            is_drained = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        if let Poll::Ready(result) = connection.poll_without_shutdown(context) {
            let is_not_http = result.is_err_and(|error| error.is_parse());
            return Poll::Ready(is_not_http.then_some(Rejection::NotHttp));
        }
        let Some(deadline) = phase.deadline(limits.header_timeout, limits.idle_timeout) else {
            return Poll::Pending;
        };
        let (at, rejection) = match deadline {
            Deadline::Idle(at) => (at, None),
            Deadline::Header(at) => (at, Some(Rejection::SlowHeader)),
        };
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(context).map(|()| rejection)
    });
    let rejection = end.await;
    if let Some(rejection) = rejection {
        state.metrics().rejected(rejection);
    }
    let last_words = match rejection {
        Some(Rejection::SlowHeader) => ApiError::slow_header(limits.header_timeout.as_secs()).to_bytes(),
        _ => Vec::new(),
    };
    Ended { stream: connection.into_parts().io.into_inner().into_inner(), last_words }
}

/// Sends the last words, says that no more follow, and reads what the client still sends.
async fn close(mut stream: TcpStream, last_words: &[u8]) {
    let closed = async {
        stream.write_all(last_words).await?;
        stream.shutdown().await?;
        let (mut left, mut bytes) = (LINGER_BYTES, [0; 4096]);
        while left > 0 {
            match stream.read(&mut bytes).await? {
                0 => break,
                read => left = left.saturating_sub(read),
            }
        }
        io::Result::Ok(())
    };
    // The client is gone, or does not listen.
    let _ = timeout(LINGER, closed).await;
}
