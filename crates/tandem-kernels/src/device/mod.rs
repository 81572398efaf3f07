//! Where things are computed.

pub mod meta;
pub mod profile;
pub(crate) mod work;

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use crate::cpu::{Cpu, Isa};
use crate::cuda::driver::Drivers;
use crate::cuda::{Cuda, Mark, Options};
use crate::device::meta::{Ledger, MetaBlock};
use crate::device::profile::Profile;
use crate::memory::arena::Arena;
use crate::memory::memory_use::{Kind, MemoryUse};
use crate::memory::tensor::{Extent, Storage, Tensor};
use crate::numerics::dtype::DType;
use crate::{KernelError, Result, Work};

/// A compute device. Cloning is cheap and refers to the same device.
#[derive(Clone)]
pub enum Device {
    /// The host's processor.
    Cpu(Arc<Cpu>),
    /// A GPU of NVIDIA's.
    Cuda(Arc<Cuda>),
    /// Computes nothing; records allocations and operations.
    Meta(Arc<Ledger>),
}

/// What kind of device computes, or is counted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// The host's processor.
    #[default]
    Cpu,
    /// A GPU of NVIDIA's.
    Cuda,
}

/// What a kernel runs on.
pub(crate) enum On<'a> {
    Cpu(&'a Cpu),
    Cuda(&'a Cuda),
}

/// A kernel of each device: what runs on the processor, and what is put into a GPU's stream, which may fail.
macro_rules! on {
    ($cpu:ident => $on_cpu:expr, $cuda:ident => $on_cuda:expr $(,)?) => {
        |on| match on {
            $crate::device::On::Cpu($cpu) => {
                let done = $on_cpu;
                Ok(done)
            }
            $crate::device::On::Cuda($cuda) => $on_cuda,
        }
    };
}
pub(crate) use on;

impl Device {
    /// The host's processor with `threads` threads and an arena that may grow to `capacity` bytes.
    ///
    /// # Errors
    /// If the operating system refuses the threads or the address space, or `TANDEM_ISA` asks for instructions that
    /// the processor lacks.
    pub fn cpu(threads: usize, capacity: usize) -> Result<Self> {
        Self::cpu_with_isa(threads, capacity, Isa::detect()?)
    }

    /// [`Self::cpu`] with a given level of vector instructions.
    ///
    /// # Errors
    /// If the operating system refuses the threads or the address space, or the processor lacks the instructions.
    pub fn cpu_with_isa(threads: usize, capacity: usize, isa: Isa) -> Result<Self> {
        Ok(Self::Cpu(Arc::new(Cpu::new(threads, Arena::new(capacity)?, isa.require()?)?)))
    }

    /// What the last bits of results depend on, beside the operands: the instructions, and what is computed with them. Numbers
    /// that are kept to be compared with others to the bit are kept under this name.
    pub fn arithmetic(&self) -> String {
        /// Raised with every change of a kernel after which it rounds or sums in another way.
        const REVISION: u32 = 6;
        match self {
            Self::Cpu(cpu) => format!("{} {REVISION}", cpu.isa().name()),
            Self::Cuda(cuda) => format!("{} {REVISION}", cuda.arithmetic()),
            Self::Meta(_) => "none".to_owned(),
        }
    }

    /// What `driver` drives, with a memory that may grow to `capacity` bytes.
    ///
    /// # Errors
    /// If the driver refuses a stream or address space.
    pub fn cuda(driver: Drivers, capacity: usize, options: Options) -> Result<Self> {
        Ok(Self::Cuda(Arc::new(Cuda::new(driver, capacity, options)?)))
    }

    /// The GPU of that number among those of NVIDIA's that this process may use, with a memory that may grow to `capacity` bytes.
    ///
    /// # Errors
    /// If there is none, a library is missing, or its driver refuses.
    pub fn open_cuda(ordinal: usize, capacity: usize, options: Options) -> Result<Self> {
        Self::cuda(crate::cuda::open(ordinal)?, capacity, options)
    }

    /// A device for dry runs of what a processor computes.
    pub fn meta() -> Self {
        Self::meta_of(Backend::Cpu)
    }

    /// A device for dry runs of what such a device computes.
    pub fn meta_of(backend: Backend) -> Self {
        Self::Meta(Arc::new(Ledger::new(backend)))
    }

    /// What kind of device computes; of a dry run, the one that is counted for.
    pub fn backend(&self) -> Backend {
        match self {
            Self::Cpu(_) => Backend::Cpu,
            Self::Cuda(_) => Backend::Cuda,
            Self::Meta(ledger) => ledger.backend(),
        }
    }

    /// The same device with a memory of its own that may grow to `capacity` bytes.
    ///
    /// # Errors
    /// If the operating system refuses the address space.
    pub fn with_memory(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.over(Arena::new(capacity)?))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.on_host(capacity)?)),
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// The same device for work that goes on beside this one's: with a memory of its own that may grow to `capacity` bytes and, of a
    /// GPU, a stream of its own (see [`Device::mark`]). On a processor the two take turns with its threads. No profile times it.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn beside(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.untimed_over(Arena::new(capacity)?))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.beside_in(capacity)?)),
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// The same device with `capacity` bytes of an empty file for memory. They are set aside on its disk, so that none is
    /// missing later; the file may be removed and closed, and is gone with the last tensor.
    ///
    /// # Errors
    /// If the disk has not so many, or the operating system refuses the address space.
    pub fn in_file(&self, file: &File, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.over(Arena::in_file(file, capacity)?))),
            Self::Cuda(_) => {
                return Err(KernelError::invalid("file", "a GPU cannot compute with memory in a file"));
            }
            Self::Meta(ledger) => Self::meta_of(ledger.backend()),
        })
    }

    /// The same memory, where whoever calls computes alone: for a thread that works beside another, and is not to wait for it. Of a GPU
    /// it is another stream: what one stream is to see of the other comes after a [`Device::mark`] there.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn on_one_thread(&self) -> Result<Self> {
        Ok(match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.alone()?)),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.beside()?)),
            Self::Meta(ledger) => Self::Meta(ledger.clone()),
        })
    }

    /// The same device and memory, for products of few rows, as generation has: a processor reads their matrix where it lies, and
    /// once. The bits of such a row depend on how many there are; they do not else. A GPU makes no difference.
    #[must_use]
    pub fn for_few_rows(&self) -> Self {
        match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.for_few_rows())),
            Self::Cuda(_) | Self::Meta(_) => self.clone(),
        }
    }

    /// The same device and memory, and every operation is timed by `profile`; so are those of the devices that are made of it.
    /// A device for dry runs has no time to tell.
    #[must_use]
    pub fn profiled(&self, profile: &Arc<Profile>) -> Self {
        match self {
            Self::Cpu(cpu) => Self::Cpu(Arc::new(cpu.profiled(profile.clone()))),
            Self::Cuda(cuda) => Self::Cuda(Arc::new(cuda.profiled(profile.clone()))),
            Self::Meta(ledger) => Self::Meta(ledger.clone()),
        }
    }

    /// Who times this device's operations.
    pub fn profile(&self) -> Option<&Arc<Profile>> {
        match self {
            Self::Cpu(cpu) => cpu.profile.as_ref(),
            Self::Cuda(cuda) => cuda.profile.as_ref(),
            Self::Meta(_) => None,
        }
    }

    /// Runs an operation's kernel and returns what it does; a dry run records its cost instead and returns `None`. On a GPU it is
    /// put into the stream, and a profile waits until it is done.
    #[inline]
    pub(crate) fn launch<T>(&self, work: Work, kernel: impl FnOnce(On) -> Result<T>) -> Result<Option<T>> {
        self.launch_counting(|| work, kernel)
    }

    /// [`Self::launch`] where the cost takes time to count.
    #[inline]
    pub(crate) fn launch_counting<T>(
        &self,
        work: impl FnOnce() -> Work,
        kernel: impl FnOnce(On) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(match self {
            Self::Cpu(cpu) => Some(match &cpu.profile {
                None => kernel(On::Cpu(cpu))?,
                Some(profile) => profile.launch(work, || kernel(On::Cpu(cpu)))?,
            }),
            Self::Cuda(cuda) => Some(match &cuda.profile {
                None => kernel(On::Cuda(cuda))?,
                Some(profile) => {
                    cuda.synchronize()?;
                    profile.launch(work, || {
                        let result = kernel(On::Cuda(cuda))?;
                        cuda.synchronize()?;
                        Ok::<T, KernelError>(result)
                    })?
                }
            }),
            Self::Meta(ledger) => {
                let Work { op, flops, bytes, .. } = work();
                ledger.record(op, flops, bytes);
                None
            }
        })
    }

    /// A matrix of unspecified content.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn alloc(&self, kind: Kind, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.alloc_in(kind, Extent::exact(rows), Extent::exact(cols), dtype)
    }

    /// A matrix of unspecified content, in memory for as many rows and columns as there is to be room for.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn alloc_in(&self, kind: Kind, rows: Extent, cols: Extent, dtype: DType) -> Result<Tensor> {
        let bytes = rows.room() * cols.room() * dtype.size();
        let storage = match self {
            Self::Cpu(cpu) => Storage::Block(cpu.arena.allocate(kind, bytes)?),
            Self::Cuda(cuda) => Storage::Block(cuda.arena.allocate(kind, bytes)?),
            Self::Meta(ledger) => Storage::Meta(MetaBlock::new(ledger, kind, bytes)),
        };
        Ok(Tensor::new(storage, rows, cols.len(), dtype))
    }

    /// A matrix of zeros.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn zeros(&self, kind: Kind, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        let mut tensor = self.alloc(kind, rows, cols, dtype)?;
        crate::ops::fill_zero(self, tensor.view_mut())?;
        Ok(tensor)
    }

    /// Bytes in use by kind, now and at the peak.
    pub fn memory(&self) -> MemoryUse {
        match self {
            Self::Cpu(cpu) => cpu.arena.usage(),
            Self::Cuda(cuda) => cuda.arena.usage(),
            Self::Meta(ledger) => ledger.usage(),
        }
    }

    /// One past the highest byte of the arena ever handed out. A dry run gives what the real run's would be.
    pub fn high_water(&self) -> usize {
        match self {
            Self::Cpu(cpu) => cpu.arena.high_water(),
            Self::Cuda(cuda) => cuda.arena.high_water(),
            Self::Meta(ledger) => ledger.high_water(),
        }
    }

    /// What was ever taken from the arena: how often, and bytes. What was given back in between counts again.
    pub fn taken(&self) -> (u64, u64) {
        match self {
            Self::Cpu(cpu) => cpu.arena.taken(),
            Self::Cuda(cuda) => cuda.arena.taken(),
            Self::Meta(ledger) => ledger.taken(),
        }
    }

    /// Makes the arena's first `bytes` resident now: what the plan found to be needed.
    ///
    /// # Errors
    /// If a GPU has not so many.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.arena().map_or(Ok(()), |arena| arena.reserve(bytes))
    }

    /// Whether every term of exact sums, since this was last asked, was finite and within its limit. Waits for a GPU.
    ///
    /// # Errors
    /// If something failed on a GPU.
    pub fn take_in_range(&self) -> Result<bool> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.take_in_range()),
            Self::Cuda(cuda) => cuda.take_in_range(),
            // A dry run has no numbers that could be out of it.
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

    /// All work so far.
    ///
    /// # Errors
    /// If a GPU refuses.
    pub fn mark(&self) -> Result<Mark> {
        if let Self::Cuda(cuda) = self { Mark::of(cuda) } else { Ok(Mark::default()) }
    }

    /// Work from here on waits for `mark`, which may be another stream's of the same GPU.
    ///
    /// # Errors
    /// If a GPU refuses.
    pub fn after(&self, mark: &Mark) -> Result<()> {
        if let Self::Cuda(cuda) = self { mark.before(cuda) } else { Ok(()) }
    }

    /// Waits until all work so far is done: on a GPU, whatever was put into its stream.
    ///
    /// # Errors
    /// If something failed on a GPU.
    pub fn synchronize(&self) -> Result<()> {
        if let Self::Cuda(cuda) = self { cuda.synchronize() } else { Ok(()) }
    }

    /// Says what is going on from here on, so that a dry run can tell when memory was fullest, and a profile what operations
    /// were for. Nothing is done elsewhere.
    pub fn note(&self, place: std::fmt::Arguments<'_>) {
        match self {
            Self::Meta(ledger) => ledger.note(place),
            _ => {
                if let Some(profile) = self.profile() {
                    profile.note(place);
                }
            }
        }
    }

    /// Says which phase of a step begins, for a profile alone.
    pub fn enter(&self, phase: &'static str) {
        if let Some(profile) = self.profile() {
            profile.enter(phase);
        }
    }

    /// Does something that no device computes, and tells a profile, if there is one, how long it took.
    pub fn aside<T>(&self, name: &'static str, bytes: u64, work: impl FnOnce() -> T) -> T {
        let Some(profile) = self.profile() else { return work() };
        let began = Instant::now();
        let result = work();
        profile.other(name, bytes, began);
        result
    }

    /// Does something on the host for each of so many parts: at once, on a processor's threads; else one after another.
    pub fn each_on_host(&self, count: usize, part: impl Fn(usize) + Sync) {
        match self {
            Self::Cpu(cpu) => cpu.parallel_for(count, part),
            Self::Cuda(_) | Self::Meta(_) => (0..count).for_each(part),
        }
    }

    /// Whether this device only records.
    pub fn is_meta(&self) -> bool {
        matches!(self, Self::Meta(_))
    }
}
