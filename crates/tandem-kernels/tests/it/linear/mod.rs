//! The linear layer's three products against f64, at every level of vector instructions of this processor, and on a GPU.

mod backward;
mod bits;
mod forward;
mod fp8;
mod packed;
mod short;
mod tree;

use crate::support::{F32_ROUNDOFF, Matrix, Place, assert_close, devices, roundoff};
use tandem_kernels::{Backend, DType, Device, KernelError, MemoryKind, ops};

/// Tokens, inputs, outputs: one of each, primes, around the kernels' tile and block sizes.
const SHAPES: [(usize, usize, usize); 17] = [
    (1, 1, 1),
    (1, 7, 5),
    (2, 64, 33),
    (3, 1, 17),
    (5, 17, 1),
    (7, 129, 97),
    (8, 512, 40),
    (13, 31, 29),
    (16, 16, 16),
    (17, 255, 48),
    (37, 8, 131),
    (61, 67, 71),
    (70, 1120, 40),
    (113, 1031, 37),
    (129, 96, 257),
    (150, 2, 64),
    (257, 53, 19),
];

/// Expected elements of a product in f64, each with the sum of its terms' magnitudes.
struct Sums {
    values: Vec<f64>,
    magnitudes: Vec<f64>,
}

impl Sums {
    /// `Σ_k a[i,k] · b[k,j]` and `Σ_k |a[i,k] · b[k,j]|`.
    fn new(
        (m, n, k): (usize, usize, usize),
        a: impl Fn(usize, usize) -> f64,
        b: impl Fn(usize, usize) -> f64,
    ) -> Self {
        let b: Vec<f64> = (0..k * n).map(|i| b(i / n, i % n)).collect();
        let (mut values, mut magnitudes) = (vec![0.0; m * n], vec![0.0; m * n]);
        for (i, (values, magnitudes)) in values.chunks_mut(n).zip(magnitudes.chunks_mut(n)).enumerate() {
            for (p, b) in b.chunks(n).enumerate() {
                let a = a(i, p);
                for ((value, magnitude), b) in values.iter_mut().zip(&mut *magnitudes).zip(b) {
                    *value += a * b;
                    *magnitude += (a * b).abs();
                }
            }
        }
        Self { values, magnitudes }
    }

    /// Adds a term to each element.
    fn plus(&self, term: impl Fn(usize) -> f64) -> Self {
        let values = self.values.iter().enumerate().map(|(i, value)| value + term(i)).collect();
        let magnitudes = self.magnitudes.iter().enumerate().map(|(i, m)| m + term(i).abs()).collect();
        Self { values, magnitudes }
    }

    /// Adds the numbers that a matrix held before, if `wanted`.
    fn plus_old(&self, matrix: &Matrix, wanted: bool) -> Self {
        self.plus(|i| if wanted { matrix.values[i] } else { 0.0 })
    }

    /// Compares with the numbers of a matrix, whose padding is intact. The error bound is that of a
    /// dot product summed in any order in f32, `terms · u · Σ|a·b|`, plus rounding the result.
    fn check(&self, what: &str, device: &Device, found: &Matrix, terms: usize, dtype: DType) {
        self.check_within(what, device, found, terms as f64 * F32_ROUNDOFF, dtype);
    }

    /// Compares as [`Self::check`] for a product of m × k and k × n with a low-rank term. On a GPU,
    /// and where n or k is short, the term is a product of its own, added to a rounded result.
    fn check_with_term(
        &self,
        what: &str,
        (place, device): (Place, &Device),
        found: &Matrix,
        [n, k, rank]: [usize; 3],
        dtype: DType,
    ) {
        let twice = if !place.is_cpu() || n.min(k) <= 32 { roundoff(dtype) } else { 0.0 };
        self.check_within(what, device, found, (k + rank) as f64 * F32_ROUNDOFF + twice, dtype);
    }

    fn check_within(&self, what: &str, device: &Device, found: &Matrix, error: f64, dtype: DType) {
        assert_close(what, &found.read(device), &self.values, |i| {
            (error + 4.0 * F32_ROUNDOFF) * self.magnitudes[i] + roundoff(dtype) * self.values[i].abs() + 1e-37
        });
        assert!(found.padding_is_intact(device), "{what}: wrote outside");
    }
}

