//! TODO.

use super::{Cuda, driver, failed, source};
use crate::ops::{AdamW, Gradient, RmsProp};
use crate::{Result, StatesMut, ViewMut};

pub(super) static SOURCE: driver::Source = source!("optimizer.cu", not fused);

pub(crate) fn adamw(
    cuda: &Cuda,
    config: &AdamW,
    grad_scale: f32,
    grad: Gradient,
    master: ViewMut,
    m: StatesMut,
    v: StatesMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    let _ = (cuda, config, grad_scale, grad, master, m, v, copy);
    Err(failed("optimizer", "not written"))
}

pub(crate) fn rmsprop(
    cuda: &Cuda,
    config: &RmsProp,
    grad_scale: f32,
    grad: Gradient,
    master: ViewMut,
    v: StatesMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    let _ = (cuda, config, grad_scale, grad, master, v, copy);
    Err(failed("optimizer", "not written"))
}

pub(crate) fn block_squares(cuda: &Cuda, x: Gradient, blocks: &mut [f64]) -> Result<()> {
    let _ = (cuda, x, blocks);
    Err(failed("optimizer", "not written"))
}
