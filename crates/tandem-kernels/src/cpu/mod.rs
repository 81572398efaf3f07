//! CPU kernels.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod embedding;
pub(crate) mod head;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod rows;

use crate::arena::Arena;
use crate::{KernelError, Result};
use std::sync::Arc;

/// The host's processor: its threads and its memory.
pub struct Cpu {
    pub(crate) arena: Arc<Arena>,
    pub(crate) pool: rayon::ThreadPool,
}

impl Cpu {
    pub(crate) fn new(threads: usize, arena: Arc<Arena>) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("tandem-cpu-{i}"))
            .build()
            .map_err(|e| KernelError::System {
                what: "starting compute threads",
                source: std::io::Error::other(e),
            })?;
        Ok(Self { arena, pool })
    }

    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}
