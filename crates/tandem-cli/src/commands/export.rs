//! `tandem export`: writes a model in another program's format.

use std::path::Path;

use tandem_hub::ModelFiles;
use tandem_kernels::DType;
use tandem_model::{Decoder, ModelFolder, write_policy};

use crate::args::ExportArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;

pub(crate) fn run(arguments: &ExportArguments) -> anyhow::Result<Exit> {
    let ExportArguments { model, to, dtype } = arguments;
    if to.extension().is_none_or(|end| end != "pt") {
        return Err(mistake(format!(
            "--to {}: the extension selects the format; .pt (policy.pt) is the only one",
            to.display()
        )));
    }
    if to.exists() {
        return Err(mistake(format!("{} already exists; export writes a new file", to.display())));
    }
    let model = hub::model(&hub::made_by_run(model)?, ModelFiles::Whole)?;
    if model.join("adapter_config.json").is_file() && !model.join("config.json").is_file() {
        return Err(mistake(format!(
            "{} holds an adapter; merge it first (tandem merge) and export the merged model",
            model.display()
        )));
    }
    let num_parameters = export(&model, to, dtype.map(DType::from))?;
    print_lines(&[format!("{}: {num_parameters} parameters", to.display())])?;
    Ok(Exit::Done)
}

/// Writes `to` and returns the number of parameters.
fn export(model: &Path, to: &Path, dtype: Option<DType>) -> tandem_train::Result<usize> {
    let folder = ModelFolder::open(model)?;
    let decoder = Decoder::new(folder.spec().clone(), 1)?;
    let weights = folder.weights(&decoder)?;
    write_policy(to, &decoder, dtype.unwrap_or(folder.stored_type()), &mut |layer, flat| {
        weights.read_layer(decoder.index(layer), flat)
    })?;
    Ok(decoder.num_parameters())
}
