//! The dry-run device: it records allocations and operations, and computes nothing.

use std::collections::BTreeMap;
use std::fmt::{Arguments, Write};
use std::sync::{Arc, Mutex};

use crate::cuda::Cuda;
use crate::cuda::listing::Lister;
use crate::memory::free_list::{Cut, FreeList};
use crate::memory::memory_use::{MemoryKind, MemoryUse};
use crate::{Backend, DType, OpCost};

/// Operation name of copies between a device and the memory or disk of its host.
pub const TRANSFER: &str = "transfer";

/// Cost of all calls of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Number of calls.
    pub calls: u64,
    /// Floating-point operations (a multiply-add counts two).
    pub flops: f64,
    /// Bytes read and written, at least once for each call.
    pub bytes: f64,
}

/// Place and operation of the memory peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeakLocation {
    /// Place given to [`crate::Device::set_place`]; empty if none was.
    pub place: String,
    /// First operation that ran with that much memory in use; empty if none did.
    pub operation: &'static str,
}

/// The record of a dry run.
#[derive(Debug)]
pub struct Ledger {
    backend: Backend,
    /// Device that lists the GEMMs of a GPU, if asked for.
    lister: Option<Lister>,
    state: Mutex<LedgerState>,
}

#[derive(Debug)]
struct LedgerState {
    memory: FreeList,
    calls: BTreeMap<CallKey, u64>,
    /// Current place.
    place: String,
    peak: PeakLocation,
    /// Set until the first operation after the peak.
    at_peak: bool,
}

/// Calls that are counted together: operation, type, shape, bits of flops and bits of bytes.
type CallKey = (&'static str, DType, [u32; 3], u64, u64);

impl Ledger {
    /// Creates an empty record for a kind of device.
    pub(crate) fn new(backend: Backend) -> Self {
        let (memory, calls) = (FreeList::new(usize::MAX / 2), BTreeMap::new());
        let state = LedgerState {
            memory,
            calls,
            place: String::new(),
            peak: PeakLocation::default(),
            at_peak: false,
        };
        Self { backend, lister: None, state: Mutex::new(state) }
    }

    /// Creates an empty record for a GPU whose GEMMs are listed.
    pub(crate) fn listing(lister: Lister) -> Self {
        Self { lister: Some(lister), ..Self::new(Backend::Cuda) }
    }

    /// Returns the device that lists GEMMs.
    pub(crate) fn lister(&self) -> Option<&Cuda> {
        self.lister.as_ref().map(Lister::cuda)
    }

    /// Returns the kind of device that the dry run stands for.
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LedgerState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Adds one call.
    pub fn record(&self, work: &OpCost) {
        let OpCost { op, flops, bytes, dtype, shape } = *work;
        let mut state = self.lock();
        *state.calls.entry((op, dtype, shape, flops.to_bits(), bytes.to_bits())).or_default() += 1;
        if std::mem::take(&mut state.at_peak) {
            state.peak.operation = op;
        }
    }

    /// Names the place in the step.
    pub fn set_place(&self, place: Arguments<'_>) {
        let mut state = self.lock();
        state.place.clear();
        // A string takes everything.
        let _ = state.place.write_fmt(place);
    }

    /// Begins a phase: forgets costs, and restarts the peak from the memory in use.
    pub fn begin(&self) {
        let mut state = self.lock();
        state.memory.begin();
        state.calls.clear();
        state.peak = PeakLocation { place: state.place.clone(), operation: "" };
        state.at_peak = true;
    }

    /// Returns the cost so far by operation.
    pub fn costs(&self) -> BTreeMap<&'static str, Cost> {
        let mut costs: BTreeMap<_, Cost> = BTreeMap::new();
        for (work, calls) in self.calls() {
            let cost = costs.entry(work.op).or_default();
            cost.calls += calls;
            cost.flops += calls as f64 * work.flops;
            cost.bytes += calls as f64 * work.bytes;
        }
        costs
    }

    /// Returns every operation so far with its number of calls; calls of equal shape and cost are merged.
    pub fn calls(&self) -> Vec<(OpCost, u64)> {
        let call = |(&(op, dtype, shape, flops, bytes), &calls): (&CallKey, &u64)| {
            let (flops, bytes) = (f64::from_bits(flops), f64::from_bits(bytes));
            (OpCost { op, flops, bytes, dtype, shape }, calls)
        };
        self.lock().calls.iter().map(call).collect()
    }

    /// Returns the memory use so far.
    pub fn usage(&self) -> MemoryUse {
        self.lock().memory.usage().clone()
    }

    /// Returns place and operation of the memory peak.
    pub fn moment(&self) -> PeakLocation {
        self.lock().peak.clone()
    }

    /// Returns the high-water mark that the same requests would reach in an arena.
    pub fn high_water(&self) -> usize {
        self.lock().memory.high_water()
    }

    /// Returns the number and the total bytes of allocations.
    pub fn taken(&self) -> (u64, u64) {
        self.lock().memory.taken()
    }
}

/// A recorded allocation: counted until dropped.
#[derive(Debug)]
pub(crate) struct MetaBlock {
    ledger: Arc<Ledger>,
    cut: Cut,
}

impl MetaBlock {
    pub(crate) fn new(ledger: &Arc<Ledger>, kind: MemoryKind, bytes: usize) -> Self {
        let mut state = ledger.lock();
        let before = state.memory.usage().peak;
        let cut = state.memory.cut(kind, bytes).expect("half the address space is enough for a dry run");
        if state.memory.usage().peak > before {
            let LedgerState { peak, place, at_peak, .. } = &mut *state;
            peak.place.clone_from(place);
            (peak.operation, *at_peak) = ("", true);
        }
        drop(state);
        Self { ledger: Arc::clone(ledger), cut }
    }
}

impl Drop for MetaBlock {
    fn drop(&mut self) {
        self.ledger.lock().memory.free(self.cut);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    #[test]
    fn the_moment_of_the_peak_is_the_operation_that_its_memory_was_for() {
        let device = Device::meta();
        let Device::Meta(ledger) = &device else { unreachable!() };
        let alloc = |cols| device.alloc(MemoryKind::Scratch, 1, cols, DType::F32).unwrap();
        let record = |op, flops, bytes| ledger.record(&OpCost::new(op, (1, 1, DType::F32), flops, bytes));
        let kept = alloc(16);
        record("first", 1.0, 2.0);
        device.set_place(format_args!("layer {}", 7));
        let large = alloc(160);
        record("second", 3.0, 4.0);
        drop(large);
        device.set_place(format_args!("layer 8"));
        drop(alloc(32));
        record("second", 3.0, 4.0);
        let moment = |place: &str, operation| PeakLocation { place: place.to_owned(), operation };
        assert_eq!(ledger.moment(), moment("layer 7", "second"));
        assert_eq!(ledger.usage().peak, 64 + 640);
        assert_eq!(ledger.calls()[1], (OpCost::new("second", (1, 1, DType::F32), 3.0, 4.0), 2));
        assert_eq!(ledger.costs()["second"], Cost { calls: 2, flops: 6.0, bytes: 8.0 });

        ledger.begin();
        assert!(ledger.calls().is_empty());
        record("third", 0.0, 0.0);
        assert_eq!(ledger.moment(), moment("layer 8", "third"));
        assert_eq!((ledger.usage().peak, ledger.high_water()), (64, 64 + 640));
        drop(kept);
    }
}
