//! What this machine can do at best.

use tandem_kernels::{DType, Device, ops};

use crate::harness::{Bench, median_seconds, seconds_now};

/// Measures the peaks and prints them.
pub fn measure(bench: &mut Bench) {
    let Device::Cpu(cpu) = &bench.device else { unreachable!("benches run on the CPU") };
    let rate = |dtype| {
        let once = || {
            let start = seconds_now();
            cpu.multiply_adds(dtype) / (seconds_now() - start)
        };
        (0..20).map(|_| once()).fold(0.0, f64::max)
    };
    let (isa, [f32, bf16]) = (cpu.isa(), [DType::F32, DType::Bf16].map(rate));
    (bench.peak.f32, bench.peak.bf16) = (f32, bf16);
    bench.peak.memory = memory_rate(bench);
    println!(
        "{} threads, {}: {:.0} GFLOP/s f32, {:.0} GFLOP/s bf16, memory {:.1} GB/s",
        bench.threads,
        isa.name(),
        bench.peak.f32 / 1e9,
        bench.peak.bf16 / 1e9,
        bench.peak.memory / 1e9
    );
}

/// Bytes per second, read and written ones counted, of the better of two patterns: a copy, and an update in place,
/// which spares reading the lines that are about to be overwritten.
fn memory_rate(bench: &Bench) -> f64 {
    let elements = 32 << 20;
    let (src, mut dst) = (bench.matrix(1, elements, DType::F32), bench.matrix(1, elements, DType::F32));
    let [copy] =
        median_seconds([|| ops::cast(&bench.device, src.view(), dst.view_mut()).expect("shapes fit")]);
    let [update] = median_seconds([|| ops::scale(&bench.device, dst.view_mut(), 1.0).expect("any type")]);
    2.0 * 4.0 * elements as f64 / copy.min(update)
}
