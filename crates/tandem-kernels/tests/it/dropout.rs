//! Dropout: the mask beside a plain computation of it, its rate, and that its elements do not depend on one another.

use crate::support::{Matrix, devices, vector};
use tandem_kernels::{DType, Device, Element, MemoryKind, bf16, ops};

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns whether an element is kept, by its half of the hash of its pair's index.
fn is_kept(key: u64, index: u64, p: f32) -> bool {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let bits = mix(mix(key.wrapping_add(STEP)).wrapping_add((index / 2).wrapping_mul(STEP)));
    let half = if index.is_multiple_of(2) { bits & 0xffff_ffff } else { bits >> 32 };
    half as f64 / 4_294_967_296.0 >= f64::from(p)
}

/// The same bits at every level and for every number of threads: those of the formula.
#[test]
fn elements_are_those_of_the_formula() {
    for (isa, device) in [1, 3].into_iter().flat_map(devices) {
        for shape in [(0, 5), (1, 1), (13, 31), (3, 17_001), (997, 37), (40, 512), (300, 16)] {
            for (from, to) in [
                (DType::F32, DType::F32),
                (DType::Bf16, DType::Bf16),
                (DType::F32, DType::Bf16),
                (DType::Bf16, DType::F32),
            ] {
                for (pad, p, key) in [(0, 0.0, 7), (3, 0.1, 8), (1, 0.5, u64::MAX), (8, 0.3, 9)] {
                    let what = format!("{} {shape:?} {from} to {to}, rate {p}", isa.name());
                    let x = Matrix::new(&device, 1, shape, from, pad);
                    let factor = (1.0 / (1.0 - f64::from(p))) as f32;
                    let value =
                        |i: usize| if is_kept(key, i as u64, p) { x.values[i] as f32 * factor } else { 0.0 };
                    let round =
                        |x: f32| if to == DType::Bf16 { <bf16 as Element>::from_f32(x).to_f32() } else { x };
                    let mut y = Matrix::new(&device, 2, shape, to, pad);
                    ops::dropout(&device, x.view(), y.view_mut(), key, p).unwrap();
                    let expected: Vec<f32> = (0..x.values.len()).map(|i| round(value(i))).collect();
                    assert!(y.read(&device) == expected, "{what}");
                    assert!(y.padding_is_intact(&device), "{what}: wrote outside");
                    let mut dx = Matrix::new(&device, 3, shape, to, pad);
                    ops::dropout_backward_add(&device, x.view(), dx.view_mut(), key, p).unwrap();
                    let sum = |i: usize| round(dx.values[i] as f32 + value(i));
                    let expected: Vec<f32> = (0..x.values.len()).map(sum).collect();
                    assert!(dx.read(&device) == expected, "{what}, backward");
                    assert!(dx.padding_is_intact(&device), "{what}: wrote outside");
                }
            }
        }
    }
}

/// The share of 2²⁰ elements that is kept lies within five standard deviations of 1 − p; and so it is of pairs of elements
/// some distance apart, of the same elements under neighbouring keys, and within each column. Keys are fixed and the mask is made of
/// integers, so the outcome is the same everywhere.
#[test]
fn elements_are_kept_at_the_rate_and_independently() {
    let device = Device::cpu(2, 1 << 28).unwrap();
    let (rows, cols) = (4096, 256);
    let ones = Matrix::from_values(&device, &vec![1.0; rows * cols], (rows, cols), DType::F32, 0);
    let masks = |p: f32| {
        [0, 1, 2, 1 << 32].map(|key| {
            let mut y = Matrix::new(&device, 2, (rows, cols), DType::F32, 0);
            ops::dropout(&device, ones.view(), y.view_mut(), key, p).unwrap();
            y.read(&device).into_iter().map(|x| x != 0.0).collect::<Vec<bool>>()
        })
    };
    let check = |what: &str, kept: usize, of: usize, share: f64| {
        let deviation = (share * (1.0 - share) / of as f64).sqrt();
        let found = kept as f64 / of as f64;
        assert!(
            (found - share).abs() < 5.0 * deviation,
            "{what}: {found} kept, expected {share} ± {deviation}"
        );
    };
    for p in [0.05f32, 0.3, 0.5, 0.9] {
        let q = 1.0 - f64::from(p);
        let masks = masks(p);
        for (key, mask) in masks.iter().enumerate() {
            let count = |keep: &dyn Fn(usize) -> bool, n: usize| (0..n).filter(|&i| keep(i)).count();
            check(&format!("rate {p}, mask {key}"), count(&|i| mask[i], mask.len()), mask.len(), q);
            for lag in [1, 2, 3, 4, 8, 16, 64, cols - 1, cols, cols + 1, 2 * cols, 1024 * cols] {
                let n = mask.len() - lag;
                let both = count(&|i| mask[i] && mask[i + lag], n);
                // Overlapping pairs depend on one another: count as half as many.
                let what = format!("rate {p}, mask {key}, {lag} apart");
                check(&what, both / 2, n / 2, q * q);
            }
            for other in &masks[..key] {
                let both = count(&|i| mask[i] && other[i], mask.len());
                check(&format!("rate {p}, two keys"), both, mask.len(), q * q);
            }
            for col in 0..cols {
                let kept = count(&|row| mask[row * cols + col], rows);
                check(&format!("rate {p}, mask {key}, column {col}"), kept, rows, q);
            }
        }
    }
}

