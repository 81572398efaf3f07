//! GEMM on cuBLASLt.
//!
//! The algorithm is chosen once per shape, with strides, types and the alignment of addresses up to
//! 16 bytes, so the position of a tensor does not change the bits. A choice takes the library
//! milliseconds, and batches differ in length: the number of tokens is rounded for it. It is the first
//! of the library's heuristic, unless [`Blas::set_choices`] names another. Algorithms that add parts of
//! the depth into the result in arbitrary order are excluded.

mod plan;
pub(super) mod raw;
mod shape;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cache::Cache;
use super::context::{Context, version_text};
use super::memory::Memory;
use super::raw::Opaque;
use crate::Result;
use crate::cuda::driver::{Algorithm, Matmul, MatmulChoice, Properties, Region, Stream};
use crate::cuda::failed;
pub(in crate::cuda) use plan::WORKSPACE;
use plan::{Plan, check};
use raw::{BlasFunctions, FP8_VERSION};
use shape::Shape;

/// cuBLASLt on one GPU.
pub(super) struct Blas {
    context: Arc<Context>,
    library: Arc<BlasFunctions>,
    handle: Opaque,
    plans: Mutex<HashMap<Shape, Arc<Plan>>>,
    /// The library's first choice by rounded shape.
    algorithms: Mutex<HashMap<Shape, Algorithm>>,
    /// Choices that precede it, by the key of the shape.
    choices: Mutex<HashMap<String, Algorithm>>,
    /// Plans of the algorithms that are being timed: making one takes longer than a small GEMM.
    candidates: Mutex<HashMap<Algorithm, (Shape, Arc<Plan>)>>,
    cache: Cache,
    /// Kind of GPU and versions that a kept choice is for.
    kind: String,
    /// Workspace by stream: GEMMs of different streams run concurrently.
    workspaces: Mutex<HashMap<Stream, Memory>>,
}

/// Most plans that are kept.
const MOST_PLANS: usize = 4096;

impl Blas {
    pub(super) fn new(context: &Arc<Context>, library: BlasFunctions, cache: Cache) -> Result<Self> {
        context.enter()?;
        let mut handle = 0;
        // SAFETY: the handle is written to where it is; it is given back when this is dropped.
        check("opening it", unsafe { (library.create)(&raw mut handle) })?;
        let (context, library) = (context.clone(), Arc::new(library));
        let Properties { name, capability: (major, minor), multiprocessors, .. } = &context.properties;
        let (driver, version) = (version_text(context.cuda.version()?), library.version_text());
        let kind = format!("{name} sm_{major}{minor} x{multiprocessors} driver {driver} cublaslt {version}");
        let (plans, algorithms, choices, candidates, workspaces) = Default::default();
        Ok(Self { context, library, handle, plans, algorithms, choices, candidates, cache, kind, workspaces })
    }

    /// Returns the version in NVIDIA's format.
    pub(super) fn version(&self) -> String {
        self.library.version_text()
    }

    /// Checks that the library multiplies FP8.
    pub(super) fn check_fp8(&self) -> Result<(), String> {
        // SAFETY: takes nothing.
        if unsafe { (self.library.version)() } >= FP8_VERSION {
            return Ok(());
        }
        Err(format!("its cuBLASLt is {}, and FP8 needs that of CUDA 12 or later", self.version()))
    }

    /// Puts a GEMM into a stream.
    ///
    /// # Safety
    /// Factors, addend and room for the result exist until the stream has come so far.
    pub(super) unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()> {
        if product.size[0] == 0 || product.size[1] == 0 {
            return Ok(());
        }
        self.context.enter()?;
        let plan = self.plan(product)?;
        // SAFETY: the caller's promise; the plan is of this shape.
        unsafe { self.run(stream, product, &plan) }
    }

    /// Puts a GEMM of a given algorithm into a stream.
    ///
    /// # Safety
    /// As [`Self::matmul`].
    pub(super) unsafe fn matmul_by(
        &self,
        stream: Stream,
        product: &Matmul,
        algorithm: &Algorithm,
    ) -> Result<()> {
        self.context.enter()?;
        let plan = self.candidate(&Shape::from_matmul(product), algorithm)?;
        // SAFETY: the caller's promise; the plan is of this shape.
        unsafe { self.run(stream, product, &plan) }
    }

    /// Returns the plan of a shape by a given algorithm.
    fn candidate(&self, shape: &Shape, algorithm: &Algorithm) -> Result<Arc<Plan>> {
        let mut candidates = lock(&self.candidates);
        if let Some((_, plan)) = candidates.get(algorithm).filter(|(of, _)| of == shape) {
            return Ok(plan.clone());
        }
        let plan = Plan::by(&self.library, self.handle, shape, algorithm)?;
        let refused = || failed("cuBLASLt: multiplying", format!("it refuses algorithm {algorithm}"));
        let plan = Arc::new(plan.ok_or_else(refused)?);
        candidates.insert(*algorithm, (*shape, plan.clone()));
        Ok(plan)
    }

