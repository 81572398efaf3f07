//! GEMMs with one dimension as short as an adapter's rank: limited by reading, or reading and
//! writing, the one large matrix.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::skinny_tiles;
use super::{Operand, Product, Term};
use crate::cpu::prefetch::prefetch;
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::Strided;
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, Isa, scratch};
use crate::ops::gemm::Sharded;
use crate::{DType, Element, with_element};

/// Longest short dimension; beyond it arithmetic dominates.
const LONGEST: usize = 32;

/// [`LONGEST`] for bf16 dot products: only sums across rows beat packing.
const LONGEST_OF_PAIRS: usize = 16;

/// [`LONGEST`] for bf16 on tile registers.
const LONGEST_ON_TILES: usize = 64;

/// Lanes of the widest register: packed rows are a multiple of it.
const LANES: usize = 16;

/// Elements along k per partial sum.
const DEPTH: usize = 256;

/// Short dimension of a GEMM.
#[derive(Clone, Copy)]
pub(super) enum SkinnyAxis {
    /// k: each row of the result combines a few rows of the second factor.
    Depth,
    /// Columns of the result: a few dot products per row.
    Columns,
    /// Rows of the result (or its columns, if `is_turned`), for factors whose rows run across k.
    Rows { is_turned: bool },
}

impl SkinnyAxis {
    /// Returns the dimension that is short, if one is.
    pub(super) fn choose(isa: Isa, product: &Product) -> Option<Self> {
        let (m, n) = product.c.shape();
        let k = product.a.depth();
        let (a, b) = (product.a.is_transposed(), product.b.is_transposed());
        // A sharded dimension may be short on one rank and long on another.
        let sharded = product.sharded;
        if sharded == Sharded::Any || product.bias.is_some() || product.residual.is_some() || k == 0 {
            return None;
        }
        let of_pairs = product.a.dtype() == DType::Bf16 && isa >= Isa::Avx512Bf16;
        let longest = match (a, of_pairs) {
            (_, false) => LONGEST,
            #[cfg(target_arch = "x86_64")]
            (false, true) if isa.has_tiles_of(product.a.dtype()) => {
                let is_short = n <= LONGEST_ON_TILES && n < k && skinny_tiles::projects(product);
                return is_short.then_some(Self::Columns);
            }
            (true, true) if isa.has_tiles_of(product.a.dtype()) && sharded != Sharded::No => LONGEST_ON_TILES,
            (true, true) if isa.has_tiles_of(product.a.dtype()) => {
                LONGEST_ON_TILES.min((m.max(n) / 2).max(1))
            }
            (true, true) => LONGEST_OF_PAIRS,
            (false, true) => return None,
        };
        match (a, b) {
            (false, _) if k <= longest => Some(Self::Depth),
            (false, _) if n <= longest => Some(Self::Columns),
            (true, true) if m <= longest && sharded != Sharded::Rows => Some(Self::Rows { is_turned: false }),
            (true, true) if n <= longest && sharded != Sharded::Columns => {
                Some(Self::Rows { is_turned: true })
            }
            _ => None,
        }
    }
}

/// Computes `product`, of which this dimension is short. A second pair of factors runs as a GEMM of its own; if
/// it is zero, it leaves the bits.
pub(super) fn run(cpu: &Cpu, mut product: Product, short: SkinnyAxis) {
    with_element!(product.a.dtype(), E => with_element!(product.c.dtype(), C => match short {
        SkinnyAxis::Depth => expand::<E, C>(cpu, &mut product),
        #[cfg(target_arch = "x86_64")]
        SkinnyAxis::Columns if cpu.isa().has_tiles_of(product.a.dtype()) => skinny_tiles::project::<C>(cpu, &mut product),
        SkinnyAxis::Columns => project::<E, C>(cpu, &mut product),
        SkinnyAxis::Rows { is_turned } => reduce::<E, C>(cpu, &mut product, is_turned),
    }));
    if let Some(Term { a, b }) = product.term {
        Product::plain(a, b, product.c, true).run(cpu);
    }
}

