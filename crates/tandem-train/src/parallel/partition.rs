//! Which part of every layer each rank owns, and which layers travel together.

use std::ops::Range;

use tandem_kernels::Backend;
use tandem_kernels::ops::SQUARES_BLOCK;
use tandem_model::{Decoder, LayerId};

use crate::config::{ComputeConfig, ShardedState};
use crate::parallel::DeviceMesh;

/// Most elements of a bucket of several layers: at 8 bytes each far more than the latency of a call
/// costs, and few enough that backward goes on for long while they travel.
const BUCKET: usize = 1 << 20;

/// Every layer's flat buffer, cut into one contiguous part for each rank, in the order of ranks.
///
/// Small neighbouring layers are a *bucket*: they are reduced in one call, and cut as if they were one
/// buffer. Shards begin at multiples of the block over which squares are summed, so the gradient norm
/// has the same bits for any number of ranks. A bucket with fewer blocks than ranks leaves some ranks
/// without a shard.
///
/// On GPUs all shards of a bucket are equal, and the last rank owns the rest as well: NCCL moves equal parts
/// in one operation, and the rest in another. There the layers of a bucket begin at multiples of the block.
#[derive(Clone, Debug)]
pub struct Partition {
    rank: usize,
    /// Whether the layers of a bucket of several are padded to whole blocks.
    is_padded: bool,
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
        Self::of(&lengths(decoder), None, rank, num_ranks, None)
    }

    /// Creates the partition of a run among the ranks of a shard group: everything, where nothing
    /// is divided.
    pub fn for_run(compute: &ComputeConfig, decoder: &Decoder, mesh: &mut DeviceMesh) -> Self {
        let (shard, sharded) = (mesh.shard(), compute.sharded());
        let place = if sharded.is_none() { (0, 1) } else { (shard.rank(), shard.size()) };
        Self::among(compute, decoder, place, mesh.data().size())
    }

    /// Divides a run's state among ranks, of which this is `rank`, in a data group of `data` ranks. Among a
    /// multiple of the ranks, parts are parts of these. Small layers travel together, unless weights are
    /// gathered layer by layer.
    pub fn among(
        compute: &ComputeConfig,
        decoder: &Decoder,
        (rank, num_ranks): (usize, usize),
        data: usize,
    ) -> Self {
        let is_gpu = compute.devices.backend() == Backend::Cuda;
        let unit = (is_gpu && num_ranks > 1).then_some(data);
        Self::divided(compute.sharded(), decoder, (rank, num_ranks), unit)
    }

    /// [`Partition::among`] with equal parts where there is a `unit`: the most parts that there are.
    pub(crate) fn divided(
        sharded: ShardedState,
        decoder: &Decoder,
        (rank, num_ranks): (usize, usize),
        unit: Option<usize>,
    ) -> Self {
        let lengths = lengths(decoder);
        if sharded.weights {
            return Self::of(&lengths, None, rank, num_ranks, unit);
        }
        // A tied token table is emitted twice in a backward pass, so it travels alone.
        let apart = usize::from(decoder.layers().first() == Some(&LayerId::Embedding));
        Self::of(&lengths, Some(buckets(&lengths, apart)), rank, num_ranks, unit)
    }

    /// One rank owns everything.
    pub fn whole(decoder: &Decoder) -> Self {
        Self::new(decoder, 0, 1)
    }

    /// Divides layers, by default each by itself. With a `unit`, a multiple of the number of ranks, parts
    /// are equal but for the last, and parts among fewer ranks are made of those among `unit`.
    fn of(
        lengths: &[Length],
        buckets: Option<Vec<Range<usize>>>,
        rank: usize,
        num_ranks: usize,
        unit: Option<usize>,
    ) -> Self {
        let each = || (0..lengths.len()).map(|layer| layer..layer + 1).collect();
        let buckets = buckets.unwrap_or_else(each);
        let mut this = Self {
            rank,
            is_padded: unit.is_some(),
            counts: Vec::with_capacity(lengths.len()),
            bucket_counts: Vec::with_capacity(buckets.len()),
            buckets: Vec::new(),
        };
        for layers in &buckets {
            let parts = divide(&lengths[layers.clone()], num_ranks, unit);
            let of_rank = |rank: usize| parts.iter().map(|counts| this.padded(layers, counts[rank])).sum();
            let of_ranks = (0..num_ranks).map(of_rank).collect();
            this.bucket_counts.push(of_ranks);
            this.counts.extend(parts);
        }
        Self { buckets, ..this }
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

    /// Elements of a bucket that each rank owns, with padding.
    pub fn bucket_counts(&self, bucket: usize) -> &[usize] {
        &self.bucket_counts[bucket]
    }

    /// Range of a bucket that this rank owns.
    pub fn bucket_owned(&self, bucket: usize) -> Range<usize> {
        own(&self.bucket_counts[bucket], self.rank)
    }

    /// Elements of a bucket, with padding.
    pub fn bucket_len(&self, bucket: usize) -> usize {
        self.bucket_counts[bucket].iter().sum()
    }

    /// Range of a layer in its bucket.
    pub fn place(&self, layer: usize) -> Range<usize> {
        let layers = &self.buckets[self.bucket_of(layer)];
        let start = (layers.start..layer).map(|layer| self.padded(layers, self.len(layer))).sum();
        start..start + self.len(layer)
    }

    /// Range of what this rank owns of a layer in what it owns of the bucket.
    pub fn owned_place(&self, layer: usize) -> Range<usize> {
        let layers = &self.buckets[self.bucket_of(layer)];
        let start = (layers.start..layer).map(|layer| self.padded(layers, self.owned(layer).len())).sum();
        start..start + self.owned(layer).len()
    }

    /// Room of so many elements of a layer in the bucket of `layers`.
    fn padded(&self, layers: &Range<usize>, len: usize) -> usize {
        if self.is_padded && layers.len() > 1 { len.next_multiple_of(SQUARES_BLOCK) } else { len }
    }
}

