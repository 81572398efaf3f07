//! Optimiser steps against f64 and against numbers that torch printed; the sum of squares; bits
//! over thread counts.

use crate::support::{
    ADAMW, F32_ROUNDOFF, LION, Matrix, Place, RMSPROP, SGD, assert_close, devices, numbers, processors,
    vector,
};
use tandem_kernels::{DType, Device, MemoryKind, bf16, ops};

/// One element, a prime, more than a vector, more than a block and a bit.
const LENGTHS: [usize; 4] = [1, 97, 1000, 16_384 + 1031];

/// A new weight is off by at most this: a few roundings of the old weight and of the step taken.
fn tolerance(old: f64, new: f64) -> f64 {
    4.0 * F32_ROUNDOFF * old.abs() + 1e-5 * (new - old).abs() + 1e-12
}

#[test]
fn adamw_follows_its_formula() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            for copied in [None, Some(DType::F32), Some(DType::Bf16)] {
                let what = format!("{} {len} copy {copied:?}", isa.name());
                let scale = 0.5;
                let mut master = vector(&device, &numbers(1, len));
                let [mut m, mut v] = [(); 2].map(|()| vector(&device, &vec![0.0; len]));
                let [mut w64, mut m64, mut v64] = [master.values.clone(), vec![0.0; len], vec![0.0; len]];
                for step in 1..=3 {
                    let grad = vector(&device, &numbers(10 + step, len));
                    let config = ops::AdamW { step, ..ADAMW };
                    let mut copy = copied.map(|dtype| Matrix::new(&device, 3, (1, len), dtype, 0));
                    let views = (master.view_mut(), m.view_mut(), v.view_mut());
                    let copy_view = copy.as_mut().map(Matrix::view_mut);
                    let update = ops::Update::new(grad.view(), scale, views.0, copy_view);
                    ops::adamw(&device, &config, update, views.1.into(), views.2.into()).unwrap();
                    let old = w64.clone();
                    for i in 0..len {
                        let g = grad.values[i] * f64::from(scale);
                        m64[i] = 0.9 * m64[i] + 0.1 * g;
                        v64[i] = 0.999 * v64[i] + 0.001 * g * g;
                        let (m_hat, v_hat) = (
                            m64[i] / (1.0 - 0.9f64.powi(step as i32)),
                            v64[i] / (1.0 - 0.999f64.powi(step as i32)),
                        );
                        w64[i] = w64[i] * (1.0 - 1e-3 * 0.01) - 1e-3 * m_hat / (v_hat.sqrt() + 1e-8);
                    }
                    let found = master.read(&device);
                    assert_close(&what, &found, &w64, |i| step as f64 * tolerance(old[i], w64[i]));
                    assert_close(&what, &m.read(&device), &m64, |i| 1e-6 * m64[i].abs() + 1e-8);
                    assert_close(&what, &v.read(&device), &v64, |i| 1e-6 * v64[i].abs() + 1e-12);
                    if let (Some(copy), Some(dtype)) = (copy, copied) {
                        let round = |w: &f32| {
                            f64::from(if dtype == DType::Bf16 { bf16::from_f32(*w).to_f32() } else { *w })
                        };
                        let expected: Vec<f64> = found.iter().map(round).collect();
                        assert_close(&format!("{what}, copy"), &copy.read(&device), &expected, |_| 0.0);
                    }
                }
            }
        }
    }
}

#[test]
fn rmsprop_follows_its_formula() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            let what = format!("{} {len}", isa.name());
            let mut master = vector(&device, &numbers(1, len));
            let mut v = vector(&device, &vec![0.0; len]);
            let mut copy = Matrix::new(&device, 3, (1, len), DType::Bf16, 0);
            let [mut w64, mut v64] = [master.values.clone(), vec![0.0; len]];
            for step in 1..=3 {
                let grad = vector(&device, &numbers(10 + step, len));
                let (master_view, copy_view) = (master.view_mut(), Some(copy.view_mut()));
                let update = ops::Update::new(grad.view(), 2.0, master_view, copy_view);
                ops::rmsprop(&device, &RMSPROP, update, v.view_mut().into()).unwrap();
                let old = w64.clone();
                for i in 0..len {
                    let g = 2.0 * grad.values[i] + 0.02 * w64[i];
                    v64[i] = 0.99 * v64[i] + 0.01 * g * g;
                    w64[i] -= 1e-3 * g / (v64[i].sqrt() + 1e-8);
                }
                let found = master.read(&device);
                assert_close(&what, &found, &w64, |i| step as f64 * tolerance(old[i], w64[i]));
                let rounded: Vec<f64> =
                    found.iter().map(|w| f64::from(bf16::from_f32(*w).to_f32())).collect();
                assert_close(&format!("{what}, copy"), &copy.read(&device), &rounded, |_| 0.0);
            }
        }
    }
}

