//! GEMM of a few rows and a matrix whose rows run along k, as in generation. Each element of the
//! result is a dot product; nothing is packed, and the matrix is read once.

use std::ops::Range;

use super::kernel::Add;
use super::lanes::Lanes;
use super::level::Level;
use super::{Operand, Product, Term};
use crate::cpu::Cpu;
use crate::{DType, Element, with_element};

/// Most rows; packing is faster for more.
const MOST_ROWS: usize = 16;

/// Elements of the matrix per block.
const BLOCK: usize = 1 << 14;

/// Returns whether `product` has few rows.
pub(super) fn takes(product: &Product) -> bool {
    let lie_along_k = |a: &Operand, b: &Operand| !a.is_transposed() && !b.is_transposed();
    product.a.rows() <= MOST_ROWS
        && lie_along_k(&product.a, &product.b)
        && product.term.is_none_or(|Term { a, b }| lie_along_k(&a, &b))
}

/// Computes `product`.
pub(super) fn run<L: Level>(cpu: &Cpu, product: &Product) {
    let (n, k) = (product.b.rows(), product.b.depth());
    let columns = (BLOCK / k.max(1)).clamp(8, 1024);
    cpu.parallel_for(n.div_ceil(columns), |block| {
        let range = block * columns..n.min((block + 1) * columns);
        // SAFETY: the level was chosen for this CPU; blocks are disjoint columns of the result.
        unsafe { L::few(product, range) };
    });
}

/// Computes columns `columns` of the result, `COLS` at a time.
///
/// # Safety
/// The caller is compiled for the vector's level and runs where it exists; no other task writes
/// these columns.
#[inline(always)]
pub(super) unsafe fn columns<V: Lanes, const COLS: usize>(product: &Product, columns: Range<usize>) {
    // SAFETY: the caller's promise; rows and columns lie inside the result.
    with_element!(product.a.dtype(), E => unsafe {
        let mut column = columns.start;
        while column + COLS <= columns.end {
            rows::<V, E, COLS>(product, column);
            column += COLS;
        }
        while column < columns.end {
            rows::<V, E, 1>(product, column);
            column += 1;
        }
    });
}

/// Computes all rows of `COLS` columns, four, two or one at a time: the columns' rows of the matrix
/// stay in the cache.
#[inline(always)]
unsafe fn rows<V: Lanes, E: Element, const COLS: usize>(product: &Product, column: usize) {
    let (mut row, end) = (0, product.a.rows());
    // SAFETY: the caller's promise.
    unsafe {
        while row + 4 <= end {
            tile::<V, E, 4, COLS>(product, row, column);
            row += 4;
        }
        if row + 2 <= end {
            tile::<V, E, 2, COLS>(product, row, column);
            row += 2;
        }
        if row < end {
            tile::<V, E, 1, COLS>(product, row, column);
        }
    }
}

#[inline(always)]
unsafe fn tile<V: Lanes, E: Element, const ROWS: usize, const COLS: usize>(
    product: &Product,
    row: usize,
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); COLS]; ROWS];
        add_products::<V, E, ROWS, COLS>(&product.a, &product.b, row, column, &mut sums);
        if let Some(Term { a, b }) = &product.term {
            add_products::<V, E, ROWS, COLS>(a, b, row, column, &mut sums);
        }
        let mut dots = [[0.0f32; COLS]; ROWS];
        for i in 0..ROWS {
            for j in 0..COLS {
                dots[i][j] = sums[i][j].sum();
            }
        }
        for i in 0..ROWS {
            for j in 0..COLS {
                put(product, row + i, column + j, dots[i][j]);
            }
        }
    }
}

/// Adds the products along k of rows of `a` from `row` on and of `b` from `column` on.
#[inline(always)]
unsafe fn add_products<V: Lanes, E: Element, const ROWS: usize, const COLS: usize>(
    a: &Operand,
    b: &Operand,
    row: usize,
    column: usize,
    sums: &mut [[V; COLS]; ROWS],
) {
    let depth = a.depth();
    let whole = depth - depth % V::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let mut rows = [std::ptr::null::<E>(); ROWS];
        for i in 0..ROWS {
            rows[i] = a.pointer::<E>().add((row + i) * a.stride());
        }
        let mut columns = [std::ptr::null::<E>(); COLS];
        for j in 0..COLS {
            columns[j] = b.pointer::<E>().add((column + j) * b.stride());
        }
        for k in (0..whole).step_by(V::LANES) {
            step(&rows, &columns, k, V::LANES, sums);
        }
        if whole < depth {
            step(&rows, &columns, whole, depth - whole, sums);
        }
    }
}

/// Adds the products of `count` elements from `k` on.
#[inline(always)]
unsafe fn step<V: Lanes, E: Element, const ROWS: usize, const COLS: usize>(
    a: &[*const E; ROWS],
    b: &[*const E; COLS],
    k: usize,
    count: usize,
    sums: &mut [[V; COLS]; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut columns = [V::splat(0.0); COLS];
        for j in 0..COLS {
            columns[j] = V::get(b[j].add(k), count);
        }
        for i in 0..ROWS {
            let row = V::get(a[i].add(k), count);
            for j in 0..COLS {
                sums[i][j] = row.mul_add(columns[j], sums[i][j]);
            }
        }
    }
}

/// Writes one element of the result.
#[inline(always)]
unsafe fn put(product: &Product, row: usize, column: usize, dot: f32) {
    let (add, _) = product.start_at(row, column);
    let bias = product.bias_at(column);
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = dot;
        match add {
            Add::Nothing => {}
            Add::F32(add) => sum += *add,
            Add::Bf16(add) => sum += Element::to_f32(*add),
        }
        for add in product.addends.at(row, column).of_row(0) {
            sum += *add;
        }
        if !bias.is_null() {
            sum += *bias;
        }
        let offset = row * product.c.stride() + column;
        match product.c.dtype() {
            DType::F32 => *product.c.pointer_of::<f32>().add(offset) = sum,
            DType::Bf16 => *product.c.pointer_of::<crate::bf16>().add(offset) = Element::from_f32(sum),
        }
    }
}
