//! What one call of an operation does, told before it runs.

use crate::DType;

/// An operation's cost: what a dry run writes down, and what a profile measures the time of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The operation's name.
    pub op: &'static str,
    /// Floating-point operations (a multiply-add counts two).
    pub flops: f64,
    /// Bytes read and written at least once.
    pub bytes: f64,
    /// Type of the operands, which decides how fast products can be.
    pub dtype: DType,
    /// Of a product its rows, columns and depth; of another operation rows and columns of an operand, and 0.
    pub shape: [u32; 3],
}

impl Work {
    /// Of an operation on a matrix of that shape and type.
    pub(crate) fn new(
        op: &'static str,
        (rows, cols, dtype): (usize, usize, DType),
        flops: f64,
        bytes: f64,
    ) -> Self {
        Self { op, flops, bytes, dtype, shape: [rows as u32, cols as u32, 0] }
    }

    /// Where the operand has a depth as well.
    pub(crate) fn with_depth(self, depth: usize) -> Self {
        let [rows, cols, _] = self.shape;
        Self { shape: [rows, cols, depth as u32], ..self }
    }
}
