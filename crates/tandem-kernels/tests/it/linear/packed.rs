//! Products that read a packed weight: the bits of the same products with the unpacked weight.

use std::ops::Range;

use tandem_kernels::ops::{self, DepthTree, LowRank, PackedRows, PackedWeight};
use tandem_kernels::{Bytes, DType, Device, Format, MemoryKind};

use crate::places::Place;
use crate::support::{Matrix, processors};

/// Rows of the pieces, and columns. nf4's blocks of 64 weights begin and end inside rows; the last ones are odd.
const WEIGHTS: [(&[usize], usize); 8] = [
    (&[1], 1),
    (&[40], 7),
    (&[5, 3, 41], 65),
    (&[33, 64, 31], 576),
    (&[96], 1024),
    (&[70, 1], 1219),
    (&[17, 130], 2112),
    (&[300, 3], 64),
];

/// Rows of the input: those of every kernel of few rows, and more than that.
const ROWS: [usize; 6] = [1, 4, 5, 9, 17, 40];

/// A weight in both forms.
struct Both {
    bytes: Bytes,
    pieces: Vec<PackedRows>,
    unpacked: Matrix,
    format: Format,
    cols: usize,
    dtype: DType,
}

impl Both {
    fn new(device: &Device, (rows, cols): (&[usize], usize), format: Format, dtype: DType) -> Self {
        let lengths = rows.iter().map(|&rows| format.packed_len(rows, cols));
        let mut bytes = Bytes::new(device, MemoryKind::Weights, 64 + lengths.sum::<usize>()).unwrap();
        // The first unit belongs to something else.
        let (mut pieces, mut start, mut first) = (Vec::new(), 64, 0);
        let mut unpacked = Matrix::new(device, 0, (rows.iter().sum(), cols), dtype, 0);
        for &rows in rows {
            let piece = start..start + format.packed_len(rows, cols);
            let values = Matrix::new(device, start as u64, (rows, cols), DType::F32, 0);
            ops::pack(device, values.view(), format, bytes.range_mut(piece.clone())).unwrap();
            let out = unpacked.view_mut().row_range(first..first + rows);
            ops::unpack(device, bytes.range(piece.clone()), format, out).unwrap();
            (start, first) = (piece.end, first + rows);
            pieces.push(PackedRows { rows, bytes: piece });
        }
        Self { bytes, pieces, unpacked, format, cols, dtype }
    }

    fn packed(&self) -> PackedWeight<'_> {
        PackedWeight::new(self.bytes.view(), &self.pieces, self.format, self.cols, self.dtype).unwrap()
    }
}