/// Place, sizes and types of a tested product.
struct Case<'a> {
    what: String,
    place: Place,
    device: &'a Device,
    /// Tokens, inputs, outputs.
    shape: (usize, usize, usize),
    /// Type of the factors.
    dtype: DType,
    /// Type of the result.
    out: DType,
    /// Columns before each row.
    pad: usize,
}

fn for_all(mut run: impl FnMut(&Case)) {
    for (place, device) in &devices(2) {
        for shape in SHAPES {
            for (dtype, out) in [
                (DType::F32, DType::F32),
                (DType::Bf16, DType::F32),
                (DType::Bf16, DType::Bf16),
                (DType::F32, DType::Bf16),
            ] {
                for pad in [0, 3] {
                    let what = format!("{} {shape:?} {dtype} to {out}, padded by {pad}", place.name());
                    run(&Case { what, place: *place, device, shape, dtype, out, pad });
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::meta();
    let alloc = |rows, cols, dtype| device.alloc(MemoryKind::Scratch, rows, cols, dtype).unwrap();
    let (x, w, wrong) = (alloc(3, 4, DType::F32), alloc(5, 4, DType::F32), alloc(5, 6, DType::F32));
    let mut y = alloc(3, 5, DType::F32);
    let message = |r: Result<(), KernelError>| r.unwrap_err().to_string();
    let found = message(ops::linear(&device, x.view(), wrong.view(), None, None, y.view_mut()));
    assert_eq!(found, "linear: w is 5x6, expected 5x4");
    let found =
        message(ops::linear(&device, x.view(), alloc(5, 4, DType::Bf16).view(), None, None, y.view_mut()));
    assert_eq!(found, "linear: w is bf16, expected the type of the first operand");
    let found =
        message(ops::linear(&device, x.view(), w.view(), None, None, alloc(3, 4, DType::F32).view_mut()));
    assert_eq!(found, "linear: y is 3x4, expected 3x5");
    let found = message(ops::linear_add(&device, x.view(), w.view(), alloc(3, 4, DType::F32).view_mut()));
    assert_eq!(found, "linear_add: y is 3x4, expected 3x5");
    let mut dw = alloc(5, 4, DType::Bf16);
    let found = message(ops::linear_backward_weight(&device, y.view(), x.view(), dw.view_mut(), true));
    assert_eq!(found, "linear_backward_weight: dw is bf16, expected f32");
}

/// A dry run sees the sums that a GPU forms in f32 beside a bf16 result: of a few rows at a time, and only where something is added.
#[test]
fn a_dry_run_sees_sums_beside_the_result() {
    let device = Device::meta_of(Backend::Cuda);
    let alloc = |rows, cols, dtype| device.alloc(MemoryKind::Activations, rows, cols, dtype).unwrap();
    let (x, w, bias) =
        (alloc(4000, 40, DType::Bf16), alloc(5000, 40, DType::Bf16), alloc(1, 5000, DType::F32));
    let mut y = alloc(4000, 5000, DType::Bf16);
    let scratch = || {
        let kind = MemoryKind::ALL.iter().position(|kind| *kind == MemoryKind::Scratch).unwrap();
        device.memory().at_peak[kind]
    };
    ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
    assert_eq!(scratch(), 0);
    ops::linear(&device, x.view(), w.view(), Some(bias.view()), None, y.view_mut()).unwrap();
    assert_eq!(scratch(), 768 * 5000 * 4);
}

#[test]
fn a_dry_run_counts_operations_and_bytes() {
    let device = Device::meta();
    let Device::Meta(ledger) = &device else { unreachable!() };
    let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::Bf16).unwrap();
    let (x, w, mut y) = (alloc(30, 40), alloc(50, 40), alloc(30, 50));
    ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
    let cost = ledger.costs()["linear"];
    assert_eq!((cost.calls, cost.flops), (1, 2.0 * 30.0 * 40.0 * 50.0));
    assert_eq!(cost.bytes, 2.0 * (30.0 * 40.0 + 50.0 * 40.0 + 30.0 * 50.0));
}
