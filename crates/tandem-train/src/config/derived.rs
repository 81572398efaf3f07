//! Values that follow from the config and from the machine.

use std::path::PathBuf;

use tandem_kernels::cpu::Isa;
use tandem_kernels::{Backend, DType, Format};

use super::{AdapterSection, Checkpointing, ComputeConfig, Config, ReferenceKind, ShardedState, SumForm};

impl Config {
    /// The folder of tokens and reference log-probabilities: `data.cache`, else the user's cache folder.
    pub fn cache_folder(&self) -> PathBuf {
        self.data.cache.clone().unwrap_or_else(|| {
            // By the XDG base directories, an empty or relative one is as good as none.
            let folder =
                |variable| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
            let home = || folder("HOME").map(|home| home.join(".cache"));
            match folder("XDG_CACHE_HOME").or_else(home) {
                Some(base) => base.join("tandem"),
                // Another user could not write to a folder of that name.
                None => std::env::temp_dir().join(format!("tandem-{}", rustix::process::getuid().as_raw())),
            }
        })
    }

    /// The format of frozen matrices: as configured; else, under an adapter and for a teacher, as they are `quantised` already;
    /// else the compute type.
    pub fn frozen_format(&self, quantised: Option<Format>) -> Format {
        let stored = quantised.filter(|_| self.adapter.is_some() || self.distill.is_some());
        self.compute.format.or(stored).unwrap_or(whole_format(self.compute.compute_type()))
    }

    /// Returns whether policy and reference may start from different weights.
    pub fn starts_apart(&self) -> bool {
        let trained = self.adapter.as_ref().and_then(AdapterSection::folder);
        let has_other_adapter = match self.reference.kind {
            ReferenceKind::Base => trained.is_some(),
            _ => self.reference.adapter.as_ref().is_some_and(|adapter| Some(adapter) != trained),
        };
        self.reference.model.is_some() || has_other_adapter
    }
}

impl ComputeConfig {
    /// State that the ranks of a shard group divide.
    pub fn sharded(&self) -> ShardedState {
        self.sharding.into()
    }

    /// Threads of each rank.
    pub fn num_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or_else(|| (cores() / self.devices.num_ranks()).max(1))
    }

    /// Returns whether sums are made in blocks: as configured, else on CPUs.
    pub fn sums_in_blocks(&self) -> bool {
        self.sum_blocks.unwrap_or(self.devices.backend() == Backend::Cpu)
    }

    /// Type in which the residual stream travels between stages on GPUs, and sums of slices: the compute type
    /// where `reduction` is fast, else f32. None on CPUs, which exchange f32.
    pub fn walk_wire(&self) -> Option<DType> {
        let wire = if self.reduction == SumForm::Fast { self.compute_type() } else { DType::F32 };
        (self.devices.backend() == Backend::Cuda).then_some(wire)
    }

    /// The compute type: as configured, else bf16 on a GPU and on a CPU that multiplies it natively.
    pub fn compute_type(&self) -> DType {
        let native = || match Isa::detect() {
            Ok(Isa::Avx512Bf16 | Isa::Amx) => DType::Bf16,
            _ => DType::F32,
        };
        match self.devices.backend() {
            Backend::Cpu => self.dtype.unwrap_or_else(native),
            Backend::Cuda => self.dtype.unwrap_or(DType::Bf16),
        }
    }
}

impl From<Checkpointing> for tandem_model::Checkpointing {
    fn from(mode: Checkpointing) -> Self {
        match mode {
            Checkpointing::None => Self::None,
            Checkpointing::Selective => Self::Selective,
            Checkpointing::Block => Self::Block,
        }
    }
}

/// The format that keeps every number of a compute type.
pub(crate) fn whole_format(dtype: DType) -> Format {
    match dtype {
        DType::F32 => Format::F32,
        DType::Bf16 => Format::Bf16,
    }
}
