//! GEMM of small f32 matrices in the cache, on one thread.

use super::vector::Vector;

/// A matrix with arbitrary strides.
#[derive(Clone, Copy)]
pub(crate) struct Strided {
    pub pointer: *const f32,
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub col: usize,
}

/// Computes `c[m, n] = a[m, k] · b[k, n]`, or `+=` if `accumulate`; `b` and `c` have contiguous
/// rows, and `n` is a multiple of the register's width.
///
/// # Safety
/// The matrices hold these elements, `c` overlaps neither factor, and the CPU has V.
#[inline(always)]
pub(crate) unsafe fn multiply<V: Vector>(
    [m, n, k]: [usize; 3],
    a: Strided,
    (b, b_row): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    accumulate: bool,
) {
    debug_assert!(n.is_multiple_of(V::LANES));
    let mut j = 0;
    // The outer loop runs over panels of columns: a panel of `b` stays in the first-level cache
    // while the rows of `a` pass.
    while j < n {
        let registers = (n - j) / V::LANES;
        // SAFETY: the panel lies inside the matrices.
        unsafe {
            let (b, c) = ((b.add(j), b_row), (c.add(j), c_row));
            if V::REGISTERS >= 32 && registers >= 4 {
                panel::<V, 4>(m, k, a, b, c, accumulate);
                j += 4 * V::LANES;
            } else if registers >= 2 {
                panel::<V, 2>(m, k, a, b, c, accumulate);
                j += 2 * V::LANES;
            } else {
                panel::<V, 1>(m, k, a, b, c, accumulate);
                j += V::LANES;
            }
        }
    }
}

/// Computes all rows of `N` registers of columns.
#[inline(always)]
unsafe fn panel<V: Vector, const N: usize>(
    m: usize,
    k: usize,
    a: Strided,
    b: (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    accumulate: bool,
) {
    let mut i = 0;
    // SAFETY: rows i and following exist, as many as each tile takes.
    unsafe {
        let rows = |i: usize| Strided { pointer: a.pointer.add(i * a.row), ..a };
        if V::REGISTERS >= 32 && N == 1 {
            // Twelve rows: enough sums to cover the latency of a multiply-add.
            while i + 12 <= m {
                block::<V, 12, N>(k, rows(i), b, (c.add(i * c_row), c_row), accumulate);
                i += 12;
            }
        }
        if V::REGISTERS >= 16 {
            while i + 6 <= m {
                block::<V, 6, N>(k, rows(i), b, (c.add(i * c_row), c_row), accumulate);
                i += 6;
            }
        }
        while i + 2 <= m {
            block::<V, 2, N>(k, rows(i), b, (c.add(i * c_row), c_row), accumulate);
            i += 2;
        }
        if i < m {
            block::<V, 1, N>(k, rows(i), b, (c.add(i * c_row), c_row), accumulate);
        }
    }
}

/// Computes `M` rows of `N` registers of columns, held in registers.
#[inline(always)]
unsafe fn block<V: Vector, const M: usize, const N: usize>(
    k: usize,
    a: Strided,
    (b, b_row): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    accumulate: bool,
) {
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        for p in 0..k {
            let mut row = [V::splat(0.0); N];
            for j in 0..N {
                row[j] = V::load(b.add(p * b_row + j * V::LANES), V::LANES);
            }
            for i in 0..M {
                let factor = V::splat(*a.pointer.add(i * a.row + p * a.col));
                for j in 0..N {
                    sums[i][j] = factor.mul_add(row[j], sums[i][j]);
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                let to = c.add(i * c_row + j * V::LANES);
                let sum = if accumulate { sums[i][j].add(V::load(to, V::LANES)) } else { sums[i][j] };
                sum.store(to, V::LANES);
            }
        }
    }
}

/// Computes `to[cols, rows] = from[rows, cols]ᵀ`; both are contiguous, both sizes multiples of the
/// register's width.
///
/// # Safety
/// The matrices hold these elements and do not overlap, and the CPU has V.
#[inline(always)]
pub(crate) unsafe fn transpose<V: Vector>(rows: usize, cols: usize, from: *const f32, to: *mut f32) {
    for r in (0..rows).step_by(V::LANES) {
        for c in (0..cols).step_by(V::LANES) {
            // SAFETY: the square lies inside both matrices.
            unsafe {
                let mut square = [V::splat(0.0); 16];
                for i in 0..V::LANES {
                    square[i] = V::load(from.add((r + i) * cols + c), V::LANES);
                }
                V::transpose(&mut square);
                for i in 0..V::LANES {
                    square[i].store(to.add((c + i) * rows + r), V::LANES);
                }
            }
        }
    }
}
