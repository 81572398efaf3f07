//! What this machine's processor, or a GPU of it, can do, measured in a few seconds: a row of the table of devices, and what a profile
//! holds operations against.

use std::time::{Duration, Instant};

use tandem_comm::{Reduction, threads};
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::ops::AttentionShape;
use tandem_kernels::{DType, Device, Forest, Kind, Segment, Tensor, ops};

use super::device::{DeviceKind, DeviceTable, host_memory};
use crate::Result;
use crate::profile::Machine;

/// How long each thing is measured.
const PATIENCE: Duration = Duration::from_millis(600);

/// What a step reaches of the rates measured here, which are the best of many runs on factors that caches hold: docs/results/estimates.md
/// compares both.
const OF_THE_BEST: f64 = 0.75;

/// What is computed to measure a device: large enough to keep it busy, as training does.
struct Sizes {
    /// Rows, columns and depth of the products.
    product: (usize, usize, usize),
    /// Sequences of the attention, and tokens of each.
    sequences: (usize, usize),
    /// Its heads.
    heads: AttentionShape,
    /// The type that it computes in.
    dtype: DType,
}

/// Tokens and widths of a small model, where rates are lower than at their best.
const OF_A_PROCESSOR: Sizes = Sizes {
    product: (2048, 1024, 512),
    sequences: (4, 512),
    heads: AttentionShape { heads: 8, kv_heads: 4, head_dim: 64, scale: 0.125, window: None, softcap: None },
    dtype: DType::F32,
};

/// Those of a model of 8 B.
const OF_A_GPU: Sizes = Sizes {
    product: (8192, 4096, 4096),
    sequences: (4, 2048),
    heads: AttentionShape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        scale: 0.088,
        window: None,
        softcap: None,
    },
    dtype: DType::Bf16,
};

/// Numbers that are copied at once: more than caches hold.
const COPIED: usize = 1 << 26;

/// Numbers that two ranks add up.
const EXCHANGED: usize = 1 << 22;

/// Measures the product rates, the copy bandwidth and what threads exchange, with every core.
///
/// # Errors
/// If memory runs out.
pub fn processor() -> Result<DeviceTable> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let device = Device::cpu(cores, 4 * COPIED * 4)?;
    let sizes = &OF_A_PROCESSOR;
    let [bf16_tflops, f32_tflops] =
        [DType::Bf16, DType::F32].map(|dtype| product_rate(&device, sizes.product, dtype));
    let attention = attention_rate(&device, sizes)?;
    let bandwidth = copy_rate(&device, COPIED)?;
    let link = exchange_rate();
    Ok(DeviceTable {
        device: vec![DeviceKind {
            name: "cpu".to_owned(),
            memory_gib: host_memory().map(|bytes| (bytes as f64 / f64::from(1 << 30) * 10.0).floor() / 10.0),
            cores: Some(cores),
            bf16_tflops: tflops(bf16_tflops?),
            f32_tflops: tflops(f32_tflops?),
            attention_tflops: Some(tflops(attention)),
            bandwidth_gbs: gbs(bandwidth),
            link_gbs: gbs(link),
            // Host memory is its memory; what another machine gives is not measured.
            host_link_gbs: gbs(bandwidth / 2.0),
            network_gbs: 1.2,
            devices_per_box: 1,
            achievable_product: OF_THE_BEST,
            achievable_bandwidth: OF_THE_BEST,
            achievable_link: 1.0,
        }],
    })
}

