//! Decoding over a cache: one block per part of a query's keys, and one that combines the parts.

use super::kernels::{DECODE, THREADS, too_wide};
use super::{pack, stride, tables::Entry};
use crate::cuda::driver::Grid;
use crate::cuda::matmul::rounded;
use crate::cuda::{Cuda, args, by_type};
use crate::ops::{AttentionDecode, AttentionShape, Visible};
use crate::{DType, Result, ViewMut};

/// Keys per part, as in `attention_decode.cu`.
const PART: usize = 128;

/// Widest head.
const WIDEST: usize = 256;

/// Returns the numbers of listed keys outside and inside the window of a query.
fn keys(visible: &Visible, query: usize, shape: &AttentionShape) -> (usize, usize) {
    let listed = visible.ranges(query).iter().map(ExactSizeIterator::len).sum::<usize>();
    let seen = shape.window.map_or(listed, |window| listed.min(window as usize));
    (listed - seen, seen)
}

/// Returns the number of blocks for the parts of all queries' keys, and whether a query has several parts. The
/// number is rounded up to three bits, so that most steps of generation have the same grid: blocks without a
/// part end at once.
pub(crate) fn decode_parts(visible: &Visible, queries: usize, shape: &AttentionShape) -> (usize, bool) {
    let parts: usize = (0..queries).map(|query| keys(visible, query, shape).1.div_ceil(PART)).sum();
    (rounded(parts), parts > queries)
}

/// Returns the table of `count` parts and the pieces of their queries' keys, and for each query its first
/// part and the number of parts.
fn tables(
    visible: &Visible,
    queries: usize,
    shape: &AttentionShape,
    count: u32,
) -> (Vec<Entry>, Vec<[u32; 2]>) {
    let (mut parts, mut pieces) = (Vec::with_capacity(count as usize + visible.ranges.len()), Vec::new());
    let mut of_queries = Vec::with_capacity(queries);
    for query in 0..queries {
        let (hidden, seen) = keys(visible, query, shape);
        let first_piece = count + pieces.len() as u32;
        let mut number = 0;
        for range in visible.ranges(query).iter().filter(|range| !range.is_empty()) {
            let row = range.start.wrapping_sub(number);
            number += range.end - range.start;
            pieces.push([number, row, 0, 0]);
        }
        let first_part = parts.len();
        parts.extend((0..seen).step_by(PART).map(|start| {
            [query as u32, PART.min(seen - start) as u32, (hidden + start) as u32, first_piece]
        }));
        of_queries.push([first_part as u32, (parts.len() - first_part) as u32]);
    }
    parts.resize(count as usize, Entry::default());
    parts.extend(pieces);
    (parts, of_queries)
}

/// Returns the kernel for up to this many heads at once.
fn kernel(dtype: DType, heads: usize) -> &'static str {
    match heads {
        1 => by_type!("attention_decode_1", dtype),
        2 => by_type!("attention_decode_2", dtype),
        3..=4 => by_type!("attention_decode_4", dtype),
        _ => by_type!("attention_decode_8", dtype),
    }
}

/// Decodes. `partial` has one row per part and head, `head_dim + 2` wide; none if no query has
/// several parts.
pub(crate) fn decode(cuda: &Cuda, operands: AttentionDecode, partial: Option<ViewMut>) -> Result<()> {
    let AttentionDecode { q, k, v, visible, shape, out } = operands;
    if shape.head_dim > WIDEST {
        return Err(too_wide(shape.head_dim));
    }
    let (count, _) = decode_parts(visible, q.rows(), shape);
    let (parts, queries) = tables(visible, q.rows(), shape, count as u32);
    let (heads, head_dim) = (shape.heads as i32, shape.head_dim as i32);
    let (pack, group) = (pack(shape, 8), (shape.heads / shape.kv_heads) as i32);
    // 16 bytes per lane.
    let lanes = (shape.head_dim * q.dtype().size()).div_ceil(16).next_power_of_two().min(32);
    let (out, partial) = (out.view(), partial.as_ref().map(ViewMut::view));
    let table = cuda.table::<Entry>(&parts)?;
    let args = args![
        table,
        q,
        stride(&q),
        k,
        stride(&k),
        v,
        stride(&v),
        out,
        stride(&out),
        partial,
        heads,
        head_dim,
        pack as i32,
        group,
        shape.scale,
        shape.softcap.unwrap_or(0.0),
        lanes as i32
    ];
    let grid = Grid::with_dims([count, shape.heads / pack, 1], THREADS);
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked;
    // the rows are inside the cache.
    unsafe { cuda.launch(&DECODE, kernel(q.dtype(), pack), grid, args)? };
    let Some(partial) = partial else { return Ok(()) };
    let args = args![cuda.table::<[u32; 2]>(&queries)?, partial, out, stride(&out), heads, head_dim];
    let grid = Grid::with_dims([q.rows(), shape.heads, 1], THREADS);
    // SAFETY: as above; every part has been written.
    unsafe { cuda.launch(&DECODE, by_type!("attention_combine", q.dtype()), grid, args) }
}
