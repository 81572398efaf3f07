//! What DoRA needs of a weight with a low-rank term: the lengths of its rows.

use super::check;
use crate::cpu::low_rank as kernel;
use crate::{Device, Result, View, ViewMut};

/// `out[1,N]`: `out_n = ‖w_n + scale · b_n · a‖₂` for the rows of `w` `[N,K]`, `b` `[N,r]` and `a` `[r,K]`, each f32 or bf16;
/// `out` is f32. The sum is formed block by block in f32; no `[N,K]` matrix is.
///
/// # Errors
/// If shapes or types do not fit.
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
    match device {
        Device::Cpu(cpu) => kernel::row_norms(cpu, w, a, b, scale, out),
        Device::Meta(ledger) => {
            let flops = 2.0 * w.len() as f64 * (a.rows() + 1) as f64;
            ledger.record(OP, flops, check::bytes(&[&w, &a, &b, &out]));
        }
    }
    Ok(())
}