/// Measures a GPU as [`processor`] does the processor; links to other GPUs, and to other machines, are the table's of its kind.
///
/// # Errors
/// If it cannot be used, or has too little memory.
pub fn gpu(ordinal: usize) -> Result<DeviceKind> {
    let driver = cuda::open(ordinal)?;
    let properties = driver.properties().clone();
    let table = DeviceTable::built_in().of_gpu(&properties.name);
    let device = Device::cuda(driver, 4 << 30, Options::default())?;
    let sizes = &OF_A_GPU;
    let rate = |dtype| product_rate(&device, sizes.product, dtype);
    Ok(DeviceKind {
        memory_gib: Some((properties.total_memory as f64 / f64::from(1 << 30) * 10.0).floor() / 10.0 - 0.5),
        bf16_tflops: tflops(rate(DType::Bf16)?),
        f32_tflops: tflops(rate(DType::F32)?),
        attention_tflops: Some(tflops(attention_rate(&device, sizes)?)),
        bandwidth_gbs: gbs(copy_rate(&device, COPIED)?),
        host_link_gbs: gbs(host_rate(&device)?),
        achievable_product: OF_THE_BEST,
        achievable_bandwidth: OF_THE_BEST,
        name: properties.name,
        ..table
    })
}

/// Bytes a second from pinned host memory to a GPU.
fn host_rate(device: &Device) -> Result<f64> {
    let host = device.with_memory(4 * COPIED)?;
    let source = host.zeros(Kind::Scratch, 1, COPIED, DType::F32)?;
    let mut copy = device.zeros(Kind::Scratch, 1, COPIED, DType::F32)?;
    best(device, (COPIED * 4) as f64, || Ok(ops::cast(device, source.view(), copy.view_mut())?))
}

fn gbs(rate: f64) -> f64 {
    (rate / 1e8).round() / 10.0
}

fn tflops(rate: f64) -> f64 {
    (rate / 1e9).round() / 1000.0
}

/// What so many threads can do at best: multiply-adds in registers, and copies of more than caches hold, but of no more than
/// `memory` bytes in all.
///
/// # Errors
/// If memory runs out.
pub fn machine(threads: usize, memory: Option<u64>) -> Result<Machine> {
    let copied = memory.map_or(COPIED, |bytes| COPIED.min(bytes as usize / 8).max(1));
    let device = Device::cpu(threads, 2 * 4 * copied + (1 << 21))?;
    let Device::Cpu(cpu) = &device else { unreachable!("made by Device::cpu") };
    let peak = |dtype| {
        let operations = cpu.multiply_adds(dtype);
        best(&device, operations, || {
            cpu.multiply_adds(dtype);
            Ok(())
        })
    };
    let [f32_peak, bf16_peak] = [DType::F32, DType::Bf16].map(peak);
    let instructions = cpu.isa().name();
    let (f32_peak, bf16_peak, copy_rate) = (f32_peak?, bf16_peak?, copy_rate(&device, copied)?);
    Ok(Machine { num_ranks: 1, threads, instructions, f32_peak, bf16_peak, copy_rate })
}

/// The best of several runs of `work` on `device`, a second's worth of `amount`.
fn best(device: &Device, amount: f64, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (began, mut best) = (Instant::now(), 0.0f64);
    let mut rounds = 0;
    while rounds < 3 || began.elapsed() < PATIENCE {
        let start = Instant::now();
        work()?;
        device.synchronize()?;
        best = best.max(amount / start.elapsed().as_secs_f64());
        rounds += 1;
    }
    Ok(best)
}

/// Operations a second of the three products of a matrix that trains.
fn product_rate(device: &Device, (m, n, k): (usize, usize, usize), dtype: DType) -> Result<f64> {
    let [x, w, dy] = [(m, k), (n, k), (m, n)].map(|(rows, cols)| numbers(device, rows, cols, dtype));
    let (x, w, dy) = (x?, w?, dy?);
    let mut y = device.zeros(Kind::Scratch, m, n, dtype)?;
    let mut dx = device.zeros(Kind::Scratch, m, k, dtype)?;
    let mut dw = device.zeros(Kind::Scratch, n, k, DType::F32)?;
    best(device, 6.0 * (m * n * k) as f64, || {
        ops::linear(device, x.view(), w.view(), None, None, y.view_mut())?;
        ops::linear_backward_input(device, dy.view(), w.view(), dx.view_mut(), false)?;
        Ok(ops::linear_backward_weight(device, dy.view(), x.view(), dw.view_mut(), false)?)
    })
}

