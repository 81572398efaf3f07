//! CUDA kernels, and the GPU device: a stream of work and a memory.

pub(crate) mod activation;
pub(crate) mod attention;
pub mod autotune;
pub(crate) mod causal_conv;
pub(crate) mod columns;
pub(crate) mod convert;
pub(crate) mod delta_rule;
mod discovery;
pub mod driver;
pub(crate) mod dropout;
mod elements;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod exact;
pub(crate) mod fp8;
pub(crate) mod gemm;
mod graph;
pub(crate) mod head;
pub(crate) mod head_divergence;
pub(crate) mod head_gate;
mod launch;
pub(crate) mod listing;
pub(crate) mod low_rank;
mod mark;
pub mod matmul;
mod memory;
pub(crate) mod norm;
pub mod nvidia;
pub(crate) mod optimizer;
pub(crate) mod pack;
pub(crate) mod rope;
mod rows;
pub(crate) mod sampling;
pub(crate) mod stored;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub use attention::{WGMMA, WIDEST_HEAD, has_wgmma};
pub use discovery::{Gpus, install_emulator, is_stand_in, list, open};
pub use driver::Driver;
pub use graph::RepeatKey;
pub(crate) use graph::Work;
pub use launch::{HEADERS, SOURCES};
pub use listing::MatmulList;
pub use mark::StreamEvent;

use crate::device::profile::Profile;
use crate::memory::arena::Arena;
use crate::{ArenaPlace, KernelError, Result};
use driver::{Drivers, Function, Region, Source, Stream};
use graph::Graphs;
use memory::{TABLES, Tables, Window};

pub(crate) use launch::{args, by_type, source};

/// Bytes of a GPU used outside arenas by a process that computes in one stream: tables, library workspaces, code.
pub const BESIDE: usize = TABLES + (128 << 20);

/// Bytes that each further stream takes: tables and a workspace.
pub const OF_STREAM: usize = TABLES + nvidia::WORKSPACE;

/// One GPU: its memory, and the stream that work is put into.
pub struct Cuda {
    pub(crate) arena: Arc<Arena>,
    shared: Arc<Shared>,
    /// Profile that times operations.
    pub(crate) profile: Option<Arc<Profile>>,
}

/// State shared by all memories of a stream.
struct Shared {
    tables: Tables,
    window: Window,
    graphs: Graphs,
    /// Flags shared by all streams of the device.
    flags: Arc<dyn Region>,
    functions: Mutex<HashMap<&'static str, Function>>,
    /// Kernels, matmuls, copies and clears so far.
    launches: AtomicU64,
    options: Options,
    /// The last field: the others wait for the stream when they are dropped.
    stream: OwnStream,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.graphs.end(&*self.stream.driver, &self.tables);
    }
}

/// A stream that ends with its owner.
struct OwnStream {
    driver: Drivers,
    stream: Stream,
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.driver.end_stream(self.stream);
    }
}

/// Options of a GPU device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Lets f32 GEMMs round factors to 10 bits (TF32), for tensor cores.
    pub tf32: bool,
    /// Multiplies attention of bf16 by warpgroups (`wgmma`), which only GPUs of compute capability 9.0 do.
    pub wgmma: bool,
}

/// Word in the name of an arithmetic whose attention multiplies by warpgroups.
const BY_WARPGROUPS: &str = "wgmma";

/// Returns whether an arithmetic of this name multiplies attention by warpgroups.
pub fn names_wgmma(arithmetic: &str) -> bool {
    arithmetic.split(' ').any(|word| word == BY_WARPGROUPS)
}

impl Cuda {
    /// Creates a device with an arena of at most `capacity` bytes.
    pub(crate) fn new(driver: Drivers, capacity: usize, options: Options) -> Result<Self> {
        let (major, minor) = driver.properties().capability;
        if options.wgmma && (major, minor) != attention::WGMMA {
            return Err(failed(
                "attention",
                format!(
                    "{} has compute capability {major}.{minor}, and only GPUs of 9.0 multiply by warpgroups; set \
                     compute.attention to \"mma\"",
                    driver.properties().name
                ),
            ));
        }
        let flags: Arc<dyn Region> = Arc::from(driver.reserve(size_of::<u32>())?);
        flags.grow(size_of::<u32>())?;
        let arena = Arena::on(driver.reserve(capacity)?, capacity, ArenaPlace::Device);
        let this = Self::streaming(driver, arena, flags, options)?;
        // SAFETY: the word was just made.
        unsafe { this.driver().clear(this.raw_stream(), this.out_of_range(), size_of::<u32>())? };
        this.synchronize()?;
        Ok(this)
    }

