//! Statistics of the micro-batches of a batch, and how every rank learns them.

use tandem_comm::{ProcessGroup, Reduction};

use super::StepOutcome;
use crate::Result;
use crate::metrics::MetricSums;
use crate::recipe::RankBatch;

/// Statistics of a micro-batch.
#[derive(Default)]
pub(super) struct MicroBatchStats {
    pub(super) sums: MetricSums,
    /// Σ over sequences of log π − log π_ref.
    pub(super) log_ratio: f64,
    pub(super) scored_tokens: f64,
    /// Whether the gradient so far is finite and in range.
    pub(super) in_range: bool,
}

/// Statistics of all micro-batches of a batch, summed in micro-batch order, so that metrics are the
/// same bits on any number of ranks. Of the ranks of one model replica one reports sums; each
/// reports the range of its own gradient part.
pub(super) struct StepStats(Vec<[f64; MetricSums::WIDTH + 3]>);

impl StepStats {
    pub(super) fn new(num_micro_batches: usize) -> Self {
        Self(vec![[0.0; MetricSums::WIDTH + 3]; num_micro_batches])
    }

    pub(super) fn set(&mut self, index: usize, report: &MicroBatchStats, leads: bool) {
        let [sums @ .., log_ratio, scored_tokens, out_of_range] = &mut self.0[index];
        if leads {
            sums.copy_from_slice(&report.sums.to_numbers());
            *log_ratio = report.log_ratio;
            *scored_tokens = report.scored_tokens;
        }
        *out_of_range = f64::from(u8::from(!report.in_range));
    }

    fn get(&self, index: usize) -> MicroBatchStats {
        let [sums @ .., log_ratio, scored_tokens, out_of_range] = &self.0[index];
        let sums = MetricSums::from_numbers(sums);
        MicroBatchStats {
            sums,
            log_ratio: *log_ratio,
            scored_tokens: *scored_tokens,
            in_range: *out_of_range == 0.0,
        }
    }

    /// Exchanges statistics: one rank has the sums, others zeros; any may be out of range.
    pub(super) fn exchange(&mut self, group: &mut ProcessGroup) -> Result<()> {
        if group.size() > 1 {
            group.all_reduce(self.0.as_flattened_mut(), Reduction::Sum)?;
        }
        Ok(())
    }

    /// Returns whether every rank's gradient was finite and in the range of the sums.
    pub(super) fn is_in_range(&self) -> bool {
        self.total().in_range
    }

    pub(super) fn total(&self) -> MicroBatchStats {
        let mut whole = MicroBatchStats {
            sums: MetricSums::default(),
            log_ratio: 0.0,
            scored_tokens: 0.0,
            in_range: true,
        };
        for report in (0..self.0.len()).map(|index| self.get(index)) {
            whole.sums.merge(&report.sums);
            whole.log_ratio += report.log_ratio;
            whole.scored_tokens += report.scored_tokens;
            whole.in_range &= report.in_range;
        }
        whole
    }

    /// Returns what the step did, of which all gradients are reduced. A dry run has no numbers, and
    /// counts as a good step.
    pub(super) fn outcome(&self, share: &RankBatch, grad_norm: f64, is_dry: bool) -> StepOutcome {
        let whole = self.total();
        let is_broken = |index: &usize| !self.get(*index).sums.loss().is_finite();
        let broken = (0..share.cuts.len()).filter(is_broken);
        let mut non_finite_rows: Vec<u32> = broken.flat_map(|index| share.rows_of(index)).copied().collect();
        let updated = is_dry || (non_finite_rows.is_empty() && grad_norm.is_finite());
        if !updated && non_finite_rows.is_empty() {
            non_finite_rows.clone_from(&share.rows);
        }
        let log_ratio = (whole.log_ratio, whole.scored_tokens as u64);
        StepOutcome { sums: whole.sums, grad_norm, updated, non_finite_rows, log_ratio }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Else the others would update their slices while it leaves its own as it is.
    #[test]
    fn a_slice_that_is_out_of_range_speaks_for_all() {
        let groups = tandem_comm::threads::groups(2, Duration::from_secs(600)).into_iter();
        let rank = |mut group: ProcessGroup| {
            let slice = group.rank();
            let mut reports = StepStats::new(2);
            for index in 0..2 {
                let in_range = (index, slice) != (1, 1);
                let sums = MetricSums::default();
                let report = MicroBatchStats { sums, log_ratio: 2.0, scored_tokens: 3.0, in_range };
                reports.set(index, &report, slice == 0);
            }
            reports.exchange(&mut group).unwrap();
            let whole = reports.total();
            assert!(!whole.in_range && reports.get(0).in_range && !reports.get(1).in_range);
            assert_eq!((whole.log_ratio, whole.scored_tokens), (4.0, 6.0), "counted once");
        };
        std::thread::scope(|scope| groups.for_each(|group| drop(scope.spawn(move || rank(group)))));
    }
}
