//! Gates on heads.

use super::driver::Arg;
use super::elements::Elements;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::{Gate, HeadGates};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("head_gate.cu");

/// Launches a kernel over the elements of `operands`, after which `gates_of` have the gates' layout.
///
/// # Safety
/// `operands` and `gates_of` are those of the kernel.
unsafe fn launch(
    cuda: &Cuda,
    name: &'static str,
    gates: HeadGates,
    operands: &[View],
    gates_of: &[View],
) -> Result<()> {
    let HeadGates { function, head_dim, step, offset } = gates;
    let (rows, cols) = operands[0].shape();
    let all = [operands, gates_of].concat();
    let way = Elements::by_rows(rows, cols, &all).wide_if_divides(&[head_dim, step, offset]);
    let number = match function {
        Gate::Sigmoid => 0i32,
        Gate::Silu => 1,
    };
    let mut args = args![number, head_dim as i32, step as i32, offset as i32].to_vec();
    args.extend(all.iter().flat_map(|x| [Arg::from(x), Arg::from(x.stride())]));
    args.extend_from_slice(args![rows, cols, way.wide]);
    // SAFETY: the caller's promise.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), &args) }
}

pub(crate) fn forward(cuda: &Cuda, gates: HeadGates, x: View, gate: View, h: ViewMut) -> Result<()> {
    let name = by_type!("head_gate", x.dtype());
    // SAFETY: the operation has checked shapes and types, and that each head has a gate.
    unsafe { launch(cuda, name, gates, &[x, h.view()], &[gate]) }
}

pub(crate) fn backward(
    cuda: &Cuda,
    gates: HeadGates,
    x: View,
    gate: View,
    dh: View,
    dx: ViewMut,
    d_gate: ViewMut,
) -> Result<()> {
    let name = by_type!("head_gate_backward", x.dtype());
    // SAFETY: as above.
    unsafe { launch(cuda, name, gates, &[x, dh, dx.view()], &[gate, d_gate.view()]) }
}
