//! The arena: one region of memory per device, from which every tensor is allocated.
//!
//! Address space is reserved once. Pages become resident when first written and are reused: a
//! dropped tensor returns its range to the free list, and the next tensor of that size takes it. In
//! the steady state the high-water mark stays and no system call is made.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use super::file;
use crate::cuda::driver::Region;
use crate::memory::free_list::{Cut, FreeList};
use crate::memory::memory_use::{MemoryKind, MemoryUse};
use crate::{ArenaPlace, KernelError, Result};

/// Page size.
const PAGE: usize = 4096;

/// Huge page size; mappings are whole huge pages.
const LARGE: usize = 1 << 21;

/// Owner of the address space.
enum Backing {
    /// A mapping of whole pages, huge ones in memory. Of a mapped file, memory holds the recently
    /// used pages.
    Mapping { len: usize, in_file: bool },
    /// A region of GPU memory or pinned host memory, which is mapped as it grows.
    Region(Box<dyn Region>),
}

/// The region, shared by the device and all its tensors.
pub(crate) struct Arena {
    base: *mut u8,
    /// Bytes that may be allocated.
    capacity: usize,
    backing: Backing,
    place: ArenaPlace,
    state: Mutex<FreeList>,
}

// SAFETY: `base` points to a mapping that lives as long as the arena. The mutex decides which bytes
// belong to which tensor, and a tensor lends references to its own bytes only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// A range of an arena, returned to it on drop.
pub(crate) struct Block {
    arena: Arc<Arena>,
    cut: Cut,
}

/// Maps `capacity` bytes of a file, or of memory if `file` is -1.
fn map(capacity: usize, flags: libc::c_int, file: libc::c_int) -> std::io::Result<*mut u8> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a mapping with no address hint has no preconditions; the result is checked.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), capacity, access, flags, file, 0) };
    if base == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(base.cast()) }
}

