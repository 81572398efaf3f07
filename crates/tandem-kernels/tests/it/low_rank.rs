//! Operations of LoRA and DoRA beside products, against f64, at every level of vector instructions of this processor; and the same
//! bits for every number of threads.

use crate::support::{F32_ROUNDOFF, Matrix, assert_close, devices, roundoff};
use tandem_kernels::{DType, Device, MemoryKind, ops};

const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Rows and columns: none, one, primes, a row longer than a block, more rows than a block.
const SHAPES: [(usize, usize); 6] = [(0, 5), (1, 1), (13, 31), (3, 17_001), (997, 37), (70, 300)];

/// Runs `compute` on devices of one and of three threads, which must agree, for every level of instructions.
fn same_bits(compute: impl Fn(&str, &Device) -> Vec<f32>) {
    for ((isa, one), (_, three)) in devices(1).into_iter().zip(devices(3)) {
        let bits = |device| compute(isa.name(), device).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&one) == bits(&three), "{}: bits depend on threads", isa.name());
    }
}

#[test]
fn columns_are_scaled_in_place_and_out_of_place() {
    for shape in SHAPES {
        for (from, to) in TYPES.into_iter().flat_map(|a| TYPES.map(|b| (a, b))) {
            for (pad, with_bias) in [(0, false), (3, true)] {
                same_bits(|isa, device| {
                    let what = format!("{isa} {shape:?} {from} to {to}, padded by {pad}, bias {with_bias}");
                    let x = Matrix::new(device, 1, shape, from, pad);
                    let factors = Matrix::new(device, 2, (1, shape.1), DType::F32, pad);
                    let bias = Matrix::new(device, 3, (1, shape.1), DType::F32, pad);
                    let add = with_bias.then(|| bias.view());
                    let mut y = Matrix::new(device, 4, shape, to, pad);
                    ops::scaled_columns(device, x.view(), factors.view(), add, y.view_mut()).unwrap();
                    let of = |x: &Matrix| -> Vec<f64> {
                        let term = |i: usize| if with_bias { bias.values[i % shape.1] } else { 0.0 };
                        let product = |(i, x): (usize, &f64)| x * factors.values[i % shape.1] + term(i);
                        x.values.iter().enumerate().map(product).collect()
                    };
                    // Two roundings of numbers below 2 in f32, one of the result.
                    let expected = of(&x);
                    let found = y.read(device);
                    assert_close(&what, &found, &expected, |i| {
                        4.0 * F32_ROUNDOFF + roundoff(to) * expected[i].abs()
                    });
                    assert!(y.padding_is_intact(device), "{what}: wrote outside");
                    let mut own = Matrix::new(device, 5, shape, to, pad);
                    ops::scale_columns(device, own.view_mut(), factors.view(), add).unwrap();
                    let expected = of(&own);
                    assert_close(&what, &own.read(device), &expected, |i| {
                        4.0 * F32_ROUNDOFF + roundoff(to) * expected[i].abs()
                    });
                    assert!(own.padding_is_intact(device), "{what}: wrote outside");
                    [found, own.read(device)].concat()
                });
            }
        }
    }
}

#[test]
fn dot_products_of_columns() {
    for shape in SHAPES {
        for (left, right) in TYPES.into_iter().flat_map(|a| TYPES.map(|b| (a, b))) {
            for (pad, adds) in [(0, false), (3, true)] {
                same_bits(|isa, device| {
                    let what = format!("{isa} {shape:?} {left} {right}, padded by {pad}, adds {adds}");
                    let a = Matrix::new(device, 1, shape, left, pad);
                    let b = Matrix::new(device, 2, shape, right, pad);
                    let mut out = Matrix::new(device, 3, (1, shape.1), DType::F32, pad);
                    ops::column_dots(device, a.view(), b.view(), out.view_mut(), adds).unwrap();
                    let sum = |j: usize, f: fn(f64) -> f64| -> f64 {
                        let start = if adds { f(out.values[j]) } else { 0.0 };
                        let rows = (0..shape.0).map(|i| i * shape.1 + j);
                        start + rows.map(|i| f(a.values[i] * b.values[i])).sum::<f64>()
                    };
                    let expected: Vec<f64> = (0..shape.1).map(|j| sum(j, |x| x)).collect();
                    assert_close(&what, &out.read(device), &expected, |j| {
                        (shape.0 + 2) as f64 * F32_ROUNDOFF * sum(j, f64::abs)
                    });
                    assert!(out.padding_is_intact(device), "{what}: wrote outside");
                    out.read(device)
                });
            }
        }
    }
}

