//! Rendezvous: the ranks of a job tell each other their addresses and the token.

use std::io::Read;
use std::time::Duration;

use super::Options;
use super::address_book::{AddressBook, Card, key, listen};
use super::handshake::{TOKEN, Token};
use super::interface::{self, INTERFACE};
use super::node::Node;
use crate::error::{CommError, Result};
use crate::health::failure;
use crate::launch::meeting::Meeting;
use crate::store::{Store, StoreError};

/// Time of one wait for the others, after which a signal is noticed.
const SLICE: Duration = Duration::from_millis(500);
/// Key that the last rank to arrive sets.
const COMPLETE: &str = "complete";

/// Starts this rank's node when all ranks have arrived, before the meeting's deadline.
///
/// A rank sends the store six small requests, whatever the number of ranks, and three in every second that
/// it waits.
pub(super) fn meet(
    store: &Store,
    rank: usize,
    size: usize,
    meeting: &mut Meeting<'_>,
    options: &Options,
) -> Result<Node> {
    let call = format!("meeting of {size} ranks");
    if store.add(&format!("arrivals/{rank}"), 1)? != 1 {
        let reason = format!(
            "there already is a rank {rank} under this prefix of the store: two processes have the same rank, or an earlier attempt used the prefix"
        );
        return Err(CommError::Invalid { call, reason });
    }
    let token = token(store)?;
    let node = start(store, rank, token, options)?;
    if store.add("arrived", 1)? == size as i64 {
        store.set(COMPLETE, b"")?;
    }
    loop {
        match store.wait(&[COMPLETE], SLICE) {
            Err(StoreError::Timeout { .. }) => {}
            other => return other.map(|()| node).map_err(CommError::Store),
        }
        // A rank that was told to stop, or that found an error, will not come.
        if let Some(failure) = failure::filed(store)? {
            return Err(failure);
        }
        meeting
            .look(|| awaited(store, rank, size).unwrap_or_else(|error| format!("other ranks ({error})")))?;
        if meeting.is_overdue() {
            return match missing(store, size)? {
                // The last rank arrived between the two checks.
                none if none.is_empty() => Ok(node),
                missing => Err(CommError::Deadline { call, missing, deadline: meeting.deadline() }),
            };
        }
    }
}

/// Names what a rank waits for. One rank asks for each other, and the rest for their number.
fn awaited(store: &Store, rank: usize, size: usize) -> std::result::Result<String, StoreError> {
    if rank == 0 {
        return Ok(crate::error::ranks(&missing(store, size)?));
    }
    Ok(format!("{} other ranks of {size}, which rank 0 names", size as i64 - store.add("arrived", 0)?))
}

/// Returns the ranks that have not told their addresses.
fn missing(store: &Store, size: usize) -> std::result::Result<Vec<usize>, StoreError> {
    let mut missing = Vec::new();
    for rank in 0..size {
        if !store.check(&[&key(rank)])? {
            missing.push(rank);
        }
    }
    Ok(missing)
}

/// Returns the job's token: the first rank's.
fn token(store: &Store) -> Result<Token> {
    let own: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = store.compare_set("token", b"", own.as_bytes())?;
    let digits = std::str::from_utf8(&text).unwrap_or_default();
    let mut token = [0; TOKEN];
    for (i, byte) in token.iter_mut().enumerate() {
        let digits = digits.get(2 * i..2 * i + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        *byte = digits.ok_or_else(|| CommError::Engine {
            reason: "the token in the store is not one: all ranks must run the same program".to_owned(),
        })?;
    }
    Ok(token)
}

fn random() -> Result<Token> {
    let mut bytes = [0; TOKEN];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map(|()| bytes).map_err(|error| CommError::Engine {
        reason: format!("no random numbers for the job's token, from /dev/urandom: {error}"),
    })
}

/// Listens, and tells the store where.
fn start(store: &Store, rank: usize, token: Token, options: &Options) -> Result<Node> {
    let chosen = options.interface.as_deref();
    let failed = |place: &str, reason: String| CommError::Engine {
        reason: format!(
            "rank {rank} cannot listen at {place}: {reason}; {INTERFACE} chooses the network interface"
        ),
    };
    let ip = match chosen {
        Some(name) => interface::address_of(name).map_err(|reason| failed(name, reason))?,
        None => store.local_ip().to_canonical(),
    };
    let failed = |error: std::io::Error| failed(&ip.to_string(), error.to_string());
    // The name need not be secret, but new: an abstract name belongs to the whole machine.
    let local: String = random()?[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let local = format!("tandem-{local}");
    let (tcp, unix) = listen(ip, &local).map_err(failed)?;
    let own = Card {
        address: tcp.local_addr().map_err(failed)?,
        host: host(),
        local: if unix.is_some() && options.same_host { local } else { String::new() },
    };
    store.set(&key(rank), own.encode().as_bytes())?;
    let addresses = AddressBook::new(store.clone(), rank, own, options.same_host);
    Node::start(token, addresses, tcp, unix).map_err(failed)
}

/// Returns a name of this machine that no other has, or an empty one.
fn host() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}
