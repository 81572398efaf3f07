//! Table look-up and its deterministic scatter.

use crate::cpu::embedding as kernel;
use crate::device::launch;
use crate::ops::{ELSEWHERE, check};
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

fn check_ids(op: &'static str, ids: &[u32], vocabulary: usize) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocabulary && id != ELSEWHERE) {
        None => Ok(()),
        Some(t) => Err(KernelError::invalid(
            op,
            format!("token {t} has id {}, the table has {vocabulary} rows", ids[t]),
        )),
    }
}

/// Computes `x[t] = scale · table[ids[t]]`, or `+=` if `accumulate`. `table` `[V,D]` is f32 or
/// bf16, `x` `[T,D]` f32. The row of an [`ELSEWHERE`] id is zero.
pub fn embedding(
    device: &Device,
    table: View,
    ids: &[u32],
    scale: f32,
    x: ViewMut,
    accumulate: bool,
) -> Result<()> {
    const OP: &str = "embedding";
    check::f32_shape(OP, "x", &x, ids.len(), table.cols())?;
    check_ids(OP, ids, table.rows())?;
    let read = x.len() * (table.dtype().size() + if accumulate { 4 } else { 0 });
    let work = check::work(OP, &x, x.len() as f64, read as f64 + check::bytes(&[&x]));
    launch!(device, work, {
        cpu => kernel::embedding(cpu, table, ids, scale, x, accumulate),
        cuda => cuda::embedding::embedding(cuda, table, ids, scale, x, accumulate)
    })
}

/// Computes `dtable[ids[t]] += scale · dx[t]` in f32, each table row in token order. [`ELSEWHERE`]
/// ids are skipped.
pub fn embedding_backward(device: &Device, ids: &[u32], scale: f32, dx: View, dtable: ViewMut) -> Result<()> {
    const OP: &str = "embedding_backward";
    check::f32_shape(OP, "dx", &dx, ids.len(), dtable.cols())?;
    check::is_f32(OP, "dtable", &dtable)?;
    check_ids(OP, ids, dtable.rows())?;
    let work = check::work(OP, &dx, 2.0 * dx.len() as f64, check::bytes(&[&dx, &dx, &dx]));
    launch!(device, work, {
        cpu => kernel::embedding_backward(cpu, ids, scale, dx, dtable),
        cuda => cuda::embedding::embedding_backward(cuda, ids, scale, dx, dtable)
    })
}
