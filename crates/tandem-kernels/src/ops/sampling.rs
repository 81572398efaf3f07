//! What sampling does to a row of logits, on the host.

use crate::cpu::{Isa, head as kernel};
use crate::ops::HeadShape;
use crate::{Device, Result};

/// The instructions of a processor; beside a GPU, those of the host's.
fn instructions(device: &Device) -> Result<Isa> {
    match device {
        Device::Cpu(cpu) => Ok(cpu.isa()),
        Device::Cuda(_) | Device::Meta(_) => Isa::detect(),
    }
}

/// Applies scale and softcap to a row of raw logits.
///
/// # Errors
/// If `TANDEM_ISA` asks for instructions that the processor lacks.
pub fn shape_logits(device: &Device, logits: &mut [f32], shape: &HeadShape) -> Result<()> {
    if shape.logit_scale.is_some() || shape.softcap.is_some() {
        // SAFETY: the instructions are this processor's.
        unsafe { kernel::shape(instructions(device)?, logits, shape) };
    }
    Ok(())
}

/// Turns logits l into `exp((l − largest) / temperature)`: 1 for the likeliest token, and what others are in proportion.
///
/// # Errors
/// As [`shape_logits`].
pub fn relative_weights(device: &Device, logits: &mut [f32], temperature: f32) -> Result<()> {
    // SAFETY: the instructions are this processor's.
    unsafe { kernel::relative_weights(instructions(device)?, logits, temperature) };
    Ok(())
}
