//! Writer of adapter folders that the `peft` library loads.

use std::path::Path;

use tandem_kernels::DType;

use super::peft::{CONFIG, WEIGHTS};
use super::peft_config;
use super::pieces::{pieces, tied_copy};
use crate::decoder::Decoder;
use crate::families::family_named;
use crate::io::ModelFolder;
use crate::io::{LayerReader, LayerTensor, Tensor, write_tensors};
use crate::io::{write_folder, write_json};
use crate::layout::LayerId;
use crate::{ModelError, Result};

/// Writes the trained parameters of `decoder` in f32 to `destination`, replacing a folder of that
/// name. The config names the `base` folder unless its weights are random, and its tokenizer and chat template are copied. `read`
/// fills the flat buffer of a layer's trained parameters (`trained(layer).len` elements), for
/// layers that have some, in order.
///
/// # Errors
/// If the decoder has no adapter, the disk refuses (nothing is left behind, and an older folder
/// stays whole) or `read` fails.
pub fn save_adapter(
    destination: &Path,
    base: &ModelFolder,
    decoder: &Decoder,
    read: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let adapter =
        decoder.adapter().ok_or_else(|| ModelError::Invalid("the model has no adapter to write".into()))?;
    let family = family_named(decoder.spec().family).expect("specs come from families");
    let mut tensors = Vec::new();
    for layer in decoder.layers() {
        let len = decoder.trained(layer).len;
        let tensor = |piece| Tensor::Layer(LayerTensor { layer, len, piece });
        tensors.extend(pieces(family, decoder, layer).into_iter().map(tensor));
        if layer == LayerId::Embedding {
            tensors.extend(tied_copy(family, decoder).into_iter().map(tensor));
        }
    }
    // Absolute, because a loader resolves the path from its own folder.
    let place = std::path::absolute(base.path()).map_err(|e| ModelError::io(base.path(), e))?;
    let place = (!base.has_random_weights()).then(|| place.to_string_lossy());
    let config = peft_config::to_json(adapter, decoder.spec(), place.as_deref());
    write_folder(destination, &mut |folder| {
        write_json(&folder.join(CONFIG), &config)?;
        base.copy_tokenizer(folder)?;
        let mut layers = LayerReader::new(read);
        write_tensors(
            &folder.join(WEIGHTS),
            &tensors,
            DType::F32,
            decoder.spec().attention.heads,
            &mut layers,
        )
    })
}
