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

use tandem_kernels::cuda::driver::{Drivers, Properties};
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
    tandem_kernels::cuda::stand_in(Machine { num_gpus, memory });
}

/// A machine with emulated GPUs.
struct Machine {
    num_gpus: usize,
    memory: usize,
}

impl Gpus for Machine {
    fn list(&self) -> Result<Vec<Properties>> {
        (0..self.num_gpus).map(|ordinal| Ok(self.open(ordinal)?.properties().clone())).collect()
    }

    fn open(&self, ordinal: usize) -> Result<Drivers> {
        assert!(ordinal < self.num_gpus, "GPU {ordinal} of {}", self.num_gpus);
        Ok(Arc::new(Emulated::new(self.memory).with_ordinal(ordinal)))
    }
}

/// What drives a device of so many bytes.
pub fn driver(memory: usize) -> Drivers {
    Arc::new(Emulated::new(memory))
}