#[test]
fn a_rate_of_one_is_refused() {
    let device = Device::meta();
    let x = device.alloc(MemoryKind::Scratch, 3, 4, DType::F32).unwrap();
    let mut y = device.alloc(MemoryKind::Scratch, 3, 4, DType::F32).unwrap();
    for p in [1.0, -0.1, f32::NAN] {
        let found = ops::dropout(&device, x.view(), y.view_mut(), 1, p).unwrap_err().to_string();
        assert_eq!(found, format!("dropout: rate {p}, expected at least 0 and below 1"));
    }
}

#[test]
fn noise_is_uniform_and_the_same_everywhere() {
    let (rows, cols) = (64, 129);
    let of = |row: usize| ops::NoiseRow { key: 1000 + row as u64, scale: 0.25 * (1 + row % 2) as f32 };
    let mut first: Option<Vec<f32>> = None;
    for (place, device) in [1, 3].into_iter().flat_map(devices) {
        let mut x = Matrix::new(&device, 3, (rows, cols), DType::F32, 0);
        let before = x.read(&device);
        let noise: Vec<_> = (0..rows).map(of).collect();
        ops::add_noise(&device, x.view_mut(), &noise).unwrap();
        let found = x.read(&device);
        assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{place:?}");
        for half in 0..2 {
            let scale = f64::from(of(half).scale);
            let elements = (0..rows * cols).filter(|at| at / cols % 2 == half);
            let noise: Vec<f64> = elements.map(|at| f64::from(found[at]) - f64::from(before[at])).collect();
            assert!(noise.iter().all(|x| x.abs() <= scale + 1e-6), "{place:?}");
            let count = noise.len() as f64;
            let (mean, square) =
                (noise.iter().sum::<f64>() / count, noise.iter().map(|x| x * x).sum::<f64>() / count);
            // Four standard deviations of 4,128 draws: of the mean, and of the mean square.
            assert!(mean.abs() < 4.0 * scale / (3.0 * count).sqrt(), "{place:?}: {mean}");
            assert!(
                (square / (scale * scale / 3.0) - 1.0).abs() < 4.0 * 0.9 / count.sqrt(),
                "{place:?}: {square}"
            );
        }
        // A row depends on its key alone.
        let mut alone = Matrix::new(&device, 3, (1, cols), DType::F32, 0);
        let before = alone.read(&device);
        let mut twice = alone.view_mut();
        ops::add_noise(&device, twice.reborrow(), &[of(5)]).unwrap();
        let noise_of = |after: &[f32], before: &[f32]| -> Vec<f64> {
            after.iter().zip(before).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect()
        };
        let alone = noise_of(&alone.read(&device), &before);
        let all = Matrix::new(&device, 3, (rows, cols), DType::F32, 0).read(&device);
        let row = 5 * cols..6 * cols;
        for (alone, among) in alone.iter().zip(noise_of(&found[row.clone()], &all[row])) {
            assert!((alone - among).abs() < 3e-7, "{place:?}: {alone} and {among}");
        }
        assert!(ops::add_noise(&device, vector(&device, &[0.0; 4]).view_mut(), &[]).is_err());
    }
}
