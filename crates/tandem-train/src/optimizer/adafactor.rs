//! Adafactor: second moments of the rows and columns of whole matrices.
//!
//! Gradients of parameters are gathered where ranks hold parts. Every rank takes the squares of all into
//! its moments, which are few and the same on each, and moves its own elements.

use std::ops::Range;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::{self, DecayedUpdate};
use tandem_kernels::{
    AdamMoment, Device, MemoryKind, StateForm, States, StatesMut, StochasticRounding, Tensor, ViewMut,
};
use tandem_model::{Decoder, LayerId, ParamKind, trained_tensors};

use super::rule::StepNumbers;
use super::whole::{Operands, Piece, WholeParameter, overlap};
use crate::Result;

/// Power of the step in the decay of moments, and largest root mean square of a step before the rate.
const DECAY_RATE: f64 = -0.8;
const CLIP_THRESHOLD: f64 = 1.0;

/// Moments of all layers of a rank.
pub struct FactoredMoments {
    /// Per layer.
    pub layers: Vec<LayerMoments>,
}

/// Moments of a layer, f32.
pub struct LayerMoments {
    pub layer: LayerId,
    /// All of them, one after another.
    pub values: States,
    pub tensors: Vec<MomentTensor>,
}

/// Moments of a parameter as one tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MomentTensor {
    /// Name of the group in checkpoints.
    pub group: &'static str,
    pub part: ParamKind,
    pub shape: Vec<usize>,
    /// Elements of the layer's moments.
    pub range: Range<usize>,
}

const ROWS: &str = "row_second_moment";
const COLUMNS: &str = "column_second_moment";
const WHOLE: &str = "second_moment";

/// Whether a tensor has moments of rows and columns. A convolution `[channels, 1, width]` has one row a
/// channel in PyTorch, so its moments are whole.
fn is_factored(shape: &[usize]) -> bool {
    shape.len() == 2
}

/// Lists the moments of a layer.
pub(crate) fn moment_tensors(decoder: &Decoder, layer: LayerId) -> Vec<MomentTensor> {
    let (tensors, mut all, mut start) = (trained_tensors(decoder, layer), Vec::new(), 0);
    for param in &decoder.trained(layer).params {
        let pieces: Vec<_> = tensors.iter().filter(|tensor| tensor.part == param.part).collect();
        let mut add = |group, shape: Vec<usize>| {
            let len = shape.iter().product::<usize>();
            all.push(MomentTensor { group, part: param.part, shape, range: start..start + len });
            start += len;
        };
        if pieces.iter().all(|piece| is_factored(&piece.shape)) {
            add(ROWS, vec![param.rows]);
            add(COLUMNS, vec![pieces.len(), param.cols]);
        } else {
            add(WHOLE, vec![param.rows, param.cols]);
        }
    }
    all
}

impl FactoredMoments {
    /// Zero moments in the memory of `home`.
    pub(super) fn new(home: &Device, decoder: &Decoder) -> Result<Self> {
        let layer = |layer| -> Result<LayerMoments> {
            let tensors = moment_tensors(decoder, layer);
            let len = tensors.last().map_or(0, |tensor| tensor.range.end);
            let (moment, form) = (AdamMoment::Second, StateForm::F32);
            let values = States::zeros(home, MemoryKind::Optimizer, moment, form, len)?;
            Ok(LayerMoments { layer, values, tensors })
        };
        Ok(Self { layers: decoder.layers().into_iter().map(layer).collect::<Result<_>>()? })
    }
}

impl LayerMoments {
    fn range(&self, group: &str, part: ParamKind) -> Option<Range<usize>> {
        let tensor = self.tensors.iter().find(|tensor| tensor.group == group && tensor.part == part)?;
        Some(tensor.range.clone())
    }

    /// Elements of the moments, mutable.
    pub fn values_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        match self.values.range_mut(range, StochasticRounding::default()) {
            StatesMut::F32(view) => view,
            StatesMut::Bf16(..) | StatesMut::EightBit(_) => unreachable!("moments of Adafactor are f32"),
        }
    }

    /// Takes the gradient of a tensor into its moments, and returns places of its row and column moments, or
    /// replaces it by the direction where moments are whole.
    fn take(
        &mut self,
        home: &Device,
        (parameter, part): (&WholeParameter, ParamKind),
        (index, piece): (usize, &Piece),
        beta: f64,
        gradient: ViewMut,
    ) -> Result<Option<[Range<usize>; 2]>> {
        let place = parameter.place(&piece.range);
        let Some(rows) = self.range(ROWS, part) else {
            let whole = self.range(WHOLE, part).expect("a parameter has moments").start;
            let v = self.values_mut(whole + place.start..whole + place.end);
            ops::whole_moments(home, gradient, beta, v)?;
            return Ok(None);
        };
        let columns = self.range(COLUMNS, part).expect("it has both").start + index * piece.cols;
        let first = rows.start + place.start / piece.cols;
        let [row, col] = [first..first + piece.rows, columns..columns + piece.cols];
        // Rows come before columns.
        let mut both = self.values_mut(row.start..col.end);
        let [of_rows, _, of_columns] =
            both.reborrow().split_cols([row.len(), col.start - row.end, col.len()]);
        let gradient = gradient.reshape(piece.rows, piece.cols);
        ops::factored_moments(home, gradient.view(), beta, of_rows, of_columns)?;
        Ok(Some([row, col]))
    }
}

