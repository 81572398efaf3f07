//! Measured rates of this machine's CPU or a GPU: a row of the device table, and the yardstick of
//! profiles.

pub(crate) mod attention;
mod gpus;
mod operations;

use std::time::{Duration, Instant};

use tandem_comm::{Reduction, threads};
use tandem_kernels::ops::AttentionShape;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

pub use gpus::{gpu, gpus};

use crate::Result;
use crate::plan::estimate::Machine;
use crate::plan::estimate::device::{DeviceKind, DeviceTable, host_memory};
use crate::plan::estimate::rates::OperationRate;

/// How long each thing is measured.
const PATIENCE: Duration = Duration::from_millis(600);

/// Fraction of the measured best-of-many, cache-resident rates that a step reaches;
/// docs/results/estimates.md compares both.
const OF_THE_BEST: f64 = 0.75;

/// Problem sizes of the measurement: large enough to keep a device as busy as training does.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Rows, columns and depth of the products.
    pub product: (usize, usize, usize),
    /// Heads of the attention.
    pub heads: AttentionShape,
    /// The type that it computes in.
    pub dtype: DType,
    /// Numbers that are copied at once: more than caches hold.
    pub copied: usize,
    /// Numbers that ranks add up.
    pub exchanged: usize,
    /// How long each thing is measured.
    pub patience: Duration,
}

/// Problem sizes of a GPU's measurement, whose operations are told apart.
#[derive(Clone, Debug)]
pub struct GpuSizes {
    /// Sizes of what every device is measured by.
    pub common: Sizes,
    /// Tokens, outputs and inputs of linear layers.
    pub layers: &'static [(usize, usize, usize)],
    /// Numbers of sequences for attention, and tokens of each.
    pub attention: &'static [(usize, usize)],
    /// Rows of the other operations.
    pub tokens: usize,
    /// Columns of the hidden state.
    pub hidden: usize,
    /// Columns of a feed-forward layer.
    pub feed_forward: usize,
    /// Tokens that the head tells apart.
    pub vocabulary: usize,
}

/// Sequences of the attention on a processor, and tokens of each.
const SEQUENCES: (usize, usize) = (4, 512);

/// Tokens and widths of a small model, where rates are lower than at their best.
const OF_A_PROCESSOR: Sizes = Sizes {
    product: (2048, 1024, 512),
    heads: AttentionShape { heads: 8, kv_heads: 4, head_dim: 64, scale: 0.125, window: None, softcap: None },
    dtype: DType::F32,
    copied: COPIED,
    exchanged: 1 << 22,
    patience: PATIENCE,
};

/// Sizes of models with 1 and 8 billion parameters.
pub const OF_A_GPU: GpuSizes = GpuSizes {
    common: Sizes {
        product: (8192, 4096, 4096),
        heads: AttentionShape {
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            scale: 0.088,
            window: None,
            softcap: None,
        },
        dtype: DType::Bf16,
        copied: COPIED,
        exchanged: 1 << 26,
        patience: PATIENCE,
    },
    layers: &[
        (4096, 2048, 2048),
        (4096, 8192, 2048),
        (4096, 2048, 8192),
        (1024, 4096, 4096),
        (8192, 1024, 4096),
        (8192, 4096, 4096),
        (8192, 14336, 4096),
        (8192, 4096, 14336),
    ],
    attention: &[(16, 512), (4, 2048), (2, 4096)],
    tokens: 4096,
    hidden: 4096,
    feed_forward: 14336,
    vocabulary: 128_256,
};

/// Numbers that are copied at once: more than caches hold.
const COPIED: usize = 1 << 26;

