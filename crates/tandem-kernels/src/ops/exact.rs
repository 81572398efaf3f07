//! Additions to order-independent sums.

use super::check;
use super::optimizer::{SQUARES_BLOCK, blocks_of};
use crate::device::launch;
use crate::numerics::exact::{ExactView, ExactViewMut};
use crate::numerics::squares::SquareSum;
use crate::{Backend, DType, Device, KernelError, OpCost, Result, View, cuda};

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
    check_shape(OP, &terms, Some(&sums))?;
    let moved = terms.num_bytes() * if add { 5 } else { 3 };
    let work = check::work(OP, &terms, 2.0 * terms.len() as f64, moved as f64);
    launch!(device, work, {
        cpu => {
            let in_range = cpu.exact_sum(terms, Some(sums.into_slice()), add, limit, None);
            if !in_range {
                cpu.see_out_of_range();
            }
        },
        cuda => cuda::exact::exact_sum(cuda, terms, &sums, add, limit)
    })
}

/// Checks terms that stay the only ones of their sums ([`Gradient::Terms`](super::Gradient::Terms)): each
/// must be finite and below `limit`, as [`exact_sum`] says.
pub fn check_terms(device: &Device, terms: View, limit: f32) -> Result<()> {
    const OP: &str = "check_terms";
    check_shape(OP, &terms, None)?;
    let work = check::work(OP, &terms, terms.len() as f64, terms.num_bytes() as f64);
    launch!(device, work, {
        cpu => {
            if !cpu.exact_sum(terms, None, false, limit, None) {
                cpu.see_out_of_range();
            }
        },
        cuda => cuda::exact::check_terms(cuda, terms, limit)
    })
}

/// Computes [`exact_sum`] of the last terms, and Σ x² over the N new sums as
/// [`block_squares`](super::block_squares) in the same pass. Without `sums` the terms are the only ones:
/// they stay as they are ([`Gradient::Terms`](super::Gradient::Terms)), and are only squared.
///
/// # Errors
/// The device is a GPU, or operands do not fit.
pub fn exact_sum_squares(
    device: &Device,
    terms: View,
    sums: Option<ExactViewMut>,
    add: bool,
    limit: f32,
) -> Result<SquareSum> {
    const OP: &str = "exact_sum_squares";
    check_shape(OP, &terms, sums.as_ref())?;
    if device.backend() == Backend::Cuda {
        return Err(KernelError::invalid(OP, "a GPU adds and squares in two operations"));
    }
    let passes = if sums.is_none() {
        1
    } else if add {
        5
    } else {
        3
    };
    let moved = terms.num_bytes() * passes;
    let work = check::work(OP, &terms, 4.0 * terms.len() as f64, moved as f64);
    let mut blocks = blocks_of(device, terms.len().div_ceil(SQUARES_BLOCK));
    let of_blocks = &mut blocks[..];
    launch!(device, work, {
        cpu => {
            let sums = sums.map(ExactViewMut::into_slice);
            if !cpu.exact_sum(terms, sums, add, limit, Some(of_blocks)) {
                cpu.see_out_of_range();
            }
        },
        _cuda => unreachable!("refused on a GPU")
    })?;
    Ok(SquareSum::of_blocks(&blocks))
}

fn check_shape(op: &'static str, terms: &View, sums: Option<&ExactViewMut>) -> Result<()> {
    check::is_f32(op, "terms", terms)?;
    check::contiguous(op, "terms", terms.is_contiguous())?;
    match sums {
        Some(sums) if terms.len() > sums.len() => {
            Err(KernelError::invalid(op, format!("{} terms exceed the {} sums", terms.len(), sums.len())))
        }
        _ => Ok(()),
    }
}
