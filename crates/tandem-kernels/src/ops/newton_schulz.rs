//! Orthogonalisation of a matrix by the Newton–Schulz iteration of Muon.

use std::ops::Range;

use super::{
    cast, check, linear, linear_backward_input, linear_backward_weight, scale, sum_of_squares, weighted_sum,
};
use crate::{Backend, DType, Device, MemoryKind, Result, ViewMut};

/// Coefficients of the polynomial `a·x + b·x³ + c·x⁵`, and steps, of Keller Jordan's Muon and
/// `torch.optim.Muon`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
const STEPS: usize = 5;

/// Rows of a symmetric product that are computed at once: a multiple of this.
const PANEL: usize = 128;

/// Least norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Replaces `x[M,N] = U Σ Vᵀ` by a matrix near `U Vᵀ`: singular values that are not tiny become about
/// 0.7 to 1.2. f32, contiguous. Takes memory for a copy of `x` and two squares of its shorter side.
///
/// Products are f32; `torch.optim.Muon` has them in bf16. Waits for a GPU once, for the norm.
pub fn orthogonalize(device: &Device, mut x: ViewMut) -> Result<()> {
    const OP: &str = "orthogonalize";
    check::is_f32(OP, "x", &x)?;
    check::contiguous(OP, "x", x.is_contiguous())?;
    let (rows, cols) = x.shape();
    if x.is_empty() {
        return Ok(());
    }
    let (is_wide, side) = (rows <= cols, rows.min(cols));
    let room = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32);
    let (mut next, mut gram, mut polynomial) = (room(rows, cols)?, room(side, side)?, room(side, side)?);
    let norm = sum_of_squares(device, x.view().reshape(1, rows * cols))?.sqrt().max(EPS);
    scale(device, x.reborrow(), (1.0 / norm) as f32)?;
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        // The Gram matrix of the shorter side is symmetric, so neither x nor a result is transposed.
        symmetric(device, gram.view_mut(), |rows, cols, out| {
            let x = x.view();
            if is_wide {
                linear(device, x.row_range(rows), x.row_range(cols), None, None, out)
            } else {
                linear_backward_weight(device, x.col_range(rows), x.col_range(cols), out, false)
            }
        })?;
        symmetric(device, polynomial.view_mut(), |rows, cols, out| {
            let gram = gram.view();
            linear_backward_input(device, gram.row_range(rows), gram.col_range(cols), out, false)
        })?;
        let flat = polynomial.view_mut().reshape(1, side * side);
        weighted_sum(device, gram.view().reshape(1, side * side), b, flat, c)?;
        cast(device, x.view(), next.view_mut())?;
        scale(device, next.view_mut(), a)?;
        if is_wide {
            linear_backward_input(device, polynomial.view(), x.view(), next.view_mut(), true)?;
        } else {
            linear_backward_input(device, x.view(), polynomial.view(), next.view_mut(), true)?;
        }
        cast(device, next.view(), x.reborrow())?;
    }
    Ok(())
}

/// Computes a symmetric matrix by `product`, which writes rows of it in some of the columns. A CPU computes panels of
/// rows up to the diagonal, and copies the rest. Vector units would give the same bits there: both sums have the same
/// terms in the same order.
fn symmetric(
    device: &Device,
    mut out: ViewMut,
    product: impl Fn(Range<usize>, Range<usize>, ViewMut) -> Result<()>,
) -> Result<()> {
    let side = out.rows();
    if device.backend() != Backend::Cpu {
        return product(0..side, 0..side, out);
    }
    let panel = side.div_ceil(8).next_multiple_of(PANEL);
    for start in (0..side).step_by(panel) {
        let end = side.min(start + panel);
        product(start..end, 0..end, out.reborrow().row_range(start..end).col_range(0..end))?;
    }
    if let Device::Cpu(cpu) = device {
        cpu.mirror(out);
    }
    Ok(())
}
