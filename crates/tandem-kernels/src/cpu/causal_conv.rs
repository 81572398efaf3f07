//! Causal convolution along each text.

use super::Cpu;
use super::rows::RowsMut;
use super::scratch;
use super::vector::{for_lanes, vector_kernel};
use crate::batch::runs::{NO_TAP, readers};
use crate::ops::{CausalConv, CausalConvBackward, WIDEST_CONV};
use crate::{Element, View, ViewMut, with_element};

/// Channels of a block of the weight's gradient: its sums stay in the nearest cache.
const CHANNELS: usize = 256;

/// Copies `w` `[C, W]` to `[W, C]`, so that registers hold neighbouring channels.
fn turn(w: &[f32], width: usize, turned: &mut [f32]) {
    let channels = turned.len() / width;
    for (c, taps) in w.chunks_exact(width).enumerate() {
        for (j, w) in taps.iter().enumerate() {
            turned[j * channels + c] = *w;
        }
    }
}

pub(crate) fn forward(cpu: &Cpu, call: CausalConv) {
    let CausalConv { x, w, runs, history, y } = call;
    let (rows, channels, width) = (x.rows(), x.cols(), w.cols());
    let taps = runs.taps(width);
    with_element!(x.dtype(), E => {
        let history = history.map(RowsMut::<E>::new);
        // Where no token is, a row of zeros is read: the operations are the same for all rows.
        let zeros = vec![E::from_f32(0.0); channels];
        let source = |tap: u32| match tap as usize {
            _ if tap == NO_TAP => &zeros[..],
            row if row < rows => x.row::<E>(row),
            // SAFETY: nothing writes the history before all rows are computed, and then one row after
            // another.
            row => unsafe { &*history.as_ref().expect("checked with the runs").row(row - rows) },
        };
        scratch::with_f32(channels * width, |turned| {
            turn(w.as_slice::<f32>(), width, turned);
            let (turned, y) = (&*turned, RowsMut::<E>::new(y));
            cpu.for_rows((rows, channels * width), |t| {
                let taps = &taps[t * width..][..width];
                let mut sources = [zeros.as_ptr(); WIDEST_CONV];
                sources.iter_mut().zip(taps).for_each(|(source_row, &tap)| *source_row = source(tap).as_ptr());
                // SAFETY: row `t` belongs to this call alone; all rows have one length.
                unsafe { convolve_row::<E>(cpu.isa(), &sources[..width], turned, y.row(t)) };
            });
        });
        // The last run first: one that continues a run may still read the slot that this run overwrites.
        for (run, slot) in runs.as_slice().iter().rev().filter_map(|run| Some((run, run.keep?))) {
            let last = (run.rows.end as usize - 1) * width;
            for (j, &tap) in taps[last + 1..last + width].iter().enumerate() {
                let place = slot as usize * (width - 1) + j;
                // A slot that is read and kept moves up: row j is read after it was written elsewhere.
                let row = source(tap).to_vec();
                if let Some(history) = &history {
                    // SAFETY: no other row of the history is borrowed.
                    unsafe { history.row(place) }.copy_from_slice(&row);
                }
            }
        }
    });
}

vector_kernel! {
    /// Sums `w[j] · x[j]`, oldest first; `w` is `[W, C]`, all rows have the length of `y`.
    unsafe fn convolve_row<V: Vector, E: Element>(x: &[*const E], w: &[f32], y: &mut [E]) {
        let channels = y.len();
        for_lanes!(V, channels, |i, n| {
            // SAFETY: inside the rows.
            unsafe {
                let mut sum = V::splat(0.0);
                for (j, x) in x.iter().enumerate() {
                    let w = V::load(w.as_ptr().add(j * channels + i), n);
                    sum = V::get(x.add(i), n).mul_add(w, sum);
                }
                sum.put(y.as_mut_ptr().add(i), n);
            }
        });
    }
}

pub(crate) fn backward(cpu: &Cpu, call: CausalConvBackward) {
    let CausalConvBackward { x, w, runs, dy, dx, dw } = call;
    let (rows, channels, width) = (x.rows(), x.cols(), w.cols());
    let taps = runs.taps(width);
    let (starts, readers) = readers(&taps, rows, width);
    with_element!(x.dtype(), E => {
        scratch::with_f32(channels * width, |turned| {
            turn(w.as_slice::<f32>(), width, turned);
            let (turned, dx) = (&*turned, RowsMut::<E>::new(dx));
            cpu.for_rows((rows, channels * width), |s| {
                let readers = &readers[starts[s] as usize..starts[s + 1] as usize];
                // SAFETY: row `s` belongs to this call alone; all rows have one length.
                unsafe { spread_row::<E>(cpu.isa(), readers, dy, turned, dx.row(s)) };
            });
        });
        if let Some(dw) = dw {
            weight_gradient::<E>(cpu, x, dy, &taps, width, dw);
        }
    });
}

vector_kernel! {
    /// Sums `w[j] · dy[t]` over the readers `(t, j)` of one row.
    unsafe fn spread_row<V: Vector, E: Element>(readers: &[[u32; 2]], dy: View, w: &[f32], dx: &mut [E]) {
        let channels = dx.len();
        for_lanes!(V, channels, |i, n| {
            // SAFETY: inside the rows.
            unsafe {
                let mut sum = V::splat(0.0);
                for &[t, j] in readers {
                    let w = V::load(w.as_ptr().add(j as usize * channels + i), n);
                    sum = V::get(dy.row::<E>(t as usize).as_ptr().add(i), n).mul_add(w, sum);
                }
                sum.put(dx.as_mut_ptr().add(i), n);
            }
        });
    }
}

/// Adds `Σ_t dy[t, c] · x[tap j of t, c]`, in order of rows.
fn weight_gradient<E: Element>(cpu: &Cpu, x: View, dy: View, taps: &[u32], width: usize, dw: ViewMut) {
    let (rows, channels) = x.shape();
    let dw = RowsMut::<f32>::new(dw);
    cpu.parallel_ranges(channels, CHANNELS, |_, range| {
        scratch::with_f32(range.len() * width, |sums| {
            sums.fill(0.0);
            for t in 0..rows {
                for (j, &tap) in taps[t * width..][..width].iter().enumerate() {
                    if tap != NO_TAP {
                        let x = &x.row::<E>(tap as usize)[range.clone()];
                        let sums = &mut sums[j * range.len()..][..range.len()];
                        // SAFETY: all have one length; the level has V.
                        unsafe { add_products::<E>(cpu.isa(), x, &dy.row::<E>(t)[range.clone()], sums) };
                    }
                }
            }
            for (i, c) in range.clone().enumerate() {
                // SAFETY: rows of `dw` in the range belong to this block alone.
                let dw = unsafe { dw.row(c) };
                dw.iter_mut().enumerate().for_each(|(j, dw)| *dw += sums[j * range.len() + i]);
            }
        });
    });
}

vector_kernel! {
    unsafe fn add_products<V: Vector, E: Element>(x: &[E], dy: &[E], sums: &mut [f32]) {
        for_lanes!(V, sums.len(), |i, n| {
            // SAFETY: inside the slices, which have one length.
            unsafe {
                let sums = sums.as_mut_ptr().add(i);
                let x = V::get(x.as_ptr().add(i), n);
                V::get(dy.as_ptr().add(i), n).mul_add(x, V::load(sums, n)).store(sums, n);
            }
        });
    }
}
