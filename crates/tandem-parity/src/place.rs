//! Device on which Tandem computes.

use anyhow::{Result, bail};
use tandem_cuda_emulator::Emulated;
use tandem_kernels::Device;
use tandem_kernels::cuda::{self, Options};

/// Address space for one model.
const CAPACITY: usize = 4 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Cpu,
    /// The first GPU.
    Cuda,
}

impl Place {
    /// Parses a device name; "emulated" installs the CUDA emulator in this process.
    pub(crate) fn named(name: &str) -> Result<Self> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            "emulated" => {
                tandem_cuda_emulator::install([Emulated::new(CAPACITY)]);
                Ok(Self::Cuda)
            }
            _ => bail!("unknown device {name:?}; the devices are cpu, cuda and emulated"),
        }
    }

    /// The name in a config.
    pub(crate) fn devices(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda:0",
        }
    }

    pub(crate) fn device(self) -> Result<Device> {
        Ok(match self {
            Self::Cpu => {
                let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                Device::cpu(threads, CAPACITY)?
            }
            Self::Cuda => Device::cuda(cuda::open(0)?, CAPACITY, Options::default())?,
        })
    }
}
