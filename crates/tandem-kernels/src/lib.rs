//! Device buffers, the arena they come from, and every numeric operation of Tandem, forward and backward.
//!
//! * [`Device`] is where things are computed: [`Device::cpu`], or [`Device::meta`], which computes nothing and
//!   only records what would be allocated and how many operations would run. The plan is a dry run on it.
//! * [`Device::with_memory`] and [`Device::in_file`] give a device more memory, for what is kept elsewhere than where it is
//!   computed with.
//! * [`Tensor`] owns device memory from the device's arena; [`View`] and [`ViewMut`] borrow it.
//! * [`Bytes`] owns device memory counted in bytes, for what is kept in a [`Format`].
//! * [`ops`] holds the operations, one file each: shapes are checked there, then the device's kernel is launched.
//! * [`profile`] tells when each of them began and ended, on devices that it is given to ([`Device::profiled`]).
//! * [`cpu`] holds the CPU kernels, [`cuda`] those of GPUs.
//! * [`Forest`] is what a batch is.
//!
//! Shape suffixes used throughout: `T` tokens, `D` hidden size, `H` attention heads, `K` key/value heads,
//! `F` feed-forward size, `V` vocabulary, `R` rows the head scores, `P` predictions.

mod arena;
pub mod bytes;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod error;
pub mod exact;
pub mod file;
pub mod forest;
pub mod format;
mod free_list;
mod host;
mod memory_use;
pub mod meta;
pub mod ops;
mod product;
pub mod profile;
pub mod states;
pub mod tensor;
mod work;

pub use bytes::{Bytes, BytesMut, BytesView};
pub use device::{Backend, Device};
pub use dtype::{DType, Element};
pub use error::KernelError;
pub use forest::{Forest, Prediction, Segment};
pub use format::Format;
pub use half::bf16;
pub use host::Remote;
pub use memory_use::{Kind, MemoryUse};
pub use profile::Profile;
pub use states::{Dither, Moment, STATE_BLOCK, StateForm, States, StatesMut, StatesView};
pub use tensor::{Extent, Tensor, View, ViewMut};
pub use work::Work;

/// The result of a kernel operation.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;
