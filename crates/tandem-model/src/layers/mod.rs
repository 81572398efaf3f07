//! Forward and backward over the layers, with explicit gradients.
//!
//! The residual stream `x` `[T,D]` is f32 or the compute type, its gradient f32; inside a layer, matrices and
//! activations are in the compute type. The gradient of the residual stream is one buffer that
//! every layer adds into.
//!
//! Under tensor parallelism a layer computes this rank's share, and exchanges the rest through a
//! [`TensorParallelOps`]; the residual stream and its gradient then hold this rank's rows. A pipeline stage
//! begins with the stream of the stage before, and ends with the stream that the next one takes.
//!
//! Nothing here reads tensor memory: the same code runs on a dry-run device, and that run is the
//! plan.

mod attention;
mod away;
mod block;
mod divergence;
mod dora;
mod embedding;
mod head;
mod idle;
mod linear_attention;
mod logits;
mod low_rank;
mod mixer;
mod mlp;
mod norm;
mod picked;
mod rows;
mod score;
mod split;
mod stage;
mod streams;

pub(crate) use attention::{AttentionKernel, Heads};
pub(crate) use block::{Block, SavePolicy};
pub use divergence::{DivergencePass, TeacherHead, TeacherRows};
pub(crate) use linear_attention::Recurrence;
pub use rows::BatchCapacity;
pub use split::{RankOrder, TensorParallelOps};
pub use stage::{Gradient, PipelineOps};
pub use streams::PolicyAndReferenceScores;

use tandem_kernels::ops::{HeadScores, NoiseRow};
use tandem_kernels::{DType, Device, Extent, Forest, MemoryKind, Tensor, View, ops};

use crate::Result;
use crate::decoder::{Decoder, Fp8Matmul};
use crate::layout::{LayerId, ParamKind};
use crate::weights::{LayerWeights, WeightSource};

use block::SavedBlock;
use head::SavedHead;
use picked::SelectedRows;
use rows::SomeRows;
use streams::StreamWeights;

/// Activations that a block's forward keeps for backward. Gradients are the same bits in every
/// mode: missing tensors are computed again by the same operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpointing {
    /// Everything that backward reads. Under tensor parallelism all but the outputs of norms, which
    /// would be whole on every rank.
    #[default]
    None,
    /// All but the outputs of norms and activations, which are cheap to compute again.
    Selective,
    /// The block's input alone: backward runs the block's forward once more.
    Block,
}

impl Checkpointing {
    fn keep(self, is_split: bool) -> SavePolicy {
        match self {
            Self::None if is_split => SavePolicy::AllButNorms,
            Self::None => SavePolicy::All,
            Self::Selective => SavePolicy::Selective,
            Self::Block => SavePolicy::Input,
        }
    }
}

/// Activations that a forward pass kept. Dropping them returns the memory.
pub struct SavedActivations {
    blocks: Vec<SavedBlock>,
    /// Present on the last stage.
    head: Option<SavedHead>,
}

/// A decoder on a device, with the options of its forward and backward passes.
#[derive(Clone, Copy)]
pub struct LayerExecutor<'a> {
    /// The decoder.
    pub decoder: &'a Decoder,
    /// Compute device.
    pub device: &'a Device,
    /// Compute type: matrices and activations inside a layer. It must be that of the weight source.
    pub dtype: DType,
    /// Activations kept between forward and backward.
    pub checkpointing: Checkpointing,
    /// Exchange with the other tensor-parallel ranks, if `decoder` is a shard.
    pub split: Option<&'a dyn TensorParallelOps>,
    /// Transfers to the other stages in generation, if `decoder` is a stage.
    pub stages: Option<&'a dyn PipelineOps>,
    /// Dropout key of adapters, another one for each micro-batch. `None` drops nothing.
    pub dropout: Option<u64>,
    /// Noise that is added to the embeddings of each token, in the policy's pass. `None` adds nothing.
    pub noise: Option<&'a [NoiseRow]>,
    /// Host memory to which the inputs of blocks are offloaded until backward; with
    /// [`Checkpointing::Block`] alone. Its device makes the copies: on a GPU in a stream of its
    /// own, while blocks compute.
    pub host: Option<&'a Device>,
    /// Capacity that memory is allocated for, if a batch has less.
    pub room: BatchCapacity,
    /// Whether the head keeps logits for backward without checkpointing. A divergence does not read
    /// them.
    pub keeps_logits: bool,
}

