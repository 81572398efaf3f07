//! Operations of a step: how often each is called, what it computes and moves, and how long that takes.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};
use tandem_kernels::OpCost;
use tandem_kernels::meta::TRANSFER;

use crate::plan::estimate::device::DeviceKind;
use crate::plan::estimate::rates::Bound;
use crate::plan::{Plan, RunPlan};

/// Calls of one operation in a step of a rank, of one shape if it is a matmul.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOperation {
    /// Operation, type and shape; flops and bytes are those of a step.
    pub work: OpCost,
    /// Calls a step.
    pub calls: f64,
    /// Seconds a step.
    pub seconds: f64,
    /// Resource that most of the time is spent on.
    pub bound: Bound,
}

impl Plan {
    /// Operations of a step on a device, the longest first. Matmuls are told apart by shape.
    pub fn operations(&self, device: &DeviceKind) -> Vec<StepOperation> {
        // As an estimate counts: what a step has more with a micro-batch more goes with its tokens, or with the
        // number of micro-batches.
        let alike = self.load.tokens / self.data.micro_batch_tokens.max(1) as f64;
        let costs = &self.step_costs;
        let lists = [&costs.fewer.operations, &costs.more.operations, &costs.fixed];
        let counted = lists.into_iter().zip(costs.factors(alike, self.load.rounds));
        let mut found: BTreeMap<_, (StepOperation, BTreeMap<Bound, f64>)> = BTreeMap::new();
        for (operations, factor) in counted {
            for (work, calls) in operations.iter().filter(|(work, _)| work.op != TRANSFER) {
                let calls = factor * *calls as f64;
                let (seconds, bound) = device.seconds(work, self.ranks, self.threads);
                let shape = if work.shape[2] > 0 { work.shape } else { [0; 3] };
                let (sum, bounds) = found.entry((work.op, work.dtype, shape)).or_insert_with(|| {
                    let work = OpCost { flops: 0.0, bytes: 0.0, shape, ..*work };
                    (StepOperation { work, calls: 0.0, seconds: 0.0, bound }, BTreeMap::new())
                });
                sum.calls += calls;
                sum.work.flops += calls * work.flops;
                sum.work.bytes += calls * work.bytes;
                sum.seconds += calls * seconds;
                *bounds.entry(bound).or_default() += calls * seconds;
            }
        }
        let with_bound = |(mut sum, bounds): (StepOperation, BTreeMap<Bound, f64>)| {
            let most = bounds.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
            sum.bound = most.map_or(sum.bound, |(bound, _)| bound);
            sum
        };
        // What a micro-batch alone does otherwise than two leaves a remainder of no calls.
        let mut operations: Vec<_> =
            found.into_values().map(with_bound).filter(|operation| operation.calls > 1e-9).collect();
        operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        operations
    }
}

impl RunPlan {
    /// Table of the operations of the slowest rank's step.
    pub fn operations(&self) -> String {
        let operations = self.slowest().operations(&self.device);
        let all: f64 = operations.iter().map(|operation| operation.seconds).sum();
        let mut text = format!(
            "{:<32}{:<6}{:<22}{:>9}{:>12}{:>10}{:>10}{:>8}  bound",
            "operation", "type", "rows x cols x depth", "calls", "GFLOP", "GB", "ms", "share"
        );
        for StepOperation { work, calls, seconds, bound } in &operations {
            let shape = match work.shape {
                [0, ..] => String::new(),
                [rows, cols, depth] => format!("{rows} x {cols} x {depth}"),
            };
            let _ = write!(
                text,
                "\n{:<32}{:<6}{shape:<22}{calls:>9.0}{:>12.1}{:>10.3}{:>10.2}{:>6.1} %  {}",
                work.op,
                work.dtype.name(),
                work.flops / 1e9,
                work.bytes / 1e9,
                seconds * 1e3,
                100.0 * seconds / all,
                bound.name()
            );
        }
        text
    }

    /// The same for programs; times in seconds, and those that the device's peaks would allow beside them.
    pub fn operations_to_json(&self) -> Value {
        let bandwidth_gbs = self.device.bandwidth_gbs;
        let row = |operation: &StepOperation| {
            let StepOperation { work, calls, seconds, bound } = operation;
            let peak_seconds = (work.flops / self.device.peak(work)).max(work.bytes / (bandwidth_gbs * 1e9));
            json!({
                "operation": work.op,
                "dtype": work.dtype.name(),
                "shape": work.shape,
                "calls": calls,
                "flops": work.flops,
                "bytes": work.bytes,
                "seconds": seconds,
                "peak_seconds": peak_seconds,
                "bound": bound.name(),
            })
        };
        Value::Array(self.slowest().operations(&self.device).iter().map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan::estimate::Estimate;
    use crate::plan::estimate::device::DeviceTable;
    use crate::plan::{PlanInputs, SyntheticBatch};

    #[test]
    fn operations_add_up_to_the_estimate() {
        let folder = tempfile::tempdir().unwrap();
        let config_json = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false}"#;
        std::fs::write(folder.path().join("config.json"), config_json).unwrap();
        let text = format!(
            "method = \"dpo\"\nmodel = {:?}\noutput = \"out\"\n[data]\ntrain = \"rows.jsonl\"\nmax_length = 64\n[train]\nbatch_size = 12\n\
             steps = 2\nmicro_batch_tokens = 128\nlearning_rate = 1e-5\n",
            folder.path()
        );
        let config = Config::from_text(&text, &folder.path().join("run.toml")).unwrap();
        let inputs = PlanInputs::assume(&config, SyntheticBatch { tokens: 128, scored: None }).unwrap();
        let device = DeviceTable::built_in().find("h100").unwrap().clone();
        let plan = RunPlan::make(&config, &inputs, 1, &device).unwrap();
        let operations = plan.slowest().operations(&device);
        let seconds: f64 = operations.iter().map(|operation| operation.seconds).sum();
        let Estimate { compute_seconds, .. } = plan.estimate;
        assert!((seconds / compute_seconds - 1.0).abs() < 1e-9, "{seconds} {compute_seconds}");
        // A block's matmuls are rows, with the calls of all micro-batches.
        let micro_batches = plan.slowest().load.rounds;
        let up: Vec<_> =
            operations.iter().filter(|operation| operation.work.shape[1..] == [96, 64]).collect();
        assert!(!up.is_empty() && micro_batches > 1.0, "{operations:?}");
        assert!(up.iter().all(|operation| (operation.calls % micro_batches).abs() < 1e-9), "{up:?}");
        let json = plan.operations_to_json();
        assert_eq!(json.as_array().unwrap().len(), operations.len());
        assert_eq!(plan.operations().lines().count(), operations.len() + 1);
    }
}
