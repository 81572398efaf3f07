//! CPU kernels, their thread pool, per-thread scratch and vector instructions.

pub(crate) mod activation;
mod adafactor;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod attention;
pub(crate) mod causal_conv;
mod coded_rows;
pub(crate) mod columns;
mod convert;
pub(crate) mod delta_rule;
mod double_quant;
pub(crate) mod dropout;
pub(crate) mod elementary;
pub(crate) mod elementwise;
pub(crate) mod embedding;
mod exact;
mod fp8;
mod gemm;
pub(crate) mod head;
pub(crate) mod head_divergence;
pub(crate) mod head_gate;
mod int8;
mod isa;
pub(crate) mod low_rank;
mod nf4;
pub(crate) mod norm;
mod optimizer;
mod peak;
mod prefetch;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod scratch;
mod squares;
pub(crate) mod states;
mod symmetric;
mod thread_pool;
pub(crate) mod tile;
pub(crate) mod vector;

pub use isa::Isa;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::profile::Profile;
use crate::memory::arena::Arena;
use crate::{KernelError, Result};
use thread_pool::ThreadPool;

pub(crate) use double_quant::TABLE as NESTED_TABLE;
pub(crate) use int8::LARGEST as INT8_LARGEST;
pub(crate) use nf4::NUMBERS as NF4_NUMBERS;

/// A CPU device: threads, memory and instructions.
pub struct Cpu {
    pub(crate) arena: Arc<Arena>,
    team: Arc<ThreadPool>,
    isa: Isa,
    /// True if a term of an exact sum was out of range; shared by all memories.
    out_of_range: Arc<AtomicBool>,
    /// Profile that times operations.
    pub(crate) profile: Option<Arc<Profile>>,
}

impl Cpu {
    pub(crate) fn new(threads: usize, arena: Arc<Arena>, isa: Isa) -> Result<Self> {
        let team = ThreadPool::new(threads)
            .map_err(|source| KernelError::System { what: "starting compute threads", source })?;
        let (team, out_of_range) = (Arc::new(team), Arc::default());
        Ok(Self { arena, team, isa, out_of_range, profile: None })
    }

    /// Shares the threads with another memory.
    pub(crate) fn over(&self, arena: Arc<Arena>) -> Self {
        let (team, out_of_range, profile) =
            (self.team.clone(), self.out_of_range.clone(), self.profile.clone());
        Self { arena, team, out_of_range, profile, ..*self }
    }

    /// Shares the threads with another memory, without a profile.
    pub(crate) fn untimed_over(&self, arena: Arc<Arena>) -> Self {
        Self { profile: None, ..self.over(arena) }
    }

    /// Shares the memory with the calling thread alone.
    pub(crate) fn alone(&self) -> Result<Self> {
        let (out_of_range, profile) = (self.out_of_range.clone(), self.profile.clone());
        Ok(Self { out_of_range, profile, ..Self::new(1, self.arena.clone(), self.isa)? })
    }

    /// Shares threads and memory and times operations.
    pub(crate) fn profiled(&self, profile: Arc<Profile>) -> Self {
        Self { profile: Some(profile), ..self.over(self.arena.clone()) }
    }

    /// Records that a term of an exact sum was out of range.
    pub(crate) fn see_out_of_range(&self) {
        self.out_of_range.store(true, Ordering::Relaxed);
    }

    /// Returns whether no term was out of range since the last call.
    pub(crate) fn take_in_range(&self) -> bool {
        !self.out_of_range.swap(false, Ordering::Relaxed)
    }

    /// Returns the number of compute threads, the calling one included.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Returns the vector instructions that kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `block(0) … block(num_blocks - 1)`, each once, on all threads, and returns when all
    /// have finished.
    ///
    /// Blocks must not depend on one another. From inside a block, a nested call runs on the
    /// calling thread alone.
    pub(crate) fn parallel_for(&self, num_blocks: usize, block: impl Fn(usize) + Sync) {
        self.team.run(num_blocks, &block);
    }

    /// [`Self::parallel_for`] over `0..len` cut into ranges of `block_len` (the last may be
    /// shorter), with the range's index and the range itself.
    pub(crate) fn parallel_ranges(
        &self,
        len: usize,
        block_len: usize,
        block: impl Fn(usize, std::ops::Range<usize>) + Sync,
    ) {
        self.parallel_for(len.div_ceil(block_len), |index| {
            let start = index * block_len;
            block(index, start..len.min(start + block_len));
        });
    }

    /// Calls `row` for each row of a matrix, on all threads.
    pub(crate) fn for_rows(&self, (rows, width): (usize, usize), row: impl Fn(usize) + Sync) {
        self.parallel_ranges(rows, block_rows(width), |_, range| range.for_each(&row));
    }
}

/// Returns the number of rows of `width` elements per block of a row-wise kernel: enough work to
/// outweigh the scheduling.
pub(crate) fn block_rows(width: usize) -> usize {
    (16_384 / width.max(1)).max(1)
}
