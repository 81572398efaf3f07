//! Blocks into which sums over sharded dimensions are cut, so that their bits do not depend on the
//! number of tensor-parallel ranks.
//!
//! A model has 1, 2, 4 or 8 blocks: the most that divide its key/value heads. Each has some heads, some
//! channels of the feed-forward and some tokens of the vocabulary. A rank of a group whose size divides
//! the number of blocks holds neighbouring blocks, and sums them as a subtree of the tree in which one
//! rank sums all ([`DepthTree`]).

use std::ops::Range;

use tandem_kernels::ops::DepthTree;

use crate::layout::{ParamKind, TensorParallelShard};
use crate::spec::DecoderSpec;

/// Most blocks of a model.
const MOST_BLOCKS: usize = 8;

/// Blocks that a decoder or one of its shards holds.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    /// Blocks of the whole model, and this shard's among them; one of one if the shard's boundaries
    /// are not those of blocks.
    count: usize,
    own: Range<usize>,
    out: Option<DepthTree>,
    qkv: Option<DepthTree>,
    down: Option<DepthTree>,
    up: Option<DepthTree>,
    delta_in: Option<DepthTree>,
    delta_out: Option<DepthTree>,
    /// Ranges of this shard's tokens; empty for one block.
    vocabulary: Vec<Range<usize>>,
}

/// Returns the number of blocks of a model.
pub(crate) fn num_blocks(spec: &DecoderSpec) -> usize {
    let divides = |count: usize| {
        let linear_heads = spec.linear_attention.as_ref().map_or(count, |linear| linear.shape.key_heads);
        spec.attention.kv_heads.is_multiple_of(count)
            && linear_heads.is_multiple_of(count)
            && spec.mlp.width.min(spec.vocab_size) >= count
    };
    let counts = std::iter::successors(Some(MOST_BLOCKS), |count| Some(count / 2));
    counts.take_while(|&count| count > 1).find(|&count| divides(count)).unwrap_or(1)
}

impl Blocks {
    /// Makes the blocks of a shard of a model; `spec` is the shard's.
    pub(crate) fn new(whole: &DecoderSpec, slice: TensorParallelShard, spec: &DecoderSpec) -> Self {
        let count = num_blocks(whole);
        if !count.is_multiple_of(slice.count) || count == 1 {
            return Self::one();
        }
        let own = slice.range(count);
        let num_own = own.len();
        // Heads divide evenly.
        let heads = |num: usize, width: usize, start: usize, block: usize| {
            let of_block = num / num_own * width;
            start + block * of_block..start + (block + 1) * of_block
        };
        // Channels and tokens by the boundaries of the whole model's blocks.
        let first_of = |len: usize| slice.range(len).start;
        let part = |len: usize, block: usize| {
            let index = own.start + block;
            let range = TensorParallelShard { index, count }.range(len);
            range.start - first_of(len)..range.end - first_of(len)
        };
        let tree = |ranges: &dyn Fn(usize) -> Vec<Range<usize>>| {
            Some(DepthTree::new((0..num_own).map(ranges).collect()))
        };
        let (attention, mlp) = (&spec.attention, &spec.mlp);
        let (query, kv) = (attention.projected_query_width(), attention.kv_width());
        let of_heads = |block| {
            let queries = heads(attention.heads, query / attention.heads, 0, block);
            let keys = heads(attention.kv_heads, attention.head_dim, query, block);
            vec![queries, keys.clone(), keys.start + kv..keys.end + kv]
        };
        let gates = if mlp.gated { 2 } else { 1 };
        let of_channels = |block| {
            let channels = part(whole.mlp.width, block);
            let gate = |gate: usize| gate * mlp.width + channels.start..gate * mlp.width + channels.end;
            (0..gates).map(gate).collect()
        };
        let shape = spec.linear_attention.as_ref().map(|linear| &linear.shape);
        let delta_in = shape.and_then(|shape| {
            let keys = (shape.key_heads, shape.key_dim);
            let (values, gates) = ((shape.value_heads, shape.value_dim), (shape.value_heads, 1));
            let of_heads = |block| {
                let mut start = 0;
                let parts = [keys, keys, values, values, gates, gates].map(|(num, width)| {
                    start += num * width;
                    heads(num, width, start - num * width, block)
                });
                parts.to_vec()
            };
            tree(&of_heads)
        });
        let delta_out =
            shape.and_then(|shape| tree(&|block| vec![heads(shape.value_heads, shape.value_dim, 0, block)]));
        Self {
            out: tree(&|block| vec![heads(attention.heads, attention.head_dim, 0, block)]),
            qkv: tree(&of_heads),
            down: tree(&|block| vec![part(whole.mlp.width, block)]),
            up: tree(&of_channels),
            delta_in,
            delta_out,
            vocabulary: (0..num_own).map(|block| part(whole.vocab_size, block)).collect(),
            count,
            own,
        }
    }

    /// One block: no sum is cut.
    pub(crate) fn one() -> Self {
        let own = 0..1;
        let [out, qkv, down, up, delta_in, delta_out] = [const { None }; 6];
        Self { count: 1, own, out, qkv, down, up, delta_in, delta_out, vocabulary: Vec::new() }
    }

    /// Returns whether the model has one block.
    pub(crate) fn is_one(&self) -> bool {
        self.count == 1
    }

    /// Returns the number of blocks that the shard holds.
    pub(crate) fn num_own(&self) -> usize {
        self.own.len()
    }

    /// Returns the tree of the sum over the sharded dimension of a matrix: the columns of a projection
    /// back, the rows of any other. `None` if it is not cut.
    pub(crate) fn tree(&self, matrix: ParamKind) -> Option<&DepthTree> {
        match matrix {
            ParamKind::OutWeight => self.out.as_ref(),
            ParamKind::QkvWeight => self.qkv.as_ref(),
            ParamKind::DownWeight => self.down.as_ref(),
            ParamKind::UpWeight => self.up.as_ref(),
            ParamKind::DeltaInWeight => self.delta_in.as_ref(),
            ParamKind::DeltaOutWeight => self.delta_out.as_ref(),
            _ => None,
        }
    }

    /// Returns the blocks of the shard's tokens; empty for one.
    pub(crate) fn vocabulary(&self) -> &[Range<usize>] {
        &self.vocabulary
    }

    /// Cuts the tokens of part `part` of a group of ranks: the ends of each block's tokens, of
    /// `num_tokens` in all. `None` if there is one block.
    pub(crate) fn of_tokens(&self, part: usize, num_tokens: usize) -> Option<Vec<Range<usize>>> {
        let num_own = self.own.len();
        (num_own > 1).then(|| {
            let blocks = part * num_own..(part + 1) * num_own;
            blocks.map(|index| TensorParallelShard { index, count: self.count }.range(num_tokens)).collect()
        })
    }
}
