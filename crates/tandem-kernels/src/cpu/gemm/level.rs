//! Inner parts of the GEMM, compiled once per level of vector instructions.

use std::ops::Range;

use super::blocked::Task;
use super::kernel::{Kernel, Panels, Registers, Singles};
use super::{Product, gemv};
use crate::cpu::vector::Portable;

/// Functions compiled for a level.
pub(super) trait Level {
    type Kernel: Kernel;

    /// Calls [`Kernel::pack_columns`].
    ///
    /// # Safety
    /// The CPU has the level; else as [`Kernel::pack_columns`].
    unsafe fn pack_columns(panels: Panels);

    /// Calls [`gemv::columns`].
    ///
    /// # Safety
    /// The CPU has the level; else as [`gemv::columns`].
    unsafe fn few(product: &Product, columns: Range<usize>);

    /// Calls [`Task::run`].
    ///
    /// # Safety
    /// The CPU has the level; else as [`Task::run`].
    unsafe fn run(task: &Task, buffer: *mut f32);
}

/// Defines a level: its kernel, the vector and the columns of a gemv tile, and its target features.
macro_rules! level {
    ($(#[$attribute:meta])* $name:ident, $kernel:ty, $vector:ty, $few:literal $(, $features:literal)?) => {
        $(#[$attribute])*
        pub(in crate::cpu::gemm) struct $name;

        impl Level for $name {
            type Kernel = $kernel;

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_columns(panels: Panels) {
                // SAFETY: the caller's promise.
                unsafe { <$kernel>::pack_columns(panels) };
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn few(product: &Product, columns: Range<usize>) {
                // SAFETY: the caller's promise.
                unsafe { gemv::columns::<$vector, $few>(product, columns) };
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn run(task: &Task, buffer: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { task.run::<$kernel>(buffer) };
            }
        }
    };
}

level!(Baseline, Registers<Singles<Portable>, 4, 1, 8>, Portable, 2);

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{AmxLevel, AmxSplitLevel, Avx2Level, Avx512Bf16Level, Avx512Level};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::cpu::gemm::amx::Tiles;
    use crate::cpu::gemm::kernel::Pairs;
    use crate::cpu::vector::{Avx2, Avx512};

    level!(Avx2Level, Registers<Singles<Avx2>, 6, 2, 16>, Avx2, 2, "avx2,fma");
    level!(
        Avx512Level,
        Registers<Singles<Avx512>, 14, 2, 32>,
        Avx512,
        4,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// bf16 only: f32 factors take [`Avx512Level`].
        Avx512Bf16Level, Registers<Pairs, 14, 2, 32>, Avx512, 4,
        "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// bf16 factors.
        AmxLevel, Tiles<1>, Avx512, 4, "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
    level!(
        /// f32 factors.
        AmxSplitLevel, Tiles<3>, Avx512, 4, "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
}
