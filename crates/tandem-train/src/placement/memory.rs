//! Placement of tensors that are offloaded from the compute device to host memory or to a file.
//!
//! | what | `offload = "host"` | `offload = "nvme"` |
//! |---|---|---|
//! | masters of full training, frozen weights, optimiser states | host | file |
//! | gradient sums, a checkpoint's copy | host | host |
//! | an adapter, layers while they run, activations | device | device |
//!
//! With `offload_activations`, block inputs wait in host memory for backward.
//!
//! A GPU reads and writes host memory, but no file. The CPU updates tensors in the rank's file, and
//! the transfer thread copies layers to pinned host memory ([`crate::placement::offload::OffloadedStorage`]). The GPU
//! updates adapter states, so these are in host memory. A GPU's checkpoint copy always is.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tandem_kernels::cuda::MatmulList;
use tandem_kernels::cuda::driver::MatmulChoice;
use tandem_kernels::file::FileSystem;
use tandem_kernels::meta::Ledger;
use tandem_kernels::{Backend, Device, KernelError, Profile};
use tandem_model::BatchCapacity;

use crate::config::{AttentionKernels, ComputeConfig, Config, Offload};
use crate::placement::gpus;
use crate::{Result, TrainError, size};

/// Largest token and scored-row counts of any micro-batch, per pass. Every micro-batch allocates
/// for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCapacities {
    /// Training steps.
    pub train: BatchCapacity,
    /// Evaluation.
    pub evaluation: BatchCapacity,
    /// Precomputation of the reference.
    pub reference: BatchCapacity,
}

/// Bytes that a rank will touch of each of its memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRequirements {
    /// Bytes of the device's arenas.
    pub arena: usize,
    /// How much of that is of the one where answers are generated while a step trains.
    pub beside: usize,
    /// How much of it is of the one where reward models judge.
    pub judges: usize,
    /// Bytes of host memory for offload.
    pub host: usize,
    /// Bytes of the offload file, which is created at exactly this size.
    pub file: usize,
}

impl MemoryRequirements {
    /// Bytes of host memory where the device is the CPU: the arena and offloaded tensors.
    pub fn ram(self) -> usize {
        self.arena + self.host
    }
}

/// The memories of a rank.
#[derive(Clone)]
pub struct MemoryPlacement {
    /// Compute device.
    pub device: Device,
    /// Host memory beside the device's, if anything is offloaded there.
    host: Option<Device>,
    /// A file, if something is kept there.
    file: Option<Device>,
    /// Host memory for the inputs of blocks, if they wait there; of a GPU with a stream of its own.
    activations: Option<Device>,
    /// Device of background generation, with its own arena, if used.
    beside: Option<Device>,
    /// Device of reward-model judges on this rank, with its own arena.
    judges: Option<Device>,
    /// Capacity that every micro-batch allocates.
    pub rooms: PassCapacities,
    /// Algorithms of the GPU's matmuls, for shapes whose algorithm was timed.
    pub matmuls: Arc<[MatmulChoice]>,
    offload: Offload,
    /// Bytes of the compute device's own arena that a plan asks for.
    planned: usize,
}

impl MemoryPlacement {
    /// The memories that a plan asks for, and no more where `compute.memory` is the cap; `rank` and
    /// the run's folder name the file, which has no name any more when this returns. GPUs have these kernels of
    /// attention, and those by warps where nothing has chosen.
    ///
    /// # Errors
    /// The system refuses threads, address space or the file, or the disk is full.
    pub fn open(
        config: &Config,
        attention: AttentionKernels,
        needs: MemoryRequirements,
        rooms: PassCapacities,
        rank: usize,
    ) -> Result<Self> {
        let compute = &config.compute;
        // Only planned memory is touched; further address space covers the unforeseen. With a cap
        // there is none.
        let capacity = |own: usize| match compute.memory {
            Some(cap) => own + (cap as usize).saturating_sub(needs.ram()),
            None => 2 * own + (1 << 30),
        };
        let arena = needs.arena - needs.beside - needs.judges;
        let device = gpus::device(config, attention, rank, capacity(arena))?;
        tracing::debug!("rank {rank}: arena of {}", size::in_words(arena as u64));
        let mut placement = Self { planned: arena, ..Self::new(device, compute, rooms) };
        if placement.device.backend() == Backend::Cuda {
            placement.reserve()?;
        }
        let beside = |own: usize| -> Result<Option<Device>> {
            if own == 0 {
                return Ok(None);
            }
            let beside = placement.device.with_own_stream_and_arena(capacity(own))?;
            beside.reserve(own)?;
            Ok(Some(beside))
        };
        (placement.beside, placement.judges) = (beside(needs.beside)?, beside(needs.judges)?);
        if uses_host(compute) {
            // An evaluation may need none, and no memory is no memory that the system gives.
            let host = placement.device.with_memory(capacity(needs.host).max(1))?;
            host.reserve(needs.host)?;
            let carrier = || match host.backend() {
                // All its threads.
                Backend::Cpu => Ok(host.clone()),
                Backend::Cuda => host.on_one_thread(),
            };
            placement.activations = compute.offload_activations.then(carrier).transpose()?;
            placement.host = Some(host);
        }
        if let Some(folder) = &compute.offload_dir {
            let keeper = match placement.device.backend() {
                Backend::Cpu => placement.device.clone(),
                Backend::Cuda => Device::cpu(compute.num_threads(), 1)?,
            };
            placement.file = Some(in_file(&keeper, folder, &config.output, rank, needs.file)?);
        }
        Ok(placement)
    }

