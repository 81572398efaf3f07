//! The walk over layers: forward, and backward with explicit gradients.
//!
//! The residual stream `x` `[T,D]` and its gradient are f32; inside a layer, matrices and activations are in the
//! compute type. The gradient of the residual stream is one buffer that every layer adds into.
//!
//! On a slice of a decoder a layer does its share, and asks a [`Split`] for what those have who hold the others. Of the
//! residual stream and its gradient it then has its own rows alone. On a stage of a decoder the walk begins with what the stage
//! before gives, and ends with what the next one takes.
//!
//! Nothing here reads tensor memory: the same code runs on a dry-run device, and that is the plan.

mod attention;
mod away;
mod block;
mod embedding;
mod head;
mod idle;
mod logits;
mod low_rank;
mod mlp;
mod norm;
mod picked;
mod rows;
mod score;
mod split;
mod stage;
mod streams;

pub(crate) use attention::Attend;
pub(crate) use block::{Block, Keep};
pub use rows::Room;
pub use split::Split;
pub use stage::Gradient;
pub use streams::Streams;

use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Extent, Forest, Kind, Tensor, View, ops};

use crate::Result;
use crate::decoder::Decoder;
use crate::layout::{LayerId, Part};
use crate::weights::{LayerWeights, WeightSource};

use block::SavedBlock;
use head::SavedHead;
use picked::Picked;
use rows::{Shares, SomeRows};
use streams::StreamWeights;

/// What the forward pass of a block leaves in memory for backward. Gradients are the same bits in every mode:
/// what is missing is computed again by the same operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpointing {
    /// Everything that backward reads; on a slice, all but the outputs of norms, which would be whole on every rank.
    #[default]
    None,
    /// All but the outputs of norms and activations, which cost little to compute again.
    Selective,
    /// The block's input alone; backward runs the block's forward once more.
    Block,
}

impl Checkpointing {
    fn keep(self, is_split: bool) -> Keep {
        match self {
            Self::None if is_split => Keep::AllButNorms,
            Self::None => Keep::All,
            Self::Selective => Keep::Selective,
            Self::Block => Keep::Input,
        }
    }
}

/// What a forward pass kept for its backward pass. Dropping it returns the memory.
pub struct SavedWalk {
    blocks: Vec<SavedBlock>,
    /// Of the last stage.
    head: Option<SavedHead>,
}

/// Runs a decoder on a device.
#[derive(Clone, Copy)]
pub struct Walk<'a> {
    /// The decoder.
    pub decoder: &'a Decoder,
    /// Where to compute.
    pub device: &'a Device,
    /// Type of matrices and activations inside a layer; must be what the weight source gives.
    pub dtype: DType,
    /// What to keep between forward and backward.
    pub checkpointing: Checkpointing,
    /// Who holds the other slices, if `decoder` is one.
    pub split: Option<&'a dyn Split>,
    /// What decides which inputs of an adapter are dropped: another number for each micro-batch. `None` drops none.
    pub dropout: Option<u64>,
    /// Where the inputs of blocks wait for backward, if not where they were computed; with [`Checkpointing::Block`] alone. It copies
    /// them: of a GPU with a stream of its own, so that it does while blocks are computed.
    pub host: Option<&'a Device>,
    /// What to take memory for where a forest has less.
    pub room: Room,
}

impl<'a> Walk<'a> {
    /// A walk over a whole decoder, or a stage of one, that drops nothing, computes where everything lies, and takes memory for
    /// each forest as it is.
    pub fn new(decoder: &'a Decoder, device: &'a Device, dtype: DType, checkpointing: Checkpointing) -> Self {
        let room = Room::default();
        Self { decoder, device, dtype, checkpointing, split: None, dropout: None, host: None, room }
    }
}

