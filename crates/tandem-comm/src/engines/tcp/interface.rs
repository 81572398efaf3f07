//! Address at which a rank listens.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Variable that names the network interface, or an address of this machine.
pub(super) const INTERFACE: &str = "TANDEM_SOCKET_IFNAME";
/// PyTorch's name of the same, read if the first is not set.
pub(super) const GLOO_INTERFACE: &str = "GLOO_SOCKET_IFNAME";

/// Returns the address that `name`, an interface or an address, stands for. IPv4 is preferred.
pub(super) fn address_of(name: &str) -> Result<IpAddr, String> {
    if let Ok(ip) = name.trim_start_matches('[').trim_end_matches(']').parse() {
        return Ok(ip);
    }
    let all = addresses().map_err(|error| format!("the interfaces cannot be listed: {error}"))?;
    let of_name: Vec<IpAddr> =
        all.iter().filter(|(interface, _)| interface == name).map(|(_, ip)| *ip).collect();
    let found = of_name.iter().find(|ip| ip.is_ipv4()).or_else(|| of_name.first());
    found.copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        format!("no interface {name} has an address; there are {}", names.join(", "))
    })
}

/// Lists interfaces and their addresses, without link-local IPv6 ones, which are no use without
/// the interface of the other side.
fn addresses() -> std::io::Result<Vec<(String, IpAddr)>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the function writes a list to `first`, freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let (mut found, mut next) = (Vec::new(), first);
    while !next.is_null() {
        // SAFETY: an entry of the list, which lives until it is freed.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        // SAFETY: the address is null or of the family that it names; the name ends with a zero.
        let (ip, name) = unsafe { (ip(entry.ifa_addr), CStr::from_ptr(entry.ifa_name)) };
        let is_usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        if let Some(ip) = ip.filter(is_usable) {
            found.push((name.to_string_lossy().into_owned(), ip));
        }
    }
    // SAFETY: the list from above, of which nothing is used any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// # Safety
/// `address` is null or points to an address of the family that it names.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees it. Entries need not be aligned for their type.
    unsafe {
        match libc::c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_stands_for_itself_and_the_loopback_for_its_own() {
        assert_eq!(address_of("10.1.2.3").unwrap(), IpAddr::from([10, 1, 2, 3]));
        assert_eq!(address_of("[::1]").unwrap(), IpAddr::from(Ipv6Addr::LOCALHOST));
        let loopback = if cfg!(target_os = "macos") { "lo0" } else { "lo" };
        assert!(address_of(loopback).unwrap().is_loopback());
        let error = address_of("no-such-interface").unwrap_err();
        assert!(error.contains("no interface no-such-interface") && error.contains(loopback), "{error}");
    }
}
