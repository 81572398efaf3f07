//! Optimiser steps, with each form of their states, and the gradient's norm over a flat buffer.

use tandem_kernels::{AdamMoment, DType, MemoryKind, StateForm, States, StochasticRounding, Tensor, ops};

use crate::harness::{Bench, Work};

/// Parameters: large enough to come from memory.
const LEN: usize = 24 << 20;

/// Prints a line per operation.
pub fn run(bench: &Bench) {
    for (name, copied) in [("adamw", None), ("adamw with a bf16 copy", Some(DType::Bf16))] {
        forms(bench, name, 2, |grad, master, [m, v]| {
            let mut copy = copied.map(|dtype| bench.matrix(1, LEN, dtype));
            move |step| {
                let config = ops::AdamW {
                    learning_rate: 1e-4,
                    beta1: 0.9,
                    beta2: 0.999,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step,
                };
                let [m, v] =
                    [&mut *m, v].map(|states| states.range_mut(0..LEN, StochasticRounding::new(&[step], 0)));
                let copy = copy.as_mut().map(Tensor::view_mut);
                let update = ops::Update::new(grad.view(), 1.0, master.view_mut(), copy);
                ops::adamw(&bench.device, &config, update, m, v).expect("shapes fit");
            }
        });
    }
    forms(bench, "rmsprop", 1, |grad, master, [_, v]| {
        let config = ops::RmsProp { learning_rate: 1e-4, alpha: 0.99, eps: 1e-8, weight_decay: 0.0 };
        move |step| {
            let v = v.range_mut(0..LEN, StochasticRounding::new(&[step], 0));
            let update = ops::Update::new(grad.view(), 1.0, master.view_mut(), None);
            ops::rmsprop(&bench.device, &config, update, v).expect("shapes fit");
        }
    });
    if bench.wants("sum_of_squares") {
        let grad = bench.matrix(1, LEN, DType::F32);
        bench.line("sum_of_squares", Work::Bytes((LEN * 4) as f64), || {
            ops::sum_of_squares(&bench.device, grad.view()).expect("types fit");
        });
    }
}

/// A line for each form of the states, all timed in turns: elements per second, beside those with
/// f32. Bytes are those of gradient, masters and states alone.
fn forms<'a, F: FnMut(u64)>(
    bench: &'a Bench,
    name: &str,
    num_states: usize,
    update: impl Fn(&'a Tensor, &'a mut Tensor, [&'a mut States; 2]) -> F,
) {
    if !bench.wants(name) {
        return;
    }
    // Leaked until the program ends: each closure borrows its own.
    let alternatives = StateForm::NAMES.map(|(_, form)| {
        let [grad, master] = [(); 2].map(|()| Box::leak(Box::new(bench.matrix(1, LEN, DType::F32))));
        let states = [AdamMoment::First, AdamMoment::Second].map(|moment| {
            let states = States::zeros(&bench.device, MemoryKind::Scratch, moment, form, LEN);
            Box::leak(Box::new(states.expect("memory")))
        });
        let (mut update, mut step) = (update(grad, master, states), 0);
        move || {
            step += 1;
            update(step);
        }
    });
    let seconds = bench.median_seconds(alternatives);
    for ((form_name, form), time) in StateForm::NAMES.into_iter().zip(seconds) {
        let width = match form {
            StateForm::F32 => 4.0,
            StateForm::Bf16 => 2.0,
            StateForm::EightBit => 1.0 + 1.0 / 64.0,
        };
        let bytes = LEN as f64 * (4.0 + 2.0 * (4.0 + num_states as f64 * width));
        let note = format!(", {:.2} G elements/s, {:.2} × f32", LEN as f64 / time / 1e9, seconds[0] / time);
        bench.print(&format!("{name}, states in {form_name}"), Work::Bytes(bytes), time, &note);
    }
}
