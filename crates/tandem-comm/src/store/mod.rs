//! Key-value store at which the processes of a job meet.
//!
//! Ranks know its address and exchange everything else there: addresses, counters, failures. The
//! protocol is PyTorch's `TCPStore`: torchrun's agent serves one at `MASTER_ADDR:MASTER_PORT`,
//! where every rank is a [`Store`], a client. Under other launchers rank 0 serves a
//! [`StoreServer`].
//!
//! ```
//! use std::time::Duration;
//! use tandem_comm::store::{Store, StoreServer};
//!
//! let server = StoreServer::bind(0)?;
//! let store = Store::connect("127.0.0.1", server.port(), Duration::from_secs(10))?;
//! let attempt = store.prefixed("attempt-0/");
//! attempt.set("address", b"10.0.0.7:4000")?;
//! assert_eq!(store.get("attempt-0/address", Duration::from_secs(10))?, b"10.0.0.7:4000");
//! assert_eq!(attempt.add("ranks", 1)?, 1);
//! # Ok::<(), tandem_comm::store::StoreError>(())
//! ```
//!
//! A store has no passwords: anyone who reaches the port can read and write. Keep it inside the
//! cluster's network.

mod client;
mod protocol;
mod server;

pub use client::Store;
pub use server::StoreServer;

use std::time::Duration;

/// Errors of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum StoreError {
    /// No server answered in time.
    #[error(
        "no store at {address} within {} s, the last attempt: {reason}; check that the address is right, that its process runs, and that no firewall is in between",
        waited.as_secs_f64()
    )]
    Unreachable { address: String, waited: Duration, reason: String },
    /// The server does not speak the protocol.
    #[error("the server at {address} is not a store: {found}; does another program use this port?")]
    NotAStore { address: String, found: String },
    /// The port cannot be served.
    #[error(
        "cannot serve a store at port {port}: {reason}; if a launcher or another job serves there, connect to it or use another port"
    )]
    Bind { port: u16, reason: String },
    /// Keys without a value in time.
    #[error("{} not set in the store at {address} within {} s", keys.join(", "), waited.as_secs_f64())]
    Timeout { address: String, keys: Vec<String>, waited: Duration },
    /// A broken connection or a silent server. This client is unusable.
    #[error(
        "lost the store at {address} during {request}: {reason}; its process ended, or the network is down"
    )]
    Lost { address: String, request: String, reason: String },
    /// A key or value that is too long; nothing was sent.
    #[error("{request}: {len} bytes, but a store accepts at most {limit}")]
    TooLong { request: String, len: usize, limit: u64 },
}
