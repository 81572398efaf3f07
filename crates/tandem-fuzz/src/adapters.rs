//! Folders of peft.

use tandem_model::{Adapter, PeftFolder};

use crate::{scratch, tiny};

/// Reads `adapter_config.json`, and makes the adapter of it.
pub(crate) fn peft_config(bytes: &[u8]) {
    let folder = scratch::with_file("peft_config", "adapter_config.json", bytes);
    if let Ok(peft) = PeftFolder::open(&folder) {
        let _ = peft.base_folder();
        let _ = Adapter::new(peft.config().clone(), tiny::decoder().spec());
    }
}

/// Reads `adapter_model.safetensors` of a folder whose config is known.
pub(crate) fn peft_weights(bytes: &[u8]) {
    scratch::with_file("peft_weights", "adapter_config.json", tiny::ADAPTER.as_bytes());
    let folder = scratch::with_file("peft_weights", "adapter_model.safetensors", bytes);
    let decoder = tiny::adapted();
    let peft = PeftFolder::open(&folder).expect("the tiny adapter's config");
    let Ok(files) = peft.weights(decoder) else { return };
    for layer in decoder.layers() {
        let mut flat = vec![0.0; decoder.trained(layer).len];
        let _ = files.read_layer(decoder.index(layer), &mut flat);
    }
}
