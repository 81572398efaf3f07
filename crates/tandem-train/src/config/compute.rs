//! `[compute]`: devices, arithmetic, and the division of work among ranks.

use std::path::PathBuf;

use tandem_kernels::{Backend, DType, Format};
use tandem_model::Fp8Matmul;
use toml::Value;

use super::error::Result;
use super::form::{self, Form, boolean, choice, custom, integer, path};
use super::keys::keys;
use super::reader::Entry;
use super::types::{AttentionKernels, Offload, Sharding, SumForm};
use crate::size;

/// Most ranks in one process: beyond any machine, and few enough that a typing error starts no
/// million threads.
const MAX_RANKS: usize = 256;

/// Most threads of all ranks of a process. Each takes four of the 65,530 areas of memory that Linux lets a process have.
const MAX_THREADS_OF_RANKS: usize = 8192;

keys! {
    /// Devices and arithmetic.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ComputeConfig(has_frozen: bool) {
        /// `"cpu"`; `"cpu:4"`: four ranks, each a thread with a device of its own
        /// ([ranks.md](ranks.md)); `"cuda"` or `"cuda:0,1"`: a rank on each of all GPUs or of these
        /// ([gpu.md](gpu.md)); `"auto"`: the GPUs if there are any, else the CPU.
        devices: Devices = devices().or(Devices::Auto).free(),
        /// Type of matmuls and activations. `"auto"`: bf16 where the device multiplies it faster
        /// than f32 (AMX; AVX-512 BF16 on AMD), else f32. Master weights and gradients are always
        /// f32.
        dtype: Option<DType> =
            choice([("auto", None), ("f32", Some(DType::F32)), ("bf16", Some(DType::Bf16))]).or(None),
        /// Let f32 matmuls on a GPU round their factors to 10 bits (TF32): faster than f32 and less
        /// precise. Only with `dtype = "f32"` on GPUs.
        tf32: bool = boolean().unless(|tf32| refuse_tf32(*tf32, dtype, devices)).or(false),
        /// Type of the residual stream on GPUs: the sums that blocks add to, their saved copies, and the
        /// gradient of each half's input. `"bf16"` halves the memory of saved block inputs, and rounds each
        /// sum as transformers does with a model of bf16. The stream's own gradient stays f32. Only with
        /// bf16 matmuls, and without `compute.pipeline`. See [gpu.md](gpu.md#residual).
        residual: DType = choice([("f32", DType::F32), ("bf16", DType::Bf16)])
            .unless(|residual| refuse_residual(*residual, dtype, devices))
            .or(DType::F32),
        /// Kernels of bf16 attention on GPUs. `"wgmma"`: they multiply by warpgroups, which GPUs of
        /// compute capability 9.0 (H100, H200) alone can do, for models with heads of 33 to 64 or of 97
        /// to 128 numbers. `"auto"`: both are timed before the first step where there are both, and the
        /// choice is kept with the run. See [gpu.md](gpu.md#attention).
        attention: AttentionKernels = choice(AttentionKernels::NAMES)
            .unless(|kernels| refuse_wgmma(*kernels, dtype, devices))
            .or(AttentionKernels::Mma),
        /// On a GPU: time the algorithms that cuBLASLt offers for the run's matmuls before the first
        /// step, and take the fastest of each shape. The choice is kept on disk for later runs, and with
        /// the run, which keeps it when it resumes. `false`: the library's first choice. See
        /// [gpu.md](gpu.md#choice-of-algorithms).
        matmul_autotune: bool = boolean().or(true).free(),
        /// Format of frozen matrices: those under an adapter and those of a reference model.
        /// `"int8"`: a scale for each row. `"fp8"`: E4M3, with a scale for each row. `"nf4"`: 4 bits, as
        /// QLoRA. `"auto"`: that of the folder if it is quantised and an adapter trains, or it is a
        /// teacher's, else `dtype`. Token table and head are kept in bf16 or more, norms and biases in f32.
        /// Full training has no frozen weights for `"int8"`, `"fp8"` and `"nf4"` but a teacher's. See
        /// [formats.md](formats.md).
        format: Option<Format> =
            form::format().unless(|format| refuse_format(*format, has_frozen)).or(None),
        /// Multiply frozen matrices of `format = "fp8"` as FP8 in forward passes on GPUs: the stored codes,
        /// by activations of which each row is rounded to E4M3 under a scale of its own. Backward reads the
        /// matrices in the compute type, unless `fp8_backward`. Only on GPUs of compute capability 8.9 or
        /// later, with `format = "fp8"`, and without `tensor` and `sum_blocks`. It has not run on a GPU: see
        /// [formats.md](formats.md#fp8-products).
        fp8_matmul: bool = boolean()
            .unless(|fp8| fp8.then(|| refuse_fp8_matmul(format, devices)).flatten())
            .or(false),
        /// With `fp8_matmul`: compute the gradients of the inputs of these matrices as FP8 products too.
        /// Each row of an output's gradient is rounded to E4M3 under a scale of its own. The gradients of
        /// an adapter's matrices are products of the compute type. It has not run on a GPU.
        fp8_backward: bool = boolean()
            .unless(|backward| (*backward && !fp8_matmul).then(|| {
                "it is for the backward pass of FP8 products; set compute.fp8_matmul = true, or remove this".to_owned()
            }))
            .or(false),
        /// Threads of each rank; 0 divides all cores among the ranks. The number never changes a
        /// result. On a GPU: threads that update the file of `offload = "nvme"`.
        threads: Option<usize> =
            integer(0..=4096).zero_is_none().unless(|threads| refuse_threads(*threads, devices)).or(None).free(),
        /// Sum of gradients over micro-batches and ranks. `"exact"`: in fixed point, with the same
        /// bits on any number of ranks. `"fast"`: in f32, with half the memory and traffic.
        reduction: SumForm = choice(SumForm::NAMES).or(SumForm::Exact),
        /// Type in which gradients travel between ranks. `"bf16"` halves the traffic of
        /// `reduction = "fast"` once more, and rounds every sum of two ranks to 8 bits. Fixed-point
        /// sums travel as they are.
        reduce_dtype: DType = choice([("f32", DType::F32), ("bf16", DType::Bf16)])
            .unless(|dtype: &DType| (*dtype != DType::F32 && reduction == SumForm::Exact).then(|| {
                "fixed-point sums travel as they are; set compute.reduction to \"fast\", or remove this".to_owned()
            }))
            .or(DType::F32),
        /// Sums over heads, channels and vocabulary in the blocks and the order that give the same
        /// bits for `tensor` of 1, 2, 4 and 8. By default on CPUs. It costs some percent of a step of
        /// models with an even number of key/value heads, and a quarter on a GPU, whose library promises
        /// no such bits: see [ranks.md](ranks.md#the-same-bits-with-slices).
        sum_blocks: Option<bool> = boolean()
            .unless(|sums| (*sums && fp8_matmul).then(|| {
                "FP8 products have no sums in blocks; remove compute.fp8_matmul, or this".to_owned()
            }))
            .optional(),
        /// State divided among the ranks. `"ddp"`: none. `"zero1"`: optimiser states. `"zero2"`:
        /// these and gradients. `"zero3"`: these and weights. The numbers are the same.
        sharding: Sharding = choice(Sharding::NAMES).or(Sharding::Ddp).free(),
        /// With `"zero1"` to `"zero3"`: number of groups of neighbouring ranks that each hold
        /// everything once. Gradients are also summed over the groups. The number of ranks must be
        /// a multiple of it.
        replicate: usize = integer(1..=1 << 20).or(1).free(),
        /// Tensor parallelism: neighbouring ranks that split heads, feed-forward channels and
        /// vocabulary of one model, and between these its tokens. It must divide the number of
        /// ranks and the model's key/value heads. 2, 4 and 8 give the bits of one rank (with
        /// `reduction = "exact"`, `sum_blocks` and states in f32 or bf16, on CPUs); other numbers give
        /// loss and gradient norm within 1e-5: see [ranks.md](ranks.md#slices-of-a-model).
        tensor: usize = integer(1..=MAX_RANKS as u64)
            .unless(|ranks| (*ranks > 1 && fp8_matmul).then(|| {
                "a shard has a part of a product's sums, which FP8 products have not; divide the model with \
                 compute.sharding or compute.pipeline, or remove compute.fp8_matmul".to_owned()
            }))
            .or(1),
        /// Pipeline parallelism: stages that hold the layers of one model, front to back. A stage is
        /// one rank, or `tensor` ranks. The number of ranks must be a multiple of `tensor` ×
        /// `pipeline`; the model needs a block for each stage. The numbers are those of one stage,
        /// bit for bit. With m micro-batches on a data rank the stages idle (p − 1) / (m + p − 1)
        /// of the time: see [ranks.md](ranks.md#layers-over-ranks).
        pipeline: usize = integer(1..=MAX_RANKS as u64)
            .unless(|stages| (*stages > 1 && residual != DType::F32).then(|| {
                "stages exchange a residual stream of f32; remove compute.residual, or this".to_owned()
            }))
            .or(1)
            .free(),
        /// Activations recomputed in backward to save memory: `"none"`, `"selective"` (norms and
        /// activation functions) or `"block"` (everything but each block's input). The bits are the
        /// same, but that on a GPU the last bits of the head's sums may differ from those of `"none"`.
        checkpointing: Checkpointing = choice(Checkpointing::NAMES).or(Checkpointing::None).free(),
        /// Engine of the collectives. `"threads"`: memory, between threads of one process. `"tcp"`:
        /// TCP and shared memory, between processes ([ranks.md](ranks.md#tcp)). `"mpi"`: the
        /// launcher's MPI, between processes ([ranks.md](ranks.md#mpi)). `"nccl"`: NCCL, between
        /// processes with an NVIDIA GPU each; not yet run on a GPU ([ranks.md](ranks.md#nccl)).
        /// `"auto"`: threads; between processes MPI if an MPI launcher started them, else TCP.
        engine: Engine = choice(Engine::NAMES)
            .unless(|engine| refuse_engine(*engine, devices))
            .or(Engine::Auto)
            .free(),
        /// Time that a rank waits for another process before it gives up. It must be longer than
        /// anything one rank does alone, such as tokenising. A process without a heartbeat is given
        /// up after a minute, if that is less.
        deadline: u64 = integer(1..=1 << 24).unit("seconds").or(1800).free(),
        /// Time that a rank waits before the run for the others to start. Meanwhile it says whom it
        /// waits for, after 5 seconds and then every 30.
        meeting_deadline: u64 = integer(1..=1 << 24).unit("seconds").or(600).free(),
        /// State kept outside the device's memory. `"host"`: weights, optimiser states and gradient
        /// sums in host memory. `"nvme"`: weights and optimiser states in a file in `offload_dir`,
        /// gradient sums in host memory. Each layer is loaded to the device when it runs. The
        /// numbers are the same: see [offload.md](offload.md), also for what differs on GPUs.
        offload: Offload = choice(Offload::NAMES).or(Offload::None).free(),
        /// Keep the inputs of blocks in host memory between forward and backward; on GPUs the
        /// transfers overlap with computation. Only with `checkpointing = "block"`.
        offload_activations: bool = boolean()
            .unless(|offloads| (*offloads && checkpointing != Checkpointing::Block).then(|| {
                "only the inputs of blocks can be offloaded; set compute.checkpointing to \"block\", which \
                 keeps nothing else, or remove this".to_owned()
            }))
            .or(false)
            .free(),
        /// With `offload = "nvme"`: a folder on a disk of each machine. The file is unlinked when
        /// the run begins, so nothing remains however the run ends.
        offload_dir: Option<PathBuf> = path()
            .optional()
            .required_if(
                offload == Offload::Nvme,
                "a folder on the disk that weights and states are offloaded to",
            )
            .only(
                offload == Offload::Nvme,
                "it is only for offloading to a disk; set compute.offload to \"nvme\", or remove this",
            )
            .free(),
        /// Most memory that each rank may use on its device, for example `"24GiB"`; also `--memory
        /// 24GiB`. A run whose plan needs more is refused before anything is loaded, and the arena
        /// of an accepted run cannot exceed it: see [plan.md](plan.md#a-cap).
        memory: Option<u64> = memory().optional().free(),
    }
}

