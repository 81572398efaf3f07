//! A GEMM in cuBLASLt's column-major convention.
//!
//! A matrix of `r` rows and `c` columns there is `c` rows of `r` elements in memory. So `d[m,n] = Σ
//! a[m,k] · b[n,k]` becomes `dᵀ = b · aᵀ` with `n` rows and `m` columns: the second factor comes
//! first. A factor whose rows in memory run along the depth has `k` rows there, else `n` or `m`,
//! and is transposed accordingly; nothing is copied.

use std::ffi::c_int;

use super::raw::{COMPUTE_32F, COMPUTE_32F_FAST_TF32, OP_N, OP_T, data_type};
use crate::DType;
use crate::cuda::driver::{Factor, FactorType, Matmul};
use crate::cuda::matmul::alignment;

/// Size, types, strides and alignments of a GEMM: all that cuBLASLt needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Rows, columns and depth.
    pub(super) size: [usize; 3],
    pub(super) dtype: FactorType,
    pub(super) d_type: DType,
    tf32: bool,
    /// Strides of both factors, and true if their rows run along the depth.
    a: (usize, bool),
    b: (usize, bool),
    /// Strides of the addend and of the result.
    c: Option<usize>,
    d: usize,
    /// Alignments of cuBLASLt's A, B, C and D, in bytes.
    pub(super) alignments: [u32; 4],
}

/// A matrix in cuBLASLt's convention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) rows: u64,
    pub(super) cols: u64,
    /// Distance between columns in elements.
    pub(super) stride: i64,
    /// `cudaDataType_t`.
    pub(super) data_type: c_int,
}

impl Layout {
    fn new(rows: usize, cols: usize, stride: usize, dtype: FactorType) -> Self {
        // The stride of a single column is unused, but cuBLASLt validates it.
        let stride = if cols <= 1 { stride.max(rows) } else { stride };
        Self { rows: rows as u64, cols: cols as u64, stride: stride as i64, data_type: data_type(dtype) }
    }

    /// Describes a factor with `n` rows or columns beside the depth `k`.
    fn from_factor(n: usize, k: usize, (stride, along_depth): (usize, bool), dtype: FactorType) -> Self {
        if along_depth { Self::new(k, n, stride, dtype) } else { Self::new(n, k, stride, dtype) }
    }
}

impl Shape {
    pub(super) fn from_matmul(product: &Matmul) -> Self {
        let Matmul { size, dtype, a, b, c, d, d_type, tf32 } = *product;
        let (of_a, of_b, of_d) = (alignment(a.address), alignment(b.address), alignment(d.0));
        let of_c = c.map_or(of_d, |(address, _)| alignment(address));
        let factor = |factor: Factor| (factor.stride, factor.along_depth);
        Self {
            size,
            dtype,
            d_type,
            tf32: tf32 && dtype == FactorType::F32,
            a: factor(a),
            b: factor(b),
            c: c.map(|(_, stride)| stride),
            d: d.1,
            alignments: [of_b, of_a, of_c, of_d],
        }
    }

    /// Returns the layouts of cuBLASLt's A, B, C and D.
    pub(super) fn layouts(&self) -> [Layout; 4] {
        let [m, n, k] = self.size;
        let result = |stride| Layout::new(n, m, stride, self.d_type.into());
        [
            Layout::from_factor(n, k, self.b, self.dtype),
            Layout::from_factor(m, k, self.a, self.dtype),
            result(self.c.unwrap_or(self.d)),
            result(self.d),
        ]
    }

    /// Returns the operations on cuBLASLt's A and B: A as `n` by `k`, B as `k` by `m`.
    pub(super) fn operations(&self) -> [c_int; 2] {
        [if self.b.1 { OP_T } else { OP_N }, if self.a.1 { OP_N } else { OP_T }]
    }

    /// `cublasComputeType_t`.
    pub(super) fn compute_type(&self) -> c_int {
        if self.tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factor(address: u64, stride: usize, along_depth: bool) -> Factor {
        Factor { address, stride, along_depth }
    }

    fn product() -> Matmul {
        Matmul {
            size: [4, 3, 5],
            dtype: FactorType::Bf16,
            a: factor(1 << 20, 8, true),
            b: factor(1 << 21, 6, false),
            c: None,
            d: (1 << 22, 7),
            d_type: DType::F32,
            tf32: true,
        }
    }

    #[test]
    fn alignment_counts_up_to_the_widest_access() {
        let of = |address| {
            let a = factor(address, 8, true);
            Shape::from_matmul(&Matmul { a, ..product() }).alignments
        };
        for (address, alignment) in [(64, 16), (1 << 40, 16), (48, 16), (40, 8), (4, 4), (6, 2), (7, 1)] {
            assert_eq!(of(address), [16, alignment, 16, 16]);
        }
        // So it does not matter to a product where in memory an operand lies.
        let moved = Matmul { a: factor(16, 8, true), d: (48, 7), ..product() };
        assert_eq!(Shape::from_matmul(&moved), Shape::from_matmul(&product()));
        let odd = Matmul { d: ((1 << 22) + 4, 7), ..product() };
        assert_ne!(Shape::from_matmul(&odd), Shape::from_matmul(&product()));
    }

    #[test]
    fn tf32_is_of_f32_alone() {
        assert_eq!(Shape::from_matmul(&product()).compute_type(), COMPUTE_32F);
        let wide = Matmul { dtype: FactorType::F32, ..product() };
        assert_eq!(Shape::from_matmul(&wide).compute_type(), COMPUTE_32F_FAST_TF32);
        assert_eq!(Shape::from_matmul(&Matmul { tf32: false, ..wide }).compute_type(), COMPUTE_32F);
    }

    #[test]
    fn a_single_column_may_have_any_stride() {
        let [a, _, _, d] =
            Shape::from_matmul(&Matmul { size: [1, 3, 1], b: factor(0, 0, false), d: (0, 1), ..product() })
                .layouts();
        assert_eq!((a.rows, a.cols, a.stride), (3, 1, 3));
        assert_eq!((d.rows, d.cols, d.stride), (3, 1, 3));
    }
}
