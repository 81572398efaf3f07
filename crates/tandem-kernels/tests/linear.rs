//! The linear layer's three products against f64, at every level of vector instructions of this processor.

mod support;

use support::{BF16_ROUNDOFF, F32_ROUNDOFF, Matrix, assert_close, devices};
use tandem_kernels::ops::LowRank;
use tandem_kernels::{DType, Device, KernelError, Kind, ops};

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

/// `Σ_k a[i,k] · b[k,j]` and `Σ_k |a[i,k] · b[k,j]|`, in f64.
fn reference(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> (Vec<f64>, Vec<f64>) {
    let mut sums = Vec::with_capacity(m * n);
    let mut magnitudes = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let products = (0..k).map(|k| a(i, k) * b(k, j));
            sums.push(products.clone().sum());
            magnitudes.push(products.map(f64::abs).sum());
        }
    }
    (sums, magnitudes)
}

/// The error bound of a dot product summed in any order in f32: `(terms) · u · Σ|a·b|`, plus rounding the result.
fn check(what: &str, found: &[f32], expected: &[f64], magnitude: &[f64], terms: usize, dtype: DType) {
    let rounding = if dtype == DType::Bf16 { BF16_ROUNDOFF } else { F32_ROUNDOFF };
    assert_close(what, found, expected, |i| {
        (terms + 4) as f64 * F32_ROUNDOFF * magnitude[i] + rounding * expected[i].abs() + 1e-37
    });
}

/// As [`check`], of a product of m × k and k × n with a term. Where one of these is short the term is a product of its own, and what
/// it is added to has been rounded.
fn check_with_term(
    what: &str,
    found: &[f32],
    expected: &[f64],
    magnitude: &[f64],
    [n, k, rank]: [usize; 3],
    dtype: DType,
) {
    let rounding = if dtype == DType::Bf16 { BF16_ROUNDOFF } else { F32_ROUNDOFF };
    let twice = if n.min(k) <= 32 { rounding } else { 0.0 };
    assert_close(what, found, expected, |i| {
        let terms = (k + rank + 4) as f64 * F32_ROUNDOFF;
        (terms + twice) * magnitude[i] + rounding * expected[i].abs() + 1e-37
    });
}

fn for_all(mut case: impl FnMut(&str, &Device, (usize, usize, usize), DType, DType, usize)) {
    for (isa, device) in devices(2) {
        for shape in SHAPES {
            for (dtype, out) in [
                (DType::F32, DType::F32),
                (DType::Bf16, DType::F32),
                (DType::Bf16, DType::Bf16),
                (DType::F32, DType::Bf16),
            ] {
                for pad in [0, 3] {
                    let what = format!("{} {shape:?} {dtype} to {out}, padded by {pad}", isa.name());
                    case(&what, &device, shape, dtype, out, pad);
                }
            }
        }
    }
}

#[test]
fn forward_with_and_without_bias_and_residual() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        let x = Matrix::new(device, 1, (t, k), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let bias = Matrix::new(device, 3, (1, n), DType::F32, pad);
        let residual = Matrix::new(device, 4, (t, n), DType::F32, pad);
        let (products, magnitudes) =
            reference((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut y = Matrix::new(device, 5, (t, n), out, pad);
            let b = with_bias.then(|| bias.view());
            let r = with_residual.then(|| residual.view());
            ops::linear(device, x.view(), w.view(), b, r, y.view_mut()).unwrap();
            let add = |i: usize| {
                let b = if with_bias { bias.values[i % n] } else { 0.0 };
                let r = if with_residual { residual.values[i] } else { 0.0 };
                (b + r, b.abs() + r.abs())
            };
            let expected: Vec<f64> = products.iter().enumerate().map(|(i, p)| p + add(i).0).collect();
            let magnitude: Vec<f64> = magnitudes.iter().enumerate().map(|(i, m)| m + add(i).1).collect();
            let what = format!("{what}, bias {with_bias}, residual {with_residual}");
            check(&what, &y.read(device), &expected, &magnitude, k, out);
            assert!(y.padding_is_intact(device), "{what}: wrote outside");
        }
    });
}

