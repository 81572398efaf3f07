//! Weights of adapters: fresh ones, folders of the `peft` library, and the merge into a base model.

mod begin;
mod files;
mod init;
mod merge;
mod peft;
mod peft_config;
mod pieces;
mod save;

pub use begin::copy_base;
pub use files::AdapterFiles;
pub use init::init_layer;
pub use merge::Merged;
pub use peft::PeftFolder;
pub(crate) use pieces::pieces;
pub use save::save_adapter;
