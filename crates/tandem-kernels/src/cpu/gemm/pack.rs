//! Packing of a factor into panels, in the order of the micro-kernel.

use std::ops::Range;

use super::Operand;
use super::kernel::Panels;
use super::lanes::{Lanes, MOST_LANES, Rows};
use crate::cpu::prefetch::{prefetch, prefetch_far};
use crate::{Element, bf16};

/// Evaluates an expression with the conversion of elements of a type to lanes of so many of them.
macro_rules! with_packing {
    ($of:expr, $P:ident => $expression:expr) => {
        match $of {
            ($crate::DType::F32, _) => {
                type $P = $crate::cpu::gemm::pack::Whole;
                $expression
            }
            ($crate::DType::Bf16, 1) => {
                type $P = $crate::cpu::gemm::pack::Widened;
                $expression
            }
            ($crate::DType::Bf16, _) => {
                type $P = $crate::cpu::gemm::pack::Paired;
                $expression
            }
        }
    };
}
pub(super) use with_packing;

/// Packs panels of lanes of `depth` elements each.
///
/// # Safety
/// The caller is compiled for the vector's level and runs where it exists; `to` has room for the
/// panels.
#[inline(always)]
pub(super) unsafe fn pack<V: Lanes, const W: usize>(panels: Panels, depth: usize) {
    // SAFETY: the caller's promise.
    unsafe { with_packing!((panels.source.dtype(), depth), P => pack_as::<V, W, P>(panels)) }
}

#[inline(always)]
unsafe fn pack_as<V: Lanes, const W: usize, P: Packing>(panels: Panels) {
    let elements = panels.elements(P::DEPTH);
    let Panels { source, rows, to, stride, is_in_cache, .. } = panels;
    // SAFETY: rows and elements lie inside the operand; the caller promises the room.
    unsafe {
        if source.is_transposed() {
            from_columns::<V, W, P>(source, rows, elements, to, stride);
        } else {
            from_rows::<V, W, P>(source, rows, elements, to, stride, is_in_cache);
        }
    }
}

/// Conversion of elements to lanes.
pub(super) trait Packing {
    type Element: Element;
    /// Elements per 32-bit read along k.
    const READ: usize;
    /// Lanes per 32-bit read.
    const LANES: usize;
    /// Elements along k per lane.
    const DEPTH: usize;

    /// Returns the lanes of one vector of 32-bit reads, of which `LANES` count.
    #[inline(always)]
    fn lanes_of<V: Lanes>(column: V) -> [V; 2] {
        [column; 2]
    }
    /// Stores the lanes of one vector of 32-bit reads, `W` apart.
    #[inline(always)]
    unsafe fn store<V: Lanes, const W: usize>(column: V, to: *mut f32, count: usize) {
        for (lane, lanes) in Self::lanes_of(column).into_iter().take(Self::LANES).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { lanes.store(to.add(lane * W), count) };
        }
    }
    /// Returns one lane from `DEPTH` elements `stride` apart, of which `count` exist.
    #[inline(always)]
    unsafe fn lane(from: *const Self::Element, _stride: usize, _count: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *from }.to_f32()
    }
    /// Returns one vector of lanes from adjacent elements, the next along k `stride` further.
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(from: *const Self::Element, _stride: usize, _count: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::get(from, V::LANES) }
    }
}

/// f32 unchanged.
pub(super) struct Whole;

impl Packing for Whole {
    type Element = f32;
    const READ: usize = 1;
    const LANES: usize = 1;
    const DEPTH: usize = 1;
}

/// bf16 widened to f32.
pub(super) struct Widened;

impl Packing for Widened {
    type Element = bf16;
    const READ: usize = 2;
    const LANES: usize = 2;
    const DEPTH: usize = 1;

    #[inline(always)]
    fn lanes_of<V: Lanes>(column: V) -> [V; 2] {
        [column.first_of_pairs(), column.second_of_pairs()]
    }
}

/// Pairs of bf16.
pub(super) struct Paired;

impl Packing for Paired {
    type Element = bf16;
    const READ: usize = 2;
    const LANES: usize = 1;
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn lane(from: *const bf16, stride: usize, count: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let second = if count > 1 { from.add(stride).read().to_bits() } else { 0 };
            f32::from_bits(u32::from(from.read().to_bits()) | u32::from(second) << 16)
        }
    }
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(from: *const bf16, stride: usize, count: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            let first = V::load_bf16(from, V::LANES);
            let second = if count > 1 { V::load_bf16(from.add(stride), V::LANES) } else { V::splat(0.0) };
            first.pair_with(second)
        }
    }
}

/// Bytes between rows of which 16 have eight places or fewer in a first-level cache of 64 sets of eight.
const FEW_PLACES: usize = 1 << 11;

