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

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod error;
pub mod memory;
pub mod numerics;
pub mod ops;

pub use batch::forest::{self, Forest, Prediction, Segment};
pub use device::meta;
pub use device::profile::{self, Profile};
pub use device::work::Work;
pub use device::{Backend, Device};
pub use error::KernelError;
pub use half::bf16;
pub use memory::bytes::{self, Bytes, BytesMut, BytesView};
pub use memory::file;
pub use memory::host::Remote;
pub use memory::memory_use::{Kind, MemoryUse};
pub use memory::tensor::{self, Extent, Tensor, View, ViewMut};
pub use numerics::dtype::{self, DType, Element};
pub use numerics::exact;
pub use numerics::format::{self, Format};
pub use numerics::states::{self, Dither, Moment, STATE_BLOCK, StateForm, States, StatesMut, StatesView};

/// The result of a kernel operation.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;
