//! Dropout whose mask is never stored: whether an element is kept is a function of a key and of its place alone, the same on
//! every device, at every level of instructions and for every number of threads.

use super::check;
use crate::cpu::dropout as kernel;
use crate::device::on;
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

/// What a mask is made of.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    /// Where its numbers start.
    pub(crate) start: u64,
    /// An element is dropped if its 32 bits are below it.
    pub(crate) bound: u32,
    /// Of kept elements.
    pub(crate) factor: f32,
}

impl Mask {
    /// The increment of SplitMix64 (Steele, Lea and Flood, 2014).
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new(key: u64, p: f32) -> Self {
        Self {
            // Keys that follow one another start far apart.
            start: mix(key.wrapping_add(Self::STEP)),
            // p < 1, so this is at most 2³² − 2⁸.
            bound: (f64::from(p) * 4_294_967_296.0) as u32,
            factor: (1.0 / (1.0 - f64::from(p))) as f32,
        }
    }

    /// The bits of the elements `2 · pair`, in the lower half, and `2 · pair + 1`.
    #[inline(always)]
    pub(crate) fn bits(self, pair: u64) -> u64 {
        mix(self.start.wrapping_add(pair.wrapping_mul(Self::STEP)))
    }
}

/// The finaliser of SplitMix64: each bit of the result depends on every bit of `x`.
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

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
    let mask = Mask::new(key, p);
    device.launch(
        work,
        on!(
            cpu => kernel::dropout(cpu, x, y, mask, false),
            cuda => cuda::dropout::dropout(cuda, x, y, mask, false)
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
    let mask = Mask::new(key, p);
    device.launch(
        work,
        on!(
            cpu => kernel::dropout(cpu, dy, dx, mask, true),
            cuda => cuda::dropout::dropout(cuda, dy, dx, mask, true)
        ),
    )?;
    Ok(())
}