    /// Makes the compute device's memory resident as far as it is planned. A GPU's is since it was opened. A
    /// CPU's follows when weights are loaded: the mapped files that they are read from are memory too.
    pub fn reserve(&self) -> Result<()> {
        Ok(self.device.reserve(self.planned)?)
    }

    /// The same placement with operations reported to `recorder`.
    #[must_use]
    pub fn profiled(&self, recorder: &Arc<Profile>) -> Self {
        let profiled = |device: &Device| device.profiled(recorder);
        let beside = [&self.host, &self.file, &self.activations];
        let [host, file, activations] = beside.map(|device| device.as_ref().map(profiled));
        Self { device: profiled(&self.device), host, file, activations, ..self.clone() }
    }

    /// Memories of a dry run.
    pub fn meta(compute: &ComputeConfig, rooms: PassCapacities) -> Self {
        let dry = || Device::meta_of(compute.devices.backend());
        let mut placement = Self::new(dry(), compute, rooms);
        placement.host = uses_host(compute).then(dry);
        placement.activations = placement.host.clone().filter(|_| compute.offload_activations);
        // The processor works on it, whatever computes.
        placement.file = (compute.offload == Offload::Nvme).then(Device::meta);
        placement
    }

    /// Memories of a dry run on a GPU, and the list of its matmuls.
    pub fn meta_listing_matmuls(
        compute: &ComputeConfig,
        rooms: PassCapacities,
    ) -> Result<(Self, MatmulList)> {
        let (device, list) = Device::meta_listing_matmuls(gpus::options(compute, compute.attention))?;
        Ok((Self { device, ..Self::meta(compute, rooms) }, list))
    }

    /// One memory for everything.
    pub fn all_in(device: Device) -> Self {
        Self {
            device,
            host: None,
            file: None,
            activations: None,
            beside: None,
            judges: None,
            rooms: PassCapacities::default(),
            matmuls: Arc::default(),
            offload: Offload::None,
            planned: 0,
        }
    }

    fn new(device: Device, compute: &ComputeConfig, rooms: PassCapacities) -> Self {
        Self { rooms, offload: compute.offload, ..Self::all_in(device) }
    }

    /// Does for every stream what [`Device::load_ahead`] does, before the first collective.
    pub fn load_ahead(&self, head_dims: &[usize]) -> Result<()> {
        let streams = [Some(&self.device), self.beside.as_ref(), self.judges.as_ref()];
        Ok(streams.into_iter().flatten().try_for_each(|device| device.load_ahead(head_dims))?)
    }

    /// Returns whether weights and states are offloaded.
    pub fn is_offloaded(&self) -> bool {
        self.offload != Offload::None
    }

    /// Device of master weights, frozen weights and optimizer states.
    pub fn state(&self) -> &Device {
        self.file.as_ref().unwrap_or_else(|| self.gradient_device())
    }

    /// Device of optimizer states. A GPU must be able to read adapter states: they are in host
    /// memory where those of full training are in a file.
    pub fn optimizer(&self, has_adapter: bool) -> &Device {
        if has_adapter && self.staging_pair().is_some() { self.gradient_device() } else { self.state() }
    }

    /// Device that quantises frozen weights. For weights stored in a file on a GPU run, this is the
    /// CPU.
    pub fn pack_device(&self) -> &Device {
        self.staging_pair().map_or_else(|| self.gradient_device(), |(file, _)| file)
    }

    /// The file that a GPU cannot read, and the host memory that it can.
    pub fn staging_pair(&self) -> Option<(&Device, &Device)> {
        let both = self.file.as_ref().zip(self.host.as_ref());
        both.filter(|_| self.device.backend() == Backend::Cuda)
    }

    /// Device of the checkpoint copy: memory that the host reads.
    pub fn checkpoint_device(&self) -> &Device {
        match self.device.backend() {
            Backend::Cpu => self.gradient_device(),
            Backend::Cuda => self.host.as_ref().expect("a GPU's ranks have host memory"),
        }
    }

    /// Device of the gradient sums.
    pub fn gradient_device(&self) -> &Device {
        self.host.as_ref().filter(|_| self.is_offloaded()).unwrap_or(&self.device)
    }

    /// Device of offloaded block inputs, if not the compute device.
    pub fn activations(&self) -> Option<&Device> {
        self.activations.as_ref()
    }

    /// Bytes of the device's arenas that were ever handed out.
    pub fn high_water(&self) -> usize {
        let arenas = [Some(&self.device), self.background_device(), self.judges()];
        arenas.into_iter().flatten().map(Device::high_water).sum()
    }