    /// Creates a device with a stream of its own.
    fn streaming(
        driver: Drivers,
        arena: Arc<Arena>,
        flags: Arc<dyn Region>,
        options: Options,
    ) -> Result<Self> {
        let stream = OwnStream { stream: driver.new_stream()?, driver };
        let (tables, window) = (Tables::new(&stream.driver, stream.stream)?, Window::new(&stream.driver)?);
        let shared = Shared {
            tables,
            window,
            graphs: Graphs::new()?,
            flags,
            functions: Mutex::default(),
            launches: AtomicU64::new(0),
            options,
            stream,
        };
        Ok(Self { arena, shared: Arc::new(shared), profile: None })
    }

    /// Shares the stream with another memory.
    fn over(&self, arena: Arc<Arena>) -> Self {
        Self { arena, shared: self.shared.clone(), profile: self.profile.clone() }
    }

    /// Shares the stream with `capacity` bytes of pinned host memory.
    pub(crate) fn on_host(&self, capacity: usize) -> Result<Self> {
        Ok(self.over(Arena::on(self.driver().pinned(capacity)?, capacity, ArenaPlace::PinnedHost)))
    }

    /// Shares the memory with a second stream. Memory freed in one stream and allocated in the
    /// other may still be in use: see [`StreamEvent`].
    pub(crate) fn with_own_stream(&self) -> Result<Self> {
        Ok(Self { profile: self.profile.clone(), ..self.streaming_beside(self.arena.clone())? })
    }

    /// Creates a second stream with an arena of at most `capacity` bytes, without a profile.
    pub(crate) fn beside_in(&self, capacity: usize) -> Result<Self> {
        self.streaming_beside(Arena::on(self.driver().reserve(capacity)?, capacity, ArenaPlace::Device))
    }

    fn streaming_beside(&self, arena: Arc<Arena>) -> Result<Self> {
        let Shared { stream, flags, options, .. } = &*self.shared;
        Self::streaming(stream.driver.clone(), arena, flags.clone(), *options)
    }

    /// Shares the device and times operations.
    pub(crate) fn profiled(&self, profile: Arc<Profile>) -> Self {
        Self { profile: Some(profile), ..self.over(self.arena.clone()) }
    }

    /// Returns a name for everything that the bits of results depend on.
    pub(crate) fn arithmetic(&self) -> String {
        let properties = self.driver().properties();
        let (major, minor) = properties.capability;
        let tf32 = if self.tf32() { " tf32" } else { "" };
        // The library divides a GEMM by the number of multiprocessors.
        let count = properties.multiprocessors;
        let wgmma = if self.wgmma() { format!(" {BY_WARPGROUPS}") } else { String::new() };
        format!("cuda sm_{major}{minor} x{count} {}{tf32}{wgmma}", self.driver().versions())
    }

    /// Returns the address of the flag that kernels set if a term of an exact sum is out of range:
    /// a `u32`.
    pub(crate) fn out_of_range(&self) -> u64 {
        self.shared.flags.base()
    }

    /// Returns whether no term was out of range since the last call. Waits for all work so far.
    pub(crate) fn take_in_range(&self) -> Result<bool> {
        let mut flag = [0u32];
        // SAFETY: the flag is a word of a region of its own.
        unsafe {
            self.read(self.out_of_range(), &mut flag)?;
            if flag[0] != 0 {
                self.driver().clear(self.stream()?, self.out_of_range(), size_of_val(&flag))?;
            }
        }
        Ok(flag[0] == 0)
    }

    /// Returns the driver.
    pub fn driver(&self) -> &dyn Driver {
        &*self.shared.stream.driver
    }

