//! CUDA on the host's processor, so that Tandem's kernels are tested where there is no GPU.
//!
//! The kernels' own sources are compiled as C++ for the host; `host/host.h` says what stands for CUDA's language there. A device's
//! memory is host memory under addresses that nothing else can use: whoever reads it without a copy crashes. Work that is put into
//! a stream is done as late as a GPU might do it: when somebody waits for it. Products are plain loops.
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

/// A device of `capacity` bytes, all of which an arena may take.
///
/// # Errors
/// If the operating system refuses address space.
pub fn device(capacity: usize) -> Result<Device> {
    Device::cuda(driver(capacity), capacity, Options::default())
}

/// Has this process find so many GPUs of so many bytes each.
pub fn install(num_gpus: usize, memory: usize) {
    let gpus = (0..num_gpus).map(|ordinal| Emulated::new(memory).with_ordinal(ordinal)).collect();
    tandem_kernels::cuda::stand_in(Machine { gpus });
}

/// A machine with emulated GPUs. Whoever opens one has another driver of the same memory.
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

/// What drives a device of so many bytes.
pub fn driver(memory: usize) -> Drivers {
    Arc::new(Emulated::new(memory))
}
