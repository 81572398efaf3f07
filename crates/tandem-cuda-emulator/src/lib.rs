//! A CUDA emulator on the CPU, so that kernels are tested without a GPU.
//!
//! The kernels' sources are compiled as C++ for the host; `host/host.h` stands in for CUDA's
//! language. Device memory is host memory under addresses that nothing else can use, so reading it
//! without a copy crashes. Work in a stream runs as late as a GPU might run it: when a thread waits
//! for it. GEMMs are plain loops.
//!
//! It is exact and slow, and for tests alone.

mod driver;
mod matmul;
mod memory;

use std::sync::Arc;

use tandem_kernels::cuda::driver::{Driver, Drivers, Properties};
use tandem_kernels::cuda::{Gpus, Options};
use tandem_kernels::{Device, Result};

pub use driver::Emulated;

/// Creates a device of `capacity` bytes, all available to an arena.
pub fn device(capacity: usize) -> Result<Device> {
    Device::cuda(driver(capacity), capacity, Options::default())
}

/// Installs GPUs for the process, numbered in this order.
pub fn install(gpus: impl IntoIterator<Item = Emulated>) {
    let numbered = gpus.into_iter().enumerate().map(|(ordinal, gpu)| gpu.with_ordinal(ordinal));
    tandem_kernels::cuda::install_emulator(Machine { gpus: numbered.collect() });
}

/// A machine with emulated GPUs. Each open returns another driver of the same memory.
struct Machine {
    gpus: Vec<Emulated>,
}

impl Gpus for Machine {
    fn list(&self) -> Result<Vec<Properties>> {
        Ok(self.gpus.iter().map(|gpu| gpu.properties().clone()).collect())
    }

    fn open(&self, ordinal: usize) -> Result<Drivers> {
        Ok(Arc::new(self.gpus[ordinal].again()))
    }
}

/// Creates the driver of a device of this many bytes.
pub fn driver(memory: usize) -> Drivers {
    Arc::new(Emulated::new(memory))
}
