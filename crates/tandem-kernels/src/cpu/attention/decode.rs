//! Decoding: single new tokens over a key/value cache, bound by reading it and by multiply-adds. A query's result has
//! the bits that [`super::forward`] gives its token: both cut the keys before it into the same strips.
//!
//! One task takes a key/value head and some queries that see the same range of rows first, as the completions of a
//! prompt do: it reads and transposes the strips of that range once for all of them.

use std::ops::Range;

use super::block::{KEYS, Layout, Scores, block_start, pack, strips, take};
use super::forward::LOWEST;
use crate::cpu::elementary::exp;
use crate::cpu::prefetch::{LINE, prefetch_far};
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::Strided;
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, scratch};
use crate::ops::{AttentionDecode, AttentionShape, Visible};
use crate::{Element, View, with_element};

/// Most queries of a task.
const QUERIES: usize = 8;

/// Tasks per thread, if there are queries enough.
const TASKS: usize = 4;

pub(super) struct Decode<'a, E> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    visible: &'a Visible,
    pub(super) shape: &'a AttentionShape,
    pub(super) layout: Layout,
    out: RowsMut<'a, E>,
    threads: usize,
    /// First queries of tasks, and the end of the last.
    starts: &'a [u32],
}

pub(crate) fn decode(cpu: &Cpu, call: AttentionDecode) {
    let AttentionDecode { q, k, v, visible, shape, out } = call;
    let on_tiles = cpu.isa().has_tiles_of(q.dtype());
    let layout = Layout::new(shape, on_tiles);
    scratch::with_bytes((q.rows() + 1) * size_of::<u32>(), |memory| {
        // SAFETY: the memory is initialised, aligned, exclusive, and as large.
        let starts = unsafe { std::slice::from_raw_parts_mut(memory.cast().as_ptr(), q.rows() + 1) };
        let tasks = TASKS * cpu.threads() / shape.kv_heads;
        let starts = match on_tiles {
            true => deal(visible, 1, starts),
            false => deal_to(tasks, visible, shape, starts),
        };
        let most = starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        let (width, rows) = (layout.width, most * layout.group);
        let len = match on_tiles {
            #[cfg(target_arch = "x86_64")]
            true => super::tiles::decode_len(&layout),
            _ => 2 * rows * width + KEYS * width + (KEYS + 2) * rows,
        };
        with_element!(q.dtype(), E => {
            let (out, threads) = (RowsMut::<E>::new(out), cpu.threads());
            let call = Decode { q, k, v, visible, shape, layout, out, threads, starts };
            cpu.parallel_for((starts.len() - 1) * shape.kv_heads, |task| {
                scratch::with_f32(len, |memory| {
                    // SAFETY: these queries' parts of these heads belong to this task alone; the memory
                    // suffices for the layout.
                    unsafe {
                        match on_tiles {
                            #[cfg(target_arch = "x86_64")]
                            true => super::tiles::decode_group(&call, task, memory),
                            _ => decode_group(cpu.isa(), &call, task, memory),
                        }
                    }
                });
            });
        });
    });
}

/// Deals queries to tasks, with fewer at once where there are fewer tasks than wanted. Returns the starts.
fn deal_to<'s>(tasks: usize, visible: &Visible, shape: &AttentionShape, starts: &'s mut [u32]) -> &'s [u32] {
    // A window hides other keys from each query.
    let mut most = if shape.window.is_some() { 1 } else { QUERIES };
    while most > 1 && deal(visible, most, starts).len() <= tasks {
        most /= 2;
    }
    deal(visible, most, starts)
}

/// Deals queries to tasks: neighbours that share strips, `most` at a time. Returns the starts and the end of the last.
fn deal<'s>(visible: &Visible, most: usize, starts: &'s mut [u32]) -> &'s [u32] {
    let queries = starts.len() - 1;
    let mut count = 0;
    for query in 0..queries {
        let begins = count == 0
            || query - starts[count - 1] as usize >= most
            || num_shared(visible, query) == 0
            || visible.ranges(query)[0] != visible.ranges(query - 1)[0]
            || num_shared(visible, query - 1) == 0;
        if begins {
            starts[count] = query as u32;
            count += 1;
        }
    }
    starts[count] = queries as u32;
    &starts[..=count]
}

/// Returns the strips in a query's first range, where a later one holds its own key.
fn num_shared(visible: &Visible, query: usize) -> usize {
    match visible.ranges(query) {
        [first, others @ ..] if others.iter().any(|range| !range.is_empty()) => first.len() / KEYS,
        _ => 0,
    }
}

