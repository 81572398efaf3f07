//! The interface to CUDA: memory, streams, kernels and GEMMs.
//!
//! NVIDIA's libraries implement it on a GPU; `tandem-cuda-emulator` implements it on the CPU, so kernels
//! are tested without a GPU. Nothing above the interface knows which implementation it uses.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use super::failed;
use crate::{DType, Result};

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Vendor's name.
    pub name: String,
    /// Number among the GPUs that this process may use, from 0.
    pub ordinal: usize,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Largest shared memory of a block, in bytes.
    pub shared_memory: usize,
    /// Memory of the device, in bytes.
    pub total_memory: usize,
    /// Second-level cache in bytes.
    pub l2_cache: usize,
}

/// A queue of work that runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A place in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// A sequence of work that is put into a stream at once: an executable CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u64);

/// A source file of kernels.
#[derive(Debug)]
pub struct Source {
    /// File name, as `norm.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Lets the compiler fuse multiply and add. False where results must have the CPU's bits.
    pub fused: bool,
    /// Compute capability of the only GPUs that have its instructions, if not all have them.
    pub only: Option<(u32, u32)>,
}

/// Launch dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, in up to three dimensions.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: usize,
}

impl Grid {
    /// Creates a one-dimensional grid without dynamic shared memory.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::with_dims([blocks, 1, 1], threads)
    }

    /// Creates a three-dimensional grid.
    ///
    /// # Panics
    /// If a grid cannot have as many blocks.
    pub fn with_dims(blocks: [usize; 3], threads: u32) -> Self {
        let blocks = blocks.map(|n| u32::try_from(n).expect("fewer than 2^32 blocks"));
        Self { blocks, threads, shared: 0 }
    }

    /// Sets the bytes of dynamic shared memory.
    #[must_use]
    pub fn with_shared(self, shared: usize) -> Self {
        Self { shared, ..self }
    }
}

/// A kernel argument, as raw bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arg {
    bits: u64,
    size: usize,
}

impl Arg {
    /// Returns the address of the bits.
    pub fn pointer(&self) -> *const u64 {
        &raw const self.bits
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Passes an address in device memory.
    pub fn address(address: u64) -> Self {
        Self { bits: address, size: 8 }
    }
}

impl From<i32> for Arg {
    fn from(x: i32) -> Self {
        Self { bits: u64::from(x.cast_unsigned()), size: 4 }
    }
}

impl From<u32> for Arg {
    fn from(x: u32) -> Self {
        Self { bits: u64::from(x), size: 4 }
    }
}

impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        Self { bits: u64::from(x.to_bits()), size: 4 }
    }
}

impl From<f64> for Arg {
    fn from(x: f64) -> Self {
        Self { bits: x.to_bits(), size: 8 }
    }
}

impl From<u64> for Arg {
    fn from(x: u64) -> Self {
        Self { bits: x, size: 8 }
    }
}

impl From<i64> for Arg {
    fn from(x: i64) -> Self {
        Self { bits: x.cast_unsigned(), size: 8 }
    }
}

/// Sizes are `long long` in kernels.
impl From<usize> for Arg {
    fn from(x: usize) -> Self {
        Self { bits: x as u64, size: 8 }
    }
}

/// A `bool` is an `int`, 0 or 1, in kernels.
impl From<bool> for Arg {
    fn from(x: bool) -> Self {
        Self { bits: u64::from(x), size: 4 }
    }
}

/// A factor of a GEMM in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    /// Address of the first element.
    pub address: u64,
    /// Distance between rows in elements.
    pub stride: usize,
    /// True if rows in memory run along the depth; else along the result's rows or columns.
    pub along_depth: bool,
}

/// Type of the factors of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorType {
    /// f32.
    F32,
    /// bfloat16.
    Bf16,
    /// FP8, [`e4m3`](crate::numerics::e4m3). Rows run along the depth; sizes, strides and addresses are
    /// multiples of 16 bytes.
    E4m3,
}

impl FactorType {
    /// Returns the bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

impl From<DType> for FactorType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
        }
    }
}

impl std::fmt::Display for FactorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        })
    }
}

/// A GEMM `d[m,n] = Σ_k a[m,k] · b[n,k] (+ c[m,n])` with f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Rows, columns and depth.
    pub size: [usize; 3],
    /// Type of both factors.
    pub dtype: FactorType,
    /// First factor.
    pub a: Factor,
    /// Second factor.
    pub b: Factor,
    /// Addend of the type of the result: its address and stride; may be the result itself.
    pub c: Option<(u64, usize)>,
    /// Result: its address and row stride.
    pub d: (u64, usize),
    /// Type of the result.
    pub d_type: DType,
    /// f32 factors may be rounded to 10 bits (TF32).
    pub tf32: bool,
}

/// Algorithm of a GEMM in the library's own form (`cublasLtMatmulAlgo_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Algorithm(pub [u64; 8]);

/// Algorithm for all GEMMs of a rounded shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatmulChoice {
    /// Shape, [`Matmul::key`].
    pub shape: String,
    /// Algorithm of the shape.
    pub algorithm: Algorithm,
}

