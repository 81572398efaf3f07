use tandem_kernels::ops::{self, Gate, HeadGates};
use tandem_kernels::{DType, Device};

use super::matrix::{Matrix, Random, cases, poison, round, same_at_every_thread_count};

const FUNCTIONS: [Gate; 2] = [Gate::Sigmoid, Gate::Silu];

fn value(function: Gate, x: f64) -> f64 {
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    match function {
        Gate::Sigmoid => sigmoid,
        Gate::Silu => x * sigmoid,
    }
}

/// By central differences.
fn slope(function: Gate, x: f64) -> f64 {
    (value(function, x + 1e-5) - value(function, x - 1e-5)) / 2e-5
}

/// The gates of all heads side by side, by the places that are documented.
fn gates_of(gates: HeadGates, gate: &Matrix, width: usize) -> Matrix {
    let HeadGates { head_dim, step, offset, .. } = gates;
    let mut own = Matrix::zeros(gate.rows, width);
    for t in 0..gate.rows {
        for c in 0..width {
            *own.at(t, c) = gate.row(t)[c / head_dim * step + offset + c % head_dim];
        }
    }
    own
}

fn product(a: &Matrix, b: &Matrix) -> Matrix {
    Matrix { data: a.data.iter().zip(&b.data).map(|(a, b)| a * b).collect(), ..*a }
}

/// Returns `h`, `dx` and `d_gate`, where all but the gates lie behind `pad` columns of others.
fn run(
    device: &Device,
    gates: HeadGates,
    [x, gate, dh]: [&Matrix; 3],
    pad: usize,
    dtype: DType,
) -> [Matrix; 3] {
    let (rows, width) = (x.rows, x.cols);
    let cols = pad..pad + width;
    let [xt, dht] = [x, dh].map(|m| m.behind(pad).tensor(device, dtype));
    let [x, dh] = [&xt, &dht].map(|t| t.view().col_range(cols.clone()));
    let gt = gate.tensor(device, dtype);
    let [mut h, mut dx] = [(); 2].map(|()| poison(device, rows, pad + width, dtype));
    let mut d_gate = poison(device, rows, gate.cols, dtype);
    ops::head_gate(device, gates, x, gt.view(), h.view_mut().col_range(cols.clone())).unwrap();
    let to = dx.view_mut().col_range(cols.clone());
    ops::head_gate_backward(device, gates, x, gt.view(), dh, to, d_gate.view_mut()).unwrap();
    for found in [&h, &dx] {
        let before = Matrix::read(device, found.view().col_range(0..pad));
        assert!(before.data.iter().all(|x| x.is_nan()), "columns before the result");
    }
    [h.view().col_range(cols.clone()), dx.view().col_range(cols), d_gate.view()]
        .map(|view| Matrix::read(device, view))
}

#[test]
fn gates_of_every_layout_forward_and_backward() {
    // Heads, their width, columns from gate to gate, first gate, columns after the last one.
    let layouts = [
        (1, 1, 1, 0, 0),
        (3, 7, 7, 0, 0),
        (2, 16, 32, 16, 0),
        (3, 33, 70, 4, 5),
        (2, 64, 128, 64, 8),
        (3, 8, 20, 8, 0),
    ];
    for function in FUNCTIONS {
        for (place, dtype, tolerance) in cases() {
            for (heads, head_dim, step, offset, rest) in layouts {
                let gates = HeadGates { function, head_dim, step, offset };
                let (width, gate_cols) = (heads * head_dim, (heads - 1) * step + offset + head_dim + rest);
                for (tokens, pad) in [(1, 0), (13, 8), (37, 3)] {
                    let mut random = Random(41);
                    let [x, dh] = [(); 2].map(|()| random.matrix(tokens, width, dtype));
                    let gate =
                        random.matrix(tokens, gate_cols, dtype).map(|x| round(12.0 * x * x * x, dtype));
                    let found = same_at_every_thread_count(place, |device| {
                        let [h, dx, d_gate] = run(device, gates, [&x, &gate, &dh], pad, dtype);
                        // What does not belong to a gate is not written.
                        let written = d_gate.data.iter().filter(|x| !x.is_nan()).count();
                        assert_eq!(written, tokens * width, "gates written");
                        [h, dx, gates_of(gates, &d_gate, width)]
                    });
                    let what = format!("{gates:?} {dtype} {tokens}x{width} {place:?}");
                    let own = gates_of(gates, &gate, width);
                    let (f, df) = (own.map(|x| value(function, x)), own.map(|x| slope(function, x)));
                    found[0].assert_close(&product(&f, &x), tolerance, &format!("h {what}"));
                    found[1].assert_close(&product(&f, &dh), tolerance, &format!("dx {what}"));
                    let d_gate = product(&product(&df, &x), &dh);
                    found[2].assert_close(&d_gate, tolerance, &format!("d_gate {what}"));
                }
            }
        }
    }
}

/// Far from zero the functions saturate and do not overflow; what is not a number stays so.
#[test]
fn extreme_gates() {
    for place in crate::places::Place::all() {
        let device = place.device(1, 1 << 28);
        let gate = Matrix { rows: 1, cols: 6, data: vec![-3e38, -1e4, -90.0, 90.0, 1e4, f64::NAN] };
        let one = gate.map(|_| 1.0);
        for function in FUNCTIONS {
            let gates = HeadGates { function, head_dim: 2, step: 2, offset: 0 };
            let [h, _, d_gate] = run(&device, gates, [&one, &gate, &one], 0, DType::F32);
            let (value, slope) = match function {
                Gate::Sigmoid => ([0.0, 0.0, 0.0, 1.0, 1.0], [0.0; 5]),
                Gate::Silu => ([0.0, 0.0, 0.0, 90.0, 1e4], [0.0, 0.0, 0.0, 1.0, 1.0]),
            };
            let what = format!("{function:?} {place:?}");
            assert!(h.data[5].is_nan() && d_gate.data[5].is_nan(), "{what}");
            for (found, expected) in [(h, value), (d_gate, slope)] {
                let expected = Matrix { rows: 1, cols: 5, data: expected.to_vec() };
                found.columns(0, 5).assert_close_beside(1.0, &expected, 1e-6, &what);
            }
        }
    }
}

#[test]
fn gates_that_are_not_there_are_named() {
    let device = super::matrix::device(1);
    let [x, mut h] = [(); 2].map(|()| poison(&device, 2, 12, DType::F32));
    let gate = poison(&device, 2, 23, DType::F32);
    let mut refused = |head_dim, step| {
        let gates = HeadGates { function: Gate::Silu, head_dim, step, offset: 6 };
        ops::head_gate(&device, gates, x.view(), gate.view(), h.view_mut()).unwrap_err().to_string()
    };
    let error = refused(6, 12);
    assert!(error.contains("12 columns in heads of 6, with gates every 12 from 6 in 23 columns"), "{error}");
    assert!(refused(5, 5).contains("heads of 5"));
    assert!(refused(4, 3).contains("every 3"));
}
