//! Which part of every layer each rank owns, and which layers travel together.

use std::ops::Range;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::SQUARES_BLOCK;
use tandem_model::{Decoder, LayerId};

use crate::config::ShardedState;

/// Most elements of a bucket of several layers: at 8 bytes each far more than the latency of a call
/// costs, and few enough that backward goes on for long while they travel.
const BUCKET: usize = 1 << 20;

/// Every layer's flat buffer, cut into one contiguous part for each rank, in the order of ranks.
///
/// Small neighbouring layers are a *bucket*: they are reduced in one call, and cut as if they were one
/// buffer. Shards begin at multiples of the block over which squares are summed, so the gradient norm
/// has the same bits for any number of ranks. A bucket with fewer blocks than ranks leaves some ranks
/// without a shard.
#[derive(Clone, Debug)]
pub struct Partition {
    rank: usize,
    /// Per layer, then per rank.
    counts: Vec<Vec<usize>>,
    /// Layers of each bucket.
    buckets: Vec<Range<usize>>,
    /// Per bucket, then per rank.
    bucket_counts: Vec<Vec<usize>>,
}

impl Partition {
    /// Divides the trainable parameters of a decoder, each layer by itself.
    pub fn new(decoder: &Decoder, rank: usize, num_ranks: usize) -> Self {
        let lengths = lengths(decoder);
        let buckets = (0..lengths.len()).map(|layer| layer..layer + 1).collect();
        Self::of(&lengths, buckets, rank, num_ranks)
    }

    /// Creates the partition of a run among the ranks of a shard group: everything, where nothing
    /// is divided.
    pub fn for_run(sharded: ShardedState, decoder: &Decoder, shard: &ProcessGroup) -> Self {
        let place = if sharded.is_none() { (0, 1) } else { (shard.rank(), shard.size()) };
        Self::among(sharded, decoder, place)
    }

    /// Divides a run's state among ranks, of which this is `rank`. Among a multiple of the ranks, parts
    /// are parts of these. Small layers travel together, unless weights are gathered layer by layer.
    pub fn among(sharded: ShardedState, decoder: &Decoder, (rank, num_ranks): (usize, usize)) -> Self {
        if sharded.weights {
            return Self::new(decoder, rank, num_ranks);
        }
        let lengths = lengths(decoder);
        // A tied token table is emitted twice in a backward pass, so it travels alone.
        let apart = usize::from(decoder.layers().first() == Some(&LayerId::Embedding));
        Self::of(&lengths, buckets(&lengths, apart), rank, num_ranks)
    }

    /// One rank owns everything.
    pub fn whole(decoder: &Decoder) -> Self {
        Self::new(decoder, 0, 1)
    }

    fn of(lengths: &[usize], buckets: Vec<Range<usize>>, rank: usize, num_ranks: usize) -> Self {
        let mut counts = Vec::with_capacity(lengths.len());
        for layers in &buckets {
            counts.extend(divide(&lengths[layers.clone()], num_ranks));
        }
        let sum = |layers: &Range<usize>| {
            (0..num_ranks)
                .map(|rank| counts[layers.clone()].iter().map(|counts| counts[rank]).sum())
                .collect()
        };
        let bucket_counts = buckets.iter().map(sum).collect();
        Self { rank, counts, buckets, bucket_counts }
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
        own(&self.counts[layer], self.rank)
    }

    /// Elements of a layer.
    pub fn len(&self, layer: usize) -> usize {
        self.counts[layer].iter().sum()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.counts.len()
    }

    /// Layers of each bucket, in walk order.
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.buckets
    }

    /// The bucket of a layer.
    pub fn bucket_of(&self, layer: usize) -> usize {
        self.buckets.partition_point(|layers| layers.end <= layer)
    }

    /// Elements of a bucket that each rank owns.
    pub fn bucket_counts(&self, bucket: usize) -> &[usize] {
        &self.bucket_counts[bucket]
    }

    /// Range of a bucket that this rank owns.
    pub fn bucket_owned(&self, bucket: usize) -> Range<usize> {
        own(&self.bucket_counts[bucket], self.rank)
    }

    /// Elements of a bucket.
    pub fn bucket_len(&self, bucket: usize) -> usize {
        self.bucket_counts[bucket].iter().sum()
    }

    /// Range of a layer in its bucket.
    pub fn place(&self, layer: usize) -> Range<usize> {
        let first = self.buckets[self.bucket_of(layer)].start;
        let start = (first..layer).map(|layer| self.len(layer)).sum();
        start..start + self.len(layer)
    }

    /// Range of what this rank owns of a layer in what it owns of the bucket.
    pub fn owned_place(&self, layer: usize) -> Range<usize> {
        let first = self.buckets[self.bucket_of(layer)].start;
        let start = (first..layer).map(|layer| self.owned(layer).len()).sum();
        start..start + self.owned(layer).len()
    }
}

