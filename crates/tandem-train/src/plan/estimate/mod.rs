//! Step time estimate from operations, messages and device rates.
//!
//! An operation takes what the device's table says of its kind and shape, else
//! `max(flops / matmul rate, bytes / bandwidth)`. A message takes `bytes /
//! link`: the link within a box if all its ranks share one, else the network. Overlapped messages
//! (gathers of ZeRO-3, reductions of gradients) count only beyond the compute time of their
//! micro-batch, and those of a step's sums beyond that of its last backward pass; others are added.
//! Latency of calls is not counted.

pub mod device;
mod gpu;
mod machine;
pub mod measure;
pub mod rates;

use tandem_kernels::OpCost;
use tandem_kernels::meta::TRANSFER;

use crate::plan::Plan;
use crate::plan::estimate::device::DeviceKind;
use crate::plan::work::{StepCost, StepCosts};

pub use gpu::Gpu;
pub use machine::Machine;

/// Estimated time and throughput.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Seconds per step.
    pub step_seconds: f64,
    /// Compute part of it.
    pub compute_seconds: f64,
    /// Part spent waiting for messages.
    pub exchange_seconds: f64,
    /// Part spent in the pipeline bubble.
    pub bubble_seconds: f64,
    /// Tokens a second over all ranks, each answer with its own copy of the prompt.
    pub tokens_per_second: f64,
    /// Pairs, or rows of SFT, a second over all ranks.
    pub rows_per_second: f64,
    /// Bytes that the rank sends in a step.
    pub bytes_sent: f64,
    /// Fraction of the assumed matmul rate in use.
    pub utilisation: f64,
}

/// Seconds of a piece of work.
#[derive(Clone, Copy, Default)]
struct Seconds {
    compute: f64,
    waited_for: f64,
    beside: f64,
}

impl Estimate {
    /// Estimates a step of the busiest rank.
    pub fn new(plan: &Plan, device: &DeviceKind) -> Self {
        let StepCosts { count, fewer, more, fixed } = &plan.step_costs;
        let count = *count as f64;
        let [of_fewer, of_more] = [fewer, more].map(|work| Seconds::new(work, plan, device));
        let each = of_more - of_fewer;
        let once = of_fewer - each * count;
        let rounds = plan.load.rounds;
        // Micro-batches are not all alike: most computing goes with their tokens; messages, and what is computed
        // for parameters, go with their number.
        let alike = plan.load.tokens / plan.data.micro_batch_tokens.max(1) as f64;
        let of_rounds = alike * each.compute + (rounds - alike) * compute_seconds(fixed, plan, device);
        let compute = once.compute.max(0.0) + of_rounds;
        let micro_batch = of_rounds / rounds;
        // Sums travel during the last backward pass, two thirds of a micro-batch's work, and those of
        // the first layer after it.
        let sums = once.beside.max(0.0);
        let last = fewer.sent.iter().rev().find(|sent| sent.beside);
        let last = last.map_or(0.0, |sent| sent.bytes as f64 / device.link_rate(sent.span)).min(sums);
        let beside =
            (sums - micro_batch * 2.0 / 3.0).max(last) + rounds * (each.beside - micro_batch).max(0.0);
        let exchange = once.waited_for.max(0.0) + rounds * each.waited_for + beside;
        let bubble = (plan.stage.count - 1) as f64 * micro_batch;
        let step_seconds = compute + exchange + bubble;
        let sent = |work: &StepCost| work.bytes_sent(None) as f64;
        let flops = |work: &StepCost| work.flops();
        let per_round = |amount: &dyn Fn(&StepCost) -> f64, rounds: f64| {
            amount(fewer) + (rounds - count) * (amount(more) - amount(fewer))
        };
        let rate = device.product_rate(plan.dtype, plan.ranks, plan.threads);
        Self {
            step_seconds,
            compute_seconds: compute,
            exchange_seconds: exchange,
            bubble_seconds: bubble,
            tokens_per_second: plan.data.sequence_tokens / step_seconds,
            rows_per_second: plan.data.rows / step_seconds,
            bytes_sent: per_round(&sent, rounds),
            utilisation: per_round(&flops, alike) / (step_seconds * rate),
        }
    }
}

/// Seconds of operations that compute.
fn compute_seconds(operations: &[(OpCost, u64)], plan: &Plan, device: &DeviceKind) -> f64 {
    let computing = operations.iter().filter(|(work, _)| work.op != TRANSFER);
    computing.map(|(work, calls)| *calls as f64 * device.seconds(work, plan.ranks, plan.threads).0).sum()
}

impl Seconds {
    fn new(work: &StepCost, plan: &Plan, device: &DeviceKind) -> Self {
        let compute = compute_seconds(&work.operations, plan, device);
        let mut seconds = Self { compute, ..Self::default() };
        for (work, calls) in work.operations.iter().filter(|(work, _)| work.op == TRANSFER) {
            seconds.beside += *calls as f64 * work.bytes / device.host_rate();
        }
        for sent in &work.sent {
            let time = sent.bytes as f64 / device.link_rate(sent.span);
            *(if sent.beside { &mut seconds.beside } else { &mut seconds.waited_for }) += time;
        }
        seconds
    }
}

impl std::ops::Mul<f64> for Seconds {
    type Output = Self;

    fn mul(self, by: f64) -> Self {
        Self { compute: by * self.compute, waited_for: by * self.waited_for, beside: by * self.beside }
    }
}

impl std::ops::Sub for Seconds {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            compute: self.compute - other.compute,
            waited_for: self.waited_for - other.waited_for,
            beside: self.beside - other.beside,
        }
    }
}
