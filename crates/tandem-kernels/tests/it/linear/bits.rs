//! Precision of products, and independence of their bits.

use std::ops::Range;

use tandem_kernels::ops::LowRankFactor;
use tandem_kernels::{DType, ViewMut, ops};

use super::Sums;
use crate::support::{Matrix, devices, processors};

/// f32 products are as exact as multiply-adds in f32, one after another, whatever they are made of.
#[test]
fn f32_products_keep_the_precision_of_f32() {
    let (t, k, n) = (64, 2000, 48);
    for (place, device) in devices(2) {
        let x = Matrix::new(&device, 1, (t, k), DType::F32, 0);
        let w = Matrix::new(&device, 2, (n, k), DType::F32, 0);
        let mut y = Matrix::new(&device, 3, (t, n), DType::F32, 0);
        ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
        let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        let chain = |i: usize| {
            let (x, w) = (&x.values[i / n * k..][..k], &w.values[i % n * k..][..k]);
            x.iter().zip(w).fold(0.0f32, |sum, (x, w)| (*x as f32).mul_add(*w as f32, sum))
        };
        let error = |found: &dyn Fn(usize) -> f32| {
            let squares = sums.values.iter().enumerate().map(|(i, p)| (f64::from(found(i)) - p).powi(2));
            (squares.sum::<f64>() / sums.values.len() as f64).sqrt()
        };
        let found = y.read(&device);
        let (ours, theirs) = (error(&|i| found[i]), error(&chain));
        assert!(ours <= theirs, "{}: root mean square error {ours:e}, of a chain {theirs:e}", place.name());
    }
}

/// Chunks of the head, micro-batches, ranks and steps of generation cut the same rows differently. Few rows
/// and many have kernels of their own, and very few rows of whole panels another.
#[test]
fn the_bits_of_a_row_do_not_depend_on_its_neighbours() {
    let t = 137;
    let shapes = [(700, 90), (2112, 48), (1024, 160), (1040, 150), (1087, 203), (33, 320), (96, 6)];
    for ((isa, device), (k, n)) in processors(2).iter().flat_map(|level| shapes.map(|s| (level, s))) {
        for (dtype, result) in
            [(DType::F32, DType::F32), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)]
        {
            let x = Matrix::new(device, 1, (t, k), dtype, 0);
            let w = Matrix::new(device, 2, (n, k), dtype, 0);
            let [h, b] = [(3, t), (4, n)].map(|(seed, rows)| Matrix::new(device, seed, (rows, 5), dtype, 0));
            let bias = Matrix::new(device, 5, (1, n), DType::F32, 0);
            let residual = Matrix::new(device, 6, (t, n), DType::F32, 0);
            type Form<'a> = &'a dyn Fn(Range<usize>, ViewMut);
            let forms: [Form; 4] = [
                &|rows, y| ops::linear(device, x.view().row_range(rows), w.view(), None, None, y).unwrap(),
                &|rows, y| {
                    let (x, bias) = (x.view().row_range(rows), Some(bias.view()));
                    ops::sharded_linear(device, x, w.view(), None, bias, None, y).unwrap();
                },
                &|rows, y| {
                    let (x, h) = (x.view().row_range(rows.clone()), h.view().row_range(rows));
                    let low_rank = ops::LowRank { h, b: b.view() };
                    ops::sharded_linear_low_rank(device, x, w.view(), low_rank, None, y).unwrap();
                },
                &|rows, y| {
                    let (x, h) = (x.view().row_range(rows.clone()), h.view().row_range(rows.clone()));
                    let (low_rank, residual) =
                        (ops::LowRank { h, b: b.view() }, Some(residual.view().row_range(rows)));
                    ops::linear_low_rank(device, x, w.view(), low_rank, None, residual, y).unwrap();
                },
            ];
            for (number, form) in forms.into_iter().enumerate() {
                let mut all = Matrix::new(device, 7, (t, n), result, 0);
                form(0..t, all.view_mut());
                let all = all.read(device);
                for rows in [0..1, 3..5, 7..13, 0..16, 2..16, 0..17, 1..31, 5..40, 31..64, 100..137] {
                    let mut some = Matrix::new(device, 8, (rows.len(), n), result, 0);
                    form(rows.clone(), some.view_mut());
                    let expected = &all[rows.start * n..rows.end * n];
                    let same =
                        some.read(device).iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{} {dtype} {result} {k}x{n} form {number}: rows {rows:?}", isa.name());
                }
            }
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let shapes = [(1, 512, 300), (5, 300, 700), (61, 67, 71), (300, 600, 130), (1100, 1100, 390)];
    for (t, k, n) in shapes {
        for dtype in [DType::F32, DType::Bf16] {
            let mut first: Vec<Option<[Vec<f32>; 4]>> = vec![None; processors(1).len()];
            for threads in [1, 2, 3, 5] {
                for (level, (isa, device)) in processors(threads).into_iter().enumerate() {
                    let x = Matrix::new(&device, 1, (t, k), dtype, 0);
                    let w = Matrix::new(&device, 2, (n, k), dtype, 0);
                    let dy = Matrix::new(&device, 3, (t, n), dtype, 0);
                    let mut y = Matrix::new(&device, 4, (t, n), dtype, 0);
                    let mut dx = Matrix::new(&device, 5, (t, k), dtype, 0);
                    let mut dw = Matrix::new(&device, 6, (n, k), DType::F32, 0);
                    let mut db = Matrix::new(&device, 7, (1, n), DType::F32, 0);
                    ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
                    ops::linear_backward_input(&device, dy.view(), w.view(), dx.view_mut(), false).unwrap();
                    ops::linear_backward_weight(&device, dy.view(), x.view(), dw.view_mut(), true).unwrap();
                    ops::bias_backward(&device, dy.view(), db.view_mut()).unwrap();
                    let results = [y, dx, dw, db].map(|m| m.read(&device));
                    let expected = first[level].get_or_insert_with(|| results.clone());
                    for (name, (found, expected)) in
                        ["y", "dx", "dw", "db"].iter().zip(results.iter().zip(expected.iter()))
                    {
                        let same = found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{} {t}x{k}x{n} {dtype} {name}: {threads} threads differ from 1",
                            isa.name()
                        );
                    }
                }
            }
        }
    }
}

