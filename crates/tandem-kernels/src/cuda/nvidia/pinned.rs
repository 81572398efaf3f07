//! Pinned host memory: address space of the process, registered with the driver as it is used.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::context::Context;
use super::raw::result::CUDA_ERROR_OUT_OF_MEMORY;
use super::raw::{HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE, attribute};
use crate::cuda::driver::Region;
use crate::cuda::failed;
use crate::{KernelError, Result};

/// Smallest registration in bytes: a huge page.
const STEP: usize = 2 << 20;

/// Boundaries between registered pieces. The driver may refuse a copy that crosses a boundary, so
/// it is made in parts.
#[derive(Default)]
pub(super) struct Seams(Mutex<BTreeSet<u64>>);

impl Seams {
    /// Splits a copy into parts, as offset and length.
    pub(super) fn parts(&self, from: u64, to: u64, bytes: usize) -> Vec<(usize, usize)> {
        let seams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cuts = vec![0, bytes];
        for start in [from, to] {
            cuts.extend(within(&seams, start, bytes).map(|seam| (seam - start) as usize));
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
    }

    /// Returns whether a boundary lies inside a range.
    pub(super) fn cross(&self, start: u64, bytes: usize) -> bool {
        let seams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        within(&seams, start, bytes).next().is_some()
    }
}

fn within(seams: &BTreeSet<u64>, start: u64, bytes: usize) -> impl Iterator<Item = u64> {
    let end = start.saturating_add(bytes as u64);
    seams.range((start + 1).min(end)..end).copied()
}

/// Address space of the process, partly registered with the GPU.
pub(super) struct Pinned {
    context: Arc<Context>,
    seams: Arc<Seams>,
    base: *mut u8,
    reserved: usize,
    registered: AtomicUsize,
    /// Ends of the registered pieces.
    ends: Mutex<Vec<usize>>,
}

// SAFETY: the mapping lives as long as this; who uses which bytes when is the caller's affair, as
// with the GPU's memory.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Reserves address space of at least `capacity` bytes.
    pub(super) fn reserve(context: &Arc<Context>, seams: &Arc<Seams>, capacity: usize) -> Result<Self> {
        let host_pointers = attribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        if context.cuda.attribute(context.device, host_pointers)? == 0 {
            let name = &context.properties.name;
            return Err(failed(
                "pinned memory",
                format!(
                    "GPU {} ({name}) knows host memory by other addresses than the host does, which is not supported: \
                     this needs 64-bit Linux without a virtual GPU in between",
                    context.properties.ordinal
                ),
            ));
        }
        let reserved = capacity.max(1).next_multiple_of(STEP);
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a mapping with no address hint has no preconditions; the result is checked.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), reserved, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            let source = std::io::Error::last_os_error();
            return Err(KernelError::System { what: "reserving address space for pinned memory", source });
        }
        // Registration is per page: huge pages are faster to register and to copy. A refusal
        // changes nothing else.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping made above.
        unsafe {
            libc::madvise(base, reserved, libc::MADV_HUGEPAGE);
        }
        let (registered, ends) = (AtomicUsize::new(0), Mutex::default());
        Ok(Self {
            context: context.clone(),
            seams: seams.clone(),
            base: base.cast(),
            reserved,
            registered,
            ends,
        })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.base.wrapping_add(offset)
    }

    fn address(&self, offset: usize) -> u64 {
        self.at(offset).expose_provenance() as u64
    }

    fn register(&self, offset: usize, bytes: usize) -> Result<()> {
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP;
        self.context.enter()?;
        // SAFETY: the range lies inside the mapping, and is not registered.
        let outcome = unsafe {
            (self.context.cuda.functions.register_host)(self.at(offset).cast::<c_void>(), bytes, flags)
        };
        if outcome == CUDA_ERROR_OUT_OF_MEMORY {
            return Err(failed(
                "pinned memory",
                format!(
                    "the host gives no {bytes} bytes more beside the {offset} that are pinned here: its memory is full, \
                     or a limit of locked memory (ulimit -l) or of the container holds"
                ),
            ));
        }
        self.context.cuda.check("pinning host memory", outcome)
    }
}

impl Region for Pinned {
    fn base(&self) -> u64 {
        self.address(0)
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        if bytes <= self.mapped() {
            return Ok(());
        }
        assert!(bytes <= self.reserved, "{bytes} bytes of a region of {}", self.reserved);
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let registered = self.mapped();
        let wanted = bytes.next_multiple_of(STEP);
        if wanted > registered {
            self.register(registered, wanted - registered)?;
            self.seams.0.lock().unwrap_or_else(PoisonError::into_inner).insert(self.address(registered));
            ends.push(wanted);
            self.registered.store(wanted, Ordering::Release);
        }
        Ok(())
    }

    fn mapped(&self) -> usize {
        self.registered.load(Ordering::Acquire)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Pending work may still use it.
        self.context.settle();
        let ends = std::mem::take(self.ends.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut start = 0;
        for end in ends {
            // SAFETY: the piece was registered by its start, once.
            unsafe {
                (self.context.cuda.functions.unregister_host)(self.at(start).cast::<c_void>());
            }
            let mut seams = self.seams.0.lock().unwrap_or_else(PoisonError::into_inner);
            seams.remove(&self.address(start));
            start = end;
        }
        // SAFETY: the mapping was made in `reserve` with this length; all work that could use it is
        // done.
        unsafe {
            libc::munmap(self.base.cast(), self.reserved);
        }
    }
}