/// Measures the product rates, the copy bandwidth and what threads exchange, with every core.
pub fn processor() -> Result<DeviceTable> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let sizes = &OF_A_PROCESSOR;
    let device = Device::cpu(cores, 4 * sizes.copied * 4)?;
    let [bf16_tflops, f32_tflops] =
        [DType::Bf16, DType::F32].map(|dtype| product_rate(&device, sizes, dtype));
    let attention = attention_rate(&device, sizes)?;
    let bandwidth = copy_rate(&device, sizes.copied, sizes.patience)?;
    let link = exchange_rate(sizes.exchanged);
    Ok(DeviceTable {
        device: vec![DeviceKind {
            name: "cpu".to_owned(),
            memory_gib: host_memory().map(|bytes| (bytes as f64 / f64::from(1 << 30) * 10.0).floor() / 10.0),
            host_memory_gib: None,
            cores: Some(cores),
            bf16_tflops: tflops(bf16_tflops?),
            f32_tflops: tflops(f32_tflops?),
            fp8_tflops: None,
            bandwidth_gbs: gbs(bandwidth),
            link_gbs: gbs(link),
            // Host memory is its memory; what another machine gives is not measured.
            host_link_gbs: gbs(bandwidth / 2.0),
            network_gbs: 1.2,
            devices_per_box: 1,
            achievable_product: OF_THE_BEST,
            achievable_bandwidth: OF_THE_BEST,
            achievable_link: 1.0,
            call_us: None,
            rate: vec![OperationRate {
                operation: "attention".to_owned(),
                dtype: None,
                shape: None,
                tflops: Some(tflops(OF_THE_BEST * attention)),
                gbs: None,
            }],
        }],
    })
}

/// 10⁹ bytes a second, as a table has them: more than nothing.
fn gbs(rate: f64) -> f64 {
    (rate / 1e8).round().max(1.0) / 10.0
}

/// 10¹² operations a second, as a table has them.
fn tflops(rate: f64) -> f64 {
    (rate / 1e9).round().max(1.0) / 1000.0
}

/// Peak rates of this many threads: multiply-adds in registers, and copies of more than caches
/// hold, but of no more than `memory` bytes in all.
pub fn machine(threads: usize, memory: Option<u64>) -> Result<Machine> {
    let copied = memory.map_or(COPIED, |bytes| COPIED.min(bytes as usize / 8).max(1));
    let device = Device::cpu(threads, 2 * 4 * copied + (1 << 21))?;
    let Device::Cpu(cpu) = &device else { unreachable!("made by Device::cpu") };
    let peak = |dtype| {
        let operations = cpu.multiply_adds(dtype);
        best(&device, operations, PATIENCE, || {
            cpu.multiply_adds(dtype);
            Ok(())
        })
    };
    let [f32_peak, bf16_peak] = [DType::F32, DType::Bf16].map(peak);
    let instructions = cpu.isa().name();
    let (f32_peak, bf16_peak, copy_rate) = (f32_peak?, bf16_peak?, copy_rate(&device, copied, PATIENCE)?);
    Ok(Machine { num_ranks: 1, threads, instructions, f32_peak, bf16_peak, fp8_peak: None, copy_rate })
}

/// The best of several runs of `work` on `device`, a second's worth of `amount`.
fn best(
    device: &Device,
    amount: f64,
    patience: Duration,
    mut work: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let (began, mut best) = (Instant::now(), 0.0f64);
    let mut rounds = 0;
    while rounds < 3 || began.elapsed() < patience {
        let start = Instant::now();
        work()?;
        device.synchronize()?;
        best = best.max(amount / start.elapsed().as_secs_f64());
        rounds += 1;
    }
    Ok(best)
}

/// Seconds of a call, repeated for about `patience`: the least mean over samples, each of several calls that are
/// waited for once.
fn least_seconds(device: &Device, patience: Duration, calls: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let (mut least, mut count) = (f64::INFINITY, 1u32);
    let mut began = Instant::now();
    for sample in 0u32.. {
        let start = Instant::now();
        for _ in 0..count {
            calls()?;
        }
        device.synchronize()?;
        let seconds = start.elapsed();
        // The first call compiles the kernel, or loads it.
        if sample == 0 {
            began = Instant::now();
            continue;
        }
        least = least.min(seconds.as_secs_f64() / f64::from(count));
        if sample >= 2 && began.elapsed() >= patience {
            break;
        }
        if seconds < patience / 16 {
            count *= 2;
        }
    }
    Ok(least)
}