/// Activations kept from forward for backward, per block; the rest is recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpointing {
    /// Keep everything.
    None,
    /// Drop what is cheap to recompute: outputs of norms and activation functions.
    Selective,
    /// Keep the blocks' inputs only.
    Block,
}

impl Checkpointing {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("none", Self::None), ("selective", Self::Selective), ("block", Self::Block)];
}

/// Engine of the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Memory between threads; between processes the launcher's MPI, else TCP.
    Auto,
    /// Memory, between threads of one process.
    Threads,
    /// TCP and shared memory, between processes.
    Tcp,
    /// The launcher's MPI, between processes.
    Mpi,
    /// NCCL, between processes with a GPU each.
    Nccl,
}

impl Engine {
    const NAMES: [(&str, Self); 5] = [
        ("auto", Self::Auto),
        ("threads", Self::Threads),
        ("tcp", Self::Tcp),
        ("mpi", Self::Mpi),
        ("nccl", Self::Nccl),
    ];
}

/// Devices of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// The best devices of the machine.
    Auto,
    /// This many ranks on the CPU, as threads of this process.
    Cpu(usize),
    /// A rank on each of these GPUs.
    Cuda(GpuSet),
}

/// A set of a machine's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuSet {
    /// All that this process may use.
    All,
    /// GPUs by their numbers, as a bit mask.
    Of(u64),
}

