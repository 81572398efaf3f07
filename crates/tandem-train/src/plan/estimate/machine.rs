//! Peak rates of the machine that a profile compares operations with.

use serde::Serialize;
use tandem_kernels::{DType, OpCost, ops};

use crate::plan::estimate::device::DeviceKind;

/// Device of a rank and its peak rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Ranks of the run.
    pub num_ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// The level of vector instructions.
    pub instructions: &'static str,
    /// Multiply-adds of f32 in registers, operations a second.
    pub f32_peak: f64,
    /// The same for bf16.
    pub bf16_peak: f64,
    /// The same for E4M3, on GPUs that have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp8_peak: Option<f64>,
    /// Bytes that a copy of more than caches hold reads and writes in a second.
    pub copy_rate: f64,
}

impl Machine {
    /// Peak rates of a GPU from the device table.
    pub(crate) fn from_gpu(kind: &DeviceKind) -> Self {
        Self {
            num_ranks: 1,
            threads: 1,
            instructions: "a GPU's",
            f32_peak: kind.f32_tflops * 1e12,
            bf16_peak: kind.bf16_tflops * 1e12,
            fp8_peak: kind.fp8_tflops.map(|peak| peak * 1e12),
            copy_rate: kind.bandwidth_gbs * 1e9,
        }
    }

    /// Seconds that a call takes at best: its arithmetic at the peak of its type or its bytes at
    /// the rate of a copy, whichever is longer.
    pub(crate) fn best(&self, work: &OpCost) -> (f64, f64) {
        let of_type = match work.dtype {
            DType::F32 => self.f32_peak,
            DType::Bf16 => self.bf16_peak,
        };
        let peak = self.fp8_peak.filter(|_| ops::is_fp8_matmul(work.op)).unwrap_or(of_type);
        (work.flops / peak, work.bytes / self.copy_rate)
    }
}
