//! Moving and converting: exact, so compared for equality.

use crate::support::{Matrix, assert_close, devices, numbers};
use tandem_kernels::{DType, Device, MemoryKind, bf16, ops};

const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Nothing, one element, primes, a row longer than a block, more rows than a block holds; and the last two of whole vectors.
const SHAPES: [(usize, usize); 8] =
    [(0, 5), (1, 1), (13, 31), (2, 40_001), (997, 37), (3, 0), (3, 8200), (300, 16)];

/// Elements before each row: none, as many as leave nothing aligned, and as many as leave vectors so.
const PADS: [usize; 3] = [0, 3, 8];

fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    let round = |x: &f64| f64::from(bf16::from_f32(*x as f32).to_f32());
    if dtype == DType::Bf16 { values.iter().map(round).collect() } else { values.to_vec() }
}

#[test]
fn casts_round_to_nearest_even() {
    for (isa, device) in devices(2) {
        for shape in SHAPES {
            for (from, to) in TYPES.into_iter().flat_map(|a| TYPES.map(|b| (a, b))) {
                for pad in PADS {
                    let what = format!("{} {shape:?} {from} to {to}, padded by {pad}", isa.name());
                    let src = Matrix::new(&device, 1, shape, from, pad);
                    let mut dst = Matrix::new(&device, 2, shape, to, pad);
                    ops::cast(&device, src.view(), dst.view_mut()).unwrap();
                    assert_close(&what, &dst.read(&device), &rounded(&src.values, to), |_| 0.0);
                    assert!(dst.padding_is_intact(&device), "{what}: wrote outside");
                }
            }
        }
        let special = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            -0.0,
            f32::MAX,
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
        ];
        let src = Matrix::from_values(&device, &special, (1, 7), DType::F32, 0);
        let mut dst = Matrix::new(&device, 2, (1, 7), DType::Bf16, 0);
        ops::cast(&device, src.view(), dst.view_mut()).unwrap();
        let found = dst.read(&device);
        assert!(found[0].is_nan() && found[3].to_bits() == (-0.0f32).to_bits());
        let even = [1.0, 1.0 + 4.0 / 256.0];
        assert_eq!(found[1..3], special[1..3]);
        assert_eq!(found[4..], [f32::INFINITY, even[0], even[1]], "ties go to the even neighbour");
    }
}

#[test]
fn adding_scaling_and_clearing_touch_every_element_once() {
    for (isa, device) in devices(2) {
        for shape in SHAPES {
            for (dtype, pad) in TYPES.into_iter().flat_map(|dtype| PADS.map(|pad| (dtype, pad))) {
                let what = format!("{} {shape:?} {dtype}, padded by {pad}", isa.name());
                let src = Matrix::new(&device, 1, shape, dtype, pad);
                let mut dst = Matrix::new(&device, 2, shape, DType::F32, pad);
                let sums: Vec<f64> = (src.values.iter().zip(&dst.values))
                    .map(|(a, b)| f64::from(*a as f32 + *b as f32))
                    .collect();
                ops::add(&device, src.view(), dst.view_mut()).unwrap();
                assert_close(&what, &dst.read(&device), &sums, |_| 0.0);
                let scaled: Vec<f64> = sums.iter().map(|x| f64::from(*x as f32 * 0.3)).collect();
                ops::scale(&device, dst.view_mut(), 0.3).unwrap();
                assert_close(&what, &dst.read(&device), &scaled, |_| 0.0);
                let mut narrow = Matrix::new(&device, 3, shape, dtype, pad);
                let scaled: Vec<f64> = narrow.values.iter().map(|x| f64::from(*x as f32 * 0.3)).collect();
                ops::scale(&device, narrow.view_mut(), 0.3).unwrap();
                assert_close(&what, &narrow.read(&device), &rounded(&scaled, dtype), |_| 0.0);
                assert!(narrow.padding_is_intact(&device), "{what}: wrote outside");
                ops::fill_zero(&device, dst.view_mut()).unwrap();
                assert_close(&what, &dst.read(&device), &vec![0.0; sums.len()], |_| 0.0);
                assert!(dst.padding_is_intact(&device), "{what}: wrote outside");
            }
        }
    }
}

