//! Kernels of a run's attention on GPUs where `compute.attention = "auto"`: timed once before the first step, the
//! same on every rank, and kept with the run.
//!
//! Both kinds compute the attention of a typical micro-batch, forward and backward. Warpgroups are taken if they
//! are clearly faster and give what warps give.

use std::time::Duration;

use tandem_comm::{ProcessGroup, Reduction};
use tandem_kernels::cuda::driver::{Algorithm, Drivers, MatmulChoice};
use tandem_kernels::cuda::matmul::rounded;
use tandem_kernels::cuda::{self, Options};
use tandem_kernels::ops::AttentionShape;
use tandem_kernels::{Backend, DType, Device, Forest};
use tandem_model::DecoderSpec;

use crate::Result;
use crate::config::{AttentionKernels, Config};
use crate::events::{Event, Observer};
use crate::placement::gpus;
use crate::plan::PlanInputs;
use crate::plan::estimate::measure::attention::AttentionCase;

/// How long a pass is repeated.
const PATIENCE: Duration = Duration::from_millis(100);

/// Most memory of a GPU that the timing takes.
const MEMORY: usize = 16 << 30;

/// Part of the time of warps that warpgroups must not exceed: smaller differences are noise.
const MARGIN: f64 = 0.98;

/// Most that results may differ, as a part of their norm. Rounding to bf16 makes less than a half of it.
const TOLERANCE: f64 = 0.02;

/// Returns the kernels of a run: those of the config, or for `"auto"` those of the record, if the run has one, or
/// what a timing on the first rank's GPU finds. Collective.
///
/// # Errors
/// A GPU fails, or another rank.
pub(super) fn choose(
    config: &Config,
    outline: &PlanInputs,
    decoder: &DecoderSpec,
    recorded: Option<AttentionKernels>,
    group: &mut ProcessGroup,
    observer: &mut dyn Observer,
) -> Result<AttentionKernels> {
    if config.compute.attention != AttentionKernels::Auto {
        return Ok(config.compute.attention);
    }
    let driver = match config.compute.devices.backend() {
        Backend::Cpu => None,
        Backend::Cuda => gpus::driver(config, group.rank())?,
    };
    let has_both = config.compute.compute_type() == DType::Bf16
        && cuda::has_wgmma(decoder.attention.head_dim)
        && driver.as_ref().is_some_and(|driver| driver.properties().capability == cuda::WGMMA);
    let mut missing = [u8::from(!has_both)];
    if group.size() > 1 {
        group.all_reduce(&mut missing, Reduction::Max)?;
    }
    let Some(driver) = driver.filter(|_| missing == [0]) else { return Ok(AttentionKernels::Mma) };
    let mut takes_groups = [0u8];
    if group.rank() == 0 {
        let kernels = match recorded {
            Some(recorded) => recorded,
            None => timed(&driver, decoder, &outline.survey(config)?.typical.forest, observer)?,
        };
        takes_groups[0] = u8::from(kernels == AttentionKernels::Wgmma);
    }
    if group.size() > 1 {
        group.all_reduce(&mut takes_groups, Reduction::Max)?;
    }
    Ok(if takes_groups == [1] { AttentionKernels::Wgmma } else { AttentionKernels::Mma })
}

