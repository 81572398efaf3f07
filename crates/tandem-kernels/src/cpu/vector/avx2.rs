//! Eight lanes of AVX2 with FMA.
//! Every intrinsic below is available wherever a value of the type can exist.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, stated above")]

use std::arch::x86_64::*;

use super::{Strided, Vector, multiply, x86_methods};
use crate::bf16;

/// A register of AVX2.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(crate) __m256);

/// Rounds to bf16 as [`Element::from_f32`](crate::Element::from_f32) does.
#[inline(always)]
unsafe fn round_256(x: __m256) -> __m128i {
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1))
    }
}

impl Avx2 {
    /// Returns the lanes below `count` as a mask for `maskload`.
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

    x86_methods!(
        Avx2,
        "avx2,fma",
        _mm256_set1_ps,
        _mm256_sqrt_ps,
        _mm256_fmadd_ps,
        add = _mm256_add_ps,
        sub = _mm256_sub_ps,
        mul = _mm256_mul_ps,
        div = _mm256_div_ps,
        min = _mm256_min_ps,
        max = _mm256_max_ps
    );
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
    unsafe fn load_i8(from: *const u8, count: usize) -> Self {
        unsafe {
            let bytes = if count == 8 {
                _mm_loadl_epi64(from.cast())
            } else {
                let mut lanes = [0u8; 8];
                std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
                _mm_loadl_epi64(lanes.as_ptr().cast())
            };
            Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
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
            let half = round_256(self.0);
            if count == 8 {
                _mm_storeu_si128(to.cast(), half);
            } else {
                let mut lanes = [bf16::ZERO; 8];
                _mm_storeu_si128(lanes.as_mut_ptr().cast(), half);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count);
            }
        }
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
    unsafe fn look_up_f32(table: *const f32, places: *const u8, to: *mut f32) {
        unsafe {
            let (low, high) = (_mm256_loadu_ps(table), _mm256_loadu_ps(table.add(8)));
            for i in 0..8 {
                // One byte per 64 bits: its high half is moved to the low 32, its low half to the
                // high 32. Three bits of an index select; the fourth, moved to the sign, chooses
                // the half of the table.
                let four = places.add(4 * i).cast::<i32>().read_unaligned();
                let bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
                let places = _mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(bytes, 32));
                let from_low = _mm256_permutevar8x32_ps(low, places);
                let from_high = _mm256_permutevar8x32_ps(high, places);
                let fourth = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));
                _mm256_storeu_ps(to.add(8 * i), _mm256_blendv_ps(from_low, from_high, fourth));
            }
        }
    }
    #[inline(always)]
    unsafe fn look_up_bf16(table: *const bf16, places: *const u8, to: *mut bf16) {
        unsafe {
            // Only bytes can be looked up, so the table is split into low and high bytes.
            let (first, second) = (_mm_loadu_si128(table.cast()), _mm_loadu_si128(table.add(8).cast()));
            let byte = _mm_set1_epi16(0xff);
            let low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
            let high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
            let half = _mm_set1_epi8(15);
            for i in 0..2 {
                let bytes = _mm_loadu_si128(places.add(16 * i).cast());
                let (even, odd) = (_mm_and_si128(_mm_srli_epi16(bytes, 4), half), _mm_and_si128(bytes, half));
                let places = [_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)];
                for j in 0..2 {
                    let (low, high) = (_mm_shuffle_epi8(low, places[j]), _mm_shuffle_epi8(high, places[j]));
                    let to = to.add(32 * i + 16 * j);
                    _mm_storeu_si128(to.cast(), _mm_unpacklo_epi8(low, high));
                    _mm_storeu_si128(to.add(8).cast(), _mm_unpackhi_epi8(low, high));
                }
            }
        }
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
