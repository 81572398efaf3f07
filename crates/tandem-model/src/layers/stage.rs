//! Forward and backward of one pipeline stage: from tokens, or the stream of the stage before, to
//! scores, or the stream for the next one. A whole decoder is its only stage.

use tandem_kernels::ops::HeadScores;
use tandem_kernels::{Backend, Device, Extent, Forest, Tensor};

use super::attention::{AttentionKernel, ForestAttention};
use super::block::Block;
use super::divergence::DivergencePass;
use super::head::ScoredRows;
use super::{LayerExecutor, PolicyAndReferenceScores, SavePolicy, SavedActivations};
use crate::layout::LayerId;
use crate::layout::PipelineStage;
use crate::weights::{GradientSink, WeightSource};
use crate::{ModelError, Result};

/// Gradient that a stage's backward begins with.
pub enum Gradient<'a> {
    /// The last stage: derivative of the loss by each prediction's log-probability.
    OfScores {
        /// Scores of the forward pass.
        scores: &'a HeadScores,
        /// One derivative per prediction.
        d_log_prob: &'a [f32],
    },
    /// The last stage: derivative of the loss by the divergence of each prediction's row.
    OfDivergence {
        /// Scores of the forward pass.
        scores: &'a HeadScores,
        /// One derivative per prediction.
        d_divergence: &'a [f32],
        /// The teacher, with the divergences.
        pass: DivergencePass<'a>,
    },
    /// Other stages: gradient of forward's output, this rank's rows of `[T,D]` f32, from the next
    /// stage.
    OfStream(Tensor),
}

/// Transfers of a generating model's pipeline stages. All stages make the same calls in the same order.
pub trait PipelineOps {
    /// Hands the residual stream to the next stage.
    fn send_stream(&self, device: &Device, x: &Tensor) -> Result<()>;

    /// Receives the residual stream of the stage before into `x`.
    fn recv_stream(&self, device: &Device, x: &mut Tensor) -> Result<()>;

    /// Broadcasts numbers of the last stage.
    fn broadcast_from_last(&self, numbers: &mut [i64]) -> Result<()>;
}