#[test]
fn forward_added_to_what_is_there() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        let x = Matrix::new(device, 1, (t, k), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let mut y = Matrix::new(device, 3, (t, n), out, pad);
        ops::linear_add(device, x.view(), w.view(), y.view_mut()).unwrap();
        let (products, magnitudes) =
            reference((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        let expected: Vec<f64> = products.iter().zip(&y.values).map(|(p, y)| p + y).collect();
        let magnitude: Vec<f64> = magnitudes.iter().zip(&y.values).map(|(m, y)| m + y.abs()).collect();
        check(what, &y.read(device), &expected, &magnitude, k, out);
        assert!(y.padding_is_intact(device), "{what}: wrote outside");
    });
}

/// A low-rank term is summed with the product, and rounded once with it.
#[test]
fn forward_with_a_low_rank_term() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        for rank in [1, 16, 70] {
            let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
            let (x, w, h, b) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank), matrix(4, n, rank));
            let residual = Matrix::new(device, 5, (t, n), DType::F32, pad);
            let (products, magnitudes) = reference(
                (t, n, k + rank),
                |i, p| if p < k { x.values[i * k + p] } else { h.values[i * rank + p - k] },
                |p, j| if p < k { w.values[j * k + p] } else { b.values[j * rank + p - k] },
            );
            for with_residual in [false, true] {
                let mut y = Matrix::new(device, 6, (t, n), out, pad);
                let r = with_residual.then(|| residual.view());
                let low_rank = LowRank { h: h.view(), b: b.view() };
                ops::linear_low_rank(device, x.view(), w.view(), low_rank, None, r, y.view_mut()).unwrap();
                let add = |i: usize| if with_residual { residual.values[i] } else { 0.0 };
                let expected: Vec<f64> = products.iter().enumerate().map(|(i, p)| p + add(i)).collect();
                let magnitude: Vec<f64> =
                    magnitudes.iter().enumerate().map(|(i, m)| m + add(i).abs()).collect();
                let what = format!("{what}, rank {rank}, residual {with_residual}");
                check_with_term(&what, &y.read(device), &expected, &magnitude, [n, k, rank], out);
                assert!(y.padding_is_intact(device), "{what}: wrote outside");
            }
        }
    });
}

/// An adapter that has not learned anything leaves the bits of its base.
#[test]
fn a_term_of_zeros_leaves_the_bits() {
    let rank = 24;
    let shapes = [(137, 2100, 90), (70, 31, 40), (70, 40, 31), (9, 50, 60)];
    for ((isa, device), (t, k, n)) in devices(2).iter().flat_map(|level| shapes.map(|shape| (level, shape))) {
        for dtype in [DType::F32, DType::Bf16] {
            for out in [DType::F32, DType::Bf16] {
                let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, 0);
                let (x, w, h) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank));
                let zeros = device.zeros(Kind::Activations, n, rank, dtype).unwrap();
                let [mut with, mut without] = [4, 5].map(|seed| Matrix::new(device, seed, (t, n), out, 0));
                let low_rank = LowRank { h: h.view(), b: zeros.view() };
                ops::linear_low_rank(device, x.view(), w.view(), low_rank, None, None, with.view_mut())
                    .unwrap();
                ops::linear(device, x.view(), w.view(), None, None, without.view_mut()).unwrap();
                assert!(with.read(device) == without.read(device), "{} {dtype} to {out}", isa.name());
            }
        }
    }
}

/// So long that the weights are packed in several ranges of outputs.
#[test]
fn a_very_long_sum() {
    let (t, k, n) = (17, 8200, 300);
    for (isa, device) in devices(2) {
        for dtype in [DType::F32, DType::Bf16] {
            let x = Matrix::new(&device, 1, (t, k), dtype, 0);
            let w = Matrix::new(&device, 2, (n, k), dtype, 0);
            let mut y = Matrix::new(&device, 3, (t, n), dtype, 0);
            ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
            let (products, magnitudes) =
                reference((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
            check(&format!("{} {dtype}", isa.name()), &y.read(&device), &products, &magnitudes, k, dtype);
        }
    }
}

#[test]
fn gradient_to_the_input() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let (products, magnitudes) =
            reference((t, k, n), |i, p| dy.values[i * n + p], |p, j| w.values[p * k + j]);
        for accumulate in [false, true] {
            let mut dx = Matrix::new(device, 3, (t, k), out, pad);
            ops::linear_backward_input(device, dy.view(), w.view(), dx.view_mut(), accumulate).unwrap();
            let before = |i: usize| if accumulate { dx.values[i] } else { 0.0 };
            let expected: Vec<f64> = products.iter().enumerate().map(|(i, p)| p + before(i)).collect();
            let magnitude: Vec<f64> =
                magnitudes.iter().enumerate().map(|(i, m)| m + before(i).abs()).collect();
            let what = format!("{what}, accumulate {accumulate}");
            check(&what, &dx.read(device), &expected, &magnitude, n, out);
            assert!(dx.padding_is_intact(device), "{what}: wrote outside");
        }
    });
}