/// Copies the operand as f32 `[k, rows]` into `to`, rows padded with zeros to a multiple of
/// [`LANES`].
fn pack<E: Element>(cpu: &Cpu, operand: &Operand, to: &mut [f32]) {
    /// Elements of a block.
    const BLOCK: usize = 1 << 12;
    let (rows, depth, stride) = (operand.rows(), operand.depth(), operand.stride());
    let width = rows.next_multiple_of(LANES);
    let from = Address(operand.pointer::<E>());
    let to = RowsMut::from_slice(to);
    // Blocks of rows if there are many, else of k.
    let (block_rows, block_depth) = if rows > depth {
        ((BLOCK / depth).next_multiple_of(LANES), depth)
    } else {
        (width, (BLOCK / width).max(1))
    };
    let pieces = depth.div_ceil(block_depth);
    cpu.parallel_for(rows.div_ceil(block_rows) * pieces, |block| {
        let (row, k) = (block / pieces * block_rows, block % pieces * block_depth);
        let (columns, count) = (block_rows.min(width - row), block_rows.min(rows - row));
        for k in k..depth.min(k + block_depth) {
            // SAFETY: blocks are disjoint; the elements lie inside the operand.
            unsafe {
                let to = to.part(0, k * width + row, columns);
                let from = from.get();
                if operand.is_transposed() {
                    let from = std::slice::from_raw_parts(from.add(k * stride + row), count);
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
                } else {
                    for i in 0..count {
                        to[i] = (*from.add((row + i) * stride + k)).to_f32();
                    }
                }
                to[count..].fill(0.0);
            }
        }
    });
}

/// Memory that blocks read.
#[derive(Clone, Copy)]
struct Address<E>(*const E);

// SAFETY: it is only read.
unsafe impl<E> Send for Address<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Address<E> {}

impl<E: Copy> Address<E> {
    // A method, so that closures capture the shareable struct and not the pointer in it.
    fn get(self) -> *const E {
        self.0
    }
}

/// Computes `c[m, n] (+)= a[m, k] · b[n, k]ᵀ` with a short k.
fn expand<E: Element, C: Element>(cpu: &Cpu, product: &mut Product) {
    /// Rows and columns of a block.
    const ROWS: usize = 24;
    const COLUMNS: usize = 1024;
    let ((m, n), k) = (product.c.shape(), product.a.depth());
    let (width, pieces) = (n.next_multiple_of(LANES), n.div_ceil(COLUMNS));
    let a = Address(product.a.pointer::<E>());
    let (right, stride, accumulate) = (product.b, product.a.stride(), product.accumulate);
    let c = RowsMut::<C>::new(product.c.reborrow());
    scratch::with_f32(k * width, |b| {
        pack::<E>(cpu, &right, b);
        let b = Address(b.as_ptr());
        cpu.parallel_for(m.div_ceil(ROWS) * pieces, |block| {
            let (row, column) = (block / pieces * ROWS, block % pieces * COLUMNS);
            let (rows, columns) = (row..m.min(row + ROWS), column..n.min(column + COLUMNS));
            scratch::with_f32(rows.len() * (k + COLUMNS), |buffer| {
                // SAFETY: the level is this CPU's; blocks are disjoint parts of the result.
                unsafe {
                    let a = (a.get().add(row * stride), stride);
                    expand_block::<E, C>(
                        cpu.isa(),
                        k,
                        a,
                        (b.get().add(column), width),
                        &c,
                        rows,
                        columns,
                        accumulate,
                        buffer,
                    );
                }
            });
        });
    });
}

vector_kernel! {
    /// Computes a block. `a` is the first row; `b` begins at the first column and has a multiple of
    /// [`LANES`] columns; `buffer` has room for the rows of `a` and of the result.
    unsafe fn expand_block<V: Vector, E: Element, C: Element>(
        k: usize,
        a: (*const E, usize),
        b: (*const f32, usize),
        c: &RowsMut<C>,
        rows: Range<usize>,
        columns: Range<usize>,
        accumulate: bool,
        buffer: &mut [f32],
    ) {
        let width = columns.len().next_multiple_of(V::LANES);
        let (left, sums) = buffer.split_at_mut(rows.len() * k);
        // SAFETY: the caller's promise.
        unsafe {
            copy::<V, E>(a, [rows.len(), k], (left.as_mut_ptr(), k));
            let left = Strided { pointer: left.as_ptr(), row: k, col: 1 };
            if C::DTYPE == DType::F32 && width == columns.len() {
                let (to, stride) = c.address(rows.start, columns.start);
                V::multiply([rows.len(), width, k], left, b, (to.cast(), stride), accumulate);
                return;
            }
            if accumulate {
                for (i, row) in rows.clone().enumerate() {
                    let from = c.part(row, columns.start, columns.len()).as_ptr();
                    copy::<V, C>((from, 0), [1, columns.len()], (sums.as_mut_ptr().add(i * width), 0));
                }
            }
            V::multiply([rows.len(), width, k], left, b, (sums.as_mut_ptr(), width), accumulate);
            for (i, row) in rows.enumerate() {
                let to = c.part(row, columns.start, columns.len());
                let from = sums.as_ptr().add(i * width);
                for_lanes!(V, to.len(), |j, count| {
                    V::load(from.add(j), count).put(to.as_mut_ptr().add(j), count);
                });
            }
        }
    }
}