/// Takes a step on a layer. Collective where parts are on other ranks of `group`.
pub(super) fn step(
    home: &Device,
    numbers: StepNumbers,
    parameters: &[WholeParameter],
    moments: &mut LayerMoments,
    mut operands: Operands<'_>,
    room: &mut Tensor,
    group: &mut ProcessGroup,
) -> Result<()> {
    let beta = 1.0 - (numbers.update as f64).powf(DECAY_RATE);
    for parameter in parameters {
        if let Some(run) = &parameter.run {
            ops::scaled_gradient(home, operands.gradient(parameter, run, room))?;
        }
        parameter.gather(home, room, group)?;
        let rate = numbers.learning_rate * parameter.settings.learning_rate_factor;
        for (index, piece) in parameter.pieces.iter().enumerate() {
            let gradient = || parameter.place(&piece.range);
            let taken = moments.take(
                home,
                (parameter, parameter.part),
                (index, piece),
                beta,
                room.view_mut().col_range(gradient()),
            )?;
            let own = parameter.run.as_ref().and_then(|run| overlap(&piece.range, &run.range));
            let Some(own) = own else { continue };
            if let Some([row, col]) = taken {
                let values = moments.values_mut(0..moments.values.len());
                let direction = room.view_mut().col_range(gradient()).reshape(piece.rows, piece.cols);
                let [row, col] = [row, col].map(|range| values.view().col_range(range));
                ops::factored_direction(home, direction, row, col)?;
            }
            let squares = ops::sum_of_squares(home, room.view().col_range(gradient()))?;
            let root_mean_square = (squares / piece.range.len() as f64).sqrt();
            let learning_rate = rate / (root_mean_square / CLIP_THRESHOLD).max(1.0);
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

    use super::*;
    use crate::optimizer::Run;
    use crate::optimizer::golden::{self, STEPS, floats, many_numbers};
    use crate::optimizer::groups::ParameterSettings;

    /// Fifty steps of matrices and vectors against transformers' `Adafactor`.
    #[test]
    fn tensors_follow_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/adafactor.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let device = Device::cpu(1, 1 << 24).unwrap();
        for run in golden["runs"].as_array().unwrap() {
            let shape: Vec<usize> =
                run["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            let (rows, cols) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
            let len = rows * cols;
            let weight_decay = run["weight_decay"].as_f64().unwrap();
            let settings = ParameterSettings { learning_rate_factor: 1.0, weight_decay, frozen: false };
            let (layer, part) = (LayerId::Block(0), ParamKind::OutWeight);
            let run_of = Run { range: 0..len, layer, part, first: 0, columns: None, settings };
            let piece = Piece { range: 0..len, rows, cols, shape: shape.clone() };
            let parameters = [WholeParameter::alone(run_of, vec![piece])];
            let tensor = |group, shape: Vec<usize>, start: usize| {
                let end = start + shape.iter().product::<usize>();
                MomentTensor { group, part, shape, range: start..end }
            };
            let tensors = match shape.len() {
                2 => vec![tensor(ROWS, vec![rows], 0), tensor(COLUMNS, vec![1, cols], rows)],
                _ => vec![tensor(WHOLE, vec![1, cols], 0)],
            };
            let (moment, form) = (AdamMoment::Second, StateForm::F32);
            let count = tensors.last().unwrap().range.end;
            let values = States::zeros(&device, MemoryKind::Optimizer, moment, form, count).unwrap();
            let mut moments = LayerMoments { layer, values, tensors };
            let vector = |values: &[f32]| golden::vector(&device, values);
            let (mut master, mut room) = (vector(&many_numbers(len, 0, 2.0)), vector(&vec![0.0; len]));
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
                step(&device, numbers, &parameters, &mut moments, operands, &mut room, group).unwrap();
                let Some(expected) = run["weights"].get(update.to_string()) else { continue };
                compared += 1;
                for (found, expected) in master.view().as_slice::<f32>().iter().zip(floats(expected)) {
                    // Sums of torch are f32, and a step moves by a hundredth.
                    let allowed = 1.2e-7 * (3.0 + 0.2 * update as f32) * expected.abs().max(1.0);
                    assert!(
                        (found - expected).abs() <= allowed,
                        "{run} step {update}: {found}, expected {expected}"
                    );
                }
            }
            assert_eq!(compared, 4);
        }
    }
}
