//! TEMP
use crate::{AdapterConfig, Decoder, LayerId, ModelFolder, Result};
use std::path::Path;
pub struct PeftFolder;
impl PeftFolder {
    pub fn open(_: &Path) -> Result<Self> {
        todo!()
    }
    pub fn config(&self) -> &AdapterConfig {
        todo!()
    }
    pub fn weights(&self, _: &Decoder) -> Result<AdapterFiles> {
        todo!()
    }
}
pub struct AdapterFiles;
impl AdapterFiles {
    pub fn read_layer(&self, _: usize, _: &mut [f32]) {
        todo!()
    }
}
pub fn save_adapter(
    _: &Path,
    _: &ModelFolder,
    _: &Decoder,
    _: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
) -> Result<()> {
    todo!()
}
