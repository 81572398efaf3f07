//! GPU memory mapped into address space that is reserved once: addresses of tensors stay as the
//! arena grows.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::context::Context;
use super::raw::{AccessDescription, AllocationHandle, AllocationProperties, GRANULARITY_RECOMMENDED};
use crate::Result;
use crate::cuda::driver::Region;

/// Smallest mapping in bytes: the page of GPUs, and their recommendation so far.
const STEP: usize = 2 << 20;

/// Address space of a GPU and its mapped memory.
pub(super) struct Memory {
    context: Arc<Context>,
    base: u64,
    reserved: usize,
    /// Granularity of mappings.
    step: usize,
    /// This GPU, and those that reach it: NCCL may have them write here directly.
    access: Vec<AccessDescription>,
    mapped: AtomicUsize,
    pieces: Mutex<Vec<Piece>>,
}

/// A mapping.
struct Piece {
    offset: usize,
    bytes: usize,
    handle: AllocationHandle,
}

impl Memory {
    /// Reserves address space of at least `capacity` bytes.
    pub(super) fn reserve(context: &Arc<Context>, capacity: usize) -> Result<Self> {
        let properties = AllocationProperties::new(context.device);
        let (mut granularity, mut base) = (0, 0);
        // SAFETY: the properties are read, and the number is written to where it is.
        context.call("asking for the size of a GPU's pages", |cuda| unsafe {
            (cuda.granularity)(&raw mut granularity, &raw const properties, GRANULARITY_RECOMMENDED)
        })?;
        let step = granularity.max(STEP);
        let others = context.cuda.reaching(context.device)?;
        let access = std::iter::once(context.device).chain(others).map(AccessDescription::new).collect();
        let reserved = capacity.max(1).next_multiple_of(step);
        let what = format!("reserving {reserved} bytes of a GPU's address space");
        // SAFETY: the address is written to where it is; it is given back when the region is
        // dropped.
        context.call(&what, |cuda| unsafe { (cuda.reserve_addresses)(&raw mut base, reserved, 0, 0, 0) })?;
        let (mapped, pieces) = (AtomicUsize::new(0), Mutex::default());
        Ok(Self { context: context.clone(), base, reserved, step, access, mapped, pieces })
    }

    /// Maps new memory to the unmapped range.
    fn map(&self, offset: usize, bytes: usize) -> Result<Piece> {
        let (context, properties) = (&self.context, AllocationProperties::new(self.context.device));
        let mut handle = 0;
        // SAFETY: the properties are read, and the handle is written to where it is.
        context.allocate(bytes, "memory of a GPU", |cuda| unsafe {
            (cuda.create_memory)(&raw mut handle, bytes, &raw const properties, 0)
        })?;
        let piece = Piece { offset, bytes, handle };
        let at = self.base + offset as u64;
        // SAFETY: the range lies inside what is reserved, and nothing is mapped there.
        let outcome = context
            .call("mapping memory of a GPU", |cuda| unsafe { (cuda.map_memory)(at, bytes, 0, handle, 0) });
        if let Err(error) = outcome {
            // SAFETY: the memory was just made, and is not mapped.
            unsafe { (context.cuda.functions.release_memory)(handle) };
            return Err(error);
        }
        // SAFETY: the range was just mapped, and the descriptions are read.
        let outcome = context.call("opening memory of a GPU", |cuda| unsafe {
            (cuda.set_access)(at, bytes, self.access.as_ptr(), self.access.len())
        });
        match outcome {
            Ok(()) => Ok(piece),
            Err(error) => {
                self.unmap(&piece);
                Err(error)
            }
        }
    }

    /// Unmaps a range that is no longer used.
    fn unmap(&self, piece: &Piece) {
        let Piece { offset, bytes, handle } = *piece;
        let cuda = &self.context.cuda.functions;
        // SAFETY: the piece was mapped there as a whole, and is given back once. Nothing could be
        // done about a failure.
        unsafe {
            (cuda.unmap_memory)(self.base + offset as u64, bytes);
            (cuda.release_memory)(handle);
        }
    }
}

impl Region for Memory {
    fn base(&self) -> u64 {
        self.base
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        if bytes <= self.mapped() {
            return Ok(());
        }
        assert!(bytes <= self.reserved, "{bytes} bytes of a region of {}", self.reserved);
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let mapped = self.mapped();
        let wanted = bytes.next_multiple_of(self.step);
        if wanted > mapped {
            pieces.push(self.map(mapped, wanted - mapped)?);
            self.mapped.store(wanted, Ordering::Release);
        }
        Ok(())
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Acquire)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Pending work may still use it.
        self.context.settle();
        let pieces = std::mem::take(self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner));
        pieces.iter().for_each(|piece| self.unmap(piece));
        // SAFETY: nothing is mapped there any more, and it is given back once.
        unsafe {
            (self.context.cuda.functions.free_addresses)(self.base, self.reserved);
        }
    }
}
