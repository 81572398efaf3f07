//! `tandem init-weights`: random weights from a config.json and a seed.

use std::path::Path;

use tandem_hub::ModelFiles;
use tandem_kernels::{DType, Device, MemoryKind};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Decoder, ModelFolder, Save};
use tandem_train::plan::estimate::device::host_memory_and_swap;
use tandem_train::{TrainError, size};

use crate::args::InitWeightsArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;

pub(crate) fn run(arguments: &InitWeightsArguments) -> anyhow::Result<Exit> {
    let InitWeightsArguments { config, output, seed } = arguments;
    if output.exists() {
        return Err(mistake(format!(
            "{} already exists; init-weights writes a new folder",
            output.display()
        )));
    }
    let config = &hub::model(config, ModelFiles::WithoutWeights)?;
    let folder = if config.is_file() { config.parent().unwrap_or(Path::new("")) } else { config };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let num_parameters = init(folder, output, *seed)?;
    print_lines(&[format!("{}: {num_parameters} parameters", output.display())])?;
    Ok(Exit::Done)
}

/// Writes `output` and returns the number of parameters.
fn init(folder: &Path, output: &Path, seed: u64) -> tandem_train::Result<usize> {
    let template = ModelFolder::open(folder)?;
    let decoder = Decoder::new(template.spec().clone(), 1)?;
    let needed = 4 * decoder.num_parameters() as u64;
    if let Some(whole) = host_memory_and_swap().filter(|whole| needed > *whole) {
        let reason = format!(
            "{}: the weights of its {} parameters need {}, and this machine has {} with its swap",
            folder.display(),
            decoder.num_parameters(),
            size::in_words(needed),
            size::in_words(whole)
        );
        return Err(TrainError::Mismatch { reason });
    }
    // The weights and the allocator's rounding.
    let device = Device::cpu(1, 8 * decoder.num_parameters() + (1 << 28))?;
    let weights = tandem_model::init::init(&decoder, &device, MemoryKind::Master, seed)?;
    let save = Save { template: &template, decoder: &decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
    save.write_resident(output, &device, &weights)?;
    Ok(decoder.num_parameters())
}
