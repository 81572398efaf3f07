//! The pass before the first backward pass, for losses that compare the pairs of the whole batch.

use tandem_comm::Reduction;
use tandem_model::WeightSource;

use super::{Build, TrainStep};
use crate::Result;
use crate::metrics::Split;
use crate::objective::{BatchRewards, PairLogProbs, WholeBatch};
use crate::parallel::DeviceMesh;
use crate::recipe::RankBatch;

impl TrainStep {
    /// Prepares what the losses need of the whole batch. Where one compares the pairs of several
    /// micro-batches, all go forward once without gradients, and every rank gets every
    /// log-probability, in the order of the batch. The only micro-batch of a batch completes it in its
    /// own pass.
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
        if !self.objective.needs_whole_batch() || share.cuts.len() == 1 {
            return Ok(whole);
        }
        let members = 2 * share.pairs_before(share.cuts.len());
        let mut numbers = vec![0.0; 2 * members];
        let (policy, reference) = numbers.split_at_mut(members);
        for round in 0..self.rounds(share) {
            let Some(&index) = share.own_micro_batches.get(round) else {
                self.idle_forward()?;
                self.policy.release_all();
                continue;
            };
            let micro = build(share.part(index))?;
            let (_, compared) = self.score(split, &micro, mesh, false, dropout(index))?;
            self.policy.release_all();
            let Some(compared) = compared.filter(|_| mesh.is_reporting_rank()) else { continue };
            let (pairs, first) = (compared.pairs(), 2 * share.pairs_before(index));
            policy[first..first + pairs.policy.len()].copy_from_slice(pairs.policy);
            if let Some(values) = pairs.reference {
                reference[first..first + values.len()].copy_from_slice(values);
            }
        }
        // One rank has a number, the others zero.
        if mesh.world().size() > 1 {
            mesh.world().all_reduce(&mut numbers, Reduction::Sum)?;
        }
        let (policy, reference) = numbers.split_at(members);
        let pairs = PairLogProbs { policy, reference: Some(reference), ..PairLogProbs::default() };
        whole.complete(&self.objective, &pairs);
        Ok(whole)
    }
}
