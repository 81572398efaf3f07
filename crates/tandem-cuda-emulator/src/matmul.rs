//! GEMM: both factors are widened to f32 with their rows along the depth, and multiplied row by
//! row.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use half::bf16;
use tandem_kernels::DType;
use tandem_kernels::cuda::driver::{Algorithm, Factor, FactorType, Matmul};
use tandem_kernels::numerics::e4m3;

use crate::memory::translate;

/// Partial sums of a dot product: as many as wide registers hold.
const LANES: usize = 16;

type Lanes = [f32; LANES];

/// Columns of the result per pass.
const COLUMNS: usize = 4;

/// Algorithm of a GEMM: order in which the partial sums of lanes are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// First to last.
    #[default]
    Forward,
    /// Last to first.
    Backward,
}

impl Order {
    pub(crate) const ALL: [Self; 2] = [Self::Forward, Self::Backward];

    pub(crate) fn algorithm(self) -> Algorithm {
        Algorithm([self as u64; 8])
    }

    pub(crate) fn from_algorithm(algorithm: &Algorithm) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.algorithm() == *algorithm)
    }
}

/// Reads numbers `step` apart, widened.
///
/// # Safety
/// Lengths in numbers of that type.
unsafe fn read(address: u64, first: usize, step: usize, dtype: FactorType, to: &mut [f32]) {
    let address = translate(address) as usize;
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            FactorType::F32 => {
                let from = with_exposed_provenance::<f32>(address).add(first);
                to.iter_mut().enumerate().for_each(|(i, to)| *to = from.add(i * step).read());
            }
            FactorType::Bf16 => {
                let from = with_exposed_provenance::<bf16>(address).add(first);
                to.iter_mut().enumerate().for_each(|(i, to)| *to = from.add(i * step).read().to_f32());
            }
            FactorType::E4m3 => {
                let from = with_exposed_provenance::<u8>(address).add(first);
                to.iter_mut().enumerate().for_each(|(i, to)| *to = e4m3::to_f32(from.add(i * step).read()));
            }
        }
    }
}

/// Writes adjacent numbers, rounded to the type.
///
/// # Safety
/// There is room for as many.
unsafe fn write(from: &[f32], address: u64, first: usize, dtype: DType) {
    let address = translate(address) as usize;
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => {
                let to = with_exposed_provenance_mut::<f32>(address).add(first);
                from.iter().enumerate().for_each(|(i, &x)| to.add(i).write(x));
            }
            DType::Bf16 => {
                let to = with_exposed_provenance_mut::<bf16>(address).add(first);
                from.iter().enumerate().for_each(|(i, &x)| to.add(i).write(bf16::from_f32(x)));
            }
        }
    }
}

/// Returns the rows of a factor along the depth, padded with zeros to `width` groups, and zero rows
/// beyond.
///
/// # Safety
/// The factor exists.
unsafe fn widened(factor: &Factor, rows: usize, depth: usize, width: usize, dtype: FactorType) -> Vec<Lanes> {
    let mut wide = vec![[0.0; LANES]; rows.next_multiple_of(COLUMNS) * width];
    let (of_row, of_depth) = if factor.along_depth { (factor.stride, 1) } else { (1, factor.stride) };
    for (row, to) in wide.chunks_mut(width.max(1)).take(rows).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { read(factor.address, row * of_row, of_depth, dtype, &mut to.as_flattened_mut()[..depth]) };
    }
    wide
}

/// Computes `to[i, j] = Σ_k a[i, k] · b[j, k]` for all rows of `a` and some of `b`, `width` long.
#[inline(always)]
fn multiply(a: &[Lanes], b: &[Lanes], width: usize, order: Order, to: &mut [[f32; COLUMNS]]) {
    let b: [&[Lanes]; COLUMNS] = std::array::from_fn(|column| &b[column * width..(column + 1) * width]);
    for (i, to) in to.iter_mut().enumerate() {
        let a = &a[i * width..(i + 1) * width];
        let mut sums = [[0f32; LANES]; COLUMNS];
        for k in 0..width {
            for column in 0..COLUMNS {
                for lane in 0..LANES {
                    sums[column][lane] += a[k][lane] * b[column][k][lane];
                }
            }
        }
        *to = sums.map(|sums| match order {
            Order::Forward => sums.iter().sum(),
            Order::Backward => sums.iter().rev().sum(),
        });
    }
}

/// Computes [`multiply`] with wider registers and the same bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn multiply_wide(a: &[Lanes], b: &[Lanes], width: usize, order: Order, to: &mut [[f32; COLUMNS]]) {
    multiply(a, b, width, order, to);
}

fn multiply_best(a: &[Lanes], b: &[Lanes], width: usize, order: Order, to: &mut [[f32; COLUMNS]]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has the instructions.
        return unsafe { multiply_wide(a, b, width, order, to) };
    }
    multiply(a, b, width, order, to);
}

/// Computes a GEMM.
///
/// # Safety
/// Factors, addend and room for the result exist.
pub(crate) unsafe fn matmul(product: &Matmul, order: Order) {
    let [m, n, k] = product.size;
    let width = k.div_ceil(LANES);
    // SAFETY: the caller's promise.
    let (a, b) = unsafe {
        (widened(&product.a, m, k, width, product.dtype), widened(&product.b, n, k, width, product.dtype))
    };
    let (to, stride) = product.d;
    let mut sums = vec![[0.0; COLUMNS]; m];
    for column in (0..n).step_by(COLUMNS) {
        let count = COLUMNS.min(n - column);
        multiply_best(&a, &b[column * width..(column + COLUMNS) * width], width, order, &mut sums);
        for (i, sums) in sums.iter_mut().enumerate() {
            if let Some((c, stride)) = product.c {
                // As cuBLASLt was seen to do.
                if product.d_type == DType::Bf16 {
                    sums.iter_mut().for_each(|sum| *sum = bf16::from_f32(*sum).to_f32());
                }
                let mut added = [0.0; COLUMNS];
                // SAFETY: the caller's promise.
                unsafe { read(c, i * stride + column, 1, product.d_type.into(), &mut added[..count]) };
                sums.iter_mut().zip(added).for_each(|(sum, x)| *sum += x);
            }
            // SAFETY: the caller's promise.
            unsafe { write(&sums[..count], to, i * stride + column, product.d_type) };
        }
    }
}
