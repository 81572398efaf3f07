//! Stand-ins for NVIDIA's libraries, as strict as they are where it matters here: memory of the GPU
//! is host memory that can be touched only while it is mapped, calls need a context of the calling
//! thread, and whatever is called is written down.
//!
//! Every test has a GPU of its own: its number says which.

mod blas;
mod driver;
mod graph;
mod memory;
mod nvml;
mod nvrtc;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::cache::Cache;
use super::context::Cuda;
use crate::Result;
use crate::cuda::driver::{Drivers, Stream};

pub(super) use blas::{
    VERSION, computed, num_chosen, num_described, offer_algorithms, refuse_algorithms, set_version,
};
pub(super) use nvml::{UNKNOWN, nvml};
pub(super) use nvrtc::{compiler, num_compiled};

// CUresult.
pub(super) const OK: c_int = 0;
pub(super) const INVALID_VALUE: c_int = 1;
pub(super) const OUT_OF_MEMORY: c_int = 2;
pub(super) const INVALID_IMAGE: c_int = 200;
pub(super) const INVALID_CONTEXT: c_int = 201;

/// Granularity of GPU memory.
pub(super) const GRANULARITY: usize = 2 << 20;
/// Shared memory of a block, and what a kernel of the stand-in has without asking.
const SHARED: c_int = 99 << 10;
const STATIC_SHARED: c_int = 1 << 10;

/// Properties of a GPU.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) capability: (u32, u32),
    pub(super) memory: usize,
    /// Host memory that can be pinned.
    pub(super) host: usize,
    /// True if the host's addresses are the GPU's.
    pub(super) host_pointers: bool,
    /// GPUs of one board reach each other.
    pub(super) board: u32,
    /// GPUs of one bridge are joined by NVLink; 0 is none.
    pub(super) bridge: u32,
}

impl Default for Kind {
    fn default() -> Self {
        Self { capability: (8, 0), memory: 1 << 30, host: 1 << 30, host_pointers: true, board: 0, bridge: 0 }
    }
}

/// A GPU, and what happened to it.
#[derive(Default)]
pub(super) struct Gpu {
    kind: Kind,
    next: u64,
    contexts: usize,
    /// Address space by its start.
    reserved: BTreeMap<u64, usize>,
    /// Memory by its handle.
    allocated: HashMap<u64, usize>,
    /// Memory by where it is mapped: bytes, handle, and whether it may be touched.
    mapped: BTreeMap<u64, (usize, u64, bool)>,
    /// GPUs that may touch what was opened last, by ordinal.
    opened_to: Vec<usize>,
    /// Host memory by its start.
    registered: BTreeMap<u64, usize>,
    streams: Vec<u64>,
    /// Stream that is captured, and its work.
    captured: Option<(u64, graph::Works)>,
    /// Graphs, and executable ones.
    graphs: HashMap<u64, graph::Works>,
    /// When an event was recorded.
    events: HashMap<u64, Option<u64>>,
    /// The text of each module.
    modules: HashMap<u64, String>,
    /// The name of each function, and what dynamic shared memory it may have.
    functions: HashMap<u64, (String, c_int)>,
    calls: Vec<String>,
}

impl Gpu {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn log(&mut self, call: String) {
        self.calls.push(call);
    }
}

/// Settings of all GPUs of this thread before one is opened.
#[derive(Clone, Copy)]
pub(super) struct Answers {
    pub(super) init: c_int,
    pub(super) version: c_int,
    pub(super) count: c_int,
}

thread_local! {
    pub(super) static ANSWERS: Cell<Answers> = const { Cell::new(Answers { init: OK, version: 12_080, count: 10_000 }) };
    /// The GPU whose context is this thread's current one.
    pub(super) static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn gpus() -> MutexGuard<'static, HashMap<usize, Gpu>> {
    static ALL: LazyLock<Mutex<HashMap<usize, Gpu>>> = LazyLock::new(Mutex::default);
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something with the current GPU.
fn on_gpu(act: impl FnOnce(&mut Gpu) -> c_int) -> c_int {
    let Some(ordinal) = CURRENT.get() else { return INVALID_CONTEXT };
    gpus().get_mut(&ordinal).map_or(INVALID_CONTEXT, act)
}

/// A test's own GPU.
pub(super) struct Fake {
    pub(super) ordinal: usize,
}

impl Fake {
    pub(super) fn new(kind: Kind) -> Self {
        // No GPU is ever removed: a test may list all up to its own.
        let mut gpus = gpus();
        let ordinal = gpus.len();
        gpus.insert(ordinal, Gpu { kind, next: 1000, ..Gpu::default() });
        Self { ordinal }
    }

    /// CUDA's driver.
    pub(super) fn cuda() -> Result<Cuda> {
        Cuda::start(driver::functions(), Some(driver::load_functions()), Some(graph::functions()))
    }

    /// Opens it with a cache of kernels.
    pub(super) fn open_with(&self, cache: Cache) -> Result<Drivers> {
        super::device::open_with(&Self::cuda()?, self.ordinal, nvrtc::functions(), blas::functions(), cache)
    }

    /// Opens it without a cache.
    pub(super) fn open(&self) -> Drivers {
        self.open_with(Cache::none()).unwrap()
    }

    /// Creates a GPU of the default kind, and opens it with a stream.
    pub(super) fn opened() -> (Self, Drivers, Stream) {
        let fake = Self::new(Kind::default());
        let driver = fake.open();
        let stream = driver.new_stream().unwrap();
        (fake, driver, stream)
    }

    /// Returns the calls since the last query.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut gpus().get_mut(&self.ordinal).unwrap().calls)
    }

    /// Returns the GPUs that may touch what was opened last.
    pub(super) fn opened_to(&self) -> Vec<usize> {
        gpus()[&self.ordinal].opened_to.clone()
    }

    /// Returns the number of graphs.
    pub(super) fn num_graphs(&self) -> usize {
        gpus()[&self.ordinal].graphs.len()
    }

    /// Whatever is still held: contexts, address space, memory, mappings, pinned host memory,
    /// streams, events, modules.
    pub(super) fn held(&self) -> [usize; 8] {
        let gpus = gpus();
        let Gpu { contexts, reserved, allocated, mapped, registered, streams, events, modules, .. } =
            &gpus[&self.ordinal];
        [
            *contexts,
            reserved.len(),
            allocated.len(),
            mapped.len(),
            registered.len(),
            streams.len(),
            events.len(),
            modules.len(),
        ]
    }
}
