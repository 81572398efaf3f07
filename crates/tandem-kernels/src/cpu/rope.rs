//! Rotary position embedding.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::ops::RopeTable;
use crate::{Element, ViewMut, with_element};

pub(crate) fn rope(
    cpu: &Cpu,
    x: ViewMut,
    head_dim: usize,
    positions: &[u32],
    table: &RopeTable,
    inverse: bool,
) {
    let half = table.rotary / 2;
    let sign = if inverse { -1.0 } else { 1.0 };
    with_element!(x.dtype(), E => {
        let x = RowsMut::<E>::new(x);
        cpu.pool.install(|| positions.par_iter().enumerate().for_each(|(t, &position)| {
            let at = position as usize * half;
            let (cos, sin) = (&table.cos[at..at + half], &table.sin[at..at + half]);
            // SAFETY: row `t` belongs to this task alone.
            for head in unsafe { x.row(t) }.chunks_exact_mut(head_dim) {
                let (low, high) = head[..2 * half].split_at_mut(half);
                for i in 0..half {
                    let (a, b, sin) = (low[i].to_f32(), high[i].to_f32(), sign * sin[i]);
                    low[i] = E::from_f32(a * cos[i] - b * sin);
                    high[i] = E::from_f32(b * cos[i] + a * sin);
                }
            }
        }));
    });
}
