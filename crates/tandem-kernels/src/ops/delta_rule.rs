//! Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464).
//!
//! A value head has a state `S` `[dk, dv]`, zero where a text begins. Each token lets it decay, and
//! replaces what it holds under the token's key:
//!
//! ```text
//! g = −exp(decay_log) · softplus(a + decay_bias)     β = sigmoid(b)
//! S ← e^g · S
//! S ← S + k · (β · (v − Sᵀk))ᵀ
//! o = scale · Sᵀq
//! ```

use crate::batch::runs::Runs;
use crate::cpu::delta_rule as kernel;
use crate::device::launch;
use crate::ops::causal_conv::check_runs;
use crate::ops::check::{self, Operand};
use crate::{Backend, DType, Device, KernelError, MemoryKind, Result, Tensor, View, ViewMut, cuda};

/// Heads of linear attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaShape {
    /// Query and key heads, `K`.
    pub key_heads: usize,
    /// Value heads, `H`; value head h reads query and key head `h / (H/K)`.
    pub value_heads: usize,
    /// Width of a query or key head, `dk`.
    pub key_dim: usize,
    /// Width of a value head, `dv`.
    pub value_dim: usize,
    /// Factor on the outputs.
    pub scale: f32,
}

impl DeltaShape {
    /// Returns the columns of all query heads, which are those of the keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the columns of all value heads.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the elements of a text's states.
    pub fn state_len(&self) -> usize {
        self.value_width() * self.key_dim
    }

    fn check(&self, op: &'static str) -> Result<()> {
        let Self { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        if [key_heads, key_dim, value_dim].contains(&0) || value_heads == 0 || value_heads % key_heads != 0 {
            return Err(KernelError::invalid(
                op,
                format!("{value_heads} value heads of {value_dim} with {key_heads} key heads of {key_dim}"),
            ));
        }
        Ok(())
    }
}

/// Operands of [`delta_rule`]. `v`, `a`, `b` and `out` share one type.
pub struct DeltaRule<'a> {
    /// `[T, K·dk]` f32, each head normalised.
    pub q: View<'a>,
    /// `[T, K·dk]` f32, each head normalised.
    pub k: View<'a>,
    /// `[T, H·dv]`.
    pub v: View<'a>,
    /// `[T, H]`: input of the decay.
    pub a: View<'a>,
    /// `[T, H]`: input of β.
    pub b: View<'a>,
    /// `[1, H]` f32.
    pub decay_log: View<'a>,
    /// `[1, H]` f32.
    pub decay_bias: View<'a>,
    /// Heads.
    pub shape: &'a DeltaShape,
    /// The texts that the T rows belong to.
    pub runs: &'a Runs,
    /// `[slots, H·dk·dv]` f32: states `[H, dk, dv]` of kept texts; read, then written.
    pub states: Option<ViewMut<'a>>,
    /// `[T, H·dv]`.
    pub out: ViewMut<'a>,
}

/// Operands of [`delta_rule_backward`]; no run may read or keep a slot. What is not said is as in
/// [`DeltaRule`].
pub struct DeltaRuleBackward<'a> {
    /// `[T, K·dk]` f32.
    pub q: View<'a>,
    /// `[T, K·dk]` f32.
    pub k: View<'a>,
    /// `[T, H·dv]`.
    pub v: View<'a>,
    /// `[T, H]`.
    pub a: View<'a>,
    /// `[T, H]`.
    pub b: View<'a>,
    /// `[1, H]` f32.
    pub decay_log: View<'a>,
    /// `[1, H]` f32.
    pub decay_bias: View<'a>,
    /// Heads.
    pub shape: &'a DeltaShape,
    /// The texts that the T rows belong to.
    pub runs: &'a Runs,
    /// `[T, H·dv]`, of the type of `v`.
    pub d_out: View<'a>,
    /// `[T, K·dk]` f32, overwritten.
    pub dq: ViewMut<'a>,
    /// `[T, K·dk]` f32, overwritten.
    pub dk: ViewMut<'a>,
    /// `[T, H·dv]`, of the type of `v`; overwritten.
    pub dv: ViewMut<'a>,
    /// `[T, H]`, of the type of `v`; overwritten. Its sum over rows is the gradient of `decay_bias`.
    pub da: ViewMut<'a>,
    /// `[T, H]`, of the type of `v`; overwritten.
    pub db: ViewMut<'a>,
    /// `[T, H]` f32, overwritten: each row's term of the gradient of `decay_log`.
    pub d_decay_log: ViewMut<'a>,
}

