//! Which GPUs a run computes on.

use std::time::Duration;

use tandem_comm::ProcessGroup;
use tandem_comm::nccl::Libraries;
use tandem_kernels::cuda::driver::Drivers;
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::{Backend, DType, Device, KernelError};

use crate::config::{AttentionKernels, ComputeConfig, Config, Devices, Engine, GpuSet};
use crate::{Result, TrainError};

/// Resolves "auto" to the machine's GPUs, else the CPU, and "cuda" to all GPU ordinals. Checks that
/// named GPUs exist, and that the devices have what the settings ask for.
///
/// # Errors
/// A requested GPU or one of its libraries is missing; the devices lack what a setting is for.
pub fn resolve(compute: &mut ComputeConfig) -> Result<()> {
    compute.devices = match compute.devices {
        Devices::Cpu(ranks) => Devices::Cpu(ranks),
        Devices::Auto => match cuda::list() {
            Ok(gpus) if !gpus.is_empty() => first(gpus.len()),
            _ => Devices::Auto,
        },
        Devices::Cuda(asked) => {
            let gpus = cuda::list().map_err(|error| missing(compute, &error))?;
            match asked.ordinals() {
                None => first(gpus.len()),
                Some(ordinals) => match ordinals.iter().find(|&&ordinal| ordinal >= gpus.len()) {
                    None => Devices::Cuda(asked),
                    Some(ordinal) => {
                        let reason = format!(
                            "compute.devices = {:?} names GPU {ordinal}, but this process may use {}, counted from 0",
                            compute.devices.name(),
                            gpus.len()
                        );
                        return Err(TrainError::Mismatch { reason });
                    }
                },
            }
        }
    };
    if compute.devices.backend() == Backend::Cpu {
        let of_gpus = [
            (compute.tf32, "compute.tf32 = true: a CPU has no TF32"),
            (compute.residual != DType::F32, "compute.residual = \"bf16\": a CPU adds in f32"),
            (
                compute.attention == AttentionKernels::Wgmma,
                "compute.attention = \"wgmma\": a CPU has no warpgroups",
            ),
            (compute.fp8_matmul, "compute.fp8_matmul = true: a CPU multiplies no FP8"),
        ];
        if let Some((_, refused)) = of_gpus.into_iter().find(|(is_asked, _)| *is_asked) {
            let reason = format!(
                "{refused}, and this machine has no GPU: leave it out, or give compute.devices = \"cuda\", which says what is missing"
            );
            return Err(TrainError::Mismatch { reason });
        }
    } else if compute.attention == AttentionKernels::Wgmma {
        let gpus = cuda::list().map_err(|error| missing(compute, &error))?;
        let mut own = ordinals(compute.devices).into_iter().filter_map(|ordinal| gpus.get(ordinal));
        if let Some(other) = own.find(|gpu| gpu.capability != cuda::WGMMA) {
            let (ordinal, (major, minor)) = (other.ordinal, other.capability);
            let reason = format!(
                "compute.attention = \"wgmma\": GPU {ordinal} ({}) has compute capability {major}.{minor}, and only those of 9.0 \
                 multiply by warpgroups; leave it out, or name others with compute.devices",
                other.name
            );
            return Err(TrainError::Mismatch { reason });
        }
    }
    Ok(())
}

/// Like [`resolve`], for a process that is rank `local` on its machine: one GPU. A process
/// restricted to one GPU takes that.
///
/// # Errors
/// As [`resolve`]; or the machine has fewer GPUs than ranks.
pub fn resolve_one(compute: &mut ComputeConfig, local: usize) -> Result<()> {
    resolve(compute)?;
    let Devices::Cuda(GpuSet::Of(_)) = compute.devices else { return Ok(()) };
    let ordinals = ordinals(compute.devices);
    let own = if ordinals.len() == 1 { ordinals.first() } else { ordinals.get(local) };
    let Some(&own) = own else {
        let reason = format!(
            "this process is number {local} of its machine, counted from 0, and there are {} GPUs for it: start as many ranks as \
             there are GPUs",
            ordinals.len()
        );
        return Err(TrainError::Mismatch { reason });
    };
    compute.devices = Devices::Cuda(GpuSet::Of(1 << own));
    Ok(())
}

