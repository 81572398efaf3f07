//! Vector registers of f32: kernels written once over [`Vector`] run on AVX-512, AVX2 and the
//! baseline.
//!
//! [`vector_kernel!`] compiles a function over `V: Vector` for each level. The compiled kernel
//! takes the device's [`Isa`](crate::cpu::Isa) as its first argument and runs with the widest
//! register of the level. Functions that it calls with registers must be `#[inline(always)]`.
//! Closures must not touch registers, since nothing compiles them with the level's instructions;
//! [`for_lanes!`] is therefore a macro.

use super::tile::{Strided, multiply};
use crate::{DType, Element, bf16};

/// Compiles an `unsafe fn name<V: Vector, …>(…)` for every level.
///
/// Callers promise what the function's documentation demands; the `Isa` vouches for the level.
macro_rules! vector_kernel {
    (
        $(#[$attribute:meta])*
        $visibility:vis unsafe fn $name:ident<$V:ident: Vector $(, $G:ident: $bound:path)*>(
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)? $body:block
    ) => {
        $(#[$attribute])*
        $visibility unsafe fn $name<$($G: $bound),*>(isa: $crate::cpu::Isa, $($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            unsafe fn generic<$V: $crate::cpu::vector::Vector $(, $G: $bound)*>(
                $($argument: $type),*
            ) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2<$($G: $bound),*>($($argument: $type),*) $(-> $result)? {
                    // SAFETY: the caller's promise.
                    unsafe { generic::<$crate::cpu::vector::Avx2 $(, $G)*>($($argument),*) }
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                unsafe fn avx512<$($G: $bound),*>($($argument: $type),*) $(-> $result)? {
                    // SAFETY: the caller's promise.
                    unsafe { generic::<$crate::cpu::vector::Avx512 $(, $G)*>($($argument),*) }
                }
                // SAFETY: the caller's promise; a level above the portable one exists only where
                // the CPU has it.
                unsafe {
                    match isa {
                        $crate::cpu::Isa::Portable => {
                            generic::<$crate::cpu::vector::Portable $(, $G)*>($($argument),*)
                        }
                        $crate::cpu::Isa::Avx2 => avx2::<$($G),*>($($argument),*),
                        $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Avx512Bf16 | $crate::cpu::Isa::Amx => {
                            avx512::<$($G),*>($($argument),*)
                        }
                    }
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                let _ = isa;
                // SAFETY: the caller's promise.
                unsafe { generic::<$crate::cpu::vector::Portable $(, $G)*>($($argument),*) }
            }
        }
    };
}
pub(crate) use vector_kernel;

/// Runs `for_lanes!(V, length, |start, count| body)` for each register of `0..length`; only the
/// last is partial. The body is expanded twice, so that whole registers are loaded and stored
/// without a mask.
macro_rules! for_lanes {
    ($V:ident, $length:expr, |$start:ident, $count:ident| $body:block) => {{
        let length: usize = $length;
        let mut $start = 0;
        while $start + $V::LANES <= length {
            let $count = $V::LANES;
            $body
            $start += $V::LANES;
        }
        if $start < length {
            let $count = length - $start;
            $body
        }
    }};
}
pub(crate) use for_lanes;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Methods of [`Vector`] that differ between x86 registers by their intrinsics alone.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_methods {
    (
        $name:ident, $features:literal, $splat:ident, $sqrt:ident, $mul_add:ident,
        $($method:ident = $intrinsic:ident),*
    ) => {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { $splat(x) })
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            Self(unsafe { $sqrt(self.0) })
        }
        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            Self(unsafe { $mul_add(self.0, factor.0, addend.0) })
        }
        $(
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self(unsafe { $intrinsic(self.0, other.0) })
            }
        )*
        #[target_feature(enable = $features)]
        unsafe fn multiply(
            shape: [usize; 3],
            a: Strided,
            b: (*const f32, usize),
            c: (*mut f32, usize),
            accumulate: bool,
        ) {
            unsafe { multiply::<$name>(shape, a, b, c, accumulate) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use x86_methods;

/// A register of [`Self::LANES`] f32. Only unsafe functions create values, which makes the rest
/// safe: a value exists only on a CPU that has the level.
pub(crate) trait Vector: Copy {
    /// Lanes; at most 16.
    const LANES: usize;
    /// Number of such registers of the CPU.
    const REGISTERS: usize;

    /// Sets every lane to one number.
    ///
    /// # Safety
    /// The CPU has the instructions of `Self`.
    unsafe fn splat(x: f32) -> Self;

    /// Loads the first `count` lanes, zeros in the others.
    ///
    /// # Safety
    /// As [`Self::splat`]; `count ≤ LANES` numbers can be read at `from`.
    unsafe fn load(from: *const f32, count: usize) -> Self;

    /// Loads bf16 as [`Self::load`], widened.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self;

    /// Loads signed bytes as [`Self::load`], as numbers.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_i8(from: *const u8, count: usize) -> Self;

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// `count ≤ LANES` numbers can be written at `to`.
    unsafe fn store(self, to: *mut f32, count: usize);

    /// Stores bf16 as [`Self::store`], rounded to nearest even.
    ///
    /// # Safety
    /// As [`Self::store`].
    unsafe fn store_bf16(self, to: *mut bf16, count: usize);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// Returns the smaller lane; `other` if one is NaN. The bound comes first: `bound.min(x)` keeps
    /// a NaN in `x`.
    fn min(self, other: Self) -> Self;
    /// Returns the larger lane; `other` if one is NaN.
    fn max(self, other: Self) -> Self;
    fn sqrt(self) -> Self;
    /// Computes `self · factor + addend`, rounded once where the level has the instruction.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Computes `self · factor + addend` with one rounding at every level, as `f32::mul_add`.
    #[inline(always)]
    fn fused_mul_add(self, factor: Self, addend: Self) -> Self {
        self.mul_add(factor, addend)
    }
    /// Rounds to nearest integers, ties to even.
    fn round(self) -> Self;
    /// Computes `2^self` for integers in -126..=127; unspecified for NaN.
    fn exp2_integer(self) -> Self;
    /// Selects per lane: `if self < bound { a } else { b }`.
    fn if_less(self, bound: Self, a: Self, b: Self) -> Self;
    /// Returns the sum of the lanes, in a fixed order.
    fn sum(self) -> f32;
    /// Returns the largest lane.
    fn largest(self) -> f32;

    /// Calls [`tile::multiply`](super::tile::multiply), compiled once instead of into each caller.
    ///
    /// # Safety
    /// As there.
    unsafe fn multiply(
        shape: [usize; 3],
        a: Strided,
        b: (*const f32, usize),
        c: (*mut f32, usize),
        accumulate: bool,
    );

    /// Looks up 64 4-bit indices (32 bytes, high half first) in a table of 16 numbers.
    ///
    /// # Safety
    /// The CPU has the instructions of `Self`; 16 numbers can be read at `table`, 32 bytes at
    /// `places`, and 64 numbers written at `to`.
    unsafe fn look_up_f32(table: *const f32, places: *const u8, to: *mut f32);

    /// Looks up bf16 as [`Self::look_up_f32`].
    ///
    /// # Safety
    /// As there.
    unsafe fn look_up_bf16(table: *const bf16, places: *const u8, to: *mut bf16);

    /// Transposes the square in the first [`Self::LANES`] registers.
    fn transpose(square: &mut [Self; 16]);

    /// Keeps the first `count` lanes and sets the others to `rest`.
    #[inline(always)]
    fn keep_first(self, count: usize, rest: f32) -> Self {
        let mut lanes = [rest; 16];
        // SAFETY: there are at most 16 lanes.
        unsafe {
            self.store(lanes.as_mut_ptr(), count);
            Self::load(lanes.as_ptr(), Self::LANES)
        }
    }

    /// Loads either element type.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn get<E: Element>(from: *const E, count: usize) -> Self {
        // SAFETY: the caller's promise; the cast is to the type that E is.
        unsafe {
            match E::DTYPE {
                DType::F32 => Self::load(from.cast(), count),
                DType::Bf16 => Self::load_bf16(from.cast(), count),
            }
        }
    }

    /// Stores either element type.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn put<E: Element>(self, to: *mut E, count: usize) {
        // SAFETY: the caller's promise; the cast is to the type that E is.
        unsafe {
            match E::DTYPE {
                DType::F32 => self.store(to.cast(), count),
                DType::Bf16 => self.store_bf16(to.cast(), count),
            }
        }
    }

    /// Looks up either element type.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn look_up<E: Element>(table: *const E, places: *const u8, to: *mut E) {
        // SAFETY: the caller's promise; the casts are to the type that E is.
        unsafe {
            match E::DTYPE {
                DType::F32 => Self::look_up_f32(table.cast(), places, to.cast()),
                DType::Bf16 => Self::look_up_bf16(table.cast(), places, to.cast()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    fn levels() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    vector_kernel! {
        /// Takes 256 numbers; transposes the first LANES² and returns LANES.
        unsafe fn transposed<V: Vector>(numbers: &mut [f32]) -> usize {
            // SAFETY: 256 numbers hold LANES² of them.
            unsafe {
                let mut square = [V::splat(0.0); 16];
                for i in 0..V::LANES {
                    square[i] = V::load(numbers.as_ptr().add(i * V::LANES), V::LANES);
                }
                V::transpose(&mut square);
                for i in 0..V::LANES {
                    square[i].store(numbers.as_mut_ptr().add(i * V::LANES), V::LANES);
                }
            }
            V::LANES
        }
    }

    #[test]
    fn squares_are_transposed() {
        for isa in levels() {
            let mut numbers: Vec<f32> = (0..256).map(|x| x as f32).collect();
            // SAFETY: 256 numbers.
            let lanes = unsafe { transposed(isa, &mut numbers) };
            for i in 0..lanes {
                for j in 0..lanes {
                    assert_eq!(numbers[i * lanes + j], (j * lanes + i) as f32, "{isa:?} {i} {j}");
                }
            }
        }
    }

    vector_kernel! {
        /// Takes 16 numbers each; `count` is at most the number of lanes, which is returned.
        unsafe fn partial<V: Vector>(
            from: &[f32],
            from_half: &[bf16],
            count: usize,
            wide: &mut [f32],
            narrow: &mut [bf16],
        ) -> usize {
            // SAFETY: every slice has 16 elements.
            unsafe {
                V::load_bf16(from_half.as_ptr(), count).store(wide.as_mut_ptr(), V::LANES);
                V::load(from.as_ptr(), V::LANES).store_bf16(narrow.as_mut_ptr(), count);
            }
            V::LANES
        }
    }

    #[test]
    fn partial_loads_read_zeros_and_partial_stores_leave_the_rest() {
        let numbers: Vec<f32> = (0..16).map(|x| x as f32 + 1.0).collect();
        let halves: Vec<bf16> = numbers.iter().map(|x| <bf16 as Element>::from_f32(*x)).collect();
        for isa in levels() {
            for count in 0..=16 {
                let (mut wide, mut narrow) = (vec![-1.0; 16], vec![bf16::NEG_ONE; 16]);
                // SAFETY: 16 elements each; no level has fewer lanes than 8, and larger counts run
                // where it has 16.
                let lanes = unsafe {
                    if count > 8 && isa < Isa::Avx512 {
                        continue;
                    }
                    partial(isa, &numbers, &halves, count, &mut wide, &mut narrow)
                };
                for i in 0..16 {
                    let number = i as f32 + 1.0;
                    let read = if i < count { number } else { [-1.0, 0.0][usize::from(i < lanes)] };
                    assert_eq!(wide[i], read, "{isa:?} {count} {i}");
                    assert_eq!(
                        narrow[i].to_f32(),
                        if i < count { number } else { -1.0 },
                        "{isa:?} {count} {i}"
                    );
                }
            }
        }
    }

    vector_kernel! {
        /// Takes 16 numbers, 32 bytes and 64 places.
        unsafe fn looked_up<V: Vector, E: Element>(table: &[E], places: &[u8], to: &mut [E]) {
            // SAFETY: the lengths that the operation needs.
            unsafe { V::look_up(table.as_ptr(), places.as_ptr(), to.as_mut_ptr()) };
        }
    }

    fn check_look_up<E: Element>(isa: Isa) {
        let table: Vec<E> = (0..16).map(|x| E::from_f32(1.5 - 0.37 * x as f32)).collect();
        // Every byte, in eight calls.
        for first in (0..=255u8).step_by(32) {
            let places: Vec<u8> = (0..32).map(|i| first + i).collect();
            let mut found = [E::from_f32(0.0); 64];
            // SAFETY: 16 numbers, 32 bytes, 64 places.
            unsafe { looked_up(isa, &table, &places, &mut found) };
            for (pair, place) in found.chunks_exact(2).zip(places) {
                let expected = [table[usize::from(place >> 4)], table[usize::from(place & 15)]];
                assert_eq!(pair, expected, "{isa:?} {} {place:#x}", E::DTYPE);
            }
        }
    }

    #[test]
    fn numbers_are_looked_up_the_high_half_of_a_byte_first() {
        for isa in levels() {
            check_look_up::<f32>(isa);
            check_look_up::<bf16>(isa);
        }
    }

    vector_kernel! {
        /// Takes 16 places.
        unsafe fn rounded<V: Vector>(x: f32, to: &mut [bf16]) {
            // SAFETY: 16 places.
            unsafe { V::splat(x).store_bf16(to.as_mut_ptr(), V::LANES) };
        }
    }

    #[test]
    fn bf16_is_rounded_as_elsewhere() {
        let hard = [1.0, 1.003_906_3, 1.011_718_8, f32::NAN, f32::INFINITY, 1e-40, -3.4e38, f32::MAX, -0.0];
        for isa in levels() {
            for x in hard {
                let mut found = [bf16::ZERO; 16];
                // SAFETY: 16 places.
                unsafe { rounded(isa, x, &mut found) };
                assert_eq!(found[0].to_bits(), <bf16 as Element>::from_f32(x).to_bits(), "{isa:?} {x}");
            }
        }
    }
}
