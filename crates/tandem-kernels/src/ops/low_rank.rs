//! Low-rank terms of linear layers, and the row norms that DoRA needs.

use super::check;
use crate::cpu::low_rank as kernel;
use crate::device::launch;
use crate::{Device, Result, View, ViewMut, cuda};

/// Term `h · bᵀ` of a linear layer's output or of logits, of the type of the layer's input.
#[derive(Clone, Copy)]
pub struct LowRank<'a> {
    /// `[T,r]`: scaled output of the adapter's first factor.
    pub h: View<'a>,
    /// `[N,r]`: the adapter's second factor.
    pub b: View<'a>,
}

/// Computes `out_n = ‖w_n + scale · b_n · a‖₂` for the rows of `w` `[N,K]`, `b` `[N,r]` and `a`
/// `[r,K]`, each f32 or bf16; `out` is `[1,N]` f32. The sum is formed block by block in f32,
/// without an `[N,K]` matrix.
pub fn low_rank_row_norms(
    device: &Device,
    w: View,
    a: View,
    b: View,
    scale: f32,
    out: ViewMut,
) -> Result<()> {
    by_row(device, "low_rank_row_norms", w, a, b, scale, out, true)
}

/// Computes the squares of [`low_rank_row_norms`]: the terms of a sum over columns that are divided. The
/// bits depend on the elements alone, not on their places in a larger matrix.
pub fn low_rank_row_squares(
    device: &Device,
    w: View,
    a: View,
    b: View,
    scale: f32,
    out: ViewMut,
) -> Result<()> {
    by_row(device, "low_rank_row_squares", w, a, b, scale, out, false)
}

fn by_row(
    device: &Device,
    op: &'static str,
    w: View,
    a: View,
    b: View,
    scale: f32,
    out: ViewMut,
    takes_root: bool,
) -> Result<()> {
    let (n, k) = w.shape();
    check::shape(op, "a", &a, a.rows(), k)?;
    check::shape(op, "b", &b, n, a.rows())?;
    check::f32_shape(op, "out", &out, 1, n)?;
    let flops = 2.0 * w.len() as f64 * (a.rows() + 1) as f64;
    let work = check::work(op, &w, flops, check::bytes(&[&w, &a, &b, &out]));
    launch!(device, work, {
        cpu => kernel::row_norms(cpu, w, a, b, scale, out, takes_root),
        cuda => cuda::low_rank::row_norms(cuda, w, a, b, scale, out, takes_root)
    })
}