#[test]
fn lion_follows_its_formula() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            let what = format!("{} {len}", isa.name());
            let (mut master, mut m) = (vector(&device, &numbers(1, len)), vector(&device, &vec![0.0; len]));
            let [mut w64, mut m64] = [master.values.clone(), vec![0.0; len]];
            for step in 1..=3 {
                let grad = vector(&device, &numbers(10 + step, len));
                let update = ops::Update::new(grad.view(), 2.0, master.view_mut(), None);
                ops::lion(&device, &LION, update, m.view_mut().into()).unwrap();
                let old = w64.clone();
                for i in 0..len {
                    let g = 2.0 * grad.values[i];
                    let direction = 0.9 * m64[i] + 0.1 * g;
                    let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                    m64[i] = 0.99 * m64[i] + 0.01 * g;
                    w64[i] = w64[i] * (1.0 - 1e-3 * 0.01) - 1e-3 * sign;
                }
                let found = master.read(&device);
                assert_close(&what, &found, &w64, |i| step as f64 * tolerance(old[i], w64[i]));
                assert_close(&what, &m.read(&device), &m64, |i| 1e-6 * m64[i].abs() + 1e-8);
            }
        }
    }
}

/// A zero gradient has no direction: only the decay moves a weight.
#[test]
fn lion_does_not_move_without_a_gradient() {
    for (isa, device) in devices(1) {
        let (grad, mut m) = (vector(&device, &[0.0, -0.0, 1.0]), vector(&device, &[0.0; 3]));
        let mut master = vector(&device, &[1.0; 3]);
        let config = ops::Lion { weight_decay: 0.0, learning_rate: 0.25, ..LION };
        ops::lion(
            &device,
            &config,
            ops::Update::new(grad.view(), 1.0, master.view_mut(), None),
            m.view_mut().into(),
        )
        .unwrap();
        assert_eq!(master.read(&device), [1.0, 1.0, 0.75], "{}", isa.name());
    }
}

#[test]
fn sgd_follows_its_formula() {
    let with = |momentum, dampening, nesterov| Some((momentum, dampening, nesterov));
    let cases = [None, with(0.9, 0.0, false), with(0.9, 0.25, false), with(0.95, 0.0, true)];
    for (isa, device) in devices(2) {
        for (len, case) in LENGTHS.into_iter().flat_map(|len| cases.map(|case| (len, case))) {
            let what = format!("{} {len} {case:?}", isa.name());
            let (mut master, mut buffer) =
                (vector(&device, &numbers(1, len)), vector(&device, &vec![0.0; len]));
            let [mut w64, mut b64] = [master.values.clone(), vec![0.0; len]];
            for step in 1..=3 {
                let grad = vector(&device, &numbers(10 + step, len));
                let momentum = case.map(|(momentum, dampening, nesterov)| ops::Momentum {
                    momentum,
                    dampening,
                    nesterov,
                    step,
                });
                let update = ops::Update::new(grad.view(), 0.5, master.view_mut(), None);
                let states = momentum.map(|_| buffer.view_mut().into());
                ops::sgd(&device, &ops::Sgd { momentum, ..SGD }, update, states).unwrap();
                let old = w64.clone();
                for i in 0..len {
                    let g = 0.5 * grad.values[i] + 0.02 * w64[i];
                    let direction = match case {
                        None => g,
                        Some((momentum, dampening, nesterov)) => {
                            let entering = if step == 1 { 1.0 } else { 1.0 - dampening };
                            b64[i] = momentum * b64[i] + entering * g;
                            if nesterov { g + momentum * b64[i] } else { b64[i] }
                        }
                    };
                    w64[i] -= 1e-3 * direction;
                }
                let found = master.read(&device);
                assert_close(&what, &found, &w64, |i| step as f64 * tolerance(old[i], w64[i]));
                assert_close(&what, &buffer.read(&device), &b64, |i| 1e-6 * b64[i].abs() + 1e-6);
            }
        }
    }
}

