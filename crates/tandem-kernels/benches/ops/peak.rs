//! What this machine can do at best.

use tandem_kernels::{DType, Device, ops};

use crate::harness::{Bench, Place, seconds_now};

/// Measures the peaks and prints them.
pub fn measure(bench: &mut Bench) {
    let what = match &bench.device {
        Device::Cpu(cpu) => {
            let rate = |dtype| {
                let once = || {
                    let start = seconds_now();
                    cpu.multiply_adds(dtype) / (seconds_now() - start)
                };
                (0..20).map(|_| once()).fold(0.0, f64::max)
            };
            (bench.peak.f32, bench.peak.bf16) = (rate(DType::F32), rate(DType::Bf16));
            format!("{} threads, {}", bench.threads, cpu.isa().name())
        }
        _ => {
            (bench.peak.f32, bench.peak.bf16) =
                (product_rate(bench, DType::F32), product_rate(bench, DType::Bf16));
            format!("{:?}", bench.place)
        }
    };
    bench.peak.memory = memory_rate(bench);
    if bench.is_json {
        return;
    }
    println!(
        "{what}: {:.0} GFLOP/s f32, {:.0} GFLOP/s bf16, memory {:.1} GB/s",
        bench.peak.f32 / 1e9,
        bench.peak.bf16 / 1e9,
        bench.peak.memory / 1e9
    );
}

/// Operations per second of a large product, the peak of a GPU, which is reached by libraries alone.
fn product_rate(bench: &Bench, dtype: DType) -> f64 {
    let n = if bench.place == Place::Cuda { 8192 } else { 64 };
    let [x, w, mut y] = [(); 3].map(|()| bench.matrix(n, n, dtype));
    let [seconds] = bench.median_seconds([|| {
        ops::linear(&bench.device, x.view(), w.view(), None, None, y.view_mut()).expect("shapes fit");
    }]);
    2.0 * (n * n * n) as f64 / seconds
}

/// Bytes per second, read and written ones counted, of the better of two patterns: a copy, and an update in place,
/// which spares reading the lines that are about to be overwritten.
fn memory_rate(bench: &Bench) -> f64 {
    let elements = if bench.place == Place::Emulated { 1 << 16 } else { 32 << 20 };
    let (src, mut dst) = (bench.matrix(1, elements, DType::F32), bench.matrix(1, elements, DType::F32));
    let [copy] =
        bench.median_seconds([|| ops::cast(&bench.device, src.view(), dst.view_mut()).expect("shapes fit")]);
    let [update] =
        bench.median_seconds([|| ops::scale(&bench.device, dst.view_mut(), 1.0).expect("any type")]);
    2.0 * 4.0 * elements as f64 / copy.min(update)
}
