//! f64 matrices for references, and the comparison with what a device computed.

use std::fmt::Debug;

use tandem_kernels::{DType, Device, Element, MemoryKind, Tensor, View, ops, with_element};

use crate::places::Place;

/// Thread counts at which results must have the same bits.
pub const THREADS: [usize; 4] = [1, 2, 3, 5];

/// Relative error of f32 sums of up to 2500 terms. Each addition rounds by up to 2^-24, up or down, so that a sum is off by some
/// √terms of these in whatever order an instruction set adds: eight times that, 400 × 2^-24.
pub const F32: f64 = 400.0 / 16_777_216.0;

/// Both compute types, each with the relative error that its results may have. bf16: one rounding of the result (2^-9), one of
/// the softmax weights or coefficients that a kernel may hold in bf16, and twice that for sums that cancel.
pub const TYPES: [(DType, f64); 2] = [(DType::F32, F32), (DType::Bf16, 8e-3)];

/// A device with an arena that is large enough for every test.
pub fn device(threads: usize) -> Device {
    Device::cpu(threads, 1 << 28).expect("threads and address space")
}

/// A small generator of pseudo-random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A matrix of numbers in -1..1 that the type represents exactly.
    pub fn matrix(&mut self, rows: usize, cols: usize, dtype: DType) -> Matrix {
        let data = (0..rows * cols).map(|_| round(self.unit(), dtype)).collect();
        Matrix { rows, cols, data }
    }
}

/// The nearest number of the type.
pub fn round(x: f64, dtype: DType) -> f64 {
    f64::from(with_element!(dtype, E => E::from_f32(x as f32).to_f32()))
}

#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Matrix {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn row(&self, row: usize) -> &[f64] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn at(&mut self, row: usize, col: usize) -> &mut f64 {
        &mut self.data[row * self.cols + col]
    }

    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { data: self.data.iter().map(|&x| f(x)).collect(), ..*self }
    }

    /// The columns `start..start + cols`.
    pub fn columns(&self, start: usize, cols: usize) -> Self {
        let data = (0..self.rows).flat_map(|r| self.row(r)[start..start + cols].to_vec()).collect();
        Self { rows: self.rows, cols, data }
    }

    /// The same behind so many columns of other numbers.
    pub fn behind(&self, pad: usize) -> Self {
        let rows =
            self.data.chunks(self.cols).flat_map(|row| vec![f64::NAN; pad].into_iter().chain(row.to_vec()));
        Self { rows: self.rows, cols: pad + self.cols, data: rows.collect() }
    }

    /// Some rows.
    pub fn rows(&self, start: usize, rows: usize) -> Self {
        let data = self.data[start * self.cols..(start + rows) * self.cols].to_vec();
        Self { rows, cols: self.cols, data }
    }

    /// A tensor with these numbers.
    pub fn tensor(&self, device: &Device, dtype: DType) -> Tensor {
        let mut tensor = device.alloc(MemoryKind::Scratch, self.rows, self.cols, dtype).expect("memory");
        let values: Vec<f32> = self.data.iter().map(|&x| x as f32).collect();
        ops::write_f32(device, &values, tensor.view_mut()).expect("a copy");
        tensor
    }

    /// The numbers of a tensor, strided or not.
    pub fn read(device: &Device, view: View) -> Self {
        let values = ops::read_f32(device, view).expect("a copy");
        Self { rows: view.rows(), cols: view.cols(), data: values.into_iter().map(f64::from).collect() }
    }

    /// Every element within `tolerance` of the expected one, relative to the largest expected magnitude.
    #[track_caller]
    pub fn assert_close(&self, expected: &Self, tolerance: f64, what: &str) {
        self.assert_close_beside(1e-30, expected, tolerance, what);
    }

    /// [`Self::assert_close`], relative to at least `magnitude`: for sums that may cancel altogether.
    #[track_caller]
    pub fn assert_close_beside(&self, magnitude: f64, expected: &Self, tolerance: f64, what: &str) {
        assert_eq!((self.rows, self.cols), (expected.rows, expected.cols), "{what}: shape");
        let largest = expected.data.iter().fold(magnitude, |m: f64, x| m.max(x.abs()));
        for (i, (found, expected)) in self.data.iter().zip(&expected.data).enumerate() {
            let error = (found - expected).abs() / largest;
            // A NaN fails, too.
            assert!(
                error <= tolerance,
                "{what}: row {}, column {}: found {found}, expected {expected}; {error:.1e} of the largest, {tolerance:.1e} allowed",
                i / self.cols,
                i % self.cols
            );
        }
    }
}

/// A tensor that no kernel may rely on the content of: not-a-number everywhere.
pub fn poison(device: &Device, rows: usize, cols: usize, dtype: DType) -> Tensor {
    let mut tensor = device.alloc(MemoryKind::Scratch, rows, cols, dtype).expect("memory");
    ops::write_f32(device, &vec![f32::NAN; rows * cols], tensor.view_mut()).expect("a copy");
    tensor
}

/// Every place, with both compute types.
pub fn cases() -> Vec<(Place, DType, f64)> {
    let places = Place::all().into_iter();
    places.flat_map(|place| TYPES.map(|(dtype, tolerance)| (place, dtype, tolerance))).collect()
}

/// Runs `compute` at every thread count, on a GPU twice, on the emulated one, which has one order, once: all results must be equal (NaN would differ from itself). Returns one.
#[track_caller]
pub fn same_at_every_thread_count<R: PartialEq + Debug>(place: Place, compute: impl Fn(&Device) -> R) -> R {
    let run = |threads| compute(&place.device(threads, 1 << 28));
    let first = run(THREADS[0]);
    let again = match place {
        Place::Cpu(_) => &THREADS[1..],
        Place::Emulated | Place::EmulatedWgmma => &[],
        Place::Gpu | Place::GpuWgmma => &THREADS[..1],
    };
    for threads in again {
        let other = run(*threads);
        if other != first {
            panic!(
                "{threads} threads give other bits than one, {place:?}: {}",
                first_difference(&format!("{first:?}"), &format!("{other:?}"))
            );
        }
    }
    first
}

/// Returns where two texts of results differ, and how many of their words do.
fn first_difference(first: &str, other: &str) -> String {
    let words = first.split(' ').zip(other.split(' ')).enumerate();
    let differ: Vec<_> = words.filter(|(_, (a, b))| a != b).collect();
    match differ.first() {
        Some((word, (a, b))) => {
            let last = differ.len() - 1;
            let (end, (c, d)) = &differ[last];
            format!("{} words, from {word} ({a} and {b}) to {end} ({c} and {d})", differ.len())
        }
        None => "none but numbers that are no numbers".to_owned(),
    }
}
