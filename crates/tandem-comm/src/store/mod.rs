//! A store of small values, at which processes meet.
//!
//! Ranks that know one address exchange everything else there: their own addresses, counters, and why one of them gave up.
//! The protocol is that of PyTorch's `TCPStore`, because under `torchrun` the agent already serves one at
//! `MASTER_ADDR:MASTER_PORT` and nobody else can bind that port: there every rank is a [`Store`], a client. Under other
//! launchers the first rank serves a [`StoreServer`] to the others and to itself.
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
//! A store knows no passwords: whoever reaches the port can read and write. Keep it inside the cluster's network.

mod client;
mod protocol;
mod server;

pub use client::Store;
pub use server::StoreServer;

use std::time::Duration;

/// What can go wrong with a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nobody served in time.
    #[error(
        "no store at {address} within {} s, the last attempt: {reason}; check that the address is right, that its process runs, and that no firewall is in between",
        waited.as_secs_f64()
    )]
    Unreachable {
        /// Host and port.
        address: String,
        /// How long was tried.
        waited: Duration,
        /// Why the last attempt failed.
        reason: String,
    },
    /// The server does not speak the protocol.
    #[error("what serves at {address} is no store: {found}; is the port another program's?")]
    NotAStore {
        /// Host and port.
        address: String,
        /// What it did.
        found: String,
    },
    /// The port cannot be served.
    #[error(
        "cannot serve a store at port {port}: {reason}; if a launcher or another job serves there, be its client or take another port"
    )]
    Bind {
        /// The port.
        port: u16,
        /// Why not.
        reason: String,
    },
    /// Nobody set the keys in time.
    #[error("nobody set {} in the store at {address} within {} s", keys.join(", "), waited.as_secs_f64())]
    Timeout {
        /// Host and port.
        address: String,
        /// What was waited for.
        keys: Vec<String>,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection broke, or the server went silent. This client is of no further use.
    #[error(
        "lost the store at {address} during {request}: {reason}; its process ended, or the network is down"
    )]
    Lost {
        /// Host and port.
        address: String,
        /// What was asked.
        request: String,
        /// Why.
        reason: String,
    },
    /// A key or a value is beyond what servers take; nothing was sent.
    #[error("{request}: {len} bytes, and a store takes at most {limit}")]
    TooLong {
        /// What was asked.
        request: String,
        /// Bytes of the key or value.
        len: usize,
        /// The most that are allowed.
        limit: u64,
    },
}
