//! Tensors of a `model.safetensors` or an `adapter_model.safetensors`, as numbers.

use std::path::Path;

use anyhow::{Context, Result};
use safetensors::SafeTensors;

use crate::numbers::f32s;

/// The file's bytes.
pub(crate) struct Weights {
    bytes: Vec<u8>,
    names: Vec<String>,
}

impl Weights {
    /// Reads the weights of a model's folder, or of an adapter's.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let [model, adapter] =
            ["model.safetensors", "adapter_model.safetensors"].map(|name| folder.join(name));
        let path = if adapter.exists() { adapter } else { model };
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| path.display().to_string())?;
        let wrong = file.iter().find(|(_, tensor)| tensor.dtype() != safetensors::Dtype::F32);
        if let Some((name, tensor)) = wrong {
            anyhow::bail!("{}: {name} is {:?}, expected F32", path.display(), tensor.dtype());
        }
        let names = file.names().into_iter().map(ToOwned::to_owned).collect();
        Ok(Self { bytes, names })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// A tensor's elements.
    pub(crate) fn get(&self, name: &str) -> Option<Vec<f64>> {
        let file = SafeTensors::deserialize(&self.bytes).expect("parsed when read");
        file.tensor(name).ok().map(|tensor| f32s(tensor.data()))
    }
}
