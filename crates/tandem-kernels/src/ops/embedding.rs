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
    scatter(OP, device, ids, scale, dx, dtable, None)
}

/// Computes [`embedding_backward`] where `dtable` holds the first term of sums in fixed point, as
/// [`Gradient::Terms`](super::Gradient::Terms). What a row's tokens add up to in f32 is the second term. Each
/// looked-up row becomes the f32 that its sum of both is read as, which is read as itself.
///
/// If a second term is not finite or not below `limit` (see [`exact_sum`](super::exact_sum)),
/// [`Device::take_in_range`] reports it.
pub fn embedding_backward_exact(
    device: &Device,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
    limit: f32,
) -> Result<()> {
    const OP: &str = "embedding_backward_exact";
    scatter(OP, device, ids, scale, dx, dtable, Some(limit))
}

fn scatter(
    op: &'static str,
    device: &Device,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
    limit: Option<f32>,
) -> Result<()> {
    check::f32_shape(op, "dx", &dx, ids.len(), dtable.cols())?;
    check::is_f32(op, "dtable", &dtable)?;
    check_ids(op, ids, dtable.rows())?;
    let work = check::work(op, &dx, 2.0 * dx.len() as f64, check::bytes(&[&dx, &dx, &dx]));
    launch!(device, work, {
        cpu => match limit {
            None => kernel::embedding_backward(cpu, ids, scale, dx, dtable),
            Some(limit) => {
                if !kernel::embedding_backward_exact(cpu, ids, scale, dx, dtable, limit) {
                    cpu.see_out_of_range();
                }
            }
        },
        cuda => cuda::embedding::embedding_backward(cuda, ids, scale, dx, dtable, limit)
    })
}

/// Groups the tokens by id, in order. Returns the number of distinct ids, and a table of the
/// groups' offsets, the ids and the tokens.
pub(crate) fn tokens_by_id(ids: &[u32]) -> (usize, Vec<u32>) {
    let here = ids.iter().enumerate().filter(|(_, id)| **id != ELSEWHERE);
    let mut pairs: Vec<(u32, u32)> = here.map(|(token, &id)| (id, token as u32)).collect();
    // All pairs differ, so the order is unique.
    pairs.sort_unstable();
    let begins = |&i: &usize| i == 0 || pairs[i].0 != pairs[i - 1].0;
    let starts: Vec<usize> = (0..pairs.len()).filter(begins).collect();
    let bounds = starts.iter().copied().chain([pairs.len()]).map(|i| i as u32);
    let of_runs = starts.iter().map(|&i| pairs[i].0);
    (starts.len(), bounds.chain(of_runs).chain(pairs.iter().map(|pair| pair.1)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_id_stand_together_in_order() {
        let expected = (3, vec![0, 3, 5, 6, 3, 7, 9, 1, 4, 5, 0, 3, 6]);
        assert_eq!(tokens_by_id(&[7, 3, ELSEWHERE, 7, 3, 3, 9]), expected);
        assert_eq!(tokens_by_id(&[ELSEWHERE]), (0, vec![0]));
    }
}
