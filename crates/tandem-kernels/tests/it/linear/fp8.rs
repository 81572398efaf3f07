//! Products of FP8 weights beside f64 with the rounded factors, on a GPU.

use crate::support::{Matrix, Place, numbers};
use tandem_kernels::numerics::e4m3;
use tandem_kernels::ops::{self, DepthTree, LowRank, PackedRows, PackedWeight};
use tandem_kernels::{Bytes, DType, Device, Format, MemoryKind};

/// Matrix of two pieces in a format.
struct Weights {
    bytes: Bytes,
    pieces: [PackedRows; 2],
    format: Format,
    cols: usize,
}

impl Weights {
    fn new(device: &Device, format: Format, (n, k): (usize, usize)) -> Self {
        let first = n / 2;
        let [len, all] = [first, n].map(|rows| format.packed_len(rows, k));
        let pieces =
            [PackedRows { rows: first, bytes: 0..len }, PackedRows { rows: n - first, bytes: len..all }];
        Self { bytes: Bytes::new(device, MemoryKind::Weights, all).unwrap(), pieces, format, cols: k }
    }

    /// Random weights in FP8, and the numbers of their codes times the rows' scales.
    fn random(device: &Device, seed: u64, (n, k): (usize, usize)) -> (Self, Vec<f64>) {
        let mut own = Self::new(device, Format::Fp8, (n, k));
        let values = Matrix::new(device, seed, (n, k), DType::F32, 0);
        let mut row = 0;
        for piece in &own.pieces {
            let rows = values.view().row_range(row..row + piece.rows);
            ops::pack(device, rows, Format::Fp8, own.bytes.range_mut(piece.bytes.clone())).unwrap();
            row += piece.rows;
        }
        let (codes, scales) = own.codes(device);
        let rounded = codes.iter().enumerate().map(|(i, code)| code * f64::from(scales[i / k])).collect();
        (own, rounded)
    }

    /// Numbers of the codes, and the scales of the rows.
    fn codes(&self, device: &Device) -> (Vec<f64>, Vec<f32>) {
        let bytes = self.bytes.read(device).unwrap();
        let units: Vec<&[u8]> = bytes.chunks_exact(Format::Fp8.unit_len(self.cols)).collect();
        let codes = units.iter().flat_map(|unit| &unit[..self.cols]);
        let scale = |unit: &&[u8]| f32::from_le_bytes(unit[self.cols..self.cols + 4].try_into().unwrap());
        (codes.map(|&code| f64::from(e4m3::to_f32(code))).collect(), units.iter().map(scale).collect())
    }

    fn packed(&self, dtype: DType) -> PackedWeight<'_> {
        PackedWeight::new(self.bytes.view(), &self.pieces, self.format, self.cols, dtype).unwrap()
    }
}

fn linear(
    device: &Device,
    x: &Matrix,
    w: PackedWeight,
    low_rank: Option<LowRank>,
    bias: Option<&Matrix>,
    residual: Option<&Matrix>,
    y: &mut Matrix,
) -> tandem_kernels::Result<()> {
    let (bias, residual, y) = (bias.map(Matrix::view), residual.map(Matrix::view), y.view_mut());
    match low_rank {
        Some(term) => ops::linear_low_rank(device, x.view(), packed(w), term, bias, residual, y),
        None => ops::linear(device, x.view(), packed(w), bias, residual, y),
    }
}

fn packed(w: PackedWeight) -> ops::Weight {
    ops::Weight::Packed(w)
}

/// Rows under scales of their own, rounded.
fn rounded(x: &[f32], k: usize) -> Vec<f64> {
    let row = |x: &[f32]| {
        let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 448.0;
        let number = move |x: f32| match scale.is_normal() {
            true => f64::from(e4m3::to_f32(e4m3::from_f32(x / scale))) * f64::from(scale),
            false => 0.0,
        };
        x.iter().map(|&x| number(x)).collect::<Vec<_>>()
    };
    x.chunks(k).flat_map(row).collect()
}

/// Random numbers but for a row of zeros, the first, and a row with an outlier, the last.
fn uneven_rows(seed: u64, (rows, cols): (usize, usize)) -> Vec<f32> {
    let mut values: Vec<f32> = numbers(seed, rows * cols);
    values[..cols].fill(0.0);
    values[(rows - 1) * cols + 3] = 100.0;
    values
}

/// Sum of the products of two rows, and of their magnitudes.
fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    a.iter().zip(b).fold((0.0, 0.0), |(sum, size), (a, b)| (sum + a * b, size + (a * b).abs()))
}

