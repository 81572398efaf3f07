//! Sampling of tokens: a block per row of logits.

use super::driver::Grid;
use super::{Cuda, args, driver, source};
use crate::ops::{Draw, HeadShape};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("sampling.cu");

/// Threads of a block, and logits of a sum, as in `sampling.cu`.
const THREADS: u32 = 512;
const CHUNK: usize = 512;

/// Largest vocabulary: the sums of its chunks take 48 KiB of shared memory.
pub(crate) const MOST_TOKENS: usize = 6144 * CHUNK;

/// Samples a token of each row into `tokens`. `room` has 4 bytes for each. Waits.
pub(crate) fn sample(
    cuda: &Cuda,
    logits: View,
    shape: &HeadShape,
    draws: &[Draw],
    room: &ViewMut,
    tokens: &mut [u32],
) -> Result<()> {
    let (rows, vocabulary) = logits.shape();
    let temperatures: Vec<f32> = draws.iter().map(|draw| draw.temperature).collect();
    let uniforms: Vec<f64> = draws.iter().map(|draw| draw.uniform).collect();
    let (scale, cap) = (shape.logit_scale.unwrap_or(1.0), shape.softcap.unwrap_or(0.0));
    let inverse_cap = if cap > 0.0 { 1.0 / cap } else { 0.0 };
    let (temperatures, uniforms) = (cuda.table(&temperatures)?, cuda.table(&uniforms)?);
    let args = args![
        logits,
        logits.stride(),
        vocabulary as i32,
        scale,
        cap,
        inverse_cap,
        driver::Arg::address(temperatures),
        driver::Arg::address(uniforms),
        room
    ];
    let shared = vocabulary.div_ceil(CHUNK) * size_of::<f64>();
    // SAFETY: the operands are those of the kernel, of as many rows; the room is checked by the operation.
    unsafe {
        cuda.launch(&SOURCE, "sample_rows", Grid::new(rows, THREADS).with_shared(shared), args)?;
        cuda.read(room.address(), tokens)
    }
}