/// Ranks of tensor parallelism hold rows of B, or columns of A, of any number; the rank of an adapter is whole.
#[test]
fn gradients_of_low_rank_factors_have_the_bits_of_their_slices() {
    let t = 70;
    for ((isa, device), dtype) in
        processors(2).iter().flat_map(|level| [DType::F32, DType::Bf16].map(|dtype| (level, dtype)))
    {
        for (rank, length) in [(8, 96), (17, 64), (48, 64), (64, 128), (80, 96)] {
            let [of_rank, other] =
                [(1, rank), (2, length)].map(|(seed, cols)| Matrix::new(device, seed, (t, cols), dtype, 0));
            let gradients = |own: Range<usize>| {
                let (h, other) = (of_rank.view(), other.view().col_range(own.clone()));
                let mut a = Matrix::new(device, 3, (rank, length), DType::F32, 0);
                let mut b = Matrix::new(device, 4, (length, rank), DType::F32, 0);
                let (own_a, own_b) = (a.view_mut().col_range(own.clone()), b.view_mut().row_range(own));
                ops::low_rank_backward_weight(device, LowRankFactor::A, h, other, own_a).unwrap();
                ops::low_rank_backward_weight(device, LowRankFactor::B, other, h, own_b).unwrap();
                [a.read(device), b.read(device)]
            };
            let [whole_a, whole_b] = gradients(0..length);
            for part in [length / 2, length / 4, length / 8] {
                for own in (0..length).step_by(part).map(|start| start..start + part) {
                    let [a, b] = gradients(own.clone());
                    let what = format!("{} {dtype} rank {rank}, {own:?} of {length}", isa.name());
                    for row in 0..rank {
                        let columns = row * length + own.start..row * length + own.end;
                        assert_eq!(a[columns.clone()], whole_a[columns], "A, {what}");
                    }
                    let rows = own.start * rank..own.end * rank;
                    assert_eq!(b[rows.clone()], whole_b[rows], "B, {what}");
                }
            }
        }
    }
}
