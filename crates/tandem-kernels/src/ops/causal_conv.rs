//! Causal convolution along each text, channel by channel (depthwise).

use crate::batch::runs::Runs;
use crate::cpu::causal_conv as kernel;
use crate::device::launch;
use crate::ops::check::{self, Operand};
use crate::{Backend, DType, Device, KernelError, MemoryKind, Result, View, ViewMut, cuda};

/// The most tokens that a convolution reaches.
pub const WIDEST_CONV: usize = 16;

/// Operands of [`causal_conv`]. `x`, `y` and `history` share one type.
pub struct CausalConv<'a> {
    /// `[T, C]`.
    pub x: View<'a>,
    /// `[C, W]` f32: the weight of the oldest token first.
    pub w: View<'a>,
    /// The texts that the T rows belong to.
    pub runs: &'a Runs,
    /// `[slots · (W − 1), C]`: the last inputs of kept texts, oldest first; read, then written.
    pub history: Option<ViewMut<'a>>,
    /// `[T, C]`.
    pub y: ViewMut<'a>,
}

/// Operands of [`causal_conv_backward`]; no run may read or keep a slot.
pub struct CausalConvBackward<'a> {
    /// `[T, C]`.
    pub x: View<'a>,
    /// `[C, W]` f32.
    pub w: View<'a>,
    /// The texts that the T rows belong to.
    pub runs: &'a Runs,
    /// `[T, C]`, of the type of `x`.
    pub dy: View<'a>,
    /// `[T, C]`, of the type of `x`; overwritten.
    pub dx: ViewMut<'a>,
    /// `[C, W]` f32, added to; skipped if `None`.
    pub dw: Option<ViewMut<'a>>,
}

/// Checks that runs cover `rows` rows, and that the slots that they name exist. Each takes
/// `rows_per_slot` rows of `width` columns.
pub(super) fn check_runs(
    op: &'static str,
    runs: &Runs,
    rows: usize,
    slots: Option<(&ViewMut, usize, usize)>,
) -> Result<()> {
    if runs.num_rows() != rows {
        return Err(KernelError::invalid(op, format!("runs of {} rows for {rows}", runs.num_rows())));
    }
    let found = match slots {
        None => 0,
        Some((view, rows_per_slot, width)) => {
            check::shape(op, "slots", view, view.rows(), width)?;
            view.rows() / rows_per_slot.max(1)
        }
    };
    let needed = runs.num_slots();
    if needed > found && slots.is_none_or(|(_, rows_per_slot, _)| rows_per_slot > 0) {
        return Err(KernelError::invalid(op, format!("runs name {needed} slots of {found}")));
    }
    Ok(())
}

/// Computes `y[t, c] = Σ_j w[c, j] · x[t − (W − 1) + j, c]` along each text, with zeros before its
/// beginning; then keeps the last inputs of runs that ask for it.
pub fn causal_conv(device: &Device, call: CausalConv) -> Result<()> {
    const OP: &str = "causal_conv";
    let CausalConv { x, w, runs, history, y } = &call;
    let (rows, channels, width) = (x.rows(), x.cols(), w.cols());
    check_width(OP, w)?;
    check::f32_shape(OP, "w", w, channels, width)?;
    check::shape(OP, "y", y, rows, channels)?;
    check::same_type(OP, "y", y, x)?;
    if let Some(history) = history {
        check::same_type(OP, "history", history, x)?;
    }
    check_runs(OP, runs, rows, history.as_ref().map(|history| (history, width - 1, channels)))?;
    let work = check::work(OP, x, 2.0 * (x.len() * width) as f64, check::bytes(&[x, w, y]));
    launch!(device, work, {
        cpu => kernel::forward(cpu, call),
        cuda => cuda::causal_conv::forward(cuda, call)
    })
}

/// Computes the gradients of [`causal_conv`].
pub fn causal_conv_backward(device: &Device, call: CausalConvBackward) -> Result<()> {
    const OP: &str = "causal_conv_backward";
    let CausalConvBackward { x, w, runs, dy, dx, dw } = &call;
    let (rows, channels, width) = (x.rows(), x.cols(), w.cols());
    check_width(OP, w)?;
    check::f32_shape(OP, "w", w, channels, width)?;
    for (name, operand) in [("dy", dy as &dyn Operand), ("dx", dx)] {
        check::shape(OP, name, operand, rows, channels)?;
        check::same_type(OP, name, operand, x)?;
    }
    if let Some(dw) = dw {
        check::f32_shape(OP, "dw", dw, channels, width)?;
    }
    check_runs(OP, runs, rows, None)?;
    let partial = match (device.backend(), dw) {
        // The sums of blocks of rows.
        (Backend::Cuda, Some(_)) => {
            let blocks = rows.div_ceil(cuda::causal_conv::BLOCK_ROWS);
            Some(device.alloc(MemoryKind::Scratch, blocks, channels * width, DType::F32)?)
        }
        _ => None,
    };
    let work = check::work(OP, x, 4.0 * (x.len() * width) as f64, check::bytes(&[x, w, dy, dx]));
    launch!(device, work, {
        cpu => kernel::backward(cpu, call),
        cuda => cuda::causal_conv::backward(cuda, call, partial)
    })
}

fn check_width(op: &'static str, w: &View) -> Result<()> {
    check::contiguous(op, "w", w.is_contiguous())?;
    match w.cols() {
        1..=WIDEST_CONV => Ok(()),
        width => Err(KernelError::invalid(op, format!("a width of {width}, not 1 to {WIDEST_CONV}"))),
    }
}
