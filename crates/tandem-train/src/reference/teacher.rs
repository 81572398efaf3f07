//! The teacher of a distillation: a frozen model of its own size, whose next-token distributions the
//! policy learns.

use std::sync::Arc;

use tandem_kernels::Forest;
use tandem_kernels::ops::{HeadScores, RowDivergence};
use tandem_model::{
    Decoder, DivergencePass, LayerExecutor, SavedActivations, TeacherHead, TeacherRows, WeightSource,
};

use crate::Result;
use crate::weights::FrozenWeights;

/// A teacher, with its numbers of the micro-batch under way.
pub struct Teacher {
    decoder: Arc<Decoder>,
    weights: Box<FrozenWeights>,
    beta: f32,
    rows: TeacherRows,
    divergences: Vec<RowDivergence>,
}

impl Teacher {
    pub(super) fn new(decoder: Arc<Decoder>, weights: Box<FrozenWeights>, beta: f64) -> Self {
        let (rows, divergences) = (TeacherRows::default(), Vec::new());
        Self { decoder, weights, beta: beta as f32, rows, divergences }
    }

    /// Scores a micro-batch's predictions, and keeps the rows before the head.
    pub(super) fn forward(
        &mut self,
        policy: &LayerExecutor<'_>,
        forest: &Forest,
        scores: &mut HeadScores,
    ) -> Result<()> {
        self.rows = TeacherRows::default();
        let executor =
            LayerExecutor { decoder: &self.decoder, stages: None, host: None, dropout: None, ..*policy };
        self.rows = executor.teacher_forward(self.weights.as_mut(), forest, scores)?;
        self.weights.release_all();
        Ok(())
    }

    /// Computes the divergence of each scored row after the policy's forward pass.
    pub(crate) fn compare(
        &mut self,
        executor: &LayerExecutor<'_>,
        policy: &mut dyn WeightSource,
        saved: &mut SavedActivations,
        scores: &HeadScores,
    ) -> Result<()> {
        let Self { decoder, weights, beta, rows, divergences } = self;
        let mut head = TeacherHead { decoder, weights: weights.as_mut(), rows, beta: *beta };
        executor.divergence(policy, saved, scores, &mut head, divergences)?;
        weights.release_all();
        Ok(())
    }

    /// Divergences of the scored rows of the micro-batch that was compared last.
    pub(crate) fn divergences(&self) -> &[RowDivergence] {
        &self.divergences
    }

    /// What the policy's backward pass begins with.
    pub(crate) fn pass(&mut self) -> DivergencePass<'_> {
        let Self { decoder, weights, beta, rows, divergences } = self;
        let teacher = TeacherHead { decoder, weights: weights.as_mut(), rows, beta: *beta };
        DivergencePass { teacher, rows: divergences }
    }

    /// Ends a micro-batch: its rows are dropped.
    pub(crate) fn finish(&mut self) {
        self.rows = TeacherRows::default();
        self.weights.release_all();
    }

    /// Makes the calls of a forward pass on a rank without a micro-batch.
    pub(super) fn idle(&mut self, policy: &LayerExecutor<'_>) -> Result<()> {
        let executor = LayerExecutor { decoder: &self.decoder, ..*policy };
        executor.idle_forward(self.weights.as_mut())?;
        self.weights.release_all();
        Ok(())
    }

    /// Makes the calls of a comparison, on a rank without a micro-batch.
    pub(crate) fn idle_head(&mut self) -> Result<()> {
        self.decoder.idle_teacher(self.weights.as_mut())?;
        self.weights.release_all();
        Ok(())
    }
}
