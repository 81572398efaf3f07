//! Devices: a CPU, a GPU, or a dry run.

pub mod meta;
pub mod profile;
pub(crate) mod work;

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use crate::cpu::{Cpu, Isa};
use crate::cuda::driver::{Algorithm, Drivers, Matmul, MatmulChoice};
use crate::cuda::listing::Lister;
use crate::cuda::{Cuda, MatmulList, Options, RepeatKey, StreamEvent};
use crate::device::meta::{Ledger, MetaBlock};
use crate::device::profile::{Profile, Timed};
use crate::memory::arena::Arena;
use crate::memory::memory_use::{MemoryKind, MemoryUse};
use crate::memory::tensor::{Extent, Storage, Tensor};
use crate::numerics::dtype::DType;
use crate::{KernelError, OpCost, Result};

/// A compute device. Cloning is cheap and refers to the same device.
#[derive(Clone)]
pub enum Device {
    /// The host's CPU.
    Cpu(Arc<Cpu>),
    /// A GPU of NVIDIA's.
    Cuda(Arc<Cuda>),
    /// Computes nothing; records allocations and operations.
    Meta(Arc<Ledger>),
}

/// Kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// The host's CPU.
    #[default]
    Cpu,
    /// A GPU of NVIDIA's.
    Cuda,
}

/// Device that a kernel runs on.
#[derive(Clone, Copy)]
pub(crate) enum On<'a> {
    Cpu(&'a Cpu),
    Cuda(&'a Cuda),
}

/// Selects the kernel of the device. The CUDA kernel is put into a stream, which may fail.
macro_rules! on {
    ($cpu:ident => $on_cpu:expr, $cuda:ident => $on_cuda:expr $(,)?) => {
        |on: $crate::device::On<'_>| match on {
            $crate::device::On::Cpu($cpu) => {
                let done = $on_cpu;
                Ok(done)
            }
            $crate::device::On::Cuda($cuda) => $on_cuda,
        }
    };
}
pub(crate) use on;

/// Launches the kernel of the device; nothing is returned.
macro_rules! launch {
    ($device:expr, $work:expr, { $($kernels:tt)* }) => {
        $device.launch($work, $crate::device::on!($($kernels)*)).map(drop)
    };
}
pub(crate) use launch;

/// [`launch!`] for kernels that call GEMMs.
macro_rules! launch_matmuls {
    ($device:expr, $work:expr, { $($kernels:tt)* }) => {
        $device.launch_matmuls($work, $crate::device::on!($($kernels)*)).map(drop)
    };
}
pub(crate) use launch_matmuls;

impl Device {
    /// Creates a CPU device with `threads` threads and an arena of at most `capacity` bytes.
    ///
    /// # Errors
    /// If the operating system refuses the threads or the address space, or `TANDEM_ISA` asks for
    /// instructions that the CPU lacks.
    pub fn cpu(threads: usize, capacity: usize) -> Result<Self> {
        Self::cpu_with_isa(threads, capacity, Isa::detect()?)
    }

    /// Creates a CPU device as [`Self::cpu`], at a given level of vector instructions.
    pub fn cpu_with_isa(threads: usize, capacity: usize, isa: Isa) -> Result<Self> {
        Ok(Self::Cpu(Arc::new(Cpu::new(threads, Arena::new(capacity)?, isa.require()?)?)))
    }

    /// Returns a name for everything besides the operands that the bits of results depend on:
    /// instructions and kernel revision. Cached numbers that must match to the bit are stored under
    /// it.
    pub fn arithmetic(&self) -> String {
        /// Raised with every kernel change that alters rounding or the order of a sum.
        const REVISION: u32 = 10;
        match self {
            Self::Cpu(cpu) => format!("{} {REVISION}", cpu.isa().name()),
            Self::Cuda(cuda) => format!("{} {REVISION}", cuda.arithmetic()),
            Self::Meta(_) => "none".to_owned(),
        }
    }

    /// Creates a GPU device on `driver` with an arena of at most `capacity` bytes.
    pub fn cuda(driver: Drivers, capacity: usize, options: Options) -> Result<Self> {
        Ok(Self::Cuda(Arc::new(Cuda::new(driver, capacity, options)?)))
    }