impl LayerExecutor<'_> {
    /// Runs the layers of this stage over tokens, from and to the other stages: embedding and blocks, as
    /// [`LayerExecutor::blocks_with`]. `None` on all stages but the last.
    pub(crate) fn generate_blocks(
        &self,
        weights: &mut dyn WeightSource,
        tokens: &[u32],
        attend: &mut dyn AttentionKernel,
        rows: Option<&[u32]>,
    ) -> Result<Option<Tensor>> {
        let (stage, device) = (self.decoder.stage(), self.device);
        let keep = SavePolicy::Nothing;
        let x = match self.stages.filter(|_| !stage.is_first()) {
            None => self.blocks_with(weights, tokens, attend, keep, rows, false)?.0,
            Some(stages) => {
                self.check_split()?;
                // Before the stream has room, the last layer of the pass before is dropped, whose place
                // depends on that pass. Otherwise its gap would grow the arena beyond the plan.
                let first = LayerId::Block(self.decoder.blocks().start);
                weights.fetch_for(first, self.reads_packed(weights, tokens.len(), true))?;
                let own = self.shares(tokens.len()).own_extent();
                let mut x = self.alloc(own, self.decoder.spec().hidden_size, self.decoder.residual())?;
                stages.recv_stream(device, &mut x)?;
                let x = PolicyAndReferenceScores::one(x);
                self.blocks_from(weights, x, tokens.len(), attend, keep, rows)?.0
            }
        };
        match self.stages.filter(|_| !stage.is_last()) {
            None => Ok(Some(x.policy)),
            Some(stages) => stages.send_stream(device, &x.policy).map(|()| None),
        }
    }

    /// Runs the forward pass of a stage. `x` is the residual stream `[T,D]` of the stage
    /// before, this rank's rows; the first stage has none. The last stage scores the forest's
    /// predictions, the others return the stream for the next one. With `keep`,
    /// [`LayerExecutor::stage_backward`] follows. A reference that shares the base goes along if it has
    /// `scores`.
    pub fn stage_forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        x: Option<PolicyAndReferenceScores<Tensor>>,
        scores: PolicyAndReferenceScores<&mut HeadScores>,
        keep: bool,
    ) -> Result<(Option<PolicyAndReferenceScores<Tensor>>, SavedActivations)> {
        let stage = self.decoder.stage();
        let rows = ScoredRows::new(forest);
        let kept = if keep { self.checkpointing.keep(self.split.is_some()) } else { SavePolicy::Nothing };
        let mut attend = ForestAttention { device: self.device, forest };
        let of_last_block = rows.of_last_block();
        let (x, blocks) = match x {
            None if stage.is_first() => {
                let both = scores.reference.is_some();
                self.blocks_with(weights, &forest.tokens, &mut attend, kept, of_last_block, both)?
            }
            Some(x) if !stage.is_first() => {
                self.check_split()?;
                self.check_stream(forest, &x.policy)?;
                x.reference.as_ref().map_or(Ok(()), |x| self.check_stream(forest, x))?;
                weights.prefetch(LayerId::Block(self.decoder.blocks().start))?;
                self.blocks_from(weights, x, forest.num_tokens(), &mut attend, kept, of_last_block)?
            }
            _ => {
                let (index, count) = (stage.index, stage.count);
                return Err(ModelError::Invalid(format!(
                    "stage {index} of {count}: every stage but the first begins with the residual stream of the stage before"
                )));
            }
        };
        if !stage.is_last() {
            return Ok((Some(x), SavedActivations { blocks, head: None }));
        }
        let head = self.head_forward(weights, forest, rows, x, scores, keep)?;
        Ok((None, SavedActivations { blocks, head: Some(head) }))
    }

    /// Runs the backward pass of a stage: adds the gradient of `Σ_i d_log_prob[i] · log_prob[i]`
    /// into the sink, from the last layer to the first. Returns the gradient of the stream that
    /// forward took, `[T,D]` f32; the first stage took none.
    ///
    /// # Errors
    /// As [`LayerExecutor::forward`]; if `end` is not this stage's, or has not one derivative per
    /// prediction.
    pub fn stage_backward(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        forest: &Forest,
        saved: SavedActivations,
        end: Gradient<'_>,
    ) -> Result<Option<Tensor>> {
        let SavedActivations { mut blocks, head } = saved;
        let (first, is_first) = (self.decoder.blocks().start, self.decoder.stage().is_first());
        let last = first + blocks.len();
        let runs_ahead = self.device.backend() == Backend::Cuda;
        if let Some(saved) = blocks.last_mut().filter(|_| runs_ahead) {
            saved.begin_return(self)?;
        }
        if last > first {
            weights.prefetch(LayerId::Block(last - 1))?;
        }
        let end = match end {
            Gradient::OfScores { scores, d_log_prob } => Ok((scores, d_log_prob, None)),
            Gradient::OfDivergence { scores, d_divergence, pass } => Ok((scores, d_divergence, Some(pass))),
            Gradient::OfStream(dx) => Err(dx),
        };
        let mut dx = match (end, head) {
            (Ok((scores, d, pass)), Some(head)) => {
                if d.len() != forest.predictions.len() {
                    return Err(ModelError::Invalid(format!(
                        "{} gradients for {} predictions",
                        d.len(),
                        forest.predictions.len()
                    )));
                }
                self.head_backward(weights, grads, forest, head, scores, d, pass)?
            }
            (Err(dx), None) => {
                self.check_stream(forest, &dx)?;
                dx
            }
            _ => {
                let what = "the last stage begins backward with its scores, every other with the next stage's gradient";
                return Err(ModelError::Invalid(what.to_owned()));
            }
        };
        while let Some(saved) = blocks.pop() {
            let index = first + blocks.len();
            let layer = LayerId::Block(index);
            self.device.set_place(format_args!("backward {layer}"));
            // The embedding's backward reads no weights.
            if index > first {
                weights.prefetch(LayerId::Block(index - 1))?;
            }
            let layer_weights = weights.fetch_for(layer, self.backward_reads_packed())?;
            let mut gradients = grads.open(layer)?;
            let block = Block { walk: self, weights: &layer_weights, index };
            let saved = saved.come_back(self)?;
            if let Some(before) = blocks.last_mut().filter(|_| runs_ahead) {
                before.begin_return(self)?;
            }
            block.backward(saved, forest, &mut dx, &mut gradients)?;
            weights.release(layer);
            grads.emit(layer)?;
        }
        if !is_first {
            return Ok(Some(dx));
        }
        self.embedding_backward(weights, grads, forest, dx).map(|()| None)
    }

    /// Returns the number of this rank's rows of the residual stream, which travel between stages.
    pub fn stream_rows(&self, forest: &Forest) -> Extent {
        self.shares(forest.num_tokens()).own_extent()
    }

    /// Checks that the decoder is not one of several stages.
    pub(super) fn check_stage(&self) -> Result<()> {
        let PipelineStage { index, count } = self.decoder.stage();
        if count == 1 {
            return Ok(());
        }
        Err(ModelError::Invalid(format!("stage {index} of {count} of a decoder cannot run alone")))
    }

    /// Checks that `x` is this rank's rows of the residual stream of all tokens.
    fn check_stream(&self, forest: &Forest, x: &Tensor) -> Result<()> {
        let expected = (self.stream_rows(forest).len(), self.decoder.spec().hidden_size);
        let dtype = self.decoder.residual();
        if (x.rows(), x.cols(), x.dtype()) == (expected.0, expected.1, dtype) {
            return Ok(());
        }
        Err(ModelError::Invalid(format!(
            "a stage was given {} x {} {}, expected {} x {} {dtype}",
            x.rows(),
            x.cols(),
            x.dtype(),
            expected.0,
            expected.1
        )))
    }
}
