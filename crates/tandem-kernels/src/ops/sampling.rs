//! Sampling of tokens on a GPU, and transformations of a row of logits before sampling on the host.

use crate::cpu::{Isa, head as kernel};
use crate::device::On;
use crate::ops::{HeadShape, check};
use crate::{Backend, DType, Device, KernelError, MemoryKind, OpCost, Result, View, cuda};

/// How a token is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits; 0 takes the likeliest token, of equals the one with the smallest id.
    pub temperature: f32,
    /// Fraction of the weights of all tokens in their order at which the token is taken, in [0, 1).
    pub uniform: f64,
}

/// Samples a token from each row of raw `logits` `[R,V]` f32, on a GPU; waits for it. A row without a token to
/// sample, for a logit is NaN or infinite or all are −∞, has `None`. The sums of weights have one order: the
/// same logits give the same tokens.
///
/// # Errors
/// The device is a CPU, or operands do not fit.
pub fn sample(device: &Device, logits: View, shape: &HeadShape, draws: &[Draw]) -> Result<Vec<Option<u32>>> {
    const OP: &str = "sample";
    /// Stands for no token, as in `sampling.cu`.
    const NOT_FINITE: u32 = u32::MAX;
    let (rows, vocabulary) = logits.shape();
    check::f32_shape(OP, "logits", &logits, draws.len(), vocabulary)?;
    if device.backend() == Backend::Cpu {
        return Err(KernelError::invalid(OP, "a CPU's host samples by itself"));
    }
    if vocabulary == 0 || vocabulary > cuda::sampling::MOST_TOKENS {
        let most = cuda::sampling::MOST_TOKENS;
        return Err(KernelError::invalid(OP, format!("a vocabulary of {vocabulary}, expected 1 to {most}")));
    }
    let mut room = device.alloc(MemoryKind::Scratch, 1, rows, DType::F32)?;
    let mut tokens = vec![0; rows];
    let passes = if draws.iter().any(|draw| draw.temperature != 0.0) { 2.0 } else { 1.0 };
    let work = OpCost::new(
        OP,
        (rows, vocabulary, DType::F32),
        logits.len() as f64,
        passes * check::bytes(&[&logits]),
    );
    let of_tokens = &mut tokens[..];
    device.launch(work, |on| match on {
        On::Cpu(_) => unreachable!("refused on a CPU"),
        On::Cuda(cuda) => cuda::sampling::sample(cuda, logits, shape, draws, &room.view_mut(), of_tokens),
    })?;
    Ok(tokens.into_iter().map(|token| (token != NOT_FINITE).then_some(token)).collect())
}

/// Returns the vector instructions of the device's host.
fn instructions(device: &Device) -> Result<Isa> {
    match device {
        Device::Cpu(cpu) => Ok(cpu.isa()),
        Device::Cuda(_) | Device::Meta(_) => Isa::detect(),
    }
}

/// Applies scale and softcap to a row of raw logits.
///
/// # Errors
/// If `TANDEM_ISA` asks for instructions that the CPU lacks.
pub fn shape_logits(device: &Device, logits: &mut [f32], shape: &HeadShape) -> Result<()> {
    if shape.logit_scale.is_some() || shape.softcap.is_some() {
        // SAFETY: the instructions are this CPU's.
        unsafe { kernel::shape(instructions(device)?, logits, shape) };
    }
    Ok(())
}

/// Replaces each logit l by `exp((l − largest) / temperature)`: 1 for the likeliest token.
pub fn relative_weights(device: &Device, logits: &mut [f32], temperature: f32) -> Result<()> {
    // SAFETY: the instructions are this CPU's.
    unsafe { kernel::relative_weights(instructions(device)?, logits, temperature) };
    Ok(())
}
