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
    const OP: &str = "low_rank_row_norms";
    let (n, k) = w.shape();
    check::shape(OP, "a", &a, a.rows(), k)?;
    check::shape(OP, "b", &b, n, a.rows())?;
    check::f32_shape(OP, "out", &out, 1, n)?;
    let flops = 2.0 * w.len() as f64 * (a.rows() + 1) as f64;
    let work = check::work(OP, &w, flops, check::bytes(&[&w, &a, &b, &out]));
    launch!(device, work, {
        cpu => kernel::row_norms(cpu, w, a, b, scale, out),
        cuda => cuda::low_rank::row_norms(cuda, w, a, b, scale, out)
    })
}
