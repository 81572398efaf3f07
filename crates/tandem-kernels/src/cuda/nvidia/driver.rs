//! [`Driver`] on NVIDIA's libraries.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::blas::Blas;
use super::context::Context;
use super::memory::Memory;
use super::modules::Modules;
use super::pinned::{Pinned, Seams};
use super::raw::result::CUDA_SUCCESS;
use super::raw::{
    CAPTURE_RELAXED, Copy2D, EVENT_DEFAULT, EVENT_WAIT_DEFAULT, Opaque, STREAM_NON_BLOCKING, attribute,
};
use crate::Result;
use crate::cuda::driver::{
    Algorithm, Arg, Driver, Event, Function, Graph, Grid, Matmul, MatmulChoice, Properties, Region, Source,
    Stream,
};

/// Most arguments of a kernel; CUDA allows more.
const MAX_ARGUMENTS: usize = 64;

/// An NVIDIA GPU.
pub(super) struct Nvidia {
    // Fields drop in this order: the context last.
    blas: Blas,
    modules: Modules,
    seams: Arc<Seams>,
    /// Longest row pitch of a 2D copy, in bytes.
    max_pitch: usize,
    versions: String,
    context: Arc<Context>,
}

impl Nvidia {
    pub(super) fn new(context: Arc<Context>, modules: Modules, blas: Blas) -> Result<Self> {
        let max_pitch = context.cuda.attribute(context.device, attribute::MAX_PITCH)?;
        let (major, minor) = modules.compiler.version();
        let driver = super::context::version_text(context.cuda.version()?);
        let versions = format!("driver {driver} nvrtc {major}.{minor} cublaslt {}", blas.version());
        Ok(Self { blas, modules, seams: Arc::default(), max_pitch, versions, context })
    }

    /// Copies in parts, split where registered pieces of pinned memory meet.
    fn copy_parts(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        for (offset, len) in self.seams.parts(from, to, bytes) {
            let (from, to) = (from + offset as u64, to + offset as u64);
            // SAFETY: the caller of the copy promised both ranges.
            self.context.call("copying", |cuda| unsafe { (cuda.copy)(to, from, len, stream.0) })?;
        }
        Ok(())
    }

    /// Returns whether a copy of rows can be one call.
    fn is_plain(&self, start: u64, pitch: usize, rows: usize, bytes: usize) -> bool {
        let all = (rows - 1).saturating_mul(pitch).saturating_add(bytes);
        pitch >= bytes && pitch <= self.max_pitch && !self.seams.cross(start, all)
    }
}

/// Least compute capability with FP8 products.
const FP8_CAPABILITY: (u32, u32) = (8, 9);

