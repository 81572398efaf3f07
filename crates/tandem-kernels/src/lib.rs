//! Device memory, and every numeric operation of Tandem, forward and backward.
//!
//! * [`memory`]: the arena of a device; [`Tensor`] owns memory from it, [`View`] and [`ViewMut`]
//!   borrow it, [`Bytes`] holds packed weights.
//! * [`device`]: [`Device`] selects the backend. [`Device::meta`] computes nothing and records
//!   allocations and costs: a plan is a dry run on it. [`Profile`] times operations.
//! * [`numerics`]: element types, formats of frozen weights and optimiser states, fixed-point sums.
//! * [`batch`]: [`Forest`], the token tree of a micro-batch, and its [`Runs`] for layers with a state.
//! * [`ops`]: the operations, one file each. An operation checks its operands, states its cost and
//!   launches the device's kernel.
//! * [`cpu`] and [`cuda`]: the kernels.
//!
//! Shape suffixes: `T` tokens, `D` hidden size, `H` attention heads, `K` key/value heads, `F`
//! feed-forward size, `V` vocabulary, `R` rows the head scores, `P` predictions.

#![warn(unreachable_pub)]

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod error;
pub mod memory;
pub mod numerics;
pub mod ops;

pub use batch::forest::{self, Forest, Prediction, Segment};
pub use batch::runs::{After, Run, Runs};
pub use device::meta;
pub use device::profile::{self, Profile};
pub use device::work::OpCost;
pub use device::{Backend, Device};
pub use error::{ArenaPlace, KernelError};
pub use half::bf16;
pub use memory::bytes::{self, Bytes, BytesMut, BytesView};
pub use memory::file;
pub use memory::heap::release_free_heap;
pub use memory::host::Remote;
pub use memory::memory_use::{MemoryKind, MemoryUse};
pub use memory::tensor::{self, Extent, Tensor, View, ViewMut};
pub use numerics::dtype::{self, DType, Element};
pub use numerics::exact;
pub use numerics::format::{self, Format};
pub use numerics::squares::SquareSum;
pub use numerics::states::{
    self, AdamMoment, STATE_BLOCK, StateForm, States, StatesMut, StatesView, StochasticRounding,
};

/// The result of a kernel operation.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;
