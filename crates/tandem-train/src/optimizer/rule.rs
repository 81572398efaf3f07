//! Optimisers that move each element by itself: their states, and the kernel of a step.

use tandem_kernels::ops::{self, AdamW, Lion, Momentum, RmsProp, ScheduleFreeAdamW, Sgd};
use tandem_kernels::{AdamMoment, Device, Result, StatesMut};
use tandem_model::{LayerId, LayerLayout, ParamKind};

use crate::config::Optimizer;

/// A state of every element.
pub(super) struct StateSpec {
    /// Name in checkpoints.
    pub name: &'static str,
    /// Map of its 8-bit form.
    pub moment: AdamMoment,
    /// Whether it holds weights: f32 in every form of the states, and the first weights at the start.
    pub holds_weights: bool,
    /// Parameters that have it.
    pub has: Has,
}

/// Whether a parameter of a layer has a state.
pub(crate) type Has = fn(LayerId, ParamKind) -> bool;

/// Every parameter has it.
pub(crate) fn every(_: LayerId, _: ParamKind) -> bool {
    true
}

/// Whether Muon orthogonalises the steps of a parameter: a matrix of a block, or of an adapter there.
/// AdamW moves tables of tokens, heads, convolutions, norms and biases.
pub(super) fn is_orthogonalized(layer: LayerId, part: ParamKind) -> bool {
    matches!(layer, LayerId::Block(_)) && part.is_matrix()
}

/// Whether an optimiser updates a parameter whole.
pub(super) fn is_whole(rule: &Optimizer, layer: LayerId, part: ParamKind) -> bool {
    match rule {
        Optimizer::Muon { .. } => is_orthogonalized(layer, part),
        Optimizer::Adafactor => true,
        _ => false,
    }
}

fn is_of_adamw(layer: LayerId, part: ParamKind) -> bool {
    !is_orthogonalized(layer, part)
}

/// First element of a layer from which a state is kept: that of the first parameter that has it. Matrices
/// come first in a layer.
pub(crate) fn first_element(layout: &LayerLayout, layer: LayerId, has: Has) -> usize {
    let mut having = layout.params.iter().filter(|param| has(layer, param.part));
    having.next().map_or(layout.len, |param| param.offset)
}

/// Numbers of one step of some elements.
#[derive(Clone, Copy)]
pub(super) struct StepNumbers {
    pub learning_rate: f64,
    pub weight_decay: f64,
    /// 1-based count of updates.
    pub update: u64,
    /// Share of the new point in the average of schedule-free AdamW.
    pub share: f64,
}

const fn first(name: &'static str) -> StateSpec {
    StateSpec { name, moment: AdamMoment::First, holds_weights: false, has: every }
}

const fn second(name: &'static str) -> StateSpec {
    StateSpec { name, moment: AdamMoment::Second, holds_weights: false, has: every }
}

/// Name of the base sequence of schedule-free AdamW in checkpoints.
pub(crate) const BASE_SEQUENCE: &str = "base_sequence";

/// States of an optimiser, in the order of [`step`].
pub(super) fn states(rule: &Optimizer) -> Vec<StateSpec> {
    match rule {
        Optimizer::AdamW { .. } => vec![first("first_moment"), second("second_moment")],
        Optimizer::RmsProp { .. } => vec![second("second_moment")],
        Optimizer::Lion { .. } => vec![first("first_moment")],
        Optimizer::ScheduleFreeAdamW { .. } => {
            vec![StateSpec { holds_weights: true, ..first(BASE_SEQUENCE) }, second("second_moment")]
        }
        // The average of gradients is Muon's momentum and AdamW's first moment.
        Optimizer::Muon { .. } => {
            vec![first("first_moment"), StateSpec { has: is_of_adamw, ..second("second_moment") }]
        }
        // Its moments are of rows and columns.
        Optimizer::Adafactor => Vec::new(),
        Optimizer::Sgd { momentum, .. } if *momentum == 0.0 => Vec::new(),
        Optimizer::Sgd { .. } => vec![first("momentum_buffer")],
    }
}

