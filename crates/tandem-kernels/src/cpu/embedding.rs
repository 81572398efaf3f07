//! Table look-up and its scatter.

use std::sync::atomic::{AtomicBool, Ordering};

use super::exact::add_to_terms;
use super::rows::RowsMut;
use super::{Cpu, block_rows};
use crate::ops::{ELSEWHERE, tokens_by_id};
use crate::{Element, View, ViewMut, with_element};

pub(crate) fn embedding(cpu: &Cpu, table: View, ids: &[u32], scale: f32, x: ViewMut, accumulate: bool) {
    let per_block = block_rows(x.cols());
    let x = RowsMut::<f32>::new(x);
    with_element!(table.dtype(), E => cpu.parallel_ranges(ids.len(), per_block, |_, range| {
        for t in range {
            // SAFETY: row `t` belongs to this block alone.
            let x = unsafe { x.row(t) };
            if ids[t] == ELSEWHERE {
                if !accumulate {
                    x.fill(0.0);
                }
                continue;
            }
            let row = table.row::<E>(ids[t] as usize);
            if accumulate {
                x.iter_mut().zip(row).for_each(|(x, row)| *x += scale * row.to_f32());
            } else {
                x.iter_mut().zip(row).for_each(|(x, row)| *x = scale * row.to_f32());
            }
        }
    }));
}

/// Columns per task: tasks own columns of the table, so that each of its rows is summed in token
/// order.
const COLUMNS: usize = 64;

pub(crate) fn embedding_backward(cpu: &Cpu, ids: &[u32], scale: f32, dx: View, dtable: ViewMut) {
    let dtable = RowsMut::<f32>::new(dtable);
    cpu.parallel_ranges(dx.cols(), COLUMNS, |_, columns| {
        for (t, &id) in ids.iter().enumerate().filter(|(_, id)| **id != ELSEWHERE) {
            // SAFETY: these columns belong to this block alone.
            let row = unsafe { dtable.part(id as usize, columns.start, columns.len()) };
            for (row, dx) in row.iter_mut().zip(&dx.row::<f32>(t)[columns.clone()]) {
                *row += scale * dx;
            }
        }
    });
}

/// Adds what the tokens of each id add up to as second terms of sums in fixed point. Returns whether all are
/// below the limit.
pub(crate) fn embedding_backward_exact(
    cpu: &Cpu,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
    limit: f32,
) -> bool {
    let (num_runs, table) = tokens_by_id(ids);
    let (bounds, rest) = table.split_at(num_runs + 1);
    let (of_runs, tokens) = rest.split_at(num_runs);
    let dtable = RowsMut::<f32>::new(dtable);
    let in_range = AtomicBool::new(true);
    cpu.parallel_ranges(dx.cols(), COLUMNS, |_, columns| {
        let mut room = [0.0; COLUMNS];
        let term = &mut room[..columns.len()];
        let mut good = true;
        for (bounds, &id) in bounds.windows(2).zip(of_runs) {
            term.fill(0.0);
            for &t in &tokens[bounds[0] as usize..bounds[1] as usize] {
                let dx = &dx.row::<f32>(t as usize)[columns.clone()];
                term.iter_mut().zip(dx).for_each(|(term, dx)| *term += scale * dx);
            }
            // SAFETY: these columns belong to this block alone; both slices are as long; the CPU has this level.
            good &= unsafe {
                let row = dtable.part(id as usize, columns.start, columns.len());
                add_to_terms(cpu.isa(), term, row, limit)
            };
        }
        if !good {
            in_range.store(false, Ordering::Relaxed);
        }
    });
    in_range.into_inner()
}
