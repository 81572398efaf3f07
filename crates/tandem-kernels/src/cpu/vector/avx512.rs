//! Sixteen lanes of AVX-512 (F, BW, DQ, VL).
//! Every intrinsic below is available wherever a value of the type can exist.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, stated above")]

use std::arch::x86_64::*;

use super::{Avx2, Strided, Vector, multiply, x86_methods};
use crate::bf16;

/// A register of AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(crate) __m512);

/// Rounds to bf16 as [`Element::from_f32`] does; the result is in the low halves.
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

    x86_methods!(
        Avx512,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
        _mm512_set1_ps,
        _mm512_sqrt_ps,
        _mm512_fmadd_ps,
        add = _mm512_add_ps,
        sub = _mm512_sub_ps,
        mul = _mm512_mul_ps,
        div = _mm512_div_ps,
        min = _mm512_min_ps,
        max = _mm512_max_ps
    );
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
    unsafe fn load_i8(from: *const u8, count: usize) -> Self {
        unsafe {
            let bytes = if count == 16 {
                _mm_loadu_si128(from.cast())
            } else {
                _mm_maskz_loadu_epi8(mask(count), from.cast())
            };
            Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
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
    unsafe fn look_up_f32(table: *const f32, places: *const u8, to: *mut f32) {
        unsafe {
            let table = _mm512_loadu_ps(table);
            for i in 0..4 {
                // One byte per 64 bits: its high half is moved to the low 32, its low half to the
                // high 32. Bits beyond the four of an index are ignored.
                let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(places.add(8 * i).cast()));
                let places = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
                _mm512_storeu_ps(to.add(16 * i), _mm512_permutexvar_ps(places, table));
            }
        }
    }
    #[inline(always)]
    unsafe fn look_up_bf16(table: *const bf16, places: *const u8, to: *mut bf16) {
        unsafe {
            // Twice, because five bits of an index count.
            let table = _mm512_broadcast_i64x4(_mm256_loadu_si256(table.cast()));
            for i in 0..2 {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(places.add(16 * i).cast()));
                let places = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
                _mm512_storeu_si512(to.add(32 * i).cast(), _mm512_permutexvar_epi16(places, table));
            }
        }
    }
    #[inline(always)]
    fn transpose(square: &mut [Self; 16]) {
        unsafe {
            // Pairs of rows, then fours: then register 4i+j holds, in its 128-bit part p, column
            // 4p+j of rows 4i..4i+4. The last pass exchanges the parts.
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
                let (even_ab, odd_ab) = (_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
                let (even_cd, odd_cd) = (_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
                square[j].0 = _mm512_shuffle_f32x4(even_ab, even_cd, 0x88);
                square[4 + j].0 = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0x88);
                square[8 + j].0 = _mm512_shuffle_f32x4(even_ab, even_cd, 0xdd);
                square[12 + j].0 = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0xdd);
            }
        }
    }
}