vector_kernel! {
    /// Computes the queries of a task for its key/value head. No other task writes them; `memory` has room
    /// for [`Decode::task`].
    unsafe fn decode_group<V: Vector, E: Element>(call: &Decode<'_, E>, task: usize, memory: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { call.task::<V>(task, memory) }
    }
}

/// Addresses of a strip's keys and values.
type Addresses<E> = [[*const E; KEYS]; 2];

/// Rows of a task: the heads of its queries.
struct State<'a> {
    q: &'a mut [f32],
    out: &'a mut [f32],
    k_across: &'a mut [f32],
    scores: &'a mut [f32],
    largest: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<E: Element> Decode<'_, E> {
    /// Returns the number of positions that a query sees or that its window hides.
    fn end(&self, query: usize) -> usize {
        self.visible.ranges(query).iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns the number of positions that a query's window hides.
    pub(super) fn hidden(&self, query: usize) -> usize {
        self.shape.window.map_or(0, |window| self.end(query).saturating_sub(window as usize))
    }

    /// Lists the strips that a query sees.
    pub(super) fn strips(&self, query: usize) -> impl Iterator<Item = Range<usize>> {
        let (visible, end) = (self.visible.ranges(query), self.end(query));
        let own = visible.iter().rfind(|range| !range.is_empty()).map_or(0, ExactSizeIterator::len);
        strips(block_start(self.shape, end - own, end - 1), end, self.shape, &self.layout)
    }

    /// Lists ranges of the cache rows of some positions among those that a query sees.
    fn ranges(&self, query: usize, positions: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut before = 0;
        self.visible.ranges(query).iter().filter_map(move |range| {
            let (first, end) = (before, before + range.len());
            before = end;
            let (start, end) = (positions.start.max(first), positions.end.min(end));
            let row = range.start as usize;
            (start < end).then(|| row + start - first..row + end - first)
        })
    }

    /// Writes the cache rows of some positions among those that a query sees.
    pub(super) fn cache_rows(&self, query: usize, positions: &Range<usize>, rows: &mut [u32]) {
        let found = self.ranges(query, positions).flatten();
        rows.iter_mut().zip(found).for_each(|(row, found)| *row = found as u32);
    }

    /// Writes the addresses of a strip's keys and values, the last ones again behind them.
    fn addresses(&self, query: usize, kv_head: usize, strip: &Range<usize>, to: &mut Addresses<E>) {
        let mut filled = 0;
        for range in self.ranges(query, strip) {
            for (x, to) in [self.k, self.v].into_iter().zip(&mut *to) {
                let first = range.start * x.stride() + kv_head * self.layout.head_dim;
                for (i, to) in to[filled..][..range.len()].iter_mut().enumerate() {
                    *to = x.pointer_of::<E>().wrapping_add(first + i * x.stride());
                }
            }
            filled += range.len();
        }
        for to in to {
            let last = to[filled - 1];
            to[filled..].fill(last);
        }
    }

    /// Prefetches a strip's keys and values: cache rows of a head are too far apart for the hardware.
    fn prefetch(&self, query: usize, kv_head: usize, strip: &Range<usize>) {
        let mut addresses = [[std::ptr::null(); KEYS]; 2];
        self.addresses(query, kv_head, strip, &mut addresses);
        let bytes = self.layout.head_dim * size_of::<E>();
        prefetch_rows(&addresses, 0..strip.len(), 0..bytes);
    }

    /// Returns the queries of a task and its key/value head.
    pub(super) fn of_task(&self, task: usize) -> (Range<usize>, usize) {
        let (index, kv_head) = (task / self.shape.kv_heads, task % self.shape.kv_heads);
        (self.starts[index] as usize..self.starts[index + 1] as usize, kv_head)
    }

    /// Returns query, key/value head and first strip of the task that this thread probably has next.
    fn after(&self, task: usize) -> Option<(usize, usize, Range<usize>)> {
        let task = task + self.threads;
        if task / self.shape.kv_heads + 1 >= self.starts.len() {
            return None;
        }
        let (queries, kv_head) = self.of_task(task);
        self.strips(queries.start).next().map(|strip| (queries.start, kv_head, strip))
    }

    /// Prefetches the next strip of a query, or after the last the first one of the next task.
    pub(super) fn prefetch_after(&self, task: usize, query: usize, next: Option<&Range<usize>>) {
        if let Some(next) = next {
            self.prefetch(query, task % self.shape.kv_heads, next);
        } else if let Some((query, kv_head, strip)) = self.after(task) {
            self.prefetch(query, kv_head, &strip);
        }
    }

    /// Computes a task.
    ///
    /// # Safety
    /// As [`decode_group`]; the CPU has V.
    #[inline(always)]
    unsafe fn task<V: Vector>(&self, task: usize, mut memory: &mut [f32]) {
        let (queries, kv_head) = self.of_task(task);
        let Layout { group, width, .. } = self.layout;
        let rows = queries.len() * group;
        let [q, out] = [(); 2].map(|()| take(&mut memory, rows * width));
        let k_across = take(&mut memory, KEYS * width);
        let scores = take(&mut memory, KEYS * rows);
        let [largest, sum] = [(); 2].map(|()| take(&mut memory, rows));
        largest.fill(LOWEST);
        sum.fill(0.0);
        out.fill(0.0);
        let mut state = State { q, out, k_across, scores, largest, sum };
        let shared = if queries.len() > 1 { num_shared(self.visible, queries.start) } else { 0 };
        let together = (0..shared).map(|index| (queries.start, 0..rows, index * KEYS..(index + 1) * KEYS));
        let own = queries.clone().enumerate().flat_map(|(index, query)| {
            let rows = index * group..(index + 1) * group;
            self.strips(query).skip(shared).map(move |strip| (query, rows.clone(), strip))
        });
        let mut strips = together.chain(own).enumerate().peekable();
        let [mut now, mut next] = [[[std::ptr::null(); KEYS]; 2]; 2];
        // SAFETY: the sizes are those just taken; the parts of the output belong to this task alone; the caller has V.
        unsafe {
            for (index, query) in queries.clone().enumerate() {
                let to = state.q.as_mut_ptr().add(index * group * width);
                pack::<V, E>(self.q, self.heads(query, kv_head), &self.layout, to);
            }
            if let Some((_, (query, _, strip))) = strips.peek() {
                self.addresses(*query, kv_head, strip, &mut now);
            }
            while let Some((index, (query, rows, strip))) = strips.next() {
                let ahead = match strips.peek() {
                    Some((_, (query, _, strip))) => Some((*query, kv_head, strip.clone())),
                    None => self.after(task),
                };
                let ahead = match ahead {
                    Some((query, kv_head, strip)) => {
                        self.addresses(query, kv_head, &strip, &mut next);
                        (&next, strip.len())
                    }
                    None => (&now, 0),
                };
                // Of a window, there is one query.
                let hidden = self.hidden(query).saturating_sub(strip.start).min(strip.len());
                self.strip::<V>(&mut state, rows.clone(), &now, strip.len(), hidden, ahead);
                let is_last = strips.peek().is_none_or(|(_, (next, ..))| *next != query);
                if index >= shared && is_last {
                    let out = &state.out[rows.start * width..rows.end * width];
                    self.finish::<V>(query, kv_head, out, &state.sum[rows]);
                }
                std::mem::swap(&mut now, &mut next);
            }
        }
    }

    /// Adds a strip of `keys` keys, of which the first `hidden` are not seen, to rows, and prefetches those `ahead`.
    #[inline(always)]
    unsafe fn strip<V: Vector>(
        &self,
        state: &mut State,
        rows: Range<usize>,
        [k, v]: &Addresses<E>,
        keys: usize,
        hidden: usize,
        ahead: (&Addresses<E>, usize),
    ) {
        let (first, count) = (rows.start, rows.len());
        let Layout { head_dim, width, .. } = self.layout;
        let factor = Scores::new(self.shape);
        let padded = keys.next_multiple_of(V::LANES);
        let scores = &mut state.scores[..count * padded];
        let (largest, sum) = (&mut state.largest[first..][..count], &mut state.sum[first..][..count]);
        let out = &mut state.out[first * width..][..count * width];
        // SAFETY: the caller's promise.
        unsafe {
            transpose_rows::<V, E>(&k[..keys], head_dim, state.k_across.as_mut_ptr(), ahead);
            let across = (state.k_across.as_ptr(), padded);
            let q = Strided { pointer: state.q.as_ptr().add(first * width), row: width, col: 1 };
            V::multiply([count, padded, head_dim], q, across, (scores.as_mut_ptr(), padded), false);
            factor.soften::<V>(scores);
            for row in 0..count {
                let scores = &mut scores[row * padded..][..keys];
                scores[..hidden].fill(f32::NEG_INFINITY);
                let shrink = normalize_row::<V>(scores, factor.scale, &mut largest[row]);
                sum[row] *= shrink;
                if shrink != 1.0 {
                    out[row * width..][..width].iter_mut().for_each(|x| *x *= shrink);
                }
            }
            add_sums(scores, (keys, padded), sum);
            let weights = (scores.as_ptr(), padded);
            add_rows::<V, E>(count, weights, &v[..keys], head_dim, (out.as_mut_ptr(), width));
        }
    }

    /// Divides by the sums and writes the results.
    ///
    /// # Safety
    /// No other task writes them; the CPU has V.
    #[inline(always)]
    pub(super) unsafe fn finish<V: Vector>(&self, query: usize, kv_head: usize, out: &[f32], sum: &[f32]) {
        let Layout { head_dim, width, .. } = self.layout;
        for (head, (row, column)) in self.heads(query, kv_head).enumerate() {
            // SAFETY: the caller's promise; rows of `out` hold the width.
            unsafe {
                let (from, to) = (out.as_ptr().add(head * width), self.out.part(row, column, head_dim));
                let factor = V::splat(1.0 / sum[head]);
                for_lanes!(V, head_dim, |c, n| {
                    V::load(from.add(c), n).mul(factor).put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }

    /// Lists row and first column of a query's heads that share a key/value head.
    pub(super) fn heads(&self, query: usize, kv_head: usize) -> impl Iterator<Item = (usize, usize)> {
        let Layout { group, head_dim, .. } = self.layout;
        (kv_head * group..(kv_head + 1) * group).map(move |head| (query, head * head_dim))
    }
}

/// Computes `to[cols, rows] = fromᵀ`, widened, of rows at these addresses. Rows are filled up to a multiple of the
/// register's width with the last. As many rows `ahead` are prefetched meanwhile, and then the rest of them.
///
/// # Safety
/// There is a row; rows have `cols` elements; `to` has room for the filled rows; the CPU has V.
#[inline(always)]
unsafe fn transpose_rows<V: Vector, E: Element>(
    rows: &[*const E],
    cols: usize,
    to: *mut f32,
    (ahead, num_ahead): (&Addresses<E>, usize),
) {
    let filled = rows.len().next_multiple_of(V::LANES);
    let last = rows.len() - 1;
    for first in (0..filled).step_by(V::LANES) {
        let mut starts = [std::ptr::null(); 16];
        for i in 0..V::LANES {
            starts[i] = rows[last.min(first + i)];
        }
        for col in (0..cols).step_by(V::LANES) {
            let count = V::LANES.min(cols - col);
            let byte = col * size_of::<E>();
            if byte.is_multiple_of(LINE) {
                prefetch_rows(ahead, first..first + V::LANES, byte..byte + 1);
            }
            // SAFETY: `count` elements of each row are read, and `count` rows of `to` written.
            unsafe {
                let mut square = [V::splat(0.0); 16];
                if count == V::LANES {
                    for i in 0..V::LANES {
                        square[i] = V::get(starts[i].add(col), V::LANES);
                    }
                } else {
                    for i in 0..V::LANES {
                        square[i] = V::get(starts[i].add(col), count);
                    }
                }
                V::transpose(&mut square);
                for i in 0..V::LANES {
                    if i < count {
                        square[i].store(to.add((col + i) * filled + first), V::LANES);
                    }
                }
            }
        }
    }
    prefetch_rows(ahead, filled..num_ahead, 0..cols * size_of::<E>());
}

/// Prefetches bytes of some keys and values.
#[inline(always)]
fn prefetch_rows<E>([k, v]: &Addresses<E>, rows: Range<usize>, bytes: Range<usize>) {
    for row in rows {
        for start in [k[row], v[row]] {
            for byte in bytes.clone().step_by(LINE) {
                prefetch_far(start.cast::<u8>().wrapping_add(byte));
            }
        }
    }
}

/// Normalises the scores of one row as [`super::forward::normalize`], but for their sum. Returns the factor of what was
/// summed before.
#[inline(always)]
unsafe fn normalize_row<V: Vector>(scores: &mut [f32], scale: f32, largest: &mut f32) -> f32 {
    // SAFETY: `for_lanes` stays inside the slice; the caller has V.
    unsafe {
        let mut most = V::splat(*largest);
        for_lanes!(V, scores.len(), |i, n| {
            let score = V::load(scores.as_ptr().add(i), n);
            // A score that is not a number is no largest one.
            most = if n < V::LANES { score.keep_first(n, f32::NEG_INFINITY) } else { score }.max(most);
        });
        let now = most.largest();
        let (of_now, of_scale) = (V::splat(now), V::splat(scale));
        let mut shrink = 0.0;
        exp(V::splat(*largest).sub(of_now).mul(of_scale)).store(&mut shrink, 1);
        for_lanes!(V, scores.len(), |i, n| {
            let at = scores.as_mut_ptr().add(i);
            exp(V::load(at, n).sub(of_now).mul(of_scale)).store(at, n);
        });
        *largest = now;
        shrink
    }
}

/// Adds the weights of each row of scores to its sum, one after another. Rows take turns: each addition of a row waits
/// for the one before it.
fn add_sums(scores: &[f32], (keys, stride): (usize, usize), sums: &mut [f32]) {
    const ROWS: usize = 4;
    let (sums, rest) = sums.as_chunks_mut::<ROWS>();
    for (index, sums) in sums.iter_mut().enumerate() {
        let rows: [&[f32]; ROWS] =
            std::array::from_fn(|row| &scores[(index * ROWS + row) * stride..][..keys]);
        for key in 0..keys {
            for row in 0..ROWS {
                sums[row] += rows[row][key];
            }
        }
    }
    let first = sums.len() * ROWS;
    for key in 0..keys {
        for (row, sum) in rest.iter_mut().enumerate() {
            *sum += scores[(first + row) * stride + key];
        }
    }
}

/// Computes `c[m, cols] += a[m, k] · b`, of `k` rows of `b` at these addresses. Sums begin at zero.
///
/// # Safety
/// Rows have `cols` elements, and those of `c` as many, filled up to a multiple of the register's width; the CPU has V.
#[inline(always)]
unsafe fn add_rows<V: Vector, E: Element>(
    m: usize,
    a: (*const f32, usize),
    b: &[*const E],
    cols: usize,
    c: (*mut f32, usize),
) {
    let mut col = 0;
    while col < cols {
        let registers = (cols - col) / V::LANES;
        // SAFETY: these columns exist.
        unsafe {
            if V::REGISTERS >= 32 && registers >= 4 {
                add_panel::<V, E, 4>(m, a, b, (col, V::LANES), c);
                col += 4 * V::LANES;
            } else if registers >= 2 {
                add_panel::<V, E, 2>(m, a, b, (col, V::LANES), c);
                col += 2 * V::LANES;
            } else {
                let count = V::LANES.min(cols - col);
                add_panel::<V, E, 1>(m, a, b, (col, count), c);
                col += V::LANES;
            }
        }
    }
}

/// Computes all rows of `N` registers of columns, `count` elements each.
#[inline(always)]
unsafe fn add_panel<V: Vector, E: Element, const N: usize>(
    m: usize,
    (a, a_row): (*const f32, usize),
    b: &[*const E],
    cols: (usize, usize),
    (c, c_row): (*mut f32, usize),
) {
    let mut i = 0;
    while i < m {
        // SAFETY: rows i and following exist, as many as each block takes.
        unsafe {
            let (a, c) = ((a.add(i * a_row), a_row), (c.add(i * c_row), c_row));
            i += match m - i {
                6.. => add_block::<V, E, 6, N>(a, b, cols, c),
                4 => add_block::<V, E, 4, N>(a, b, cols, c),
                3 | 5 => add_block::<V, E, 3, N>(a, b, cols, c),
                2 => add_block::<V, E, 2, N>(a, b, cols, c),
                _ => add_block::<V, E, 1, N>(a, b, cols, c),
            };
        }
    }
}

/// Computes `M` rows of `N` registers of columns, held in registers; returns `M`.
#[inline(always)]
unsafe fn add_block<V: Vector, E: Element, const M: usize, const N: usize>(
    (a, a_row): (*const f32, usize),
    b: &[*const E],
    (col, count): (usize, usize),
    (c, c_row): (*mut f32, usize),
) -> usize {
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        for (p, &b) in b.iter().enumerate() {
            let mut row = [V::splat(0.0); N];
            for j in 0..N {
                row[j] = match N {
                    1 => V::get(b.add(col), count),
                    _ => V::get(b.add(col + j * V::LANES), V::LANES),
                };
            }
            for i in 0..M {
                let factor = V::splat(*a.add(i * a_row + p));
                for j in 0..N {
                    sums[i][j] = factor.mul_add(row[j], sums[i][j]);
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                let to = c.add(i * c_row + col + j * V::LANES);
                sums[i][j].add(V::load(to, V::LANES)).store(to, V::LANES);
            }
        }
    }
    M
}
