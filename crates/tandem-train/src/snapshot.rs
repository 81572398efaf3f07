//! A run's state as named tensors: into a checkpoint and back.
//!
//! Names are those of logical parameters (`policy/block.3.qkv_weight`, `second_moment/head.head_weight`), so that a
//! checkpoint does not depend on how its writer had placed them.

use std::cell::RefCell;
use std::ops::Range;
use std::path::PathBuf;

use tandem_comm::Group;
use tandem_model::{Decoder, FlatWeights, LayerId, ParamSpec};

use crate::checkpoint::{Checkpoint, Checkpoints, Cursor, StateSource, TensorSpec};
use crate::optimizer::Optimizer;
use crate::store::{Partition, Policy};
use crate::{Result, TrainError};

/// The name of the masters' group.
const POLICY: &str = "policy";

/// Writes a checkpoint on the first rank and removes those beyond the newest `keep`. All ranks call this: what is divided
/// among them is gathered layer by layer. Returns the checkpoint's folder on the first rank.
///
/// # Errors
/// If it cannot be written whole (older checkpoints stay), or a rank is lost.
pub fn save(
    checkpoints: Option<&Checkpoints>,
    cursor: &Cursor,
    decoder: &Decoder,
    group: &mut Group,
    policy: &Policy,
    optimizer: &Optimizer,
    keep: Option<usize>,
) -> Result<Option<PathBuf>> {
    let mut state = State::new(group);
    let (masters, partition) = policy.masters();
    state.add(POLICY, decoder, masters, partition);
    for (name, weights) in optimizer.states() {
        state.add(name, decoder, weights, optimizer.partition());
    }
    let Some(checkpoints) = checkpoints else {
        state.serve()?;
        return Ok(None);
    };
    let path = checkpoints.save(cursor, &state)?;
    if let Some(keep) = keep {
        checkpoints.prune(keep, cursor.step)?;
    }
    Ok(Some(path))
}

/// Everything that is saved, as logical tensors.
struct State<'a> {
    group: RefCell<&'a mut Group>,
    layers: Vec<LayerState<'a>>,
    /// Name and shape, the layer it is part of, and where.
    tensors: Vec<(TensorSpec, usize, Range<usize>)>,
    /// The layer that was gathered last, and its elements.
    gathered: RefCell<(usize, Vec<f32>)>,
}

/// A layer of one group: this rank's part of it.
struct LayerState<'a> {
    part: &'a [f32],
    place: Range<usize>,
    counts: &'a [usize],
}

impl<'a> State<'a> {
    fn new(group: &'a mut Group) -> Self {
        let gathered = RefCell::new((usize::MAX, Vec::new()));
        Self { group: RefCell::new(group), layers: Vec::new(), tensors: Vec::new(), gathered }
    }

    fn add(&mut self, name: &str, decoder: &Decoder, weights: &'a FlatWeights, partition: &'a Partition) {
        for (index, (layer, flat)) in decoder.layers().into_iter().zip(&weights.layers).enumerate() {
            for param in &decoder.layout(layer).params {
                self.tensors.push((spec(name, layer, param), self.layers.len(), param.range()));
            }
            let (place, counts) = (partition.owned(index), partition.counts(index));
            self.layers.push(LayerState { part: flat.view().as_slice(), place, counts });
        }
    }

    /// Fills `gathered` with a layer that is divided. All ranks do this for the same layers in the same order.
    fn gather(&self, index: usize) -> Result<()> {
        let layer = &self.layers[index];
        let (held, whole) = &mut *self.gathered.borrow_mut();
        whole.clear();
        whole.resize(layer.counts.iter().sum(), 0.0);
        whole[layer.place.clone()].copy_from_slice(layer.part);
        self.group.borrow_mut().all_gather(whole, layer.counts)?;
        *held = index;
        Ok(())
    }

    /// Takes part in what the first rank gathers while it writes.
    fn serve(&self) -> Result<()> {
        (0..self.layers.len())
            .filter(|&index| self.layers[index].counts.len() > 1)
            .try_for_each(|index| self.gather(index))
    }
}