#[test]
fn gradient_to_the_input_with_a_low_rank_term() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        for rank in [1, 16, 70] {
            let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
            let (dy, w, dh, a) = (matrix(1, t, n), matrix(2, n, k), matrix(3, t, rank), matrix(4, rank, k));
            let (products, magnitudes) = reference(
                (t, k, n + rank),
                |i, p| if p < n { dy.values[i * n + p] } else { dh.values[i * rank + p - n] },
                |p, j| if p < n { w.values[p * k + j] } else { a.values[(p - n) * k + j] },
            );
            for accumulate in [false, true] {
                let mut dx = Matrix::new(device, 5, (t, k), out, pad);
                let low_rank = (dh.view(), a.view());
                let (dy, w) = (dy.view(), w.view());
                ops::linear_low_rank_backward_input(device, dy, w, low_rank, dx.view_mut(), accumulate)
                    .unwrap();
                let before = |i: usize| if accumulate { dx.values[i] } else { 0.0 };
                let expected: Vec<f64> = products.iter().enumerate().map(|(i, p)| p + before(i)).collect();
                let magnitude: Vec<f64> =
                    magnitudes.iter().enumerate().map(|(i, m)| m + before(i).abs()).collect();
                let what = format!("{what}, rank {rank}, accumulate {accumulate}");
                check_with_term(&what, &dx.read(device), &expected, &magnitude, [k, n, rank], out);
                assert!(dx.padding_is_intact(device), "{what}: wrote outside");
            }
        }
    });
}

#[test]
fn gradient_to_the_weights() {
    for_all(|what, device, (t, k, n), dtype, out, pad| {
        if out != DType::F32 {
            return;
        }
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let x = Matrix::new(device, 2, (t, k), dtype, pad);
        let (products, magnitudes) =
            reference((n, k, t), |i, p| dy.values[p * n + i], |p, j| x.values[p * k + j]);
        for accumulate in [false, true] {
            let mut dw = Matrix::new(device, 3, (n, k), out, pad);
            ops::linear_backward_weight(device, dy.view(), x.view(), dw.view_mut(), accumulate).unwrap();
            let before = |i: usize| if accumulate { dw.values[i] } else { 0.0 };
            let expected: Vec<f64> = products.iter().enumerate().map(|(i, p)| p + before(i)).collect();
            let magnitude: Vec<f64> =
                magnitudes.iter().enumerate().map(|(i, m)| m + before(i).abs()).collect();
            let what = format!("{what}, accumulate {accumulate}");
            check(&what, &dw.read(device), &expected, &magnitude, t, out);
            assert!(dw.padding_is_intact(device), "{what}: wrote outside");
        }
    });
}

#[test]
fn gradient_to_the_bias() {
    for_all(|what, device, (t, _, n), dtype, _, pad| {
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let mut db = Matrix::new(device, 2, (1, n), DType::F32, pad);
        ops::bias_backward(device, dy.view(), db.view_mut()).unwrap();
        let column = |j: usize| (0..t).map(move |i| i * n + j);
        let expected: Vec<f64> =
            (0..n).map(|j| db.values[j] + column(j).map(|i| dy.values[i]).sum::<f64>()).collect();
        let magnitude: Vec<f64> =
            (0..n).map(|j| db.values[j].abs() + column(j).map(|i| dy.values[i].abs()).sum::<f64>()).collect();
        check(what, &db.read(device), &expected, &magnitude, t, DType::F32);
    });
}

/// Shapes of a low-rank term, where one dimension is short and the others take several blocks: against f64, and the same bits
/// for every number of threads.
#[test]
fn one_short_dimension() {
    // Several blocks of each dimension, and whole tiles.
    for (t, width) in [(35, 1100), (135, 288)] {
        one_short_dimension_of(t, width);
    }
}