/// torch 2.15 on a CPU with fused multiply-adds, whose single-tensor loop has this arithmetic order:
/// ```python
/// p = torch.nn.Parameter(torch.tensor([0.5, -1.25, 3.0, 1e-3, -0.75, 2.0, 0.1, -0.2, 7.0, -0.015625, 0.3, 1.0, -1.0, 0.7, 1.9, -3.3]))
/// g = torch.tensor([0.1, -0.2, 0.3, -0.4, 1e-4, 2.5, -0.01, 0.02, 0.7, -0.9, 0.05, -1e-6, 0.33, -0.77, 0.11, 0.6])
/// o = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.01, foreach=False)  # or RMSprop(..., alpha=0.99, weight_decay=0.02)
/// for scale in (1.0, -0.5, 0.25): p.grad = g * scale; o.step()
/// print([x.view(torch.int32).item() for x in p.detach()])
/// ```
#[test]
fn the_bits_are_those_of_torch() {
    let weights =
        [0.5, -1.25, 3.0, 1e-3, -0.75, 2.0, 0.1, -0.2, 7.0, -0.015625, 0.3, 1.0, -1.0, 0.7, 1.9, -3.3];
    let gradient =
        [0.1, -0.2, 0.3, -0.4, 1e-4, 2.5, -0.01, 0.02, 0.7, -0.9, 0.05, -1e-6, 0.33, -0.77, 0.11, 0.6];
    for (isa, device) in devices(1) {
        if isa == Place::Cpu(tandem_kernels::cpu::Isa::Portable) && cfg!(target_arch = "x86_64") {
            continue; // Without fused multiply-adds the last bit may differ.
        }
        let [mut adamw, mut rmsprop] = [(); 2].map(|()| vector(&device, &weights));
        let [mut m, mut v, mut square] = [(); 3].map(|()| vector(&device, &[0.0; 16]));
        for (step, scale) in (1..).zip([1.0, -0.5, 0.25]) {
            let grad = vector(&device, &gradient.map(|g| g * scale));
            let config = ops::AdamW { step, ..ADAMW };
            let (m, v) = (m.view_mut().into(), v.view_mut().into());
            ops::adamw(&device, &config, ops::Update::new(grad.view(), 1.0, adamw.view_mut(), None), m, v)
                .unwrap();
            let update = ops::Update::new(grad.view(), 1.0, rmsprop.view_mut(), None);
            ops::rmsprop(&device, &RMSPROP, update, square.view_mut().into()).unwrap();
        }
        let bits = |m: &Matrix| m.read(&device).iter().map(|x| x.to_bits().cast_signed()).collect::<Vec<_>>();
        assert_eq!(bits(&adamw), TORCH_ADAMW, "{}", isa.name());
        assert_eq!(bits(&rmsprop), TORCH_RMSPROP, "{}", isa.name());
    }
}

