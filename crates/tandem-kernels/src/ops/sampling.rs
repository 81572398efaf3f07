//! Transformations of a row of logits before sampling, on the host.

use crate::cpu::{Isa, head as kernel};
use crate::ops::HeadShape;
use crate::{Device, Result};

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