// SAFETY: every function passes its arguments to the library's function of the same contract.
unsafe impl Driver for Nvidia {
    fn properties(&self) -> &Properties {
        &self.context.properties
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.context.memory()?.0)
    }

    fn versions(&self) -> String {
        self.versions.clone()
    }

    fn reserve(&self, capacity: usize) -> Result<Box<dyn Region>> {
        Ok(Box::new(Memory::reserve(&self.context, capacity)?))
    }

    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>> {
        Ok(Box::new(Pinned::reserve(&self.context, &self.seams, capacity)?))
    }

    fn new_stream(&self) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: the stream is written to where it is.
        self.context.call("making a stream", |cuda| unsafe {
            (cuda.create_stream)(&raw mut stream, STREAM_NON_BLOCKING)
        })?;
        Ok(Stream(stream))
    }

    fn end_stream(&self, stream: Stream) {
        // Its errors were reported to the threads that waited for it.
        let _ = self.synchronize(stream);
        self.blas.end_stream(stream);
        // SAFETY: the stream was made by `new_stream`, and ends once.
        let _ = self.context.call("ending a stream", |cuda| unsafe { (cuda.destroy_stream)(stream.0) });
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream was made by `new_stream`.
        self.context.call("waiting for the GPU's work", |cuda| unsafe { (cuda.synchronize_stream)(stream.0) })
    }

    fn new_event(&self) -> Result<Event> {
        let mut event = 0;
        self.context.call("making an event", |cuda| {
            // SAFETY: the event is written to where it is.
            unsafe { (cuda.create_event)(&raw mut event, EVENT_DEFAULT) }
        })?;
        Ok(Event(event))
    }

    fn end_event(&self, event: Event) {
        // SAFETY: the event was made by `new_event`, and ends once.
        let _ = self.context.call("ending an event", |cuda| unsafe { (cuda.destroy_event)(event.0) });
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both were made by this driver.
        self.context.call("recording an event", |cuda| unsafe { (cuda.record_event)(event.0, stream.0) })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both were made by this driver.
        self.context.call("making a stream wait", |cuda| unsafe {
            (cuda.wait_event)(stream.0, event.0, EVENT_WAIT_DEFAULT)
        })
    }

    fn finish(&self, event: Event) -> Result<()> {
        // SAFETY: the event was made by `new_event`.
        self.context.call("waiting for an event", |cuda| unsafe { (cuda.synchronize_event)(event.0) })
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<f32> {
        let mut milliseconds = 0.0;
        self.context.call("taking time", |cuda| {
            // SAFETY: both events were made by `new_event`; the number is written to where it is.
            unsafe { (cuda.elapsed)(&raw mut milliseconds, from.0, to.0) }
        })?;
        Ok(milliseconds)
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.copy_parts(stream, from, to, bytes)
    }

    unsafe fn copy_rows(
        &self,
        stream: Stream,
        from: (u64, usize),
        to: (u64, usize),
        rows: usize,
        bytes: usize,
    ) -> Result<()> {
        if rows == 0 || bytes == 0 {
            return Ok(());
        }
        if rows == 1 || (from.1 == bytes && to.1 == bytes) {
            return self.copy_parts(stream, from.0, to.0, rows * bytes);
        }
        if !self.is_plain(from.0, from.1, rows, bytes) || !self.is_plain(to.0, to.1, rows, bytes) {
            let row = |(start, pitch): (u64, usize), row: usize| start + (row * pitch) as u64;
            return (0..rows).try_for_each(|i| self.copy_parts(stream, row(from, i), row(to, i), bytes));
        }
        let copy = Copy2D::new(from, to, rows, bytes);
        // SAFETY: the caller's promise; the description is read.
        self.context.call("copying rows", |cuda| unsafe { (cuda.copy_2d)(&raw const copy, stream.0) })
    }

    unsafe fn clear(&self, stream: Stream, at: u64, bytes: usize) -> Result<()> {
        for (offset, len) in self.seams.parts(at, at, bytes) {
            let at = at + offset as u64;
            // SAFETY: the caller's promise.
            self.context.call("clearing", |cuda| unsafe { (cuda.set_bytes)(at, 0, len, stream.0) })?;
        }
        Ok(())
    }

    fn function(&self, source: &'static Source, name: &str) -> Result<Function> {
        self.modules.function(source, name)
    }

    fn prepare_matmuls(&self, stream: Stream) -> Result<()> {
        self.blas.prepare(stream)
    }

    fn load_all(&self, source: &'static Source) -> Result<()> {
        self.modules.load_all(source)
    }

    unsafe fn launch(&self, stream: Stream, function: Function, grid: Grid, args: &[Arg]) -> Result<()> {
        let mut pointers: [*mut c_void; MAX_ARGUMENTS] = [std::ptr::null_mut(); MAX_ARGUMENTS];
        for (pointer, arg) in pointers[..args.len()].iter_mut().zip(args) {
            *pointer = arg.pointer().cast_mut().cast();
        }
        let [x, y, z] = grid.blocks;
        let shared = grid.shared as u32;
        let none = std::ptr::null_mut();
        // SAFETY: the caller's promise; arguments live during the call, and their first bytes are
        // the value.
        self.context.call("launching a kernel", |cuda| unsafe {
            let arguments = pointers.as_mut_ptr();
            (cuda.launch)(function.0, x, y, z, grid.threads, 1, 1, shared, stream.0, arguments, none)
        })
    }

    fn check_fp8(&self) -> Result<(), String> {
        match self.context.properties.capability {
            capability if capability >= FP8_CAPABILITY => self.blas.check_fp8(),
            (major, minor) => Err(format!(
                "its compute capability is {major}.{minor}, and FP8 needs {}.{} (Ada) or later",
                FP8_CAPABILITY.0, FP8_CAPABILITY.1
            )),
        }
    }

    unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.blas.matmul(stream, product) }
    }

    fn capture(&self, stream: Stream, put: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        let Some(graphs) = &self.context.cuda.graphs else { return Ok(None) };
        // SAFETY: the stream was made by `new_stream`.
        let begin = |_: &_| unsafe { (graphs.begin_capture)(stream.0, CAPTURE_RELAXED) };
        self.context.call("beginning a graph", begin)?;
        let outcome = put();
        let (mut graph, mut executable) = (0, 0);
        self.context.enter()?;
        // SAFETY: the stream is captured; the graph is written to where it is. A capture that failed leaves none.
        let ended = unsafe { (graphs.end_capture)(stream.0, &raw mut graph) };
        if graph == 0 {
            return Ok(None);
        }
        let mut is_made = outcome.is_ok() && ended == CUDA_SUCCESS;
        // SAFETY: as above; the executable graph does not need the other.
        unsafe {
            is_made = is_made && (graphs.instantiate)(&raw mut executable, graph, 0) == CUDA_SUCCESS;
            (graphs.destroy)(graph);
        }
        Ok(is_made.then_some(Graph(executable)))
    }

    unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        let graphs = self.context.cuda.graphs.as_ref().expect("the graph was made by them");
        // SAFETY: the caller's promise; the graph was made by `capture`.
        self.context.call("launching a graph", |_| unsafe { (graphs.launch)(graph.0, stream.0) })
    }

    fn end_graph(&self, graph: Graph) {
        if let Some(graphs) = &self.context.cuda.graphs {
            // SAFETY: the graph was made by `capture`, and ends once. CUDA waits for its work.
            let _ = self.context.call("ending a graph", |_| unsafe { (graphs.destroy_executable)(graph.0) });
        }
    }

    fn algorithms(&self, product: &Matmul, most: usize) -> Result<Vec<Algorithm>> {
        self.blas.algorithms(product, most)
    }

    fn accepts(&self, product: &Matmul, algorithm: &Algorithm) -> Result<bool> {
        self.blas.accepts(product, algorithm)
    }

    unsafe fn matmul_by(&self, stream: Stream, product: &Matmul, algorithm: &Algorithm) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.blas.matmul_by(stream, product, algorithm) }
    }

    fn set_choices(&self, choices: &[MatmulChoice]) {
        self.blas.set_choices(choices);
    }

    fn kept(&self, shape: &str) -> Option<Algorithm> {
        self.blas.kept(shape)
    }

    fn keep(&self, choice: &MatmulChoice) -> Option<Algorithm> {
        self.blas.keep(choice)
    }
}

const _: () = {
    // Arguments are passed by address, and their first bytes count.
    assert!(cfg!(target_endian = "little"));
    assert!(size_of::<Opaque>() == 8 && size_of::<c_int>() == 4);
};
