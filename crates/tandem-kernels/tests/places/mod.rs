//! Where conformance tests run: every level of vector instructions that this processor has, a GPU that the processor emulates,
//! and a GPU where there is one.

use tandem_kernels::Device;
use tandem_kernels::cpu::Isa;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu(Isa),
    /// CUDA's kernels, on the processor.
    Emulated,
}

impl Place {
    /// All that this machine has.
    pub fn all() -> Vec<Self> {
        let levels = Isa::ALL.into_iter().filter(|isa| isa.is_available());
        levels.map(Self::Cpu).chain([Self::Emulated]).collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu(isa) => isa.name(),
            Self::Emulated => "emulated CUDA",
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
        }
        .expect("threads and memory")
    }
}
