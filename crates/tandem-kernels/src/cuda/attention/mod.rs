//! Attention over a forest and over a cache: choice of kernels and tiles.
//!
//! bf16 uses tensor cores, f32 does not. On GPUs of [`WGMMA`] bf16 may multiply by warpgroups. Kernels are compiled for a *width* that heads are padded
//! to. Each width is a source of its own, so that a run compiles only what it needs.

mod decode;
mod kernels;
mod tables;

pub(crate) use decode::{decode, decode_parts};
pub(super) use kernels::{BACKWARD, BACKWARD_WGMMA, BOTH_F32, DECODE, DELTA, FORWARD, FORWARD_WGMMA, serves};

pub use kernels::{WGMMA, WIDEST_HEAD, has_wgmma};

use kernels::{Kernel, Kernels, NO_WINDOW, kernels};
use tables::Entry;

use super::driver::{Arg, Grid};
use super::{Cuda, args, by_type};
use crate::ops::{Attention, AttentionBackward, AttentionShape};
use crate::{Forest, Result, View, ViewMut};

/// Common arguments of attention kernels.
struct Call<'a> {
    cuda: &'a Cuda,
    forest: &'a Forest,
    shape: &'a AttentionShape,
    kernels: &'static Kernels,
    /// Heads that share keys and a tile.
    pack: usize,
    /// [`NO_WINDOW`] if every query sees its whole path.
    window: u32,
}

impl<'a> Call<'a> {
    fn new(cuda: &'a Cuda, q: View, forest: &'a Forest, shape: &'a AttentionShape) -> Result<Self> {
        let hides = |window: &u32| forest.positions.iter().any(|position| position >= window);
        let window = shape.window.filter(hides).unwrap_or(NO_WINDOW);
        let kernels = kernels(q.dtype(), shape.head_dim, cuda.wgmma())?;
        Ok(Self { cuda, forest, shape, kernels, pack: pack(shape, 16), window })
    }

    /// Returns the table of a kernel's tiles of queries from one on, and a grid with one block per tile and
    /// pack.
    fn query_tiles(&self, kernel: &Kernel, first_query: usize) -> Result<(u64, Grid)> {
        let (count, entries) = tables::query_tiles(self.forest, first_query, kernel.rows / self.pack);
        let blocks = [count, self.shape.heads / self.pack, 1];
        let grid = Grid::with_dims(blocks, kernel.threads).with_shared(kernel.shared);
        Ok((self.cuda.table::<Entry>(&entries)?, grid))
    }

    /// Returns the table of tiles of keys, and a grid with one block per tile and key/value head.
    fn key_tiles(&self) -> Result<(u64, Grid)> {
        let (count, entries) = tables::key_tiles(self.forest, self.kernels.keys, self.window);
        let blocks = [count, self.shape.kv_heads, 1];
        let kernel = &self.kernels.of_keys;
        let grid = Grid::with_dims(blocks, kernel.threads).with_shared(kernel.shared);
        Ok((self.cuda.table::<Entry>(&entries)?, grid))
    }

    /// Launches a kernel with its own arguments, followed by the common ones.
    ///
    /// # Safety
    /// As [`Cuda::launch`].
    unsafe fn launch(&self, kernel: &Kernel, grid: Grid, own: &[Arg]) -> Result<()> {
        let (shape, group) = (self.shape, (self.shape.heads / self.shape.kv_heads) as i32);
        let (head_dim, pack, window) = (shape.head_dim as i32, self.pack as i32, self.window as i32);
        let rest = args![head_dim, pack, group, shape.scale, shape.softcap.unwrap_or(0.0), window];
        // SAFETY: the caller's promise.
        unsafe { self.cuda.launch(kernel.source, kernel.name, grid, &[own, rest].concat()) }
    }
}

/// Returns the most heads of a group, up to `limit`, that divide the group evenly.
fn pack(shape: &AttentionShape, limit: usize) -> usize {
    let group = shape.heads / shape.kv_heads;
    (1..=limit).rev().find(|&heads| group.is_multiple_of(heads)).unwrap_or(1)
}

fn stride(view: &View) -> i32 {
    view.stride() as i32
}

pub(crate) fn forward(cuda: &Cuda, operands: Attention) -> Result<()> {
    let Attention { q, k, v, forest, first_query, shape, out, log_sum_exp } = operands;
    let call = Call::new(cuda, q, forest, shape)?;
    let kernel = &call.kernels.forward;
    let (tiles, grid) = call.query_tiles(kernel, first_query)?;
    let (out, log_sum_exp) = (out.view(), log_sum_exp.view());
    let args = args![
        tiles,
        q,
        stride(&q),
        k,
        stride(&k),
        v,
        stride(&v),
        out,
        stride(&out),
        log_sum_exp,
        stride(&log_sum_exp)
    ];
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked;
    // tiles are of their rows.
    unsafe { call.launch(kernel, grid, args) }
}

pub(crate) fn backward(cuda: &Cuda, operands: AttentionBackward, scratch: ViewMut) -> Result<()> {
    let AttentionBackward { q, k, v, out, log_sum_exp, d_out, forest, shape, dq, dk, dv, .. } = operands;
    let call = Call::new(cuda, q, forest, shape)?;
    let (delta, dq, dk, dv) = (scratch.view(), dq.view(), dk.view(), dv.view());
    sums_of_rows(cuda, out, d_out, shape, delta)?;
    let heads = shape.heads as i32;
    let mut operands = args![
        0u64,
        q,
        stride(&q),
        k,
        stride(&k),
        v,
        stride(&v),
        d_out,
        stride(&d_out),
        log_sum_exp,
        stride(&log_sum_exp),
        delta,
        heads
    ]
    .to_vec();
    let kernel = &call.kernels.of_queries;
    let (tiles, grid) = call.query_tiles(kernel, 0)?;
    operands[0] = Arg::address(tiles);
    let own = [&operands[..], args![dq, stride(&dq)]].concat();
    // SAFETY: as in `forward`; `scratch` has a number for each row and head.
    unsafe { call.launch(kernel, grid, &own)? };
    let (tiles, grid) = call.key_tiles()?;
    operands[0] = Arg::address(tiles);
    let own = [&operands[..], args![dk, stride(&dk), dv, stride(&dv)]].concat();
    // SAFETY: as above.
    unsafe { call.launch(&call.kernels.of_keys, grid, &own) }
}

/// Computes `Σ out · d_out` per row and head.
fn sums_of_rows(cuda: &Cuda, out: View, d_out: View, shape: &AttentionShape, delta: View) -> Result<()> {
    const THREADS: usize = 256;
    // A lane reads four numbers at a time.
    let lanes = shape.head_dim.div_ceil(4).next_power_of_two().min(32);
    let (tokens, heads, head_dim) = (out.rows() as i32, shape.heads as i32, shape.head_dim as i32);
    let args = args![out, stride(&out), d_out, stride(&d_out), delta, tokens, heads, head_dim, lanes as i32];
    let blocks = (out.rows() * shape.heads * lanes).div_ceil(THREADS);
    let name = by_type!("attention_delta", out.dtype());
    // SAFETY: as in `forward`.
    unsafe { cuda.launch(&DELTA, name, Grid::new(blocks, THREADS as u32), args) }
}
