//! Norms, activations, rotary embedding and table look-up: bound by memory.

use tandem_kernels::ops::{self, Activation, RopeTable};
use tandem_kernels::{DType, Tensor};

use crate::harness::{Bench, Work};

/// Tokens of a micro-batch, hidden size, feed-forward size: together far larger than the
/// second-level cache.
const TOKENS: usize = 4096;
const WIDTH: usize = 1024;
const WIDE: usize = 2816;

/// Bytes that an operation which reads and writes each of these once moves.
fn moved(tensors: &[&Tensor]) -> Work {
    Work::Bytes(tensors.iter().map(|t| (t.view().len() * t.dtype().size()) as f64).sum())
}

/// Prints a line per operation and type.
pub fn run(bench: &Bench) {
    for dtype in [DType::F32, DType::Bf16] {
        norms(bench, dtype);
        for function in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            activations(bench, function, dtype);
        }
        rope(bench, dtype);
    }
    embedding(bench);
}

fn norms(bench: &Bench, dtype: DType) {
    let device = &bench.device;
    let x = bench.matrix(TOKENS, WIDTH, DType::F32);
    let [w, b] = [(); 2].map(|()| bench.matrix(1, WIDTH, DType::F32));
    let [mut dw, mut db] = [(); 2].map(|()| bench.matrix(1, WIDTH, DType::F32));
    let [mut y, dy] = [(); 2].map(|()| bench.matrix(TOKENS, WIDTH, dtype));
    let mut dx = bench.matrix(TOKENS, WIDTH, DType::F32);
    let mut inverse = bench.matrix(1, TOKENS, DType::F32);
    let mut kept = bench.matrix(TOKENS, 2, DType::F32);
    let name = format!("rms_norm f32 -> {dtype}");
    if bench.wants(&name) {
        let work = moved(&[&x, &y]);
        bench.line(&name, work, || {
            let (y, inverse_rms) = (y.view_mut(), inverse.view_mut());
            let call = ops::RmsNorm { x: x.view(), w: w.view(), offset: 0.0, eps: 1e-5, y, inverse_rms };
            ops::rms_norm(device, call).expect("fits");
        });
        let work = moved(&[&x, &dy, &dx, &dx]);
        bench.line(&format!("{name} backward"), work, || {
            let (dx, dw) = (dx.view_mut(), Some(dw.view_mut()));
            let call = ops::RmsNormBackward {
                x: x.view(),
                w: w.view(),
                offset: 0.0,
                inverse_rms: inverse.view(),
                dy: dy.view(),
                dx,
                dw,
            };
            ops::rms_norm_backward(device, call).expect("fits");
        });
    }
    let name = format!("layer_norm f32 -> {dtype}");
    if bench.wants(&name) {
        let work = moved(&[&x, &y]);
        bench.line(&name, work, || {
            let (y, kept) = (y.view_mut(), kept.view_mut());
            let call = ops::LayerNorm {
                x: x.view(),
                w: w.view(),
                b: Some(b.view()),
                eps: 1e-5,
                y,
                mean_inverse: kept,
            };
            ops::layer_norm(device, call).expect("fits");
        });
        let work = moved(&[&x, &dy, &dx, &dx]);
        bench.line(&format!("{name} backward"), work, || {
            let (dx, sums) = (dx.view_mut(), Some((dw.view_mut(), Some(db.view_mut()))));
            let call = ops::LayerNormBackward {
                x: x.view(),
                w: w.view(),
                mean_inverse: kept.view(),
                dy: dy.view(),
                dx,
                dw_db: sums,
            };
            ops::layer_norm_backward(device, call).expect("fits");
        });
    }
}

fn activations(bench: &Bench, function: Activation, dtype: DType) {
    let device = &bench.device;
    let name = format!("gated {function:?} {dtype}");
    if !bench.wants(&name) {
        return;
    }
    let gu = bench.matrix(TOKENS, 2 * WIDE, dtype);
    let mut dgu = bench.matrix(TOKENS, 2 * WIDE, dtype);
    let [mut h, dh] = [(); 2].map(|()| bench.matrix(TOKENS, WIDE, dtype));
    let work = moved(&[&gu, &h]);
    bench.line(&name, work, || ops::gated(device, function, gu.view(), h.view_mut()).expect("fits"));
    let work = moved(&[&gu, &dh, &dgu]);
    bench.line(&format!("{name} backward"), work, || {
        ops::gated_backward(device, function, gu.view(), dh.view(), dgu.view_mut()).expect("fits");
    });
}

fn rope(bench: &Bench, dtype: DType) {
    let name = format!("rope {dtype}");
    if !bench.wants(&name) {
        return;
    }
    let frequencies: Vec<f32> = (0..32).map(|i| 10000f32.powf(-(i as f32) / 32.0)).collect();
    let table = RopeTable::new(&frequencies, 512);
    let positions: Vec<u32> = (0..TOKENS as u32).map(|t| t % 512).collect();
    let mut x = bench.matrix(TOKENS, WIDTH, dtype);
    let work = moved(&[&x, &x]);
    bench.line(&name, work, || {
        ops::rope(&bench.device, x.view_mut(), 64, &positions, &table, false).expect("fits");
    });
}

fn embedding(bench: &Bench) {
    if !bench.wants("embedding") {
        return;
    }
    let mut table = bench.matrix(32_000, WIDTH, DType::F32);
    let mut x = bench.matrix(TOKENS, WIDTH, DType::F32);
    let ids: Vec<u32> = (0..TOKENS as u32).map(|t| t * 7919 % 32_000).collect();
    let work = moved(&[&x, &x]);
    bench.line("embedding", work, || {
        ops::embedding(&bench.device, table.view(), &ids, 1.0, x.view_mut(), false).expect("fits");
    });
    let work = moved(&[&x, &x, &x]);
    bench.line("embedding_backward", work, || {
        ops::embedding_backward(&bench.device, &ids, 1.0, x.view(), table.view_mut()).expect("fits");
    });
}
