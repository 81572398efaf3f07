//! The emulated driver: streams whose work runs only when a thread waits for it.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_char, c_uint};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tandem_kernels::cuda::driver::{
    Algorithm, Arg, Driver, Event, Function, Graph, Grid, Matmul, MatmulChoice, Properties, Region, Source,
    Stream,
};
use tandem_kernels::{KernelError, Result};

use crate::matmul::{Order, matmul};
use crate::memory::{Emulation, is_known, is_of_host, translate};

/// A kernel's entry, opaque to Rust.
#[repr(C)]
struct Kernel {
    content: [u8; 0],
}

// SAFETY: these are the functions of `host.cc` with the signatures that they have there.
unsafe extern "C" {
    fn tandem_kernel(name: *const c_char) -> *const Kernel;
    fn tandem_arguments(kernel: *const Kernel, sizes: *mut *const usize) -> c_uint;
    fn tandem_launch(
        kernel: *const Kernel,
        blocks: *const c_uint,
        threads: c_uint,
        shared: usize,
        arguments: *const *const u64,
    );
}

/// An item of work in a stream.
#[derive(Clone)]
enum Work {
    Copy { from: u64, to: u64, bytes: usize },
    Clear { at: u64, bytes: usize },
    Launch { function: Function, grid: Grid, args: Vec<Arg> },
    Matmul(Matmul, Order),
    Record(Event),
    Wait(Event),
}

/// Reason of a panic: NVIDIA's driver crashes then.
const ENDED: &str = "a stream that has not ended";

/// Pending work by stream.
#[derive(Default)]
pub(crate) struct Streams {
    queues: Mutex<HashMap<u64, VecDeque<Work>>>,
    /// Work of streams that are captured.
    captured: Mutex<HashMap<u64, Vec<Work>>>,
}

impl Streams {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, VecDeque<Work>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a stream without work.
    fn begin(&self, stream: Stream) {
        self.lock().insert(stream.0, VecDeque::new());
    }

    /// Puts work into a stream.
    ///
    /// # Panics
    /// The stream has ended, or is captured and the work has to do with other streams.
    fn put(&self, stream: Stream, work: Work) {
        if let Some(captured) = lock(&self.captured).get_mut(&stream.0) {
            assert!(!matches!(work, Work::Record(_) | Work::Wait(_)), "an event in a graph");
            captured.push(work);
            return;
        }
        self.lock().get_mut(&stream.0).expect(ENDED).push_back(work);
    }

    /// Runs all work of a stream.
    ///
    /// # Panics
    /// As [`Self::put`].
    fn finish(&self, stream: Stream) {
        assert!(!lock(&self.captured).contains_key(&stream.0), "a captured stream is waited for");
        let mut queues = self.lock();
        assert!(queues.contains_key(&stream.0), "{ENDED}");
        finish(&mut queues, stream.0, None);
    }

    /// Runs all work of a stream, which takes no more.
    ///
    /// # Panics
    /// As [`Self::put`].
    fn end(&self, stream: Stream) {
        self.finish(stream);
        self.lock().remove(&stream.0);
    }

    /// Runs the work before an event.
    fn reach(&self, event: Event) {
        reach(&mut self.lock(), event);
    }

    /// Runs all pending work.
    pub(crate) fn finish_all(&self) {
        let mut queues = self.lock();
        let streams: Vec<u64> = queues.keys().copied().collect();
        streams.iter().for_each(|&stream| finish(&mut queues, stream, None));
    }
}

type Queues = HashMap<u64, VecDeque<Work>>;

fn reach(queues: &mut Queues, event: Event) {
    let is_it = |work: &Work| matches!(work, Work::Record(recorded) if *recorded == event);
    let stream = queues.iter().find(|(_, queue)| queue.iter().any(is_it)).map(|(&stream, _)| stream);
    if let Some(stream) = stream {
        finish(queues, stream, Some(event));
    }
}

