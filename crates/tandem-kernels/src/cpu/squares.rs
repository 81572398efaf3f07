//! Squares of numbers, summed as integers ([`BlockSquares`]).

use super::Isa;
use super::vector::vector_kernel;
use crate::numerics::squares::{BlockSquares, LARGE};

/// Adds squares to a block's sum.
pub(super) fn add_squares(isa: Isa, x: &[f32], sum: &mut BlockSquares) {
    // SAFETY: the CPU has this level.
    let has_large = unsafe { squares(isa, x, &mut sum.parts) };
    if has_large {
        let squares = x.iter().map(|x| f64::from(*x) * f64::from(*x));
        sum.large += squares.filter(|square| !is_small(*square)).sum::<f64>();
    }
}

/// Whether a square is summed as integers; a NaN is not.
#[inline(always)]
fn is_small(square: f64) -> bool {
    square < LARGE
}

/// `1.5 · 2⁵²`: adding it rounds a smaller number to an integer, in the low bits of the sum.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// Returns the nearest integer of a number below 2⁵¹, and its bits as a sum with [`ROUNDER`].
#[inline(always)]
fn nearest(x: f64) -> (f64, i64) {
    let sum = x + ROUNDER;
    (sum - ROUNDER, sum.to_bits().cast_signed())
}

/// Numbers below this have squares below half a unit of the first integer of [`BlockSquares`].
const WITHOUT_FIRST: f32 = 0.022;

vector_kernel! {
    /// Adds squares to the integers of a block ([`BlockSquares`]), and returns whether some are too large.
    unsafe fn squares<V: Vector>(x: &[f32], parts: &mut [i64; 3]) -> bool {
        // Most gradients are this small; a NaN is not.
        if x.iter().fold(true, |all, x| all & (x.abs() < WITHOUT_FIRST)) {
            squares_of::<false>(x, parts)
        } else {
            squares_of::<true>(x, parts)
        }
    }
}

/// Adds squares to the integers of a block; without `FIRST`, the first of them is not touched.
#[inline(always)]
fn squares_of<const FIRST: bool>(x: &[f32], parts: &mut [i64; 3]) -> bool {
    const LANES: usize = 16;
    let mut sums = [[0i64; LANES]; 3];
    let mut large = [0u64; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    for chunk in whole.iter().chain(std::iter::once(&last)) {
        for lane in 0..LANES {
            let rest = if FIRST {
                let square = f64::from(chunk[lane]) * f64::from(chunk[lane]);
                let small = if is_small(square) { square } else { 0.0 };
                large[lane] |= u64::from(!is_small(square));
                let (first, bits) = nearest(small * 1024.0);
                sums[0][lane] = sums[0][lane].wrapping_add(bits);
                (small - first * (1.0 / 1024.0)) * (1u64 << 50) as f64
            } else {
                let root = f64::from(chunk[lane] * (1u32 << 25) as f32);
                root * root
            };
            let (second, bits) = nearest(rest);
            sums[1][lane] = sums[1][lane].wrapping_add(bits);
            let (_, bits) = nearest((rest - second) * (1u64 << 40) as f64);
            sums[2][lane] = sums[2][lane].wrapping_add(bits);
        }
    }
    // Every element, the zeros at the end among them, added the rounder's bits once.
    let count = ((whole.len() + 1) * LANES) as i64;
    let excess = count.wrapping_mul(ROUNDER.to_bits().cast_signed());
    for (part, sums) in parts.iter_mut().zip(&sums).skip(usize::from(!FIRST)) {
        let sum = sums.iter().fold(0i64, |sum, lane| sum.wrapping_add(*lane));
        *part += sum.wrapping_sub(excess);
    }
    large.iter().any(|lane| *lane != 0)
}