impl Arena {
    /// Reserves address space; no page is touched.
    pub(crate) fn new(capacity: usize) -> Result<Arc<Self>> {
        let mapped = capacity.next_multiple_of(LARGE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = map(mapped, flags, -1)
            .map_err(|source| KernelError::System { what: "reserving the arena's address space", source })?;
        // Huge pages save page faults, which are expensive on virtual machines. A refusal costs
        // speed only.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping made above.
        unsafe {
            libc::madvise(base.cast(), mapped, libc::MADV_HUGEPAGE);
        }
        Ok(Self::over(base, capacity, mapped, false))
    }

    /// Creates an arena over an empty file of `capacity` bytes. Its disk blocks are allocated now.
    pub(crate) fn in_file(file: &File, capacity: usize) -> Result<Arc<Self>> {
        let mapped = capacity.max(1).next_multiple_of(PAGE);
        let system = |what| move |source| KernelError::System { what, source };
        file::set_aside(file, mapped as u64).map_err(system("setting a file's bytes aside"))?;
        let base = map(mapped, libc::MAP_SHARED, file.as_raw_fd()).map_err(system("mapping a file"))?;
        Ok(Self::over(base, capacity, mapped, true))
    }

    fn over(base: *mut u8, capacity: usize, mapped: usize, in_file: bool) -> Arc<Self> {
        let place = if in_file { ArenaPlace::File } else { ArenaPlace::Device };
        Self::backed(base, capacity, Backing::Mapping { len: mapped, in_file }, place)
    }

    /// Creates an arena over GPU memory or pinned host memory.
    pub(crate) fn on(region: Box<dyn Region>, capacity: usize, place: ArenaPlace) -> Arc<Self> {
        let base = std::ptr::with_exposed_provenance_mut(region.base() as usize);
        Self::backed(base, capacity, Backing::Region(region), place)
    }

    fn backed(base: *mut u8, capacity: usize, backing: Backing, place: ArenaPlace) -> Arc<Self> {
        Arc::new(Self { base, capacity, backing, place, state: Mutex::new(FreeList::new(capacity)) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeList> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Allocates at least `bytes`.
    pub(crate) fn allocate(self: &Arc<Self>, kind: MemoryKind, bytes: usize) -> Result<Block> {
        let mut state = self.lock();
        match state.cut(kind, bytes) {
            Some(cut) => {
                if let Backing::Region(region) = &self.backing
                    && let Err(error) = region.grow(cut.end())
                {
                    state.free(cut);
                    return Err(error);
                }
                Ok(Block { arena: Arc::clone(self), cut })
            }
            None => Err(KernelError::OutOfMemory {
                place: self.place,
                requested: bytes,
                kind: kind.name(),
                capacity: self.capacity,
                in_use: Box::new(state.usage().clone()),
            }),
        }
    }

    /// Makes the first `bytes` resident, so that no step pays page faults or moves the high-water
    /// mark.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        let bytes = bytes.min(self.capacity);
        match &self.backing {
            Backing::Mapping { in_file: true, .. } => return Ok(()),
            Backing::Mapping { in_file: false, .. } => {
                for offset in (state.high_water()..bytes).step_by(PAGE) {
                    // SAFETY: the byte lies inside the mapping and beyond all allocations; the lock
                    // keeps it so.
                    unsafe { self.base.add(offset).write_volatile(0) };
                }
            }
            Backing::Region(region) => region.grow(bytes)?,
        }
        state.mark(bytes);
        Ok(())
    }

    /// Returns the pages of free ranges to the system, which gives others when they are written. Memory of a
    /// GPU and of a file stays as it is.
    pub(crate) fn release_free_pages(&self) {
        let Backing::Mapping { in_file: false, .. } = self.backing else { return };
        for free in self.lock().free_below_high_water() {
            let (start, end) = (free.start.next_multiple_of(PAGE), free.end / PAGE * PAGE);
            if start < end {
                // SAFETY: the pages lie inside the mapping and belong to no tensor; the lock keeps it so. A
                // refusal costs memory only.
                unsafe {
                    libc::madvise(self.base.add(start).cast(), end - start, libc::MADV_DONTNEED);
                }
            }
        }
    }

    pub(crate) fn usage(&self) -> MemoryUse {
        self.lock().usage().clone()
    }

    pub(crate) fn high_water(&self) -> usize {
        self.lock().high_water()
    }

    pub(crate) fn taken(&self) -> (u64, u64) {
        self.lock().taken()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Backing::Mapping { len, .. } = self.backing {
            // SAFETY: the mapping was made with this length and nothing borrows it any more.
            unsafe {
                libc::munmap(self.base.cast(), len);
            }
        }
    }
}

impl Block {
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.arena.base.wrapping_add(self.cut.offset())
    }

    /// Starts reading the pages from the file (`MADV_WILLNEED`); no effect in memory.
    pub(crate) fn prefetch_pages(&self) {
        self.advise(libc::MADV_WILLNEED);
    }

    /// Drops the file's pages from memory (`MADV_DONTNEED`); the file keeps the contents. No effect
    /// in memory.
    pub(crate) fn evict_pages(&self) {
        self.advise(libc::MADV_DONTNEED);
    }

    fn advise(&self, advice: libc::c_int) {
        let Arena { base, backing: Backing::Mapping { in_file: true, .. }, .. } = *self.arena else { return };
        let start = self.cut.offset() / PAGE * PAGE;
        let length = self.cut.end().next_multiple_of(PAGE) - start;
        // SAFETY: the pages lie inside the mapping of whole pages. It is a shared mapping of a
        // file, so dropped pages are read again from the file, also by neighbours on the same page.
        // A refusal costs speed only.
        unsafe {
            libc::madvise(base.add(start).cast(), length, advice);
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.lock().free(self.cut);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::free_list::ALIGNMENT;
    use crate::{DType, Device};

    #[test]
    fn the_same_requests_leave_the_high_water_mark_where_it_was() {
        let device = Device::cpu(1, 1 << 24).unwrap();
        let step = || {
            let kept = device.alloc(MemoryKind::Activations, 100, 100, DType::F32).unwrap();
            for cols in [7, 300, 1] {
                drop(device.alloc(MemoryKind::Scratch, 50, cols, DType::Bf16).unwrap());
            }
            drop(kept);
        };
        step();
        let (memory, mark) = (device.memory(), device.high_water());
        assert_eq!(memory.total(), 0);
        assert_eq!(memory.peak, 40_000 + 30_016, "100x100 f32 and 50x300 bf16, in cache lines");
        assert_eq!(memory.at_peak[MemoryKind::Activations as usize], 40_000);
        assert_eq!(mark, memory.peak);
        step();
        assert_eq!((device.memory(), device.high_water()), (memory, mark));
    }

    #[test]
    fn an_exhausted_arena_says_what_holds_the_memory() {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let weights = device.alloc(MemoryKind::Weights, 1, 1 << 18, DType::F32).unwrap();
        let error = device.alloc(MemoryKind::Head, 1, 1 << 19, DType::F32).err().unwrap().to_string();
        assert_eq!(
            error,
            "out of device memory: 2097152 bytes for head chunk asked, 2097152 bytes in the arena; in use: \
             compute weights 1048576"
        );
        drop(weights);
        assert!(device.alloc(MemoryKind::Head, 1, 1 << 19, DType::F32).is_ok());
    }

    #[test]
    fn an_exhausted_file_is_not_called_device_memory() {
        let file = tempfile::tempfile().unwrap();
        let device = Device::cpu(1, 1 << 21).unwrap().in_file(&file, 1 << 12).unwrap();
        let error = device.alloc(MemoryKind::Optimizer, 1, 1 << 11, DType::F32).err().unwrap();
        assert!(matches!(error, KernelError::OutOfMemory { place: ArenaPlace::File, .. }), "{error}");
        assert!(error.to_string().starts_with("out of space in the file of offloaded tensors"), "{error}");
    }

    #[test]
    fn no_more_is_handed_out_than_was_said() {
        let device = Device::cpu(1, 4096).unwrap();
        let whole = device.alloc(MemoryKind::Scratch, 1, 1024, DType::F32).unwrap();
        assert!(
            device.alloc(MemoryKind::Scratch, 1, 1, DType::F32).is_err(),
            "the huge page has room, the cap has not"
        );
        drop(whole);
        assert_eq!(device.high_water(), 4096);
    }

    /// Pages that come back from the system are zero.
    #[test]
    fn free_pages_go_back_and_held_ones_stay() {
        let device = Device::cpu(1, 1 << 22).unwrap();
        let make = || {
            let mut tensor = device.alloc(MemoryKind::Scratch, 1, 10_000, DType::F32).unwrap();
            tensor.view_mut().into_slice::<f32>().fill(7.0);
            tensor
        };
        let [first, gap, last] = [(); 3].map(|()| make());
        drop(gap);
        let mark = device.high_water();
        device.release_free_pages();
        assert_eq!(device.high_water(), mark, "what was taken is remembered");
        for held in [&first, &last] {
            assert!(held.view().as_slice::<f32>().iter().all(|&x| x == 7.0));
        }
        let again = device.alloc(MemoryKind::Scratch, 1, 10_000, DType::F32).unwrap();
        let page = PAGE / 4;
        assert!(again.view().as_slice::<f32>()[page..10_000 - page].iter().all(|&x| x == 0.0));
    }

    #[test]
    fn a_file_holds_what_memory_lets_go_of() {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let file = tempfile::tempfile().unwrap();
        let home = device.in_file(&file, 100_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 102_400, "whole pages");
        // Sizes that do not end at page boundaries.
        let mut tensors =
            [3000, 5000, 12_000].map(|n| home.alloc(MemoryKind::Master, 1, n, DType::F32).unwrap());
        for (i, tensor) in tensors.iter_mut().enumerate() {
            tensor.view_mut().into_slice::<f32>().fill(i as f32);
        }
        tensors[1].evict_pages();
        tensors[1].prefetch_pages();
        for (i, tensor) in tensors.iter().enumerate() {
            assert!(tensor.view().as_slice::<f32>().iter().all(|&x| x == i as f32), "{i}");
        }
        let error = home.alloc(MemoryKind::Master, 1, 6000, DType::F32).err().unwrap().to_string();
        assert!(error.contains("100000 bytes in the arena"), "{error}");
        assert_eq!((device.memory().total(), home.memory().total()), (0, 80_064), "in cache lines");
        // Elsewhere nothing is dropped.
        let mut here =
            device.with_memory(1 << 21).unwrap().zeros(MemoryKind::Master, 1, 5000, DType::F32).unwrap();
        here.view_mut().into_slice::<f32>().fill(7.0);
        here.evict_pages();
        assert!(here.view().as_slice::<f32>().iter().all(|&x| x == 7.0));
        // More than any disk has is refused before anything is mapped.
        assert!(matches!(device.in_file(&file, 1 << 60), Err(KernelError::System { .. })));
    }

    #[test]
    fn tensors_begin_on_cache_lines_and_do_not_overlap() {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let mut tensors: Vec<_> =
            (1..20).map(|cols| device.alloc(MemoryKind::Scratch, 3, cols, DType::Bf16).unwrap()).collect();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            assert_eq!(tensor.view().pointer_of::<crate::bf16>().addr() % ALIGNMENT, 0);
            tensor.view_mut().into_slice::<crate::bf16>().fill(crate::bf16::from_f32(i as f32));
        }
        for (i, tensor) in tensors.iter().enumerate() {
            assert!(tensor.view().as_slice::<crate::bf16>().iter().all(|x| x.to_f32() == i as f32));
        }
    }
}
