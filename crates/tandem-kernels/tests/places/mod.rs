//! Where conformance tests run: every level of vector instructions that this processor has, a GPU that the processor emulates,
//! and a GPU where there is one.

use std::sync::OnceLock;

use tandem_kernels::Device;
use tandem_kernels::cpu::Isa;
use tandem_kernels::cuda::driver::Drivers;
use tandem_kernels::cuda::{self, Options};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu(Isa),
    /// CUDA's kernels, on the processor.
    Emulated,
    /// The first GPU.
    Gpu,
}

/// What drives it, if there is one that can be used. All tests share it, and its kernels.
fn gpu() -> Option<&'static Drivers> {
    static GPU: OnceLock<Option<Drivers>> = OnceLock::new();
    GPU.get_or_init(|| cuda::list().ok().map(|_| cuda::open(0).expect("the GPU that is there"))).as_ref()
}

impl Place {
    /// All that this machine has.
    pub fn all() -> Vec<Self> {
        let levels = Isa::ALL.into_iter().filter(|isa| isa.is_available());
        levels.map(Self::Cpu).chain([Self::Emulated]).chain(gpu().map(|_| Self::Gpu)).collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu(isa) => isa.name(),
            Self::Emulated => "emulated CUDA",
            Self::Gpu => "CUDA",
        }
    }

    /// Whether threads of the processor compute, and by its rules.
    pub fn is_cpu(self) -> bool {
        matches!(self, Self::Cpu(_))
    }

    /// A device there: on a processor with that many threads.
    pub fn device(self, threads: usize, capacity: usize) -> Device {
        match self {
            Self::Cpu(isa) => Device::cpu_with_isa(threads, capacity, isa),
            Self::Emulated => tandem_emulated::device(capacity),
            Self::Gpu => Device::cuda(gpu().expect("a GPU").clone(), capacity, Options::default()),
        }
        .expect("threads and memory")
    }
}