/// Widens a matrix; addresses come with their row strides.
///
/// # Safety
/// Both hold the shape's elements, and the CPU has V.
#[inline(always)]
unsafe fn copy<V: Vector, E: Element>(
    from: (*const E, usize),
    [rows, cols]: [usize; 2],
    to: (*mut f32, usize),
) {
    for i in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            let (from, to) = (from.0.add(i * from.1), to.0.add(i * to.1));
            for_lanes!(V, cols, |j, count| {
                V::get(from.add(j), count).store(to.add(j), count);
            });
        }
    }
}

/// Computes `c[m, n] (+)= a[m, k] · b[n, k]ᵀ` with a short n.
fn project<E: Element, C: Element>(cpu: &Cpu, product: &mut Product) {
    const ROWS: usize = 24;
    let ((m, n), k) = (product.c.shape(), product.a.depth());
    let width = n.next_multiple_of(LANES);
    let a = Address(product.a.pointer::<E>());
    let (right, stride, accumulate) = (product.b, product.a.stride(), product.accumulate);
    let c = RowsMut::<C>::new(product.c.reborrow());
    scratch::with_f32(k * width, |b| {
        pack::<E>(cpu, &right, b);
        let b = Address(b.as_ptr());
        cpu.parallel_ranges(m, ROWS, |_, rows| {
            scratch::with_f32(rows.len() * (DEPTH + width), |buffer| {
                // SAFETY: the level is this CPU's; blocks are disjoint rows of the result.
                unsafe {
                    let a = (a.get().add(rows.start * stride), stride);
                    project_rows::<E, C>(cpu.isa(), k, a, b.get(), &c, rows, n, accumulate, buffer);
                }
            });
        });
    });
}

vector_kernel! {
    /// Computes a block of rows. `a` is the first row; `b` has a multiple of [`LANES`] columns;
    /// `buffer` has room for a block of `a` and as many columns of the result.
    unsafe fn project_rows<V: Vector, E: Element, C: Element>(
        k: usize,
        a: (*const E, usize),
        b: *const f32,
        c: &RowsMut<C>,
        rows: Range<usize>,
        n: usize,
        accumulate: bool,
        buffer: &mut [f32],
    ) {
        let width = n.next_multiple_of(LANES);
        let (block, sums) = buffer.split_at_mut(rows.len() * DEPTH);
        let sums = sums.as_mut_ptr();
        // SAFETY: the caller's promise.
        unsafe {
            for start in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - start);
                let from = a.0.add(start);
                let left = if E::DTYPE == DType::F32 {
                    Strided { pointer: from.cast(), row: a.1, col: 1 }
                } else {
                    copy::<V, E>((from, a.1), [rows.len(), depth], (block.as_mut_ptr(), DEPTH));
                    Strided { pointer: block.as_ptr(), row: DEPTH, col: 1 }
                };
                let right = (b.add(start * width), width);
                V::multiply([rows.len(), width, depth], left, right, (sums, width), start > 0);
            }
            for (i, row) in rows.enumerate() {
                let (from, to) = (sums.add(i * width), c.part(row, 0, n).as_mut_ptr());
                for_lanes!(V, n, |j, count| {
                    let mut sum = V::load(from.add(j), count);
                    if accumulate {
                        sum = sum.add(V::get(to.add(j), count));
                    }
                    sum.put(to.add(j), count);
                });
            }
        }
    }
}

