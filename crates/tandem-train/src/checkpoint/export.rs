//! A checkpoint's weights as a folder that other commands and programs load.

use std::path::Path;

use tandem_model::adapter::save_adapter;
use tandem_model::save::{SHARD_BYTES, Save};
use tandem_model::{Decoder, LayerId, ModelError, Result as ModelResult};

use super::{Checkpoint, snapshot};
use crate::Result;
use crate::config::Config;
use crate::events::Silent;
use crate::inputs::{ModelSpecs, open_policy};

/// Writes the policy of a checkpoint to the folder `to`: a model, or the adapter that trains. The rest of
/// the state stays in the checkpoint. Returns the number of parameters written.
///
/// One layer at a time is in memory. The run's data is not read.
///
/// # Errors
/// The checkpoint is damaged or of another model, the model's folder cannot be read, or `to` cannot be
/// written; nothing is left there then.
pub fn export(config: &Config, checkpoint: &Path, to: &Path) -> Result<usize> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    let (folder, _) = open_policy(config, &mut Silent)?;
    let decoder = ModelSpecs::from_config(config, &Decoder::new(folder.spec().clone(), 1)?)?.policy;
    let weights = config.train.evaluation_weights();
    snapshot::check_policy(&checkpoint, weights, &decoder)?;
    let read = &mut |layer: LayerId, flat: &mut [f32]| -> ModelResult<()> {
        let read = snapshot::read_policy(&checkpoint, weights, &decoder, layer, flat);
        read.map_err(|error| ModelError::Store(Box::new(error)))
    };
    if decoder.adapter().is_some() {
        save_adapter(to, &folder, &decoder, read)?;
    } else {
        let dtype = folder.stored_type();
        Save { template: &folder, decoder: &decoder, dtype, shard_bytes: SHARD_BYTES }.write(to, read)?;
    }
    Ok(decoder.num_trained())
}
