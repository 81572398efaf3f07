//! A register of f32 lanes: kernels written once over [`Vector`] run on AVX-512, AVX2 and anything else.
//!
//! [`vector_kernel!`] makes a kernel of a function over `V: Vector`: it takes the device's [`Isa`](crate::cpu::Isa) as
//! its first argument and runs with the widest register that the level allows. What the function calls with registers
//! must be `#[inline(always)]`; and closures must not touch registers, for nothing forces them to be compiled with the
//! level's instructions, which [`for_lanes!`] is a macro for.

use super::tile::{Strided, multiply};
use crate::{DType, Element, bf16};

/// Compiles an `unsafe fn name<V: Vector, …>(…)` for every level.
///
/// The function's callers promise what its documentation demands; that the processor has the level is the `Isa`'s.
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
                // SAFETY: the caller's promise, and a level above the portable one exists only where the processor
                // has it.
                unsafe {
                    match isa {
                        $crate::cpu::Isa::Portable => {
                            generic::<$crate::cpu::vector::Portable $(, $G)*>($($argument),*)
                        }
                        $crate::cpu::Isa::Avx2 => avx2::<$($G),*>($($argument),*),
                        $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Avx512Bf16 => {
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

/// `for_lanes!(V, length, |start, count| body)`: the body for each register's worth of `0..length`; only the last is
/// partial. The body stands in the text twice, so that whole registers are loaded and stored without a mask.
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
pub(crate) use x86::{Avx2, Avx512};

/// A register of [`Self::LANES`] f32. Values are made by the unsafe functions only, which makes the rest safe: who
/// holds one runs on a processor that has it.
pub(crate) trait Vector: Copy {
    /// Lanes; at most 16.
    const LANES: usize;
    /// Registers of this kind that the processor has.
    const REGISTERS: usize;

    /// The same number in every lane.
    ///
    /// # Safety
    /// The processor has the instructions of `Self`.
    unsafe fn splat(x: f32) -> Self;

    /// The first `count` lanes from memory, zeros in the others.
    ///
    /// # Safety
    /// As [`Self::splat`]; `count ≤ LANES` numbers can be read at `from`.
    unsafe fn load(from: *const f32, count: usize) -> Self;

    /// [`Self::load`], widened.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bf16(from: *const bf16, count: usize) -> Self;

    /// The first `count` lanes to memory.
    ///
    /// # Safety
    /// `count ≤ LANES` numbers can be written at `to`.
    unsafe fn store(self, to: *mut f32, count: usize);

    /// [`Self::store`], rounded to nearest even.
    ///
    /// # Safety
    /// As [`Self::store`].
    unsafe fn store_bf16(self, to: *mut bf16, count: usize);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// The smaller; `other` if one is not a number. So a bound comes first: `bound.min(x)` keeps a NaN in `x`.
    fn min(self, other: Self) -> Self;
    /// The larger; `other` if one is not a number.
    fn max(self, other: Self) -> Self;
    fn sqrt(self) -> Self;
    /// `self · factor + addend`.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// To the nearest integer, halves to even.
    fn round(self) -> Self;
    /// `2^self` for integers in -126..=127; anything for NaN.
    fn exp2_integer(self) -> Self;
    /// Per lane, `if self < bound { a } else { b }`.
    fn if_less(self, bound: Self, a: Self, b: Self) -> Self;
    /// The sum of the lanes, in a fixed order.
    fn sum(self) -> f32;
    /// The largest lane.
    fn largest(self) -> f32;

    /// [`tile::multiply`](super::tile::multiply), compiled once instead of into each of its many callers.
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

    /// Exchanges rows and columns of the square in the first [`Self::LANES`] registers.
    fn transpose(square: &mut [Self; 16]);

    /// The first `count` lanes, `rest` in the others.
    #[inline(always)]
    fn keep_first(self, count: usize, rest: f32) -> Self {
        let mut lanes = [rest; 16];
        // SAFETY: there are at most 16 lanes.
        unsafe {
            self.store(lanes.as_mut_ptr(), count);
            Self::load(lanes.as_ptr(), Self::LANES)
        }
    }

    /// [`Self::load`] from either element type.
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

    /// [`Self::store`] to either element type.
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
}

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
    fn round(self) -> Self {
        // Adding and subtracting 1.5·2^23 rounds numbers below 2^22; `round_ties_even` is a function before SSE4.1.
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
    fn transpose(square: &mut [Self; 16]) {
        for i in 0..PORTABLE_LANES {
            for j in 0..i {
                (square[i].0[j], square[j].0[i]) = (square[j].0[i], square[i].0[j]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Every intrinsic below is available wherever a value of its type can exist.
    #![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, stated above")]

    use std::arch::x86_64::*;

    use super::{Strided, Vector, multiply};
    use crate::{Element, bf16};

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(pub(crate) __m512);

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(pub(crate) __m256);

    /// Rounds to bf16 as [`Element::from_f32`] does; the result stands in the low halves.
    #[inline(always)]
    unsafe fn round_512(x: __m512) -> __m256i {
        unsafe {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
            let result = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
            _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16))
        }
    }

    #[inline(always)]
    fn mask(count: usize) -> u16 {
        ((1u32 << count) - 1) as u16
    }

    impl Vector for Avx512 {
        const LANES: usize = 16;
        const REGISTERS: usize = 32;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32, count: usize) -> Self {
            unsafe {
                if count == 16 {
                    Self(_mm512_loadu_ps(from))
                } else {
                    Self(_mm512_maskz_loadu_ps(mask(count), from))
                }
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
            unsafe {
                let half = if count == 16 {
                    _mm256_loadu_si256(from.cast())
                } else {
                    _mm256_maskz_loadu_epi16(mask(count), from.cast())
                };
                Self(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, count: usize) {
            unsafe {
                if count == 16 {
                    _mm512_storeu_ps(to, self.0);
                } else {
                    _mm512_mask_storeu_ps(to, mask(count), self.0);
                }
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
            unsafe {
                let half = round_512(self.0);
                if count == 16 {
                    _mm256_storeu_si256(to.cast(), half);
                } else {
                    _mm256_mask_storeu_epi16(to.cast(), mask(count), half);
                }
            }
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            Self(unsafe { _mm512_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            Self(unsafe { _mm512_sqrt_ps(self.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(unsafe { _mm512_min_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            Self(unsafe { _mm512_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
        }
        #[inline(always)]
        fn round(self) -> Self {
            Self(unsafe { _mm512_roundscale_ps(self.0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) })
        }
        #[inline(always)]
        fn exp2_integer(self) -> Self {
            unsafe {
                let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)))
            }
        }
        #[inline(always)]
        fn if_less(self, bound: Self, a: Self, b: Self) -> Self {
            unsafe {
                let less = _mm512_cmp_ps_mask(self.0, bound.0, _CMP_LT_OQ);
                Self(_mm512_mask_blend_ps(less, b.0, a.0))
            }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            unsafe {
                let low = _mm512_castps512_ps256(self.0);
                Avx2(_mm256_add_ps(low, _mm512_extractf32x8_ps(self.0, 1))).sum()
            }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            unsafe {
                let low = _mm512_castps512_ps256(self.0);
                Avx2(_mm256_max_ps(low, _mm512_extractf32x8_ps(self.0, 1))).largest()
            }
        }
        #[inline(always)]
        unsafe fn multiply(
            shape: [usize; 3],
            a: Strided,
            b: (*const f32, usize),
            c: (*mut f32, usize),
            accumulate: bool,
        ) {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn outlined(
                shape: [usize; 3],
                a: Strided,
                b: (*const f32, usize),
                c: (*mut f32, usize),
                accumulate: bool,
            ) {
                unsafe { multiply::<Avx512>(shape, a, b, c, accumulate) }
            }
            unsafe { outlined(shape, a, b, c, accumulate) }
        }
        #[inline(always)]
        fn transpose(square: &mut [Self; 16]) {
            unsafe {
                // Pairs of rows, then fours: afterwards register 4i+j holds, in its 128-bit part p, column 4p+j of
                // rows 4i..4i+4. What remains is to exchange the parts.
                let mut pairs = *square;
                for i in 0..8 {
                    pairs[2 * i].0 = _mm512_unpacklo_ps(square[2 * i].0, square[2 * i + 1].0);
                    pairs[2 * i + 1].0 = _mm512_unpackhi_ps(square[2 * i].0, square[2 * i + 1].0);
                }
                let mut fours = [_mm512_setzero_pd(); 16];
                for i in 0..16 {
                    fours[i] = _mm512_castps_pd(pairs[i].0);
                }
                for i in 0..4 {
                    let (a, b) = (fours[4 * i], fours[4 * i + 1]);
                    let (c, d) = (fours[4 * i + 2], fours[4 * i + 3]);
                    fours[4 * i] = _mm512_unpacklo_pd(a, c);
                    fours[4 * i + 1] = _mm512_unpackhi_pd(a, c);
                    fours[4 * i + 2] = _mm512_unpacklo_pd(b, d);
                    fours[4 * i + 3] = _mm512_unpackhi_pd(b, d);
                }
                for j in 0..4 {
                    let (a, b) = (_mm512_castpd_ps(fours[j]), _mm512_castpd_ps(fours[4 + j]));
                    let (c, d) = (_mm512_castpd_ps(fours[8 + j]), _mm512_castpd_ps(fours[12 + j]));
                    let (even_ab, odd_ab) =
                        (_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
                    let (even_cd, odd_cd) =
                        (_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
                    square[j].0 = _mm512_shuffle_f32x4(even_ab, even_cd, 0x88);
                    square[4 + j].0 = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0x88);
                    square[8 + j].0 = _mm512_shuffle_f32x4(even_ab, even_cd, 0xdd);
                    square[12 + j].0 = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0xdd);
                }
            }
        }
    }

    impl Avx2 {
        /// The lanes below `count`, as a mask for `maskload`.
        #[inline(always)]
        unsafe fn mask(count: usize) -> __m256i {
            unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
            }
        }
    }

    impl Vector for Avx2 {
        const LANES: usize = 8;
        const REGISTERS: usize = 16;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32, count: usize) -> Self {
            unsafe {
                if count == 8 {
                    Self(_mm256_loadu_ps(from))
                } else {
                    Self(_mm256_maskload_ps(from, Self::mask(count)))
                }
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16, count: usize) -> Self {
            unsafe {
                let half = if count == 8 {
                    _mm_loadu_si128(from.cast())
                } else {
                    let mut lanes = [bf16::ZERO; 8];
                    std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
                    _mm_loadu_si128(lanes.as_ptr().cast())
                };
                Self(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, count: usize) {
            unsafe {
                if count == 8 {
                    _mm256_storeu_ps(to, self.0);
                } else {
                    _mm256_maskstore_ps(to, Self::mask(count), self.0);
                }
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut bf16, count: usize) {
            unsafe {
                let mut lanes = [0f32; 8];
                _mm256_storeu_ps(lanes.as_mut_ptr(), self.0);
                let rounded = lanes.map(<bf16 as Element>::from_f32);
                std::ptr::copy_nonoverlapping(rounded.as_ptr(), to, count);
            }
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            Self(unsafe { _mm256_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            Self(unsafe { _mm256_sqrt_ps(self.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(unsafe { _mm256_min_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            Self(unsafe { _mm256_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }
        #[inline(always)]
        fn round(self) -> Self {
            Self(unsafe { _mm256_round_ps(self.0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) })
        }
        #[inline(always)]
        fn exp2_integer(self) -> Self {
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))
            }
        }
        #[inline(always)]
        fn if_less(self, bound: Self, a: Self, b: Self) -> Self {
            Self(unsafe { _mm256_blendv_ps(b.0, a.0, _mm256_cmp_ps(self.0, bound.0, _CMP_LT_OQ)) })
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps(self.0, 1));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)))
            }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            unsafe {
                let four = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps(self.0, 1));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)))
            }
        }
        #[inline(always)]
        unsafe fn multiply(
            shape: [usize; 3],
            a: Strided,
            b: (*const f32, usize),
            c: (*mut f32, usize),
            accumulate: bool,
        ) {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn outlined(
                shape: [usize; 3],
                a: Strided,
                b: (*const f32, usize),
                c: (*mut f32, usize),
                accumulate: bool,
            ) {
                unsafe { multiply::<Avx2>(shape, a, b, c, accumulate) }
            }
            unsafe { outlined(shape, a, b, c, accumulate) }
        }
        #[inline(always)]
        fn transpose(square: &mut [Self; 16]) {
            unsafe {
                let mut pairs = *square;
                for i in 0..4 {
                    pairs[2 * i].0 = _mm256_unpacklo_ps(square[2 * i].0, square[2 * i + 1].0);
                    pairs[2 * i + 1].0 = _mm256_unpackhi_ps(square[2 * i].0, square[2 * i + 1].0);
                }
                let mut fours = pairs;
                for i in 0..2 {
                    let (a, b) = (pairs[4 * i].0, pairs[4 * i + 1].0);
                    let (c, d) = (pairs[4 * i + 2].0, pairs[4 * i + 3].0);
                    fours[4 * i].0 = _mm256_shuffle_ps(a, c, 0x44);
                    fours[4 * i + 1].0 = _mm256_shuffle_ps(a, c, 0xee);
                    fours[4 * i + 2].0 = _mm256_shuffle_ps(b, d, 0x44);
                    fours[4 * i + 3].0 = _mm256_shuffle_ps(b, d, 0xee);
                }
                for j in 0..4 {
                    square[j].0 = _mm256_permute2f128_ps(fours[j].0, fours[4 + j].0, 0x20);
                    square[4 + j].0 = _mm256_permute2f128_ps(fours[j].0, fours[4 + j].0, 0x31);
                }
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
                // SAFETY: 16 elements each; no level has fewer lanes than 8, and larger counts run where it has 16.
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