    /// Opens the NVIDIA GPU `ordinal` of this process, with an arena of at most `capacity` bytes.
    pub fn open_cuda(ordinal: usize, capacity: usize, options: Options) -> Result<Self> {
        Self::cuda(crate::cuda::open(ordinal)?, capacity, options)
    }

    /// Creates a dry-run device that stands for a CPU.
    pub fn meta() -> Self {
        Self::meta_of(Backend::Cpu)
    }

    /// Creates a dry-run device that stands for `backend`.
    pub fn meta_of(backend: Backend) -> Self {
        Self::Meta(Arc::new(Ledger::new(backend)))
    }

    /// Creates a dry-run device that stands for a GPU, and the list of the GEMMs that its operations
    /// would put into a stream.
    pub fn meta_listing_matmuls(options: Options) -> Result<(Self, MatmulList)> {
        let (lister, list) = Lister::new(options)?;
        Ok((Self::Meta(Arc::new(Ledger::listing(lister))), list))
    }

    /// Returns the kind of device; for a dry run, the kind it stands for.
    pub fn backend(&self) -> Backend {
        match self {
            Self::Cpu(_) => Backend::Cpu,
            Self::Cuda(_) => Backend::Cuda,
            Self::Meta(ledger) => ledger.backend(),
        }
    }

