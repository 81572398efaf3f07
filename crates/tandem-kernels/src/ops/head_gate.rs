//! Gates on heads: `x ⊙ f(gate)`.

use crate::cpu::head_gate as kernel;
use crate::device::launch;
use crate::ops::check;
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

/// Approximate flops of one gate.
const FLOPS: f64 = 10.0;

/// Function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `1 / (1 + e^-g)` (Qwen 3.5's attention).
    Sigmoid,
    /// `g · sigmoid(g)` (Qwen 3.5's linear attention).
    Silu,
}

/// Heads and the places of their gates. The gate of head h lies in columns `h·step + offset` of the
/// gates' view, as many as the head has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadGates {
    /// Function of the gates.
    pub function: Gate,
    /// Width of a head, `d`.
    pub head_dim: usize,
    /// Columns from one head's gate to the next; at least `head_dim`.
    pub step: usize,
    /// Column of the first gate.
    pub offset: usize,
}

impl HeadGates {
    /// Checks that a view has a gate for each head of `width` columns.
    fn check(&self, op: &'static str, width: usize, gate_cols: usize) -> Result<()> {
        let Self { head_dim, step, offset, .. } = *self;
        let fits = head_dim > 0
            && step >= head_dim
            && width.is_multiple_of(head_dim)
            && width
                .checked_sub(head_dim)
                .is_none_or(|w| w / head_dim * step + offset + head_dim <= gate_cols);
        if fits {
            return Ok(());
        }
        Err(KernelError::invalid(
            op,
            format!(
                "{width} columns in heads of {head_dim}, with gates every {step} from {offset} in {gate_cols} columns"
            ),
        ))
    }
}

/// Computes `h[T, H·d] = x ⊙ f(gate)`; all share one type.
pub fn head_gate(device: &Device, gates: HeadGates, x: View, gate: View, h: ViewMut) -> Result<()> {
    const OP: &str = "head_gate";
    gates.check(OP, x.cols(), gate.cols())?;
    check::shape(OP, "gate", &gate, x.rows(), gate.cols())?;
    check::shape(OP, "h", &h, x.rows(), x.cols())?;
    check::same_type(OP, "gate", &gate, &x)?;
    check::same_type(OP, "h", &h, &x)?;
    let work = check::work(OP, &x, FLOPS * x.len() as f64, check::bytes(&[&x, &x, &h]));
    launch!(device, work, {
        cpu => kernel::forward(cpu, gates, x, gate, h),
        cuda => cuda::head_gate::forward(cuda, gates, x, gate, h)
    })
}

/// Computes the gradients of [`head_gate`]: `dx = dh ⊙ f(gate)`, and at the gates' places of `d_gate`
/// `dh ⊙ x ⊙ f'(gate)`. Both are overwritten; `d_gate` has the gates' layout.
pub fn head_gate_backward(
    device: &Device,
    gates: HeadGates,
    x: View,
    gate: View,
    dh: View,
    dx: ViewMut,
    d_gate: ViewMut,
) -> Result<()> {
    const OP: &str = "head_gate_backward";
    gates.check(OP, x.cols(), gate.cols())?;
    check::shape(OP, "gate", &gate, x.rows(), gate.cols())?;
    check::shape(OP, "d_gate", &d_gate, x.rows(), gate.cols())?;
    check::shape(OP, "dh", &dh, x.rows(), x.cols())?;
    check::shape(OP, "dx", &dx, x.rows(), x.cols())?;
    check::same_type(OP, "gate", &gate, &x)?;
    check::same_type(OP, "d_gate", &d_gate, &x)?;
    check::same_type(OP, "dh", &dh, &x)?;
    check::same_type(OP, "dx", &dx, &x)?;
    let work = check::work(OP, &x, 2.0 * FLOPS * x.len() as f64, 5.0 * check::bytes(&[&x]));
    launch!(device, work, {
        cpu => kernel::backward(cpu, gates, x, gate, dh, dx, d_gate),
        cuda => cuda::head_gate::backward(cuda, gates, x, gate, dh, dx, d_gate)
    })
}
