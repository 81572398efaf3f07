//! RMSNorm and LayerNorm: two passes over each row while it is in the cache.

use super::Cpu;
use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use crate::ops::{BLOCK_ROWS, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use crate::{Element, View, ViewMut, with_element};

pub(crate) fn rms_norm(cpu: &Cpu, call: RmsNorm) {
    let RmsNorm { x, w, offset, eps, y, inverse_rms } = call;
    let w = w.as_slice::<f32>();
    let inverse = RowsMut::<f32>::new(inverse_rms);
    with_element!(x.dtype(), X => with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        // SAFETY: row `t` belongs to this call alone; the level has V.
        cpu.for_rows(x.shape(), |t| unsafe {
            inverse.part(0, t, 1)[0] = rms_norm_row::<X, Y>(cpu.isa(), x.row(t), w, offset, eps, y.row(t));
        });
    }));
}

vector_kernel! {
    /// Returns 1/rms.
    unsafe fn rms_norm_row<V: Vector, X: Element, Y: Element>(
        x: &[X],
        w: &[f32],
        offset: f32,
        eps: f32,
        y: &mut [Y],
    ) -> f32 {
        // SAFETY: `for_lanes` stays inside the rows, which are all of one length; the caller has V.
        unsafe {
            let mut squares = V::splat(0.0);
            for_lanes!(V, x.len(), |i, n| {
                let x = V::get(x.as_ptr().add(i), n);
                squares = x.mul_add(x, squares);
            });
            let inverse = 1.0 / (squares.sum() / x.len() as f32 + eps).sqrt();
            for_lanes!(V, x.len(), |i, n| {
                let x = V::get(x.as_ptr().add(i), n);
                let w = V::load(w.as_ptr().add(i), n).add(V::splat(offset));
                x.mul(V::splat(inverse)).mul(w).put(y.as_mut_ptr().add(i), n);
            });
            inverse
        }
    }
}

/// `partial` has one row per block of [`BLOCK_ROWS`] rows; none without `dw`.
pub(crate) fn rms_norm_backward(cpu: &Cpu, call: RmsNormBackward, mut partial: ViewMut) {
    let RmsNormBackward { x, w, offset, inverse_rms, dy, dx, dw } = call;
    let w = w.as_slice::<f32>();
    let inverse = inverse_rms.as_slice::<f32>();
    let dx = RowsMut::<f32>::new(dx);
    let sums = RowsMut::<f32>::new(partial.reborrow());
    with_element!(x.dtype(), X => with_element!(dy.dtype(), Y => {
        // SAFETY: row `t` belongs to this call alone; the level has V.
        for_rows_with_sums(cpu, x.rows(), dw.is_some().then_some(&sums), |t, sums| unsafe {
            let (x, dy, dx) = (x.row(t), dy.row(t), dx.row(t));
            rms_norm_backward_row::<X, Y>(cpu.isa(), x, w, offset, inverse[t], dy, dx, sums);
        });
    }));
    if let Some(dw) = dw {
        add_rows(cpu, partial.view(), dw);
    }
}

vector_kernel! {
    unsafe fn rms_norm_backward_row<V: Vector, X: Element, Y: Element>(
        x: &[X],
        w: &[f32],
        offset: f32,
        inverse: f32,
        dy: &[Y],
        dx: &mut [f32],
        dw: &mut [f32],
    ) {
        // SAFETY: `for_lanes` stays inside the rows, which are all of one length (`dw` may be
        // empty); the caller has V.
        unsafe {
            let offset = V::splat(offset);
            let mut dot = V::splat(0.0);
            for_lanes!(V, x.len(), |i, n| {
                let g = V::get(dy.as_ptr().add(i), n).mul(V::load(w.as_ptr().add(i), n).add(offset));
                dot = V::get(x.as_ptr().add(i), n).mul_add(g, dot);
            });
            let shift = V::splat(-dot.sum() * inverse * inverse * inverse / x.len() as f32);
            let inverse = V::splat(inverse);
            for_lanes!(V, x.len(), |i, n| {
                let (x, dy) = (V::get(x.as_ptr().add(i), n), V::get(dy.as_ptr().add(i), n));
                let g = dy.mul(V::load(w.as_ptr().add(i), n).add(offset));
                let dx = dx.as_mut_ptr().add(i);
                g.mul_add(inverse, x.mul_add(shift, V::load(dx, n))).store(dx, n);
                if !dw.is_empty() {
                    let dw = dw.as_mut_ptr().add(i);
                    dy.mul_add(x.mul(inverse), V::load(dw, n)).store(dw, n);
                }
            });
        }
    }
}

pub(crate) fn layer_norm(cpu: &Cpu, call: LayerNorm) {
    let LayerNorm { x, w, b, eps, y, mean_inverse } = call;
    let (w, b) = (w.as_slice::<f32>(), b.as_ref().map(|b| b.as_slice::<f32>()));
    let kept = RowsMut::<f32>::new(mean_inverse);
    with_element!(x.dtype(), X => with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        // SAFETY: row `t` belongs to this call alone; the level has V.
        cpu.for_rows(x.shape(), |t| unsafe {
            kept.row(t).copy_from_slice(&layer_norm_row::<X, Y>(cpu.isa(), x.row(t), w, b, eps, y.row(t)));
        });
    }));
}

