//! Optimiser states in bf16 and 8 bits against what f32 gives, and against the map that other programs use.

mod codes;
mod updates;

use crate::support::numbers;
use tandem_kernels::{AdamMoment, Device, MemoryKind, STATE_BLOCK, StateForm, States};

const MOMENTS: [AdamMoment; 2] = [AdamMoment::First, AdamMoment::Second];
/// One element, less than a block, blocks and a bit, more than a block of the kernel and a bit.
const LENGTHS: [usize; 4] = [1, 97, 1000, 16_384 + 1031];

fn states(device: &Device, moment: AdamMoment, form: StateForm, values: &[f32]) -> States {
    let mut states = States::zeros(device, MemoryKind::Optimizer, moment, form, values.len()).unwrap();
    device.write_states(values, &mut states, 0).unwrap();
    states
}

fn read(device: &Device, states: &States) -> Vec<f32> {
    let mut values = vec![f32::NAN; states.len()];
    device.read_states(states.view(), &mut values).unwrap();
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Numbers over many magnitudes, each block with one of its own; some are zero.
fn wide(seed: u64, len: usize, moment: AdamMoment) -> Vec<f32> {
    let exponents = numbers(seed + 1000, len);
    let number = |(index, (x, e)): (usize, (&f32, &f32))| {
        let block = 10f32.powi((index / STATE_BLOCK % 9) as i32 * 4 - 20);
        let x = x * 10f32.powf(4.0 * e - 4.0) * block;
        if index % 17 == 3 { 0.0 } else { [x, x.abs()][usize::from(moment == AdamMoment::Second)] }
    };
    numbers(seed, len).iter().zip(&exponents).enumerate().map(number).collect()
}