fn own(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

fn lengths(decoder: &Decoder) -> Vec<usize> {
    decoder.layers().into_iter().map(|layer| decoder.trained(layer).len).collect()
}

/// Joins neighbours from the last layer to the first, as backward completes them; the first `apart`
/// layers stay alone.
fn buckets(lengths: &[usize], apart: usize) -> Vec<Range<usize>> {
    let mut buckets: Vec<Range<usize>> = Vec::new();
    for layer in (0..lengths.len()).rev() {
        match buckets.last_mut() {
            Some(bucket) if layer >= apart && lengths[layer..bucket.end].iter().sum::<usize>() <= BUCKET => {
                bucket.start = layer;
            }
            _ => buckets.push(layer..layer + 1),
        }
    }
    buckets.reverse();
    buckets
}

/// Divides a bucket: whole blocks of each layer for all but the last part that has any. Returns the
/// elements per layer, then per rank.
fn divide(lengths: &[usize], num_ranks: usize) -> Vec<Vec<usize>> {
    let blocks: Vec<usize> = lengths.iter().map(|len| len.div_ceil(SQUARES_BLOCK)).collect();
    let all: usize = blocks.iter().sum();
    let mut before = 0;
    let layer = |(&len, &own): (&usize, &usize)| {
        let first = before;
        before += own;
        let end = |rank: usize| {
            let blocks = (all * rank / num_ranks).clamp(first, first + own) - first;
            len.min(blocks * SQUARES_BLOCK)
        };
        (0..num_ranks).map(|rank| end(rank + 1) - end(rank)).collect()
    };
    lengths.iter().zip(&blocks).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_cover_layers_and_begin_at_blocks() {
        for len in [0, 1, SQUARES_BLOCK - 1, SQUARES_BLOCK, 3 * SQUARES_BLOCK + 5, 100 * SQUARES_BLOCK] {
            for num_ranks in [1, 2, 3, 4, 8] {
                let lengths = [len, 5, 7 * SQUARES_BLOCK + 1, 0, len];
                for layers in [&lengths[..1], &lengths[..]] {
                    let parts = divide(layers, num_ranks);
                    for (&len, counts) in layers.iter().zip(&parts) {
                        assert_eq!(counts.iter().sum::<usize>(), len);
                        let mut start = 0;
                        for count in counts {
                            let is_aligned = *count == 0 || start % SQUARES_BLOCK == 0;
                            assert!(is_aligned, "{len} over {num_ranks} ranks");
                            start += count;
                        }
                    }
                    // A rank's part is one range of the layers in a row.
                    for rank in 0..num_ranks {
                        let (mut before, mut end) = (0, None);
                        for (&len, counts) in layers.iter().zip(&parts) {
                            let own = own(counts, rank);
                            if !own.is_empty() {
                                let begins = before + own.start;
                                assert_eq!(end.unwrap_or(begins), begins, "{rank} of {num_ranks}: {parts:?}");
                                end = Some(before + own.end);
                            }
                            before += len;
                        }
                    }
                }
            }
        }
        assert_eq!(divide(&[8 * SQUARES_BLOCK], 4), [[2 * SQUARES_BLOCK; 4]]);
        assert_eq!(divide(&[5], 2), [[0, 5]]);
        assert_eq!(divide(&[3 * SQUARES_BLOCK, 5], 2), [[2 * SQUARES_BLOCK, SQUARES_BLOCK], [0, 5]]);
    }

    #[test]
    fn small_layers_travel_together_and_the_token_table_alone() {
        assert_eq!(buckets(&[5, 6, 7, 8], 1), [0..1, 1..4]);
        let one =
            |lengths: &[usize], apart| buckets(lengths, apart).into_iter().next().map(|first| first.end);
        assert_eq!((one(&[5, 6, 7, 8], 0), one(&[9], 1)), (Some(4), Some(1)));
        let big = BUCKET - 10;
        assert_eq!(buckets(&[0, big, 5, 5, 1, big, big + 11], 1), [0..1, 1..3, 3..6, 6..7]);
        let lengths = [9, 6 * SQUARES_BLOCK, 3, 2 * SQUARES_BLOCK];
        let partition = Partition::of(&lengths, buckets(&lengths, 1), 1, 2);
        assert_eq!(
            (partition.bucket_of(0), partition.bucket_of(3), partition.bucket_len(1)),
            (0, 1, 8 * SQUARES_BLOCK + 3)
        );
        assert_eq!(partition.bucket_counts(1), [4 * SQUARES_BLOCK, 4 * SQUARES_BLOCK + 3]);
        let first = 6 * SQUARES_BLOCK + 3;
        assert_eq!(partition.place(3), first..first + 2 * SQUARES_BLOCK);
        assert_eq!(partition.owned(1), 4 * SQUARES_BLOCK..6 * SQUARES_BLOCK);
        assert_eq!(partition.owned_place(3), 2 * SQUARES_BLOCK + 3..4 * SQUARES_BLOCK + 3);
        assert_eq!(partition.bucket_owned(1), 4 * SQUARES_BLOCK..8 * SQUARES_BLOCK + 3);
    }

    /// Lengths of layers around multiples of a block.
    fn any_lengths() -> impl Strategy<Value = Vec<usize>> {
        let length = (0..40_usize, 0..3_usize).prop_map(|(blocks, near)| match near {
            0 => blocks * SQUARES_BLOCK,
            1 => blocks * SQUARES_BLOCK + 1,
            _ => (blocks * SQUARES_BLOCK).saturating_sub(1),
        });
        prop::collection::vec(length, 1..8)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_partition_covers_every_layer_once(
            lengths in any_lengths(),
            num_ranks in 1..20_usize,
            apart in 0..2_usize,
        ) {
            let buckets = buckets(&lengths, apart);
            prop_assert_eq!(buckets.iter().cloned().flatten().collect::<Vec<_>>(), (0..lengths.len()).collect::<Vec<_>>());
            let of = |rank| Partition::of(&lengths, buckets.clone(), rank, num_ranks);
            for (layer, &len) in lengths.iter().enumerate() {
                let mut next = 0;
                for rank in 0..num_ranks {
                    let owned = of(rank).owned(layer);
                    prop_assert_eq!(owned.start, next);
                    prop_assert!(owned.is_empty() || owned.start % SQUARES_BLOCK == 0, "{:?}", owned);
                    next = owned.end;
                }
                prop_assert_eq!(next, len);
            }
            for rank in 0..num_ranks {
                let partition = of(rank);
                for layer in 0..lengths.len() {
                    // The part of a layer is the same elements, counted in the layer and in the bucket.
                    let (owned, bucket) = (partition.owned(layer), partition.bucket_owned(partition.bucket_of(layer)));
                    prop_assert_eq!(partition.owned_place(layer).len(), owned.len());
                    if !owned.is_empty() {
                        let in_bucket = partition.place(layer).start + owned.start;
                        prop_assert_eq!(in_bucket - bucket.start, partition.owned_place(layer).start);
                    }
                }
            }
        }

        /// Replicas of a sharded model divide a rank's part further.
        #[test]
        fn parts_among_a_multiple_of_ranks_are_parts_of_theirs(
            lengths in any_lengths(),
            num_ranks in 1..6_usize,
            factor in 1..5_usize,
        ) {
            let buckets = buckets(&lengths, 0);
            let fine = |rank| Partition::of(&lengths, buckets.clone(), rank, num_ranks * factor);
            for rank in 0..num_ranks {
                let coarse = Partition::of(&lengths, buckets.clone(), rank, num_ranks);
                for layer in 0..lengths.len() {
                    let parts = (0..factor).flat_map(|i| fine(rank * factor + i).owned(layer));
                    prop_assert!(parts.eq(coarse.owned(layer)), "layer {} of rank {}", layer, rank);
                }
            }
        }
    }
}