impl GpuSet {
    /// Returns the GPUs' numbers, if they are known.
    pub fn ordinals(self) -> Option<Vec<usize>> {
        match self {
            Self::All => None,
            Self::Of(bits) => Some((0..64).filter(|bit| bits >> bit & 1 == 1).collect()),
        }
    }
}

impl Devices {
    /// Name in the config.
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

    /// Number of ranks that the command starts.
    pub const fn num_ranks(self) -> usize {
        match self {
            Self::Auto | Self::Cuda(GpuSet::All) => 1,
            Self::Cpu(ranks) => ranks,
            Self::Cuda(GpuSet::Of(bits)) => bits.count_ones() as usize,
        }
    }

    /// Kind of device. "auto" is the CPU until [`crate::placement::gpus::resolve`] has resolved it.
    pub const fn backend(self) -> Backend {
        match self {
            Self::Auto | Self::Cpu(_) => Backend::Cpu,
            Self::Cuda(_) => Backend::Cuda,
        }
    }
}

fn devices<'a>() -> Form<'a, Devices> {
    let read = |entry: Entry| {
        let text = entry.string()?;
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        let numbers =
            rest.map(|rest| rest.split(',').map(str::parse::<usize>).collect::<Result<Vec<_>, _>>());
        match (kind, numbers) {
            ("auto", None) => Ok(Devices::Auto),
            ("cpu", None) => Ok(Devices::Cpu(1)),
            ("cpu", Some(Ok(n))) if n.len() == 1 && (1..=MAX_RANKS).contains(&n[0]) => Ok(Devices::Cpu(n[0])),
            ("cpu", Some(Ok(n))) if n.len() == 1 => {
                Err(entry.wrong(format!("1 to {MAX_RANKS} ranks, as \"cpu:4\"")))
            }
            ("cuda", None) => Ok(Devices::Cuda(GpuSet::All)),
            ("cuda", Some(Ok(ordinals))) => gpus(&entry, &ordinals),
            _ => Err(entry.wrong("\"auto\", \"cpu\", \"cpu:4\", \"cuda\" or \"cuda:0,1\"")),
        }
    };
    custom("string", read, |devices: &Devices| Value::from(devices.name()))
}