/// Reduces to one device, for single-rank work.
pub fn one_of(devices: Devices) -> Devices {
    match devices {
        Devices::Auto | Devices::Cpu(_) => Devices::Cpu(1),
        Devices::Cuda(GpuSet::All) => devices,
        Devices::Cuda(GpuSet::Of(bits)) => Devices::Cuda(GpuSet::Of(bits & bits.wrapping_neg())),
    }
}

pub(crate) fn ordinals(devices: Devices) -> Vec<usize> {
    let Devices::Cuda(gpus) = devices else { return Vec::new() };
    gpus.ordinals().unwrap_or_else(|| vec![0])
}

/// Chooses the engine between GPU ranks that are threads: NCCL where available or requested.
///
/// # Errors
/// NCCL is requested and missing or too old, or fails to start.
pub fn carried(compute: &ComputeConfig, group: ProcessGroup, deadline: Duration) -> Result<ProcessGroup> {
    let ordinals = ordinals(compute.devices);
    if ordinals.len() < 2 {
        return Ok(group);
    }
    let ordinal = ordinals[group.rank() % ordinals.len()];
    carried_on(compute.engine, ordinal, group, deadline)
}

/// [`carried`] for one rank on this GPU.
pub(crate) fn carried_on(
    engine: Engine,
    ordinal: usize,
    group: ProcessGroup,
    deadline: Duration,
) -> Result<ProcessGroup> {
    if engine == Engine::Threads || cuda::is_stand_in() {
        return Ok(group);
    }
    match Libraries::open().and_then(Libraries::for_ranks_of_one_process) {
        Ok(nccl) => Ok(nccl.group(group, Some(ordinal), deadline)?),
        Err(error) if engine == Engine::Nccl => Err(error.into()),
        Err(_) => Ok(group),
    }
}

/// The first GPUs of a machine.
fn first(count: usize) -> Devices {
    Devices::Cuda(GpuSet::Of(if count >= 64 { u64::MAX } else { (1 << count) - 1 }))
}

fn missing(compute: &ComputeConfig, error: &KernelError) -> TrainError {
    TrainError::Mismatch {
        reason: format!("compute.devices = {:?}: {}", compute.devices.name(), crate::chain(error)),
    }
}

/// The device of a rank, with a memory that may grow to `capacity` bytes: one of the GPUs that the
/// config names, or the processor.
pub fn device(config: &Config, attention: AttentionKernels, rank: usize, capacity: usize) -> Result<Device> {
    match driver(config, rank)? {
        None => Ok(Device::cpu(config.compute.num_threads(), capacity)?),
        Some(driver) => {
            if config.compute.fp8_matmul {
                driver.check_fp8().map_err(|why| {
                    let gpu = driver.properties();
                    let reason = format!(
                        "compute.fp8_matmul = true: GPU {} ({}): {why}; leave it out, or name others with compute.devices",
                        gpu.ordinal, gpu.name
                    );
                    TrainError::Mismatch { reason }
                })?;
            }
            Ok(Device::cuda(driver, capacity, options(&config.compute, attention))?)
        }
    }
}

/// Returns the options of a GPU's device.
pub(crate) fn options(compute: &ComputeConfig, attention: AttentionKernels) -> Options {
    Options { tf32: compute.tf32, wgmma: attention == AttentionKernels::Wgmma }
}

/// Opens the driver of a rank's GPU; `None` if the rank computes on the CPU.
pub(crate) fn driver(config: &Config, rank: usize) -> Result<Option<Drivers>> {
    let ordinals = ordinals(config.compute.devices);
    if ordinals.is_empty() {
        return Ok(None);
    }
    Ok(Some(cuda::open(ordinals[rank % ordinals.len()])?))
}
