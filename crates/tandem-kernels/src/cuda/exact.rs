//! Fixed-point sums of gradients.

use super::driver::Grid;
use super::{Cuda, args, driver, source};
use crate::numerics::exact::{ExactView, ExactViewMut};
use crate::{Result, View};

pub(super) static SOURCE: driver::Source = source!("exact.cu", not fused);

/// Threads of a block, as in `exact.cu`.
const THREADS: u32 = 256;

/// Elements per block: `RUNS · RUN` per thread.
const BLOCK: usize = 8 * THREADS as usize;

fn grid(len: usize) -> Grid {
    Grid::new(len.div_ceil(BLOCK), THREADS)
}

pub(crate) fn exact_merge(cuda: &Cuda, other: ExactView, sums: &ExactViewMut, add: bool) -> Result<()> {
    let args = args![other, sums.view(), other.len(), add];
    // SAFETY: the operands are those of the kernel, and there are as many sums as others.
    unsafe { cuda.launch(&SOURCE, "exact_merge", grid(other.len()), args) }
}

/// Sets the device's flag if a term is out of range.
pub(crate) fn check_terms(cuda: &Cuda, terms: View, limit: f32) -> Result<()> {
    let args = args![terms, terms.len(), limit, cuda.out_of_range()];
    // SAFETY: the operands are those of the kernel, and the word is the device's own.
    unsafe { cuda.launch(&SOURCE, "check_terms", grid(terms.len()), args) }
}

/// Adds terms; a term out of range sets the device's flag.
pub(crate) fn exact_sum(cuda: &Cuda, terms: View, sums: &ExactViewMut, add: bool, limit: f32) -> Result<()> {
    let args = args![terms, sums.view(), terms.len(), add, limit, cuda.out_of_range()];
    // SAFETY: the operands are those of the kernel, there are at least as many sums as terms, and
    // the word is the device's own.
    unsafe { cuda.launch(&SOURCE, "exact_sum", grid(terms.len()), args) }
}
