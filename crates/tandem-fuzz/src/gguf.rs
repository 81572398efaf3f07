//! GGUF files.

use tandem_gguf::Gguf;
use tandem_model::{Decoder, ModelFolder};

use crate::scratch;

/// Opens the file, makes an HF folder's files of it, and reads small models' weights.
pub(crate) fn gguf(bytes: &[u8]) {
    let folder = scratch::with_file("gguf", "model.gguf", bytes);
    let path = folder.join("model.gguf");
    let Ok(gguf) = Gguf::open(&path) else { return };
    let _ = gguf.tokenizer_files();
    let _ = gguf.mapped();
    let Ok(model) = ModelFolder::open(&path) else { return };
    // A decoder is bounded by what its config says, and only then by the file: `model_config` is about that.
    if model.spec().num_layers > 8 || model.spec().vocab_size > 4096 || model.spec().hidden_size > 4096 {
        return;
    }
    let Ok(decoder) = Decoder::new(model.spec().clone(), 32) else { return };
    let Ok(files) = model.weights(&decoder) else { return };
    for layer in decoder.layers() {
        let mut flat = vec![0.0; decoder.layout(layer).len];
        let _ = files.read_layer(decoder.index(layer), &mut flat);
    }
}
