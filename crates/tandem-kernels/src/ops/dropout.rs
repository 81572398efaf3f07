//! Dropout whose mask is never stored: whether an element is kept is a function of a key and of its place alone, the same on
//! every device, at every level of instructions and for every number of threads.

use super::check;
use crate::cpu::dropout as kernel;
use crate::device::on;
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

fn check_rate(op: &'static str, p: f32) -> Result<()> {
    if (0.0..1.0).contains(&p) {
        return Ok(());
    }
    Err(KernelError::invalid(op, format!("a rate of {p}, expected one from 0 to below 1")))
}

/// `y = x ⊙ mask / (1 − p)`, either type. The mask's element is 0 with probability `p`, else 1: a hash of `key` and of
/// the element's index, `row · columns + column`.
///
/// # Errors
/// If shapes do not fit or the rate is not in `0..1`.
pub fn dropout(device: &Device, x: View, y: ViewMut, key: u64, p: f32) -> Result<()> {
    const OP: &str = "dropout";
    check::shape(OP, "y", &y, x.rows(), x.cols())?;
    check_rate(OP, p)?;
    let work = check::work(OP, &x, x.len() as f64, check::bytes(&[&x, &y]));
    device.launch(
        work,
        on!(
            cpu => kernel::dropout(cpu, x, y, key, p, false),
            cuda => cuda::dropout::dropout(cuda, x, y, key, p, false)
        ),
    )?;
    Ok(())
}

/// `dx += dy ⊙ mask / (1 − p)` with the mask that [`dropout`] had for the same key and shape. Either type; a bf16 sum is
/// rounded once.
///
/// # Errors
/// As [`dropout`].
pub fn dropout_backward_add(device: &Device, dy: View, dx: ViewMut, key: u64, p: f32) -> Result<()> {
    const OP: &str = "dropout_backward_add";
    check::shape(OP, "dx", &dx, dy.rows(), dy.cols())?;
    check_rate(OP, p)?;
    let work = check::work(OP, &dy, 2.0 * dy.len() as f64, check::bytes(&[&dy, &dx, &dx]));
    device.launch(
        work,
        on!(
            cpu => kernel::dropout(cpu, dy, dx, key, p, true),
            cuda => cuda::dropout::dropout(cuda, dy, dx, key, p, true)
        ),
    )?;
    Ok(())
}
