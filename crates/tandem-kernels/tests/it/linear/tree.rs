//! Products whose sum is divided over tensor-parallel ranks: the bits of one rank and of several.

use std::ops::Range;

use tandem_kernels::ops::DepthTree;
use tandem_kernels::{DType, Device, ops};

use super::Sums;
use crate::places::Place;
use crate::support::{Matrix, devices};

/// Ranges of blocks `first..` of eight, of two matrices side by side along k.
fn blocks(own: Range<usize>, widths: [usize; 2]) -> Vec<Vec<Range<usize>>> {
    let part = |width: usize, block: usize| width * block / 8;
    let length = |width: usize| part(width, own.end) - part(width, own.start);
    let before = [0, length(widths[0])];
    let block = |block: usize| {
        let ranges = widths.iter().zip(before).map(|(&width, before)| {
            let start = |block| before + part(width, block) - part(width, own.start);
            start(block)..start(block + 1)
        });
        ranges.collect()
    };
    own.clone().map(block).collect()
}

/// Elements along k of a rank's blocks, of the whole matrices.
fn own_elements(own: &Range<usize>, widths: [usize; 2]) -> Vec<usize> {
    let starts = [0, widths[0]];
    let ranges = widths
        .iter()
        .zip(starts)
        .flat_map(|(&width, start)| start + width * own.start / 8..start + width * own.end / 8);
    ranges.collect()
}

/// Adds the matrices of ranks by pairs, neighbours first.
fn add_by_pairs(device: &Device, mut ranks: Vec<Matrix>) -> Matrix {
    while ranks.len() > 1 {
        let mut next = Vec::new();
        let mut pairs = ranks.into_iter();
        while let (Some(left), Some(mut right)) = (pairs.next(), pairs.next()) {
            ops::add(device, left.view(), right.view_mut()).unwrap();
            next.push(right);
        }
        ranks = next;
    }
    ranks.pop().unwrap()
}

#[test]
fn ranks_that_hold_blocks_of_k_sum_the_bits_of_one_rank() {
    // Blocks shorter and longer than the kernels', one of many rows, one of few.
    for (t, n, widths) in [(37, 70, [96, 40]), (5, 33, [8, 16]), (130, 1030, [264, 8]), (9, 21, [5200, 16])] {
        for (place, device) in devices(2) {
            for dtype in [DType::F32, DType::Bf16] {
                let k = widths[0] + widths[1];
                let x = Matrix::new(&device, 1, (t, k), dtype, 0);
                let w = Matrix::new(&device, 2, (n, k), dtype, 0);
                let residual = Matrix::new(&device, 3, (t, n), DType::F32, 0);
                let what = format!("{} {dtype} {t}x{n}x{k}", place.name());
                let whole = |residual| {
                    let mut y = Matrix::new(&device, 4, (t, n), DType::F32, 0);
                    let tree = DepthTree::new(blocks(0..8, widths));
                    let (x, w) = (x.view(), w.view());
                    ops::sharded_linear(&device, x, w, Some(&tree), None, residual, y.view_mut()).unwrap();
                    y
                };
                let expected = whole(None).read(&device);
                let sums = Sums::new((t, n, k), |i, p| x.values[i * k + p], |p, j| w.values[j * k + p]);
                sums.plus(|i| residual.values[i]).check(
                    &what,
                    &device,
                    &whole(Some(residual.view())),
                    k,
                    DType::F32,
                );
                for ranks in [2, 4, 8] {
                    let of_rank = |rank: usize| {
                        let own = rank * 8 / ranks..(rank + 1) * 8 / ranks;
                        let columns = own_elements(&own, widths);
                        let part = |m: &Matrix, rows: usize| {
                            let all = m.read(&device);
                            let values: Vec<f32> = (0..rows)
                                .flat_map(|row| columns.iter().map(move |c| (row, *c)))
                                .map(|(row, c)| all[row * k + c])
                                .collect();
                            Matrix::from_values(&device, &values, (rows, columns.len()), dtype, 0)
                        };
                        let (x, w) = (part(&x, t), part(&w, n));
                        let tree = DepthTree::new(blocks(own, widths));
                        let mut y = Matrix::new(&device, 4, (t, n), DType::F32, 0);
                        ops::sharded_linear(
                            &device,
                            x.view(),
                            w.view(),
                            Some(&tree),
                            None,
                            None,
                            y.view_mut(),
                        )
                        .unwrap();
                        y
                    };
                    let found = add_by_pairs(&device, (0..ranks).map(of_rank).collect()).read(&device);
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    // A GPU's library chooses an algorithm by the length of a block.
                    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * k as f32;
                    let is_right =
                        if place == Place::Gpu { found.iter().zip(&expected).all(near) } else { same };
                    assert!(is_right, "{what}: {ranks} ranks");
                }
            }
        }
    }
}

/// A rank's rows of a sharded weight, however few, give its columns of the product.
#[test]
fn the_bits_of_a_sharded_product_do_not_depend_on_the_rows_of_the_weight() {
    let (t, n, k) = (50, 96, 40);
    for (place, device) in crate::support::processors(2) {
        for dtype in [DType::F32, DType::Bf16] {
            let x = Matrix::new(&device, 1, (t, k), dtype, 0);
            let w = Matrix::new(&device, 2, (n, k), dtype, 0);
            let dy = Matrix::new(&device, 3, (t, n), dtype, 0);
            let run = |rows: Range<usize>| {
                let mut y = Matrix::new(&device, 4, (t, rows.len()), dtype, 0);
                let mut dw = Matrix::new(&device, 5, (rows.len(), k), DType::F32, 0);
                let (w, dy) = (w.view().row_range(rows.clone()), dy.view().col_range(rows));
                ops::sharded_linear(&device, x.view(), w, None, None, None, y.view_mut()).unwrap();
                ops::sharded_linear_backward_weight(&device, dy, x.view(), dw.view_mut(), false).unwrap();
                [y.read(&device), dw.read(&device)]
            };
            let [y, dw] = run(0..n);
            for rows in [0..3, 3..20, 20..96] {
                let [own_y, own_dw] = run(rows.clone());
                let of_rows = |t: usize| &y[t * n + rows.start..t * n + rows.end];
                let what = format!("{} {dtype} rows {rows:?}", place.name());
                assert!((0..t).all(|t| own_y[t * rows.len()..(t + 1) * rows.len()] == *of_rows(t)), "{what}");
                assert_eq!(own_dw, dw[rows.start * k..rows.end * k], "{what}");
            }
        }
    }
}

#[test]
fn a_tree_of_another_depth_is_refused() {
    let device = Device::cpu(1, 1 << 20).unwrap();
    let matrix = |rows, cols| Matrix::new(&device, 1, (rows, cols), DType::F32, 0);
    let (x, w, mut y) = (matrix(2, 4), matrix(3, 4), matrix(2, 3));
    let tree = DepthTree::new(vec![vec![0..2], vec![2..5]]);
    let found = ops::sharded_linear(&device, x.view(), w.view(), Some(&tree), None, None, y.view_mut());
    assert_eq!(found.unwrap_err().to_string(), "linear: blocks of 5 elements along k, expected 4");
}
