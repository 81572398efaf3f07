//! Rates of GPUs, alone and together.
//!
//! A plan multiplies rates by the shares that programs reach of them. The links here are measured
//! as a run uses them, so their share is
//! 1. What cannot be measured keeps what a plan counted with before: the rate of the built-in table
//!    by its share.

use std::time::{Duration, Instant};

use tandem_comm::{Reduction, threads};
use tandem_kernels::cuda::driver::Drivers;
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::{DType, Device, MemoryKind, ops};

use super::{GpuSizes, OF_THE_BEST, Sizes, best, copy_rate, gbs, operations, product_rate, tflops};
use crate::config::Engine;
use crate::parallel::collective_buffer;
use crate::placement::gpus;
use crate::plan::estimate::device::{DeviceKind, DeviceTable};
use crate::{Fault, Result, TrainError};

/// Most GPU memory that the measurements take.
const MEMORY: usize = 4 << 30;

/// All-reduces, of which the fastest counts: the first ones find their way.
const ROUNDS: usize = 8;

/// How long GPUs wait for each other.
const DEADLINE: Duration = Duration::from_secs(120);

/// A row for each kind among these GPUs, the first of each measured as [`super::processor`]
/// measures the processor, and the link between all of them, if there are several. Links to other
/// machines are the table's.
///
/// # Errors
/// If one cannot be used or has too little memory, or they do not reach each other.
pub fn gpus(ordinals: &[usize], sizes: &GpuSizes) -> Result<Vec<DeviceKind>> {
    let mut kinds: Vec<DeviceKind> = Vec::new();
    for &ordinal in ordinals {
        let driver = cuda::open(ordinal)?;
        if kinds.iter().all(|kind| kind.name != driver.properties().name) {
            kinds.push(gpu(driver, sizes)?);
        }
    }
    let link = if ordinals.len() > 1 { Some(bus_rate(ordinals, sizes.common.exchanged)?) } else { None };
    for kind in &mut kinds {
        kind.devices_per_box = ordinals.len();
        kind.link_gbs = link.map_or(kind.link_gbs, gbs);
    }
    Ok(kinds)
}

/// Measures one GPU. Its link to others is the table's. Attention has rows of both its kernels where the GPU
/// multiplies by warpgroups.
///
/// # Errors
/// If it cannot be used or has too little memory.
pub fn gpu(driver: Drivers, of_gpu: &GpuSizes) -> Result<DeviceKind> {
    let sizes = &of_gpu.common;
    let properties = driver.properties().clone();
    let table = DeviceTable::built_in().gpu(&properties.name);
    let device = Device::cuda(driver.clone(), MEMORY, Options::default())?;
    let rate = |dtype| product_rate(&device, sizes, dtype);
    let bf16_rate = rate(DType::Bf16)?;
    let kind = DeviceKind {
        memory_gib: Some((properties.total_memory as f64 / f64::from(1 << 30) * 10.0).floor() / 10.0 - 0.5),
        bf16_tflops: tflops(bf16_rate),
        f32_tflops: tflops(rate(DType::F32)?),
        // Not measured: as far from the table's peak as bf16 is.
        fp8_tflops: table.fp8_tflops.map(|peak| tflops(bf16_rate * peak / table.bf16_tflops)),
        bandwidth_gbs: gbs(copy_rate(&device, sizes.copied, sizes.patience)?),
        host_link_gbs: gbs(host_rate(&device, sizes)?),
        link_gbs: gbs(table.link_gbs * table.achievable_link * 1e9),
        network_gbs: gbs(table.network_gbs * table.achievable_link * 1e9),
        achievable_product: OF_THE_BEST,
        achievable_bandwidth: OF_THE_BEST,
        achievable_link: 1.0,
        call_us: Some(operations::call_us(&device, sizes)?),
        rate: operations::rates(&device, of_gpu)?,
        name: properties.name,
        ..table
    };
    drop(device);
    if properties.capability != cuda::WGMMA || !cuda::has_wgmma(sizes.heads.head_dim) {
        return Ok(kind);
    }
    let device = Device::cuda(driver, MEMORY, Options { wgmma: true, ..Options::default() })?;
    let rate = [kind.rate, operations::rates_of_wgmma(&device, of_gpu)?].concat();
    Ok(DeviceKind { rate, ..kind })
}

/// Bytes a second between pinned host memory and a GPU, in the direction that is slower.
fn host_rate(device: &Device, sizes: &Sizes) -> Result<f64> {
    let memory = device.with_memory(4 * sizes.copied)?;
    let mut host = memory.zeros(MemoryKind::Scratch, 1, sizes.copied, DType::F32)?;
    let mut own = device.zeros(MemoryKind::Scratch, 1, sizes.copied, DType::F32)?;
    let bytes = (4 * sizes.copied) as f64;
    let to_gpu = best(device, bytes, sizes.patience, || Ok(ops::cast(device, host.view(), own.view_mut())?))?;
    let to_host =
        best(device, bytes, sizes.patience, || Ok(ops::cast(device, own.view(), host.view_mut())?))?;
    Ok(to_gpu.min(to_host))
}

/// Bytes per second that each GPU sends while all of them all-reduce `numbers` f32: of `n` ranks
/// each sends `2 (n - 1) / n` of them. They use the engine of a run.
fn bus_rate(ordinals: &[usize], numbers: usize) -> Result<f64> {
    let ranks = ordinals.len();
    let sent = (2 * (ranks - 1) * 4 * numbers) as f64 / ranks as f64;
    let seconds = |group, ordinal| -> Result<f64> {
        let mut group = gpus::carried_on(Engine::Auto, ordinal, group, DEADLINE)?;
        let device = Device::cuda(cuda::open(ordinal)?, MEMORY, Options::default())?;
        let mut x = device.zeros(MemoryKind::Scratch, 1, numbers, DType::F32)?;
        device.synchronize()?;
        let mut fastest = f64::MAX;
        for _ in 0..ROUNDS {
            group.barrier()?;
            let start = Instant::now();
            group.all_reduce_numbers(collective_buffer::tensor(&device, &mut x), Reduction::Sum)?;
            device.synchronize()?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        Ok(fastest)
    };
    let groups = threads::groups(ranks, DEADLINE).into_iter().zip(ordinals);
    let slowest = std::thread::scope(|scope| {
        let start = |(group, &ordinal)| scope.spawn(move || seconds(group, ordinal));
        let ranks: Vec<_> = groups.map(start).collect();
        let outcomes = ranks.into_iter().map(|rank| rank.join().expect("it measures"));
        let mut outcomes: Vec<Result<f64>> = outcomes.collect();
        // A rank that lost its peer knows less than the peer.
        outcomes.sort_by_key(|outcome| outcome.as_ref().is_err_and(|error| error.fault() == Fault::PeerLost));
        outcomes.into_iter().try_fold(0f64, |slowest, seconds| Ok::<_, TrainError>(slowest.max(seconds?)))
    });
    Ok(sent / slowest?)
}