    /// Counts a launch.
    pub(crate) fn count_launch(&self) {
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of kernels, matmuls, copies and clears that operations have put into the stream.
    pub(crate) fn num_launches(&self) -> u64 {
        self.shared.launches.load(Ordering::Relaxed)
    }

    /// Returns the stream, which all work so far has been put into.
    pub(crate) fn stream(&self) -> Result<Stream> {
        self.settle()?;
        Ok(self.raw_stream())
    }

    /// Returns the stream, which lacks the work of a repetition under way.
    fn raw_stream(&self) -> Stream {
        self.shared.stream.stream
    }

    /// Returns whether f32 products may use TF32.
    pub(crate) fn tf32(&self) -> bool {
        self.shared.options.tf32
    }

    /// Returns whether attention of bf16 multiplies by warpgroups.
    pub(crate) fn wgmma(&self) -> bool {
        self.shared.options.wgmma
    }

    /// Loads all kernels that models with heads of these sizes may need, maps the memory of all tables, and
    /// allocates what matmuls need.
    pub(crate) fn load_ahead(&self, head_dims: &[usize]) -> Result<()> {
        if is_stand_in() {
            // Nothing waits for anything there.
            return Ok(());
        }
        let serves = |source: &Source| {
            head_dims.iter().any(|&head_dim| attention::serves(source, head_dim, self.wgmma()))
        };
        let mut needed = SOURCES.iter().filter(|source| serves(source));
        needed.try_for_each(|source| self.driver().load_all(source))?;
        self.driver().prepare_matmuls(self.raw_stream())?;
        self.shared.tables.map_all()?;
        self.shared.window.map_all()
    }

    /// Waits until all work so far is done.
    pub fn synchronize(&self) -> Result<()> {
        self.driver().synchronize(self.stream()?)
    }

    /// Returns the device address of a table, valid for work put into the stream before the next
    /// table is requested, or while it is among the latest 512, of 256 MiB in all.
    pub(crate) fn table<T: bytes::Plain>(&self, values: &[T]) -> Result<u64> {
        let bytes = bytes::as_bytes(values);
        match self.repeated_table(bytes)? {
            Some(address) => Ok(address),
            None => self.shared.tables.send(bytes),
        }
    }

    /// Returns the device address of a named table, created only if it is not on the device. The
    /// name stands for one content during the process.
    pub(crate) fn named_table<T: bytes::Plain>(
        &self,
        name: (u64, usize),
        make: impl FnOnce() -> Vec<T>,
    ) -> Result<u64> {
        match self.shared.tables.find(name) {
            Some(address) => Ok(address),
            None => {
                // It may take the place of tables that work under way reads.
                self.settle()?;
                self.shared.tables.send_named(name, bytes::as_bytes(&make()))
            }
        }
    }

    /// Reads from the device, after all work so far.
    ///
    /// # Safety
    /// There are as many numbers at the address.
    pub(crate) unsafe fn read<T: bytes::Plain>(&self, from: u64, to: &mut [T]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.shared.window.read(self.stream()?, from, bytes::as_bytes_mut(to)) }
    }

    /// Writes to the device, after all work so far.
    ///
    /// # Safety
    /// There is room for as many numbers at the address.
    pub(crate) unsafe fn write<T: bytes::Plain>(&self, from: &[T], to: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.shared.window.write(self.stream()?, bytes::as_bytes(from), to) }
    }
}

/// Creates a CUDA error.
pub(crate) fn failed(what: impl Into<String>, reason: impl Into<String>) -> KernelError {
    KernelError::Cuda { what: what.into(), reason: reason.into() }
}

/// Plain numbers as bytes.
pub mod bytes {
    /// Types without padding of which every bit pattern is a value.
    ///
    /// # Safety
    /// As above.
    pub unsafe trait Plain: Copy {}

    // SAFETY: numbers, and arrays of them.
    unsafe impl Plain for u8 {}
    // SAFETY: as above.
    unsafe impl Plain for u32 {}
    // SAFETY: as above.
    unsafe impl Plain for i32 {}
    // SAFETY: as above.
    unsafe impl Plain for f32 {}
    // SAFETY: as above.
    unsafe impl Plain for f64 {}
    // SAFETY: as above.
    unsafe impl Plain for i64 {}
    // SAFETY: as above.
    unsafe impl Plain for half::bf16 {}
    // SAFETY: as above.
    unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

    pub(crate) fn as_bytes<T: Plain>(values: &[T]) -> &[u8] {
        // SAFETY: the numbers have no padding, so every byte is one of theirs.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    pub(crate) fn as_bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
        // SAFETY: as above, and every pattern of bits is a number.
        unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
    }
}