/// Packs elements that are neighbours along k: a transposition of 32-bit reads.
#[inline(always)]
unsafe fn from_rows<V: Lanes, const W: usize, P: Packing>(
    source: &Operand,
    rows: Range<usize>,
    elements: Range<usize>,
    to: *mut f32,
    panel_stride: usize,
    is_in_cache: bool,
) {
    let last = rows.len() - 1;
    // The next panel may belong to another call.
    let last_ahead = source.rows() - rows.start - 1;
    let stride = source.stride();
    // Four reads of each row at a time; the rest one lane at a time. Rows that share few places of the cache
    // are read in squares, which take whole lines.
    let [square, step] = [V::LANES * P::READ, 4 * P::READ];
    let [squares, whole] = [square, step].map(|step| elements.len() / step * step);
    let share_places = (stride * size_of::<P::Element>()).is_multiple_of(FEW_PLACES);
    let squares = if share_places { squares } else { 0 };
    // SAFETY: rows beyond the last one are read from the last one, so every address lies inside the
    // operand.
    unsafe {
        let base = source.pointer::<P::Element>().add(rows.start * stride + elements.start);
        for (panel, first) in (0..rows.len()).step_by(W).enumerate() {
            let to = to.add(panel * panel_stride);
            for part in (0..W).step_by(V::LANES) {
                let count = V::LANES.min(W - part);
                let mut starts: Rows = [std::ptr::null(); MOST_LANES];
                for i in 0..V::LANES {
                    starts[i] = base.add((first + part + i).min(last) * stride).cast();
                }
                let mut to = to.add(part);
                for k in (0..squares).step_by(square) {
                    let mut columns = [V::splat(0.0); 16];
                    for i in 0..V::LANES {
                        if !is_in_cache {
                            let row = (first + W + part + i).min(last_ahead);
                            prefetch_far(base.wrapping_add(row * stride + k).cast());
                        }
                        columns[i] = V::load(starts[i].cast::<P::Element>().add(k).cast(), V::LANES);
                    }
                    V::transpose(&mut columns);
                    for i in 0..V::LANES {
                        P::store::<V, W>(columns[i], to, count);
                        to = to.add(P::LANES * W);
                    }
                }
                for k in (squares..whole).step_by(step) {
                    // Prefetches the next panel's lines, each once: four steps cross a line, so
                    // each step takes a quarter of the rows.
                    if !is_in_cache {
                        for i in 0..V::LANES / 4 {
                            let row = first + W + part + k / step % 4 * (V::LANES / 4) + i;
                            prefetch_far(base.wrapping_add(row.min(last_ahead) * stride + k).cast());
                        }
                    }
                    let offset = k * size_of::<P::Element>();
                    for column in V::load_columns(&starts, offset) {
                        P::store::<V, W>(column, to, count);
                        to = to.add(P::LANES * W);
                    }
                }
                for k in (whole..elements.len()).step_by(P::DEPTH) {
                    for i in 0..count {
                        let from = starts[i].cast::<P::Element>().add(k);
                        *to.add(i) = P::lane(from, 1, elements.len() - k);
                    }
                    to = to.add(W);
                }
            }
        }
    }
}

/// Prefetch distance of a copy, in elements along k.
const AHEAD: usize = 8;

/// Packs rows that are neighbours in memory: a copy, all panels of one lane after another.
#[inline(always)]
unsafe fn from_columns<V: Lanes, const W: usize, P: Packing>(
    source: &Operand,
    rows: Range<usize>,
    elements: Range<usize>,
    to: *mut f32,
    panel_stride: usize,
) {
    let stride = source.stride();
    // The vectors of a panel may reach beyond it, but not beyond the operand's last row.
    let reach = W.next_multiple_of(V::LANES);
    let readable = source.rows() - rows.start;
    // SAFETY: every address read lies inside the operand: whole vectors are read only where the row
    // goes on.
    unsafe {
        let base = source.pointer::<P::Element>().add(elements.start * stride + rows.start);
        for (lane, k) in (0..elements.len()).step_by(P::DEPTH).enumerate() {
            let (from, count) = (base.add(k * stride), elements.len() - k);
            // Rows are too far apart for the hardware prefetcher.
            for line in (0..rows.len()).step_by(64 / size_of::<P::Element>()) {
                prefetch(from.wrapping_add(AHEAD * stride + line).cast());
            }
            for panel in 0..rows.len().div_ceil(W) {
                let (from, to) = (from.add(panel * W), to.add(panel * panel_stride + lane * W));
                let is_whole = (panel + 1) * W <= rows.len() && panel * W + reach <= readable;
                if is_whole {
                    for part in (0..W).step_by(V::LANES) {
                        let lanes = P::lanes::<V>(from.add(part), stride, count);
                        lanes.store(to.add(part), V::LANES.min(W - part));
                    }
                } else {
                    for i in 0..W.min(rows.len() - panel * W) {
                        *to.add(i) = P::lane(from.add(i), stride, count);
                    }
                }
            }
        }
    }
}
