//! Peak rate of multiply-adds: in registers, with nothing to wait for.

use std::hint::black_box;

use super::{Cpu, Isa};
use crate::DType;

/// Independent sums: enough to cover the latency of multiply-adds on every unit.
const SUMS: usize = 24;
const ROUNDS: usize = 40_000;

/// Pieces of work per thread, so that a late thread delays less.
const PIECES: usize = 4;

impl Cpu {
    /// Multiplies and adds in registers on all threads for some milliseconds, as GEMMs of this type
    /// do, and returns the number of operations: divided by the time, an upper bound for every
    /// GEMM.
    pub fn multiply_adds(&self, dtype: DType) -> f64 {
        let pieces = PIECES * self.threads();
        self.parallel_for(pieces, |_| run(self.isa(), dtype));
        pieces as f64 * operations(self.isa(), dtype)
    }
}

/// `ROUNDS` rounds of `SUMS` multiply-adds of vectors.
macro_rules! multiply_add {
    ($features:literal, $vector:ty, $splat:expr, $multiply_add:expr) => {{
        #[target_feature(enable = $features)]
        fn rounds() {
            let factor: $vector = black_box($splat(0.5));
            let mut sums = [$splat(1.0); SUMS];
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = $multiply_add(factor, *sum);
                }
            }
            black_box(sums);
        }
        // SAFETY: the level was detected.
        unsafe { rounds() }
    }};
}

/// Returns the operations of [`run`].
#[cfg(target_arch = "x86_64")]
fn operations(isa: Isa, dtype: DType) -> f64 {
    let lanes = match (isa, dtype) {
        // Four tile products per round; an f32 product takes six of bf16.
        (Isa::Amx, DType::Bf16) => return (2 * 16 * 16 * 32 * 4 * ROUNDS) as f64,
        (Isa::Amx, DType::F32) => return (2 * 16 * 16 * 32 * 4 * ROUNDS) as f64 / 6.0,
        (Isa::Portable, _) => return portable_operations(),
        (Isa::Avx2, _) => 8,
        (Isa::Avx512Bf16, DType::Bf16) => 32,
        (Isa::Avx512 | Isa::Avx512Bf16, _) => 16,
    };
    (2 * lanes * SUMS * ROUNDS) as f64
}

#[cfg(target_arch = "x86_64")]
fn run(isa: Isa, dtype: DType) {
    use std::arch::x86_64::*;
    match (isa, dtype) {
        (Isa::Amx, _) => tiles(),
        (Isa::Portable, _) => portable(),
        (Isa::Avx2, _) => {
            multiply_add!("avx2,fma", __m256, |x| _mm256_set1_ps(x), |f, s| _mm256_fmadd_ps(f, s, f));
        }
        (Isa::Avx512Bf16, DType::Bf16) => {
            multiply_add!("avx512f,avx512bf16", __m512, |x| _mm512_set1_ps(x), |f: __m512, s| {
                // SAFETY: both types are 512 plain bits.
                let f = unsafe { std::mem::transmute::<__m512, __m512bh>(f) };
                _mm512_dpbf16_ps(s, f, f)
            });
        }
        (Isa::Avx512 | Isa::Avx512Bf16, _) => {
            multiply_add!("avx512f", __m512, |x| _mm512_set1_ps(x), |f, s| _mm512_fmadd_ps(f, s, f));
        }
    }
}

/// Multiplies bf16 tiles into four tiles of sums in turn.
#[cfg(target_arch = "x86_64")]
fn tiles() {
    use super::amx;
    use std::arch::asm;
    // SAFETY: the level was detected, so the process was granted tiles; they start as zeros.
    unsafe {
        amx::begin();
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
        amx::end();
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn operations(_: Isa, _: DType) -> f64 {
    portable_operations()
}

#[cfg(not(target_arch = "x86_64"))]
fn run(_: Isa, _: DType) {
    portable();
}

fn portable_operations() -> f64 {
    (2 * 4 * 12 * ROUNDS) as f64
}

/// Returns a plain loop, compiled for the baseline target.
fn portable() {
    let factor = black_box([0.5f32; 4]);
    let mut sums = [[1.0f32; 4]; 12];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for (s, f) in sum.iter_mut().zip(factor) {
                *s = f * *s + f;
            }
        }
    }
    black_box(sums);
}

#[cfg(test)]
mod tests {
    use crate::cpu::Isa;
    use crate::{DType, Device};

    #[test]
    fn every_level_counts_what_it_multiplies() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let device = Device::cpu_with_isa(2, 1 << 21, isa).unwrap();
            let Device::Cpu(cpu) = &device else { unreachable!() };
            let [f32, bf16] = [DType::F32, DType::Bf16].map(|dtype| cpu.multiply_adds(dtype));
            // As many rounds, of vectors of so many numbers; tiles take six products for one of
            // f32.
            let expected = match isa {
                Isa::Portable | Isa::Avx2 | Isa::Avx512 => 1.0,
                Isa::Avx512Bf16 => 2.0,
                Isa::Amx => 6.0,
            };
            assert_eq!(bf16 / f32, expected, "{}", isa.name());
        }
    }
}