/// Takes a step on elements of one parameter.
pub(super) fn step(
    rule: &Optimizer,
    device: &Device,
    numbers: StepNumbers,
    update: ops::Update,
    states: Vec<StatesMut<'_>>,
) -> Result<()> {
    let StepNumbers { learning_rate, weight_decay, update: step, share } = numbers;
    let mut states = states.into_iter();
    let mut state = || states.next().expect("a state for each of `states`");
    match *rule {
        // Muon's matrices are not moved element by element.
        Optimizer::AdamW { beta1, beta2, eps } | Optimizer::Muon { beta1, beta2, eps, .. } => {
            let rule = AdamW { learning_rate, beta1, beta2, eps, weight_decay, step };
            ops::adamw(device, &rule, update, state(), state())
        }
        Optimizer::RmsProp { alpha, eps } => {
            ops::rmsprop(device, &RmsProp { learning_rate, alpha, eps, weight_decay }, update, state())
        }
        Optimizer::Lion { beta1, beta2 } => {
            ops::lion(device, &Lion { learning_rate, beta1, beta2, weight_decay }, update, state())
        }
        Optimizer::ScheduleFreeAdamW { beta1, beta2, eps } => {
            let rule = ScheduleFreeAdamW { learning_rate, beta1, beta2, eps, weight_decay, step, share };
            ops::schedule_free_adamw(device, &rule, update, state(), state())
        }
        Optimizer::Adafactor => unreachable!("it updates parameters whole"),
        Optimizer::Sgd { momentum, dampening, nesterov } => {
            let momentum = (momentum != 0.0).then_some(Momentum { momentum, dampening, nesterov, step });
            ops::sgd(
                device,
                &Sgd { learning_rate, weight_decay, momentum },
                update,
                momentum.map(|_| state()),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;
    use tandem_kernels::{DType, MemoryKind, StateForm, States, StochasticRounding};

    use super::*;
    use crate::optimizer::average::Weighting;
    use crate::optimizer::golden::{ELEMENTS, STEPS, floats, numbers};

    const RATE: f64 = 0.01;

    fn optimizer(run: &Value) -> Optimizer {
        let options = &run["options"];
        let number =
            |key: &str, default: f64| options.get(key).map_or(default, |value| value.as_f64().unwrap());
        let beta =
            |index: usize, default: f64| options.get("betas").map_or(default, |b| b[index].as_f64().unwrap());
        match run["name"].as_str().unwrap() {
            "adamw" => {
                Optimizer::AdamW { beta1: beta(0, 0.9), beta2: beta(1, 0.999), eps: number("eps", 1e-8) }
            }
            "rmsprop" => Optimizer::RmsProp { alpha: number("alpha", 0.99), eps: number("eps", 1e-8) },
            "lion" => Optimizer::Lion { beta1: beta(0, 0.9), beta2: beta(1, 0.99) },
            "schedule_free_adamw" => Optimizer::ScheduleFreeAdamW {
                beta1: beta(0, 0.9),
                beta2: beta(1, 0.999),
                eps: number("eps", 1e-8),
            },
            "sgd" => Optimizer::Sgd {
                momentum: number("momentum", 0.0),
                dampening: number("dampening", 0.0),
                nesterov: options["nesterov"] == true,
            },
            other => panic!("{other} is no optimiser"),
        }
    }

    /// Fifty steps of every optimiser against PyTorch, and Lion against `lion-pytorch`.
    #[test]
    fn optimizers_equal_pytorch() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/updates.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let device = Device::cpu(1, 1 << 24).unwrap();
        let vector = |values: &[f32]| {
            let mut tensor = device.alloc(MemoryKind::Scratch, 1, ELEMENTS, DType::F32).unwrap();
            device.host_update(tensor.view_mut(), |room: &mut [f32]| room.copy_from_slice(values)).unwrap();
            tensor
        };
        let mut seen = Vec::new();
        for run in golden["runs"].as_array().unwrap() {
            let rule = optimizer(run);
            seen.push(rule.name());
            let weight_decay = run["options"]["weight_decay"].as_f64().unwrap();
            let zeros = |spec: StateSpec| {
                States::zeros(&device, MemoryKind::Optimizer, spec.moment, StateForm::F32, ELEMENTS).unwrap()
            };
            let mut kept: Vec<States> = states(&rule).into_iter().map(zeros).collect();
            let mut weights = vector(&numbers(0, 2.0));
            for (kept, spec) in kept.iter_mut().zip(states(&rule)) {
                if spec.holds_weights {
                    device.write_states(&numbers(0, 2.0), kept, 0).unwrap();
                }
            }
            let mut weighting = Weighting::default();
            let warmup = run["options"]["warmup_steps"].as_u64().unwrap_or(0);
            let mut compared = 0;
            for update in 1..=STEPS {
                let learning_rate = match rule {
                    // Its rate is the peak, after a warm-up of its own.
                    Optimizer::ScheduleFreeAdamW { .. } if update <= warmup => {
                        RATE * (update as f64 / warmup as f64)
                    }
                    Optimizer::ScheduleFreeAdamW { .. } => RATE,
                    _ => RATE * (1.0 - update as f64 / 100.0),
                };
                let share = weighting.share(learning_rate);
                let grad = vector(&numbers(update, 0.5));
                let operands = ops::Update::new(grad.view(), 1.0, weights.view_mut(), None);
                let states = kept
                    .iter_mut()
                    .map(|states| states.range_mut(0..ELEMENTS, StochasticRounding::default()));
                let numbers = StepNumbers { learning_rate, weight_decay, update, share };
                step(&rule, &device, numbers, operands, states.collect()).unwrap();
                let Some(expected) = run["weights"].get(update.to_string()) else { continue };
                compared += 1;
                if let (Optimizer::ScheduleFreeAdamW { beta1, .. }, Some(averages)) =
                    (&rule, run.get("averages"))
                {
                    let z = kept[0].view().as_f32().unwrap();
                    let y = weights.view().as_slice::<f32>();
                    let expected = floats(&averages[update.to_string()]);
                    for ((y, z), expected) in y.iter().zip(z).zip(expected) {
                        let found = ops::lerp_of(*y, *z, (1.0 - 1.0 / beta1) as f32);
                        let allowed = 1.2e-7 * (3.0 + 0.1 * update as f32) * expected.abs().max(1.0);
                        assert!(
                            (found - expected).abs() <= allowed,
                            "{run} step {update}: {found}, expected {expected}"
                        );
                    }
                }
                for (found, expected) in weights.view().as_slice::<f32>().iter().zip(floats(expected)) {
                    // Two roundings, and a few more over the steps: torch fuses other products.
                    let allowed = 1.2e-7 * (2.0 + 0.1 * update as f32) * expected.abs().max(1.0);
                    assert!(
                        (found - expected).abs() <= allowed,
                        "{run} step {update}: {found}, expected {expected}"
                    );
                }
            }
            assert_eq!(compared, 4);
        }
        // Those of whole matrices have tests of their own.
        let mut others = Optimizer::NAMES.iter().filter(|name| !["muon", "adafactor"].contains(name));
        assert!(others.all(|name| seen.contains(name)), "{seen:?}");
    }
}
