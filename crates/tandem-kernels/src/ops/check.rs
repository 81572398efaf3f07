//! Operand checks that operations share.

use crate::{DType, KernelError, OpCost, Result, View, ViewMut};

/// An operand, borrowed either way.
pub(super) trait Operand {
    /// Returns rows, columns and element type.
    fn describe(&self) -> (usize, usize, DType);
}

impl Operand for View<'_> {
    fn describe(&self) -> (usize, usize, DType) {
        (self.rows(), self.cols(), self.dtype())
    }
}

impl Operand for ViewMut<'_> {
    fn describe(&self) -> (usize, usize, DType) {
        (self.rows(), self.cols(), self.dtype())
    }
}

/// Checks that the operand is `rows × cols`.
pub(super) fn shape(
    op: &'static str,
    operand: &'static str,
    found: &(impl Operand + ?Sized),
    rows: usize,
    cols: usize,
) -> Result<()> {
    let (found_rows, found_cols, _) = found.describe();
    if (found_rows, found_cols) == (rows, cols) {
        return Ok(());
    }
    Err(KernelError::Shape { op, operand, found_rows, found_cols, expected_rows: rows, expected_cols: cols })
}

/// Checks that the operand is f32.
pub(super) fn is_f32(op: &'static str, operand: &'static str, found: &(impl Operand + ?Sized)) -> Result<()> {
    match found.describe().2 {
        DType::F32 => Ok(()),
        other => Err(KernelError::Type { op, operand, found: other, expected: "f32" }),
    }
}

/// Checks that the operand has the type of the operation's first one.
pub(super) fn same_type(
    op: &'static str,
    operand: &'static str,
    found: &(impl Operand + ?Sized),
    first: &(impl Operand + ?Sized),
) -> Result<()> {
    let dtype = found.describe().2;
    if dtype == first.describe().2 {
        return Ok(());
    }
    Err(KernelError::Type { op, operand, found: dtype, expected: "the type of the first operand" })
}

/// Checks that the operand is `rows × cols` of f32.
pub(super) fn f32_shape(
    op: &'static str,
    operand: &'static str,
    found: &(impl Operand + ?Sized),
    rows: usize,
    cols: usize,
) -> Result<()> {
    is_f32(op, operand, found)?;
    shape(op, operand, found, rows, cols)
}

/// Checks that the operand is contiguous.
pub(super) fn contiguous(op: &'static str, operand: &'static str, is_contiguous: bool) -> Result<()> {
    if is_contiguous {
        return Ok(());
    }
    Err(KernelError::invalid(op, format!("{operand} must be contiguous")))
}

/// Returns the cost of an operation on the operand.
pub(super) fn work(op: &'static str, operand: &dyn Operand, flops: f64, bytes: f64) -> OpCost {
    OpCost::new(op, operand.describe(), flops, bytes)
}

/// Returns the bytes of all operands.
pub(super) fn bytes(operands: &[&dyn Operand]) -> f64 {
    operands.iter().map(|o| o.describe()).map(|(r, c, t)| (r * c * t.size()) as f64).sum()
}
