//! Gradients to the input, the weights and the bias.

use tandem_kernels::{DType, ops};

use super::{Case, Sums, for_all};
use crate::support::Matrix;

#[test]
fn gradient_to_the_input() {
    for_all(|&Case { ref what, device, shape: (t, k, n), dtype, out, pad, .. }| {
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let w = Matrix::new(device, 2, (n, k), dtype, pad);
        let sums = Sums::new((t, k, n), |i, p| dy.values[i * n + p], |p, j| w.values[p * k + j]);
        for accumulate in [false, true] {
            let mut dx = Matrix::new(device, 3, (t, k), out, pad);
            ops::linear_backward_input(device, dy.view(), w.view(), dx.view_mut(), accumulate).unwrap();
            let sums = sums.plus_old(&dx, accumulate);
            let what = format!("{what}, accumulate {accumulate}");
            sums.check(&what, device, &dx, n, out);
        }
    });
}

#[test]
fn gradient_to_the_input_with_a_low_rank_term() {
    for_all(|&Case { ref what, place, device, shape: (t, k, n), dtype, out, pad, .. }| {
        for rank in [1, 16, 70] {
            let matrix = |seed, rows, cols| Matrix::new(device, seed, (rows, cols), dtype, pad);
            let (dy, w, dh, a) = (matrix(1, t, n), matrix(2, n, k), matrix(3, t, rank), matrix(4, rank, k));
            let sums = Sums::new(
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
                let sums = sums.plus_old(&dx, accumulate);
                let what = format!("{what}, rank {rank}, accumulate {accumulate}");
                sums.check_with_term(&what, (place, device), &dx, [k, n, rank], out);
            }
        }
    });
}

#[test]
fn gradient_to_the_weights() {
    for_all(|&Case { ref what, device, shape: (t, k, n), dtype, out, pad, .. }| {
        if out != DType::F32 {
            return;
        }
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let x = Matrix::new(device, 2, (t, k), dtype, pad);
        let sums = Sums::new((n, k, t), |i, p| dy.values[p * n + i], |p, j| x.values[p * k + j]);
        for accumulate in [false, true] {
            let mut dw = Matrix::new(device, 3, (n, k), out, pad);
            ops::linear_backward_weight(device, dy.view(), x.view(), dw.view_mut(), accumulate).unwrap();
            let sums = sums.plus_old(&dw, accumulate);
            let what = format!("{what}, accumulate {accumulate}");
            sums.check(&what, device, &dw, t, out);
        }
    });
}

#[test]
fn gradient_to_the_bias() {
    for_all(|&Case { ref what, device, shape: (t, _, n), dtype, pad, .. }| {
        let dy = Matrix::new(device, 1, (t, n), dtype, pad);
        let mut db = Matrix::new(device, 2, (1, n), DType::F32, pad);
        ops::bias_backward(device, dy.view(), db.view_mut()).unwrap();
        let sums = Sums::new((1, n, t), |_, _| 1.0, |i, j| dy.values[i * n + j]).plus_old(&db, true);
        sums.check(what, device, &db, t, DType::F32);
    });
}