#[test]
fn fp8_products_are_those_of_the_rounded_factors() {
    let device = Place::cuda().device(1, 1 << 30);
    // Those of the last two are summed in several parts: of the columns, of rows and columns.
    let shapes = [(1, 16, 16), (37, 48, 80), (130, 144, 272), (9, 8208, 32), (1100, 4112, 16)];
    for (seed, (t, n, k)) in shapes.into_iter().enumerate() {
        let seed = 10 * seed as u64;
        let (weights, w) = Weights::random(&device, seed, (n, k));
        for (dtype, out, stream, padding) in [
            (DType::Bf16, DType::F32, DType::F32, 0),
            (DType::F32, DType::Bf16, DType::F32, 3),
            (DType::Bf16, DType::Bf16, DType::Bf16, 4),
        ] {
            let x = Matrix::from_values(&device, &uneven_rows(seed + 1, (t, k)), (t, k), dtype, padding);
            let x_rounded = rounded(&x.read(&device), k);
            let bias = Matrix::new(&device, seed + 2, (1, n), DType::F32, 0);
            let residual = Matrix::new(&device, seed + 3, (t, n), stream, 1);
            let [h, b] =
                [(4, t), (5, n)].map(|(i, rows)| Matrix::new(&device, seed + i, (rows, 4), dtype, 0));
            for [has_term, has_bias, has_residual] in
                [[false, false, false], [true, true, true], [true, false, false], [false, false, true]]
            {
                let mut y = Matrix::new(&device, 9, (t, n), out, padding);
                let low_rank = has_term.then(|| LowRank { h: h.view(), b: b.view() });
                let (of_bias, of_residual) = (has_bias.then_some(&bias), has_residual.then_some(&residual));
                linear(&device, &x, weights.packed(dtype), low_rank, of_bias, of_residual, &mut y).unwrap();
                let found = y.read(&device);
                for (row, col) in (0..t).flat_map(|row| (0..n).map(move |col| (row, col))) {
                    let (mut sum, mut size) = dot(&x_rounded[row * k..][..k], &w[col * k..][..k]);
                    // Products of codes are exact; sums, scales and addends are rounded in f32.
                    let mut bound = 0.0;
                    if has_term {
                        let (term, more) = dot(&h.values[row * 4..][..4], &b.values[col * 4..][..4]);
                        (sum, size) = (sum + term, size + more);
                        // The term is rounded before it is added, to a residual of bf16 and to the product.
                        bound += if out == DType::Bf16 { 2.0 * more * 2f64.powi(-8) } else { 0.0 };
                    }
                    let bias = if has_bias { bias.values[col] } else { 0.0 };
                    let of_residual = if has_residual { residual.values[row * n + col] } else { 0.0 };
                    if has_term && has_residual && out == DType::Bf16 {
                        // As is the sum with a residual of bf16.
                        bound += of_residual.abs() * 2f64.powi(-8);
                    }
                    (sum, size) = (sum + bias + of_residual, size + bias.abs() + of_residual.abs());
                    bound += (k + 16) as f64 * 2f64.powi(-24) * size;
                    if out == DType::Bf16 {
                        bound += sum.abs() * 2f64.powi(-8);
                    }
                    let found = f64::from(found[row * n + col]);
                    let what = format!("{t}x{n}x{k} of {dtype} into {out}, at {row}, {col}");
                    assert!((found - sum).abs() <= bound, "{what}: {found} and {sum}, {bound}");
                }
            }
        }
    }
}

