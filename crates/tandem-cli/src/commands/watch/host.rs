//! Names of this server that a request's `Host` may have.
//!
//! A page of another site can make a browser ask this server under a name that the site has pointed here (DNS
//! rebinding), and read the answer. It cannot do so under an address in numbers, or `localhost`.

use std::net::IpAddr;

/// Returns whether a `Host` header is one of this server's, which listens at `address`.
pub(super) fn is_own(host: &str, address: IpAddr) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(name, _)| name),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    if name.eq_ignore_ascii_case("localhost") {
        return true;
    }
    let Ok(named) = name.parse::<IpAddr>() else { return false };
    // Whoever listens at every address may be reached at any.
    named.is_loopback() || named == address || address.is_unspecified()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn only_addresses_in_numbers_and_localhost_are_own() {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for host in ["127.0.0.1", "127.0.0.1:8420", "localhost:1", "LocalHost", "[::1]:8420", "[::1]"] {
            assert!(is_own(host, loopback), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8420",
            "127.0.0.1.evil.example",
            "10.0.0.5:8420",
            "localhost.evil",
        ] {
            assert!(!is_own(host, loopback), "{host}");
        }
        assert!(is_own("10.0.0.5:8420", "10.0.0.5".parse().expect("an address")));
        assert!(is_own("10.0.0.5", IpAddr::V6(Ipv6Addr::UNSPECIFIED)));
        assert!(!is_own("evil.example", IpAddr::V4(Ipv4Addr::UNSPECIFIED)));
    }
}
