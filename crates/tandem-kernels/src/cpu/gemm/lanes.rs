//! Register operations of packing: transposing 32-bit lanes, and pairs of bf16 in them.

use crate::cpu::vector::{Portable, Vector};
use crate::{Element, bf16};

/// Addresses of the rows of a panel.
pub(super) type Rows = [*const u8; MOST_LANES];

/// The lanes of the widest register.
pub(super) const MOST_LANES: usize = 16;

/// Registers of 32-bit lanes, whatever the bits mean.
pub(super) trait Lanes: Vector {
    /// Loads four columns of a matrix of `LANES` rows: row `i` is the four lanes at `rows[i] +
    /// offset` bytes, result `j` is column `j`.
    ///
    /// # Safety
    /// The CPU has the instructions of `Self`, and the first `LANES` rows can be read.
    unsafe fn load_columns(rows: &Rows, offset: usize) -> [Self; 4];

    /// Widens the first bf16 of each pair.
    fn first_of_pairs(self) -> Self;

    /// Widens the second bf16 of each pair.
    fn second_of_pairs(self) -> Self;

    /// Packs pairs of bf16 from two registers of widened bf16.
    fn pair_with(self, second: Self) -> Self;

    /// Rounds to bf16 as [`Element::from_f32`](crate::Element::from_f32) does, and widens again.
    fn round_to_bf16(self) -> Self;

    /// Returns the numbers of signed bytes, byte `index` of each lane.
    fn signed_byte(self, index: usize) -> Self;

    /// Looks up four bits of each lane, from bit `first` on.
    fn look_up_bits(self, first: usize, numbers: &[f32; 16]) -> Self;
}