fn own(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// Length of a layer.
#[derive(Clone, Copy, Debug)]
struct Length {
    /// All elements.
    all: usize,
    /// Elements that equal parts are cut from, at the start.
    even: usize,
}

impl From<usize> for Length {
    fn from(all: usize) -> Self {
        Self { all, even: all }
    }
}

fn lengths(decoder: &Decoder) -> Vec<Length> {
    let length = |layer| {
        let (all, matrices) = (decoder.trained(layer).len, decoder.trained(layer).compute_len);
        // Where matrices travel by themselves they should be in equal parts. What is behind them is short.
        Length { all, even: if all - matrices <= matrices / 8 { matrices } else { all } }
    };
    decoder.layers().into_iter().map(length).collect()
}

/// Joins neighbours from the last layer to the first, as backward completes them; the first `apart`
/// layers stay alone.
fn buckets(lengths: &[Length], apart: usize) -> Vec<Range<usize>> {
    let mut buckets: Vec<Range<usize>> = Vec::new();
    let sum = |layers: Range<usize>| lengths[layers].iter().map(|length| length.all).sum::<usize>();
    for layer in (0..lengths.len()).rev() {
        match buckets.last_mut() {
            Some(bucket) if layer >= apart && sum(layer..bucket.end) <= BUCKET => {
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
fn divide(lengths: &[Length], num_ranks: usize, unit: Option<usize>) -> Vec<Vec<usize>> {
    let blocks: Vec<usize> = lengths.iter().map(|length| length.all.div_ceil(SQUARES_BLOCK)).collect();
    let all: usize = blocks.iter().sum();
    // Blocks of each of so many equal parts. Layers of a bucket are padded.
    let each = unit.map(|unit| match lengths {
        [length] => length.even / SQUARES_BLOCK / unit,
        _ => all / unit,
    });
    let end = |rank: usize| match unit.zip(each) {
        Some((unit, each)) if rank < num_ranks => each * (unit / num_ranks) * rank,
        _ => all * rank / num_ranks,
    };
    let mut before = 0;
    let layer = |(length, &own): (&Length, &usize)| {
        let first = before;
        before += own;
        let end = |rank: usize| {
            let blocks = end(rank).clamp(first, first + own) - first;
            length.all.min(blocks * SQUARES_BLOCK)
        };
        (0..num_ranks).map(|rank| end(rank + 1) - end(rank)).collect()
    };
    lengths.iter().zip(&blocks).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(lengths: &[usize]) -> Vec<Length> {
        lengths.iter().map(|&length| length.into()).collect()
    }

    #[test]
    fn parts_cover_layers_and_begin_at_blocks() {
        for len in [0, 1, SQUARES_BLOCK - 1, SQUARES_BLOCK, 3 * SQUARES_BLOCK + 5, 100 * SQUARES_BLOCK] {
            for num_ranks in [1, 2, 3, 4, 8] {
                let lengths = [len, 5, 7 * SQUARES_BLOCK + 1, 0, len];
                for (layers, unit) in [&lengths[..1], &lengths[..]]
                    .into_iter()
                    .flat_map(|all| [(all, None), (all, Some(2 * num_ranks))])
                {
                    let parts = divide(&of(layers), num_ranks, unit);
                    for (&len, counts) in layers.iter().zip(&parts) {
                        assert_eq!(counts.iter().sum::<usize>(), len);
                        let mut start = 0;
                        for count in counts {
                            let is_aligned = *count == 0 || start % SQUARES_BLOCK == 0;
                            assert!(is_aligned, "{len} over {num_ranks} ranks");
                            start += count;
                        }
                    }
                    // A rank's part is one range of the layers in a row, without padding.
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
        let divide = |lengths: &[usize], num_ranks| divide(&of(lengths), num_ranks, None);
        assert_eq!(divide(&[8 * SQUARES_BLOCK], 4), [[2 * SQUARES_BLOCK; 4]]);
        assert_eq!(divide(&[5], 2), [[0, 5]]);
        assert_eq!(divide(&[3 * SQUARES_BLOCK, 5], 2), [[2 * SQUARES_BLOCK, SQUARES_BLOCK], [0, 5]]);
    }

    #[test]
    fn parts_on_gpus_are_equal_but_for_the_last_ones_rest() {
        const B: usize = SQUARES_BLOCK;
        let divide = |lengths: &[Length], num_ranks| divide(lengths, num_ranks, Some(4));
        assert_eq!(divide(&of(&[11 * B + 3]), 4), [[2 * B, 2 * B, 2 * B, 5 * B + 3]]);
        // Of two ranks each has the parts of two of four.
        assert_eq!(divide(&of(&[11 * B + 3]), 2), [[4 * B, 7 * B + 3]]);
        assert_eq!(divide(&of(&[3 * B]), 4), [[0, 0, 0, 3 * B]]);
        // Matrices by themselves are in equal parts, too.
        assert_eq!(divide(&[Length { all: 8 * B + 3, even: 8 * B - 1 }], 4), [[B, B, B, 5 * B + 3]]);
        let lengths = of(&[5 * B + 3, 2, 2 * B, 7]);
        let partition = |rank, num_ranks| {
            Partition::of(&lengths, Some(std::iter::once(0..4).collect()), rank, num_ranks, Some(4))
        };
        let own = partition(3, 4);
        // Layers are padded to 6, 1, 2 and 1 blocks.
        assert_eq!(own.bucket_counts(0), [2 * B, 2 * B, 2 * B, 4 * B]);
        assert_eq!((own.bucket_owned(0), own.place(2)), (6 * B..10 * B, 7 * B..9 * B));
        assert_eq!(
            (own.owned(1), own.owned_place(2), own.owned_place(3)),
            (0..2, B..3 * B, 3 * B..3 * B + 7)
        );
        assert_eq!(partition(0, 2).bucket_counts(0), [4 * B, 6 * B]);
    }

    #[test]
    fn small_layers_travel_together_and_the_token_table_alone() {
        let buckets = |lengths: &[usize], apart| buckets(&of(lengths), apart);
        assert_eq!(buckets(&[5, 6, 7, 8], 1), [0..1, 1..4]);
        let one =
            |lengths: &[usize], apart| buckets(lengths, apart).into_iter().next().map(|first| first.end);
        assert_eq!((one(&[5, 6, 7, 8], 0), one(&[9], 1)), (Some(4), Some(1)));
        let big = BUCKET - 10;
        assert_eq!(buckets(&[0, big, 5, 5, 1, big, big + 11], 1), [0..1, 1..3, 3..6, 6..7]);
        let lengths = [9, 6 * SQUARES_BLOCK, 3, 2 * SQUARES_BLOCK];
        let partition = Partition::of(&of(&lengths), Some(buckets(&lengths, 1)), 1, 2, None);
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
            is_even in any::<bool>(),
        ) {
            let buckets = buckets(&of(&lengths), apart);
            let unit = is_even.then_some(3 * num_ranks);
            prop_assert_eq!(buckets.iter().cloned().flatten().collect::<Vec<_>>(), (0..lengths.len()).collect::<Vec<_>>());
            let of = |rank| Partition::of(&of(&lengths), Some(buckets.clone()), rank, num_ranks, unit);
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
            is_even in any::<bool>(),
        ) {
            let all = of(&lengths);
            let buckets = Some(buckets(&all, 0));
            let unit = is_even.then_some(num_ranks * factor);
            let fine = |rank| Partition::of(&all, buckets.clone(), rank, num_ranks * factor, unit);
            for rank in 0..num_ranks {
                let coarse = Partition::of(&all, buckets.clone(), rank, num_ranks, unit);
                for layer in 0..lengths.len() {
                    let parts = (0..factor).flat_map(|i| fine(rank * factor + i).owned(layer));
                    prop_assert!(parts.eq(coarse.owned(layer)), "layer {} of rank {}", layer, rank);
                }
            }
        }
    }
}
