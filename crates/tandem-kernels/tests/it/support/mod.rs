//! Shared parts of the conformance tests: devices, numbers from a formula, and comparison with f64.

use tandem_kernels::{DType, Device, MemoryKind, Tensor, View, bf16, ops};

pub use crate::places::Place;

/// Unit roundoff of bf16: half the distance between 1 and the next number.
pub const BF16_ROUNDOFF: f64 = 1.0 / 256.0;

/// Unit roundoff of f32.
pub const F32_ROUNDOFF: f64 = 1.0 / 16_777_216.0;

/// Settings of an optimiser's step.
pub const ADAMW: ops::AdamW =
    ops::AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 1 };
/// Settings of an optimiser's step.
pub const RMSPROP: ops::RmsProp =
    ops::RmsProp { learning_rate: 1e-3, alpha: 0.99, eps: 1e-8, weight_decay: 0.02 };

/// Settings of an optimiser's step.
pub const LION: ops::Lion = ops::Lion { learning_rate: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.01 };
/// Settings of an optimiser's step.
pub const SGD: ops::Sgd = ops::Sgd { learning_rate: 1e-3, weight_decay: 0.02, momentum: None };

/// Unit roundoff of a type.
pub fn roundoff(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { BF16_ROUNDOFF } else { F32_ROUNDOFF }
}

/// One device of each place, those of processors with `threads` threads.
pub fn devices(threads: usize) -> Vec<(Place, Device)> {
    at(Place::all(), threads)
}

/// As [`devices`], of processors alone.
pub fn processors(threads: usize) -> Vec<(Place, Device)> {
    at(Place::processors(), threads)
}

fn at(places: Vec<Place>, threads: usize) -> Vec<(Place, Device)> {
    places.into_iter().map(|place| (place, place.device(threads, 1 << 30))).collect()
}

/// Numbers in [-1, 1) from a seed (SplitMix64).
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len).map(|_| (next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// A matrix inside a wider one, so that rows are `cols + pad` apart, and its exact values.
pub struct Matrix {
    tensor: Tensor,
    pad: usize,
    pub values: Vec<f64>,
}

impl Matrix {
    pub fn new(device: &Device, seed: u64, (rows, cols): (usize, usize), dtype: DType, pad: usize) -> Self {
        Self::from_values(device, &numbers(seed, rows * cols), (rows, cols), dtype, pad)
    }

    pub fn from_values(
        device: &Device,
        values: &[f32],
        (rows, cols): (usize, usize),
        dtype: DType,
        pad: usize,
    ) -> Self {
        let mut tensor = device.alloc(MemoryKind::Scratch, rows, cols + pad, dtype).unwrap();
        // The padding holds NaN: whoever reads it shows.
        ops::write_f32(device, &vec![f32::NAN; rows * (cols + pad)], tensor.view_mut()).unwrap();
        ops::write_f32(device, values, tensor.view_mut().col_range(pad..cols + pad)).unwrap();
        let round = |x: &f32| f64::from(if dtype == DType::Bf16 { bf16::from_f32(*x).to_f32() } else { *x });
        Self { tensor, pad, values: values.iter().map(round).collect() }
    }

    pub fn view(&self) -> View<'_> {
        self.tensor.view().col_range(self.pad..self.tensor.cols())
    }

    pub fn view_mut(&mut self) -> tandem_kernels::ViewMut<'_> {
        let cols = self.pad..self.tensor.cols();
        self.tensor.view_mut().col_range(cols)
    }

    /// Returns the tensor's present numbers.
    pub fn read(&self, device: &Device) -> Vec<f32> {
        ops::read_f32(device, self.view()).unwrap()
    }

    /// Returns whether the padding is unchanged.
    pub fn padding_is_intact(&self, device: &Device) -> bool {
        ops::read_f32(device, self.tensor.view().col_range(0..self.pad)).unwrap().iter().all(|x| x.is_nan())
    }
}

/// Returns one row of f32 without padding.
pub fn vector(device: &Device, values: &[f32]) -> Matrix {
    Matrix::from_values(device, values, (1, values.len()), DType::F32, 0)
}

/// Every element of `found` is within `tolerance[i]` of `expected[i]`.
pub fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: impl Fn(usize) -> f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let (error, allowed) = ((f64::from(*f) - e).abs(), tolerance(i));
        assert!(
            error <= allowed,
            "{what}: element {i} is {f}, expected {e}: off by {error:e}, allowed {allowed:e}"
        );
    }
}