impl<'a> LayerExecutor<'a> {
    /// Makes passes over a whole decoder or a stage, without dropout, offload or spare capacity.
    pub fn new(decoder: &'a Decoder, device: &'a Device, dtype: DType, checkpointing: Checkpointing) -> Self {
        let room = BatchCapacity::default();
        let (split, stages, dropout, noise, host) = (None, None, None, None, None);
        let keeps_logits = true;
        Self {
            decoder,
            device,
            dtype,
            checkpointing,
            split,
            stages,
            dropout,
            noise,
            host,
            room,
            keeps_logits,
        }
    }
}

impl LayerExecutor<'_> {
    /// Scores the forest's predictions. A [score head](crate::spec::HeadKind::Score) gives each
    /// prediction a score in place of a log-probability.
    pub fn forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        scores: &mut HeadScores,
    ) -> Result<()> {
        self.check_stage()?;
        self.stage_forward(weights, forest, None, PolicyAndReferenceScores::one(scores), false)?;
        Ok(())
    }

    /// Runs embedding and blocks over tokens at the positions and with the attention of `attend`.
    /// With `rows`, the last block computes only these after attention: the result is `[R,D]`, else
    /// `[T,D]`. If backward follows, rows are distinct. With `both`, a reference that shares the
    /// base goes along.
    pub(crate) fn blocks_with(
        &self,
        weights: &mut dyn WeightSource,
        tokens: &[u32],
        attend: &mut dyn AttentionKernel,
        keep: SavePolicy,
        rows: Option<&[u32]>,
        both: bool,
    ) -> Result<(PolicyAndReferenceScores<Tensor>, Vec<SavedBlock>)> {
        self.check_split()?;
        weights.prefetch(LayerId::Embedding)?;
        weights.prefetch(LayerId::Block(0))?;
        let x = self.embed(weights, tokens, attend.places().positions, both)?;
        self.blocks_from(weights, x, tokens.len(), attend, keep, rows)
    }

    /// Runs the blocks, from the residual stream of `num_tokens` tokens before the first of them.
    fn blocks_from(
        &self,
        weights: &mut dyn WeightSource,
        mut x: PolicyAndReferenceScores<Tensor>,
        num_tokens: usize,
        attend: &mut dyn AttentionKernel,
        keep: SavePolicy,
        rows: Option<&[u32]>,
    ) -> Result<(PolicyAndReferenceScores<Tensor>, Vec<SavedBlock>)> {
        let (own, num_layers) = (self.decoder.blocks(), self.decoder.spec().num_layers);
        let mut saved = Vec::with_capacity(if keep == SavePolicy::Nothing { 0 } else { own.len() });
        for index in own.clone() {
            let layer = LayerId::Block(index);
            self.device.set_place(format_args!("forward {layer}"));
            self.prefetch_after(weights, index)?;
            let both = x.reference.is_some();
            let may_be_packed = self.reads_packed(weights, num_tokens, keep == SavePolicy::Nothing && !both);
            let layer_weights = StreamWeights::fetch(weights, layer, both, may_be_packed)?;
            x = x.try_map(|x, is_reference| {
                let walk = self.for_stream(is_reference);
                let block = Block { walk: &walk, weights: layer_weights.stream(is_reference), index };
                let rows = self.block_rows(num_tokens, rows.filter(|_| index + 1 == num_layers));
                let keep = if is_reference { SavePolicy::Nothing } else { keep };
                let away = if keep == SavePolicy::Nothing { None } else { self.send_away(&x)? };
                let (y, kept) = block.forward(x, attend, rows, keep)?;
                if keep != SavePolicy::Nothing {
                    saved.push(kept.leave(self.device, away)?);
                }
                Ok(y)
            })?;
            weights.release(layer);
        }
        Ok((x, saved))
    }

    /// Returns whether the products of a forward pass over so many tokens read packed weights as they are: FP8
    /// products, and on a CPU those of a pass of one stream that keeps nothing, whose bits are the same. DoRA's
    /// norms read all weights besides.
    fn reads_packed(&self, weights: &dyn WeightSource, num_tokens: usize, is_plain: bool) -> bool {
        let pays = |format| ops::reads_packed(self.device, num_tokens, format, self.dtype);
        let is_fp8 = self.decoder.fp8_matmul() >= Fp8Matmul::Forward;
        let reads = is_fp8 || (is_plain && weights.packed_format().is_some_and(pays));
        reads && !self.decoder.has_dora()
    }

    /// Returns whether the products of a backward pass, and of the forward pass that it repeats, read packed weights
    /// as they are.
    fn backward_reads_packed(&self) -> bool {
        self.decoder.fp8_matmul() == Fp8Matmul::ForwardAndBackward && !self.decoder.has_dora()
    }

    /// Returns the passes of one stream: a reference has neither dropout nor noise.
    fn for_stream(&self, is_reference: bool) -> Self {
        Self {
            dropout: self.dropout.filter(|_| !is_reference),
            noise: self.noise.filter(|_| !is_reference),
            ..*self
        }
    }

    /// Prefetches the layer after a block in the forward pass of this stage.
    fn prefetch_after(&self, weights: &mut dyn WeightSource, index: usize) -> Result<()> {
        if index + 1 < self.decoder.blocks().end {
            weights.prefetch(LayerId::Block(index + 1))
        } else if self.decoder.stage().is_last() {
            weights.prefetch(LayerId::Head)
        } else {
            Ok(())
        }
    }

    fn alloc(&self, rows: Extent, cols: usize, dtype: DType) -> Result<Tensor> {
        Ok(self.device.alloc_in(MemoryKind::Activations, rows, Extent::exact(cols), dtype)?)
    }

    /// Allocates `[times, rows]` f32.
    fn alloc_turned(&self, times: usize, rows: Extent) -> Result<Tensor> {
        Ok(self.device.alloc_in(MemoryKind::Activations, Extent::exact(times), rows, DType::F32)?)
    }

    /// Allocates one row of f32, whose size depends on no batch.
    fn alloc_row(&self, cols: usize) -> Result<Tensor> {
        self.alloc(Extent::exact(1), cols, DType::F32)
    }

    /// Returns an f32 tensor in the compute type.
    fn in_compute_type(&self, x: Tensor) -> Result<Tensor> {
        self.in_type(x, self.dtype)
    }

    /// Returns an f32 tensor in the residual stream's type.
    fn in_stream_type(&self, x: Tensor) -> Result<Tensor> {
        self.in_type(x, self.decoder.residual())
    }

    /// Returns the type of the gradient of a half's input: that of the product that gives it, where the
    /// stream is of the compute type and no sum follows, else f32.
    fn branch_type(&self) -> DType {
        let is_wide = self.decoder.residual() == DType::F32 || self.sums_terms();
        if is_wide { DType::F32 } else { self.dtype }
    }

    fn in_type(&self, x: Tensor, dtype: DType) -> Result<Tensor> {
        if x.dtype() == dtype {
            return Ok(x);
        }
        let mut cast = self.alloc(x.extent(), x.cols(), dtype)?;
        ops::cast(self.device, x.view(), cast.view_mut())?;
        Ok(cast)
    }

    /// Computes `x · wᵀ (+ bias)` in the compute type, and returns it with the result of
    /// [`LayerExecutor::linear_into`].
    fn linear(
        &self,
        weights: &LayerWeights,
        weight: ParamKind,
        bias: ParamKind,
        x: View,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mut y = self.alloc(x.extent(), weights.weight(weight)?.rows(), self.dtype)?;
        let reduced = self.linear_into(weights, (weight, weights.get(bias)), x, &mut y)?;
        Ok((y, reduced))
    }

    /// Gathers the given rows of a matrix, or returns all of it.
    fn pick<'x>(&self, x: View<'x>, rows: Option<SomeRows>) -> Result<SelectedRows<'x>> {
        let Some(SomeRows { rows, extent }) = rows else { return Ok(SelectedRows::All(x)) };
        let mut picked = self.alloc(extent, x.cols(), x.dtype())?;
        ops::gather_rows(self.device, x, rows, picked.view_mut())?;
        Ok(SelectedRows::Some(picked))
    }

    /// Scatters the rows of `x` to their places among `all`, zero elsewhere; returns `x` itself
    /// without `rows`.
    fn spread(&self, x: Tensor, rows: Option<SomeRows>, all: Extent) -> Result<Tensor> {
        let Some(SomeRows { rows, .. }) = rows else { return Ok(x) };
        let mut whole = self.alloc(all, x.cols(), x.dtype())?;
        ops::spread_rows(self.device, x.view(), rows, whole.view_mut())?;
        Ok(whole)
    }
}
