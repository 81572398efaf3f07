//! One region of memory per device, from which every tensor is cut.
//!
//! Address space is reserved once; pages become resident when first written and are then reused: a tensor that is
//! dropped returns its range to the free list, and the next one of that size takes it. In the steady state the
//! high-water mark does not move and no system call is made.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::{KernelError, Result};

/// What memory is used for. The plan reports bytes by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Master weights (f32).
    Master,
    /// Compute copies of the weights.
    Weights,
    /// Gradient accumulators.
    Gradients,
    /// Optimiser states.
    Optimizer,
    /// Activations, saved and transient.
    Activations,
    /// The head's chunk of logits and its buffers.
    Head,
    /// Reference weights.
    Reference,
    /// Keys and values kept for generation.
    Cache,
    /// Anything else, short-lived.
    Scratch,
}

impl Kind {
    /// Every kind, in display order.
    pub const ALL: [Self; 9] = [
        Self::Master,
        Self::Weights,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Head,
        Self::Reference,
        Self::Cache,
        Self::Scratch,
    ];

    /// The name used in plans and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "master weights",
            Self::Weights => "compute weights",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Head => "head chunk",
            Self::Reference => "reference",
            Self::Cache => "kv cache",
            Self::Scratch => "scratch",
        }
    }
}

/// Bytes in use by kind, and the moment of the peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes now, by [`Kind`] in the order of [`Kind::ALL`].
    pub current: [usize; 9],
    /// Bytes by kind at the moment when the total was largest.
    pub at_peak: [usize; 9],
    /// The largest total.
    pub peak: usize,
}

impl MemoryUse {
    /// Total bytes now.
    pub fn total(&self) -> usize {
        self.current.iter().sum()
    }

    pub(crate) fn add(&mut self, kind: Kind, bytes: usize) {
        self.current[kind as usize] += bytes;
        let total = self.total();
        if total > self.peak {
            self.peak = total;
            self.at_peak = self.current;
        }
    }

    pub(crate) fn remove(&mut self, kind: Kind, bytes: usize) {
        self.current[kind as usize] -= bytes;
    }
}

impl std::fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = Kind::ALL
            .iter()
            .filter(|k| self.current[**k as usize] > 0)
            .map(|k| format!("{} {}", k.name(), self.current[*k as usize]))
            .collect();
        f.write_str(&if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") })
    }
}

/// Offsets are multiples of this: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Tensors of at least this size start on a page of their own, so that huge pages can back them.
const LARGE: usize = 1 << 21;

/// The region. Shared by the device and all its tensors.
pub(crate) struct Arena {
    base: *mut u8,
    capacity: usize,
    state: Mutex<State>,
}

// SAFETY: `base` points to a mapping that lives as long as the arena; which bytes of it belong to which tensor is
// decided under the mutex, and tensors hand out references to their own bytes only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

#[derive(Default)]
struct State {
    /// Free ranges: offset → length. Neighbours are always merged.
    free: BTreeMap<usize, usize>,
    usage: MemoryUse,
    /// One past the highest byte ever handed out: what is resident.
    high_water: usize,
}

/// A range of an arena, returned to it on drop.
pub(crate) struct Block {
    arena: Arc<Arena>,
    offset: usize,
    length: usize,
    kind: Kind,
}

impl Arena {
    /// Reserves address space; no page is touched.
    pub(crate) fn new(capacity: usize) -> Result<Arc<Self>> {
        let capacity = capacity.next_multiple_of(LARGE);
        // SAFETY: an anonymous private mapping with no address hint has no preconditions; the result is checked.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                capacity,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(KernelError::System {
                what: "reserving the arena's address space",
                source: std::io::Error::last_os_error(),
            });
        }
        // Huge pages spare page faults, which are expensive on virtual machines. Refusal changes nothing but speed.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping made above.
        unsafe {
            libc::madvise(base, capacity, libc::MADV_HUGEPAGE);
        }
        let state = State { free: BTreeMap::from([(0, capacity)]), ..State::default() };
        Ok(Arc::new(Self { base: base.cast(), capacity, state: Mutex::new(state) }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Cuts the first free range that is long enough.
    pub(crate) fn allocate(self: &Arc<Self>, kind: Kind, bytes: usize) -> Result<Block> {
        let length = bytes.max(1).next_multiple_of(ALIGNMENT);
        let mut state = self.lock();
        let found = state.free.iter().find(|&(_, &free)| free >= length).map(|(&o, &l)| (o, l));
        let Some((offset, free)) = found else {
            return Err(KernelError::OutOfMemory {
                requested: bytes,
                kind: kind.name(),
                capacity: self.capacity,
                in_use: Box::new(state.usage.clone()),
            });
        };
        state.free.remove(&offset);
        if free > length {
            state.free.insert(offset + length, free - length);
        }
        state.usage.add(kind, length);
        state.high_water = state.high_water.max(offset + length);
        Ok(Block { arena: Arc::clone(self), offset, length, kind })
    }

    pub(crate) fn usage(&self) -> MemoryUse {
        self.lock().usage.clone()
    }

    pub(crate) fn high_water(&self) -> usize {
        self.lock().high_water
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length and nothing borrows it any more.
        unsafe {
            libc::munmap(self.base.cast(), self.capacity);
        }
    }
}

impl Block {
    pub(crate) fn pointer(&self) -> *mut u8 {
        // SAFETY: `offset` lies inside the mapping.
        unsafe { self.arena.base.add(self.offset) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.usage.remove(self.kind, self.length);
        let (mut offset, mut length) = (self.offset, self.length);
        if let Some((&before, &free)) = state.free.range(..offset).next_back()
            && before + free == offset
        {
            state.free.remove(&before);
            (offset, length) = (before, length + free);
        }
        if let Some(free) = state.free.remove(&(self.offset + self.length)) {
            length += free;
        }
        state.free.insert(offset, length);
    }
}
