//! TODO.

use super::{Cuda, driver, failed, source};
use crate::ops::Activation;
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("activation.cu");

pub(crate) fn gated(cuda: &Cuda, function: Activation, gu: View, h: ViewMut) -> Result<()> {
    let _ = (cuda, function, gu, h);
    Err(failed("activation", "not written"))
}

pub(crate) fn gated_backward(
    cuda: &Cuda,
    function: Activation,
    gu: View,
    dh: View,
    dgu: ViewMut,
) -> Result<()> {
    let _ = (cuda, function, gu, dh, dgu);
    Err(failed("activation", "not written"))
}

pub(crate) fn activate(cuda: &Cuda, function: Activation, u: View, h: ViewMut) -> Result<()> {
    let _ = (cuda, function, u, h);
    Err(failed("activation", "not written"))
}

pub(crate) fn activate_backward(
    cuda: &Cuda,
    function: Activation,
    u: View,
    dh: View,
    du: ViewMut,
) -> Result<()> {
    let _ = (cuda, function, u, dh, du);
    Err(failed("activation", "not written"))
}
