//! Files of weights.

use tandem_model::WeightFiles;

use crate::{scratch, tiny};

/// Reads `model.safetensors` of a folder whose config is known.
pub(crate) fn safetensors(bytes: &[u8]) {
    let folder = scratch::with_file("safetensors", "model.safetensors", bytes);
    if let Ok(files) = tiny::open(&folder).weights(tiny::decoder()) {
        read_all(&files);
    }
}

/// Reads a file of `torch.save`: a zip with a pickle.
pub(crate) fn policy_pt(bytes: &[u8]) {
    let folder = scratch::with_file("policy_pt", "policy.pt", bytes);
    if let Ok(files) = tiny::open(&folder).weights(tiny::decoder()) {
        read_all(&files);
    }
}

/// Reads every layer. Weights that are not finite are an error.
pub(crate) fn read_all(files: &WeightFiles) {
    let decoder = tiny::decoder();
    for layer in decoder.layers() {
        let mut flat = vec![0.0; decoder.layout(layer).len];
        let _ = files.read_layer(decoder.index(layer), &mut flat);
    }
}
