//! Parts of a kernel that are compiled once for a kind of register, and called: compiled into the kernel of every height
//! they were most of this crate's machine code, and of the time that its build takes.

use super::codes;
use super::kernel::{CodedPanel, Panels, Singles, Tile};
use super::lanes::Lanes;
use super::pack::pack;
use crate::cpu::vector::Portable;

/// Functions that take long enough for a call.
pub(super) trait Outlined: Lanes {
    /// Calls [`pack`].
    ///
    /// # Safety
    /// The CPU has the instructions of `Self`; else as there.
    unsafe fn pack<const W: usize>(panels: Panels, depth: usize);

    /// Calls [`codes::pack`] for lanes of one f32.
    ///
    /// # Safety
    /// As [`Self::pack`].
    unsafe fn pack_codes<const W: usize>(panel: &CodedPanel);

    /// Calls [`Tile::store`].
    ///
    /// # Safety
    /// As [`Self::pack`].
    unsafe fn store_tile(tile: &Tile, values: *const f32);
}

macro_rules! outlined {
    ($vector:ty $(, $features:literal)?) => {
        impl Outlined for $vector {
            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn pack<const W: usize>(panels: Panels, depth: usize) {
                // SAFETY: the caller's promise.
                unsafe { pack::<Self, W>(panels, depth) };
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn pack_codes<const W: usize>(panel: &CodedPanel) {
                // SAFETY: the caller's promise.
                unsafe { codes::pack::<Singles<Self>, W>(panel) };
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn store_tile(tile: &Tile, values: *const f32) {
                // SAFETY: the caller's promise.
                unsafe { tile.store::<Self>(values) };
            }
        }
    };
}

outlined!(Portable);
#[cfg(target_arch = "x86_64")]
outlined!(crate::cpu::vector::Avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
outlined!(crate::cpu::vector::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");

/// Calls [`codes::pack`] for lanes of a pair of bf16.
///
/// # Safety
/// The CPU has AVX-512 BF16; else as there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
#[inline(never)]
pub(super) unsafe fn pack_pairs_of_codes<const W: usize>(panel: &CodedPanel) {
    // SAFETY: the caller's promise.
    unsafe { codes::pack::<super::kernel::Pairs, W>(panel) };
}
