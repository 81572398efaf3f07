//! Connections between the GPUs of this machine.

use std::ffi::{CStr, CString, c_char, c_int};

use super::context::Cuda;
use super::libraries;
use super::nvml::Nvml;
use super::raw::DeviceHandle;
use crate::Result;

/// Connection from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// True with peer access; else numbers pass through host memory.
    pub access: bool,
    /// True for NVLink, false for PCIe, `None` if NVML cannot tell.
    pub nvlink: Option<bool>,
}

/// Connections between the GPUs that this process may use, by number. There is none from a GPU to
/// itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Links {
    /// One row per GPU.
    pub from: Vec<Vec<Option<Link>>>,
    /// Reason why NVML does not report NVLink.
    pub unknown: Option<String>,
}

/// Queries the driver and NVML.
pub fn links() -> Result<Links> {
    let cuda = libraries::driver()?;
    let all: Vec<usize> = (0..cuda.count()?).collect();
    links_of(&cuda, &all, Nvml::open().map(|(_, nvml)| nvml))
}

/// [`links`] of these GPUs with open libraries.
pub(super) fn links_of(cuda: &Cuda, ordinals: &[usize], nvml: Result<Nvml>) -> Result<Links> {
    let devices = ordinals.iter().map(|&ordinal| cuda.handle(ordinal)).collect::<Result<Vec<_>>>()?;
    let places = devices.iter().map(|&device| cuda.place(device)).collect::<Result<Vec<_>>>()?;
    // The inventory reports the reason.
    let mut unknown = nvml.is_err().then(|| "NVML cannot be used".to_owned());
    let mut nvlink = |a: usize, b: usize| {
        let asked = nvml.as_ref().ok()?.is_nvlink([&places[a], &places[b]]);
        asked.map_err(|error| unknown = Some(error.to_string())).ok()
    };
    let mut from = Vec::with_capacity(devices.len());
    for a in 0..devices.len() {
        let mut row = Vec::with_capacity(devices.len());
        for b in 0..devices.len() {
            row.push(match a == b {
                true => None,
                false => {
                    Some(Link { access: cuda.can_access(devices[a], devices[b])?, nvlink: nvlink(a, b) })
                }
            });
        }
        from.push(row);
    }
    Ok(Links { from, unknown })
}

impl Cuda {
    /// Returns whether a GPU has peer access to another's memory.
    fn can_access(&self, device: DeviceHandle, other: DeviceHandle) -> Result<bool> {
        let mut can = 0;
        // SAFETY: the answer is written to where it is.
        let outcome = unsafe { (self.functions.can_access_peer)(&raw mut can, device, other) };
        self.check("asking whether a GPU reaches another", outcome)?;
        Ok(can != 0)
    }

    /// Returns the other GPUs that have peer access to a GPU's memory.
    pub(super) fn reaching(&self, device: DeviceHandle) -> Result<Vec<DeviceHandle>> {
        let mut found = Vec::new();
        for ordinal in 0..self.count()? {
            let other = self.handle(ordinal)?;
            if other != device && self.can_access(other, device)? {
                found.push(other);
            }
        }
        Ok(found)
    }

    /// Returns the PCI address of a GPU.
    fn place(&self, device: DeviceHandle) -> Result<CString> {
        let mut place: [c_char; 32] = [0; 32];
        // SAFETY: a text is written that is no longer than its place and ends in zero.
        unsafe {
            let outcome = (self.functions.pci_bus_id)(place.as_mut_ptr(), place.len() as c_int, device);
            self.check("asking where a GPU is on the bus", outcome)?;
            Ok(CStr::from_ptr(place.as_ptr()).to_owned())
        }
    }
}