/// Operations a second of the three products of a matrix that trains.
fn product_rate(device: &Device, sizes: &Sizes, dtype: DType) -> Result<f64> {
    let (m, n, k) = sizes.product;
    let [x, w, dy] = [(m, k), (n, k), (m, n)].map(|(rows, cols)| numbers(device, rows, cols, dtype));
    let (x, w, dy) = (x?, w?, dy?);
    let mut y = device.zeros(MemoryKind::Scratch, m, n, dtype)?;
    let mut dx = device.zeros(MemoryKind::Scratch, m, k, dtype)?;
    let mut dw = device.zeros(MemoryKind::Scratch, n, k, DType::F32)?;
    best(device, 6.0 * (m * n * k) as f64, sizes.patience, || {
        ops::linear(device, x.view(), w.view(), None, None, y.view_mut())?;
        ops::linear_backward_input(device, dy.view(), w.view(), dx.view_mut(), false)?;
        Ok(ops::linear_backward_weight(device, dy.view(), x.view(), dw.view_mut(), false)?)
    })
}

/// Numbers between -1 and 1, no two neighbours alike: a processor may multiply zeros faster than
/// what a model has (AMX of Emerald Rapids by a fifth), as it then draws less power.
fn numbers(device: &Device, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
    let mut numbers = device.zeros(MemoryKind::Scratch, rows, cols, DType::F32)?;
    let mut state = 1u32;
    device.host_write(numbers.view_mut(), |numbers: &mut [f32]| {
        for number in numbers {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *number = state.cast_signed() as f32 / i32::MAX as f32;
        }
    })?;
    if dtype == DType::F32 {
        return Ok(numbers);
    }
    let mut rounded = device.zeros(MemoryKind::Scratch, rows, cols, dtype)?;
    ops::cast(device, numbers.view(), rounded.view_mut())?;
    Ok(rounded)
}

/// Operations of attention forward and backward, as a dry run counts them, a second.
fn attention_rate(device: &Device, sizes: &Sizes) -> Result<f64> {
    let both = |device: &Device| -> Result<[operations::Calls; 2]> {
        let case = |is_backward| operations::attention(device, sizes, SEQUENCES, is_backward);
        Ok([case(false)?, case(true)?])
    };
    let dry = Device::meta();
    let Device::Meta(ledger) = &dry else { unreachable!("made by Device::meta") };
    let [mut forward, mut backward] = both(&dry)?;
    ledger.begin();
    forward()?;
    backward()?;
    let flops = ledger.costs().values().map(|cost| cost.flops).sum();
    let [mut forward, mut backward] = both(device)?;
    best(device, flops, sizes.patience, || {
        forward()?;
        backward()
    })
}

/// Bytes read and written in a second, where so many f32 are copied.
fn copy_rate(device: &Device, copied: usize, patience: Duration) -> Result<f64> {
    let source = device.zeros(MemoryKind::Scratch, 1, copied, DType::F32)?;
    let mut copy = device.zeros(MemoryKind::Scratch, 1, copied, DType::F32)?;
    let bytes = 2.0 * (copied * 4) as f64;
    best(device, bytes, patience, || Ok(ops::cast(device, source.view(), copy.view_mut())?))
}

/// Bytes that each of two ranks sends in a second.
fn exchange_rate(exchanged: usize) -> f64 {
    let groups = threads::groups(2, Duration::from_secs(60));
    let rates = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    let mut numbers = vec![0f32; exchanged];
                    let mut best = 0.0f64;
                    for _ in 0..12 {
                        let start = Instant::now();
                        group.all_reduce(&mut numbers, Reduction::Sum).expect("two threads of this process");
                        // Each of two ranks sends half of twice the numbers.
                        best = best.max((exchanged * 4) as f64 / start.elapsed().as_secs_f64());
                    }
                    best
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("it measures")).collect::<Vec<_>>()
    });
    rates.into_iter().fold(f64::MAX, f64::min)
}

impl DeviceTable {
    /// The table as a file.
    pub fn to_toml(&self) -> String {
        let rows = toml::to_string(self).expect("a table of numbers and names");
        format!(
            "# Measured by `tandem plan --measure` or `tandem doctor --measure`. docs/plan.md says what the fields mean.\n{rows}"
        )
    }
}
