//! CUDA on NVIDIA's libraries.
//!
//! Building and starting need nothing of NVIDIA's. [`open`] looks for the driver (`libcuda.so.1`),
//! NVRTC and cuBLASLt, and reports what is missing and where it comes from. NVRTC compiles kernels
//! at first use for the present GPU; `cache.rs` keeps them on disk.
//!
//! Every driver call runs with the GPU's primary context as current, the one that other libraries
//! of the process use too.

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

pub(super) use blas::WORKSPACE;
pub use compiler::{Compiled, Compiler};
pub use device::{list, open};
pub use inventory::Inventory;
pub use links::{Link, Links, links};
pub use usage::Usage;
