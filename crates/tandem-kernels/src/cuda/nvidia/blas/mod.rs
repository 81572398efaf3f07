//! GEMM on cuBLASLt.
//!
//! The algorithm is chosen once per shape, with strides, types and the alignment of addresses up to
//! 16 bytes, so the position of a tensor does not change the bits. A choice takes the library
//! milliseconds, and batches differ in length: the number of tokens is rounded for it. Algorithms that
//! add parts of the depth into the result in arbitrary order are excluded.

mod plan;
pub(super) mod raw;
mod shape;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::context::Context;
use super::memory::Memory;
use super::raw::Opaque;
use crate::Result;
use crate::cuda::driver::{Matmul, Region, Stream};
use plan::{Plan, WORKSPACE, check};
use raw::{Algorithm, BlasFunctions};
use shape::Shape;

/// cuBLASLt on one GPU.
pub(super) struct Blas {
    context: Arc<Context>,
    library: Arc<BlasFunctions>,
    handle: Opaque,
    plans: Mutex<HashMap<Shape, Arc<Plan>>>,
    /// Choices by rounded shape.
    algorithms: Mutex<HashMap<Shape, Algorithm>>,
    /// Workspace by stream: GEMMs of different streams run concurrently.
    workspaces: Mutex<HashMap<Stream, Memory>>,
}

impl Blas {
    pub(super) fn new(context: &Arc<Context>, library: BlasFunctions) -> Result<Self> {
        context.enter()?;
        let mut handle = 0;
        // SAFETY: the handle is written to where it is; it is given back when this is dropped.
        check("opening it", unsafe { (library.create)(&raw mut handle) })?;
        let (context, library) = (context.clone(), Arc::new(library));
        let (plans, algorithms, workspaces) = Default::default();
        Ok(Self { context, library, handle, plans, algorithms, workspaces })
    }

    /// Returns the version in NVIDIA's format.
    pub(super) fn version(&self) -> String {
        self.library.version_text()
    }

    /// Puts a GEMM into a stream.
    ///
    /// # Safety
    /// Factors, addend and room for the result exist until the stream has come so far.
    pub(super) unsafe fn matmul(&self, stream: Stream, product: &Matmul) -> Result<()> {
        let Matmul { size, a, b, c, d, .. } = *product;
        if size[0] == 0 || size[1] == 0 {
            return Ok(());
        }
        self.context.enter()?;
        let plan = self.plan(product)?;
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
        let algorithm = self.algorithm(shape.rounded())?;
        let plan = Arc::new(Plan::new(&self.library, self.handle, &shape, &algorithm)?);
        plans.insert(shape, plan.clone());
        Ok(plan)
    }

    fn algorithm(&self, rounded: Shape) -> Result<Algorithm> {
        let mut algorithms = lock(&self.algorithms);
        if let Some(algorithm) = algorithms.get(&rounded) {
            return Ok(*algorithm);
        }
        let algorithm = Plan::algorithm(&self.library, self.handle, &rounded)?;
        algorithms.insert(rounded, algorithm);
        Ok(algorithm)
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
        // SAFETY: the handle was made once, and is not used any more.
        unsafe {
            (self.library.destroy)(self.handle);
        }
    }
}
