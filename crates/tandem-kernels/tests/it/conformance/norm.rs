use tandem_kernels::{DType, Device, MemoryKind, ops};

use super::matrix::{F32, Matrix, Random, TYPES, cases, poison, same_at_every_thread_count};

/// From one element to rows that a GPU's block of threads shares and reads twice, and whose sums
/// have no room in its shared memory; and to more rows than its blocks have at a time.
const SIZES: [(usize, usize); 11] = [
    (1, 1),
    (1, 64),
    (3, 7),
    (37, 20),
    (131, 97),
    (70, 256),
    (5, 1031),
    (6, 2056),
    (3, 9000),
    (2, 25_600),
    (2100, 12),
];
const EPS: f64 = 1e-5;

/// [`F32`], for rows of any width.
fn f32_error(width: usize) -> f64 {
    F32.max(8.0 * (width as f64).sqrt() / 16_777_216.0)
}

/// The gradient of `Σ dy · f(x)` by central differences in f64.
pub fn central_difference(x: &Matrix, dy: &Matrix, f: impl Fn(&Matrix) -> Matrix) -> Matrix {
    let h = 1e-5;
    let mut gradient = Matrix::zeros(x.rows, x.cols);
    for i in 0..x.data.len() {
        let mut moved = x.clone();
        moved.data[i] = x.data[i] + h;
        let above = f(&moved);
        moved.data[i] = x.data[i] - h;
        let below = f(&moved);
        let difference = above.data.iter().zip(&below.data).zip(&dy.data).map(|((a, b), d)| (a - b) * d);
        gradient.data[i] = difference.sum::<f64>() / (2.0 * h);
    }
    gradient
}

fn rms_norm(x: &Matrix, w: &Matrix, offset: f64) -> Matrix {
    let mut y = x.clone();
    for r in 0..x.rows {
        let mean = x.row(r).iter().map(|x| x * x).sum::<f64>() / x.cols as f64;
        let inverse = 1.0 / (mean + EPS).sqrt();
        y.row_mut(r).iter_mut().zip(&w.data).for_each(|(y, w)| *y *= inverse * (w + offset));
    }
    y
}

fn layer_norm(x: &Matrix, w: &Matrix, b: &Matrix) -> Matrix {
    let mut y = x.clone();
    for r in 0..x.rows {
        let mean = x.row(r).iter().sum::<f64>() / x.cols as f64;
        let variance = x.row(r).iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.cols as f64;
        for (i, y) in y.row_mut(r).iter_mut().enumerate() {
            *y = (*y - mean) / (variance + EPS).sqrt() * w.data[i] + b.data[i];
        }
    }
    y
}

/// Analytic, because central differences of every size would take long; held to them below.
fn rms_norm_backward(x: &Matrix, w: &Matrix, offset: f64, dy: &Matrix) -> (Matrix, Matrix) {
    let (mut dx, mut dw) = (x.clone(), Matrix::zeros(1, x.cols));
    for r in 0..x.rows {
        let mean = x.row(r).iter().map(|x| x * x).sum::<f64>() / x.cols as f64;
        let inverse = 1.0 / (mean + EPS).sqrt();
        let g: Vec<f64> = dy.row(r).iter().zip(&w.data).map(|(dy, w)| dy * (w + offset)).collect();
        let dot = g.iter().zip(x.row(r)).map(|(g, x)| g * x).sum::<f64>() / x.cols as f64;
        for i in 0..x.cols {
            *dx.at(r, i) = g[i] * inverse - x.row(r)[i] * dot * inverse.powi(3);
            dw.data[i] += dy.row(r)[i] * x.row(r)[i] * inverse;
        }
    }
    (dx, dw)
}

fn layer_norm_backward(x: &Matrix, w: &Matrix, dy: &Matrix) -> (Matrix, Matrix, Matrix) {
    let (mut dx, mut dw, mut db) = (x.clone(), Matrix::zeros(1, x.cols), Matrix::zeros(1, x.cols));
    for r in 0..x.rows {
        let count = x.cols as f64;
        let mean = x.row(r).iter().sum::<f64>() / count;
        let variance = x.row(r).iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let inverse = 1.0 / (variance + EPS).sqrt();
        let normal: Vec<f64> = x.row(r).iter().map(|x| (x - mean) * inverse).collect();
        let g: Vec<f64> = dy.row(r).iter().zip(&w.data).map(|(dy, w)| dy * w).collect();
        let sum = g.iter().sum::<f64>() / count;
        let dot = g.iter().zip(&normal).map(|(g, n)| g * n).sum::<f64>() / count;
        for i in 0..x.cols {
            *dx.at(r, i) = (g[i] - sum - normal[i] * dot) * inverse;
            dw.data[i] += dy.row(r)[i] * normal[i];
            db.data[i] += dy.row(r)[i];
        }
    }
    (dx, dw, db)
}

