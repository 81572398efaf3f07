//! `[compute]`: where and in which arithmetic.

use std::path::PathBuf;

use tandem_kernels::{Backend, DType, Format};

use super::Method;
use super::error::ConfigError;
use super::reader::{Entry, Section};
use super::types::{Offload, Sharding, SumForm};
use crate::size;

/// Ranks in one process: beyond any machine, and few enough that a slip of the finger starts no million threads.
const MAX_RANKS: usize = 256;

/// Copies of what is divided; as many as there may be processes.
const MAX_REPLICAS: u64 = 1 << 20;

/// Devices and arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeConfig {
    /// Which devices.
    pub devices: Devices,
    /// Compute type; masters are f32. `None` (written "auto") is bf16 where the device multiplies it natively, else f32.
    pub dtype: Option<DType>,
    /// Whether f32 products on a GPU may round their factors to 10 bits (TF32).
    pub tf32: bool,
    /// How frozen matrices are kept; `None` (written "auto") is in the compute type.
    pub format: Option<Format>,
    /// Threads per rank; `None` (written 0) for every core, divided among the ranks. The number never changes a result.
    pub threads: Option<usize>,
    /// How gradients are added up over micro-batches and ranks.
    pub reduction: SumForm,
    /// What is divided among the ranks.
    pub sharding: Sharding,
    /// How often what is divided is there; 1: once among all ranks.
    pub replicate: usize,
    /// Neighbouring ranks that hold one model in slices; 1 splits nothing.
    pub tensor: usize,
    /// Times as many ranks hold one model in stages, front to back; 1 divides no layers.
    pub pipeline: usize,
    /// What backward recomputes.
    pub checkpointing: Checkpointing,
    /// The most memory that each rank may take on its device, in bytes; `None` for what there is.
    pub memory: Option<u64>,
    /// What carries numbers between ranks.
    pub engine: Engine,
    /// Seconds that a rank waits for another process before it gives it up.
    pub deadline: u64,
    /// What leaves the device.
    pub offload: Offload,
    /// The folder of what is offloaded to a disk; given exactly then.
    pub offload_dir: Option<PathBuf>,
    /// Whether the inputs of blocks wait in host memory for backward.
    pub offload_activations: bool,
}

/// What is kept from forward for backward, per block; the rest is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpointing {
    /// Keep everything.
    None,
    /// Drop what is cheap to recompute: outputs of norms and activations.
    Selective,
    /// Keep the blocks' inputs only.
    Block,
}

impl Checkpointing {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("none", Self::None), ("selective", Self::Selective), ("block", Self::Block)];
}

/// What carries numbers between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Memory between threads, Gloo between processes.
    Auto,
    /// Memory, between threads of one process.
    Threads,
    /// Gloo, between processes.
    Gloo,
    /// NCCL between processes, each with a GPU.
    Nccl,
}

impl Engine {
    pub(super) const NAMES: [(&str, Self); 4] =
        [("auto", Self::Auto), ("threads", Self::Threads), ("gloo", Self::Gloo), ("nccl", Self::Nccl)];
}

/// Which devices to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// The best there is.
    Auto,
    /// So many ranks on the CPU, as threads of this process.
    Cpu(usize),
    /// A rank on each of these GPUs.
    Cuda(GpuSet),
}

/// Some of a machine's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuSet {
    /// All that this process may use.
    All,
    /// Those whose bits are set.
    Of(u64),
}

impl GpuSet {
    /// Their numbers, if they are known.
    pub fn ordinals(self) -> Option<Vec<usize>> {
        match self {
            Self::All => None,
            Self::Of(bits) => Some((0..64).filter(|bit| bits >> bit & 1 == 1).collect()),
        }
    }
}

impl Devices {
    /// The name in the config.
    pub fn name(self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Cpu(1) => "cpu".to_owned(),
            Self::Cpu(ranks) => format!("cpu:{ranks}"),
            Self::Cuda(gpus) => match gpus.ordinals() {
                None => "cuda".to_owned(),
                Some(ordinals) => {
                    format!("cuda:{}", ordinals.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
                }
            },
        }
    }

