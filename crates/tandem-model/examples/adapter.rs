//! Reads an adapter of a model and writes it again, or merges the two: `adapter rewrite|merge MODEL ADAPTER DESTINATION`.
//!
//! `goldens/check_adapters.py` uses it to see that `peft` and `transformers` load what we write.

use std::path::Path;

use tandem_kernels::DType;
use tandem_model::adapter::save_adapter;
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Adapter, Decoder, Merged, ModelFolder, PeftFolder, Save};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, model, adapter, destination] = &arguments[..] else {
        return Err("usage: adapter rewrite|merge MODEL ADAPTER DESTINATION".into());
    };
    let (base, folder) = (ModelFolder::open(Path::new(model))?, PeftFolder::open(Path::new(adapter))?);
    let destination = Path::new(destination);
    match what.as_str() {
        "rewrite" => {
            let adapter = Adapter::new(folder.config().clone(), base.spec())?;
            let decoder = Decoder::new(base.spec().clone(), 1)?.with_adapter(adapter);
            let files = folder.weights(&decoder)?;
            save_adapter(destination, &base, &decoder, &mut |layer, flat| {
                files.read_layer(decoder.index(layer), flat)
            })?;
        }
        "merge" => {
            let merged = Merged::open(&base, &folder, 1)?;
            let decoder = merged.decoder();
            let save = Save { template: &base, decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
            save.write(destination, &mut |layer, flat| merged.read_layer(layer, flat))?;
        }
        other => return Err(format!("unknown: {other}").into()),
    }
    Ok(())
}