fn add(a: &Matrix, b: &Matrix) -> Matrix {
    Matrix { data: a.data.iter().zip(&b.data).map(|(a, b)| a + b).collect(), ..*a }
}

#[test]
fn references_agree_with_central_differences() {
    let mut random = Random(1);
    let [x, dy] = [(); 2].map(|()| random.matrix(3, 7, DType::F32));
    let [w, b] = [(); 2].map(|()| random.matrix(1, 7, DType::F32));
    let (dx, dw) = rms_norm_backward(&x, &w, 1.0, &dy);
    dx.assert_close(&central_difference(&x, &dy, |x| rms_norm(x, &w, 1.0)), 1e-8, "rms dx");
    dw.assert_close(&central_difference(&w, &dy, |w| rms_norm(&x, w, 1.0)), 1e-8, "rms dw");
    let (dx, dw, db) = layer_norm_backward(&x, &w, &dy);
    dx.assert_close(&central_difference(&x, &dy, |x| layer_norm(x, &w, &b)), 1e-8, "layer dx");
    dw.assert_close(&central_difference(&w, &dy, |w| layer_norm(&x, w, &b)), 1e-8, "layer dw");
    db.assert_close(&central_difference(&b, &dy, |b| layer_norm(&x, &w, b)), 1e-8, "layer db");
}

#[test]
fn rms_norm_forward_and_backward() {
    for (x_type, _) in TYPES {
        for (place, y_type, tolerance) in cases() {
            for (tokens, width) in SIZES {
                for offset in [0.0, 1.0] {
                    let mut random = Random(7);
                    let x = random.matrix(tokens, width, x_type);
                    let w = random.matrix(1, width, DType::F32);
                    let dy = random.matrix(tokens, width, y_type);
                    let [dx, dw] = [tokens, 1].map(|rows| random.matrix(rows, width, DType::F32));
                    let found = same_at_every_thread_count(place, |device| {
                        let (xt, wt) = (x.tensor(device, x_type), w.tensor(device, DType::F32));
                        let mut y = poison(device, tokens, width, y_type);
                        let mut inverse = poison(device, 1, tokens, DType::F32);
                        let (x, w) = (xt.view(), wt.view());
                        let (offset, eps) = (offset as f32, EPS as f32);
                        let (to, inverse_rms) = (y.view_mut(), inverse.view_mut());
                        let call = ops::RmsNorm { x, w, offset, eps, y: to, inverse_rms };
                        ops::rms_norm(device, call).unwrap();
                        let (mut dxt, mut dwt) =
                            (dx.tensor(device, DType::F32), dw.tensor(device, DType::F32));
                        let dyt = dy.tensor(device, y_type);
                        let (inverse_rms, dy) = (inverse.view(), dyt.view());
                        let (dx, dw) = (dxt.view_mut(), Some(dwt.view_mut()));
                        let call = ops::RmsNormBackward { x, w, offset, inverse_rms, dy, dx, dw };
                        ops::rms_norm_backward(device, call).unwrap();
                        [y, dxt, dwt].map(|t| Matrix::read(device, t.view()))
                    });
                    let what = format!("{tokens}x{width} {x_type}->{y_type} offset {offset}");
                    let error = f32_error(width);
                    found[0].assert_close(
                        &rms_norm(&x, &w, offset),
                        tolerance.max(error),
                        &format!("y {what}"),
                    );
                    let (more_dx, more_dw) = rms_norm_backward(&x, &w, offset, &dy);
                    found[1].assert_close(&add(&dx, &more_dx), error, &format!("dx {what}"));
                    found[2].assert_close(&add(&dw, &more_dw), error, &format!("dw {what}"));
                }
            }
        }
    }
}

