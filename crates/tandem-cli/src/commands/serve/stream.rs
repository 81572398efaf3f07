//! A client's connection, watched: how long a header takes, how long nothing happens, and how long the
//! client takes no byte of a response.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// Event that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// The first byte of a request, since this time.
    Request(Instant),
    /// The rest of a header, since this time.
    Header(Instant),
    /// The response to a request, or its body.
    Response,
}

/// Deadline of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deadline {
    /// Latest time of the next request's first byte.
    Idle(Instant),
    /// Latest time of a header's end.
    Header(Instant),
}

/// Phase of a connection, shared by its stream and its requests.
#[derive(Clone)]
pub(super) struct Phase(Arc<Mutex<Waits>>);

impl Phase {
    /// Creates the phase of a new connection. It has as long for its first header as a header has.
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Waits::Header(Instant::now()))))
    }

    fn change(&self, change: impl FnOnce(&mut Waits)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes bytes of the client.
    fn received(&self) {
        self.change(|waits| {
            if let Waits::Request(_) = waits {
                *waits = Waits::Header(Instant::now());
            }
        });
    }

    /// Begins a request, whose header is complete.
    pub(super) fn begin(&self) -> Busy {
        self.change(|waits| *waits = Waits::Response);
        Busy(self.clone())
    }

    /// Returns the time at which the connection has waited too long, unless a request is in progress.
    pub(super) fn deadline(&self, header: Duration, idle: Duration) -> Option<Deadline> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Waits::Request(since) => Some(Deadline::Idle(since + idle)),
            Waits::Header(since) => Some(Deadline::Header(since + header)),
            Waits::Response => None,
        }
    }
}

/// A request in progress; dropped with the body of its response.
pub(super) struct Busy(Phase);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.change(|waits| *waits = Waits::Request(Instant::now()));
    }
}

/// Body of a response, and the phase that it ends.
pub(super) struct ResponseBody {
    pub body: Body,
    pub _busy: Busy,
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// TCP stream of a client.
pub(super) struct ClientStream {
    stream: TcpStream,
    phase: Phase,
    /// Time in which the client must take a byte of those that wait for it.
    patience: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    pub(super) fn new(stream: TcpStream, phase: Phase, patience: Duration) -> Self {
        Self { stream, phase, patience, stalled: None }
    }

    /// Returns the stream without its watch.
    pub(super) fn into_inner(self) -> TcpStream {
        self.stream
    }

    /// Bounds the time of a write that makes no progress.
    fn bound(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.patience;
        ready!(self.stalled.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes no bytes")))
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = bytes.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, bytes);
        if bytes.filled().len() > before {
            self.phase.received();
        }
        read
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bound(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.bound(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Duration = Duration::from_secs(10);
    const IDLE: Duration = Duration::from_secs(60);

    #[test]
    fn a_connection_has_one_deadline_at_a_time() {
        let phase = Phase::new();
        let deadline = || phase.deadline(HEADER, IDLE);
        assert!(matches!(deadline(), Some(Deadline::Header(_))), "a new connection must ask soon");
        let first = deadline();
        phase.received();
        assert_eq!(deadline(), first, "each byte gives no time to the next");
        let busy = phase.begin();
        phase.received();
        assert_eq!(deadline(), None, "bytes of a body are no header");
        drop(busy);
        assert!(matches!(deadline(), Some(Deadline::Idle(_))));
        phase.received();
        assert!(matches!(deadline(), Some(Deadline::Header(_))));
    }
}
