//! A GPU that takes no time: it counts what it is asked for, and does nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use memmap2::{MmapMut, MmapOptions};
use tandem_kernels::cuda::Gpus;
use tandem_kernels::cuda::driver::{
    Arg, Driver, Drivers, Event, Function, Graph, Grid, Matmul, Properties, Region, Source, Stream,
};
use tandem_kernels::{KernelError, Result};

/// Requests to the GPU so far.
#[derive(Default)]
pub struct Counts {
    pub launches: AtomicU64,
    pub products: AtomicU64,
    pub copies: AtomicU64,
    pub graphs: AtomicU64,
    pub waits: AtomicU64,
    /// Nanoseconds from the end of a wait to the next launch, product or copy: a GPU has nothing to do then.
    pub idle: AtomicU64,
    /// Launches of each kernel.
    kernels: Mutex<BTreeMap<String, u64>>,
    /// True while work is captured, which is not counted.
    is_capturing: AtomicBool,
    /// When the last wait ended, if nothing came after it.
    waited: Mutex<Option<Instant>>,
}

impl Counts {
    /// Launches, products, copies, waits, idle nanoseconds and graphs.
    pub fn now(&self) -> [u64; 6] {
        let counts = [&self.launches, &self.products, &self.copies, &self.waits, &self.idle, &self.graphs];
        counts.map(|count| count.load(Ordering::Relaxed))
    }

    /// Launches of each kernel.
    pub fn kernels(&self) -> BTreeMap<String, u64> {
        self.kernels.lock().expect("nobody panics here").clone()
    }

