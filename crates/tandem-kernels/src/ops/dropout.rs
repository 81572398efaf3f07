//! Dropout without a stored mask: the mask is a function of a key and of the element's index, the
//! same on every device and for every number of threads.

use super::check;
use crate::cpu::dropout as kernel;
use crate::device::launch;
use crate::numerics::random::{STEP, mix};
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

/// Parameters of a mask.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    /// Initial state of the generator.
    pub(crate) start: u64,
    /// Elements whose 32 random bits are below it are dropped.
    pub(crate) bound: u32,
    /// Factor on kept elements.
    pub(crate) factor: f32,
}

impl Mask {
    fn new(key: u64, p: f32) -> Self {
        Self {
            // Consecutive keys start far apart.
            start: mix(key.wrapping_add(STEP)),
            // p < 1, so this is at most 2³² − 2⁸.
            bound: (f64::from(p) * 4_294_967_296.0) as u32,
            factor: (1.0 / (1.0 - f64::from(p))) as f32,
        }
    }

    /// Returns the random bits of elements `2 · pair` (lower half) and `2 · pair + 1`.
    #[inline(always)]
    pub(crate) fn bits(self, pair: u64) -> u64 {
        mix(self.start.wrapping_add(pair.wrapping_mul(STEP)))
    }
}

fn check_rate(op: &'static str, p: f32) -> Result<()> {
    if (0.0..1.0).contains(&p) {
        return Ok(());
    }
    Err(KernelError::invalid(op, format!("rate {p}, expected at least 0 and below 1")))
}

/// Computes `y = x ⊙ mask / (1 − p)`; `x` and `y` are f32 or bf16. A mask element is 0 with
/// probability `p`, else 1: a hash of `key` and of the index `row · columns + column`.
pub fn dropout(device: &Device, x: View, y: ViewMut, key: u64, p: f32) -> Result<()> {
    const OP: &str = "dropout";
    check::shape(OP, "y", &y, x.rows(), x.cols())?;
    check_rate(OP, p)?;
    let work = check::work(OP, &x, x.len() as f64, check::bytes(&[&x, &y]));
    let mask = Mask::new(key, p);
    launch!(device, work, {
        cpu => kernel::dropout(cpu, x, y, mask, false),
        cuda => cuda::dropout::dropout(cuda, x, y, mask, false)
    })
}

/// Computes `dx += dy ⊙ mask / (1 − p)` with the mask of [`dropout`] for the same key and shape.
/// Both are f32 or bf16; a bf16 sum is rounded once.
pub fn dropout_backward_add(device: &Device, dy: View, dx: ViewMut, key: u64, p: f32) -> Result<()> {
    const OP: &str = "dropout_backward_add";
    check::shape(OP, "dx", &dx, dy.rows(), dy.cols())?;
    check_rate(OP, p)?;
    let work = check::work(OP, &dy, 2.0 * dy.len() as f64, check::bytes(&[&dy, &dx, &dx]));
    let mask = Mask::new(key, p);
    launch!(device, work, {
        cpu => kernel::dropout(cpu, dy, dx, mask, true),
        cuda => cuda::dropout::dropout(cuda, dy, dx, mask, true)
    })
}