#[test]
fn lengths_of_rows_with_a_low_rank_term() {
    for (n, k, r) in [(0, 3, 2), (1, 1, 1), (13, 31, 3), (29, 1037, 8), (100, 512, 16), (5, 600, 0)] {
        for (dtype, factor) in
            [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::F32)]
        {
            same_bits(|isa, device| {
                let what = format!("{isa} {n}x{k}, rank {r}, {dtype} and {factor}");
                let w = Matrix::new(device, 1, (n, k), dtype, 3);
                let a = Matrix::new(device, 2, (r, k), factor, 3);
                let b = Matrix::new(device, 3, (n, r), factor, 3);
                let mut out = Matrix::new(device, 4, (1, n), DType::F32, 3);
                ops::low_rank_row_norms(device, w.view(), a.view(), b.view(), 0.7, out.view_mut()).unwrap();
                let element = |i: usize, j: usize| -> f64 {
                    let terms = (0..r).map(|p| b.values[i * r + p] * a.values[p * k + j]);
                    w.values[i * k + j] + f64::from(0.7f32) * terms.sum::<f64>()
                };
                let length = |i: usize| (0..k).map(|j| element(i, j).powi(2)).sum::<f64>().sqrt();
                let expected: Vec<f64> = (0..n).map(length).collect();
                // Rounding errors of the elements, of order u·√r, add up like the elements themselves.
                assert_close(&what, &out.read(device), &expected, |i| {
                    64.0 * F32_ROUNDOFF * (expected[i] + 1.0)
                });
                assert!(out.padding_is_intact(device), "{what}: wrote outside");
                out.read(device)
            });
        }
    }
}

/// A shard's columns are a matrix of their own; one rank's lie within a larger one.
#[test]
fn squares_of_some_columns_do_not_depend_on_where_they_lie() {
    for (k, columns) in [(31, 7..18), (1040, 4..1032), (2100, 13..2099), (24, 8..16)] {
        for (dtype, factor) in [(DType::F32, DType::F32), (DType::Bf16, DType::F32)] {
            same_bits(|isa, device| {
                let (n, r) = (29, 3);
                let what = format!("{isa} {columns:?} of {n}x{k}, {dtype} and {factor}");
                let w = Matrix::new(device, 1, (n, k), dtype, 3);
                let a = Matrix::new(device, 2, (r, k), factor, 3);
                let b = Matrix::new(device, 3, (n, r), factor, 3);
                let squares = |w, a| {
                    let mut out = Matrix::new(device, 4, (1, n), DType::F32, 3);
                    ops::low_rank_row_squares(device, w, a, b.view(), 0.7, out.view_mut()).unwrap();
                    assert!(out.padding_is_intact(device), "{what}: wrote outside");
                    out.read(device)
                };
                let part = |x: &Matrix| {
                    let (rows, dtype) = (x.view().rows(), x.view().dtype());
                    let mut own = device.alloc(MemoryKind::Scratch, rows, columns.len(), dtype).unwrap();
                    ops::cast(device, x.view().col_range(columns.clone()), own.view_mut()).unwrap();
                    own
                };
                let (own_w, own_a) = (part(&w), part(&a));
                let found = squares(w.view().col_range(columns.clone()), a.view().col_range(columns.clone()));
                let own = squares(own_w.view(), own_a.view());
                assert!(found == own, "{what}");
                let mut norms = Matrix::new(device, 4, (1, n), DType::F32, 3);
                let (w, a) = (own_w.view(), own_a.view());
                ops::low_rank_row_norms(device, w, a, b.view(), 0.7, norms.view_mut()).unwrap();
                let expected: Vec<f64> =
                    norms.read(device).iter().map(|&x| f64::from(x) * f64::from(x)).collect();
                assert_close(&what, &found, &expected, |i| 4.0 * F32_ROUNDOFF * expected[i]);
                found
            });
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::meta();
    let alloc = |rows, cols, dtype| device.alloc(MemoryKind::Scratch, rows, cols, dtype).unwrap();
    let (x, row) = (alloc(3, 4, DType::Bf16), alloc(1, 5, DType::F32));
    let mut y = alloc(3, 4, DType::Bf16);
    let found = ops::scale_columns(&device, y.view_mut(), row.view(), None).unwrap_err().to_string();
    assert_eq!(found, "scale_columns: factors is 1x5, expected 1x4");
    let mut out = alloc(1, 4, DType::Bf16);
    let found = ops::column_dots(&device, x.view(), y.view(), out.view_mut(), true).unwrap_err().to_string();
    assert_eq!(found, "column_dots: out is bf16, expected f32");
    let (a, b) = (alloc(2, 4, DType::F32), alloc(3, 1, DType::F32));
    let mut out = alloc(1, 3, DType::F32);
    let found = ops::low_rank_row_norms(&device, x.view(), a.view(), b.view(), 1.0, out.view_mut());
    assert_eq!(found.unwrap_err().to_string(), "low_rank_row_norms: b is 3x1, expected 3x2");
}