    fn work(&self, counter: &AtomicU64) -> Result<()> {
        if self.is_capturing.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(waited) = self.waited.lock().expect("nobody panics here").take() {
            self.idle.fetch_add(waited.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        count(counter)
    }

    fn wait(&self) -> Result<()> {
        *self.waited.lock().expect("nobody panics here") = Some(Instant::now());
        count(&self.waits)
    }
}

/// One GPU of so many bytes, and of a name that the table of devices knows.
pub struct Idle {
    counts: Arc<Counts>,
    properties: Properties,
    next: AtomicU64,
    /// Whether the last kernel sampled tokens, which are read next.
    has_sampled: AtomicBool,
    /// Host memory: addresses, and bytes.
    host: Mutex<Vec<(u64, usize)>>,
    /// Names of kernels by their number.
    names: Mutex<HashMap<u64, String>>,
}

/// A machine with one.
pub struct Machine {
    pub counts: Arc<Counts>,
    pub name: String,
}

impl Gpus for Machine {
    fn list(&self) -> Result<Vec<Properties>> {
        Ok(vec![self.properties()])
    }

    fn open(&self, _: usize) -> Result<Drivers> {
        Ok(Arc::new(Idle {
            counts: self.counts.clone(),
            properties: self.properties(),
            next: AtomicU64::new(1),
            has_sampled: AtomicBool::new(false),
            host: Mutex::default(),
            names: Mutex::default(),
        }))
    }
}

impl Machine {
    fn properties(&self) -> Properties {
        Properties {
            name: self.name.clone(),
            ordinal: 0,
            capability: (9, 0),
            multiprocessors: 132,
            shared_memory: 99 << 10,
            total_memory: 1 << 40,
            l2_cache: 0,
        }
    }
}

impl Idle {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

fn count(counter: &AtomicU64) -> Result<()> {
    counter.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Addresses without memory, or host memory, of which the system gives what is touched.
enum Space {
    Device { base: u64, mapped: AtomicU64 },
    Host(MmapMut),
}

impl Region for Space {
    fn base(&self) -> u64 {
        match self {
            Self::Device { base, .. } => *base,
            Self::Host(memory) => memory.as_ptr().expose_provenance() as u64,
        }
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        if let Self::Device { mapped, .. } = self {
            mapped.fetch_max(bytes as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn mapped(&self) -> usize {
        match self {
            Self::Device { mapped, .. } => mapped.load(Ordering::Relaxed) as usize,
            Self::Host(memory) => memory.len(),
        }
    }
}

// SAFETY: nothing is done with any memory, but copies to the host are of ones.
unsafe impl Driver for Idle {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.properties.total_memory)
    }

    fn versions(&self) -> String {
        "idle".to_owned()
    }

    fn reserve(&self, _: usize) -> Result<Box<dyn Region>> {
        Ok(Box::new(Space::Device { base: self.number() << 44, mapped: AtomicU64::new(0) }))
    }

    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>> {
        let memory = MmapOptions::new().len(capacity.max(1)).no_reserve_swap().map_anon();
        let memory = memory.map_err(|source| KernelError::System { what: "host memory", source })?;
        let address = memory.as_ptr().expose_provenance() as u64;
        self.host.lock().expect("nobody panics here").push((address, memory.len()));
        Ok(Box::new(Space::Host(memory)))
    }

    fn new_stream(&self) -> Result<Stream> {
        Ok(Stream(self.number()))
    }

    fn end_stream(&self, _: Stream) {}

    fn synchronize(&self, _: Stream) -> Result<()> {
        self.counts.wait()
    }

    fn new_event(&self) -> Result<Event> {
        Ok(Event(self.number()))
    }

    fn end_event(&self, _: Event) {}

    fn record(&self, _: Event, _: Stream) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _: Stream, _: Event) -> Result<()> {
        Ok(())
    }

    fn finish(&self, _: Event) -> Result<()> {
        self.counts.wait()
    }

    fn elapsed(&self, _: Event, _: Event) -> Result<f32> {
        Ok(0.0)
    }

    unsafe fn copy(&self, _: Stream, _: u64, to: u64, bytes: usize) -> Result<()> {
        let is_host = |&(start, len): &(u64, usize)| (start..start + len as u64).contains(&to);
        if self.host.lock().expect("nobody panics here").iter().any(is_host) {
            // Of zeros, logarithms would not be numbers; ones would not be tokens.
            let value = if self.has_sampled.swap(false, Ordering::Relaxed) { 0.0 } else { 1.0 };
            let numbers = std::ptr::with_exposed_provenance_mut::<f64>(to as usize);
            // SAFETY: the caller has room for as many bytes, in host memory that lives.
            (0..bytes / size_of::<f64>()).for_each(|i| unsafe { numbers.add(i).write_unaligned(value) });
        }
        self.counts.work(&self.counts.copies)
    }

    unsafe fn copy_rows(
        &self,
        _: Stream,
        _: (u64, usize),
        _: (u64, usize),
        _: usize,
        _: usize,
    ) -> Result<()> {
        self.counts.work(&self.counts.copies)
    }

    unsafe fn clear(&self, _: Stream, _: u64, _: usize) -> Result<()> {
        self.counts.work(&self.counts.launches)
    }

    fn function(&self, _: &'static Source, name: &str) -> Result<Function> {
        let number = self.number();
        self.names.lock().expect("nobody panics here").insert(number, name.to_owned());
        Ok(Function(number))
    }

    unsafe fn launch(&self, _: Stream, function: Function, _: Grid, _: &[Arg]) -> Result<()> {
        let name = self.names.lock().expect("nobody panics here")[&function.0].clone();
        self.has_sampled.store(name == "sample_rows", Ordering::Relaxed);
        *self.counts.kernels.lock().expect("nobody panics here").entry(name).or_default() += 1;
        self.counts.work(&self.counts.launches)
    }

    unsafe fn matmul(&self, _: Stream, _: &Matmul) -> Result<()> {
        self.counts.work(&self.counts.products)
    }

    fn capture(&self, _: Stream, put: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        self.counts.is_capturing.store(true, Ordering::Relaxed);
        let outcome = put();
        self.counts.is_capturing.store(false, Ordering::Relaxed);
        outcome.map(|()| Some(Graph(self.number())))
    }

    unsafe fn launch_graph(&self, _: Stream, _: Graph) -> Result<()> {
        self.counts.work(&self.counts.graphs)
    }
}
