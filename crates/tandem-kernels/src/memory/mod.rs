//! Memory of a device: its arena, and the tensors and bytes that are allocated from it.

pub(crate) mod arena;
pub mod bytes;
pub mod file;
pub(crate) mod free_list;
pub mod heap;
pub(crate) mod host;
pub(crate) mod memory_use;
pub mod tensor;
