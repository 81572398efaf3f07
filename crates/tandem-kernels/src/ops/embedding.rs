//! Table look-up and its deterministic scatter.

use crate::{Device, Result, View, ViewMut};

/// `x[t] = scale · table[ids[t]]`, or `+=` if `accumulate`. `table` `[V,D]` either type, `x` `[T,D]` f32.
///
/// # Errors
/// If an id is outside the table, or shapes or types do not fit.
pub fn embedding(
    device: &Device,
    table: View,
    ids: &[u32],
    scale: f32,
    x: ViewMut,
    accumulate: bool,
) -> Result<()> {
    unimplemented!()
}

/// `dtable[ids[t]] += scale · dx[t]`, each table row summed in token order. Both f32.
///
/// # Errors
/// If an id is outside the table, or shapes or types do not fit.
pub fn embedding_backward(device: &Device, ids: &[u32], scale: f32, dx: View, dtable: ViewMut) -> Result<()> {
    unimplemented!()
}
