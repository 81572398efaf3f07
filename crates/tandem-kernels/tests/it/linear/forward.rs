//! `y = x wᵀ` with bias, residual and low-rank term.

use tandem_kernels::ops::LowRank;
use tandem_kernels::{DType, MemoryKind, ops};

use super::{Case, Sums, for_all};
use crate::support::{Matrix, Place, assert_close, devices};

#[test]
fn forward_with_and_without_bias_and_residual() {
    for_all(|&Case { ref what, device, shape: (t, k, n), dtype, out, pad, .. }| {
        let x = Matrix::new(device, 1, (t, k), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let bias = Matrix::new(device, 3, (1, n), DType::F32, pad);
        let residual = Matrix::new(device, 4, (t, n), DType::F32, pad);
        let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut y = Matrix::new(device, 5, (t, n), out, pad);
            let b = with_bias.then(|| bias.view());
            let r = with_residual.then(|| residual.view());
            ops::linear(device, x.view(), w.view(), b, r, y.view_mut()).unwrap();
            let bias_at = |i: usize| if with_bias { bias.values[i % n] } else { 0.0 };
            let sums = sums.plus(bias_at).plus_old(&residual, with_residual);
            let what = format!("{what}, bias {with_bias}, residual {with_residual}");
            sums.check(&what, device, &y, k, out);
        }
    });
}

#[test]
fn forward_added_to_what_is_there() {
    for_all(|&Case { ref what, device, shape: (t, k, n), dtype, out, pad, .. }| {
        let x = Matrix::new(device, 1, (t, k), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let mut y = Matrix::new(device, 3, (t, n), out, pad);
        ops::linear_add(device, x.view(), w.view(), y.view_mut()).unwrap();
        let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
        let sums = sums.plus_old(&y, true);
        sums.check(what, device, &y, k, out);
    });
}

/// Few rows, as in generation, with low-rank term, bias and residual.
#[test]
fn forward_of_few_rows() {
    for_all(|&Case { ref what, place, device, shape: (t, k, n), dtype, out, pad, .. }| {
        let (t, rank) = (t.min(16), 5);
        let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
        let (x, w, h, b) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank), matrix(4, n, rank));
        let bias = Matrix::new(device, 5, (1, n), DType::F32, pad);
        let residual = Matrix::new(device, 6, (t, n), DType::F32, pad);
        let sums = Sums::new(
            (t, n, k + rank),
            |i, p| if p < k { x.values[i * k + p] } else { h.values[i * rank + p - k] },
            |p, j| if p < k { w.values[j * k + p] } else { b.values[j * rank + p - k] },
        );
        let mut y = Matrix::new(device, 7, (t, n), out, pad);
        let (term, bias_view) = (LowRank { h: h.view(), b: b.view() }, Some(bias.view()));
        let residual_view = Some(residual.view());
        ops::linear_low_rank(device, x.view(), w.view(), term, bias_view, residual_view, y.view_mut())
            .unwrap();
        let sums = sums.plus(|i| bias.values[i % n]).plus_old(&residual, true);
        sums.check_with_term(what, (place, device), &y, [n, k, rank], out);
    });
}

/// On GPUs: added by the library as it writes the result, or with a bias in f32.
#[test]
fn a_residual_of_bf16_is_added_on_gpus() {
    for_all(|&Case { ref what, place, device, shape: (t, k, n), dtype, out, pad, .. }| {
        let rank = 5;
        let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
        let (x, w, h, b) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank), matrix(4, n, rank));
        let bias = Matrix::new(device, 5, (1, n), DType::F32, pad);
        let residual = Matrix::new(device, 6, (t, n), DType::Bf16, pad);
        let sums = Sums::new(
            (t, n, k + rank),
            |i, p| if p < k { x.values[i * k + p] } else { h.values[i * rank + p - k] },
            |p, j| if p < k { w.values[j * k + p] } else { b.values[j * rank + p - k] },
        );
        for with_bias in [false, true] {
            let mut y = Matrix::new(device, 7, (t, n), out, pad);
            let (term, bias_view) = (LowRank { h: h.view(), b: b.view() }, with_bias.then(|| bias.view()));
            let r = Some(residual.view());
            let done = ops::linear_low_rank(device, x.view(), w.view(), term, bias_view, r, y.view_mut());
            if place.is_cpu() || [dtype, out].contains(&DType::F32) {
                let refused = done.unwrap_err().to_string();
                assert!(
                    refused.contains("a residual of bf16 is for a GPU, factors and a result of bf16"),
                    "{refused}"
                );
                continue;
            }
            done.unwrap();
            let bias_at = |i: usize| if with_bias { bias.values[i % n] } else { 0.0 };
            let sums = sums.plus(bias_at).plus_old(&residual, true);
            let what = format!("{what}, bias {with_bias}");
            sums.check_with_term(&what, (place, device), &y, [n, k, rank], out);
        }
    });
}