fn gpus(entry: &Entry, ordinals: &[usize]) -> Result<Devices> {
    let mut bits = 0;
    for &ordinal in ordinals {
        let bit = 1u64.checked_shl(ordinal as u32).filter(|_| ordinal < 64);
        match bit {
            Some(bit) if bits & bit == 0 => bits |= bit,
            Some(_) => {
                return Err(entry.conflict(format!("GPU {ordinal} is named twice; a GPU serves one rank")));
            }
            None => return Err(entry.wrong("numbers of GPUs, which count from 0, below 64")),
        }
    }
    Ok(Devices::Cuda(GpuSet::Of(bits)))
}

fn memory<'a>() -> Form<'a, u64> {
    let read = |entry: Entry| {
        let bytes = entry.string().ok().and_then(size::parse);
        bytes.ok_or_else(|| entry.wrong("a size with its unit, for example \"24GiB\" or \"800MB\""))
    };
    custom("string", read, |bytes: &u64| Value::from(size::exact(*bytes)))
}

/// Refuses threads that the system would refuse a process, which ends it.
fn refuse_threads(threads: Option<usize>, devices: Devices) -> Option<String> {
    let ranks = devices.num_ranks();
    let all = threads? * ranks;
    (all > MAX_THREADS_OF_RANKS).then(|| {
        format!("{ranks} ranks would have {all} threads in one process, expected at most {MAX_THREADS_OF_RANKS}; lower it, or leave it out")
    })
}

