//! Muon: steps of whole matrices.
//!
//! Each rank takes its part of a parameter's gradient into the average and writes its part of the
//! direction. The parts are gathered. Every rank that holds an element of a matrix orthogonalises the
//! whole direction, with the same bits, and moves its own elements.

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::{self, DecayedUpdate, MuonMomentum};
use tandem_kernels::{AdamMoment, Device, States, Tensor};

use super::rule::StepNumbers;
use super::whole::{Operands, WholeParameter, overlap};
use crate::Result;
use crate::config::Optimizer;

/// Takes a step on the matrices of a layer, of which `averages` has the averages of gradients. Collective
/// where parts are on other ranks of `group`.
pub(super) fn step(
    rule: &Optimizer,
    home: &Device,
    numbers: StepNumbers,
    matrices: &[WholeParameter],
    averages: &mut States,
    mut operands: Operands<'_>,
    room: &mut Tensor,
    group: &mut ProcessGroup,
) -> Result<()> {
    let &Optimizer::Muon { momentum, nesterov, adjust_lr, .. } = rule else { return Ok(()) };
    let momentum = MuonMomentum { momentum, nesterov };
    for parameter in matrices {
        if let Some(run) = &parameter.run {
            let start = operands.owned.start;
            let own = run.range.start - start..run.range.end - start;
            let average = averages.range_mut(own, run.dither(numbers.update, AdamMoment::First));
            let update = operands.gradient(parameter, run, room);
            ops::muon_momentum(home, &momentum, update, average)?;
        }
        parameter.gather(home, room, group)?;
        let Some(run) = &parameter.run else { continue };
        for piece in &parameter.pieces {
            let Some(own) = overlap(&piece.range, &run.range) else { continue };
            let matrix = room.view_mut().col_range(parameter.place(&piece.range));
            ops::orthogonalize(home, matrix.reshape(piece.rows, piece.cols))?;
            let rate = numbers.learning_rate * parameter.settings.learning_rate_factor;
            // PyTorch sees the shape of the files.
            let &[rows, columns] = &piece.shape[..] else { unreachable!("a matrix has two dimensions") };
            let learning_rate = rate * adjust_lr.ratio(rows, columns);
            let update = DecayedUpdate { learning_rate, decay: rate * parameter.settings.weight_decay };
            operands.move_by(home, &update, parameter, &own, room)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use tandem_kernels::{MemoryKind, StateForm};
    use tandem_model::{LayerId, ParamKind};

    use super::*;
    use crate::config::AdjustLr;
    use crate::optimizer::Run;
    use crate::optimizer::golden::{self, STEPS, floats, many_numbers};
    use crate::optimizer::groups::ParameterSettings;
    use crate::optimizer::whole::Piece;

    /// Fifty steps of a matrix: in f32 against the formula of PyTorch, and against `torch.optim.Muon`, whose
    /// products are in bf16.
    #[test]
    fn matrices_follow_pytorch() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/muon.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let device = Device::cpu(1, 1 << 24).unwrap();
        for run in golden["runs"].as_array().unwrap() {
            let [rows, cols] = [0, 1].map(|axis| run["shape"][axis].as_u64().unwrap() as usize);
            let (len, options) = (rows * cols, &run["options"]);
            let adjust =
                AdjustLr::NAMES.into_iter().find(|(name, _)| options["adjust_lr_fn"] == *name).unwrap().1;
            let number = |key: &str| options[key].as_f64().unwrap();
            let rule = Optimizer::Muon {
                momentum: number("momentum"),
                nesterov: options["nesterov"] == true,
                adjust_lr: adjust,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
            };
            let settings = ParameterSettings {
                learning_rate_factor: 1.0,
                weight_decay: number("weight_decay"),
                frozen: false,
            };
            let run_of = Run {
                range: 0..len,
                layer: LayerId::Block(0),
                part: ParamKind::OutWeight,
                first: 0,
                columns: None,
                settings,
            };
            let piece = Piece { range: 0..len, rows, cols, shape: vec![rows, cols] };
            let matrices = [WholeParameter::alone(run_of, vec![piece])];
            let vector = |values: &[f32]| golden::vector(&device, values);
            let first = many_numbers(len, 0, 0.5);
            let mut master = vector(&first);
            let mut average =
                States::zeros(&device, MemoryKind::Optimizer, AdamMoment::First, StateForm::F32, len)
                    .unwrap();
            let mut room = vector(&vec![0.0; len]);
            let mut compared = 0;
            for update in 1..=STEPS {
                let grad = vector(&many_numbers(len, update, 0.5));
                let learning_rate = 0.01 * (1.0 - update as f64 / 100.0);
                let operands = Operands {
                    grad: grad.view().into(),
                    grad_scale: 1.0,
                    owned: 0..len,
                    master: &mut master,
                    master_start: 0,
                    copy: None,
                };
                let numbers = StepNumbers { learning_rate, weight_decay: 0.0, update, share: 0.0 };
                let group = &mut ProcessGroup::alone();
                step(&rule, &device, numbers, &matrices, &mut average, operands, &mut room, group).unwrap();
                let Some(expected) = run["f32"].get(update.to_string()) else { continue };
                compared += 1;
                let found = master.view().as_slice::<f32>();
                for (found, expected) in found.iter().zip(floats(expected)) {
                    // Five steps enlarge the rounding of small singular values 485 times; a step moves by a
                    // hundredth.
                    let allowed = 1e-6 * update as f32;
                    assert!(
                        (found - expected).abs() <= allowed,
                        "{run} step {update}: {found}, expected {expected}"
                    );
                }
                let expected: Vec<f32> = floats(&run["bf16"][update.to_string()]).collect();
                let norm = |a: &[f32], b: &[f32]| -> f64 {
                    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
                };
                let (off, way) = (norm(found, &expected), norm(&expected, &first));
                // bf16 has 8 bits, and the first steps have no others to even them out.
                assert!(off < 0.05 * way, "{run} step {update}: {off} of {way}");
            }
            assert_eq!(compared, 4);
        }
    }
}
