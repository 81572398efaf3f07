//! Mean reward of answers to held-out prompts.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::Online;
use super::answers::{Batch, CompletedPrompt};
use super::summary::Summary;
use crate::Result;
use crate::metrics::{Record, Split};
use crate::parallel::DeviceMesh;
use crate::step::TrainStep;

/// Stands for the step in the seeds of an evaluation, so that every evaluation draws alike.
const EVALUATION: u64 = u64::MAX;

impl Online {
    /// Answers the held-out prompts with the weights after `step` steps, and has the answers judged.
    /// Collective; `None` if any rank was stopped.
    ///
    /// # Errors
    /// Generation or a judge fails.
    ///
    /// # Panics
    /// The run has no held-out prompts, or a round is being generated.
    pub fn evaluate(
        &mut self,
        step: u64,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
    ) -> Result<Option<Record>> {
        let began = Instant::now();
        if !self.finish_pending(mesh, stop)? {
            return Ok(None);
        }
        let coming = std::mem::take(&mut self.state.pending);
        let rows = 0..self.prepared.tokens(Split::Eval).expect("held-out prompts").num_rows() as u32;
        let prompts = rows.map(|row| CompletedPrompt { row, answers: Vec::new() }).collect();
        let batch = Batch { step: EVALUATION, answered_after: step, prompts, replaced: 0 };
        let is_judged = self.generate(vec![batch], Split::Eval, scorer, mesh, stop)?
            && self.answered(mesh, stop)?
            && self.finish_pending(mesh, stop)?;
        let judged = std::mem::replace(&mut self.state.pending, coming).pop_front();
        if !is_judged {
            self.state.unjudged.clear();
            return Ok(None);
        }
        let batch = judged.expect("a round was judged");
        let mut record = Record::new(step, Split::Eval);
        Summary::report_rewards(&batch, self.judging.names(), &mut record);
        record.set_count("num_rows", batch.prompts.len() as u64);
        record.set("time", began.elapsed().as_secs_f64());
        Ok(Some(record))
    }
}
