//! Models in files: HF folders and GGUF files read, HF folders written, through memory maps and one layer at a time.

mod archive;
mod folder;
mod load;
mod new_folder;
mod order;
mod quantised;
pub mod save;
mod tensor_file;
pub(crate) mod torch;

pub use folder::{ModelFolder, is_checkpoint};
pub use load::WeightFiles;
pub use new_folder::{is_model_file, recover_folder};
pub use save::Save;
pub use tensor_file::ReadLayer;
pub use torch::write_policy;

pub(crate) use archive::{StoredType, TensorArchive};
pub(crate) use load::{Source, read_sources};
pub(crate) use new_folder::{write_folder, write_json};
pub(crate) use order::widened;
pub(crate) use tensor_file::{LayerReader, LayerTensor, Tensor, write_tensors};
