use tandem_kernels::DType;
use tandem_kernels::ops::{self, Activation};

use super::matrix::{Matrix, Random, cases, poison, round, same_at_every_thread_count};
use crate::places::Place;

const FUNCTIONS: [Activation; 5] =
    [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::ReluSquared];

/// Φ by Simpson's rule, independent of any series a kernel may use.
fn normal_cdf(x: f64) -> f64 {
    let steps = 400;
    let h = x / f64::from(steps);
    let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
    let inner: f64 = (1..steps).map(|i| if i % 2 == 1 { 4.0 } else { 2.0 } * density(f64::from(i) * h)).sum();
    0.5 + h / 3.0 * (density(0.0) + inner + density(x))
}

fn value(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * normal_cdf(x),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
    }
}

/// By central differences, but for those with a kink at 0, where the slope is 0 as in PyTorch.
fn slope(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Relu => return f64::from(u8::from(x > 0.0)),
        Activation::ReluSquared => return 2.0 * x.max(0.0),
        _ => {}
    }
    (value(function, x + 1e-5) - value(function, x - 1e-5)) / 2e-5
}

/// Numbers in -12..12 with both zeros' neighbourhoods well covered.
fn inputs(random: &mut Random, rows: usize, cols: usize, dtype: DType) -> Matrix {
    let mut x = random.matrix(rows, cols, dtype).map(|x| round(12.0 * x * x * x, dtype));
    x.data[0] = 0.0;
    x
}

#[test]
fn plain_and_gated_forward_and_backward() {
    for function in FUNCTIONS {
        for (place, dtype, tolerance) in cases() {
            for (tokens, width) in [(1, 1), (1, 16), (5, 7), (13, 80), (67, 131)] {
                let mut random = Random(3);
                let gate = inputs(&mut random, tokens, width, dtype);
                let [up, dh] = [(); 2].map(|()| random.matrix(tokens, width, dtype));
                let mut gu = Matrix::zeros(tokens, 2 * width);
                for t in 0..tokens {
                    gu.row_mut(t)[..width].copy_from_slice(gate.row(t));
                    gu.row_mut(t)[width..].copy_from_slice(up.row(t));
                }
                let found = same_at_every_thread_count(place, |device| {
                    let [u, gu, dh] = [&gate, &gu, &dh].map(|m| m.tensor(device, dtype));
                    let mut results =
                        [width, width, width, 2 * width].map(|cols| poison(device, tokens, cols, dtype));
                    let [h, du, gated, dgu] = &mut results;
                    ops::activate(device, function, u.view(), h.view_mut()).unwrap();
                    ops::activate_backward(device, function, u.view(), dh.view(), du.view_mut()).unwrap();
                    ops::gated(device, function, gu.view(), gated.view_mut()).unwrap();
                    ops::gated_backward(device, function, gu.view(), dh.view(), dgu.view_mut()).unwrap();
                    results.map(|t| Matrix::read(device, t.view()))
                });
                let what = format!("{function:?} {dtype} {tokens}x{width}");
                let h = gate.map(|x| value(function, x));
                let f = gate.map(|x| slope(function, x));
                let product = |a: &Matrix, b: &Matrix| Matrix {
                    data: a.data.iter().zip(&b.data).map(|(a, b)| a * b).collect(),
                    ..*a
                };
                found[0].assert_close(&h, tolerance, &format!("h {what}"));
                found[1].assert_close(&product(&f, &dh), tolerance, &format!("du {what}"));
                found[2].assert_close(&product(&h, &up), tolerance, &format!("gated {what}"));
                let dgate = product(&product(&f, &up), &dh);
                found[3].columns(0, width).assert_close(&dgate, tolerance, &format!("dgate {what}"));
                found[3].columns(width, width).assert_close(
                    &product(&h, &dh),
                    tolerance,
                    &format!("dup {what}"),
                );
            }
        }
    }
}

/// Far from zero the functions saturate and do not overflow; what is not a number stays so.
#[test]
fn extremes() {
    for place in Place::all() {
        let device = place.device(1, 1 << 28);
        let x = Matrix { rows: 1, cols: 6, data: vec![-3e38, -1e4, -90.0, 90.0, 1e4, 1e18] };
        for function in FUNCTIONS {
            let what = format!("{function:?}, {}", place.name());
            let nan = x.map(|_| f64::NAN).tensor(&device, DType::F32);
            let mut h = Matrix::zeros(1, 6).tensor(&device, DType::F32);
            ops::activate(&device, function, nan.view(), h.view_mut()).unwrap();
            assert!(Matrix::read(&device, h.view()).data.iter().all(|x| x.is_nan()), "of NaN: {what}");
            let u = x.tensor(&device, DType::F32);
            let one = x.map(|_| 1.0).tensor(&device, DType::F32);
            let [mut h, mut du] = [(); 2].map(|()| poison(&device, 1, 6, DType::F32));
            ops::activate(&device, function, u.view(), h.view_mut()).unwrap();
            ops::activate_backward(&device, function, u.view(), one.view(), du.view_mut()).unwrap();
            let [h, du] = [h, du].map(|t| Matrix::read(&device, t.view()));
            let (value, slope) = match function {
                Activation::ReluSquared => ([0., 0., 0., 8100., 1e8, 1e36], [0., 0., 0., 180., 2e4, 2e18]),
                _ => ([0., 0., 0., 90., 1e4, 1e18], [0., 0., 0., 1., 1., 1.]),
            };
            h.assert_close(&Matrix { rows: 1, cols: 6, data: value.to_vec() }, 1e-6, &format!("h {what}"));
            du.assert_close(&Matrix { rows: 1, cols: 6, data: slope.to_vec() }, 1e-6, &format!("du {what}"));
        }
    }
}