/// Reserved address space of a device, mapped as needed. Dropping it frees memory and address
/// space.
pub trait Region: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the first address.
    fn base(&self) -> u64;

    /// Maps memory behind the first `bytes`.
    fn grow(&self, bytes: usize) -> Result<()>;

    /// Returns the mapped bytes.
    fn mapped(&self) -> usize;
}

/// CUDA on one device. Addresses are the device's; host pointers from [`Driver::pinned`] are
/// addresses of the device too.
///
/// # Safety
/// Implementors access only the memory that a function's arguments name. Callers of the unsafe
/// functions promise that it exists, and stays unchanged until the stream has come so far.
pub unsafe trait Driver: Send + Sync + Any {
    /// Returns the device's properties.
    fn properties(&self) -> &Properties;

    /// Returns the free bytes of the device.
    fn free_memory(&self) -> Result<usize>;

    /// Returns the versions of the driver and of the compiler, on which the bits of results may
    /// depend.
    fn versions(&self) -> String;

    /// Reserves `capacity` bytes of address space on the device.
    fn reserve(&self, capacity: usize) -> Result<Box<dyn Region>>;

    /// Reserves `capacity` bytes of address space for pinned host memory.
    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>>;

    /// Creates a stream.
    fn new_stream(&self) -> Result<Stream>;

    /// Destroys a stream when its work is done.
    fn end_stream(&self, stream: Stream);

    /// Waits until a stream's work is done.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Creates an event, complete until it is recorded.
    fn new_event(&self) -> Result<Event>;

    /// Destroys an event.
    fn end_event(&self, event: Event);

    /// Records the event behind the stream's work so far.
    fn record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes later work of the stream wait for the event.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// Waits for the event on the calling thread.
    fn finish(&self, event: Event) -> Result<()>;

    /// Returns the milliseconds between two complete events.
    fn elapsed(&self, from: Event, to: Event) -> Result<f32>;

    /// Copies between any two memories.
    ///
    /// # Safety
    /// As the trait says, of `bytes` at both.
    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Copies `rows` rows of `bytes` each, `from.1` and `to.1` bytes apart.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn copy_rows(
        &self,
        stream: Stream,
        from: (u64, usize),
        to: (u64, usize),
        rows: usize,
        bytes: usize,
    ) -> Result<()>;

    /// Zeroes a range.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn clear(&self, stream: Stream, at: u64, bytes: usize) -> Result<()>;

    /// Loads all kernels of a source file, so that none is loaded while others run.
    fn load_all(&self, _source: &'static Source) -> Result<()> {
        Ok(())
    }

    /// Allocates what GEMMs of a stream need beside their operands, so that none does so while others run.
    fn prepare_matmuls(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }

    /// Returns a kernel of a source file by name.
    fn function(&self, source: &'static Source, name: &str) -> Result<Function>;

    /// Runs a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's, and their addresses hold what it reads and writes.
    unsafe fn launch(&self, stream: Stream, function: Function, grid: Grid, args: &[Arg]) -> Result<()>;

    /// Checks that [`Driver::matmul`] takes FP8 factors.
    ///
    /// # Errors
    /// Why not.
    fn check_fp8(&self) -> Result<(), String> {
        Ok(())
    }

    /// Computes a GEMM.
    ///
    /// # Safety
    /// As [`Driver::copy`], for factors and result.
    unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()>;

    /// Makes a graph of the kernels, GEMMs, copies and clears that `put` puts into the stream, none of which
    /// runs. `None` if the driver has no graphs or cannot make one of this work.
    fn capture(&self, _stream: Stream, _put: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        Ok(None)
    }

    /// Puts the work of a graph into a stream.
    ///
    /// # Safety
    /// The caller promises what the functions asked for that put its work into the stream when it was captured.
    unsafe fn launch_graph(&self, _stream: Stream, graph: Graph) -> Result<()> {
        Err(failed("launching a graph", format!("{graph:?} is not this driver's")))
    }

    /// Destroys a graph, when its work is done.
    fn end_graph(&self, _graph: Graph) {}

    /// Returns up to `most` algorithms of a GEMM, the library's first choice first. None if the
    /// library offers no choice.
    fn algorithms(&self, _product: &Matmul, _most: usize) -> Result<Vec<Algorithm>> {
        Ok(Vec::new())
    }

    /// Returns whether the library can compute a GEMM by this algorithm.
    fn accepts(&self, _product: &Matmul, _algorithm: &Algorithm) -> Result<bool> {
        Ok(false)
    }

    /// Computes a GEMM by an algorithm of [`Driver::algorithms`].
    ///
    /// # Safety
    /// As [`Driver::matmul`].
    unsafe fn matmul_by(&self, stream: Stream, product: &Matmul, _algorithm: &Algorithm) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.matmul(stream, product) }
    }

    /// Sets the algorithms of [`Driver::matmul`]. Other shapes take the library's first choice.
    fn set_choices(&self, _choices: &[MatmulChoice]) {}

    /// Returns the algorithm of a shape that was kept on disk for this kind of GPU and these versions.
    fn kept(&self, _shape: &str) -> Option<Algorithm> {
        None
    }

    /// Keeps a choice on disk, unless another process was first. Returns the algorithm that is kept,
    /// `None` if nothing can be written.
    fn keep(&self, _choice: &MatmulChoice) -> Option<Algorithm> {
        None
    }
}

/// A shared driver.
pub type Drivers = Arc<dyn Driver>;
