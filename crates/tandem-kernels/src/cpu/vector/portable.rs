//! Plain Rust, which compilers turn into whatever vector instructions the target always has.

use super::{Strided, Vector, multiply};
use crate::{Element, bf16};

const PORTABLE_LANES: usize = 8;

/// Plain Rust, which compilers turn into whatever vector instructions the target always has.
#[derive(Clone, Copy)]
pub(crate) struct Portable(pub(crate) [f32; PORTABLE_LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

/// Looks up 4-bit indices of any type.
#[inline(always)]
unsafe fn look_up<E: Copy>(table: *const E, places: *const u8, to: *mut E) {
    for i in 0..32 {
        // SAFETY: the caller's promise; half a byte is less than 16.
        unsafe {
            let place = *places.add(i);
            *to.add(2 * i) = *table.add(usize::from(place >> 4));
            *to.add(2 * i + 1) = *table.add(usize::from(place & 15));
        }
    }
}

impl Vector for Portable {
    const LANES: usize = PORTABLE_LANES;
    const REGISTERS: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; PORTABLE_LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller's promise.
        Self(std::array::from_fn(|i| if i < count { unsafe { *from.add(i) } } else { 0.0 }))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
        // SAFETY: the caller's promise.
        Self(std::array::from_fn(|i| if i < count { unsafe { *from.add(i) }.to_f32() } else { 0.0 }))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8, count: usize) -> Self {
        let number = |i: usize| {
            // SAFETY: the caller's promise.
            if i < count { f32::from(unsafe { *from.add(i) }.cast_signed()) } else { 0.0 }
        };
        Self(std::array::from_fn(number))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, count: usize) {
        for i in 0..count {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = self.0[i] };
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
        for i in 0..count {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = <bf16 as Element>::from_f32(self.0[i]) };
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(self.0.map(f32::sqrt))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Where the target has no fused instruction, `f32::mul_add` is a slow function.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            Self(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
        } else {
            self.mul(factor).add(addend)
        }
    }
    #[inline(always)]
    fn fused_mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| fused(self.0[i], factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding and subtracting 1.5·2^23 rounds numbers below 2^22; `round_ties_even` is a
        // function before SSE4.1.
        let shift = 12_582_912.0;
        Self(self.0.map(|x| (x + shift) - shift))
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(((x as i32 + 127) as u32) << 23)))
    }
    #[inline(always)]
    fn if_less(self, bound: Self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < bound.0[i] { a.0[i] } else { b.0[i] }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    unsafe fn multiply(
        shape: [usize; 3],
        a: Strided,
        b: (*const f32, usize),
        c: (*mut f32, usize),
        accumulate: bool,
    ) {
        // SAFETY: passed on.
        unsafe { multiply::<Self>(shape, a, b, c, accumulate) }
    }
    #[inline(always)]
    unsafe fn look_up_f32(table: *const f32, places: *const u8, to: *mut f32) {
        // SAFETY: passed on.
        unsafe { look_up(table, places, to) }
    }
    #[inline(always)]
    unsafe fn look_up_bf16(table: *const bf16, places: *const u8, to: *mut bf16) {
        // SAFETY: passed on.
        unsafe { look_up(table, places, to) }
    }
    #[inline(always)]
    fn transpose(square: &mut [Self; 16]) {
        for i in 0..PORTABLE_LANES {
            for j in 0..i {
                (square[i].0[j], square[j].0[i]) = (square[j].0[i], square[i].0[j]);
            }
        }
    }
}

/// Computes `a · b + c` with one rounding, without a fused instruction.
///
/// In f64 the product is exact. The sum is rounded to odd: if it is inexact and its last bit is
/// even, it moves one step towards the exact value. Rounding an odd sum to f32 is then correct,
/// for f64 has more than two bits to spare (Boldo and Melquiond, IEEE Trans. Comput. 57, 2008).
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    // Knuth's TwoSum: `sum + error` is exact.
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    let bits = sum.to_bits();
    // The error of an infinite sum is NaN, whose comparison is false.
    let step = u64::from(error.abs() > 0.0) & !bits & 1;
    let towards = if (error > 0.0) == (sum > 0.0) { step } else { step.wrapping_neg() };
    f64::from_bits(bits.wrapping_add(towards)) as f32
}

#[cfg(test)]
mod tests {
    use super::fused;
    use crate::numerics::random::mix;

    #[test]
    fn a_fused_sum_is_rounded_once() {
        let ties =
            [(1.0 + f32::EPSILON, 1.0 + f32::EPSILON, -1.0), (4097.0, 4097.0, 1.0), (1e-30, 1e-15, 1e-45)];
        let special =
            [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        let special =
            special.iter().flat_map(|&a| special.iter().flat_map(move |&b| special.map(|c| (a, b, c))));
        // Numbers of near exponents, so that products and addends meet, or one rounds the other.
        let number = |i| {
            let bits = mix(i);
            f32::from_bits((bits as u32 & 0x807f_ffff) | ((96 + ((bits >> 32) as u32 & 63)) << 23))
        };
        let drawn: Vec<_> =
            (0..1_000_000).map(|i| (number(3 * i), number(3 * i + 1), number(3 * i + 2))).collect();
        for (a, b, c) in drawn.into_iter().chain(ties).chain(special) {
            let (found, expected) = (fused(a, b, c), a.mul_add(b, c));
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{a} · {b} + {c}: {found}, not {expected}"
            );
        }
    }
}
