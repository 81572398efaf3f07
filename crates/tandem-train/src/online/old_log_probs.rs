//! The trainer's log-probabilities of a server's answers at the weights that gave them, for the steps that
//! train on the answers when these weights have changed.

use super::Online;
use super::answers::CompletedPrompt;
use crate::Result;
use crate::config::ServerRatio;
use crate::parallel::DeviceMesh;
use crate::recipe::{BatchPart, MicroBatcher, Rows, SampledAnswer, ScoredPrompt};
use crate::step::TrainStep;

impl Online {
    /// Adds them to the round that waits to be trained on, where they are needed.
    pub(super) fn add_old_log_probs(
        &mut self,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        batcher: &mut MicroBatcher,
    ) -> Result<()> {
        let is_needed = self.config.algorithm.grpo().is_some()
            && self.config.steps_between_rounds() > 1
            && self
                .config
                .server
                .as_ref()
                .is_some_and(|server| server.importance_sampling != ServerRatio::Policy);
        if !is_needed {
            return Ok(());
        }
        let prompts = &self.prepared.train;
        for batch in &mut self.state.pending {
            let ready = |answered: &CompletedPrompt| ScoredPrompt {
                row: answered.row,
                prompt: prompts.prompt_tokens(answered.row as usize).to_vec(),
                answers: answered.answers.iter().map(|answer| answer.tokens.clone()).collect(),
                policy: vec![SampledAnswer::default(); answered.answers.len()],
                ..ScoredPrompt::default()
            };
            let ranked = batcher.divide(batch.prompts.iter().map(ready).collect());
            let numbers: Vec<u32> = (0..ranked.len() as u32).collect();
            let rows = Rows::Ranked(&ranked);
            let share = batcher.share(rows, &numbers, mesh.data().rank(), mesh.data().size());
            let mut answers: Vec<_> =
                batch.prompts.iter_mut().flat_map(|answered| &mut answered.answers).collect();
            let lengths: Vec<usize> = answers.iter().map(|answer| answer.tokens.len()).collect();
            let build = &mut |part: BatchPart<'_>| batcher.build(rows, part);
            let old = scorer.answer_log_probs(mesh, &share, build, &lengths)?;
            answers.iter_mut().zip(old).for_each(|(answer, old)| answer.old_log_probs = old);
        }
        Ok(())
    }
}
