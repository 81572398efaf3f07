//! TODO.

use super::{Cuda, driver, failed, source};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("embedding.cu");

pub(crate) fn embedding(
    cuda: &Cuda,
    table: View,
    ids: &[u32],
    scale: f32,
    x: ViewMut,
    accumulate: bool,
) -> Result<()> {
    let _ = (cuda, table, ids, scale, x, accumulate);
    Err(failed("embedding", "not written"))
}

pub(crate) fn embedding_backward(
    cuda: &Cuda,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
) -> Result<()> {
    let _ = (cuda, ids, scale, dx, dtable);
    Err(failed("embedding", "not written"))
}
