//! CUDA by NVIDIA's libraries, on a GPU.
//!
//! Nothing of NVIDIA's is needed to build this or to start: [`open`] looks for the driver (`libcuda.so.1`), NVRTC and cuBLASLt, and says what
//! is missing and who has it. Kernels are compiled by NVRTC when they are first needed, for the GPU that is there, and kept on
//! disk (`cache.rs`).
//!
//! Every function of the driver is called with this GPU's context as the calling thread's current one. It is the context that other
//! libraries of the process have too.

mod blas;
mod cache;
mod compiler;
mod context;
mod device;
mod driver;
#[cfg(test)]
mod fake;
mod inventory;
mod libraries;
mod links;
mod memory;
mod modules;
mod nvml;
mod pinned;
mod raw;
#[cfg(test)]
mod tests;
mod usage;

pub use compiler::{Compiled, Compiler};
pub use device::{list, open};
pub use inventory::Inventory;
pub use links::{Link, Links, links};
pub use usage::Usage;
