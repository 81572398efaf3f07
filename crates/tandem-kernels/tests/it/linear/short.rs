//! Products as those of an adapter, with one short dimension.

use tandem_kernels::{DType, Device, ops};

use super::Sums;
use crate::support::{Matrix, devices};

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
        let mut compare = |name: &str, c: Matrix, terms: usize, sums: Sums, out: DType| {
            sums.plus_old(&c, true).check(&format!("{what} {name}"), device, &c, terms, out);
            results.push(c.read(device));
        };
        for out in [DType::F32, DType::Bf16] {
            let mut y = Matrix::new(device, 5, (t, width), out, 3);
            ops::linear_add(device, h.view(), b.view(), y.view_mut()).unwrap();
            let sums =
                Sums::new((t, width, rank), |i, p| h.values[i * rank + p], |p, j| b.values[j * rank + p]);
            compare("y += h bT", y, rank, sums, out);
            let mut dx = Matrix::new(device, 5, (t, width), out, 3);
            ops::linear_backward_input(device, h.view(), a.view(), dx.view_mut(), true).unwrap();
            let sums =
                Sums::new((t, width, rank), |i, p| h.values[i * rank + p], |p, j| a.values[p * width + j]);
            compare("dx += dh a", dx, rank, sums, out);
            let mut h = Matrix::new(device, 5, (t, rank), out, 3);
            ops::linear_add(device, x.view(), a.view(), h.view_mut()).unwrap();
            let sums =
                Sums::new((t, rank, width), |i, p| x.values[i * width + p], |p, j| a.values[j * width + p]);
            compare("h += x aT", h, width, sums, out);
            let mut dh = Matrix::new(device, 5, (t, rank), out, 3);
            ops::linear_backward_input(device, x.view(), b.view(), dh.view_mut(), true).unwrap();
            let sums =
                Sums::new((t, rank, width), |i, p| x.values[i * width + p], |p, j| b.values[p * rank + j]);
            compare("dh += dy b", dh, width, sums, out);
        }
        let mut da = Matrix::new(device, 5, (rank, width), DType::F32, 3);
        ops::linear_backward_weight(device, h.view(), x.view(), da.view_mut(), true).unwrap();
        let sums = Sums::new((rank, width, t), |i, p| h.values[p * rank + i], |p, j| x.values[p * width + j]);
        compare("da += dhT x", da, t, sums, DType::F32);
        let mut db = Matrix::new(device, 5, (width, rank), DType::F32, 3);
        ops::linear_backward_weight(device, x.view(), h.view(), db.view_mut(), true).unwrap();
        let sums = Sums::new((width, rank, t), |i, p| x.values[p * width + i], |p, j| h.values[p * rank + j]);
        compare("db += dyT h", db, t, sums, DType::F32);
        results
    };
    for rank in [8, 16, 33, 48] {
        for dtype in [DType::F32, DType::Bf16] {
            let of_threads = [1, 3].map(|threads| {
                let devices = devices(threads).into_iter();
                devices
                    .map(|(place, device)| {
                        whole(
                            &device,
                            rank,
                            dtype,
                            &format!("{} {dtype} rank {rank}, {threads} threads", place.name()),
                        )
                    })
                    .collect::<Vec<_>>()
            });
            assert!(of_threads[0] == of_threads[1], "bits depend on threads");
        }
    }
}
