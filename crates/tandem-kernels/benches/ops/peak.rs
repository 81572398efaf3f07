//! What this machine can do at best.

use std::hint::black_box;

use tandem_kernels::cpu::Isa;
use tandem_kernels::{DType, Device, ops};

use crate::harness::{Bench, median_seconds, seconds_now};

/// Measures the peaks and prints them.
pub fn measure(bench: &mut Bench) {
    let Device::Cpu(cpu) = &bench.device else { unreachable!("benches run on the CPU") };
    let isa = cpu.isa();
    bench.peak.f32 = on_all_threads(bench.threads, || f32_rate(isa));
    bench.peak.bf16 = on_all_threads(bench.threads, || bf16_rate(isa));
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

/// The sum of the best rate of each thread.
fn on_all_threads(threads: usize, rate: impl Fn() -> f64 + Sync) -> f64 {
    std::thread::scope(|scope| {
        let handles: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| (0..20).map(|_| rate()).fold(0.0, f64::max))).collect();
        handles.into_iter().map(|h| h.join().expect("no panic")).sum()
    })
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

/// Independent sums: enough to cover the latency of a multiply-add on every unit.
const SUMS: usize = 24;
const ROUNDS: usize = 40_000;

/// Times `ROUNDS` rounds of `SUMS` multiply-adds of `lanes` lanes and `depth` products a lane.
macro_rules! rate {
    ($features:literal, $vector:ty, $lanes:expr, $depth:expr, $splat:expr, $multiply_add:expr) => {{
        #[target_feature(enable = $features)]
        fn rounds(factor: $vector) -> [$vector; SUMS] {
            let mut sums = [$splat(1.0); SUMS];
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = $multiply_add(factor, *sum);
                }
            }
            sums
        }
        #[target_feature(enable = $features)]
        fn seconds() -> f64 {
            let factor = black_box($splat(0.5));
            let start = seconds_now();
            black_box(rounds(factor));
            (seconds_now() - start)
        }
        // SAFETY: the level was detected.
        2.0 * ($depth * $lanes * SUMS * ROUNDS) as f64 / unsafe { seconds() }
    }};
}

#[cfg(target_arch = "x86_64")]
fn f32_rate(isa: Isa) -> f64 {
    use std::arch::x86_64::*;
    match isa {
        Isa::Portable => portable_rate(),
        Isa::Avx2 => rate!("avx2,fma", __m256, 8, 1, |x| _mm256_set1_ps(x), |f, s| _mm256_fmadd_ps(f, s, f)),
        Isa::Avx512 | Isa::Avx512Bf16 => {
            rate!("avx512f", __m512, 16, 1, |x| _mm512_set1_ps(x), |f, s| _mm512_fmadd_ps(f, s, f))
        }
        // A product of f32 is six of bf16.
        Isa::Amx => tile_rate() / 6.0,
    }
}

#[cfg(target_arch = "x86_64")]
fn bf16_rate(isa: Isa) -> f64 {
    use std::arch::x86_64::*;
    match isa {
        Isa::Amx => return tile_rate(),
        Isa::Avx512Bf16 => {}
        _ => return f32_rate(isa),
    }
    rate!("avx512f,avx512bf16", __m512, 16, 2, |x| _mm512_set1_ps(x), |f: __m512, s| {
        // SAFETY: both types are 512 plain bits.
        let f = unsafe { std::mem::transmute::<__m512, __m512bh>(f) };
        _mm512_dpbf16_ps(s, f, f)
    })
}

/// Products of tiles of bf16, each into one of four tiles of sums.
#[cfg(target_arch = "x86_64")]
fn tile_rate() -> f64 {
    use std::arch::asm;
    #[repr(C, align(64))]
    struct Configuration([u8; 64]);
    let mut eight = Configuration([0; 64]);
    eight.0[0] = 1;
    for tile in 0..8 {
        (eight.0[16 + 2 * tile], eight.0[48 + tile]) = (64, 16);
    }
    // SAFETY: the level was detected, so the process was granted tiles.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const eight) };
    let start = seconds_now();
    // SAFETY: as above; the tiles start as zeros.
    unsafe {
        asm!(
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) ROUNDS => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        );
    }
    let seconds = seconds_now() - start;
    // SAFETY: as above.
    unsafe { asm!("tilerelease") };
    (2 * 16 * 16 * 32 * 4 * ROUNDS) as f64 / seconds
}

#[cfg(not(target_arch = "x86_64"))]
fn f32_rate(_: Isa) -> f64 {
    portable_rate()
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_rate(_: Isa) -> f64 {
    portable_rate()
}

/// What the compiler makes of a plain loop for the baseline target.
fn portable_rate() -> f64 {
    let factor = black_box([0.5f32; 4]);
    let mut sums = [[1.0f32; 4]; 12];
    let start = seconds_now();
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for (s, f) in sum.iter_mut().zip(factor) {
                *s = f * *s + f;
            }
        }
    }
    black_box(sums);
    2.0 * (4 * 12 * ROUNDS) as f64 / (seconds_now() - start)
}