/// Checks the operands that both passes have.
fn check_operands(
    op: &'static str,
    [q, k, v]: [&View; 3],
    [a, b]: [&View; 2],
    [decay_log, decay_bias]: [&View; 2],
    shape: &DeltaShape,
) -> Result<()> {
    shape.check(op)?;
    let rows = v.rows();
    check::f32_shape(op, "q", q, rows, shape.key_width())?;
    check::f32_shape(op, "k", k, rows, shape.key_width())?;
    check::shape(op, "v", v, rows, shape.value_width())?;
    for (name, operand) in [("a", a), ("b", b)] {
        check::shape(op, name, operand, rows, shape.value_heads)?;
        check::same_type(op, name, operand, v)?;
    }
    check::f32_shape(op, "decay_log", decay_log, 1, shape.value_heads)?;
    check::f32_shape(op, "decay_bias", decay_bias, 1, shape.value_heads)
}

/// Allocates so many f32 for a GPU's kernels, if any.
fn scratch(device: &Device, len: impl FnOnce() -> usize) -> Result<Option<Tensor>> {
    let len = match device.backend() {
        Backend::Cpu => 0,
        Backend::Cuda => len(),
    };
    (len > 0).then(|| device.alloc(MemoryKind::Scratch, 1, len, DType::F32)).transpose()
}

/// Computes `out` of all tokens, and keeps the states of runs that ask for it.
pub fn delta_rule(device: &Device, call: DeltaRule) -> Result<()> {
    const OP: &str = "delta_rule";
    let DeltaRule { q, k, v, a, b, decay_log, decay_bias, shape, runs, states, out } = &call;
    check_operands(OP, [q, k, v], [a, b], [decay_log, decay_bias], shape)?;
    check::shape(OP, "out", out, v.rows(), v.cols())?;
    check::same_type(OP, "out", out, v)?;
    if let Some(states) = states {
        check::is_f32(OP, "states", states)?;
        check::contiguous(OP, "states", states.is_contiguous())?;
    }
    check_runs(OP, runs, v.rows(), states.as_ref().map(|states| (states, 1, shape.state_len())))?;
    // States that several runs continue.
    let ends = scratch(device, || cuda::delta_rule::forward_scratch(runs, shape))?;
    let flops = 7.0 * (v.rows() * shape.state_len()) as f64;
    let work = check::work(OP, v, flops, check::bytes(&[q, k, v, out]));
    launch!(device, work, {
        cpu => kernel::forward(cpu, call),
        cuda => cuda::delta_rule::forward(cuda, call, ends)
    })
}

/// Computes the gradients of [`delta_rule`].
pub fn delta_rule_backward(device: &Device, call: DeltaRuleBackward) -> Result<()> {
    const OP: &str = "delta_rule_backward";
    let DeltaRuleBackward { q, k, v, a, b, decay_log, decay_bias, shape, runs, d_out, dq, dk, dv, .. } =
        &call;
    check_operands(OP, [q, k, v], [a, b], [decay_log, decay_bias], shape)?;
    let rows = v.rows();
    check::f32_shape(OP, "dq", dq, rows, shape.key_width())?;
    check::f32_shape(OP, "dk", dk, rows, shape.key_width())?;
    check::f32_shape(OP, "d_decay_log", &call.d_decay_log, rows, shape.value_heads)?;
    for (name, operand, cols) in [
        ("d_out", d_out as &dyn Operand, v.cols()),
        ("dv", dv, v.cols()),
        ("da", &call.da, shape.value_heads),
        ("db", &call.db, shape.value_heads),
    ] {
        check::shape(OP, name, operand, rows, cols)?;
        check::same_type(OP, name, operand, v)?;
    }
    check_runs(OP, runs, rows, None)?;
    // States and their gradients at ends of chunks, and what tokens do to them.
    let scratch = scratch(device, || cuda::delta_rule::backward_scratch(runs, shape))?;
    let flops = 28.0 * (rows * shape.state_len()) as f64;
    let work = check::work(OP, v, flops, check::bytes(&[q, k, v, d_out, dq, dk, dv]));
    launch!(device, work, {
        cpu => kernel::backward(cpu, call),
        cuda => cuda::delta_rule::backward(cuda, call, scratch)
    })
}
