//! Reads a model folder and writes it again: `rewrite FOLDER DESTINATION [f32|bf16] [SHARD_BYTES]`.
//!
//! `goldens/check_saved.py` uses it to see that `transformers` loads what we write.

use std::path::Path;

use tandem_kernels::{DType, Device, MemoryKind};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Decoder, ModelFolder, Save};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, destination, options @ ..] = &arguments[..] else {
        return Err("usage: rewrite FOLDER DESTINATION [f32|bf16] [SHARD_BYTES]".into());
    };
    let dtype = match options.first().map_or("f32", String::as_str) {
        "f32" => DType::F32,
        "bf16" => DType::Bf16,
        other => return Err(format!("unknown type {other}").into()),
    };
    let shard_bytes = options.get(1).map_or(Ok(SHARD_BYTES), |text| text.parse())?;
    let template = ModelFolder::open(Path::new(folder))?;
    let decoder = Decoder::new(template.spec().clone(), template.spec().max_positions)?;
    let device = Device::cpu(2, 16 << 30)?;
    let weights = template.weights(&decoder)?.load(&decoder, &device, MemoryKind::Master)?;
    let save = Save { template: &template, decoder: &decoder, dtype, shard_bytes };
    save.write_resident(Path::new(destination), &device, &weights)?;
    println!(
        "{} parameters of {} written to {destination}",
        decoder.num_parameters(),
        template.spec().family
    );
    Ok(())
}