#[test]
fn the_sum_of_squares_is_exact_to_f64_and_passes_infinities_on() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            let x = vector(&device, &numbers(1, len));
            let expected: f64 = x.values.iter().map(|x| x * x).sum();
            let found = ops::sum_of_squares(&device, x.view()).unwrap();
            assert!((found - expected).abs() <= 1e-13 * expected, "{} {len}: {found} {expected}", isa.name());
        }
        for (bad, is_expected) in
            [(f32::INFINITY, f64::is_infinite as fn(f64) -> bool), (f32::NAN, f64::is_nan as fn(f64) -> bool)]
        {
            let mut values = numbers(1, 40_000);
            values[39_999] = bad;
            assert!(is_expected(ops::sum_of_squares(&device, vector(&device, &values).view()).unwrap()));
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let len = 100_003;
    let mut first = None;
    for threads in [1, 2, 3, 5] {
        let device = Device::cpu(threads, 1 << 30).unwrap();
        let grad = vector(&device, &numbers(1, len));
        let [mut w, mut m, mut v] = [2, 3, 4]
            .map(|seed| vector(&device, &numbers(seed, len).iter().map(|x| x.abs()).collect::<Vec<_>>()));
        let views = (w.view_mut(), m.view_mut(), v.view_mut());
        ops::adamw(
            &device,
            &ADAMW,
            ops::Update::new(grad.view(), 1.0, views.0, None),
            views.1.into(),
            views.2.into(),
        )
        .unwrap();
        let sum = ops::sum_of_squares(&device, grad.view()).unwrap();
        let bits: Vec<u32> = [w, m, v].iter().flat_map(|x| x.read(&device)).map(f32::to_bits).collect();
        let found = (sum.to_bits(), bits);
        assert!(*first.get_or_insert_with(|| found.clone()) == found, "{threads} threads differ from 1");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::meta();
    let alloc = |cols, dtype| device.alloc(MemoryKind::Scratch, 1, cols, dtype).unwrap();
    let grad = alloc(8, DType::F32);
    let [mut w, mut m, mut v] = [(); 3].map(|()| alloc(8, DType::F32));
    let mut short = alloc(7, DType::F32);
    let views = (w.view_mut(), m.view_mut(), v.view_mut());
    let update = ops::Update::new(grad.view(), 1.0, views.0, None);
    let error = ops::adamw(&device, &ADAMW, update, short.view_mut().into(), views.2.into());
    assert_eq!(error.unwrap_err().to_string(), "adamw: m is 1x7, expected 1x8");
    let zero = ops::AdamW { step: 0, ..ADAMW };
    let update = ops::Update::new(grad.view(), 1.0, w.view_mut(), None);
    let error = ops::adamw(&device, &zero, update, m.view_mut().into(), v.view_mut().into());
    assert_eq!(error.unwrap_err().to_string(), "adamw: steps count from 1");
    let wide = device.alloc(MemoryKind::Scratch, 2, 8, DType::F32).unwrap();
    let error = ops::sum_of_squares(&device, wide.view().col_range(0..4));
    assert_eq!(error.unwrap_err().to_string(), "block_squares: x must be contiguous");
}

const TORCH_ADAMW: [i32; 16] = [
    1_056_910_190,
    -1_080_047_074,
    1_077_929_011,
    992_662_886,
    -1_086_298_159,
    1_073_727_841,
    1_037_047_200,
    -1_102_155_666,
    1_088_418_077,
    -1_134_187_811,
    1_050_199_507,
    1_065_366_289,
    -1_082_117_205,
    1_060_346_653,
    1_072_889_005,
    -1_068_282_907,
];
const TORCH_RMSPROP: [i32; 16] = [
    1_056_648_168,
    -1_080_115_920,
    1_077_889_979,
    1_007_589_857,
    -1_086_707_531,
    1_073_674_709,
    1_037_328_279,
    -1_102_009_239,
    1_088_398_803,
    -1_140_745_416,
    1_049_927_208,
    1_064_970_544,
    -1_082_075_322,
    1_060_443_740,
    1_072_794_844,
    -1_068_265_653,
];

#[test]
fn schedule_free_adamw_follows_its_formula() {
    const RATE: f64 = 1e-2;
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            let what = format!("{} {len}", isa.name());
            let mut y = vector(&device, &numbers(1, len));
            let (mut z, mut v) = (vector(&device, &numbers(1, len)), vector(&device, &vec![0.0; len]));
            // The average, which is not stored, and what is.
            let [mut x64, mut z64, mut v64] = [y.values.clone(), y.values.clone(), vec![0.0; len]];
            for step in 1..=4 {
                let grad = vector(&device, &numbers(10 + step, len));
                let share = 1.0 / step as f64;
                let config = ops::ScheduleFreeAdamW {
                    learning_rate: RATE,
                    beta1: 0.9,
                    beta2: 0.99,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step,
                    share,
                };
                let mut copy = Matrix::new(&device, 3, (1, len), DType::Bf16, 0);
                let update = ops::Update::new(grad.view(), 0.5, y.view_mut(), Some(copy.view_mut()));
                ops::schedule_free_adamw(&device, &config, update, z.view_mut().into(), v.view_mut().into())
                    .unwrap();
                let mut expected = Vec::new();
                for i in 0..len {
                    let (g, at) = (0.5 * grad.values[i], 0.1 * z64[i] + 0.9 * x64[i]);
                    v64[i] = 0.99 * v64[i] + 0.01 * g * g;
                    let root = (v64[i] / (1.0 - 0.99f64.powi(step as i32))).sqrt();
                    z64[i] -= RATE * (g / (root + 1e-8) + 0.1 * at);
                    x64[i] += share * (z64[i] - x64[i]);
                    expected.push(0.1 * z64[i] + 0.9 * x64[i]);
                }
                // A few roundings of weights and of steps of a hundredth, in each of four steps.
                let allowed = |i: usize| 8.0 * F32_ROUNDOFF * (expected[i].abs() + 0.1);
                let found = y.read(&device);
                assert_close(&what, &found, &expected, allowed);
                assert_close(&what, &z.read(&device), &z64, allowed);
                assert_close(&what, &v.read(&device), &v64, |i| 1e-6 * v64[i].abs() + 1e-12);
                let rounded: Vec<f64> =
                    found.iter().map(|w| f64::from(bf16::from_f32(*w).to_f32())).collect();
                assert_close(&format!("{what}, copy"), &copy.read(&device), &rounded, |_| 0.0);
            }
        }
    }
}

