//! A run's state as named tensors: into a checkpoint and back.
//!
//! Names are those of logical parameters (`policy/block.3.qkv_weight`, `second_moment/head.head_weight`), so that a
//! checkpoint does not depend on how its writer had placed them.

use std::path::PathBuf;

use tandem_model::{Decoder, FlatWeights, LayerId, ParamSpec};

use crate::checkpoint::{Checkpoint, Checkpoints, Cursor, NamedTensor, TensorSpec};
use crate::optimizer::Optimizer;
use crate::store::ReplicatedWeights;
use crate::{Result, TrainError};

/// The name of the masters' group.
const POLICY: &str = "policy";

/// Writes a checkpoint and removes those beyond the newest `keep`.
///
/// # Errors
/// If it cannot be written whole; older checkpoints stay.
pub fn save(
    checkpoints: &Checkpoints,
    cursor: &Cursor,
    decoder: &Decoder,
    policy: &ReplicatedWeights,
    optimizer: &Optimizer,
    keep: Option<usize>,
) -> Result<PathBuf> {
    let mut tensors = Vec::new();
    for (group, weights) in std::iter::once((POLICY, policy.masters())).chain(optimizer.states()) {
        for (layer, flat) in decoder.layers().into_iter().zip(&weights.layers) {
            for param in &decoder.layout(layer).params {
                let spec = spec(group, layer, param);
                tensors.push(NamedTensor { spec, data: flat.view().col_range(param.range()).as_slice() });
            }
        }
    }
    let path = checkpoints.save(cursor, tensors.as_slice())?;
    if let Some(keep) = keep {
        checkpoints.prune(keep, cursor.step)?;
    }
    Ok(path)
}

/// Reads masters and optimiser states back; the caller refreshes the compute copies.
///
/// # Errors
/// If the checkpoint is of another model, other data or another optimiser.
pub fn restore(
    checkpoint: &Checkpoint,
    data_hash: &str,
    decoder: &Decoder,
    policy: &mut ReplicatedWeights,
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
    let mut num_read = read_group(checkpoint, POLICY, decoder, policy.masters_mut())?;
    for (group, weights) in optimizer.states_mut() {
        num_read += read_group(checkpoint, group, decoder, weights)?;
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
    read_group(checkpoint, POLICY, decoder, masters).map(|_| ())
}

/// Reads one group and returns the number of its tensors.
fn read_group(
    checkpoint: &Checkpoint,
    group: &str,
    decoder: &Decoder,
    weights: &mut FlatWeights,
) -> Result<usize> {
    let mut num_read = 0;
    for (layer, flat) in decoder.layers().into_iter().zip(&mut weights.layers) {
        for param in &decoder.layout(layer).params {
            let spec = spec(group, layer, param);
            checkpoint.read_tensor(&spec, flat.view_mut().col_range(param.range()).into_slice())?;
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
