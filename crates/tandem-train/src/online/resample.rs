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
            let others: Vec<Batch> = round
                .iter()
                .zip(&mut asked)
                .map(|(batch, asked)| self.others(batch, &config, attempt, asked))
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
            for (batch, others) in round.iter_mut().zip(self.state.pending.drain(..)) {
                let (uniform, other_uniform) =
                    (self.config.uniform(batch, &config), self.config.uniform(&others, &config));
                let lessons = others.prompts.into_iter().zip(other_uniform).filter(|(_, uniform)| !uniform);
                let places = (0..).zip(uniform).filter(|(_, uniform)| *uniform).map(|(place, _)| place);
                for (place, (other, _)) in places.zip(lessons) {
                    let place: usize = place;
                    batch.prompts[place] = other;
                    batch.replaced += 1;
                }
            }
        }
        self.state.pending.extend(round);
        Ok(true)
    }

    /// Prompts in place of those whose answers have equal rewards: drawn among the rows that were not asked
    /// for this batch yet.
    fn others(&self, batch: &Batch, config: &GrpoConfig, attempt: u64, asked: &mut HashSet<u32>) -> Batch {
        let missing = self.config.uniform(batch, config).into_iter().filter(|uniform| *uniform).count();
        let left: Vec<u32> =
            (0..self.prepared.train.num_rows() as u32).filter(|row| !asked.contains(row)).collect();
        let seed = draw(&[self.seed, batch.step, RESAMPLE, attempt]);
        let rows: Vec<u32> = drawn(left.len(), missing, seed).into_iter().map(|index| left[index]).collect();
        asked.extend(&rows);
        let prompt = |row| CompletedPrompt { row, answers: Vec::new() };
        Batch { prompts: rows.into_iter().map(prompt).collect(), replaced: 0, ..*batch }
    }
}

impl crate::config::OnlineConfig {
    /// Returns whether each group of a batch has equal rewards.
    fn uniform(&self, batch: &Batch, config: &GrpoConfig) -> Vec<bool> {
        Advantages::new(&batch.prompts, config, self.max_new_tokens).is_uniform
    }
}

fn rows(batch: &Batch) -> impl Iterator<Item = u32> + '_ {
    batch.prompts.iter().map(|prompt| prompt.row)
}