/// Runs a product with each form, into a result of zeros.
fn check(
    what: &str,
    device: &Device,
    shape: (usize, usize),
    to: DType,
    mut product: impl FnMut(ops::Weight, tandem_kernels::ViewMut),
    (packed, plain): (PackedWeight, tandem_kernels::View),
) {
    let [found, expected] = [ops::Weight::Packed(packed), plain.into()].map(|weight| {
        let mut y = Matrix::from_values(device, &vec![0.0; shape.0 * shape.1], shape, to, 3);
        product(weight, y.view_mut());
        assert!(y.padding_is_intact(device), "{what}: padding");
        y.read(device).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(found == expected, "{what}");
}

fn each(mut check: impl FnMut(&str, &Device, &Both, (usize, Range<usize>))) {
    for (place, device) in processors(3) {
        for format in [Format::Int8, Format::Nf4, Format::Bf16] {
            for dtype in [DType::F32, DType::Bf16] {
                for weight in WEIGHTS {
                    let both = Both::new(&device, weight, format, dtype);
                    for t in ROWS {
                        // The lowest level is slow.
                        if matches!(place, Place::Cpu(tandem_kernels::cpu::Isa::Portable)) && t > 9 {
                            continue;
                        }
                        for cols in [
                            0..both.cols,
                            both.cols / 3..both.cols - both.cols / 4,
                            both.cols / 2 / 64 * 64..both.cols,
                        ] {
                            let what = format!("{place:?} {format} {dtype} {t} x {weight:?} {cols:?}");
                            check(&what, &device, &both, (t, cols));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_weight_gives_the_bits_of_the_unpacked_one() {
    each(|what, device, both, (t, cols)| {
        let (dtype, n) = (both.dtype, both.unpacked.view().rows());
        let weights = (both.packed().col_range(cols.clone()), both.unpacked.view().col_range(cols.clone()));
        let x = Matrix::new(device, 1, (t, cols.len()), dtype, 1);
        let bias = Matrix::new(device, 2, (1, n), DType::F32, 0);
        let residual = Matrix::new(device, 3, (t, n), DType::F32, 2);
        let [h, b] = [(4, t), (5, n)].map(|(seed, rows)| Matrix::new(device, seed, (rows, 5), dtype, 1));
        for to in [DType::F32, dtype] {
            let plain = |w: ops::Weight, y: tandem_kernels::ViewMut| {
                ops::linear(device, x.view(), w, None, None, y).unwrap();
            };
            check(&format!("{what} {to}"), device, (t, n), to, plain, weights);
            let sharded = |w: ops::Weight, y: tandem_kernels::ViewMut| {
                let (bias, residual) = (Some(bias.view()), Some(residual.view()));
                ops::sharded_linear(device, x.view(), w, None, bias, residual, y).unwrap();
            };
            check(&format!("{what} {to} sharded"), device, (t, n), to, sharded, weights);
            let low_rank = |w: ops::Weight, y: tandem_kernels::ViewMut| {
                let low_rank = LowRank { h: h.view(), b: b.view() };
                ops::sharded_linear_low_rank(device, x.view(), w, low_rank, Some(bias.view()), y).unwrap();
            };
            check(&format!("{what} {to} low-rank"), device, (t, n), to, low_rank, weights);
        }
    });
}

#[test]
fn a_packed_weights_sum_in_blocks_has_the_bits_of_the_unpacked_ones() {
    each(|what, device, both, (t, cols)| {
        let (dtype, n, k) = (both.dtype, both.unpacked.view().rows(), cols.len());
        if k < 4 {
            return;
        }
        let tree = DepthTree::new(
            (0..4).map(|block| std::iter::once(k * block / 4..k * (block + 1) / 4).collect()).collect(),
        );
        let x = Matrix::new(device, 1, (t, k), dtype, 1);
        let residual = Matrix::new(device, 3, (t, n), DType::F32, 2);
        let weights = (both.packed().col_range(cols.clone()), both.unpacked.view().col_range(cols));
        let product = |w: ops::Weight, y: tandem_kernels::ViewMut| {
            ops::sharded_linear(device, x.view(), w, Some(&tree), None, Some(residual.view()), y).unwrap();
        };
        check(what, device, (t, n), DType::F32, product, weights);
    });
}

#[test]
fn packed_weights_that_do_not_fit_are_refused() {
    let device = Device::cpu(1, 1 << 24).unwrap();
    let both = Both::new(&device, (&[4, 3], 65), Format::Int8, DType::F32);
    let new = |pieces: &[PackedRows], cols| {
        PackedWeight::new(both.bytes.view(), pieces, Format::Int8, cols, DType::F32)
            .err()
            .unwrap()
            .to_string()
    };
    let error = new(&both.pieces, 200);
    assert!(error.contains("4x200 matrix as int8"), "{error}");
    let beyond = [PackedRows { rows: 1, bytes: both.bytes.len()..both.bytes.len() + 128 }];
    let error = new(&beyond, 65);
    assert!(error.contains("of a buffer of"), "{error}");

    let x = Matrix::new(&device, 1, (2, 64), DType::F32, 0);
    let mut y = Matrix::new(&device, 2, (2, 7), DType::F32, 0);
    let weight = ops::Weight::Packed(both.packed());
    let error = ops::linear(&device, x.view(), weight, None, None, y.view_mut()).unwrap_err().to_string();
    assert!(error.contains('w'), "{error}");
    let gpu = Place::cuda().device(1, 1 << 24);
    let error = ops::linear(&gpu, x.view(), weight, None, None, y.view_mut()).unwrap_err().to_string();
    assert!(error.contains("unpack them"), "{error}");
}