#[test]
fn rows_are_gathered_spread_and_scattered() {
    let (rows, picked) = (29, [3, 0, 28, 7, 8]);
    for (isa, device) in devices(2) {
        for (dtype, (cols, pad)) in TYPES.into_iter().flat_map(|t| [(37, 3), (40, 8)].map(|c| (t, c))) {
            let what = format!("{} {dtype}, {cols} columns", isa.name());
            let src = Matrix::new(&device, 1, (rows, cols), dtype, pad);
            let mut dst = Matrix::new(&device, 2, (picked.len(), cols), DType::F32, pad);
            ops::gather_rows(&device, src.view(), &picked, dst.view_mut()).unwrap();
            let row = |r: &u32| &src.values[*r as usize * cols..][..cols];
            let expected: Vec<f64> = picked.iter().flat_map(row).copied().collect();
            assert_close(&what, &dst.read(&device), &expected, |_| 0.0);

            let src = Matrix::new(&device, 3, (picked.len(), cols), dtype, pad);
            for to in TYPES {
                let mut whole = Matrix::new(&device, 4, (rows, cols), to, pad);
                ops::spread_rows(&device, src.view(), &picked, whole.view_mut()).unwrap();
                let mut kept = Matrix::new(&device, 5, (rows, cols), to, pad);
                ops::scatter_rows(&device, src.view(), &picked, kept.view_mut()).unwrap();
                let (mut expected, mut scattered) = (vec![0.0; rows * cols], kept.values.clone());
                for (r, values) in picked.iter().zip(src.values.chunks_exact(cols)) {
                    let round = |x: &f64| match to {
                        DType::F32 => *x,
                        DType::Bf16 => f64::from(bf16::from_f32(*x as f32).to_f32()),
                    };
                    let place = *r as usize * cols..(*r as usize + 1) * cols;
                    let values: Vec<f64> = values.iter().map(round).collect();
                    expected[place.clone()].copy_from_slice(&values);
                    scattered[place].copy_from_slice(&values);
                }
                assert_close(&format!("{what} to {to}"), &whole.read(&device), &expected, |_| 0.0);
                assert!(whole.padding_is_intact(&device), "{what}: wrote outside");
                assert_close(&format!("{what} into {to}"), &kept.read(&device), &scattered, |_| 0.0);
                assert!(kept.padding_is_intact(&device), "{what}: wrote outside");
            }
        }
    }
}

/// Matrices in another memory of the same device, such as host memory of a GPU.
#[test]
fn memories_of_one_device_exchange_matrices() {
    for (place, device) in devices(2) {
        let host = device.with_memory(1 << 24).unwrap();
        for (from, to) in TYPES.into_iter().flat_map(|a| TYPES.map(|b| (a, b))) {
            for (shape, pad) in [((16, 64), 0), ((13, 31), 3)] {
                let what = format!("{} {shape:?} {from} to {to}", place.name());
                let src = Matrix::new(&host, 1, shape, from, pad);
                let mut there = Matrix::new(&device, 2, shape, to, pad);
                ops::cast(&device, src.view(), there.view_mut()).unwrap();
                assert_close(&what, &there.read(&device), &rounded(&src.values, to), |_| 0.0);
                let mut back = Matrix::new(&host, 3, shape, to, pad);
                ops::cast(&host, there.view(), back.view_mut()).unwrap();
                assert_close(&what, &back.read(&host), &rounded(&src.values, to), |_| 0.0);
                assert!(there.padding_is_intact(&device) && back.padding_is_intact(&host), "{what}");
            }
        }
    }
}

#[test]
fn wrong_rows_are_refused() {
    let device = Device::meta();
    let mut src = device.alloc(MemoryKind::Scratch, 4, 2, DType::F32).unwrap();
    let mut dst = device.alloc(MemoryKind::Scratch, 3, 2, DType::F32).unwrap();
    let outside = ops::gather_rows(&device, src.view(), &[0, 4, 1], dst.view_mut()).unwrap_err();
    assert_eq!(outside.to_string(), "gather_rows: rows[1] is 4, the matrix has 4 rows");
    let twice = ops::spread_rows(&device, src.view(), &[2, 0, 2, 1], dst.view_mut()).unwrap_err();
    assert_eq!(twice.to_string(), "spread_rows: row 2 is listed twice");
    let outside = ops::scatter_rows(&device, src.view(), &[2, 0, 3, 1], dst.view_mut()).unwrap_err();
    assert_eq!(outside.to_string(), "scatter_rows: rows[2] is 3, the matrix has 3 rows");
    let twice = ops::scatter_rows(&device, dst.view(), &[1, 0, 1], src.view_mut()).unwrap_err();
    assert_eq!(twice.to_string(), "scatter_rows: row 1 is listed twice");
    let short = ops::write_f32(&device, &numbers(1, 5), dst.view_mut()).unwrap_err();
    assert_eq!(short.to_string(), "write_f32: 5 numbers, expected those of a 3x2 matrix");
}
