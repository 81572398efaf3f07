//! The cost of one call of an operation.

use crate::DType;

/// Cost of an operation: a dry run adds it up, a profile divides it by the measured time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpCost {
    /// The operation's name.
    pub op: &'static str,
    /// Floating-point operations (a multiply-add counts two).
    pub flops: f64,
    /// Bytes read and written at least once.
    pub bytes: f64,
    /// Type of the operands, which decides the peak rate of GEMMs.
    pub dtype: DType,
    /// Rows, columns and depth of a GEMM. For attention the depth is the mean number of keys that a query sees;
    /// for other operations it is 0, and rows and columns are the main operand's.
    pub shape: [u32; 3],
}

impl OpCost {
    /// Creates the cost of an operation on a matrix of that shape and type.
    pub(crate) fn new(
        op: &'static str,
        (rows, cols, dtype): (usize, usize, DType),
        flops: f64,
        bytes: f64,
    ) -> Self {
        Self { op, flops, bytes, dtype, shape: [rows as u32, cols as u32, 0] }
    }

    /// Sets the depth.
    pub(crate) fn with_depth(self, depth: usize) -> Self {
        let [rows, cols, _] = self.shape;
        Self { shape: [rows, cols, depth as u32], ..self }
    }
}
