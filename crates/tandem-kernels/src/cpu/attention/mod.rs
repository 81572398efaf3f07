//! Attention over a forest.
//!
//! A *block* is a run of queries of one segment, with all the heads that share one key/value head: its rows are
//! `query · group + head in group`, so that a tile of keys is read once for the whole group. Keys are taken in
//! *strips* of consecutive positions on the path from the root to the block's segment, gathered from whatever
//! segments hold them; strips that no query of the block sees are never touched.
//!
//! Scores are kept transposed, `[keys, rows]`: the softmax then runs over registers of rows without a sum across
//! lanes, keys and values enter every product in the layout they have in memory, and only the block's own queries
//! (and their gradient) are transposed, once.

mod backward;
mod block;
mod decode;
mod forward;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub(crate) use backward::backward;
pub(crate) use decode::decode;
pub(crate) use forward::forward;