/// Runs a stream's work, up to the last record of an event if one is given.
fn finish(queues: &mut Queues, stream: u64, until: Option<Event>) {
    loop {
        let Some(queue) = queues.get_mut(&stream) else { return };
        let is_it = |work: &Work| matches!(work, Work::Record(recorded) if Some(*recorded) == until);
        if until.is_some() && !queue.iter().any(is_it) {
            return;
        }
        let Some(work) = queue.pop_front() else { return };
        if let Work::Wait(event) = work {
            reach(queues, event);
        } else {
            run(work);
        }
    }
}

fn run(work: Work) {
    match work {
        Work::Copy { from, to, bytes } => {
            let (from, to) = (translate(from) as usize, translate(to) as usize);
            // SAFETY: the caller of the copy promised both ranges.
            unsafe {
                std::ptr::copy(
                    std::ptr::with_exposed_provenance::<u8>(from),
                    std::ptr::with_exposed_provenance_mut::<u8>(to),
                    bytes,
                );
            }
        }
        Work::Clear { at, bytes } => {
            // SAFETY: as above.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(translate(at) as usize).write_bytes(0, bytes);
            }
        }
        Work::Launch { function, grid, args } => {
            let pointers: Vec<*const u64> = args.iter().map(Arg::pointer).collect();
            let kernel = std::ptr::with_exposed_provenance(function.0 as usize);
            // SAFETY: the function came from `tandem_kernel`; number and sizes of its arguments
            // were compared.
            unsafe {
                tandem_launch(kernel, grid.blocks.as_ptr(), grid.threads, grid.shared, pointers.as_ptr());
            }
        }
        // SAFETY: as above.
        Work::Matmul(product, order) => unsafe { matmul(&product, order) },
        Work::Record(_) | Work::Wait(_) => {}
    }
}

/// An emulated GPU.
pub struct Emulated {
    properties: Properties,
    free: Arc<AtomicUsize>,
    streams: Arc<Streams>,
    next: AtomicU64,
    /// The faster one of the algorithms.
    fastest: Order,
    choices: Mutex<HashMap<String, Order>>,
    /// Time in which GEMMs alone take some, and that of each event.
    clock: AtomicU64,
    events: Mutex<HashMap<u64, u64>>,
    graphs: Mutex<HashMap<u64, Vec<Work>>>,
}

impl Emulated {
    /// Creates a GPU with this many bytes of memory.
    pub fn new(memory: usize) -> Self {
        // Memory outside arenas comes on top.
        let memory = memory + (1 << 30);
        let properties = Properties {
            name: "emulated".to_owned(),
            ordinal: 0,
            capability: (8, 0),
            multiprocessors: 4,
            shared_memory: 99 << 10,
            total_memory: memory,
            l2_cache: 0,
        };
        Self::from_parts(properties, Arc::new(AtomicUsize::new(memory)), Order::Forward)
    }

    fn from_parts(properties: Properties, free: Arc<AtomicUsize>, fastest: Order) -> Self {
        let (streams, next, clock) = (Arc::default(), AtomicU64::new(1), AtomicU64::new(0));
        let (choices, events, graphs) = Default::default();
        Self { properties, free, streams, next, fastest, choices, clock, events, graphs }
    }

    /// Has GEMMs be faster by the second algorithm, which adds in another order.
    #[must_use]
    pub fn with_faster_second_algorithm(mut self) -> Self {
        self.fastest = Order::Backward;
        self
    }

    /// Makes it a GPU of another compute capability, with the shared memory of a block that such GPUs have.
    #[must_use]
    pub fn with_capability(mut self, capability: (u32, u32)) -> Self {
        self.properties.capability = capability;
        self.properties.shared_memory = if capability == (9, 0) { 227 << 10 } else { 99 << 10 };
        self
    }

    /// Sets the number of the GPU.
    #[must_use]
    pub(crate) fn with_ordinal(mut self, ordinal: usize) -> Self {
        self.properties.ordinal = ordinal;
        self
    }

