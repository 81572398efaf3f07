//! Table look-up and its scatter.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::{Element, View, ViewMut, with_element};

pub(crate) fn embedding(cpu: &Cpu, table: View, ids: &[u32], scale: f32, x: ViewMut, accumulate: bool) {
    let x = RowsMut::<f32>::new(x);
    with_element!(table.dtype(), E => cpu.pool.install(|| {
        ids.par_iter().enumerate().for_each(|(t, &id)| {
            // SAFETY: row `t` belongs to this task alone.
            let x = unsafe { x.row(t) };
            let row = table.row::<E>(id as usize);
            for i in 0..x.len() {
                let value = scale * row[i].to_f32();
                x[i] = if accumulate { x[i] + value } else { value };
            }
        });
    }));
}

/// Columns per task: tasks own columns of the table, so that each of its rows is summed in token order.
const COLUMNS: usize = 64;

pub(crate) fn embedding_backward(cpu: &Cpu, ids: &[u32], scale: f32, dx: View, dtable: ViewMut) {
    let width = dx.cols();
    let dtable = RowsMut::<f32>::new(dtable);
    cpu.pool.install(|| {
        (0..width.div_ceil(COLUMNS)).into_par_iter().for_each(|block| {
            let columns = block * COLUMNS..width.min((block + 1) * COLUMNS);
            for (t, &id) in ids.iter().enumerate() {
                // SAFETY: these columns belong to this task alone.
                let row = unsafe { dtable.part(id as usize, columns.start, columns.len()) };
                for (row, dx) in row.iter_mut().zip(&dx.row::<f32>(t)[columns.clone()]) {
                    *row += scale * dx;
                }
            }
        });
    });
}
