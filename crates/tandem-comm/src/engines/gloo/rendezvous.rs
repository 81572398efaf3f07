//! Rendezvous: the ranks of a group find and connect to each other.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mesh::FullMesh;
use crate::error::{CommError, Result};
use crate::health::abort_flag::AbortFlag;
use crate::store::{Store, StoreError};

/// Variable that names the network interface to listen at.
const INTERFACE: &str = "GLOO_SOCKET_IFNAME";

struct PeerAddress {
    /// The machine's address; `None` if an interface was selected by name.
    ip: Option<IpAddr>,
    /// Gloo's connection address for each peer; empty for the rank itself.
    addresses: Vec<Vec<u8>>,
}

/// Connects this rank to all others, which must do the same within `deadline`.
pub(super) fn connect(
    store: &Store,
    rank: usize,
    size: usize,
    deadline: Duration,
    abort_flag: &AbortFlag,
) -> Result<Arc<FullMesh>> {
    let until = Instant::now() + deadline;
    let call = format!("meeting of {size} ranks");
    if store.add(&format!("arrivals/{rank}"), 1)? != 1 {
        let reason = format!(
            "there already is a rank {rank} under this prefix of the store: two processes have the same rank, or an earlier attempt used the prefix"
        );
        return Err(CommError::Invalid { call, reason });
    }
    let interface = std::env::var(INTERFACE).unwrap_or_default();
    let ip = interface.is_empty().then(|| store.local_ip());
    let host = ip.map(|ip| ip.to_string()).unwrap_or_default();
    let place = if interface.is_empty() { &host } else { &interface };
    let failed = |reason: String| CommError::Engine {
        reason: format!(
            "rank {rank} cannot listen at {place}: {reason}; {INTERFACE} chooses the network interface"
        ),
    };
    let mesh = FullMesh::listen(rank, size, &host, &interface, deadline, abort_flag.clone());
    let mesh = mesh.map_err(failed)?;
    let address = |peer| if peer == rank { Ok(Vec::new()) } else { mesh.address(peer).map_err(failed) };
    let card = PeerAddress { ip, addresses: (0..size).map(address).collect::<Result<_>>()? };
    store.set(&key(rank), &card.encode())?;
    await_all(store, &call, size, deadline)?;
    for peer in (0..size).filter(|&peer| peer != rank) {
        let bytes = store.get(&key(peer), until.saturating_duration_since(Instant::now()))?;
        let theirs = PeerAddress::decode(&bytes).filter(|card| card.addresses.len() == size);
        let theirs = theirs.ok_or_else(|| CommError::Engine {
            reason: format!(
                "rank {rank} cannot read the address of rank {peer}: all ranks must run the same program with {size} ranks"
            ),
        })?;
        reachable(rank, card.ip, peer, theirs.ip)?;
        mesh.connect(peer, &theirs.addresses[rank]).map_err(|_| {
            if Instant::now() < until {
                return CommError::PeerLost { rank: peer };
            }
            CommError::Deadline { call: call.clone(), missing: vec![peer], deadline }
        })?;
    }
    Ok(Arc::new(mesh))
}

/// Waits until every rank has published its addresses.
fn await_all(store: &Store, call: &str, size: usize, deadline: Duration) -> Result<()> {
    let keys: Vec<String> = (0..size).map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    match store.wait(&keys, deadline) {
        Err(StoreError::Timeout { .. }) => {}
        other => return Ok(other?),
    }
    let mut missing = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        if !store.check(&[key])? {
            missing.push(rank);
        }
    }
    if missing.is_empty() {
        // The last rank arrived between the two checks.
        return Ok(());
    }
    Err(CommError::Deadline { call: call.to_owned(), missing, deadline })
}

/// Checks that a loopback address has only peers with one too.
fn reachable(rank: usize, ip: Option<IpAddr>, peer: usize, peers: Option<IpAddr>) -> Result<()> {
    let (Some(ip), Some(peers)) = (ip, peers) else { return Ok(()) };
    if ip.is_loopback() == peers.is_loopback() {
        return Ok(());
    }
    let ((hidden, at), (other, other_at)) =
        if ip.is_loopback() { ((rank, ip), (peer, peers)) } else { ((peer, peers), (rank, ip)) };
    Err(CommError::Engine {
        reason: format!(
            "rank {hidden} listens at {at}, which rank {other} at {other_at} cannot reach: reach the store by an address that all machines know, or set {INTERFACE} for rank {hidden}"
        ),
    })
}

fn key(rank: usize) -> String {
    format!("addresses/{rank}")
}

impl PeerAddress {
    /// Encodes the machine's address and Gloo's addresses, each behind its length.
    fn encode(&self) -> Vec<u8> {
        let ip = self.ip.map(|ip| ip.to_string()).unwrap_or_default().into_bytes();
        let fields = std::iter::once(&ip).chain(&self.addresses);
        fields.flat_map(|field| [&(field.len() as u32).to_le_bytes()[..], field].concat()).collect()
    }

    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut fields = Vec::new();
        while let Some((len, rest)) = bytes.split_first_chunk::<4>() {
            let (field, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            fields.push(field.to_vec());
            bytes = rest;
        }
        let ip = String::from_utf8(fields.first()?.clone()).ok()?;
        let ip = if ip.is_empty() { None } else { Some(ip.parse().ok()?) };
        bytes.is_empty().then(|| Self { ip, addresses: fields.split_off(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_read_as_it_was_written_and_not_when_it_was_cut() {
        let card = PeerAddress {
            ip: Some("10.0.0.7".parse().unwrap()),
            addresses: vec![vec![1, 2, 3], vec![], vec![4; 300]],
        };
        let bytes = card.encode();
        let read = PeerAddress::decode(&bytes).unwrap();
        assert_eq!((read.ip, read.addresses), (card.ip, card.addresses));
        for cut in [0, 1, 5, bytes.len() - 1] {
            assert!(PeerAddress::decode(&bytes[..cut]).is_none(), "cut at {cut}");
        }
    }

    #[test]
    fn a_loopback_address_among_others_is_named() {
        let ip = |text: &str| Some(text.parse().unwrap());
        assert!(reachable(0, ip("127.0.0.1"), 1, ip("127.0.0.1")).is_ok());
        assert!(reachable(0, ip("10.0.0.1"), 1, ip("10.0.0.2")).is_ok());
        assert!(reachable(0, None, 1, ip("127.0.0.1")).is_ok());
        for error in [
            reachable(0, ip("127.0.0.1"), 1, ip("10.0.0.2")).unwrap_err(),
            reachable(1, ip("10.0.0.2"), 0, ip("127.0.0.1")).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                text.contains("rank 0 listens at 127.0.0.1, which rank 1 at 10.0.0.2 cannot reach"),
                "{text}"
            );
        }
    }
}