fn one_short_dimension_of(t: usize, width: usize) {
    let whole = |device: &Device, rank: usize, dtype: DType, what: &str| -> Vec<Vec<f32>> {
        let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, 3);
        let (x, a, b, h) =
            (matrix(1, t, width), matrix(2, rank, width), matrix(3, width, rank), matrix(4, t, rank));
        let mut results = Vec::new();
        let mut compare =
            |name: &str, c: Matrix, k: usize, (products, magnitudes): (Vec<f64>, Vec<f64>), out: DType| {
                let expected: Vec<f64> = products.iter().zip(&c.values).map(|(p, c)| p + c).collect();
                let magnitude: Vec<f64> =
                    magnitudes.iter().zip(&c.values).map(|(m, c)| m + c.abs()).collect();
                check(&format!("{what} {name}"), &c.read(device), &expected, &magnitude, k, out);
                assert!(c.padding_is_intact(device), "{what} {name}: wrote outside");
                results.push(c.read(device));
            };
        for out in [DType::F32, DType::Bf16] {
            let mut y = Matrix::new(device, 5, (t, width), out, 3);
            ops::linear_add(device, h.view(), b.view(), y.view_mut()).unwrap();
            let sums =
                reference((t, width, rank), |i, p| h.values[i * rank + p], |p, j| b.values[j * rank + p]);
            compare("y += h bT", y, rank, sums, out);
            let mut dx = Matrix::new(device, 5, (t, width), out, 3);
            ops::linear_backward_input(device, h.view(), a.view(), dx.view_mut(), true).unwrap();
            let sums =
                reference((t, width, rank), |i, p| h.values[i * rank + p], |p, j| a.values[p * width + j]);
            compare("dx += dh a", dx, rank, sums, out);
            let mut h = Matrix::new(device, 5, (t, rank), out, 3);
            ops::linear_add(device, x.view(), a.view(), h.view_mut()).unwrap();
            let sums =
                reference((t, rank, width), |i, p| x.values[i * width + p], |p, j| a.values[j * width + p]);
            compare("h += x aT", h, width, sums, out);
            let mut dh = Matrix::new(device, 5, (t, rank), out, 3);
            ops::linear_backward_input(device, x.view(), b.view(), dh.view_mut(), true).unwrap();
            let sums =
                reference((t, rank, width), |i, p| x.values[i * width + p], |p, j| b.values[p * rank + j]);
            compare("dh += dy b", dh, width, sums, out);
        }
        let mut da = Matrix::new(device, 5, (rank, width), DType::F32, 3);
        ops::linear_backward_weight(device, h.view(), x.view(), da.view_mut(), true).unwrap();
        let sums = reference((rank, width, t), |i, p| h.values[p * rank + i], |p, j| x.values[p * width + j]);
        compare("da += dhT x", da, t, sums, DType::F32);
        let mut db = Matrix::new(device, 5, (width, rank), DType::F32, 3);
        ops::linear_backward_weight(device, x.view(), h.view(), db.view_mut(), true).unwrap();
        let sums = reference((width, rank, t), |i, p| x.values[p * width + i], |p, j| h.values[p * rank + j]);
        compare("db += dyT h", db, t, sums, DType::F32);
        results
    };
    for rank in [8, 16, 33, 48] {
        for dtype in [DType::F32, DType::Bf16] {
            let of_threads = [1, 3].map(|threads| {
                let devices = devices(threads).into_iter();
                devices
                    .map(|(isa, device)| {
                        whole(
                            &device,
                            rank,
                            dtype,
                            &format!("{} {dtype} rank {rank}, {threads} threads", isa.name()),
                        )
                    })
                    .collect::<Vec<_>>()
            });
            assert!(of_threads[0] == of_threads[1], "bits depend on threads");
        }
    }
}

/// A product over nothing is zero, and a result of no elements is left alone.
#[test]
fn empty_operands_are_defined() {
    for (_, device) in devices(2) {
        let x = Matrix::new(&device, 1, (3, 0), DType::F32, 1);
        let w = Matrix::new(&device, 2, (5, 0), DType::F32, 1);
        let bias = Matrix::new(&device, 3, (1, 5), DType::F32, 0);
        let mut y = Matrix::new(&device, 4, (3, 5), DType::F32, 0);
        ops::linear(&device, x.view(), w.view(), Some(bias.view()), None, y.view_mut()).unwrap();
        assert_close("k = 0", &y.read(&device), &bias.values.repeat(3), |_| 0.0);
        let none = Matrix::new(&device, 5, (0, 4), DType::F32, 0);
        let w = Matrix::new(&device, 6, (5, 4), DType::F32, 0);
        let mut y = Matrix::new(&device, 7, (0, 5), DType::F32, 0);
        ops::linear(&device, none.view(), w.view(), None, None, y.view_mut()).unwrap();
        let dy = Matrix::new(&device, 8, (0, 5), DType::F32, 0);
        let mut dw = Matrix::new(&device, 9, (5, 4), DType::F32, 0);
        ops::linear_backward_weight(&device, dy.view(), none.view(), dw.view_mut(), true).unwrap();
        assert_close("t = 0, added", &dw.read(&device), &dw.values, |_| 0.0);
        ops::linear_backward_weight(&device, dy.view(), none.view(), dw.view_mut(), false).unwrap();
        assert_close("t = 0, overwritten", &dw.read(&device), &[0.0; 20], |_| 0.0);
    }
}

