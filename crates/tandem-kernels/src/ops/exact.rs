//! Additions to order-independent sums.

use super::check;
use crate::device::launch;
use crate::numerics::exact::{ExactView, ExactViewMut};
use crate::{DType, Device, KernelError, OpCost, Result, View, cuda};

/// Overwrites the sums with `other`, or adds `other` if `add`.
pub fn exact_merge(device: &Device, other: ExactView, sums: ExactViewMut, add: bool) -> Result<()> {
    const OP: &str = "exact_merge";
    if other.len() != sums.len() {
        return Err(KernelError::invalid(
            OP,
            format!("{} sums to add, {} to add to", other.len(), sums.len()),
        ));
    }
    let bytes = 8 * other.len() * if add { 3 } else { 2 };
    let shape = (1, other.len(), DType::F32);
    let work = OpCost::new(OP, shape, other.len() as f64, bytes as f64);
    launch!(device, work, {
        cpu => cpu.exact_merge(other.as_slice(), sums.into_slice(), add),
        cuda => cuda::exact::exact_merge(cuda, other, &sums, add)
    })
}

/// Overwrites the first N sums with the f32 terms `[1,N]`, or adds the terms if `add`.
///
/// If a term is not finite or not below `limit` (see
/// [`exact::limit`](crate::numerics::exact::limit)), the sums are meaningless, and
/// [`Device::take_in_range`] reports it.
pub fn exact_sum(device: &Device, terms: View, sums: ExactViewMut, add: bool, limit: f32) -> Result<()> {
    const OP: &str = "exact_sum";
    check::is_f32(OP, "terms", &terms)?;
    check::contiguous(OP, "terms", terms.is_contiguous())?;
    if terms.len() > sums.len() {
        return Err(KernelError::invalid(
            OP,
            format!("{} terms exceed the {} sums", terms.len(), sums.len()),
        ));
    }
    let moved = terms.num_bytes() * if add { 5 } else { 3 };
    let work = check::work(OP, &terms, 2.0 * terms.len() as f64, moved as f64);
    launch!(device, work, {
        cpu => if !cpu.exact_sum(terms, sums.into_slice(), add, limit) {
            cpu.see_out_of_range();
        },
        cuda => cuda::exact::exact_sum(cuda, terms, &sums, add, limit)
    })
}