fn refuse_tf32(tf32: bool, dtype: Option<DType>, devices: Devices) -> Option<String> {
    let reason = match (dtype, devices) {
        _ if !tf32 => return None,
        (Some(DType::F32), Devices::Cpu(_)) => {
            "a CPU has no TF32; name GPUs with compute.devices, or remove this"
        }
        (Some(DType::F32), _) => return None,
        _ => "it is only for f32 matmuls; set compute.dtype to \"f32\", or remove this: bf16 is faster still",
    };
    Some(reason.to_owned())
}

fn refuse_residual(residual: DType, dtype: Option<DType>, devices: Devices) -> Option<String> {
    let reason = match (residual, dtype, devices) {
        (DType::F32, ..) => return None,
        (_, _, Devices::Cpu(_)) => {
            "a CPU adds the residual stream in f32; name GPUs with compute.devices, or remove this"
        }
        (_, Some(DType::F32), _) => {
            "matmuls of f32 add to a stream of f32; set compute.dtype to \"bf16\", or remove this"
        }
        _ => return None,
    };
    Some(reason.to_owned())
}

fn refuse_wgmma(kernels: AttentionKernels, dtype: Option<DType>, devices: Devices) -> Option<String> {
    let reason = match (kernels, dtype, devices) {
        (AttentionKernels::Mma | AttentionKernels::Auto, ..) => return None,
        (_, _, Devices::Cpu(_)) => "a CPU has no warpgroups; name GPUs with compute.devices, or remove this",
        (_, Some(DType::F32), _) => {
            "it is for attention of bf16; set compute.dtype to \"bf16\", or remove this"
        }
        _ => return None,
    };
    Some(reason.to_owned())
}

impl ComputeConfig {
    /// Returns which products multiply frozen FP8 matrices as they are stored.
    pub(crate) fn fp8_products(&self) -> Fp8Matmul {
        match (self.fp8_matmul, self.fp8_backward) {
            (false, _) => Fp8Matmul::None,
            (true, false) => Fp8Matmul::Forward,
            (true, true) => Fp8Matmul::ForwardAndBackward,
        }
    }
}

fn refuse_fp8_matmul(format: Option<Format>, devices: Devices) -> Option<String> {
    let reason = match (devices, format) {
        (Devices::Cpu(_), _) => "a CPU multiplies no FP8; name GPUs with compute.devices, or remove this",
        (_, Some(Format::Fp8)) => return None,
        _ => "it is for frozen matrices of FP8; set compute.format to \"fp8\", or remove this",
    };
    Some(reason.to_owned())
}

fn refuse_format(format: Option<Format>, has_frozen: bool) -> Option<String> {
    let format = format.filter(|format| format.dtype().is_none() && !has_frozen)?;
    Some(format!(
        "full training changes every weight, and {format} is for frozen weights; add an [adapter] table, or \
         remove compute.format"
    ))
}

fn refuse_engine(engine: Engine, devices: Devices) -> Option<String> {
    let name = match (engine, devices) {
        (Engine::Nccl, Devices::Cpu(2..)) => "NCCL",
        (Engine::Tcp, _) if devices.num_ranks() > 1 => "TCP",
        (Engine::Mpi, _) if devices.num_ranks() > 1 => "MPI",
        _ => return None,
    };
    let launcher = if engine == Engine::Mpi { "mpirun, mpiexec or srun" } else { "`tandem launch`" };
    Some(format!(
        "the ranks of devices = {:?} are threads, but {name} connects processes; set \"cpu\" and start the \
         ranks with {launcher}",
        devices.name()
    ))
}