impl Lanes for Portable {
    #[inline(always)]
    unsafe fn load_columns(rows: &Rows, offset: usize) -> [Self; 4] {
        let mut columns = [[0.0; Self::LANES]; 4];
        for i in 0..Self::LANES {
            // SAFETY: the caller's promise.
            let row = unsafe { rows[i].add(offset).cast::<[f32; 4]>().read_unaligned() };
            for j in 0..4 {
                columns[j][i] = row[j];
            }
        }
        columns.map(Self)
    }
    #[inline(always)]
    fn first_of_pairs(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() << 16)))
    }
    #[inline(always)]
    fn second_of_pairs(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)))
    }
    #[inline(always)]
    fn pair_with(self, second: Self) -> Self {
        Self(std::array::from_fn(|i| f32::from_bits(self.0[i].to_bits() >> 16 | second.0[i].to_bits())))
    }
    #[inline(always)]
    fn round_to_bf16(self) -> Self {
        Self(self.0.map(|x| <bf16 as Element>::from_f32(x).to_f32()))
    }
    #[inline(always)]
    fn signed_byte(self, index: usize) -> Self {
        Self(self.0.map(|x| f32::from((x.to_bits() >> (8 * index)) as i8)))
    }
    #[inline(always)]
    fn look_up_bits(self, first: usize, numbers: &[f32; 16]) -> Self {
        Self(self.0.map(|x| numbers[(x.to_bits() >> first & 15) as usize]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Every intrinsic below is available wherever a value of its type can exist.
    #![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, stated above")]

    use std::arch::x86_64::*;

    use super::{Lanes, Rows};
    use crate::cpu::vector::{Avx2, Avx512};

    /// Transposes the 128-bit parts of four registers.
    macro_rules! transpose {
        ($r:ident, $unpack_low:ident, $unpack_high:ident, $shuffle:ident) => {{
            let (a, b) = ($unpack_low($r[0], $r[1]), $unpack_low($r[2], $r[3]));
            let (c, d) = ($unpack_high($r[0], $r[1]), $unpack_high($r[2], $r[3]));
            [
                Self($shuffle::<0b01_00_01_00>(a, b)),
                Self($shuffle::<0b11_10_11_10>(a, b)),
                Self($shuffle::<0b01_00_01_00>(c, d)),
                Self($shuffle::<0b11_10_11_10>(c, d)),
            ]
        }};
    }

    /// Methods on pairs of bf16, which differ between registers by their intrinsics alone.
    macro_rules! pairs {
        (
            $to_bits:ident, $from_bits:ident, $shift_left:ident, $shift_right:ident, $set:ident, $and:ident,
            $or:ident
        ) => {
            #[inline(always)]
            fn first_of_pairs(self) -> Self {
                Self(unsafe { $from_bits($shift_left::<16>($to_bits(self.0))) })
            }
            #[inline(always)]
            fn second_of_pairs(self) -> Self {
                unsafe {
                    let second = $set(0xffff_0000_u32.cast_signed());
                    Self($from_bits($and($to_bits(self.0), second)))
                }
            }
            #[inline(always)]
            fn pair_with(self, second: Self) -> Self {
                unsafe {
                    let first = $shift_right::<16>($to_bits(self.0));
                    Self($from_bits($or(first, $to_bits(second.0))))
                }
            }
        };
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn load_columns(rows: &Rows, offset: usize) -> [Self; 4] {
            unsafe {
                // Register j holds rows j and j + 4, so that transposing its 128-bit parts leaves
                // the rows in order.
                let mut r = [_mm256_setzero_ps(); 4];
                for j in 0..4 {
                    let part = |i: usize| _mm_loadu_ps(rows[i].add(offset).cast());
                    r[j] = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(part(j)), part(j + 4));
                }
                transpose!(r, _mm256_unpacklo_ps, _mm256_unpackhi_ps, _mm256_shuffle_ps)
            }
        }
        #[inline(always)]
        fn round_to_bf16(self) -> Self {
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                let nan = _mm256_castps_si256(_mm256_cmp_ps(self.0, self.0, _CMP_UNORD_Q));
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
                let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                let result = _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, nan), high);
                Self(_mm256_castsi256_ps(result))
            }
        }
        #[inline(always)]
        fn signed_byte(self, index: usize) -> Self {
            unsafe {
                let left = _mm256_set1_epi32(24 - 8 * index as i32);
                let top = _mm256_sllv_epi32(_mm256_castps_si256(self.0), left);
                Self(_mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24)))
            }
        }
        #[inline(always)]
        fn look_up_bits(self, first: usize, numbers: &[f32; 16]) -> Self {
            unsafe {
                let (low, high) =
                    (_mm256_loadu_ps(numbers.as_ptr()), _mm256_loadu_ps(numbers.as_ptr().add(8)));
                let bits = _mm256_castps_si256(self.0);
                let places = _mm256_srlv_epi32(bits, _mm256_set1_epi32(first as i32));
                // Three bits select; the fourth, moved to the sign, chooses the half of the numbers.
                let fourth = _mm256_sllv_epi32(bits, _mm256_set1_epi32(28 - first as i32));
                let from_low = _mm256_permutevar8x32_ps(low, places);
                let from_high = _mm256_permutevar8x32_ps(high, places);
                Self(_mm256_blendv_ps(from_low, from_high, _mm256_castsi256_ps(fourth)))
            }
        }
        pairs!(
            _mm256_castps_si256,
            _mm256_castsi256_ps,
            _mm256_slli_epi32,
            _mm256_srli_epi32,
            _mm256_set1_epi32,
            _mm256_and_si256,
            _mm256_or_si256
        );
    }

    impl Lanes for Avx512 {
        #[inline(always)]
        unsafe fn load_columns(rows: &Rows, offset: usize) -> [Self; 4] {
            unsafe {
                // Register j holds rows j, j + 4, j + 8 and j + 12, so that transposing its 128-bit
                // parts leaves the rows in order. Inserting from memory needs no shuffle unit,
                // which limits a transposition.
                let mut r = [_mm512_setzero_ps(); 4];
                for j in 0..4 {
                    let part = |i: usize| _mm_loadu_ps(rows[i].add(offset).cast());
                    let all = _mm512_castps128_ps512(part(j));
                    let all = _mm512_insertf32x4::<1>(all, part(j + 4));
                    let all = _mm512_insertf32x4::<2>(all, part(j + 8));
                    r[j] = _mm512_insertf32x4::<3>(all, part(j + 12));
                }
                transpose!(r, _mm512_unpacklo_ps, _mm512_unpackhi_ps, _mm512_shuffle_ps)
            }
        }
        #[inline(always)]
        fn round_to_bf16(self) -> Self {
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let nan = _mm512_cmp_ps_mask(self.0, self.0, _CMP_UNORD_Q);
                let result = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
                let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                Self(_mm512_castsi512_ps(_mm512_and_si512(result, high)))
            }
        }
        #[inline(always)]
        fn signed_byte(self, index: usize) -> Self {
            unsafe {
                let left = _mm512_set1_epi32(24 - 8 * index as i32);
                let top = _mm512_sllv_epi32(_mm512_castps_si512(self.0), left);
                Self(_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)))
            }
        }
        #[inline(always)]
        fn look_up_bits(self, first: usize, numbers: &[f32; 16]) -> Self {
            unsafe {
                // Bits beyond the four of a place are ignored.
                let right = _mm512_set1_epi32(first as i32);
                let places = _mm512_srlv_epi32(_mm512_castps_si512(self.0), right);
                Self(_mm512_permutexvar_ps(places, _mm512_loadu_ps(numbers.as_ptr())))
            }
        }
        pairs!(
            _mm512_castps_si512,
            _mm512_castsi512_ps,
            _mm512_slli_epi32,
            _mm512_srli_epi32,
            _mm512_set1_epi32,
            _mm512_and_si512,
            _mm512_or_si512
        );
    }

    /// Rounds to pairs of bf16, to nearest even. Numbers below 2⁻¹²⁶ become zeros.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16.
    #[inline(always)]
    pub(in crate::cpu::gemm) unsafe fn round_pairs(first: Avx512, second: Avx512) -> Avx512 {
        unsafe {
            // The first numbers are in the lower half: places 0 and 16, 1 and 17, …
            let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second.0, first.0));
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let places = _mm512_or_si512(
                lanes,
                _mm512_slli_epi32::<16>(_mm512_add_epi32(lanes, _mm512_set1_epi32(16))),
            );
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(places, both)))
        }
    }

    /// Computes `c + a₀·b₀ + a₁·b₁`, where each lane of `a` and `b` is a pair of bf16.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16.
    #[inline(always)]
    pub(in crate::cpu::gemm) unsafe fn multiply_add_pairs(a: Avx512, b: Avx512, c: Avx512) -> Avx512 {
        // Both types are 512 plain bits.
        let pairs = |x: Avx512| unsafe { std::mem::transmute::<__m512, __m512bh>(x.0) };
        Avx512(unsafe { _mm512_dpbf16_ps(c.0, pairs(a), pairs(b)) })
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{multiply_add_pairs, round_pairs};
