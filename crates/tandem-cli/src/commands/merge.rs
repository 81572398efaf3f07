//! `tandem merge`: merges an adapter into its base model.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tandem_hub::ModelFiles;
use tandem_kernels::DType;
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Merged, ModelFolder, PeftFolder, Save};

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
    let adapter = &hub::model(adapter, ModelFiles::Adapter)?;
    let base = match base {
        Some(base) => Some(base.clone()),
        None => base_on_hub(adapter)?,
    };
    let base = base.map(|base| hub::model(&base, ModelFiles::Whole)).transpose();
    let base = base.context("cannot read the base model; --base names another folder")?;
    let num_parameters = merge(adapter, output, base.as_deref(), dtype)?;
    print_lines(&[format!("{}: {num_parameters} parameters", output.display())])?;
    Ok(Exit::Done)
}

/// Base model of an adapter, where it is a name of the hub rather than a folder.
fn base_on_hub(adapter: &Path) -> tandem_train::Result<Option<PathBuf>> {
    let folder = PeftFolder::open(adapter)?;
    let base = folder.base_model().filter(|_| folder.base_folder().is_err());
    Ok(base.map(PathBuf::from).filter(|base| hub::repository(base).is_some()))
}

/// Writes `output` and returns the number of parameters.
fn merge(
    adapter: &Path,
    output: &Path,
    base: Option<&Path>,
    dtype: Option<DType>,
) -> tandem_train::Result<usize> {
    let folder = PeftFolder::open(adapter)?;
    let base = base.map_or_else(|| folder.base_folder(), |base| Ok(base.to_owned()))?;
    let template = ModelFolder::open(&base)?;
    let merged = Merged::open(&template, &folder, 1)?;
    let (decoder, dtype) = (merged.decoder(), dtype.unwrap_or(template.stored_type()));
    let save = Save { template: &template, decoder, dtype, shard_bytes: SHARD_BYTES };
    save.write(output, &mut |layer, flat| {
        merged.read_layer(layer, flat);
        Ok(())
    })?;
    Ok(decoder.num_parameters())
}