/// `a·x + b·(x xᵀ) x + c·(x xᵀ)² x`, five times, in f64.
fn newton_schulz(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let product = |a: &[f64], b: &[f64], rows: usize, inner: usize, cols: usize| -> Vec<f64> {
        let element =
            |at: usize| (0..inner).map(|k| a[at / cols * inner + k] * b[k * cols + at % cols]).sum();
        (0..rows * cols).map(element).collect()
    };
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x: Vec<f64> = x.iter().map(|x| x / norm).collect();
    for _ in 0..5 {
        let transposed: Vec<f64> = (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect();
        let gram = product(&x, &transposed, rows, cols, rows);
        let square = product(&gram, &gram, rows, rows, rows);
        let both: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| -4.7750 * g + 2.0315 * s).collect();
        let more = product(&both, &x, rows, rows, cols);
        x = x.iter().zip(&more).map(|(x, more)| 3.4445 * x + more).collect();
    }
    x
}

#[test]
fn a_matrix_is_orthogonalised_as_in_f64() {
    for (isa, device) in devices(2) {
        for (rows, cols) in
            [(1, 7), (7, 1), (5, 9), (9, 5), (48, 48), (40, 136), (130, 33), (150, 290), (280, 260)]
        {
            let what = format!("{} {rows}x{cols}", isa.name());
            let mut x = Matrix::new(&device, 5, (rows, cols), DType::F32, 0);
            // Singular values become about one; small ones grow 3.4445⁵ = 485 times, and their errors too.
            let expected = newton_schulz(&x.values, rows, cols);
            ops::orthogonalize(&device, x.view_mut()).unwrap();
            assert_close(&what, &x.read(&device), &expected, |_| 500.0 * 4.0 * F32_ROUNDOFF);
            let norm: f64 = expected.iter().map(|x| x * x).sum();
            assert!((0.4..1.3).contains(&(norm / rows.min(cols) as f64)), "{what}: {norm}");
        }
    }
}

#[test]
fn nothing_is_orthogonalised_to_nothing() {
    for (isa, device) in devices(1) {
        let mut x = vector(&device, &[0.0; 12]);
        ops::orthogonalize(&device, x.view_mut().reshape(3, 4)).unwrap();
        assert_eq!(x.read(&device), [0.0; 12], "{}", isa.name());
    }
}

#[test]
fn muon_follows_its_formula() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            for (momentum, nesterov) in [(0.95, true), (0.95, false), (0.3, true), (0.0, true)] {
                let what = format!("{} {len} {momentum} {nesterov}", isa.name());
                let (mut w, mut m) = (vector(&device, &numbers(1, len)), vector(&device, &vec![0.0; len]));
                let [mut w64, mut m64] = [w.values.clone(), vec![0.0; len]];
                for step in 1..=3 {
                    let grad = vector(&device, &numbers(10 + step, len));
                    // What lies in the room of the direction does not matter.
                    let mut direction = vector(&device, &vec![f32::NAN; len]);
                    let update = ops::Update::new(grad.view(), 0.5, direction.view_mut(), None);
                    let config = ops::MuonMomentum { momentum, nesterov };
                    ops::muon_momentum(&device, &config, update, m.view_mut().into()).unwrap();
                    let mut copy = Matrix::new(&device, 3, (1, len), DType::Bf16, 0);
                    let update = ops::Update::new(direction.view(), 1.0, w.view_mut(), Some(copy.view_mut()));
                    let config = ops::DecayedUpdate { learning_rate: 1e-2, decay: 1e-3 };
                    ops::decayed_update(&device, &config, update).unwrap();
                    for i in 0..len {
                        let g = 0.5 * grad.values[i];
                        m64[i] = momentum * m64[i] + (1.0 - momentum) * g;
                        let direction =
                            if nesterov { (1.0 - momentum) * g + momentum * m64[i] } else { m64[i] };
                        w64[i] = 0.999 * w64[i] - 1e-2 * direction;
                    }
                    let found = w.read(&device);
                    assert_close(&what, &found, &w64, |i| 8.0 * F32_ROUNDOFF * (w64[i].abs() + 0.1));
                    assert_close(&what, &m.read(&device), &m64, |_| 8.0 * F32_ROUNDOFF);
                    let rounded: Vec<f64> =
                        found.iter().map(|w| f64::from(bf16::from_f32(*w).to_f32())).collect();
                    assert_close(&format!("{what}, copy"), &copy.read(&device), &rounded, |_| 0.0);
                }
            }
        }
    }
}

