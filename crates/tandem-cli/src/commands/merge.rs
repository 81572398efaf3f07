//! `tandem merge`: merges an adapter into its base model.

use std::path::Path;

use anyhow::Context;
use tandem_data::tokenizer::Tokenizer;
use tandem_hub::ModelFiles;
use tandem_kernels::DType;
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Merged, ModelFolder, PeftFolder, Save};
use tandem_train::TrainError;

use crate::args::MergeArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;

pub(crate) fn run(arguments: &MergeArguments) -> anyhow::Result<Exit> {
    let MergeArguments { adapter, output, base, dtype } = arguments;
    if output.exists() {
        return Err(mistake(format!("{} already exists; merge writes a new folder", output.display())));
    }
    let dtype = dtype.map(DType::from);
    let adapter = &hub::model(&hub::made_by_run(adapter)?, ModelFiles::Adapter)?;
    PeftFolder::open(adapter).map_err(TrainError::from)?;
    let base = match base {
        Some(base) => hub::model(base, ModelFiles::Whole).context("cannot read the base model (--base)"),
        None => {
            hub::base_of(adapter).context("cannot read the adapter's base model; give its folder with --base")
        }
    }?;
    let num_parameters = merge(adapter, output, &base, dtype)?;
    print_lines(&[format!("{}: {num_parameters} parameters", output.display())])?;
    Ok(Exit::Done)
}

/// Writes `output` and returns the number of parameters.
fn merge(adapter: &Path, output: &Path, base: &Path, dtype: Option<DType>) -> tandem_train::Result<usize> {
    let folder = PeftFolder::open(adapter)?;
    let is_scorer = folder.is_of_reward_model();
    // The adapter holds the head that scores, whole.
    let template = if is_scorer { ModelFolder::open_reward(base, 0) } else { ModelFolder::open(base) };
    let mut template = template?.with_tokenizer_of(adapter)?;
    // A model without a tokenizer is merged too.
    if [adapter, base].iter().any(|folder| folder.join("tokenizer.json").is_file()) {
        let tokenizer = Tokenizer::from_model(base, Some(adapter))?;
        template = template.with_eos(tokenizer.eos_id());
        // As in training.
        if let Some(pad) = tokenizer.pad_or_eos_id().filter(|_| is_scorer) {
            template = template.with_pad(pad);
        }
    }
    let merged = Merged::open(&template, &folder, 1)?;
    let (decoder, dtype) = (merged.decoder(), dtype.unwrap_or(template.stored_type()));
    let save = Save { template: &template, decoder, dtype, shard_bytes: SHARD_BYTES };
    save.write(output, &mut |layer, flat| merged.read_layer(layer, flat))?;
    Ok(decoder.num_parameters())
}