    /// Ranks that the command starts.
    pub const fn num_ranks(self) -> usize {
        match self {
            Self::Auto | Self::Cuda(GpuSet::All) => 1,
            Self::Cpu(ranks) => ranks,
            Self::Cuda(GpuSet::Of(bits)) => bits.count_ones() as usize,
        }
    }

    /// What kind of device computes; "auto" is what the resolution of devices makes of it, and the processor until then.
    pub const fn backend(self) -> Backend {
        match self {
            Self::Auto | Self::Cpu(_) => Backend::Cpu,
            Self::Cuda(_) => Backend::Cuda,
        }
    }
}

pub(super) fn parse(
    mut section: Section,
    method: Method,
    adapts: bool,
) -> Result<ComputeConfig, ConfigError> {
    let devices = section.take("devices").map_or(Ok(Devices::Auto), |e| devices(&e))?;
    let checkpointing =
        section.take("checkpointing").map_or(Ok(Checkpointing::None), |e| e.one_of(&Checkpointing::NAMES))?;
    let (offload, offload_dir) = offload(&mut section)?;
    let dtype = section.take("dtype").map_or(Ok(None), |e| {
        e.one_of(&[("auto", None), ("f32", Some(DType::F32)), ("bf16", Some(DType::Bf16))])
    })?;
    let config = ComputeConfig {
        devices,
        dtype,
        tf32: section.take("tf32").map_or(Ok(false), |e| tf32(&e, dtype, devices))?,
        format: section.take("format").map_or(Ok(None), |e| format(&e, adapts))?,
        threads: section
            .take("threads")
            .map_or(Ok(0), |e| e.integer(0..=4096))
            .map(|n| (n != 0).then_some(n as usize))?,
        reduction: section.take("reduction").map_or(Ok(SumForm::Exact), |e| e.one_of(&SumForm::NAMES))?,
        sharding: section.take("sharding").map_or(Ok(Sharding::Ddp), |e| e.one_of(&Sharding::NAMES))?,
        replicate: section.take("replicate").map_or(Ok(1), |e| e.integer(1..=MAX_REPLICAS))? as usize,
        tensor: section.take("tensor").map_or(Ok(1), |e| tensor(&e, adapts))?,
        pipeline: section.take("pipeline").map_or(Ok(1), |e| pipeline(&e, method))?,
        checkpointing,
        memory: section.take("memory").map(|e| memory(&e)).transpose()?,
        engine: section.take("engine").map_or(Ok(Engine::Auto), |e| engine(&e, devices))?,
        deadline: section.take("deadline").map_or(Ok(1800), |e| e.integer(1..=1 << 24))?,
        offload,
        offload_dir,
        offload_activations: section
            .take("offload_activations")
            .map_or(Ok(false), |e| activations(&e, checkpointing))?,
    };
    section.finish()?;
    Ok(config)
}

/// What leaves the device, and the folder for it.
fn offload(section: &mut Section) -> Result<(Offload, Option<PathBuf>), ConfigError> {
    let offload = section.take("offload");
    let kind = offload.as_ref().map_or(Ok(Offload::None), |e| e.one_of(&Offload::NAMES))?;
    match (kind, section.take("offload_dir")) {
        (Offload::Nvme, Some(folder)) => Ok((kind, Some(folder.path()?))),
        (Offload::Nvme, None) => {
            Err(section
                .missing("offload_dir", "a folder on the disk that weights and states are offloaded to"))
        }
        (_, Some(folder)) => Err(folder.conflict(
            "it is for what is offloaded to a disk; set compute.offload to \"nvme\", or leave it out",
        )),
        (_, None) => Ok((kind, None)),
    }
}

/// Whether f32 products are rounded.
fn tf32(entry: &Entry, dtype: Option<DType>, devices: Devices) -> Result<bool, ConfigError> {
    let rounds = entry.boolean()?;
    if rounds && dtype != Some(DType::F32) {
        return Err(entry.conflict(
            "it is for products of f32; set compute.dtype to \"f32\", or leave this out: bf16 is faster still",
        ));
    }
    if rounds && matches!(devices, Devices::Cpu(_)) {
        return Err(
            entry.conflict("a processor has no TF32; name GPUs with compute.devices, or leave this out")
        );
    }
    Ok(rounds)
}

