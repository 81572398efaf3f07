//! A plan for programs: `plan.json`.

use serde_json::{Value, json};
use tandem_kernels::{MemoryKind, MemoryUse};

use crate::plan::work::Topology;
use crate::plan::{Plan, RunPlan};

impl Plan {
    /// The plan of one rank as it is written to `plan.json`.
    pub fn to_json(&self) -> Value {
        let phases = self.phases.iter().map(|phase| {
            json!({
                "name": phase.name,
                "peak_bytes": phase.memory.peak,
                "bytes_at_peak": by_kind(&phase.memory),
                "host_bytes_at_peak": by_kind(&phase.host.memory),
                "file_bytes_at_peak": by_kind(&phase.file.memory),
                "moment": { "place": phase.moment.place, "operation": phase.moment.operation },
                "high_water_bytes": phase.high_water,
                "flops_of_largest_micro_batch": phase.flops,
            })
        });
        json!({
            "model": self.model,
            "num_parameters": self.num_parameters,
            "num_trained_parameters": self.num_trained,
            "num_frozen_parameters": self.num_frozen,
            "dtype": self.dtype.name(),
            "ranks": self.ranks,
            "tensor": self.tensor,
            "pipeline": self.stage.count,
            "stage": self.stage.index,
            "blocks_of_stage": [self.blocks.start, self.blocks.end],
            "micro_batches_under_way": self.under_way,
            "bytes_sent_in_a_step": self.bytes_sent(None),
            "bytes_sent_between_slices_in_a_step": self.bytes_sent(Some(Topology::Slices)),
            "bytes_sent_between_stages_in_a_step": self.bytes_sent(Some(Topology::Stages)),
            "threads": self.threads,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "train_rows": self.data.train_rows,
            "eval_rows": self.data.eval_rows,
            "max_micro_batch_tokens": self.data.max_micro_batch_tokens,
            "max_scored_rows": self.data.max_scored_rows,
            "micro_batches_in_a_step": self.load.rounds,
            "idle_data_ranks": self.load.idle_ranks(),
            "arena_bytes": self.arena_bytes(),
            "host_bytes": self.host_bytes(),
            "file_bytes": self.file_bytes(),
            "bytes_outside_the_arena": self.outside,
            "bytes_of_exchange_buffers": self.exchange_buffers,
            "phases": phases.collect::<Vec<_>>(),
        })
    }
}

fn by_kind(memory: &MemoryUse) -> Value {
    let kinds =
        MemoryKind::ALL.iter().map(|&kind| (kind.name().to_owned(), json!(memory.at_peak[kind as usize])));
    Value::Object(kinds.collect())
}

impl RunPlan {
    /// The plans of all ranks, the estimate, and whether the run fits.
    pub fn to_json(&self) -> Value {
        let (fit, estimate) = (self.fit(), &self.estimate);
        let ranks = self.ranks.iter().map(|(ranks, plan)| json!({ "ranks": ranks, "plan": plan.to_json() }));
        json!({
            "device": self.device.name,
            "memory_cap_bytes": self.cap,
            "fits": self.fits(),
            "needed_bytes": fit.needed,
            "limit_bytes": fit.limit,
            "host": self.host_fit().map(|host| json!({
                "ranks": self.ranks_of_box(),
                "fits": host.fits(),
                "needed_bytes": host.needed,
                "limit_bytes": host.limit,
            })),
            "estimate": {
                "step_seconds": estimate.step_seconds,
                "compute_seconds": estimate.compute_seconds,
                "exchange_seconds": estimate.exchange_seconds,
                "bubble_seconds": estimate.bubble_seconds,
                "tokens_per_second": estimate.tokens_per_second,
                "rows_per_second": estimate.rows_per_second,
                "bytes_sent_in_a_step": estimate.bytes_sent,
                "utilisation": estimate.utilisation,
            },
            "ranks": ranks.collect::<Vec<_>>(),
        })
    }
}
