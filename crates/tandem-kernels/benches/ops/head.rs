//! The head: logits and their statistics, and the gradient.

use tandem_kernels::ops::{self, HeadGradients, HeadScores, HeadShape, HeadWeights, Targets};
use tandem_kernels::{DType, Device};

use crate::harness::{Bench, Place, Work};

/// Prints a line per shape, pass and type.
pub fn run(bench: &Bench) {
    let shapes: &[_] = match bench.place {
        Place::Cuda => &[(4096, 128_256, 2048), (4096, 128_256, 4096)],
        _ => &[(800, 8192, 256), (800, 32_000, 512)],
    };
    for &(rows, vocabulary, width) in shapes {
        for dtype in [DType::F32, DType::Bf16] {
            let name = format!("head {rows} x {vocabulary} x {width} {dtype}");
            if bench.wants(&name) {
                one(&bench.device, bench, &name, rows, vocabulary, width, dtype);
            }
        }
    }
}

fn one(
    device: &Device,
    bench: &Bench,
    name: &str,
    rows: usize,
    vocabulary: usize,
    width: usize,
    dtype: DType,
) {
    let [hidden, mut dhidden] = [dtype, DType::F32].map(|dtype| bench.matrix(rows, width, dtype));
    let w = bench.matrix(vocabulary, width, dtype);
    let mut dw = bench.matrix(vocabulary, width, DType::F32);
    let positions: Vec<u32> = (0..rows as u32).collect();
    let ids: Vec<u32> = (0..rows).map(|r| (r * 7919 % vocabulary) as u32).collect();
    let targets = Targets { rows: &positions, targets: &ids };
    let (shape, mut scores) = (HeadShape::default(), HeadScores::default());
    let product = 2.0 * (rows * vocabulary * width) as f64;
    bench.line(&format!("{name} forward"), Work::Flops(product, dtype), || {
        let call = ops::Head::new(hidden.view(), HeadWeights::new(w.view(), None), targets, &shape);
        ops::head(device, call, &mut scores).expect("fits");
    });
    let d_log_prob = vec![1e-2; rows];
    // Three products: the logits again, and the two gradients.
    bench.line(&format!("{name} backward"), Work::Flops(3.0 * product, dtype), || {
        let gradients = HeadGradients {
            hidden: dhidden.view_mut(),
            weight: Some(dw.view_mut()),
            adds_to_weight: true,
            bias: None,
            h: None,
            b: None,
        };
        let weights = HeadWeights::new(w.view(), None);
        let call = ops::Head::new(hidden.view(), weights, targets, &shape);
        ops::head_backward(device, call, &scores, &d_log_prob, None, gradients).expect("fits");
    });
}