/// Whether the inputs of blocks leave the device.
fn activations(entry: &Entry, checkpointing: Checkpointing) -> Result<bool, ConfigError> {
    let offloads = entry.boolean()?;
    if offloads && checkpointing != Checkpointing::Block {
        return Err(entry.conflict(
            "only the inputs of blocks can wait in host memory; set compute.checkpointing to \"block\", which keeps nothing \
             else, or leave this out",
        ));
    }
    Ok(offloads)
}

/// How many stages a model is cut into.
fn pipeline(entry: &Entry, method: Method) -> Result<usize, ConfigError> {
    match entry.integer(1..=MAX_RANKS as u64)? {
        2.. if method == Method::Online => Err(entry.conflict(
            "a model in stages does not generate yet; divide it by compute.sharding or compute.tensor",
        )),
        stages => Ok(stages as usize),
    }
}

/// How many ranks hold the slices of a model.
fn tensor(entry: &Entry, adapts: bool) -> Result<usize, ConfigError> {
    match entry.integer(1..=MAX_RANKS as u64)? {
        2.. if adapts => Err(entry.conflict(
            "adapters of a model in slices are not there yet; divide it by compute.sharding or compute.pipeline",
        )),
        slices => Ok(slices as usize),
    }
}

/// How frozen matrices are kept; `adapts` if there are some.
fn format(entry: &Entry, adapts: bool) -> Result<Option<Format>, ConfigError> {
    let format = entry.one_of(
        &Format::ALL
            .map(|format| (format.name(), Some(format)))
            .into_iter()
            .chain([("auto", None)])
            .collect::<Vec<_>>(),
    )?;
    match format {
        Some(format @ (Format::Int8 | Format::Nf4)) if !adapts => Err(entry.conflict(format!(
            "full training changes every weight, and {format} is for weights that stay as they are; give an [adapter], or leave compute.format out"
        ))),
        format => Ok(format),
    }
}

fn engine(entry: &Entry, devices: Devices) -> Result<Engine, ConfigError> {
    match entry.one_of(&Engine::NAMES)? {
        Engine::Nccl if matches!(devices, Devices::Auto | Devices::Cuda(_)) => Ok(Engine::Nccl),
        engine @ (Engine::Gloo | Engine::Nccl) if devices.num_ranks() > 1 => Err(entry.conflict(format!(
            "devices = {:?} are threads, and {} is for ranks that are processes; give \"cpu\" and start them with `tandem launch`",
            devices.name(),
            if engine == Engine::Nccl { "NCCL" } else { "Gloo" },
        ))),
        engine => Ok(engine),
    }
}

fn memory(entry: &Entry) -> Result<u64, ConfigError> {
    size::parse(entry.string()?)
        .ok_or_else(|| entry.wrong("a size with its unit, for example \"24GiB\" or \"800MB\""))
}

fn devices(entry: &Entry) -> Result<Devices, ConfigError> {
    let text = entry.string()?;
    let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
    let ranks = rest.map(|rest| rest.split(',').map(str::parse::<usize>).collect::<Result<Vec<_>, _>>());
    match (kind, ranks) {
        ("auto", None) => Ok(Devices::Auto),
        ("cpu", None) => Ok(Devices::Cpu(1)),
        ("cpu", Some(Ok(n))) if n.len() == 1 && (1..=MAX_RANKS).contains(&n[0]) => Ok(Devices::Cpu(n[0])),
        ("cuda", None) => Ok(Devices::Cuda(GpuSet::All)),
        ("cuda", Some(Ok(ordinals))) => gpus(entry, &ordinals),
        _ => Err(entry.wrong("\"auto\", \"cpu\", \"cpu:4\", \"cuda\" or \"cuda:0,1\"")),
    }
}

fn gpus(entry: &Entry, ordinals: &[usize]) -> Result<Devices, ConfigError> {
    let mut bits = 0;
    for &ordinal in ordinals {
        let bit = 1u64.checked_shl(ordinal as u32).filter(|_| ordinal < 64);
        match bit {
            Some(bit) if bits & bit == 0 => bits |= bit,
            Some(_) => {
                return Err(
                    entry.conflict(format!("GPU {ordinal} is named twice, and a rank has one to itself"))
                );
            }
            None => return Err(entry.wrong("numbers of GPUs, which count from 0, below 64")),
        }
    }
    Ok(Devices::Cuda(GpuSet::Of(bits)))
}
