//! List of a dry run's GEMMs: the code that launches kernels runs on a driver that only takes down what
//! the library would multiply.

use std::collections::HashSet;
use std::fmt::{self, Debug, Formatter};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Arg, Driver, Event, Function, Grid, Matmul, Properties, Region, Source, Stream};
use super::{Cuda, Options};
use crate::Result;

/// Distance between the address ranges of regions: no region is as long.
const RANGE: u64 = 1 << 44;

/// GEMMs of a dry run, one of each shape.
#[derive(Clone, Default)]
pub struct MatmulList(Arc<Mutex<HashSet<Matmul>>>);

impl MatmulList {
    /// Returns the GEMMs so far, without addresses, and forgets them.
    pub fn take(&self) -> Vec<Matmul> {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.drain().collect()
    }
}

/// Device that lists GEMMs.
pub(crate) struct Lister(Cuda);

impl Lister {
    /// Creates a device, and the list that it fills.
    pub(crate) fn new(options: Options) -> Result<(Self, MatmulList)> {
        let list = MatmulList::default();
        let properties = Properties {
            name: "dry run".to_owned(),
            ordinal: 0,
            capability: (9, 0),
            multiprocessors: 132,
            shared_memory: 227 << 10,
            total_memory: usize::MAX / 2,
            l2_cache: 50 << 20,
        };
        let driver = Listing { properties, list: list.clone(), next: AtomicU64::new(1) };
        Ok((Self(Cuda::new(Arc::new(driver), 1, options)?), list))
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        &self.0
    }
}

// A panic leaves at most a list that lacks GEMMs.
impl UnwindSafe for Lister {}
impl RefUnwindSafe for Lister {}

impl Debug for Lister {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lister").finish_non_exhaustive()
    }
}

/// Driver that computes nothing.
struct Listing {
    properties: Properties,
    list: MatmulList,
    next: AtomicU64,
}

impl Listing {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

/// Addresses without memory.
struct Addresses {
    base: u64,
    mapped: AtomicUsize,
}

impl Region for Addresses {
    fn base(&self) -> u64 {
        self.base
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        self.mapped.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Relaxed)
    }
}

/// Zeros in host memory, of which the system gives what is touched.
struct Host {
    base: *mut u64,
    words: usize,
}

// SAFETY: the memory is only reached by address, and its users order their accesses, as with a GPU's.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Host {
    fn new(bytes: usize) -> Self {
        let memory = vec![0u64; bytes.div_ceil(size_of::<u64>())].into_boxed_slice();
        let words = memory.len();
        Self { base: Box::into_raw(memory).cast(), words }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: it was made by a box of as many words.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.base, self.words)) });
    }
}

impl Region for Host {
    fn base(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    fn grow(&self, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn mapped(&self) -> usize {
        self.words * size_of::<u64>()
    }
}

// SAFETY: nothing is done with any memory.
unsafe impl Driver for Listing {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(self.properties.total_memory)
    }

    fn versions(&self) -> String {
        self.properties.name.clone()
    }

    fn reserve(&self, _capacity: usize) -> Result<Box<dyn Region>> {
        Ok(Box::new(Addresses { base: self.number() * RANGE, mapped: AtomicUsize::new(0) }))
    }

    fn pinned(&self, capacity: usize) -> Result<Box<dyn Region>> {
        Ok(Box::new(Host::new(capacity)))
    }

    fn new_stream(&self) -> Result<Stream> {
        Ok(Stream(self.number()))
    }

    fn end_stream(&self, _stream: Stream) {}

    fn synchronize(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }

    fn new_event(&self) -> Result<Event> {
        Ok(Event(self.number()))
    }

    fn end_event(&self, _event: Event) {}

    fn record(&self, _event: Event, _stream: Stream) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _stream: Stream, _event: Event) -> Result<()> {
        Ok(())
    }

    fn finish(&self, _event: Event) -> Result<()> {
        Ok(())
    }

    fn elapsed(&self, _from: Event, _to: Event) -> Result<f32> {
        Ok(0.0)
    }

    unsafe fn copy(&self, _stream: Stream, _from: u64, _to: u64, _bytes: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn copy_rows(
        &self,
        _stream: Stream,
        _from: (u64, usize),
        _to: (u64, usize),
        _rows: usize,
        _bytes: usize,
    ) -> Result<()> {
        Ok(())
    }

    unsafe fn clear(&self, _stream: Stream, _at: u64, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn function(&self, _source: &'static Source, _name: &str) -> Result<Function> {
        Ok(Function(0))
    }

    unsafe fn launch(&self, _stream: Stream, _function: Function, _grid: Grid, _args: &[Arg]) -> Result<()> {
        Ok(())
    }

    unsafe fn matmul(&self, _stream: Stream, product: &Matmul) -> Result<()> {
        let mut list = self.list.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.insert(product.without_addresses());
        Ok(())
    }
}