/// The gradient of an input: rows of `dy` are rounded after the scales of the weights' rows have multiplied them.
#[test]
fn fp8_gradients_of_inputs_are_those_of_the_rounded_factors() {
    let device = Place::cuda().device(1, 1 << 30);
    // The weights of the last three are transposed by several blocks: by both sides, by rows, by columns.
    let shapes = [(1, 16, 16), (37, 48, 80), (130, 272, 528), (9, 8208, 32), (1100, 16, 4112)];
    for (seed, (t, n, k)) in shapes.into_iter().enumerate() {
        let seed = 10 * seed as u64;
        let (weights, _) = Weights::random(&device, seed, (n, k));
        let (w, scales) = weights.codes(&device);
        let columns: Vec<f64> = (0..k)
            .flat_map(|col| (0..n).map(move |row| (row, col)))
            .map(|(row, col)| w[row * k + col])
            .collect();
        for (dtype, out, padding) in
            [(DType::Bf16, DType::F32, 0), (DType::F32, DType::Bf16, 3), (DType::Bf16, DType::Bf16, 4)]
        {
            let dy = Matrix::from_values(&device, &uneven_rows(seed + 1, (t, n)), (t, n), dtype, padding);
            let scaled: Vec<f32> =
                dy.read(&device).iter().enumerate().map(|(i, x)| x * scales[i % n]).collect();
            let dy_rounded = rounded(&scaled, n);
            let [dh, a] =
                [(4, (t, 4)), (5, (4, k))].map(|(i, shape)| Matrix::new(&device, seed + i, shape, dtype, 0));
            for [has_term, accumulate] in [[false, false], [true, false], [false, true], [true, true]] {
                let mut dx = Matrix::new(&device, 9, (t, k), out, padding);
                let before = dx.read(&device);
                let w = packed(weights.packed(dtype));
                match has_term {
                    false => {
                        ops::linear_backward_input(&device, dy.view(), w, dx.view_mut(), accumulate).unwrap();
                    }
                    true => {
                        let term = (dh.view(), a.view());
                        let dx = dx.view_mut();
                        ops::linear_low_rank_backward_input(&device, dy.view(), w, term, dx, accumulate)
                            .unwrap();
                    }
                }
                let found = dx.read(&device);
                for (row, col) in (0..t).flat_map(|row| (0..k).map(move |col| (row, col))) {
                    let (mut sum, mut size) = dot(&dy_rounded[row * n..][..n], &columns[col * n..][..n]);
                    let mut bound = 0.0;
                    let before = if accumulate { f64::from(before[row * k + col]) } else { 0.0 };
                    if has_term {
                        let a: Vec<f64> = (0..4).map(|r| a.values[r * k + col]).collect();
                        let (term, more) = dot(&dh.values[row * 4..][..4], &a);
                        (sum, size) = (sum + term, size + more);
                        // The term is rounded before it is added, to what was there and to the product.
                        let all = 2.0 * more + before.abs();
                        bound += if out == DType::Bf16 { all * 2f64.powi(-8) } else { 0.0 };
                    }
                    (sum, size) = (sum + before, size + before.abs());
                    bound += (n + 16) as f64 * 2f64.powi(-24) * size;
                    if out == DType::Bf16 {
                        bound += sum.abs() * 2f64.powi(-8);
                    }
                    let found = f64::from(found[row * k + col]);
                    let what = format!("{t}x{n}x{k} of {dtype} into {out}, at {row}, {col}");
                    assert!((found - sum).abs() <= bound, "{what}: {found} and {sum}, {bound}");
                }
            }
        }
    }
}

/// A NaN keeps its place: it does not become the largest number.
#[test]
fn activations_that_are_not_finite_show_in_their_rows_alone() {
    let device = Place::cuda().device(1, 1 << 30);
    let (weights, _) = Weights::random(&device, 1, (32, 16));
    for dtype in [DType::F32, DType::Bf16] {
        for (bad, others) in
            [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0), (f32::NAN, 0.0)]
        {
            let mut values = numbers(2, 3 * 16);
            values[16..32].iter_mut().for_each(|x| *x *= others);
            values[16 + 7] = bad;
            let x = Matrix::from_values(&device, &values, (3, 16), dtype, 0);
            let mut y = Matrix::new(&device, 9, (3, 32), DType::F32, 0);
            linear(&device, &x, weights.packed(dtype), None, None, None, &mut y).unwrap();
            for (i, y) in y.read(&device).into_iter().enumerate() {
                assert_eq!(y.is_nan(), i / 32 == 1, "{bad} of {dtype} at {i}: {y}");
            }
        }
    }
}

/// A row has the same bits whatever rows are beside it, as its scale is its own.
#[test]
fn a_row_of_an_fp8_product_depends_on_no_other() {
    let device = Place::cuda().device(1, 1 << 30);
    let (weights, _) = Weights::random(&device, 1, (32, 48));
    let values: Vec<f32> =
        numbers(2, 21 * 48).iter().enumerate().map(|(i, x)| x * (i / 48 + 1) as f32).collect();
    let product = |rows: std::ops::Range<usize>| {
        let values = &values[rows.start * 48..rows.end * 48];
        let x = Matrix::from_values(&device, values, (rows.len(), 48), DType::Bf16, 0);
        let mut y = Matrix::new(&device, 9, (rows.len(), 32), DType::F32, 0);
        linear(&device, &x, weights.packed(DType::Bf16), None, None, None, &mut y).unwrap();
        y.read(&device)
    };
    let all = product(0..21);
    for rows in [0..1, 5..21, 20..21, 7..7] {
        assert_eq!(product(rows.clone()), all[rows.start * 32..rows.end * 32], "{rows:?}");
    }
}

