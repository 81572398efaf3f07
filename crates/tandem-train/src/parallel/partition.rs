//! Which part of every layer each rank owns.

use std::ops::Range;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::SQUARES_BLOCK;
use tandem_model::Decoder;

use crate::config::ShardedState;

/// Every layer's flat buffer, cut into one contiguous part for each rank, in the order of ranks.
///
/// Shards begin at multiples of the block over which squares are summed, so the gradient norm has
/// the same bits for any number of ranks. A layer with fewer blocks than ranks leaves some ranks
/// without a shard.
#[derive(Clone, Debug)]
pub struct Partition {
    rank: usize,
    /// Per layer, then per rank.
    counts: Vec<Vec<usize>>,
}

impl Partition {
    /// Divides the trainable parameters of a decoder.
    pub fn new(decoder: &Decoder, rank: usize, num_ranks: usize) -> Self {
        let lengths = decoder.layers().into_iter().map(|layer| decoder.trained(layer).len);
        Self { rank, counts: lengths.map(|len| counts(len, num_ranks)).collect() }
    }

    /// Creates the partition of a run among the ranks of a shard group: everything, where nothing
    /// is divided.
    pub fn for_run(sharded: ShardedState, decoder: &Decoder, shard: &ProcessGroup) -> Self {
        if sharded.is_none() { Self::whole(decoder) } else { Self::new(decoder, shard.rank(), shard.size()) }
    }

    /// One rank owns everything.
    pub fn whole(decoder: &Decoder) -> Self {
        Self::new(decoder, 0, 1)
    }

    /// Returns whether there is more than one shard.
    pub fn is_divided(&self) -> bool {
        self.counts.first().is_some_and(|counts| counts.len() > 1)
    }

    /// Elements of a layer that each rank owns.
    pub fn counts(&self, layer: usize) -> &[usize] {
        &self.counts[layer]
    }

    /// Range of a layer that this rank owns.
    pub fn owned(&self, layer: usize) -> Range<usize> {
        let start = self.counts[layer][..self.rank].iter().sum();
        start..start + self.counts[layer][self.rank]
    }

    /// Elements of a layer.
    pub fn len(&self, layer: usize) -> usize {
        self.counts[layer].iter().sum()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.counts.len()
    }
}

/// Whole blocks for all but the last part that has any.
fn counts(len: usize, num_ranks: usize) -> Vec<usize> {
    let blocks = len.div_ceil(SQUARES_BLOCK);
    let end = |rank: usize| len.min(blocks * rank / num_ranks * SQUARES_BLOCK);
    (0..num_ranks).map(|rank| end(rank + 1) - end(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_layer_and_begin_at_blocks() {
        for len in [0, 1, SQUARES_BLOCK - 1, SQUARES_BLOCK, 3 * SQUARES_BLOCK + 5, 100 * SQUARES_BLOCK] {
            for num_ranks in [1, 2, 3, 4, 8] {
                let counts = counts(len, num_ranks);
                assert_eq!(counts.iter().sum::<usize>(), len);
                let mut start = 0;
                for count in counts {
                    assert!(count == 0 || start % SQUARES_BLOCK == 0, "{len} over {num_ranks} ranks");
                    start += count;
                }
            }
        }
        assert_eq!(counts(8 * SQUARES_BLOCK, 4), [2 * SQUARES_BLOCK; 4]);
        assert_eq!(counts(5, 2), [0, 5]);
    }
}
