//! Adding to sums that have no order.

use super::check;
use crate::exact::{ExactSum, ExactView};
use crate::{Device, KernelError, Result, View};

/// Sums ← other sums, or sums ← sums + other sums where `add`.
///
/// # Errors
/// If the lengths differ.
pub fn exact_merge(device: &Device, other: ExactView, sums: &mut ExactSum, add: bool) -> Result<()> {
    const OP: &str = "exact_merge";
    if other.len() != sums.len() {
        return Err(KernelError::invalid(OP, format!("{} sums added to {}", other.len(), sums.len())));
    }
    match device {
        Device::Cpu(cpu) => cpu.exact_merge(other.as_slice(), sums.as_mut_slice(), add),
        Device::Meta(ledger) => {
            ledger.record(OP, other.len() as f64, (8 * other.len() * if add { 3 } else { 2 }) as f64);
        }
    }
    Ok(())
}

/// Sums ← terms, or sums ← sums + terms where `add`. Terms are f32 `[1,N]`, for the first N sums.
///
/// Answers whether every term was finite and below `limit` (see [`exact::limit`](crate::exact::limit)). If one was not,
/// the sums are of no use.
///
/// # Errors
/// If shapes or types do not fit, or the terms are not contiguous.
pub fn exact_sum(device: &Device, terms: View, sums: &mut ExactSum, add: bool, limit: f32) -> Result<bool> {
    const OP: &str = "exact_sum";
    check::is_f32(OP, "terms", &terms)?;
    check::contiguous(OP, "terms", terms.is_contiguous())?;
    if terms.len() > sums.len() {
        return Err(KernelError::invalid(OP, format!("{} terms for {} sums", terms.len(), sums.len())));
    }
    match device {
        Device::Cpu(cpu) => Ok(cpu.exact_sum(terms, sums.as_mut_slice(), add, limit)),
        Device::Meta(ledger) => {
            let moved = terms.num_bytes() * if add { 5 } else { 3 };
            ledger.record(OP, 2.0 * terms.len() as f64, moved as f64);
            Ok(true)
        }
    }
}