/// Numbers between -1 and 1, no two neighbours alike: a processor may multiply zeros faster than what a model has (AMX of
/// Emerald Rapids by a fifth), as it then draws less power.
fn numbers(device: &Device, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
    let mut numbers = device.zeros(Kind::Scratch, rows, cols, DType::F32)?;
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
    let mut rounded = device.zeros(Kind::Scratch, rows, cols, dtype)?;
    ops::cast(device, numbers.view(), rounded.view_mut())?;
    Ok(rounded)
}

/// Operations of attention forward and backward, as a dry run counts them, a second.
fn attention_rate(device: &Device, sizes: &Sizes) -> Result<f64> {
    let Sizes { sequences: (sequences, length), heads, dtype, .. } = *sizes;
    let mut segments = Vec::with_capacity(sequences);
    for index in 0..sequences as u32 {
        let start = index * length as u32;
        segments.push(Segment { range: start..start + length as u32, parent: None, first_position: 0 });
    }
    let tokens = sequences * length;
    let forest = Forest::new(vec![0; tokens], segments, Vec::new(), 0)?;
    let (wide, narrow) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
    let both = |device: &Device, [q, k, v, d_out]: &[Tensor; 4]| -> Result<()> {
        let zeros = |cols| device.zeros(Kind::Scratch, tokens, cols, dtype);
        let mut sum = device.zeros(Kind::Scratch, tokens, heads.heads, DType::F32)?;
        let mut out = zeros(wide)?;
        let (mut dq, mut dk, mut dv) = (zeros(wide)?, zeros(narrow)?, zeros(narrow)?);
        let (q, k, v, d_out) = (q.view(), k.view(), v.view(), d_out.view());
        ops::attention(device, q, k, v, &forest, &heads, out.view_mut(), sum.view_mut())?;
        let (out, sum) = (out.view(), sum.view());
        let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        Ok(ops::attention_backward(device, q, k, v, out, sum, d_out, &forest, &heads, dq, dk, dv)?)
    };
    let dry = Device::meta();
    let unfilled = |cols| dry.zeros(Kind::Scratch, tokens, cols, dtype);
    both(&dry, &[unfilled(wide)?, unfilled(narrow)?, unfilled(narrow)?, unfilled(wide)?])?;
    let Device::Meta(ledger) = &dry else { unreachable!("made by Device::meta") };
    let flops = ledger.costs().values().map(|cost| cost.flops).sum();
    let filled = |cols| numbers(device, tokens, cols, dtype);
    let inputs = [filled(wide)?, filled(narrow)?, filled(narrow)?, filled(wide)?];
    best(device, flops, || both(device, &inputs))
}

/// Bytes read and written in a second, where so many f32 are copied.
fn copy_rate(device: &Device, copied: usize) -> Result<f64> {
    let source = device.zeros(Kind::Scratch, 1, copied, DType::F32)?;
    let mut copy = device.zeros(Kind::Scratch, 1, copied, DType::F32)?;
    best(device, 2.0 * (copied * 4) as f64, || Ok(ops::cast(device, source.view(), copy.view_mut())?))
}

/// Bytes that each of two ranks sends in a second.
fn exchange_rate() -> f64 {
    let groups = threads::groups(2, Duration::from_secs(60));
    let rates = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    let mut numbers = vec![0f32; EXCHANGED];
                    let mut best = 0.0f64;
                    for _ in 0..12 {
                        let start = Instant::now();
                        group.all_reduce(&mut numbers, Reduction::Sum).expect("two threads of this process");
                        // Each of two ranks sends half of twice the numbers.
                        best = best.max((EXCHANGED * 4) as f64 / start.elapsed().as_secs_f64());
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
