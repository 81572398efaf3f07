//! Optimiser steps and the gradient's norm over a flat buffer.

use tandem_kernels::{DType, ops};

use crate::harness::{Bench, Work};

/// Parameters: large enough to come from memory.
const LEN: usize = 24 << 20;

/// Prints a line per operation.
pub fn run(bench: &Bench) {
    let config =
        ops::AdamW { learning_rate: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 10 };
    for (name, copied) in [("adamw", None), ("adamw with a bf16 copy", Some(DType::Bf16))] {
        if !bench.wants(name) {
            continue;
        }
        let [grad, mut master, mut m, mut v] = [(); 4].map(|()| bench.matrix(1, LEN, DType::F32));
        let mut copy = copied.map(|dtype| bench.matrix(1, LEN, dtype));
        let bytes = LEN * (7 * 4 + copied.map_or(0, DType::size));
        bench.line(name, Work::Bytes(bytes as f64), || {
            let copy = copy.as_mut().map(tandem_kernels::Tensor::view_mut);
            let (master, m, v) = (master.view_mut(), m.view_mut(), v.view_mut());
            ops::adamw(&bench.device, &config, 1.0, grad.view(), master, m, v, copy).expect("shapes fit");
        });
    }
    let config = ops::RmsProp { learning_rate: 1e-4, alpha: 0.99, eps: 1e-8, weight_decay: 0.0 };
    if bench.wants("rmsprop") {
        let [grad, mut master, mut v] = [(); 3].map(|()| bench.matrix(1, LEN, DType::F32));
        bench.line("rmsprop", Work::Bytes((LEN * 5 * 4) as f64), || {
            let (master, v) = (master.view_mut(), v.view_mut());
            ops::rmsprop(&bench.device, &config, 1.0, grad.view(), master, v, None).expect("shapes fit");
        });
    }
    if bench.wants("sum_of_squares") {
        let grad = bench.matrix(1, LEN, DType::F32);
        bench.line("sum_of_squares", Work::Bytes((LEN * 4) as f64), || {
            ops::sum_of_squares(&bench.device, grad.view()).expect("types fit");
        });
    }
}