    /// Opens the same GPU again: one memory, separate streams.
    pub(crate) fn again(&self) -> Self {
        Self::from_parts(self.properties.clone(), self.free.clone(), self.fastest)
    }

    fn put_matmul(&self, stream: Stream, product: &Matmul, order: Order) {
        let time = if order == self.fastest { 1000 } else { 2000 };
        self.clock.fetch_add(time, Ordering::Relaxed);
        self.streams.put(stream, Work::Matmul(*product, order));
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn region(&self, capacity: usize, is_device: bool) -> Result<Box<dyn Region>> {
        Ok(Box::new(Emulation::new(
            capacity,
            is_device,
            (&self.free, self.properties.total_memory),
            &self.streams,
        )?))
    }
}

// SAFETY: every function does what the trait says, possibly later.
unsafe impl Driver for Emulated {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.free.load(Ordering::Relaxed))
    }

    fn versions(&self) -> String {
        "emulated".to_owned()
    }

    fn reserve(&self, capacity: usize) -> Result<Box<dyn Region>> {
        self.region(capacity, true)
    }

    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>> {
        self.region(capacity, false)
    }

    fn new_stream(&self) -> Result<Stream> {
        let stream = Stream(self.number());
        self.streams.begin(stream);
        Ok(stream)
    }

    fn end_stream(&self, stream: Stream) {
        self.streams.end(stream);
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.streams.finish(stream);
        Ok(())
    }

    fn new_event(&self) -> Result<Event> {
        Ok(Event(self.number()))
    }

    fn end_event(&self, event: Event) {
        lock(&self.events).remove(&event.0);
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        lock(&self.events).insert(event.0, self.clock.load(Ordering::Relaxed));
        self.streams.put(stream, Work::Record(event));
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.streams.put(stream, Work::Wait(event));
        Ok(())
    }

    fn finish(&self, event: Event) -> Result<()> {
        self.streams.reach(event);
        Ok(())
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<f32> {
        let events = lock(&self.events);
        let time = |event: Event| {
            let reason = "an event that was not recorded".to_owned();
            events.get(&event.0).ok_or(KernelError::Cuda { what: "elapsed".to_owned(), reason })
        };
        Ok((time(to)? - time(from)?) as f32 / 1e6)
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        for place in [from, to] {
            assert!(is_known(place, bytes), "a copy of memory that is neither a GPU's nor pinned");
        }
        self.streams.put(stream, Work::Copy { from, to, bytes });
        Ok(())
    }

    unsafe fn copy_rows(
        &self,
        stream: Stream,
        from: (u64, usize),
        to: (u64, usize),
        rows: usize,
        bytes: usize,
    ) -> Result<()> {
        for row in 0..rows {
            let (from, to) = (from.0 + (row * from.1) as u64, to.0 + (row * to.1) as u64);
            // SAFETY: the caller's promise.
            unsafe { self.copy(stream, from, to, bytes)? };
        }
        Ok(())
    }

    unsafe fn clear(&self, stream: Stream, at: u64, bytes: usize) -> Result<()> {
        self.streams.put(stream, Work::Clear { at, bytes });
        Ok(())
    }

    fn function(&self, source: &'static Source, name: &str) -> Result<Function> {
        let failed =
            || KernelError::Cuda { what: source.name.to_owned(), reason: format!("no kernel {name}") };
        let text = CString::new(name).map_err(|_| failed())?;
        // SAFETY: the text ends in zero.
        let kernel = unsafe { tandem_kernel(text.as_ptr()) };
        if kernel.is_null() { Err(failed()) } else { Ok(Function(kernel.expose_provenance() as u64)) }
    }

    unsafe fn launch(&self, stream: Stream, function: Function, grid: Grid, args: &[Arg]) -> Result<()> {
        let mut sizes = std::ptr::null();
        let kernel = std::ptr::with_exposed_provenance(function.0 as usize);
        // SAFETY: the function came from `tandem_kernel`, with as many sizes as it says.
        let sizes = unsafe {
            let count = tandem_arguments(kernel, &raw mut sizes);
            std::slice::from_raw_parts(sizes, count as usize)
        };
        let found: Vec<usize> = args.iter().map(Arg::size).collect();
        assert_eq!(found, sizes, "sizes of a kernel's arguments as they are given, and as it has them");
        for arg in args.iter().filter(|arg| arg.size() == 8) {
            // SAFETY: it points to the argument, which is borrowed.
            let bits = unsafe { *arg.pointer() };
            let is_known = !is_of_host(bits) || is_known(bits, 1);
            assert!(is_known, "a kernel is given memory of the host that is not pinned");
        }
        assert!(grid.shared <= self.properties.shared_memory, "{} bytes of shared memory", grid.shared);
        self.streams.put(stream, Work::Launch { function, grid, args: args.to_vec() });
        Ok(())
    }

    unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()> {
        let order = lock(&self.choices).get(&product.key()).copied();
        self.put_matmul(stream, product, order.unwrap_or_default());
        Ok(())
    }

    fn capture(&self, stream: Stream, put: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        lock(&self.streams.captured).insert(stream.0, Vec::new());
        let outcome = put();
        let work = lock(&self.streams.captured).remove(&stream.0).expect("it was captured");
        outcome?;
        let graph = Graph(self.number());
        lock(&self.graphs).insert(graph.0, work);
        Ok(Some(graph))
    }

    unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        let work = lock(&self.graphs).get(&graph.0).expect("a graph that has not ended").clone();
        work.into_iter().for_each(|work| self.streams.put(stream, work));
        Ok(())
    }

    fn end_graph(&self, graph: Graph) {
        lock(&self.graphs).remove(&graph.0).expect("a graph ends once");
    }

    fn algorithms(&self, _product: &Matmul, most: usize) -> Result<Vec<Algorithm>> {
        Ok(Order::ALL.into_iter().take(most).map(Order::algorithm).collect())
    }

    fn accepts(&self, _product: &Matmul, algorithm: &Algorithm) -> Result<bool> {
        Ok(Order::from_algorithm(algorithm).is_some())
    }

    unsafe fn matmul_by(&self, stream: Stream, product: &Matmul, algorithm: &Algorithm) -> Result<()> {
        let order = Order::from_algorithm(algorithm).expect("an algorithm of this driver");
        self.put_matmul(stream, product, order);
        Ok(())
    }

    fn set_choices(&self, choices: &[MatmulChoice]) {
        let orders = choices.iter().filter_map(|MatmulChoice { shape, algorithm }| {
            Some((shape.clone(), Order::from_algorithm(algorithm)?))
        });
        *lock(&self.choices) = orders.collect();
    }

    fn keep(&self, choice: &MatmulChoice) -> Option<Algorithm> {
        Some(choice.algorithm)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

    /// Casts from the CPU's memory, as nobody must.
    fn cast_from_the_host(dtype: DType) {
        let (cpu, gpu) = (Device::cpu(1, 1 << 12).unwrap(), crate::device(1 << 16).unwrap());
        let alloc =
            |device: &Device, dtype| -> Tensor { device.alloc(MemoryKind::Scratch, 1, 64, dtype).unwrap() };
        let (from, mut to) = (alloc(&cpu, DType::F32), alloc(&gpu, dtype));
        ops::cast(&gpu, from.view(), to.view_mut()).unwrap();
    }

    #[test]
    #[should_panic(expected = "a copy of memory that is neither a GPU's nor pinned")]
    fn a_copy_from_memory_that_is_not_pinned_is_an_error() {
        cast_from_the_host(DType::F32);
    }

    #[test]
    #[should_panic(expected = "a kernel is given memory of the host that is not pinned")]
    fn a_kernel_that_reads_memory_that_is_not_pinned_is_an_error() {
        cast_from_the_host(DType::Bf16);
    }
}