impl StateSource for State<'_> {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.tensors.iter().map(|(spec, ..)| spec.clone()).collect()
    }

    fn read(&self, index: usize, start: usize, out: &mut [f32]) -> Result<()> {
        let (_, layer, range) = &self.tensors[index];
        let wanted = range.start + start..range.start + start + out.len();
        if self.layers[*layer].counts.len() == 1 {
            out.copy_from_slice(&self.layers[*layer].part[wanted]);
            return Ok(());
        }
        if self.gathered.borrow().0 != *layer {
            self.gather(*layer)?;
        }
        out.copy_from_slice(&self.gathered.borrow().1[wanted]);
        Ok(())
    }
}

/// Reads masters and optimiser states back; the caller refreshes the compute copies.
///
/// # Errors
/// If the checkpoint is of another model, other data or another optimiser.
pub fn restore(
    checkpoint: &Checkpoint,
    data_hash: &str,
    decoder: &Decoder,
    policy: &mut Policy,
    optimizer: &mut Optimizer,
) -> Result<()> {
    if checkpoint.cursor().data_hash != data_hash {
        return Err(TrainError::BrokenCheckpoint {
            path: checkpoint.path().to_path_buf(),
            reason: "the training data (or its tokenizer, template or max_length) is not what the run was started \
                     with; restore it, or start anew with --overwrite"
                .to_owned(),
        });
    }
    let partition = policy.masters().1.clone();
    let mut num_read = read_group(checkpoint, POLICY, decoder, policy.masters_mut(), &partition)?;
    let partition = optimizer.partition().clone();
    for (group, weights) in optimizer.states_mut() {
        num_read += read_group(checkpoint, group, decoder, weights, &partition)?;
    }
    let num_stored = checkpoint.tensors().len();
    if num_read != num_stored {
        return Err(TrainError::BrokenCheckpoint {
            path: checkpoint.path().to_path_buf(),
            reason: format!(
                "it holds {num_stored} tensors, of which this run has a place for {num_read}: it is of another model or \
                 optimizer; restore them in the config, or start anew with --overwrite"
            ),
        });
    }
    Ok(())
}

/// Reads the policy's masters alone, for evaluation.
///
/// # Errors
/// If the checkpoint is of another model.
pub fn restore_policy(checkpoint: &Checkpoint, decoder: &Decoder, masters: &mut FlatWeights) -> Result<()> {
    read_group(checkpoint, POLICY, decoder, masters, &Partition::whole(decoder)).map(|_| ())
}

/// Reads this rank's part of one group and returns the number of its tensors.
fn read_group(
    checkpoint: &Checkpoint,
    group: &str,
    decoder: &Decoder,
    weights: &mut FlatWeights,
    partition: &Partition,
) -> Result<usize> {
    let mut num_read = 0;
    for (index, (layer, flat)) in decoder.layers().into_iter().zip(&mut weights.layers).enumerate() {
        let owned = partition.owned(index);
        for param in &decoder.layout(layer).params {
            let spec = spec(group, layer, param);
            let range = param.range();
            let wanted = range.start.max(owned.start)..range.end.min(owned.end);
            checkpoint.check_tensor(&spec)?;
            if !wanted.is_empty() {
                let place = wanted.start - owned.start..wanted.end - owned.start;
                let out = flat.view_mut().col_range(place).into_slice();
                checkpoint.read(&spec.name, wanted.start - range.start, out)?;
            }
            num_read += 1;
        }
    }
    Ok(num_read)
}

fn spec(group: &str, layer: LayerId, param: &ParamSpec) -> TensorSpec {
    TensorSpec { name: name(group, layer, param.part.name()), shape: vec![param.rows, param.cols] }
}

fn name(group: &str, layer: LayerId, part: &str) -> String {
    match layer {
        LayerId::Embedding => format!("{group}/embedding.{part}"),
        LayerId::Block(index) => format!("{group}/block.{index}.{part}"),
        LayerId::Head => format!("{group}/head.{part}"),
    }
}
