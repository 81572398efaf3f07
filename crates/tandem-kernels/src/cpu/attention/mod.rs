//! Attention over a forest.
//!
//! A *block* is a run of queries of one segment with all heads that share one key/value head. Its
//! rows are `query · group + head in group`, so a tile of keys is read once for the whole group.
//! Keys are read in *strips* of consecutive positions on the path from the root to the block's
//! segment, gathered from the segments on it. Strips that no query of the block sees are skipped.
//!
//! Scores are stored transposed, `[keys, rows]`. The softmax then runs over registers of rows
//! without a sum across lanes, and keys and values enter every GEMM in their layout in memory. Only
//! the block's own queries (and their gradient) are transposed, once.

mod backward;
mod block;
mod decode;
mod forward;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub(crate) use backward::backward;
pub(crate) use block::block_queries;
pub(crate) use decode::decode;
pub(crate) use forward::forward;