vector_kernel! {
    /// Returns the mean and 1/σ.
    unsafe fn layer_norm_row<V: Vector, X: Element, Y: Element>(
        x: &[X],
        w: &[f32],
        b: Option<&[f32]>,
        eps: f32,
        y: &mut [Y],
    ) -> [f32; 2] {
        // SAFETY: `for_lanes` stays inside the rows, which are all of one length; the caller has V.
        unsafe {
            let zero = V::splat(0.0);
            let mut sum = zero;
            for_lanes!(V, x.len(), |i, n| {
                sum = sum.add(V::get(x.as_ptr().add(i), n));
            });
            let mean = sum.sum() / x.len() as f32;
            let mut squares = zero;
            for_lanes!(V, x.len(), |i, n| {
                let x = V::get(x.as_ptr().add(i), n).sub(V::splat(mean));
                // Lanes beyond the row hold -mean, not a deviation.
                let x = if n < V::LANES { x.keep_first(n, 0.0) } else { x };
                squares = x.mul_add(x, squares);
            });
            let inverse = 1.0 / (squares.sum() / x.len() as f32 + eps).sqrt();
            for_lanes!(V, x.len(), |i, n| {
                let normal = V::get(x.as_ptr().add(i), n).sub(V::splat(mean)).mul(V::splat(inverse));
                let b = b.map_or(zero, |b| V::load(b.as_ptr().add(i), n));
                normal.mul_add(V::load(w.as_ptr().add(i), n), b).put(y.as_mut_ptr().add(i), n);
            });
            [mean, inverse]
        }
    }
}

/// `partial` has one row `dw, db` per block of [`BLOCK_ROWS`] rows; none without `dw_db`.
pub(crate) fn layer_norm_backward(cpu: &Cpu, call: LayerNormBackward, mut partial: ViewMut) {
    let LayerNormBackward { x, w, mean_inverse, dy, dx, dw_db } = call;
    let width = x.cols();
    let w = w.as_slice::<f32>();
    let dx = RowsMut::<f32>::new(dx);
    let sums = RowsMut::<f32>::new(partial.reborrow());
    with_element!(x.dtype(), X => with_element!(dy.dtype(), Y => {
        for_rows_with_sums(cpu, x.rows(), dw_db.is_some().then_some(&sums), |t, sums| {
            let &[mean, inverse] = mean_inverse.row::<f32>(t) else { unreachable!("two columns") };
            // SAFETY: row `t` belongs to this call alone; the level has V.
            unsafe {
                let (x, dy, dx) = (x.row(t), dy.row(t), dx.row(t));
                layer_norm_backward_row::<X, Y>(cpu.isa(), x, w, mean, inverse, dy, dx, sums);
            }
        });
    }));
    if let Some((dw, db)) = dw_db {
        add_rows(cpu, partial.view().col_range(0..width), dw);
        if let Some(db) = db {
            add_rows(cpu, partial.view().col_range(width..2 * width), db);
        }
    }
}

vector_kernel! {
    unsafe fn layer_norm_backward_row<V: Vector, X: Element, Y: Element>(
        x: &[X],
        w: &[f32],
        mean: f32,
        inverse: f32,
        dy: &[Y],
        dx: &mut [f32],
        dw_db: &mut [f32],
    ) {
        // SAFETY: `for_lanes` stays inside the rows, which are all of one length (`dw_db` has two
        // rows or none); the caller has V.
        unsafe {
            let (mean, inverse) = (V::splat(mean), V::splat(inverse));
            let (mut sum, mut dot) = (V::splat(0.0), V::splat(0.0));
            for_lanes!(V, x.len(), |i, n| {
                let normal = V::get(x.as_ptr().add(i), n).sub(mean).mul(inverse);
                // The lanes beyond the row are zero in `dy · w`.
                let g = V::get(dy.as_ptr().add(i), n).mul(V::load(w.as_ptr().add(i), n));
                sum = sum.add(g);
                dot = normal.mul_add(g, dot);
            });
            let sum = V::splat(sum.sum() / x.len() as f32);
            let dot = V::splat(-dot.sum() / x.len() as f32);
            for_lanes!(V, x.len(), |i, n| {
                let normal = V::get(x.as_ptr().add(i), n).sub(mean).mul(inverse);
                let dy = V::get(dy.as_ptr().add(i), n);
                let g = dy.mul(V::load(w.as_ptr().add(i), n));
                let dx = dx.as_mut_ptr().add(i);
                normal.mul_add(dot, g.sub(sum)).mul_add(inverse, V::load(dx, n)).store(dx, n);
                if !dw_db.is_empty() {
                    let dw = dw_db.as_mut_ptr().add(i);
                    let db = dw.add(x.len());
                    dy.mul_add(normal, V::load(dw, n)).store(dw, n);
                    dy.add(V::load(db, n)).store(db, n);
                }
            });
        }
    }
}

/// Calls `row` for each row with its block's sums, which are zero before the block's first row and
/// empty if there are none.
fn for_rows_with_sums(
    cpu: &Cpu,
    rows: usize,
    sums: Option<&RowsMut<f32>>,
    row: impl Fn(usize, &mut [f32]) + Sync,
) {
    cpu.parallel_ranges(rows, BLOCK_ROWS, |block, range| {
        // SAFETY: row `block` belongs to this block alone.
        let sums = sums.map_or(&mut [][..], |sums| unsafe { sums.row(block) });
        sums.fill(0.0);
        range.for_each(|t| row(t, sums));
    });
}

/// Adds `sum[1,N] += Σ_r x[r,N]`, each column in order of rows.
fn add_rows(cpu: &Cpu, x: View, sum: ViewMut) {
    let sum = RowsMut::<f32>::new(sum);
    cpu.parallel_ranges(x.cols(), 256, |_, range| {
        // SAFETY: ranges are disjoint.
        let sum = unsafe { sum.part(0, range.start, range.len()) };
        for r in 0..x.rows() {
            for (sum, x) in sum.iter_mut().zip(&x.row::<f32>(r)[range.clone()]) {
                *sum += x;
            }
        }
    });
}
