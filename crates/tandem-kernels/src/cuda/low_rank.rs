//! Row norms of a matrix with a low-rank term: one block of threads per group of rows.

use super::driver::Grid;
use super::{Cuda, args, by_type, driver, source};
use crate::{DType, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("low_rank.cu");

/// Threads and rows of a block, as in `low_rank.cu`.
const THREADS: u32 = 256;
const ROWS: usize = 8;

pub(crate) fn row_norms(
    cuda: &Cuda,
    w: View,
    a: View,
    b: View,
    scale: f32,
    out: ViewMut,
    takes_root: bool,
) -> Result<()> {
    let name = by_type!("row_norms", w.dtype(), a.dtype());
    let strides = [&w, &a, &b].map(|x| x.stride() as i32);
    let [n, k, rank] = [w.rows(), w.cols(), a.rows()].map(|n| n as i32);
    let b_is_f32 = b.dtype() == DType::F32;
    let [b_stride, is_root] = [strides[2], i32::from(takes_root)];
    let args = args![w, strides[0], a, strides[1], b, b_stride, b_is_f32, scale, &out, n, k, rank, is_root];
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked.
    unsafe { cuda.launch(&SOURCE, name, Grid::new(w.rows().div_ceil(ROWS), THREADS), args) }
}
