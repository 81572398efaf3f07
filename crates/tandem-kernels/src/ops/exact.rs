//! Adding to sums that have no order.

use super::check;
use crate::device::on;
use crate::numerics::exact::{ExactSum, ExactView};
use crate::{DType, Device, KernelError, Result, View, Work, cuda};

/// Sums ← other sums, or sums ← sums + other sums where `add`.
///
/// # Errors
/// If the lengths differ.
pub fn exact_merge(device: &Device, other: ExactView, sums: &mut ExactSum, add: bool) -> Result<()> {
    const OP: &str = "exact_merge";
    if other.len() != sums.len() {
        return Err(KernelError::invalid(OP, format!("{} sums added to {}", other.len(), sums.len())));
    }
    let bytes = 8 * other.len() * if add { 3 } else { 2 };
    let shape = (1, other.len(), DType::F32);
    let work = Work::new(OP, shape, other.len() as f64, bytes as f64);
    device.launch(
        work,
        on!(
            cpu => cpu.exact_merge(other.as_slice(), sums.as_mut_slice(), add),
            cuda => cuda::exact::exact_merge(cuda, other, sums, add)
        ),
    )?;
    Ok(())
}

/// Sums ← terms, or sums ← sums + terms where `add`. Terms are f32 `[1,N]`, for the first N sums.
///
/// If a term was not finite, or not below `limit` (see [`exact::limit`](crate::numerics::exact::limit)), the sums are of no use, and
/// [`Device::take_in_range`] tells.
///
/// # Errors
/// If shapes or types do not fit, or the terms are not contiguous.
pub fn exact_sum(device: &Device, terms: View, sums: &mut ExactSum, add: bool, limit: f32) -> Result<()> {
    const OP: &str = "exact_sum";
    check::is_f32(OP, "terms", &terms)?;
    check::contiguous(OP, "terms", terms.is_contiguous())?;
    if terms.len() > sums.len() {
        return Err(KernelError::invalid(OP, format!("{} terms for {} sums", terms.len(), sums.len())));
    }
    let moved = terms.num_bytes() * if add { 5 } else { 3 };
    let work = check::work(OP, &terms, 2.0 * terms.len() as f64, moved as f64);
    device.launch(
        work,
        on!(
            cpu => if !cpu.exact_sum(terms, sums.as_mut_slice(), add, limit) {
                cpu.see_out_of_range();
            },
            cuda => cuda::exact::exact_sum(cuda, terms, sums, add, limit)
        ),
    )?;
    Ok(())
}