/// Computes `c[m, n] (+)= aᵀ · b` of `a[k, m]` with a short m and `b[k, n]`, or the other way round
/// if `is_turned`.
fn reduce<E: Element, C: Element>(cpu: &Cpu, product: &mut Product, is_turned: bool) {
    const COLUMNS: usize = 128;
    let (short, long) = if is_turned { (product.b, product.a) } else { (product.a, product.b) };
    let accumulate = product.accumulate;
    let (r, n, k) = (short.rows(), long.rows(), short.depth());
    let on_tiles = cpu.isa().has_tiles_of(product.a.dtype());
    let (packed, work) = match on_tiles {
        #[cfg(target_arch = "x86_64")]
        true => (
            skinny_tiles::packed_len(r, k),
            skinny_tiles::pairs_len(COLUMNS) + r.next_multiple_of(crate::cpu::amx::SQUARE) * COLUMNS,
        ),
        _ => (k * r.next_multiple_of(LANES), (DEEP + r) * COLUMNS),
    };
    let from = Address(long.pointer::<E>());
    let c = RowsMut::<C>::new(product.c.reborrow());
    scratch::with_f32(packed, |a| {
        match on_tiles {
            #[cfg(target_arch = "x86_64")]
            true => skinny_tiles::pack(cpu, &short, true, a),
            _ => pack::<E>(cpu, &short, a),
        }
        let a = Address(a.as_ptr());
        cpu.parallel_ranges(n, COLUMNS, |_, columns| {
            scratch::with_f32(work, |buffer| {
                // SAFETY: the level is this CPU's; the columns exist.
                unsafe {
                    let (from, stride) = (from.get().add(columns.start), long.stride());
                    match on_tiles {
                        #[cfg(target_arch = "x86_64")]
                        true => {
                            let (from, count) = ((from.cast(), stride), columns.len());
                            skinny_tiles::reduce_columns(r, k, a.get(), from, count, COLUMNS, buffer);
                        }
                        _ => {
                            let (isa, count) = (cpu.isa(), columns.len());
                            reduce_columns::<E>(isa, r, k, a.get(), (from, stride), count, buffer);
                        }
                    }
                }
                let sums = &buffer[..r * COLUMNS];
                let count = columns.len();
                let add = |to: &mut C, sum: f32| {
                    *to = C::from_f32(if accumulate { to.to_f32() + sum } else { sum });
                };
                if is_turned {
                    for (j, row) in columns.enumerate() {
                        // SAFETY: blocks are disjoint rows of the result.
                        let to = unsafe { c.part(row, 0, r) };
                        to.iter_mut().enumerate().for_each(|(i, to)| add(to, sums[i * COLUMNS + j]));
                    }
                } else {
                    for i in 0..r {
                        // SAFETY: blocks are disjoint columns of the result.
                        let to = unsafe { c.part(i, columns.start, count) };
                        to.iter_mut().zip(&sums[i * COLUMNS..]).for_each(|(to, sum)| add(to, *sum));
                    }
                }
            });
        });
    });
}

/// Elements along k of a copied block of the long factor, which stays in the first-level cache.
const DEEP: usize = 32;

vector_kernel! {
    /// Writes the sums of `r` rows to the front of `buffer`, which has [`DEEP`] + `r` rows. `a` has
    /// a multiple of [`LANES`] columns.
    unsafe fn reduce_columns<V: Vector, E: Element>(
        r: usize,
        k: usize,
        a: *const f32,
        from: (*const E, usize),
        columns: usize,
        buffer: &mut [f32],
    ) {
        let (distance, a_width) = (buffer.len() / (DEEP + r), r.next_multiple_of(LANES));
        let (sums, block) = buffer.split_at_mut(r * distance);
        let width = columns.next_multiple_of(V::LANES);
        for start in (0..k).step_by(DEEP) {
            let depth = DEEP.min(k - start);
            // SAFETY: the caller's promise.
            unsafe {
                // Prefetches the next block, whose rows are too far apart for the hardware
                // prefetcher.
                for i in 0..depth {
                    for j in (0..columns).step_by(64 / size_of::<E>()) {
                        prefetch(from.0.wrapping_add((start + DEEP + i) * from.1 + j).cast());
                    }
                }
                copy::<V, E>((from.0.add(start * from.1), from.1), [depth, columns], (block.as_mut_ptr(), distance));
                let a = Strided { pointer: a.add(start * a_width), row: 1, col: a_width };
                let (b, c) = ((block.as_ptr(), distance), (sums.as_mut_ptr(), distance));
                V::multiply([r, width, depth], a, b, c, start > 0);
            }
        }
    }
}