    /// Creates a second memory of the same device, of at most `capacity` bytes; on a GPU it is
    /// pinned host memory.
    pub fn with_memory(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.over(Arena::new(capacity)?))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.on_host(capacity)?)),
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// Creates a device for concurrent work: a second memory of at most `capacity` bytes and, on a
    /// GPU, a second stream (see [`Device::mark`]). On a CPU both share the threads in turn. It is
    /// not profiled.
    pub fn with_own_stream_and_arena(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.untimed_over(Arena::new(capacity)?))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.beside_in(capacity)?)),
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// Creates a memory of `capacity` bytes in an empty file. The disk space is allocated now, so
    /// no later write can fail for lack of it. The file may be unlinked and closed; its space is
    /// freed with the last tensor.
    pub fn in_file(&self, file: &File, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.over(Arena::in_file(file, capacity)?))),
            Self::Cuda(_) => {
                return Err(KernelError::invalid("file", "a GPU cannot compute with memory in a file"));
            }
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// Shares the memory with a second thread that computes alone and never waits for this device's
    /// threads. On a GPU it has a second stream; [`Device::mark`] orders the two.
    pub fn on_one_thread(&self) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.alone()?)),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.with_own_stream()?)),
            Self::Meta(ledger) => Self::Meta(ledger.clone()),
        })
    }

    /// Shares the device and times every operation in `profile`; devices derived from it are timed
    /// too. A dry run ignores it.
    #[must_use]
    pub fn profiled(&self, profile: &Arc<Profile>) -> Self {
        match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.profiled(profile.clone()))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.profiled(profile.clone()))),
            Self::Meta(ledger) => Self::Meta(ledger.clone()),
        }
    }

    /// Returns the profile that times this device's operations.
    pub fn profile(&self) -> Option<&Arc<Profile>> {
        match self {
            Self::Cpu(cpu) => cpu.profile.as_ref(),
            Self::Cuda(cuda) => cuda.profile.as_ref(),
            Self::Meta(_) => None,
        }
    }

    /// Runs an operation's kernel and returns its result. A dry run records the cost instead and
    /// returns `None`. On a GPU the kernel is put into the stream; while a profile records, it is waited
    /// for.
    #[inline]
    pub(crate) fn launch<T>(&self, work: OpCost, kernel: impl FnOnce(On) -> Result<T>) -> Result<Option<T>> {
        self.launch_counting(|| work, kernel)
    }

    /// [`Self::launch`] with a cost that is counted only when needed.
    #[inline]
    pub(crate) fn launch_counting<T>(
        &self,
        work: impl FnOnce() -> OpCost,
        kernel: impl FnOnce(On) -> Result<T>,
    ) -> Result<Option<T>> {
        let (on, profile) = match self {
            Self::Cpu(cpu) => (On::Cpu(cpu), &cpu.profile),
            Self::Cuda(cuda) => (On::Cuda(cuda), &cuda.profile),
            Self::Meta(ledger) => {
                ledger.record(&work());
                return Ok(None);
            }
        };
        let timed = match profile {
            Some(profile) if profile.is_on() => Some(Timed::begin(profile, work(), on)?),
            _ => None,
        };
        // One call: a kernel is compiled as often as it is called here.
        let result = kernel(on)?;
        if let Some(timed) = timed {
            timed.end()?;
        }
        Ok(Some(result))
    }

    /// Runs an operation as [`Self::launch`] whose kernel calls GEMMs. A dry run lists them, if asked to.
    pub(crate) fn launch_matmuls<T>(
        &self,
        work: OpCost,
        kernel: impl FnOnce(On) -> Result<T>,
    ) -> Result<Option<T>> {
        let Self::Meta(ledger) = self else { return self.launch(work, kernel) };
        ledger.record(&work);
        if let Some(lister) = ledger.lister() {
            kernel(On::Cuda(lister))?;
        }
        Ok(None)
    }

    /// Runs `enqueue`, which runs operations of this device alone and should not wait for them. What it puts
    /// into a GPU's stream is a CUDA graph from the second time on that `key` occurs, launched at once if it is
    /// the same as the last time; tables that operations read may differ. The key need not tell all that
    /// may change: work that differs is captured anew. While a profile records there are no graphs.
    ///
    /// # Errors
    /// If `enqueue` fails, whose work then is not done, or the GPU does.
    pub fn repeated<T, E: From<KernelError>>(
        &self,
        key: RepeatKey,
        enqueue: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        /// Drops the repetition unless it has ended, so that later work is not taken for its.
        struct Open<'a>(&'a Cuda);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.drop_repeated();
            }
        }
        let Self::Cuda(cuda) = self else { return enqueue() };
        let is_profiled = cuda.profile.as_ref().is_some_and(|profile| profile.is_on());
        if is_profiled || !cuda.begin_repeated(key)? {
            return enqueue();
        }
        let open = Open(cuda);
        let result = enqueue()?;
        cuda.end_repeated()?;
        drop(open);
        Ok(result)
    }

    /// Returns the number of CUDA graphs that [`Device::repeated`] has launched.
    pub fn num_graph_launches(&self) -> u64 {
        if let Self::Cuda(cuda) = self { cuda.num_graph_launches() } else { 0 }
    }

    /// Allocates a matrix of unspecified content.
    pub fn alloc(&self, kind: MemoryKind, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.alloc_in(kind, Extent::exact(rows), Extent::exact(cols), dtype)
    }

    /// Allocates a matrix of unspecified content, with room for as many rows and columns as the
    /// extents say.
    pub fn alloc_in(&self, kind: MemoryKind, rows: Extent, cols: Extent, dtype: DType) -> Result<Tensor> {
        let bytes = rows.room() * cols.room() * dtype.size();
        let storage = match self {
            Self::Cpu(cpu) => Storage::Block(cpu.arena.allocate(kind, bytes)?),
            Self::Cuda(cuda) => Storage::Block(cuda.arena.allocate(kind, bytes)?),
            Self::Meta(ledger) => Storage::Meta(MetaBlock::new(ledger, kind, bytes)),
        };
        Ok(Tensor::new(storage, rows, cols.len(), dtype))
    }

    /// Allocates a matrix of zeros.
    pub fn zeros(&self, kind: MemoryKind, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        let mut tensor = self.alloc(kind, rows, cols, dtype)?;
        crate::ops::fill_zero(self, tensor.view_mut())?;
        Ok(tensor)
    }

    /// Sets the algorithms of a GPU's GEMMs, for all devices of its driver. Other shapes take the
    /// library's first choice.
    pub fn set_matmul_choices(&self, choices: &[MatmulChoice]) {
        if let Self::Cuda(cuda) = self {
            cuda.driver().set_choices(choices);
        }
    }

    /// Returns whether a GPU can compute a GEMM by this algorithm.
    pub fn accepts_algorithm(&self, product: &Matmul, algorithm: &Algorithm) -> Result<bool> {
        match self {
            Self::Cuda(cuda) => cuda.driver().accepts(product, algorithm),
            _ => Ok(false),
        }
    }

    /// Returns bytes in use by kind, now and at the peak.
    pub fn memory(&self) -> MemoryUse {
        match self {
            Self::Cpu(cpu) => cpu.arena.usage(),
            Self::Cuda(cuda) => cuda.arena.usage(),
            Self::Meta(ledger) => ledger.usage(),
        }
    }

    /// Returns the end of the highest byte ever allocated. A dry run returns the mark of the real
    /// run.
    pub fn high_water(&self) -> usize {
        match self {
            Self::Cpu(cpu) => cpu.arena.high_water(),
            Self::Cuda(cuda) => cuda.arena.high_water(),
            Self::Meta(ledger) => ledger.high_water(),
        }
    }

    /// Returns the number and the total bytes of all allocations so far.
    pub fn taken(&self) -> (u64, u64) {
        match self {
            Self::Cpu(cpu) => cpu.arena.taken(),
            Self::Cuda(cuda) => cuda.arena.taken(),
            Self::Meta(ledger) => ledger.taken(),
        }
    }

    /// Makes the arena's first `bytes` resident; the plan knows the number.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.arena().map_or(Ok(()), |arena| arena.reserve(bytes))
    }

    /// Returns a CPU's memory that no tensor has to the system, for what comes after the last step.
    pub fn release_free_pages(&self) {
        if let Some(arena) = self.arena() {
            arena.release_free_pages();
        }
    }

    /// Does now what a GPU else does when it is first needed, and for which its driver may wait for running
    /// work: loads the kernels of models with heads of these sizes, and maps memory beside the arena. Running
    /// work may be a collective that waits for another rank.
    pub fn load_ahead(&self, head_dims: &[usize]) -> Result<()> {
        if let Self::Cuda(cuda) = self { cuda.load_ahead(head_dims) } else { Ok(()) }
    }

    /// Returns whether every term of exact sums since the last call was finite and within its
    /// limit. Waits for a GPU.
    pub fn take_in_range(&self) -> Result<bool> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.take_in_range()),
            Self::Cuda(cuda) => cuda.take_in_range(),
            // A dry run has no terms.
            Self::Meta(_) => Ok(true),
        }
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        match self {
            Self::Cpu(cpu) => Some(&cpu.arena),
            Self::Cuda(cuda) => Some(&cuda.arena),
            Self::Meta(_) => None,
        }
    }

    /// Returns a mark after all work so far.
    pub fn mark(&self) -> Result<StreamEvent> {
        if let Self::Cuda(cuda) = self { StreamEvent::record(cuda) } else { Ok(StreamEvent::default()) }
    }

    /// Makes later work wait for `mark`, which may be of another stream of the same GPU.
    pub fn after(&self, mark: &StreamEvent) -> Result<()> {
        if let Self::Cuda(cuda) = self { mark.before(cuda) } else { Ok(()) }
    }

    /// Waits until all work so far is done; on a GPU, all work in its stream.
    pub fn synchronize(&self) -> Result<()> {
        if let Self::Cuda(cuda) = self { cuda.synchronize() } else { Ok(()) }
    }

    /// Names the place in the step. A dry run reports it for the memory peak, a profile for the
    /// operations that follow.
    pub fn set_place(&self, place: std::fmt::Arguments<'_>) {
        match self {
            Self::Meta(ledger) => ledger.set_place(place),
            _ => {
                if let Some(profile) = self.profile() {
                    profile.set_place(place);
                }
            }
        }
    }

    /// Begins a phase of the step in the profile, if there is one.
    pub fn begin_phase(&self, phase: &'static str) {
        if let Some(profile) = self.profile() {
            profile.begin_phase(phase);
        }
    }

    /// Runs host work and records its time in the profile, if there is one.
    pub fn time_host_work<T>(&self, name: &'static str, bytes: u64, work: impl FnOnce() -> T) -> T {
        let Some(profile) = self.profile() else { return work() };
        let began = Instant::now();
        let result = work();
        profile.other(name, bytes, began);
        result
    }

    /// Runs `part` on the host for each index below `count`: on a CPU device in parallel, else in
    /// order.
    pub fn each_on_host(&self, count: usize, part: impl Fn(usize) + Sync) {
        match self {
            Self::Cpu(cpu) => cpu.parallel_for(count, part),
            Self::Cuda(_) | Self::Meta(_) => (0..count).for_each(part),
        }
    }

    /// Returns whether this is a dry run.
    pub fn is_meta(&self) -> bool {
        matches!(self, Self::Meta(_))
    }
}