    /// Device of background generation, if used.
    pub fn background_device(&self) -> Option<&Device> {
        self.beside.as_ref()
    }

    /// Device of reward-model judges on this rank, if any.
    pub fn judges(&self) -> Option<&Device> {
        self.judges.as_ref()
    }

    /// Host memory beside the device's.
    pub fn host(&self) -> Option<&Device> {
        self.host.as_ref()
    }

    /// The records of a dry run: of the device, host memory and the file.
    ///
    /// # Panics
    /// This is not a dry run.
    pub fn ledgers(&self) -> [Option<&Ledger>; 3] {
        [Some(&self.device), self.host(), self.file()].map(|device| device.map(ledger))
    }

    /// Memory in a file.
    pub fn file(&self) -> Option<&Device> {
        self.file.as_ref()
    }
}

fn ledger(device: &Device) -> &Ledger {
    let Device::Meta(ledger) = device else { panic!("a dry run is on devices that compute nothing") };
    ledger
}

fn uses_host(compute: &ComputeConfig) -> bool {
    compute.offload != Offload::None
        || compute.offload_activations
        || compute.devices.backend() == Backend::Cuda
}

/// Checks `compute.offload_dir` before a rank starts. Returns a warning or `None`.
///
/// # Errors
/// The folder is missing, not a folder, or not writable.
pub fn check(compute: &ComputeConfig) -> Result<Option<String>> {
    let Some(folder) = &compute.offload_dir else { return Ok(None) };
    let refused = |source| unusable(folder, source);
    let (path, file) = create(folder, "check", 0).map_err(refused)?;
    fs::remove_file(&path).map_err(refused)?;
    let is_memory = FileSystem::map(&file).map_err(refused)?.is_memory;
    Ok(is_memory.then(|| {
        format!(
            "compute.offload_dir = {} is a folder in memory, so offloaded tensors would stay in memory: name one on a disk",
            folder.display()
        )
    }))
}

/// Asks whether the disk of that folder has room for `needed` bytes, before a rank tries to take
/// them.
///
/// # Errors
/// The disk has too little room, or does not report it.
pub fn check_room(compute: &ComputeConfig, needed: u64) -> Result<()> {
    let Some(folder) = &compute.offload_dir else { return Ok(()) };
    room(folder, &File::open(folder).map_err(|source| unusable(folder, source))?, needed)
}

/// `file` is the folder itself or a file in it.
fn room(folder: &Path, file: &File, needed: u64) -> Result<()> {
    let free = FileSystem::map(file).map_err(TrainError::io("look at the disk of", folder))?.free;
    if free < needed {
        return Err(TrainError::NoRoom { folder: folder.to_path_buf(), needed, free });
    }
    Ok(())
}

/// A folder that a file cannot be made in.
fn unusable(folder: &Path, source: io::Error) -> TrainError {
    let reason = match source.kind() {
        io::ErrorKind::NotFound => "it does not exist: make it, or name another".to_owned(),
        io::ErrorKind::NotADirectory => "it is not a folder: name one".to_owned(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            format!("cannot create a file in it ({source}): name a writable folder")
        }
        _ => return TrainError::io("make a file in", folder)(source),
    };
    TrainError::Mismatch { reason: format!("compute.offload_dir = {}: {reason}", folder.display()) }
}

/// A new file of a name that no other run has.
fn create(folder: &Path, run: &str, rank: usize) -> io::Result<(PathBuf, File)> {
    let process = std::process::id();
    // A process of another machine may have the same number, and one that was killed may have left
    // its file.
    for turn in 0.. {
        let path = folder.join(format!("tandem-offload-{run}-rank{rank}-{process}-{turn}"));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| (path, file)),
        }
    }
    unreachable!("some number is free")
}

/// Memory in a file of `folder` that nothing is left of however the run ends.
fn in_file(device: &Device, folder: &Path, output: &Path, rank: usize, bytes: usize) -> Result<Device> {
    let run = output.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
    let (path, file) = create(folder, &run, rank).map_err(|source| unusable(folder, source))?;
    fs::remove_file(&path).map_err(TrainError::io("remove", &path))?;
    // Asked first: setting aside more than there is may fill the disk before it fails.
    room(folder, &file, bytes as u64)?;
    device.in_file(&file, bytes).map_err(|error| match error {
        KernelError::System { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
            let free = FileSystem::map(&file).map_or(0, |disk| disk.free);
            TrainError::NoRoom { folder: folder.to_path_buf(), needed: bytes as u64, free }
        }
        error => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_is_named_with_what_is_needed_and_free() {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::cpu(1, 1 << 21).unwrap();
        let open = |bytes| in_file(&device, folder.path(), Path::new("runs/first"), 3, bytes);
        let error = open(1 << 60).err().unwrap();
        assert!(matches!(&error, TrainError::NoRoom { free, .. } if *free > 0), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&folder.path().display().to_string()), "{text}");
        assert!(text.contains("1152921504606846976 bytes"), "{text}");
        assert_eq!(error.exit_code(), 1);
        // Two at once, and nothing is left of either.
        let _both = [open(5000).unwrap(), open(5000).unwrap()];
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
