//! Row norms of a matrix with a low-rank term, computed block by block in the cache.

use super::convert::convert;
use super::rows::RowsMut;
use super::tile::Strided;
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, scratch};
use crate::{View, ViewMut, with_element};

/// Rows and columns of a block.
const ROWS: usize = 12;
const COLUMNS: usize = 512;

/// Lanes of the widest register; blocks begin at multiples of it.
const LANES: usize = 16;

/// Computes the norms of rows, or their squares.
pub(crate) fn row_norms(cpu: &Cpu, w: View, a: View, b: View, scale: f32, out: ViewMut, takes_root: bool) {
    let ((n, k), r) = (w.shape(), a.rows());
    let width = k.next_multiple_of(LANES);
    let out = RowsMut::<f32>::new(out);
    scratch::with_f32(r * width, |wide| {
        {
            let wide = RowsMut::from_slice(wide);
            cpu.parallel_for(r, |row| {
                // SAFETY: rows are disjoint.
                let (to, rest) = unsafe { wide.part(0, row * width, width) }.split_at_mut(k);
                with_element!(a.dtype(), A => convert(cpu.isa(), a.row::<A>(row), to));
                rest.fill(0.0);
            });
        }
        let a = &*wide;
        cpu.parallel_ranges(n, ROWS, |_, rows| {
            scratch::with_f32(ROWS * (r + COLUMNS), |buffer| {
                let (factors, block) = buffer.split_at_mut(ROWS * r);
                for (i, row) in rows.clone().enumerate() {
                    let to = &mut factors[i * r..(i + 1) * r];
                    with_element!(b.dtype(), B => convert(cpu.isa(), b.row::<B>(row), to));
                    to.iter_mut().for_each(|x| *x *= scale);
                }
                let mut squares = [0.0f64; ROWS];
                for start in (0..k).step_by(COLUMNS) {
                    let count = COLUMNS.min(k - start);
                    let padded = count.next_multiple_of(LANES);
                    for (i, row) in rows.clone().enumerate() {
                        let (to, rest) = block[i * COLUMNS..][..padded].split_at_mut(count);
                        with_element!(w.dtype(), W => convert(cpu.isa(), &w.row::<W>(row)[start..start + count], to));
                        rest.fill(0.0);
                    }
                    let squares = &mut squares[..rows.len()];
                    // SAFETY: the factors have `r` columns, `a` and the block `padded` from where
                    // they begin.
                    unsafe { add_squares(cpu.isa(), factors, r, (a.as_ptr().wrapping_add(start), width), block, padded, squares) };
                }
                // SAFETY: blocks are disjoint.
                let out = unsafe { out.part(0, rows.start, rows.len()) };
                let result = |sum: f64| if takes_root { sum.sqrt() } else { sum };
                out.iter_mut().zip(squares).for_each(|(out, sum)| *out = result(sum) as f32);
            });
        });
    });
}

vector_kernel! {
    /// Adds `factors · a` to the block, whose rows are [`COLUMNS`] apart, and the squares of its
    /// rows to `squares`.
    unsafe fn add_squares<V: Vector>(
        factors: &[f32],
        r: usize,
        a: (*const f32, usize),
        block: &mut [f32],
        width: usize,
        squares: &mut [f64],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let factors = Strided { pointer: factors.as_ptr(), row: r, col: 1 };
            V::multiply([squares.len(), width, r], factors, a, (block.as_mut_ptr(), COLUMNS), true);
            for (i, square) in squares.iter_mut().enumerate() {
                let row = block.as_ptr().add(i * COLUMNS);
                let mut sum = V::splat(0.0);
                for_lanes!(V, width, |j, n| {
                    let x = V::load(row.add(j), n);
                    sum = x.mul_add(x, sum);
                });
                *square += f64::from(sum.sum());
            }
        }
    }
}
