//! The numbers of `goldens/optimizer_golden.py`.

use serde_json::Value;
use tandem_kernels::{DType, Device, MemoryKind, Tensor};

pub(super) const ELEMENTS: usize = 37;
pub(super) const STEPS: u64 = 50;

/// Multiples of 2⁻¹⁵ in [−1, 1), times a power of two: `numbers` of the script.
pub(super) fn numbers(step: u64, scale: f32) -> Vec<f32> {
    many_numbers(ELEMENTS, step, scale)
}

/// More or fewer of them.
pub(super) fn many_numbers(count: usize, step: u64, scale: f32) -> Vec<f32> {
    let bits = |i| ((step * 7919 + i * 104_729 + 12345) * 2_654_435_761 % (1 << 32)) >> 16;
    (0..count as u64).map(|i| (bits(i) as f32 - 32768.0) / 32768.0 * scale).collect()
}

/// f32 numbers, of which the file has the bits.
pub(super) fn floats(bits: &Value) -> impl Iterator<Item = f32> {
    bits.as_array()
        .expect("a list")
        .iter()
        .map(|bits| f32::from_bits(bits.as_i64().expect("bits") as i32 as u32))
}

/// A row of numbers on a device.
pub(super) fn vector(device: &Device, values: &[f32]) -> Tensor {
    let mut tensor = device.alloc(MemoryKind::Scratch, 1, values.len(), DType::F32).expect("memory");
    device
        .host_update(tensor.view_mut(), |room: &mut [f32]| room.copy_from_slice(values))
        .expect("a row of f32");
    tensor
}
