//! TODO.

use super::{Cuda, driver, failed, source};
use crate::ops::{AttentionShape, Visible};
use crate::{Forest, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("attention.cu");

pub(crate) fn forward(
    cuda: &Cuda,
    q: View,
    k: View,
    v: View,
    forest: &Forest,
    shape: &AttentionShape,
    out: ViewMut,
    log_sum_exp: ViewMut,
) -> Result<()> {
    let _ = (cuda, q, k, v, forest, shape, out, log_sum_exp);
    Err(failed("attention", "not written"))
}

pub(crate) fn backward(
    cuda: &Cuda,
    q: View,
    k: View,
    v: View,
    out: View,
    log_sum_exp: View,
    d_out: View,
    forest: &Forest,
    shape: &AttentionShape,
    dq: ViewMut,
    dk: ViewMut,
    dv: ViewMut,
    scratch: ViewMut,
) -> Result<()> {
    let _ = (cuda, q, k, v, out, log_sum_exp, d_out, forest, shape, dq, dk, dv, scratch);
    Err(failed("attention", "not written"))
}

pub(crate) fn decode(
    cuda: &Cuda,
    q: View,
    k: View,
    v: View,
    visible: &Visible,
    shape: &AttentionShape,
    out: ViewMut,
) -> Result<()> {
    let _ = (cuda, q, k, v, visible, shape, out);
    Err(failed("attention", "not written"))
}
