//! Where conformance tests run: every level of vector instructions that this processor has, a GPU that the processor emulates,
//! and a GPU where there is one. `TANDEM_TEST_CUDA=1` runs them on the GPU alone, those too that are otherwise for the emulated one.

use std::sync::{Arc, OnceLock};

use tandem_kernels::cpu::Isa;
use tandem_kernels::cuda::driver::Drivers;
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::{DType, Device};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu(Isa),
    /// CUDA's kernels, on the processor.
    Emulated,
    /// The first GPU.
    Gpu,
    /// [`Place::Emulated`], with attention by warpgroups.
    EmulatedWgmma,
    /// [`Place::Gpu`], with attention by warpgroups.
    GpuWgmma,
}

/// Drivers of the first GPU, if it can be used. All tests share them and their loaded kernels.
fn gpu() -> Option<&'static Drivers> {
    static GPU: OnceLock<Option<Drivers>> = OnceLock::new();
    GPU.get_or_init(|| cuda::list().ok().map(|_| cuda::open(0).expect("the GPU that is there"))).as_ref()
}

impl Place {
    /// All that this machine has, or the GPU alone.
    pub fn all() -> Vec<Self> {
        if Self::cuda() == Self::Gpu {
            return vec![Self::Gpu];
        }
        let others = [Self::Emulated].into_iter().chain(gpu().map(|_| Self::Gpu));
        Self::processors().into_iter().chain(others).collect()
    }

    /// [`Place::all`], with every kind of kernels that attention of a type has.
    pub fn of_attention_in(dtype: DType) -> Vec<Self> {
        let all = Self::all();
        let is_hopper = || gpu().is_some_and(|gpu| gpu.properties().capability == (9, 0));
        let wgmma = all.iter().filter_map(|place| match place {
            _ if dtype == DType::F32 => None,
            Self::Emulated => Some(Self::EmulatedWgmma),
            Self::Gpu if is_hopper() => Some(Self::GpuWgmma),
            _ => None,
        });
        all.iter().copied().chain(wgmma).collect()
    }

    /// Every level of vector instructions. AMX is emulated on a processor that has its vectors but no tiles.
    pub fn processors() -> Vec<Self> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if Isa::highest() == Isa::Avx512Bf16 {
            tandem_amx_emulator::install();
            Isa::emulate_tiles();
        }
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Self::Cpu).collect()
    }

    /// Place of tests of CUDA alone.
    pub fn cuda() -> Self {
        if std::env::var_os("TANDEM_TEST_CUDA").is_some() { Self::Gpu } else { Self::Emulated }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu(isa) => isa.name(),
            Self::Emulated => "emulated CUDA",
            Self::Gpu => "CUDA",
            Self::EmulatedWgmma => "emulated CUDA by warpgroups",
            Self::GpuWgmma => "CUDA by warpgroups",
        }
    }

    /// Returns whether threads of the CPU compute.
    pub fn is_cpu(self) -> bool {
        matches!(self, Self::Cpu(_))
    }

    /// A device there: on a processor with that many threads.
    pub fn device(self, threads: usize, capacity: usize) -> Device {
        match self {
            Self::Cpu(isa) => Device::cpu_with_isa(threads, capacity, isa),
            Self::Emulated => tandem_cuda_emulator::device(capacity),
            Self::EmulatedWgmma => {
                let hopper = tandem_cuda_emulator::Emulated::new(capacity).with_capability((9, 0));
                Device::cuda(Arc::new(hopper), capacity, Options { wgmma: true, ..Options::default() })
            }
            Self::Gpu | Self::GpuWgmma => Device::cuda(
                gpu().expect("`tandem doctor` finds a GPU").clone(),
                capacity,
                Options { wgmma: self == Self::GpuWgmma, ..Options::default() },
            ),
        }
        .expect("threads and memory")
    }
}
