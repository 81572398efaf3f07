//! What the back end asks of CUDA: memory, streams, kernels and products.
//!
//! NVIDIA's libraries give it on a GPU. `tandem-emulated` gives it on the host's processor, so that kernels are tested where there
//! is no GPU. Nothing above this line knows which of the two it has.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use crate::{DType, Result};

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// As the vendor names it.
    pub name: String,
    /// Which of the machine's devices, counted from 0 among those that this process may use.
    pub ordinal: usize,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may ask for, in bytes.
    pub shared_memory: usize,
    /// Memory of the device, in bytes.
    pub total_memory: usize,
}

/// A queue of work that is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A place in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u64);

/// Which of the kernels' source files, and its text.
#[derive(Debug)]
pub struct Source {
    /// File name, as `norm.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Whether the compiler may round a product and a sum once, as one operation. Not where results have the processor's bits.
    pub fused: bool,
}

/// How many threads run a kernel.
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
    /// Blocks in one dimension, without dynamic shared memory.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::of([blocks, 1, 1], threads)
    }

    /// Blocks in three dimensions.
    ///
    /// # Panics
    /// If there are more than a grid can have.
    pub fn of(blocks: [usize; 3], threads: u32) -> Self {
        let blocks = blocks.map(|n| u32::try_from(n).expect("fewer than 2^32 blocks"));
        Self { blocks, threads, shared: 0 }
    }

    /// With so many bytes of dynamic shared memory.
    #[must_use]
    pub fn with_shared(self, shared: usize) -> Self {
        Self { shared, ..self }
    }
}

/// One argument of a kernel, as the bits that it is passed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arg {
    bits: u64,
    size: usize,
}

impl Arg {
    /// Where the bits lie.
    pub fn pointer(&self) -> *const u64 {
        &raw const self.bits
    }

    /// How many bytes of them count.
    pub fn size(&self) -> usize {
        self.size
    }

    /// An address in device memory.
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

/// Yes is 1 in an `int`.
impl From<bool> for Arg {
    fn from(x: bool) -> Self {
        Self { bits: u64::from(x), size: 4 }
    }
}

/// A factor of a product as it lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Address of the first element.
    pub address: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Whether rows of memory run along the depth: else along the product's rows or columns.
    pub along_depth: bool,
}

/// `d[m,n] = Σ_k a[m,k] · b[n,k] (+ c[m,n])`, summed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Rows, columns and depth.
    pub size: [usize; 3],
    /// Type of both factors.
    pub dtype: DType,
    /// First factor.
    pub a: Factor,
    /// Second factor.
    pub b: Factor,
    /// What is added, of the type of the result: its address and stride; may be the result itself.
    pub c: Option<(u64, usize)>,
    /// The result: its address, and the elements from one row to the next.
    pub d: (u64, usize),
    /// Type of the result.
    pub d_type: DType,
    /// f32 factors may be rounded to 10 bits (TF32).
    pub tf32: bool,
}

/// Address space of a device that memory is put behind as it is needed. Dropped, it gives both back.
pub trait Region: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// The first address.
    fn base(&self) -> u64;

    /// Puts memory behind the first `bytes`, if there is not as much already.
    ///
    /// # Errors
    /// If the device has no more.
    fn grow(&self, bytes: usize) -> Result<()>;

    /// Bytes that memory is behind.
    fn mapped(&self) -> usize;
}

/// CUDA, of one device.
///
/// Addresses are the device's; host pointers that [`Driver::pinned`] gave are addresses of the device too.
///
/// # Safety
/// Implementors do what each function says with memory that pointers and addresses name. Callers of the unsafe ones
/// promise that it is there, and stays as it is until the stream has come so far.
pub unsafe trait Driver: Send + Sync + Any {
    /// What the device is.
    fn properties(&self) -> &Properties;

    /// Bytes of the device that nobody uses.
    ///
    /// # Errors
    /// If the driver does not tell.
    fn free_memory(&self) -> Result<usize>;

    /// Versions of the driver and of what kernels are compiled with: last bits of results may depend on them.
    fn versions(&self) -> String;

    /// Reserves address space of `capacity` bytes on the device.
    ///
    /// # Errors
    /// If the driver refuses.
    fn reserve(&self, capacity: usize) -> Result<Box<dyn Region>>;

    /// Reserves address space of `capacity` bytes in host memory that the device can read and write.
    ///
    /// # Errors
    /// If the operating system or the driver refuses.
    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>>;

    /// A new stream.
    ///
    /// # Errors
    /// If the driver refuses.
    fn new_stream(&self) -> Result<Stream>;

    /// Ends a stream when its work is done.
    fn end_stream(&self, stream: Stream);

    /// Waits until a stream's work is done.
    ///
    /// # Errors
    /// If something in it failed.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// A new event, which is over until it is recorded.
    ///
    /// # Errors
    /// If the driver refuses.
    fn new_event(&self) -> Result<Event>;

    /// Ends an event.
    fn end_event(&self, event: Event);

    /// The event is over when the stream's work so far is done.
    ///
    /// # Errors
    /// If the driver refuses.
    fn record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Later work of the stream waits for the event.
    ///
    /// # Errors
    /// If the driver refuses.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// The caller waits for the event.
    ///
    /// # Errors
    /// If something before it failed.
    fn finish(&self, event: Event) -> Result<()>;

    /// Milliseconds between two events that are over.
    ///
    /// # Errors
    /// If one is not.
    fn elapsed(&self, from: Event, to: Event) -> Result<f32>;

    /// Copies between any two memories.
    ///
    /// # Safety
    /// As the trait says, of `bytes` at both.
    ///
    /// # Errors
    /// If the driver refuses.
    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Copies `rows` rows of `bytes` each, which are `from.1` and `to.1` bytes apart.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    ///
    /// # Errors
    /// If the driver refuses.
    unsafe fn copy_rows(
        &self,
        stream: Stream,
        from: (u64, usize),
        to: (u64, usize),
        rows: usize,
        bytes: usize,
    ) -> Result<()>;

    /// Makes every byte of a range zero.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    ///
    /// # Errors
    /// If the driver refuses.
    unsafe fn clear(&self, stream: Stream, at: u64, bytes: usize) -> Result<()>;

    /// A kernel of a source file, by its name there.
    ///
    /// # Errors
    /// If the file does not compile, or has no such kernel.
    fn function(&self, source: &'static Source, name: &str) -> Result<Function>;

    /// Runs a kernel.
    ///
    /// # Safety
    /// Arguments are the kernel's, and addresses among them name what it reads and writes.
    ///
    /// # Errors
    /// If the driver refuses.
    unsafe fn launch(&self, stream: Stream, function: Function, grid: Grid, args: &[Arg]) -> Result<()>;

    /// A product.
    ///
    /// # Safety
    /// As [`Driver::copy`], of factors and result.
    ///
    /// # Errors
    /// If the library has no way to compute it.
    unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()>;
}

/// Which driver a device was made with.
pub type Drivers = Arc<dyn Driver>;