    /// # Safety
    /// As [`Self::matmul`]; the plan is of the GEMM's shape.
    unsafe fn run(&self, stream: Stream, product: &Matmul, plan: &Plan) -> Result<()> {
        let Matmul { a, b, c, d, .. } = *product;
        let workspace = if plan.workspace > 0 { self.workspace(stream)? } else { 0 };
        let one = 1f32;
        let factor_of_c = if c.is_some() { 1f32 } else { 0f32 };
        let (c, [of_a, of_b, of_c, of_d]) = (c.map_or(d.0, |(address, _)| address), plan.layouts);
        let scalar = |x: &f32| std::ptr::from_ref(x).cast::<c_void>();
        // SAFETY: the caller's promise; descriptions and algorithm are of this shape, and the
        // workspace is this stream's, of the stated size.
        let outcome = unsafe {
            (self.library.matmul)(
                self.handle,
                plan.desc,
                scalar(&one),
                b.address,
                of_a,
                a.address,
                of_b,
                scalar(&factor_of_c),
                c,
                of_c,
                d.0,
                of_d,
                &raw const plan.algorithm,
                workspace,
                plan.workspace,
                stream.0,
            )
        };
        check("multiplying", outcome)
    }

    fn plan(&self, product: &Matmul) -> Result<Arc<Plan>> {
        let shape = Shape::from_matmul(product);
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(&shape) {
            return Ok(plan.clone());
        }
        // Micro-batches have ever other numbers of tokens, and what a plan takes the host to make is microseconds.
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        let algorithm = self.algorithm(&product.rounded())?;
        let plan = Arc::new(Plan::new(&self.library, self.handle, &shape, &algorithm)?);
        plans.insert(shape, plan.clone());
        Ok(plan)
    }

    /// Returns the algorithm of a rounded shape.
    fn algorithm(&self, rounded: &Matmul) -> Result<Algorithm> {
        if let Some(choice) = lock(&self.choices).get(&rounded.key()) {
            return Ok(*choice);
        }
        let shape = Shape::from_matmul(rounded);
        let mut algorithms = lock(&self.algorithms);
        if let Some(algorithm) = algorithms.get(&shape) {
            return Ok(*algorithm);
        }
        let algorithm = Plan::algorithms(&self.library, self.handle, &shape, 1)?[0];
        algorithms.insert(shape, algorithm);
        Ok(algorithm)
    }

    /// Returns up to `most` algorithms of the library's heuristic.
    pub(super) fn algorithms(&self, product: &Matmul, most: usize) -> Result<Vec<Algorithm>> {
        self.context.enter()?;
        lock(&self.candidates).clear();
        Plan::algorithms(&self.library, self.handle, &Shape::from_matmul(product), most)
    }

    /// Returns whether the library can compute a rounded shape by an algorithm.
    pub(super) fn accepts(&self, product: &Matmul, algorithm: &Algorithm) -> Result<bool> {
        self.context.enter()?;
        let shape = Shape::from_matmul(&product.rounded());
        Ok(Plan::by(&self.library, self.handle, &shape, algorithm)?.is_some())
    }

    /// Sets the algorithms of shapes.
    pub(super) fn set_choices(&self, choices: &[MatmulChoice]) {
        let choices = choices.iter().map(|choice| (choice.shape.clone(), choice.algorithm));
        *lock(&self.choices) = choices.collect();
        lock(&self.candidates).clear();
        lock(&self.plans).clear();
    }

    /// Returns the algorithm that was kept for a shape.
    pub(super) fn kept(&self, shape: &str) -> Option<Algorithm> {
        self.cache.algorithm(&self.kind, shape)
    }

    /// Keeps a choice on disk.
    pub(super) fn keep(&self, choice: &MatmulChoice) -> Option<Algorithm> {
        self.cache.keep_algorithm(&self.kind, choice)
    }

    /// Allocates a stream's workspace.
    pub(super) fn prepare(&self, stream: Stream) -> Result<()> {
        self.context.enter()?;
        self.workspace(stream).map(drop)
    }

    /// Returns the address of a stream's workspace.
    fn workspace(&self, stream: Stream) -> Result<u64> {
        let mut workspaces = lock(&self.workspaces);
        if let Some(memory) = workspaces.get(&stream) {
            return Ok(memory.base());
        }
        let memory = Memory::reserve(&self.context, WORKSPACE)?;
        memory.grow(WORKSPACE)?;
        let base = memory.base();
        workspaces.insert(stream, memory);
        Ok(base)
    }

    /// Frees the workspace of a finished stream.
    pub(super) fn end_stream(&self, stream: Stream) {
        drop(lock(&self.workspaces).remove(&stream));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Blas {
    fn drop(&mut self) {
        // GEMMs may still run.
        self.context.settle();
        lock(&self.plans).clear();
        lock(&self.candidates).clear();
        // SAFETY: the handle was made once, and is not used any more.
        unsafe {
            (self.library.destroy)(self.handle);
        }
    }
}