/// f32 products are as exact as multiply-adds in f32, one after another, whatever they are made of.
#[test]
fn f32_products_keep_the_precision_of_f32() {
    let (t, k, n) = (64, 2000, 48);
    for (isa, device) in devices(2) {
        let x = Matrix::new(&device, 1, (t, k), DType::F32, 0);
        let w = Matrix::new(&device, 2, (n, k), DType::F32, 0);
        let mut y = Matrix::new(&device, 3, (t, n), DType::F32, 0);
        ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
        let (products, _) = reference((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        let chain = |i: usize| {
            let (x, w) = (&x.values[i / n * k..][..k], &w.values[i % n * k..][..k]);
            x.iter().zip(w).fold(0.0f32, |sum, (x, w)| (*x as f32).mul_add(*w as f32, sum))
        };
        let error = |found: &dyn Fn(usize) -> f32| {
            let squares = products.iter().enumerate().map(|(i, p)| (f64::from(found(i)) - p).powi(2));
            (squares.sum::<f64>() / products.len() as f64).sqrt()
        };
        let found = y.read(&device);
        let (ours, theirs) = (error(&|i| found[i]), error(&chain));
        assert!(ours <= theirs, "{}: root mean square error {ours:e}, of a chain {theirs:e}", isa.name());
    }
}

/// Chunks of the head, micro-batches and ranks cut the same rows differently.
#[test]
fn the_bits_of_a_row_do_not_depend_on_its_neighbours() {
    let t = 137;
    for ((isa, device), (k, n)) in
        devices(2).iter().flat_map(|level| [(700, 90), (2112, 48)].map(|s| (level, s)))
    {
        for dtype in [DType::F32, DType::Bf16] {
            let x = Matrix::new(device, 1, (t, k), dtype, 0);
            let w = Matrix::new(device, 2, (n, k), dtype, 0);
            let mut all = Matrix::new(device, 3, (t, n), DType::F32, 0);
            ops::linear(device, x.view(), w.view(), None, None, all.view_mut()).unwrap();
            let all = all.read(device);
            for rows in [0..17, 5..40, 31..64, 100..137] {
                let mut some = Matrix::new(device, 4, (rows.len(), n), DType::F32, 0);
                let part = x.view().row_range(rows.clone());
                ops::linear(device, part, w.view(), None, None, some.view_mut()).unwrap();
                let expected = &all[rows.start * n..rows.end * n];
                let same = some.read(device).iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{} {dtype}: rows {rows:?}", isa.name());
            }
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let shapes = [(1, 512, 300), (5, 300, 700), (61, 67, 71), (300, 600, 130), (1100, 1100, 390)];
    for (t, k, n) in shapes {
        for dtype in [DType::F32, DType::Bf16] {
            let mut first: Vec<Option<[Vec<f32>; 4]>> = vec![None; devices(1).len()];
            for threads in [1, 2, 3, 5] {
                for (level, (isa, device)) in devices(threads).into_iter().enumerate() {
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

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::meta();
    let alloc = |rows, cols, dtype| device.alloc(Kind::Scratch, rows, cols, dtype).unwrap();
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

#[test]
fn a_dry_run_counts_operations_and_bytes() {
    let device = Device::meta();
    let Device::Meta(ledger) = &device else { unreachable!() };
    let alloc = |rows, cols| device.alloc(Kind::Scratch, rows, cols, DType::Bf16).unwrap();
    let (x, w, mut y) = (alloc(30, 40), alloc(50, 40), alloc(30, 50));
    ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
    let cost = ledger.costs()["linear"];
    assert_eq!((cost.calls, cost.flops), (1, 2.0 * 30.0 * 40.0 * 50.0));
    assert_eq!(cost.bytes, 2.0 * (30.0 * 40.0 + 50.0 * 40.0 + 30.0 * 50.0));
}
