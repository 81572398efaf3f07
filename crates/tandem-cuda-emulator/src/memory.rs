//! Device memory: host memory under other addresses.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tandem_kernels::cuda::driver::Region;
use tandem_kernels::{KernelError, Result};

use crate::driver::Streams;

/// Bit that marks device addresses; no host address has it.
const DEVICE: u64 = 1 << 62;

/// Granularity of mappings.
const GRAIN: usize = 1 << 16;

/// Translates a device address to host memory; a host address stays.
pub(crate) fn translate(address: u64) -> u64 {
    if address >> 62 == 1 { address & !DEVICE } else { address }
}

/// Regions of all devices of this process: start in host memory, and length.
static REGIONS: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

fn regions() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether all of the memory is known to a GPU: device memory or pinned.
pub(crate) fn is_known(address: u64, bytes: usize) -> bool {
    let start = translate(address);
    let regions = regions();
    let region = regions.range(..=start).next_back();
    region.is_some_and(|(base, capacity)| start + bytes as u64 <= base + *capacity as u64)
}

/// Returns whether the bits may be a host address: the system maps the middle of the address space,
/// and no length or number of a kernel is like that.
pub(crate) fn is_of_host(bits: u64) -> bool {
    (1 << 40..1 << 48).contains(&bits)
}

pub(crate) struct Emulation {
    base: *mut u8,
    capacity: usize,
    mapped: AtomicUsize,
    is_device: bool,
    /// Free bytes of the device, and all.
    free: Arc<AtomicUsize>,
    total: usize,
    /// Streams that may still use it.
    streams: Arc<Streams>,
}

// SAFETY: the mapping lives as long as this; who uses which bytes when is the caller's affair, as
// on a GPU.
unsafe impl Send for Emulation {}
// SAFETY: as above.
unsafe impl Sync for Emulation {}

impl Emulation {
    pub(crate) fn new(
        capacity: usize,
        is_device: bool,
        (free, total): (&Arc<AtomicUsize>, usize),
        streams: &Arc<Streams>,
    ) -> Result<Self> {
        let capacity = capacity.max(1).next_multiple_of(GRAIN);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a mapping with no address hint has no preconditions; the result is checked.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), capacity, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            let source = std::io::Error::last_os_error();
            return Err(KernelError::System { what: "reserving address space for an emulated GPU", source });
        }
        regions().insert(base.expose_provenance() as u64, capacity);
        let (mapped, free, streams) = (AtomicUsize::new(0), free.clone(), streams.clone());
        Ok(Self { base: base.cast(), capacity, mapped, is_device, free, total, streams })
    }
}

impl Region for Emulation {
    fn base(&self) -> u64 {
        let base = self.base.expose_provenance() as u64;
        if self.is_device { base | DEVICE } else { base }
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        let mapped = self.mapped();
        let wanted = bytes.next_multiple_of(GRAIN);
        if wanted <= mapped {
            return Ok(());
        }
        assert!(wanted <= self.capacity, "{bytes} bytes of a region of {}", self.capacity);
        let more = wanted - mapped;
        let take = |free: usize| free.checked_sub(more);
        if self.is_device && self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            let (what, gpu) = ("memory of a GPU".to_owned(), "an emulated GPU".to_owned());
            let (free, total) = (self.free.load(Ordering::Relaxed), self.total);
            return Err(KernelError::GpuFull { what, gpu, wanted: Some(more), free, total });
        }
        // SAFETY: the range lies inside the mapping.
        let outcome =
            unsafe { libc::mprotect(self.base.add(mapped).cast(), more, libc::PROT_READ | libc::PROT_WRITE) };
        if outcome != 0 {
            let source = std::io::Error::last_os_error();
            return Err(KernelError::System { what: "memory for an emulated GPU", source });
        }
        // SAFETY: the range was just made writable and has no other user. Unwritten memory reads as NaN.
        unsafe { self.base.add(mapped).write_bytes(0xff, more) };
        self.mapped.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Relaxed)
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        self.streams.finish_all();
        if self.is_device {
            self.free.fetch_add(self.mapped(), Ordering::Relaxed);
        }
        regions().remove(&(self.base.expose_provenance() as u64));
        // SAFETY: the mapping was made in `new` with this length; all work that could use it is
        // done.
        unsafe {
            libc::munmap(self.base.cast(), self.capacity);
        }
    }
}
