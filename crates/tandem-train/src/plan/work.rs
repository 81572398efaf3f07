//! Operations and messages of a rank, from a dry run's log.

use tandem_comm::recorder::Log;
use tandem_comm::{Call, Operation};
use tandem_kernels::meta::Ledger;
use tandem_kernels::{DType, OpCost};

use crate::config::AttentionKernels;
use crate::placement::MemoryPlacement;
use crate::plan::dry_run::TENSOR_GROUP;
use crate::plan::estimate::rates::ATTENTION_WGMMA;

/// Operations and messages.
#[derive(Clone, Debug, Default)]
pub struct StepCost {
    /// Every operation with its number of calls; calls of equal shape and cost are counted together.
    pub operations: Vec<(OpCost, u64)>,
    /// Messages to other ranks.
    pub sent: Vec<Sent>,
}

/// Bytes that a rank sends in one call.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Bytes.
    pub bytes: u64,
    /// The first and the last of the ranks that meet in the call.
    pub span: (usize, usize),
    /// Whether the call overlaps compute.
    pub beside: bool,
    /// Receivers.
    pub to: Topology,
}

/// Process group of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    Data,
    Slices,
    Stages,
}

/// Costs of two steps that differ by a typical micro-batch: their difference is that of one, the rest is spent once
/// a step.
#[derive(Clone, Debug)]
pub struct StepCosts {
    /// Micro-batches of the step with fewer: 1 where no step has more, else 2.
    pub count: usize,
    /// A step with as many.
    pub fewer: StepCost,
    /// A step with one more.
    pub more: StepCost,
    /// Operations of each micro-batch whose cost does not depend on its tokens, where micro-batches differ.
    pub fixed: Vec<(OpCost, u64)>,
}

impl StepCosts {
    /// `other` is the cost of a step with `count` micro-batches of another length.
    pub(super) fn new(count: usize, fewer: StepCost, more: StepCost, other: Option<&StepCost>) -> Self {
        let calls = |step: &StepCost, work: &OpCost| {
            step.operations.iter().find(|(known, _)| known == work).map_or(0, |(_, calls)| *calls)
        };
        let shared = |other: &StepCost, (work, of_more): &(OpCost, u64)| {
            let each = of_more.saturating_sub(calls(&fewer, work));
            let once = calls(&fewer, work).saturating_sub(count as u64 * each);
            let shared = each.min(calls(other, work).saturating_sub(once) / count as u64);
            (shared > 0).then_some((*work, shared))
        };
        let fixed = other
            .into_iter()
            .flat_map(|other| more.operations.iter().filter_map(move |op| shared(other, op)));
        let fixed = fixed.collect();
        Self { count, fewer, more, fixed }
    }

    /// Names attention's operations after their kernels, which have rates of their own.
    pub(super) fn with_attention(mut self, kernels: AttentionKernels) -> Self {
        let Self { fewer, more, fixed, .. } = &mut self;
        if kernels == AttentionKernels::Wgmma {
            for (work, _) in fewer.operations.iter_mut().chain(&mut more.operations).chain(fixed) {
                let own =
                    ATTENTION_WGMMA.iter().find(|(name, _)| *name == work.op && work.dtype == DType::Bf16);
                work.op = own.map_or(work.op, |(_, own)| own);
            }
        }
        self
    }

    /// Factors of [`Self::fewer`], [`Self::more`] and [`Self::fixed`] for a step of `rounds` micro-batches, which
    /// have the tokens of `alike` typical ones.
    pub(super) fn factors(&self, alike: f64, rounds: f64) -> [f64; 3] {
        let count = self.count as f64;
        [1.0 + count - alike, alike - count, rounds - alike]
    }
}

impl StepCost {
    /// Reads a dry run's log; `rank` is this one, `has_slices` states whether a tensor axis exists.
    pub fn from_log(placement: &MemoryPlacement, log: &Log, rank: usize, has_slices: bool) -> Self {
        let sent = |(group, call): (usize, Call)| {
            let members = log.members(group);
            let (first, last) = (members[0], members[members.len() - 1]);
            // The tensor group, and the pairs of ranks within it.
            let of_slices = || {
                let tensor = log.members(TENSOR_GROUP);
                group >= TENSOR_GROUP && members.len() > 1 && members.iter().all(|rank| tensor.contains(rank))
            };
            let (span, to) = match call.operation {
                Operation::Send { to } => ((rank.min(members[to]), rank.max(members[to])), Topology::Stages),
                _ if has_slices && of_slices() => ((first, last), Topology::Slices),
                _ => ((first, last), Topology::Data),
            };
            Sent { bytes: call.bytes_sent(members.len()), span, beside: log.is_apart(group), to }
        };
        let sent = log.take().into_iter().map(sent).filter(|sent| sent.bytes > 0).collect();
        Self { operations: placement.ledgers().into_iter().flatten().flat_map(Ledger::calls).collect(), sent }
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.operations.iter().map(|(work, calls)| *calls as f64 * work.flops).sum()
    }

    /// Bytes sent to some ranks, or to all.
    pub fn bytes_sent(&self, to: Option<Topology>) -> u64 {
        self.sent.iter().filter(|sent| to.is_none_or(|to| sent.to == to)).map(|sent| sent.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_of_bf16_has_the_name_of_its_kernels() {
        let step = |ops: &[(&'static str, DType)]| {
            let work = |&(op, dtype)| (OpCost { op, flops: 1.0, bytes: 1.0, dtype, shape: [8; 3] }, 1);
            StepCost { operations: ops.iter().map(work).collect(), sent: Vec::new() }
        };
        let ops = [
            ("attention", DType::Bf16),
            ("attention_backward", DType::Bf16),
            ("attention", DType::F32),
            ("attention_decode", DType::Bf16),
        ];
        let named = |kernels| {
            let costs = StepCosts::new(1, step(&ops), step(&ops), None).with_attention(kernels);
            [costs.fewer, costs.more]
                .map(|step| step.operations.iter().map(|(work, _)| work.op).collect::<Vec<_>>())
        };
        assert_eq!(
            named(AttentionKernels::Mma),
            [ops.map(|(op, _)| op).to_vec(), ops.map(|(op, _)| op).to_vec()]
        );
        let own = vec!["attention_wgmma", "attention_backward_wgmma", "attention", "attention_decode"];
        assert_eq!(named(AttentionKernels::Wgmma), [own.clone(), own]);
    }
}
