//! Feed-forward activations, plain and gated.

use super::driver::Arg;
use super::elements::Elements;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::Activation;
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("activation.cu");

/// Returns a function's number in `activation.cu`.
fn number(function: Activation) -> i32 {
    match function {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::Relu => 3,
        Activation::ReluSquared => 4,
    }
}

/// # Safety
/// The operands are those of the kernel.
unsafe fn launch(
    cuda: &Cuda,
    name: &'static str,
    function: Activation,
    operands: &[Arg],
    way: Elements,
) -> Result<()> {
    let args = [args![number(function)], operands, args![way.rows, way.cols, way.wide]].concat();
    // SAFETY: the caller's promise.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), &args) }
}

pub(crate) fn gated(cuda: &Cuda, function: Activation, gu: View, h: ViewMut) -> Result<()> {
    let (rows, width) = (h.rows(), h.cols());
    // Both halves are aligned if the first is: the second begins a whole number of vectors later.
    let way = Elements::by_rows(rows, width, &[gu, h.view()]);
    let operands = args![gu, gu.stride(), &h, h.stride()];
    // SAFETY: the operation has checked shapes and types.
    unsafe { launch(cuda, by_type!("gated", gu.dtype()), function, operands, way) }
}

pub(crate) fn gated_backward(
    cuda: &Cuda,
    function: Activation,
    gu: View,
    dh: View,
    dgu: ViewMut,
) -> Result<()> {
    let way = Elements::by_rows(dh.rows(), dh.cols(), &[gu, dh, dgu.view()]);
    let operands = args![gu, gu.stride(), dh, dh.stride(), &dgu, dgu.stride()];
    // SAFETY: as above.
    unsafe { launch(cuda, by_type!("gated_backward", gu.dtype()), function, operands, way) }
}

pub(crate) fn activate(cuda: &Cuda, function: Activation, u: View, h: ViewMut) -> Result<()> {
    let way = Elements::new(&[u, h.view()]);
    let operands = args![u, u.stride(), &h, h.stride()];
    // SAFETY: as above.
    unsafe { launch(cuda, by_type!("activate", u.dtype()), function, operands, way) }
}

pub(crate) fn activate_backward(
    cuda: &Cuda,
    function: Activation,
    u: View,
    dh: View,
    du: ViewMut,
) -> Result<()> {
    let way = Elements::new(&[u, dh, du.view()]);
    let operands = args![u, u.stride(), dh, dh.stride(), &du, du.stride()];
    // SAFETY: as above.
    unsafe { launch(cuda, by_type!("activate_backward", u.dtype()), function, operands, way) }
}
