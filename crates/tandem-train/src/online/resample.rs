//! Groups whose answers have equal rewards, which have nothing to learn from, are replaced by answers to other
//! prompts: DAPO's dynamic sampling (arXiv 2503.14476).

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use super::advantages::Advantages;
use super::answers::{Batch, CompletedPrompt};
use super::{Online, drawn};
use crate::Result;
use crate::config::GrpoConfig;
use crate::draw::draw;
use crate::metrics::Split;
use crate::parallel::DeviceMesh;
use crate::step::TrainStep;

/// Marks the seed of drawn prompts.
const RESAMPLE: u64 = 0x7265_7361_6d70_6c65;

impl Online {
    /// Replaces such groups of the round that waits to be trained on, as often as the config allows. False if
    /// any rank was stopped: the round is then generated anew.
    pub(super) fn replace_uniform(
        &mut self,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let Some(&config) = self.config.algorithm.grpo().filter(|grpo| grpo.max_resamples > 0) else {
            return Ok(true);
        };
        let mut round: Vec<Batch> = self.state.pending.drain(..).collect();
        let mut asked: Vec<HashSet<u32>> = round.iter().map(|batch| rows(batch).collect()).collect();
        for attempt in 0..config.max_resamples {
            let places: Vec<Vec<usize>> =
                round.iter().map(|batch| self.places(batch, &config, true)).collect();
            let others: Vec<Batch> = round
                .iter()
                .zip(&places)
                .zip(&mut asked)
                .map(|((batch, places), asked)| self.others(batch, places.len(), attempt, asked))
                .collect();
            if others.iter().all(|others| others.prompts.is_empty()) {
                break;
            }
            let is_begun = self.generate(others, Split::Train, scorer, mesh, stop)?;
            if !is_begun || !self.answered(mesh, stop)? || !self.finish_pending(mesh, stop)? {
                self.state.unjudged.clear();
                self.state.pending.clear();
                return Ok(false);
            }
            let drawn: Vec<Batch> = self.state.pending.drain(..).collect();
            for ((batch, places), mut others) in round.iter_mut().zip(places).zip(drawn) {
                for (place, lesson) in places.into_iter().zip(self.places(&others, &config, false)) {
                    std::mem::swap(&mut batch.prompts[place], &mut others.prompts[lesson]);
                    batch.replaced += 1;
                }
            }
        }
        self.state.pending.extend(round);
        Ok(true)
    }

    /// Draws `missing` prompts among the rows that were not asked for this batch yet.
    fn others(&self, batch: &Batch, missing: usize, attempt: u64, asked: &mut HashSet<u32>) -> Batch {
        let left: Vec<u32> =
            (0..self.prepared.train.num_rows() as u32).filter(|row| !asked.contains(row)).collect();
        let seed = draw(&[self.seed, batch.step, RESAMPLE, attempt]);
        let rows: Vec<u32> = drawn(left.len(), missing, seed).into_iter().map(|index| left[index]).collect();
        asked.extend(&rows);
        let prompt = |row| CompletedPrompt { row, answers: Vec::new() };
        Batch { prompts: rows.into_iter().map(prompt).collect(), replaced: 0, ..*batch }
    }

    /// Places of a batch's groups whose rewards are equal, or of the others.
    fn places(&self, batch: &Batch, config: &GrpoConfig, are_equal: bool) -> Vec<usize> {
        let is_uniform = Advantages::new(&batch.prompts, config, self.config.max_new_tokens).is_uniform;
        (0..is_uniform.len()).filter(|&place| is_uniform[place] == are_equal).collect()
    }
}

fn rows(batch: &Batch) -> impl Iterator<Item = u32> + '_ {
    batch.prompts.iter().map(|prompt| prompt.row)
}
