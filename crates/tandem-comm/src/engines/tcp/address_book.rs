//! Addresses of the job's ranks, and connections to them.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Fault;
use super::handshake::{Hello, Purpose, Token};
use super::interface::INTERFACE;
use super::link::Connection;
use super::member::Member;
use super::memory::{SharedMemory, Side};
use super::schedule::before;
use super::socket::Socket;
use crate::error::CommError;
use crate::store::Store;

/// Time of one attempt to connect, after which a failure elsewhere is noticed.
const ATTEMPT: Duration = Duration::from_secs(2);

/// A rank's address: its card in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) address: SocketAddr,
    /// The machine, as long as it runs.
    pub(super) host: String,
    /// Name of the Unix socket; empty without.
    pub(super) local: String,
}

impl Card {
    pub(super) fn encode(&self) -> String {
        format!("1\n{}\n{}\n{}", self.address, self.host, self.local)
    }

    /// Decodes a card; `None` for another version's.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let lines: Vec<&str> = std::str::from_utf8(bytes).ok()?.split('\n').collect();
        let ["1", address, host, local] = lines[..] else { return None };
        Some(Self { address: address.parse().ok()?, host: host.to_owned(), local: local.to_owned() })
    }
}

pub(super) struct AddressBook {
    /// Store with the job's prefix.
    store: Store,
    /// This rank's card.
    own: Card,
    /// This rank in the job.
    rank: usize,
    shares_memory: bool,
    cards: Mutex<HashMap<usize, Card>>,
}

/// Returns the key of a rank's card.
pub(super) fn key(rank: usize) -> String {
    format!("addresses/{rank}")
}

impl AddressBook {
    pub(super) fn new(store: Store, rank: usize, own: Card, shares_memory: bool) -> Self {
        Self { store, own, rank, shares_memory, cards: Mutex::default() }
    }

    fn card(&self, rank: usize, deadline: Duration) -> Result<Card, Fault> {
        let mut cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(card) = cards.get(&rank) {
            return Ok(card.clone());
        }
        let bytes = self.store.get(&key(rank), deadline).map_err(|error| Fault::Other(error.into()))?;
        let card = Card::decode(&bytes).ok_or_else(|| {
            let own = self.rank;
            let reason = format!(
                "rank {own} cannot read the address of rank {rank}: all ranks must run the same program"
            );
            Fault::Other(CommError::Engine { reason })
        })?;
        Ok(cards.entry(rank).or_insert(card).clone())
    }

    /// Connects to a rank of a group, to send to it.
    pub(super) fn connect(
        &self,
        token: &Token,
        member: &Member,
        peer: usize,
        purpose: Purpose,
    ) -> Result<Arc<Connection>, Fault> {
        let of_job = member.members[peer];
        let card = self.card(of_job, member.deadline)?;
        let is_here = !card.local.is_empty() && card.host == self.own.host;
        let local = if is_here { connect_local(&card.local) } else { None };
        let distance = before(peer, member.rank, member.size());
        let capacity = purpose.ring_bytes(distance);
        let (socket, memory) = match local {
            Some(socket) if self.shares_memory && capacity > 0 => (socket, SharedMemory::create(capacity)),
            Some(socket) => (socket, None),
            None => (self.connect_remote(&card, member, peer)?, None),
        };
        let capacity = if memory.is_some() { capacity } else { 0 };
        let (memory, file) = memory.unzip();
        let hello = Hello { group: member.id, from: member.rank, to: peer, purpose, capacity };
        hello.send(&socket, token, file.as_ref()).map_err(|_| Fault::Gone(peer))?;
        Ok(Arc::new(Connection { peer, side: Side::Writer, socket, memory }))
    }

    fn connect_remote(&self, card: &Card, member: &Member, peer: usize) -> Result<Socket, Fault> {
        let until = Instant::now() + member.deadline;
        loop {
            if member.must_end() {
                return Err(Fault::Over);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::Late(peer));
            }
            let failed = match TcpStream::connect_timeout(&card.address, left.min(ATTEMPT)) {
                Ok(stream) => return Socket::tcp(stream).map_err(|_| Fault::Gone(peer)),
                Err(error) => error,
            };
            match failed.kind() {
                // A rank listens before it tells its address: its process has ended. Or it listens
                // at an address that is another machine's own.
                ErrorKind::ConnectionRefused => {
                    self.check_reachable(card, member.members[peer])?;
                    return Err(Fault::Gone(peer));
                }
                ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted => return Err(Fault::Gone(peer)),
                ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::Interrupted => {}
                _ => {
                    self.check_reachable(card, member.members[peer])?;
                    let (own, other, at) = (self.rank, member.members[peer], card.address);
                    let reason = format!(
                        "rank {own} cannot reach rank {other} at {at}: {failed}; {INTERFACE} chooses the network \
                         interface of rank {other}"
                    );
                    return Err(Fault::Other(CommError::Engine { reason }));
                }
            }
        }
    }

    /// Checks that a loopback address belongs to this machine.
    fn check_reachable(&self, card: &Card, other: usize) -> Result<(), Fault> {
        if !card.address.ip().is_loopback() || card.host == self.own.host {
            return Ok(());
        }
        let (at, own, own_at) = (card.address.ip(), self.rank, self.own.address.ip());
        Err(Fault::Other(CommError::Engine {
            reason: format!(
                "rank {other} listens at {at}, which rank {own} at {own_at} cannot reach: reach the store by an \
                 address that all machines know, or set {INTERFACE} for rank {other}"
            ),
        }))
    }
}

/// Listens at a free port of an address, and at a Unix socket of this host.
pub(super) fn listen(ip: IpAddr, name: &str) -> std::io::Result<(TcpListener, Option<UnixListener>)> {
    Ok((TcpListener::bind((ip, 0))?, listen_local(name)))
}

/// Names of Unix sockets without files exist on Linux alone.
#[cfg(target_os = "linux")]
fn listen_local(name: &str) -> Option<UnixListener> {
    use std::os::linux::net::SocketAddrExt;

    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).ok()?;
    UnixListener::bind_addr(&address).ok()
}

/// Ranks of one host may be in different network namespaces; then they use TCP.
#[cfg(target_os = "linux")]
fn connect_local(name: &str) -> Option<Socket> {
    use std::os::linux::net::SocketAddrExt;

    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).ok()?;
    Socket::unix(UnixStream::connect_addr(&address).ok()?).ok()
}

#[cfg(not(target_os = "linux"))]
fn listen_local(_: &str) -> Option<UnixListener> {
    None
}

#[cfg(not(target_os = "linux"))]
fn connect_local(_: &str) -> Option<Socket> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_read_as_it_was_written_and_not_another_versions() {
        for address in ["10.0.0.7:4000", "[fd77::1]:29601"] {
            let card =
                Card { address: address.parse().unwrap(), host: "boot".into(), local: "tandem-1".into() };
            let text = card.encode();
            assert_eq!(Card::decode(text.as_bytes()), Some(card));
            assert_eq!(Card::decode(text.replacen('1', "2", 1).as_bytes()), None);
        }
        assert_eq!(Card::decode(b"1\nnowhere\n\n"), None);
        assert_eq!(Card::decode(b""), None);
    }
}
