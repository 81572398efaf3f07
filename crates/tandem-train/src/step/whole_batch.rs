//! Passes over a whole batch without gradients: for losses that compare its pairs or tokens, and for the
//! policy's own log-probabilities of answers that a server gave.

use tandem_comm::Reduction;
use tandem_kernels::ops::HeadScores;
use tandem_model::WeightSource;

use super::{Build, TrainStep};
use crate::Result;
use crate::metrics::Split;
use crate::objective::{BatchRewards, PairLogProbs, WholeBatch};
use crate::parallel::DeviceMesh;
use crate::recipe::{MicroBatch, RankBatch, SequenceLogProbs, counted_entropies};

impl TrainStep {
    /// Prepares what the losses need of the whole batch. Where one compares the pairs or the tokens of
    /// several micro-batches, all go forward once without gradients, and every rank gets every number, in
    /// the order of the batch. The only micro-batch of a batch completes it in its own pass.
    pub(super) fn whole_batch(
        &mut self,
        split: Split,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        beta: f64,
        dropout: &dyn Fn(usize) -> Option<u64>,
    ) -> Result<WholeBatch> {
        let mut whole = WholeBatch::from(share.totals);
        whole.rewards = BatchRewards { so_far: self.rewards, beta, learns: split == Split::Train };
        if share.cuts.len() == 1 {
            return Ok(whole);
        }
        if let Some(top) = self.objective.top_entropy() {
            let mut entropies = self.gather_entropies(split, mesh, share, build, dropout)?;
            whole.set_least_entropy(top, &mut entropies);
        }
        if !self.objective.needs_whole_batch() {
            return Ok(whole);
        }
        let members = 2 * share.pairs_before(share.cuts.len());
        let mut numbers = vec![0.0; 2 * members];
        let (policy, reference) = numbers.split_at_mut(members);
        self.score_all(split, mesh, share, build, dropout, &mut |index, _, compared, _| {
            let (pairs, first) = (compared.pairs(), 2 * share.pairs_before(index));
            policy[first..first + pairs.policy.len()].copy_from_slice(pairs.policy);
            if let Some(values) = pairs.reference {
                reference[first..first + values.len()].copy_from_slice(values);
            }
        })?;
        exchange(&mut numbers, mesh)?;
        let (policy, reference) = numbers.split_at(members);
        let pairs = PairLogProbs { policy, reference: Some(reference), ..PairLogProbs::default() };
        whole.complete(&self.objective, &pairs);
        Ok(whole)
    }

    /// Entropies before the tokens of a batch that count, nats.
    fn gather_entropies(
        &mut self,
        split: Split,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        dropout: &dyn Fn(usize) -> Option<u64>,
    ) -> Result<Vec<f32>> {
        let mut numbers = vec![0.0; share.counted_tokens.iter().sum()];
        self.score_all(split, mesh, share, build, dropout, &mut |index, micro, _, scores| {
            let first: usize = share.counted_tokens[..index].iter().sum();
            // Bits, of which none are a place without a number: a token that nothing predicts.
            for (number, entropy) in numbers[first..].iter_mut().zip(counted_entropies(micro, scores)) {
                *number = f64::from(entropy.to_bits()) + 1.0;
            }
        })?;
        exchange(&mut numbers, mesh)?;
        numbers.retain(|number| *number > 0.0);
        Ok(numbers.into_iter().map(|number| f32::from_bits((number - 1.0) as u32)).collect())
    }

    /// Computes the policy's log-probability of each token of a batch's answers, whose lengths in the order of
    /// the batch are `lengths`; 0 for a token that nothing predicts. Collective; every rank gets all.
    pub fn answer_log_probs(
        &mut self,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        lengths: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        let mut numbers = vec![0.0; lengths.iter().sum()];
        let none = &|_: usize| None;
        self.score_all(Split::Train, mesh, share, build, none, &mut |index, micro, _, scores| {
            let first = share.pairs_before(index);
            let begin = |answer: usize| lengths[..first + answer].iter().sum::<usize>();
            let mut next: Vec<usize> = (0..micro.answers.len())
                .map(|answer| begin(answer) + micro.num_unpredicted(answer))
                .collect();
            for (prediction, &log_prob) in micro.forest.predictions.iter().zip(&scores.log_prob) {
                let next = &mut next[prediction.sequence as usize];
                numbers[*next] = f64::from(log_prob);
                *next += 1;
            }
        })?;
        exchange(&mut numbers, mesh)?;
        let mut numbers = numbers.into_iter().map(|number| number as f32);
        Ok(lengths.iter().map(|&length| numbers.by_ref().take(length).collect()).collect())
    }

    /// Scores every micro-batch of this rank, and shows its number, itself and its scores to `visit` on the rank
    /// that reports it.
    fn score_all(
        &mut self,
        split: Split,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        dropout: &dyn Fn(usize) -> Option<u64>,
        visit: &mut dyn FnMut(usize, &MicroBatch, &SequenceLogProbs, &HeadScores),
    ) -> Result<()> {
        for round in 0..self.rounds(share) {
            let Some(&index) = share.own_micro_batches.get(round) else {
                self.idle_forward()?;
                self.policy.release_all();
                continue;
            };
            let micro = build(share.part(index))?;
            let (_, compared) = self.score(split, &micro, mesh, false, dropout(index))?;
            self.policy.release_all();
            if let Some(compared) = compared.filter(|_| mesh.is_reporting_rank()) {
                visit(index, &micro, &compared, &self.scores);
            }
        }
        Ok(())
    }
}

/// Sums numbers of which one rank has each, and the others zero.
fn exchange(numbers: &mut [f64], mesh: &mut DeviceMesh) -> Result<()> {
    if mesh.world().size() > 1 && !numbers.is_empty() {
        mesh.world().all_reduce(numbers, Reduction::Sum)?;
    }
    Ok(())
}