#[test]
fn layer_norm_forward_and_backward() {
    for (x_type, _) in TYPES {
        for (place, y_type, tolerance) in cases() {
            for (tokens, width) in SIZES {
                let mut random = Random(8);
                // A mean far from zero: a variance by difference of squares would fail here.
                let x = random.matrix(tokens, width, x_type).map(|x| super::matrix::round(x + 8.0, x_type));
                let [w, b] = [(); 2].map(|()| random.matrix(1, width, DType::F32));
                let dy = random.matrix(tokens, width, y_type);
                let [dx, dw, db] = [tokens, 1, 1].map(|rows| random.matrix(rows, width, DType::F32));
                let found = same_at_every_thread_count(place, |device| {
                    let xt = x.tensor(device, x_type);
                    let [wt, bt] = [&w, &b].map(|m| m.tensor(device, DType::F32));
                    let mut y = poison(device, tokens, width, y_type);
                    let mut kept = poison(device, tokens, 2, DType::F32);
                    let (x, w, b, eps) = (xt.view(), wt.view(), bt.view(), EPS as f32);
                    let (to, mean_inverse) = (y.view_mut(), kept.view_mut());
                    let call = ops::LayerNorm { x, w, b: Some(b), eps, y: to, mean_inverse };
                    ops::layer_norm(device, call).unwrap();
                    let [mut dxt, mut dwt, mut dbt] = [&dx, &dw, &db].map(|m| m.tensor(device, DType::F32));
                    let dyt = dy.tensor(device, y_type);
                    let (mean_inverse, dy, dx) = (kept.view(), dyt.view(), dxt.view_mut());
                    let dw_db = Some((dwt.view_mut(), Some(dbt.view_mut())));
                    let call = ops::LayerNormBackward { x, w, mean_inverse, dy, dx, dw_db };
                    ops::layer_norm_backward(device, call).unwrap();
                    [y, dxt, dwt, dbt].map(|t| Matrix::read(device, t.view()))
                });
                // With one column the variance is 0 and 1/σ = 316 magnifies the rounding of the
                // mean.
                let loose = if width == 1 { 1e3 } else { 10.0 };
                let (what, error) = (format!("{tokens}x{width} {x_type}->{y_type}"), f32_error(width));
                found[0].assert_close(
                    &layer_norm(&x, &w, &b),
                    loose * tolerance.max(error),
                    &format!("y {what}"),
                );
                let (more_dx, more_dw, more_db) = layer_norm_backward(&x, &w, &dy);
                found[1].assert_close(&add(&dx, &more_dx), loose * error, &format!("dx {what}"));
                found[2].assert_close(&add(&dw, &more_dw), loose * error, &format!("dw {what}"));
                found[3].assert_close(&add(&db, &more_db), error, &format!("db {what}"));
            }
        }
    }
}

/// A norm without bias gives the bits of one whose bias is zero.
#[test]
fn a_layer_norm_without_bias_is_one_with_a_bias_of_zero() {
    for (place, dtype, _) in cases() {
        for (tokens, width) in SIZES {
            let mut random = Random(10);
            let x = random.matrix(tokens, width, dtype);
            let (w, zero) = (random.matrix(1, width, DType::F32), Matrix::zeros(1, width));
            let dy = random.matrix(tokens, width, dtype);
            let run = |device: &Device, has_bias: bool| {
                let [xt, dyt] = [&x, &dy].map(|m| m.tensor(device, dtype));
                let [wt, bt] = [&w, &zero].map(|m| m.tensor(device, DType::F32));
                let mut y = poison(device, tokens, width, dtype);
                let mut kept = poison(device, tokens, 2, DType::F32);
                let [mut dx, mut dw, mut db] =
                    [tokens, 1, 1].map(|rows| Matrix::zeros(rows, width).tensor(device, DType::F32));
                let (x, w, b) = (xt.view(), wt.view(), has_bias.then(|| bt.view()));
                let (to, mean_inverse) = (y.view_mut(), kept.view_mut());
                let call = ops::LayerNorm { x, w, b, eps: EPS as f32, y: to, mean_inverse };
                ops::layer_norm(device, call).unwrap();
                let (mean_inverse, dy) = (kept.view(), dyt.view());
                let dw_db = Some((dw.view_mut(), has_bias.then(|| db.view_mut())));
                let call = ops::LayerNormBackward { x, w, mean_inverse, dy, dx: dx.view_mut(), dw_db };
                ops::layer_norm_backward(device, call).unwrap();
                [y, dx, dw].map(|t| Matrix::read(device, t.view()))
            };
            let found = same_at_every_thread_count(place, |device| run(device, false));
            let expected = same_at_every_thread_count(place, |device| run(device, true));
            assert!(found == expected, "{tokens}x{width} {dtype}");
        }
    }
}

/// Rows inside wider ones: `start` elements stand before each, which stay as they were.
#[test]
fn parts_of_wider_rows() {
    for (place, dtype, tolerance) in cases() {
        // As many as leave vectors of elements aligned, and as do not.
        for start in [8, 3] {
            parts(&place.device(1, 1 << 28), dtype, tolerance, start);
        }
    }
}

