//! Address of a store that rank 0 serves, sent to ranks that know none.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{CommError, Result};
use crate::health::heartbeat;
use crate::launch::meeting::Meeting;
use crate::store::{Store, StoreError};

/// Key of the mark by which the right store is known: another machine may have the same private
/// address.
const KEY: &str = "served-for";
/// Time for an address to answer before the next is tried.
const TRY: Duration = Duration::from_secs(2);

/// Addresses of a store, with a mark that tells it from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreCard {
    host: String,
    port: u16,
    mark: String,
    /// Addresses of the machine's interfaces, without loopback.
    addresses: Vec<IpAddr>,
}

impl StoreCard {
    /// Describes the store that this process serves at `port`, and marks it.
    pub(super) fn new(port: u16, patience: Duration) -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{}-{}", std::process::id(), since.as_nanos());
        Store::connect("127.0.0.1", port, patience)?.set(KEY, mark.as_bytes())?;
        Ok(Self { host: heartbeat::host(), port, mark, addresses: interfaces() })
    }

    /// Encodes the card, a field a line.
    pub(super) fn encode(&self) -> Vec<u8> {
        let fields = [self.host.clone(), self.port.to_string(), self.mark.clone()];
        let addresses = self.addresses.iter().map(IpAddr::to_string);
        fields.into_iter().chain(addresses).collect::<Vec<_>>().join("\n").into_bytes()
    }

    /// Decodes a card; `None` for another version's.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.lines();
        let (host, port, mark) = (lines.next()?, lines.next()?, lines.next()?);
        let addresses = lines.map(str::parse).collect::<std::result::Result<_, _>>().ok()?;
        Some(Self { host: host.to_owned(), port: port.parse().ok()?, mark: mark.to_owned(), addresses })
    }

    /// Connects to the store by the first address at which it is found.
    pub(super) fn connect(&self, meeting: &mut Meeting<'_>, patience: Duration) -> Result<Store> {
        // On one machine the loopback interface needs no network.
        let here = (self.host == heartbeat::host()).then(|| "127.0.0.1".to_owned());
        let others = self.addresses.iter().map(IpAddr::to_string).chain([self.host.clone()]);
        let hosts: Vec<String> = here.into_iter().chain(others).collect();
        loop {
            for host in &hosts {
                if self.is_at(host)? {
                    return Ok(Store::connect(host, self.port, patience)?);
                }
            }
            meeting.look(|| format!("the store of rank 0 at port {} of {}", self.port, hosts.join(", ")))?;
            if meeting.is_overdue() {
                return Err(CommError::Engine {
                    reason: format!(
                        "rank 0 serves the store at port {} of {}, and none of its addresses leads there within {} s: {}; \
                         check the network and firewalls between the machines",
                        self.port,
                        self.host,
                        meeting.deadline().as_secs_f64(),
                        hosts.join(", ")
                    ),
                });
            }
        }
    }

    /// Returns whether an address leads to this store.
    fn is_at(&self, host: &str) -> Result<bool> {
        let store = match Store::connect(host, self.port, TRY) {
            Ok(store) => store,
            Err(StoreError::Unreachable { .. } | StoreError::NotAStore { .. } | StoreError::Lost { .. }) => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        Ok(store.get(KEY, TRY).is_ok_and(|mark| mark == self.mark.as_bytes()))
    }
}

/// Returns the addresses of this machine's interfaces that others may reach, IPv4 first.
fn interfaces() -> Vec<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let mut addresses: Vec<IpAddr> = interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .filter(|address| match address {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
            // A link-local address means nothing without its interface.
            IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
        })
        .collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreServer;

    #[test]
    fn a_card_is_read_as_it_was_written() {
        let card = StoreCard {
            host: "node7".into(),
            port: 4567,
            mark: "1-2".into(),
            addresses: vec!["10.0.0.7".parse().unwrap(), "fd77::1".parse().unwrap()],
        };
        assert_eq!(StoreCard::decode(&card.encode()), Some(card.clone()));
        let alone = StoreCard { addresses: Vec::new(), ..card };
        assert_eq!(StoreCard::decode(&alone.encode()), Some(alone));
        for other in [&b"node7\n4567"[..], b"node7\nport\nmark", b"node7\n1\nmark\nnowhere", b"\xff"] {
            assert_eq!(StoreCard::decode(other), None);
        }
    }

    #[test]
    fn the_store_is_found_and_another_one_at_the_same_port_is_not_taken_for_it() {
        let server = StoreServer::bind(0).unwrap();
        let patience = Duration::from_secs(60);
        let card = StoreCard::new(server.port(), patience).unwrap();
        let mut meeting = Meeting::silent(patience);
        let store = card.connect(&mut meeting, patience).unwrap();
        assert_eq!(store.get(KEY, patience).unwrap(), card.mark.as_bytes());
        let other = StoreCard { mark: "another".into(), addresses: Vec::new(), ..card };
        let mut meeting = Meeting::silent(Duration::ZERO);
        let error = other.connect(&mut meeting, patience).err().unwrap().to_string();
        assert!(error.contains("127.0.0.1") && error.contains(&server.port().to_string()), "{error}");
    }
}
