//! GEMM on the CPU: three algorithms.
//!
//! [`few`] takes few rows, as in generation, limited by reading the matrix: where it lies, if it can. [`skinny`] takes GEMMs with a
//! dimension as short as an adapter's rank. [`blocked`] takes the rest, limited by arithmetic. The bits of a
//! row do not depend on the number of rows. [`few`] also takes every product whose second factor is [`packed`].
//! [`tree`] cuts a sum into blocks of k that ranks can divide.

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocked;
mod codes;
mod few;
mod in_place;
mod kernel;
mod lanes;
mod level;
mod outlined;
mod pack;
mod packed;
mod skinny;
#[cfg(target_arch = "x86_64")]
mod skinny_tiles;
mod tree;
mod turned;
#[cfg(target_arch = "x86_64")]
mod turned_tiles;

use super::convert::accumulate;
use super::rows::RowsMut;
use super::{Cpu, Isa};
use crate::ops::gemm::{Operand, Product, Term};
use crate::{DType, View, ViewMut, bf16, with_element};
use kernel::Add;
use skinny::SkinnyAxis;

impl Operand<'_> {
    /// Returns the first element. The type is the caller's choice: bf16 factors are read as pairs,
    /// too.
    fn pointer<E>(&self) -> *const E {
        match self.dtype() {
            DType::F32 => self.view().pointer_of::<f32>().cast(),
            DType::Bf16 => self.view().pointer_of::<bf16>().cast(),
        }
    }

    /// Returns the address of an element of a row along k, which may lie beyond the last.
    fn address(&self, row: usize, element: usize) -> *const u8 {
        self.pointer::<u8>().wrapping_add((row * self.stride() + element) * self.dtype().size())
    }
}

impl Product<'_> {
    /// Computes it on all threads; from inside a block of [`Cpu::parallel_for`], on the calling
    /// thread alone.
    ///
    /// # Panics
    /// If shapes or types do not fit; operations check them first.
    pub(crate) fn run(self, cpu: &Cpu) {
        self.check();
        let (m, n) = self.c.shape();
        if m == 0 || n == 0 {
            return;
        }
        if self.divided().is_none()
            && let Some(short) = SkinnyAxis::choose(cpu.isa(), &self)
        {
            return match self.b.packed() {
                // A small matrix.
                Some(weight) => packed::run_unpacked(cpu, self, &weight),
                None => skinny::run(cpu, self, short),
            };
        }
        match (cpu.isa(), self.a.dtype()) {
            (Isa::Portable, _) => self.run_on::<level::Baseline>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => self.run_on::<level::Avx2Level>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, DType::Bf16) => self.run_on::<level::Avx512Bf16Level>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, DType::Bf16) => self.run_on::<level::AmxLevel>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, DType::F32) => self.run_on::<level::AmxSplitLevel>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, _) => self.run_on::<level::Avx512Level>(cpu),
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("only x86-64 has these levels"),
        }
    }

    fn run_on<L: level::Level>(&self, cpu: &Cpu) {
        match self.divided() {
            Some(tree) => tree::run::<L>(cpu, self, tree),
            None => self.run_undivided::<L>(cpu),
        }
    }

    fn run_undivided<L: level::Level>(&self, cpu: &Cpu) {
        if !few::run::<L>(cpu, self) {
            blocked::run::<L>(cpu, self);
        }
    }

    /// Returns the addend from an element on, and its row stride.
    fn start_at(&self, row: usize, col: usize) -> (Add, usize) {
        let (view, is_wanted) = match self.residual {
            Some(residual) => (residual, true),
            None => (self.c.view(), self.accumulate),
        };
        let offset = row * view.stride() + col;
        match view.dtype() {
            _ if !is_wanted => (Add::Nothing, 0),
            DType::F32 => (Add::F32(view.pointer_of::<f32>().wrapping_add(offset)), view.stride()),
            DType::Bf16 => (Add::Bf16(view.pointer_of::<bf16>().wrapping_add(offset)), view.stride()),
        }
    }

    /// Returns the bias from a column on; null if there is none.
    fn bias_at(&self, col: usize) -> *const f32 {
        self.bias.map_or(std::ptr::null(), |b| b.pointer_of::<f32>().wrapping_add(col))
    }
}

impl Cpu {
    /// Computes `db += Σ_t dy[t]`, each column summed in row order.
    pub(crate) fn bias_backward(&self, dy: View, db: ViewMut) {
        let (rows, cols) = dy.shape();
        let db = RowsMut::<f32>::new(db);
        with_element!(dy.dtype(), E => self.parallel_ranges(cols, 256, |_, range| {
            // SAFETY: ranges are disjoint.
            let db = unsafe { db.part(0, range.start, range.len()) };
            for row in 0..rows {
                accumulate(self.isa(), &dy.row::<E>(row)[range.clone()], db);
            }
        }));
    }
}