/// Chooses the kernels of a batch, by timing where no choice is kept on disk.
fn timed(
    driver: &Drivers,
    decoder: &DecoderSpec,
    forest: &Forest,
    observer: &mut dyn Observer,
) -> Result<AttentionKernels> {
    let layers = layers(decoder);
    let key = key(&layers, forest);
    if let Some(kept) = driver.kept(&key).and_then(kernels_of) {
        return Ok(kept);
    }
    let [warps, groups] =
        [false, true].map(|wgmma| measure(driver, Options { wgmma, ..Options::default() }, &layers, forest));
    let (warps, groups) = (warps?, groups?);
    let difference = difference(&warps.results, &groups.results);
    if difference.is_nan() || difference > TOLERANCE {
        observer.event(&Event::Warning(&format!(
            "compute.attention = \"auto\": attention by warpgroups differs from that by warps by {difference:.3} of its norm on \
             this GPU, where {TOLERANCE} is allowed, so the run takes warps; please report this"
        )));
        return Ok(AttentionKernels::Mma);
    }
    let is_faster = groups.seconds <= MARGIN * warps.seconds;
    let fastest = if is_faster { AttentionKernels::Wgmma } else { AttentionKernels::Mma };
    tracing::info!(
        "attention of a typical micro-batch, forward and backward: {:.3} ms by warps, {:.3} ms by warpgroups",
        warps.seconds * 1e3,
        groups.seconds * 1e3
    );
    let kept = driver.keep(&MatmulChoice { shape: key, algorithm: algorithm_of(fastest) });
    Ok(kept.and_then(kernels_of).unwrap_or_else(|| {
        observer.event(&Event::Warning(
            "compute.attention = \"auto\": the cache folder of kernels cannot be written, so the next run could not repeat a \
             choice; attention multiplies by warps. TANDEM_CACHE=/a/folder names another folder",
        ));
        AttentionKernels::Mma
    }))
}

/// Kinds of attention in a model, and the blocks of each.
fn layers(decoder: &DecoderSpec) -> Vec<(AttentionShape, usize)> {
    let is_linear =
        |layer: usize| decoder.linear_attention.as_ref().is_some_and(|linear| linear.blocks[layer]);
    let mut found: Vec<(AttentionShape, usize)> = Vec::new();
    for layer in (0..decoder.attention.windows.len()).filter(|&layer| !is_linear(layer)) {
        let shape = decoder.attention.shape(layer);
        match found.iter_mut().find(|(known, _)| known.window == shape.window) {
            Some((_, count)) => *count += 1,
            None => found.push((shape, 1)),
        }
    }
    found
}

/// Name under which a choice is kept: equal for batches that differ little.
fn key(layers: &[(AttentionShape, usize)], forest: &Forest) -> String {
    use std::fmt::Write;
    let tokens = forest.num_tokens();
    let mut key = format!("attention of {} tokens", rounded(tokens));
    for (shape, count) in layers {
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let keys = (shape.pairs(forest, 0) / (shape.heads * tokens.max(1)) as f64).round() as usize;
        write!(key, ", {count} of {heads}/{kv_heads}x{head_dim} with {} keys", rounded(keys.max(1)))
            .expect("a string takes all");
    }
    key
}

/// Time and results of the kernels of one kind.
struct Measured {
    /// Seconds of a forward and a backward pass of all blocks.
    seconds: f64,
    results: Vec<Vec<f32>>,
}

fn measure(
    driver: &Drivers,
    options: Options,
    layers: &[(AttentionShape, usize)],
    forest: &Forest,
) -> Result<Measured> {
    let device = Device::cuda(driver.clone(), MEMORY, options)?;
    let mut measured = Measured { seconds: 0.0, results: Vec::new() };
    for &(shape, count) in layers {
        let mut case = AttentionCase::new(&device, shape, DType::Bf16, forest.clone())?;
        measured.seconds += count as f64 * case.seconds(PATIENCE)?;
        measured.results.extend(case.results()?);
    }
    Ok(measured)
}

/// Largest norm of a difference, as a part of the norm.
fn difference(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let of = |(expected, found): (&Vec<f32>, &Vec<f32>)| {
        let differences = expected.iter().zip(found).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let whole = norm(&mut expected.iter().copied().map(f64::from));
        norm(&mut differences.into_iter()) / whole
    };
    // `f64::max` would pass over a NaN.
    expected.iter().zip(found).map(of).fold(0.0, |most, part| if part <= most { most } else { part })
}

/// The choice as the cache of algorithms keeps it.
fn algorithm_of(kernels: AttentionKernels) -> Algorithm {
    Algorithm([u64::from(kernels == AttentionKernels::Wgmma); 8])
}

fn kernels_of(algorithm: Algorithm) -> Option<AttentionKernels> {
    [AttentionKernels::Mma, AttentionKernels::Wgmma]
        .into_iter()
        .find(|&kernels| algorithm_of(kernels) == algorithm)
}