#[test]
fn a_gradient_is_scaled_whatever_lay_there() {
    for (isa, device) in devices(2) {
        for len in LENGTHS {
            let (grad, mut room) = (vector(&device, &numbers(1, len)), vector(&device, &vec![f32::NAN; len]));
            ops::scaled_gradient(&device, ops::Update::new(grad.view(), 0.5, room.view_mut(), None)).unwrap();
            let expected: Vec<f64> = grad.values.iter().map(|g| 0.5 * g).collect();
            assert_close(isa.name(), &room.read(&device), &expected, |_| 0.0);
        }
    }
}

#[test]
fn adafactor_follows_its_formula() {
    for threads in [1, 3] {
        for (isa, device) in processors(threads) {
            for (rows, cols) in [(1, 7), (7, 1), (130, 257), (1000, 40)] {
                let what = format!("{} {rows}x{cols}", isa.name());
                let (mut row, mut col) =
                    (vector(&device, &vec![0.0; rows]), vector(&device, &vec![0.0; cols]));
                let mut v = vector(&device, &vec![0.0; rows * cols]);
                let [mut row64, mut col64, mut v64] =
                    [vec![0.0; rows], vec![0.0; cols], vec![0.0; rows * cols]];
                for (step, beta) in [(1, 0.0), (2, 0.4)] {
                    let mut g = Matrix::new(&device, 20 + step, (rows, cols), DType::F32, 0);
                    let squares: Vec<f64> = g.values.iter().map(|g| g * g).collect();
                    for (i, mean) in row64.iter_mut().enumerate() {
                        let sum: f64 = squares[i * cols..(i + 1) * cols].iter().sum();
                        *mean = beta * *mean + (1.0 - beta) * sum / cols as f64;
                    }
                    for (j, mean) in col64.iter_mut().enumerate() {
                        let sum: f64 = squares.iter().skip(j).step_by(cols).sum();
                        *mean = beta * *mean + (1.0 - beta) * sum / rows as f64;
                    }
                    for (v, square) in v64.iter_mut().zip(&squares) {
                        *v = beta * *v + (1.0 - beta) * square;
                    }
                    let mut unfactored = Matrix::new(&device, 20 + step, (rows, cols), DType::F32, 0);
                    let flat = unfactored.view_mut().reshape(1, rows * cols);
                    ops::whole_moments(&device, flat, beta, v.view_mut()).unwrap();
                    ops::factored_moments(&device, g.view(), beta, row.view_mut(), col.view_mut()).unwrap();
                    assert_close(&what, &row.read(&device), &row64, |i| 1e-6 * row64[i]);
                    assert_close(&what, &col.read(&device), &col64, |j| 1e-6 * col64[j]);
                    ops::factored_direction(&device, g.view_mut(), row.view(), col.view()).unwrap();
                    let mean = row64.iter().sum::<f64>() / rows as f64;
                    let of = |at: usize| (row64[at / cols] * col64[at % cols] / mean).sqrt();
                    let expected: Vec<f64> =
                        unfactored.values.iter().enumerate().map(|(at, g)| g / of(at)).collect();
                    assert_close(&what, &g.read(&device), &expected, |at| 1e-6 * expected[at].abs() + 1e-12);
                    let expected: Vec<f64> =
                        unfactored.values.iter().zip(&v64).map(|(g, v)| g / v.sqrt()).collect();
                    assert_close(&what, &unfactored.read(&device), &expected, |_| 3e-6);
                }
            }
        }
    }
}