/// A low-rank term is added, and on a processor rounded once with the product.
#[test]
fn forward_with_a_low_rank_term() {
    for_all(|&Case { ref what, place, device, shape: (t, k, n), dtype, out, pad, .. }| {
        for rank in [1, 16, 70] {
            let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
            let (x, w, h, b) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank), matrix(4, n, rank));
            let residual = Matrix::new(device, 5, (t, n), DType::F32, pad);
            let sums = Sums::new(
                (t, n, k + rank),
                |i, p| if p < k { x.values[i * k + p] } else { h.values[i * rank + p - k] },
                |p, j| if p < k { w.values[j * k + p] } else { b.values[j * rank + p - k] },
            );
            for with_residual in [false, true] {
                let mut y = Matrix::new(device, 6, (t, n), out, pad);
                let r = with_residual.then(|| residual.view());
                let low_rank = LowRank { h: h.view(), b: b.view() };
                ops::linear_low_rank(device, x.view(), w.view(), low_rank, None, r, y.view_mut()).unwrap();
                let sums = sums.plus_old(&residual, with_residual);
                let what = format!("{what}, rank {rank}, residual {with_residual}");
                sums.check_with_term(&what, (place, device), &y, [n, k, rank], out);
            }
        }
    });
}

/// An adapter that has not learned anything leaves the bits of its base.
#[test]
fn a_term_of_zeros_leaves_the_bits() {
    let rank = 24;
    let shapes = [(137, 2100, 90), (70, 31, 40), (70, 40, 31), (9, 50, 60)];
    for ((place, device), (t, k, n)) in devices(2).iter().flat_map(|level| shapes.map(|shape| (level, shape)))
    {
        for dtype in [DType::F32, DType::Bf16] {
            for out in [DType::F32, DType::Bf16] {
                let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, 0);
                let (x, w, h) = (matrix(1, t, k), matrix(2, n, k), matrix(3, t, rank));
                let zeros = device.zeros(MemoryKind::Activations, n, rank, dtype).unwrap();
                let [mut with, mut without] = [4, 5].map(|seed| Matrix::new(device, seed, (t, n), out, 0));
                let low_rank = LowRank { h: h.view(), b: zeros.view() };
                ops::linear_low_rank(device, x.view(), w.view(), low_rank, None, None, with.view_mut())
                    .unwrap();
                ops::linear(device, x.view(), w.view(), None, None, without.view_mut()).unwrap();
                assert!(with.read(device) == without.read(device), "{} {dtype} to {out}", place.name());
            }
        }
    }
}

/// On a GPU a bf16 result is formed in f32 beside it, some rows at a time, before bias and residual are added.
#[test]
fn a_wide_result_is_rounded_once() {
    let (t, k, n) = (260, 3, 33_000);
    let device = Place::cuda().device(1, 1 << 28);
    let [x, w] = [(t, k), (n, k)].map(|shape| Matrix::new(&device, 1, shape, DType::Bf16, 0));
    let bias = Matrix::new(&device, 3, (1, n), DType::F32, 0);
    let residual = Matrix::new(&device, 4, (t, n), DType::F32, 0);
    let mut y = Matrix::new(&device, 5, (t, n), DType::Bf16, 0);
    ops::linear(&device, x.view(), w.view(), Some(bias.view()), Some(residual.view()), y.view_mut()).unwrap();
    let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
    let sums = sums.plus(|i| bias.values[i % n]).plus_old(&residual, true);
    sums.check("33000 columns", &device, &y, k, DType::Bf16);
}

/// So long that the weights are packed in several ranges of outputs.
#[test]
fn a_very_long_sum() {
    let (t, k, n) = (17, 8200, 300);
    for (place, device) in devices(2) {
        for dtype in [DType::F32, DType::Bf16] {
            let x = Matrix::new(&device, 1, (t, k), dtype, 0);
            let w = Matrix::new(&device, 2, (n, k), dtype, 0);
            let mut y = Matrix::new(&device, 3, (t, n), dtype, 0);
            ops::linear(&device, x.view(), w.view(), None, None, y.view_mut()).unwrap();
            let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
            sums.check(&format!("{} {dtype}", place.name()), &device, &y, k, dtype);
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