fn parts(device: &Device, dtype: DType, tolerance: f64, start: usize) {
    const ROWS: usize = 37;
    let cols = start..start + 40;
    let part = |m: &Matrix| m.columns(start, 40);
    let mut random = Random(9);
    let [x, dy] = [(); 2].map(|()| random.matrix(ROWS, 64, dtype));
    let dx = random.matrix(ROWS, 64, DType::F32);
    let [w, b] = [(); 2].map(|()| random.matrix(1, 40, DType::F32));
    let [xt, dyt] = [&x, &dy].map(|m| m.tensor(device, dtype));
    let [xv, dyv] = [&xt, &dyt].map(|t| t.view().col_range(cols.clone()));
    let [wt, bt] = [&w, &b].map(|m| m.tensor(device, DType::F32));
    let mut results = [(); 2].map(|()| (poison(device, ROWS, 64, dtype), dx.tensor(device, DType::F32)));
    let [(rms_y, rms_dx), (layer_y, layer_dx)] = &mut results;
    let eps = EPS as f32;

    let mut kept = poison(device, 1, ROWS, DType::F32);
    let y = rms_y.view_mut().col_range(cols.clone());
    let call = ops::RmsNorm { x: xv, w: wt.view(), offset: 1.0, eps, y, inverse_rms: kept.view_mut() };
    ops::rms_norm(device, call).unwrap();
    let to = rms_dx.view_mut().col_range(cols.clone());
    let call = ops::RmsNormBackward {
        x: xv,
        w: wt.view(),
        offset: 1.0,
        inverse_rms: kept.view(),
        dy: dyv,
        dx: to,
        dw: None,
    };
    ops::rms_norm_backward(device, call).unwrap();
    let mut kept = poison(device, ROWS, 2, DType::F32);
    let y = layer_y.view_mut().col_range(cols.clone());
    let call =
        ops::LayerNorm { x: xv, w: wt.view(), b: Some(bt.view()), eps, y, mean_inverse: kept.view_mut() };
    ops::layer_norm(device, call).unwrap();
    let to = layer_dx.view_mut().col_range(cols.clone());
    let call = ops::LayerNormBackward {
        x: xv,
        w: wt.view(),
        mean_inverse: kept.view(),
        dy: dyv,
        dx: to,
        dw_db: None,
    };
    ops::layer_norm_backward(device, call).unwrap();

    let [rms, layer] = results.map(|(y, dx)| [y, dx].map(|t| Matrix::read(device, t.view())));
    let (x, dy, old) = (part(&x), part(&dy), part(&dx));
    let what = format!("{dtype} from {start}");
    part(&rms[0]).assert_close(&rms_norm(&x, &w, 1.0), tolerance, &format!("rms y {what}"));
    let (more, _) = rms_norm_backward(&x, &w, 1.0, &dy);
    part(&rms[1]).assert_close(&add(&old, &more), F32, &format!("rms dx {what}"));
    part(&layer[0]).assert_close(&layer_norm(&x, &w, &b), tolerance, &format!("layer y {what}"));
    let (more, ..) = layer_norm_backward(&x, &w, &dy);
    part(&layer[1]).assert_close(&add(&old, &more), F32, &format!("layer dx {what}"));
    let rest = |m: &Matrix| [m.columns(0, start), m.columns(cols.end, 64 - cols.end)];
    for [y, found] in [rms, layer] {
        assert!(rest(&y).iter().all(|m| m.data.iter().all(|x| x.is_nan())), "y {what}");
        assert_eq!(rest(&found), rest(&dx), "dx {what}");
    }
}

#[test]
fn wrong_shapes_are_named() {
    for device in [super::matrix::device(1), Device::meta()] {
        let alloc = |rows, cols| device.alloc(MemoryKind::Scratch, rows, cols, DType::F32).unwrap();
        let (x, w, mut y, mut inverse) = (alloc(3, 8), alloc(1, 7), alloc(3, 8), alloc(1, 3));
        let (y, inverse_rms) = (y.view_mut(), inverse.view_mut());
        let call = ops::RmsNorm { x: x.view(), w: w.view(), offset: 0.0, eps: 1e-5, y, inverse_rms };
        let error = ops::rms_norm(&device, call).unwrap_err();
        assert_eq!(error.to_string(), "rms_norm: w is 1x7, expected 1x8");
    }
}
