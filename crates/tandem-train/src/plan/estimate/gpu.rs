//! GPUs of a run as a plan knows them.

use tandem_kernels::cuda;

use crate::Result;
use crate::config::ComputeConfig;
use crate::placement::gpus::ordinals;
use crate::plan::estimate::device::{DeviceKind, DeviceTable, host_memory};

/// A rank's GPU.
pub struct Gpu {
    /// Row of the device table; its memory is the free memory.
    pub kind: DeviceKind,
    /// Bytes that an arena may take.
    pub usable: u64,
    /// Bytes that it has.
    pub total: u64,
}

impl Gpu {
    /// A rank's GPU, if it computes on one.
    pub fn for_rank(compute: &ComputeConfig, rank: usize) -> Result<Option<Self>> {
        let ordinals = ordinals(compute.devices);
        if ordinals.is_empty() {
            return Ok(None);
        }
        let driver = cuda::open(ordinals[rank % ordinals.len()])?;
        let usable = (driver.free_memory()? as u64).saturating_sub(cuda::BESIDE as u64);
        let properties = driver.properties();
        let gib = usable as f64 / (1u64 << 30) as f64;
        let kind = DeviceTable::built_in().gpu(&properties.name);
        let kind = DeviceKind { name: properties.name.clone(), memory_gib: Some(gib), ..kind };
        let kind = host_memory().into_iter().fold(kind, DeviceKind::with_host_memory);
        Ok(Some(Self { kind, usable, total: properties.total_memory as u64 }))
    }
}