impl Walk<'_> {
    /// Scores the forest's predictions and keeps nothing. A [score head](crate::spec::HeadKind::Score) gives each prediction's row
    /// a number, which stands where a log-probability would, here and in [`Walk::backward`].
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a position beyond the decoder's, weights cannot be had, or memory ends.
    pub fn forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        scores: &mut HeadScores,
    ) -> Result<()> {
        self.check_stage()?;
        self.stage_forward(weights, forest, None, Streams::one(scores), false)?;
        Ok(())
    }

    /// Embedding and blocks over tokens at the positions that `attend` tells, with its attention. After the last block only
    /// `rows` are needed, so what it does after attention it does for them alone: the result is `[R,D]`, or `[T,D]` for
    /// all. If backward is to follow, rows are distinct. With `both` the reference goes along, if it shares the base.
    pub(crate) fn blocks_with(
        &self,
        weights: &mut dyn WeightSource,
        tokens: &[u32],
        attend: &mut dyn Attend,
        keep: Keep,
        rows: Option<&[u32]>,
        both: bool,
    ) -> Result<(Streams<Tensor>, Vec<SavedBlock>)> {
        self.check_split()?;
        weights.prefetch(LayerId::Embedding)?;
        weights.prefetch(LayerId::Block(0))?;
        let x = self.embed(weights, tokens, attend.positions(), both)?;
        self.blocks_from(weights, x, tokens.len(), attend, keep, rows)
    }

    /// The blocks, from the residual stream of `num_tokens` tokens before the first of them.
    fn blocks_from(
        &self,
        weights: &mut dyn WeightSource,
        mut x: Streams<Tensor>,
        num_tokens: usize,
        attend: &mut dyn Attend,
        keep: Keep,
        rows: Option<&[u32]>,
    ) -> Result<(Streams<Tensor>, Vec<SavedBlock>)> {
        let (own, num_layers) = (self.decoder.blocks(), self.decoder.spec().num_layers);
        let mut saved = Vec::with_capacity(if keep == Keep::Nothing { 0 } else { own.len() });
        for index in own.clone() {
            let layer = LayerId::Block(index);
            self.device.note(format_args!("forward {layer}"));
            self.prefetch_after(weights, index)?;
            let layer_weights = StreamWeights::fetch(weights, layer, x.reference.is_some())?;
            x = x.try_map(|x, is_reference| {
                let walk = self.of_stream(is_reference);
                let block = Block { walk: &walk, weights: layer_weights.of(is_reference), index };
                let rows = self.block_rows(num_tokens, rows.filter(|_| index + 1 == num_layers));
                let keep = if is_reference { Keep::Nothing } else { keep };
                let away = if keep == Keep::Nothing { None } else { self.send_away(&x)? };
                let (y, kept) = block.forward(x, attend, rows, keep)?;
                if keep != Keep::Nothing {
                    saved.push(kept.leave(self.device, away)?);
                }
                Ok(y)
            })?;
            weights.release(layer);
        }
        Ok((x, saved))
    }

    /// The walk of one stream: of a reference nothing is dropped.
    fn of_stream(&self, is_reference: bool) -> Self {
        Self { dropout: self.dropout.filter(|_| !is_reference), ..*self }
    }

    /// Announces what comes after a block in the forward pass of this stage.
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
        Ok(self.device.alloc_in(Kind::Activations, rows, Extent::exact(cols), dtype)?)
    }

    /// A number for each of some rows, `times` over: `[times, rows]` f32.
    fn alloc_turned(&self, times: usize, rows: Extent) -> Result<Tensor> {
        Ok(self.device.alloc_in(Kind::Activations, Extent::exact(times), rows, DType::F32)?)
    }

    /// What does not depend on a batch: one row, f32.
    fn alloc_row(&self, cols: usize) -> Result<Tensor> {
        self.alloc(Extent::exact(1), cols, DType::F32)
    }

    /// `x · wᵀ (+ bias)` in the compute type, for the parts of one layer; and what [`Walk::linear_into`] returns.
    fn linear(
        &self,
        weights: &LayerWeights,
        weight: Part,
        bias: Part,
        x: View,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mut y = self.alloc(x.extent(), weights.require(weight)?.rows(), self.dtype)?;
        let reduced = self.linear_into(weights, (weight, weights.get(bias)), x, None, &mut y)?;
        Ok((y, reduced))
    }

    /// `x · wᵀ (+ bias) + residual` f32, back to the residual stream: this rank's term of the sum over ranks. `residual` is a
    /// term of all rows, or this rank's rows of the stream. And what [`Walk::linear_into`] returns.
    fn linear_term(
        &self,
        weights: &LayerWeights,
        weight: Part,
        bias: Part,
        x: View,
        residual: View,
        shares: &Shares,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let bias = weights.get(bias).filter(|_| self.leads());
        let mut y = self.alloc(x.extent(), weights.require(weight)?.rows(), DType::F32)?;
        let has_all_rows = residual.rows() == y.rows();
        let residual_of_all = has_all_rows.then_some(residual);
        let reduced = self.linear_into(weights, (weight, bias), x, residual_of_all, &mut y)?;
        if !has_all_rows {
            ops::add(self.device, residual, y.view_mut().row_range(shares.own()))?;
        }
        Ok((y, reduced))
    }

    /// The given rows of a matrix, or all of it.
    fn pick<'x>(&self, x: View<'x>, rows: Option<SomeRows>) -> Result<Picked<'x>> {
        let Some(SomeRows { rows, extent }) = rows else { return Ok(Picked::All(x)) };
        let mut picked = self.alloc(extent, x.cols(), x.dtype())?;
        ops::gather_rows(self.device, x, rows, picked.view_mut())?;
        Ok(Picked::Some(picked))
    }

    /// The opposite: `x` as it stands, or its rows at their places among `all`, of which the others are zero.
    fn spread(&self, x: Tensor, rows: Option<SomeRows>, all: Extent) -> Result<Tensor> {
        let Some(SomeRows { rows, .. }) = rows else { return Ok(x) };
        let mut whole = self.alloc(all, x.cols(), x.dtype())?;
        ops::spread_rows(self.device, x.view(), rows, whole.view_mut())?;
        Ok(whole)
    }
}
