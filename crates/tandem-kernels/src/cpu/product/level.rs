//! The product's inner parts, compiled once for each level of vector instructions.

use std::ops::Range;

use super::blocked::Task;
use super::kernel::{Multiply, Singles};
use super::pack::pack;
use super::{Operand, Product, few};
use crate::cpu::vector::Portable;

/// What is compiled for a level.
pub(super) trait Level {
    /// Rows of a tile: the width of the first factor's panels.
    const ROWS: usize;
    /// Columns of a tile: the width of the second factor's panels.
    const COLUMNS: usize;
    /// Elements along k in one packed lane.
    const DEPTH: usize;

    /// [`pack`] into panels of the second factor.
    ///
    /// # Safety
    /// The processor has the level; else as [`pack`].
    unsafe fn pack_columns(
        source: &Operand,
        rows: Range<usize>,
        lanes: Range<usize>,
        to: *mut f32,
        panel_stride: usize,
    );

    /// [`few::columns`].
    ///
    /// # Safety
    /// The processor has the level; else as [`few::columns`].
    unsafe fn few(product: &Product, columns: Range<usize>);

    /// [`Task::run`].
    ///
    /// # Safety
    /// The processor has the level; else as [`Task::run`].
    unsafe fn run(task: &Task, buffer: *mut f32);
}

/// A level by name: how it multiplies; rows of a tile, its registers per row and their lanes; columns of a tile of few
/// rows; what it is compiled with.
macro_rules! level {
    ($(#[$attribute:meta])* $name:ident, $multiply:ty, $rows:literal, $registers:literal, $lanes:literal, $few:literal $(, $features:literal)?) => {
        $(#[$attribute])*
        pub(in crate::cpu::product) struct $name;

        impl Level for $name {
            const ROWS: usize = $rows;
            const COLUMNS: usize = $registers * $lanes;
            const DEPTH: usize = <$multiply as Multiply>::DEPTH;

            unsafe fn pack_columns(
                source: &Operand,
                rows: Range<usize>,
                lanes: Range<usize>,
                to: *mut f32,
                panel_stride: usize,
            ) {
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled(
                    source: &Operand,
                    rows: Range<usize>,
                    lanes: Range<usize>,
                    to: *mut f32,
                    panel_stride: usize,
                ) {
                    type V = <$multiply as Multiply>::Vector;
                    const DEPTH: usize = <$multiply as Multiply>::DEPTH;
                    // SAFETY: the caller's promise.
                    unsafe { pack::<V, { $registers * $lanes }>(source, DEPTH, rows, lanes, to, panel_stride) };
                }
                // SAFETY: the caller's promise.
                unsafe { compiled(source, rows, lanes, to, panel_stride) };
            }

            unsafe fn few(product: &Product, columns: Range<usize>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled(product: &Product, columns: Range<usize>) {
                    type V = <$multiply as Multiply>::Vector;
                    // SAFETY: the caller's promise.
                    unsafe { few::columns::<V, $few>(product, columns) };
                }
                // SAFETY: the caller's promise.
                unsafe { compiled(product, columns) };
            }

            unsafe fn run(task: &Task, buffer: *mut f32) {
                $(#[target_feature(enable = $features)])?
                unsafe fn compiled(task: &Task, buffer: *mut f32) {
                    // SAFETY: the caller's promise.
                    unsafe { task.run::<$multiply, $rows, $registers, { $registers * $lanes }>(buffer) };
                }
                // SAFETY: the caller's promise.
                unsafe { compiled(task, buffer) };
            }
        }
    };
}

level!(Baseline, Singles<Portable>, 4, 1, 8, 2);

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Level, Avx512Bf16Level, Avx512Level};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::cpu::product::kernel::Pairs;
    use crate::cpu::vector::{Avx2, Avx512};

    level!(Avx2Level, Singles<Avx2>, 6, 2, 8, 2, "avx2,fma");
    level!(Avx512Level, Singles<Avx512>, 14, 2, 16, 4, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");
    level!(
        /// bf16 only: f32 factors take [`Avx512Level`].
        Avx512Bf16Level, Pairs, 14, 2, 16, 4, "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
    );
}