#[test]
fn fp8_products_that_cannot_be_are_refused() {
    let gpu = Place::cuda().device(1, 1 << 24);
    let refused = |format: Format, (n, k): (usize, usize), cut: fn(PackedWeight) -> PackedWeight| {
        let weights = Weights::new(&gpu, format, (n, k));
        let w = cut(weights.packed(DType::F32));
        let x = Matrix::new(&gpu, 1, (2, w.cols()), DType::F32, 0);
        let mut y = Matrix::new(&gpu, 1, (2, w.rows()), DType::F32, 0);
        linear(&gpu, &x, w, None, None, None, &mut y).unwrap_err().to_string()
    };
    let whole: fn(PackedWeight) -> PackedWeight = |w| w;
    assert_eq!(refused(Format::Fp8, (24, 16), whole), "linear: w is 24x16, expected multiples of 16");
    assert_eq!(refused(Format::Fp8, (16, 40), whole), "linear: w is 16x40, expected multiples of 16");
    assert_eq!(
        refused(Format::Int8, (16, 16), whole),
        "linear: a GPU multiplies no int8 weights: unpack them"
    );
    let cut = "linear: a GPU multiplies whole FP8 weights, whose rows lie side by side";
    assert_eq!(refused(Format::Fp8, (32, 32), |w| w.col_range(0..16)), cut);
    assert_eq!(refused(Format::Fp8, (32, 32), |w| w.row_range(16..32)), cut);
    let weights = Weights::new(&gpu, Format::Fp8, (16, 16));
    let (x, mut y) =
        (Matrix::new(&gpu, 1, (2, 16), DType::F32, 0), Matrix::new(&gpu, 1, (2, 16), DType::F32, 0));
    let tree = DepthTree::new(vec![vec![0..8, 8..16]]);
    let w = packed(weights.packed(DType::F32));
    let error = ops::sharded_linear(&gpu, x.view(), w, Some(&tree), None, None, y.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "linear: FP8 products have no sums in blocks");
    let dx = y.view_mut();
    let error = ops::sharded_linear_backward_input(&gpu, x.view(), w, None, Some(&tree), dx).unwrap_err();
    assert_eq!(error.to_string(), "linear_backward_input: FP8 products have no sums in blocks");
    let cpu = Device::cpu(1, 1 << 24).unwrap();
    let weights = Weights::new(&cpu, Format::Fp8, (16, 16));
    let (dy, mut dx) =
        (Matrix::new(&cpu, 1, (2, 16), DType::F32, 0), Matrix::new(&cpu, 1, (2, 16), DType::F32, 0));
    let w = packed(weights.packed(DType::F32));
    let error = ops::linear_backward_input(&cpu, dy.view(), w, dx.view_mut(), false).unwrap_err();
    let expected = "linear_backward_input: a CPU reads no packed weights for the gradient of an input";
    assert_eq!(error.to_string(), expected);
}

/// A plan counts the scratch memory, and lists the products for the choice of algorithms.
#[test]
fn a_dry_run_of_an_fp8_product_counts_the_same_memory() {
    let (gpu, meta) = (Place::cuda().device(1, 1 << 30), Device::meta_of(tandem_kernels::Backend::Cuda));
    let (listing, matmuls) = Device::meta_listing_matmuls(tandem_kernels::cuda::Options::default()).unwrap();
    for device in [&gpu, &meta, &listing] {
        let weights = Weights::new(device, Format::Fp8, (48, 32));
        let x = device.zeros(MemoryKind::Activations, 70, 32, DType::Bf16).unwrap();
        let mut y = device.zeros(MemoryKind::Activations, 70, 48, DType::Bf16).unwrap();
        let w = packed(weights.packed(DType::Bf16));
        ops::linear(device, x.view(), w, None, None, y.view_mut()).unwrap();
        let mut dx = device.zeros(MemoryKind::Activations, 70, 32, DType::Bf16).unwrap();
        ops::linear_backward_input(device, y.view(), w, dx.view_mut(), false).unwrap();
    }
    assert_eq!((gpu.memory(), gpu.high_water()), (meta.memory(), meta.high_water()));
    let mut matmuls = matmuls.take();
    matmuls.sort_by_key(|matmul| matmul.size);
    assert_eq!(matmuls.iter().map(|matmul| matmul.size).collect::<Vec<_>>(), [[70, 32, 48], [70, 48, 32]]);
    let e4m3 = tandem_kernels::cuda::driver::FactorType::E4m3;
    assert!(matmuls.iter().all(|matmul| matmul.dtype == e4m3));
}
