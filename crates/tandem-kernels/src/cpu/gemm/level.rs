//! Inner parts of the GEMM, compiled once per level of vector instructions.

use std::ops::Range;

use super::blocked::Task;
use super::few::Few;
use super::kernel::{Kernel, Panels, Registers, Singles};
use crate::cpu::vector::Portable;

/// Functions compiled for a level.
pub(super) trait Level {
    type Kernel: Kernel;

    /// Calls [`Kernel::pack_columns`].
    ///
    /// # Safety
    /// The CPU has the level; else as [`Kernel::pack_columns`].
    unsafe fn pack_columns(panels: Panels);

    /// Rows of the panels of a product of few rows.
    const HEIGHTS: &'static [usize];

    /// Rows of panels whose kernel reads weights one by one, from the most.
    const TURNED: &'static [usize];

    /// Calls [`Kernel::pack_rows`] of the kernel of so many rows.
    ///
    /// # Safety
    /// The CPU has the level; else as [`Kernel::pack_rows`].
    unsafe fn pack_few(height: usize, panels: Panels);

    /// Calls [`Few::run`] with the kernel of so many rows.
    ///
    /// # Safety
    /// The CPU has the level; else as [`Few::run`].
    unsafe fn few_rows(height: usize, few: &Few, panels: Range<usize>, buffer: *mut f32);

    /// Calls [`Task::run`].
    ///
    /// # Safety
    /// The CPU has the level; else as [`Task::run`].
    unsafe fn run(task: &Task, buffer: *mut f32);
}

/// Defines a level: its kernel, those of few rows, and its target features.
macro_rules! level {
    (
        $(#[$attribute:meta])* $name:ident, $kernel:ty, {$($height:literal: $lower:ty),*},
        {$($rows:literal: $turned:ty),*}
        $(, $features:literal)?
    ) => {
        $(#[$attribute])*
        pub(in crate::cpu::gemm) struct $name;

        impl Level for $name {
            type Kernel = $kernel;

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_columns(panels: Panels) {
                // SAFETY: the caller's promise.
                unsafe { <$kernel>::pack_columns(panels) };
            }

            const HEIGHTS: &'static [usize] = &[<$kernel>::ROWS $(, $height)*];
            const TURNED: &'static [usize] = &[$($rows),*];

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_few(height: usize, panels: Panels) {
                // SAFETY: the caller's promise.
                unsafe {
                    match height {
                        $($height => <$lower>::pack_rows(panels),)*
                        $($rows => <$turned>::pack_rows(panels),)*
                        _ => <$kernel>::pack_rows(panels),
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn few_rows(height: usize, few: &Few, panels: Range<usize>, buffer: *mut f32) {
                // One function for all heights would take the compiler longer than their sum.
                $(#[target_feature(enable = $features)])?
                #[inline(never)]
                unsafe fn run<K: Kernel>(few: &Few, panels: Range<usize>, buffer: *mut f32) {
                    // SAFETY: the caller's promise.
                    unsafe { few.run::<K>(panels, buffer) };
                }
                // SAFETY: the caller's promise.
                unsafe {
                    match height {
                        $($height => run::<$lower>(few, panels, buffer),)*
                        $($rows => run::<$turned>(few, panels, buffer),)*
                        _ => run::<$kernel>(few, panels, buffer),
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn run(task: &Task, buffer: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { task.run::<$kernel>(buffer) };
            }
        }
    };
}

/// Kernels of f32, and of widened bf16.
type OfSingles<V, const MR: usize, const NV: usize, const NR: usize> = Registers<Singles<V>, MR, NV, NR>;

level!(
    Baseline, OfSingles<Portable, 4, 1, 8>,
    {1: OfSingles<Portable, 1, 1, 8>, 2: OfSingles<Portable, 2, 1, 8>}, {}
);

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{AmxLevel, AmxSplitLevel, Avx2Level, Avx512Bf16Level, Avx512Level};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::cpu::gemm::amx::Tiles;
    use crate::cpu::gemm::kernel::Pairs;
    use crate::cpu::gemm::turned::Turned;
    use crate::cpu::gemm::turned_tiles::TurnedTiles;
    use crate::cpu::vector::{Avx2, Avx512};

    type OfAvx2<const MR: usize> = OfSingles<Avx2, MR, 2, 16>;
    type OfAvx512<const MR: usize> = OfSingles<Avx512, MR, 2, 32>;
    type OfPairs<const MR: usize> = Registers<Pairs, MR, 2, 32>;

    level!(
        Avx2Level, OfAvx2<6>, {1: OfAvx2<1>, 2: OfAvx2<2>, 4: OfAvx2<4>},
        {16: Turned<Singles<Avx2>, 16, 2, 4, 16>},
        "avx2,fma"
    );
    level!(
        Avx512Level, OfAvx512<14>,
        {1: OfAvx512<1>, 2: OfAvx512<2>, 4: OfAvx512<4>, 6: OfAvx512<6>, 8: OfAvx512<8>, 11: OfAvx512<11>},
        {16: Turned<Singles<Avx512>, 16, 1, 8, 32>},
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// bf16 only: f32 factors take [`Avx512Level`].
        Avx512Bf16Level, OfPairs<14>,
        {1: OfPairs<1>, 2: OfPairs<2>, 4: OfPairs<4>, 6: OfPairs<6>, 8: OfPairs<8>, 11: OfPairs<11>},
        {16: Turned<Pairs, 16, 1, 8, 32>},
        "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// bf16 factors.
        AmxLevel, Tiles<1>, {16: TurnedTiles<1, 1>, 32: TurnedTiles<1, 2>}, {},
        "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// f32 factors.
        AmxSplitLevel, Tiles<3>, {16: TurnedTiles<3, 1>, 32: TurnedTiles<3, 2>}, {},
        "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
}
