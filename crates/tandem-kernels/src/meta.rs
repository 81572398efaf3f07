//! A device that computes nothing: it records allocations and operations. The plan is a dry run on it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::arena::{Cut, FreeList, Kind, MemoryUse};

/// What an operation would cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// How often it was called.
    pub calls: u64,
    /// Floating-point operations (a multiply-add counts two).
    pub flops: f64,
    /// Bytes read and written at least once.
    pub bytes: f64,
}

/// The record of a dry run.
#[derive(Debug)]
pub struct Ledger {
    state: Mutex<LedgerState>,
}

#[derive(Debug)]
struct LedgerState {
    memory: FreeList,
    costs: BTreeMap<&'static str, Cost>,
}

impl Default for Ledger {
    fn default() -> Self {
        let memory = FreeList::new(usize::MAX / 2);
        Self { state: Mutex::new(LedgerState { memory, costs: BTreeMap::new() }) }
    }
}

impl Ledger {
    fn lock(&self) -> std::sync::MutexGuard<'_, LedgerState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Adds one call of `op`.
    pub fn record(&self, op: &'static str, flops: f64, bytes: f64) {
        let mut state = self.lock();
        let cost = state.costs.entry(op).or_default();
        cost.calls += 1;
        cost.flops += flops;
        cost.bytes += bytes;
    }

    /// Cost by operation so far.
    pub fn costs(&self) -> BTreeMap<&'static str, Cost> {
        self.lock().costs.clone()
    }

    /// Memory so far.
    pub fn usage(&self) -> MemoryUse {
        self.lock().memory.usage().clone()
    }

    /// One past the highest address that the same requests would reach in an arena.
    pub fn high_water(&self) -> usize {
        self.lock().memory.high_water()
    }
}

/// A recorded allocation: counted until dropped.
#[derive(Debug)]
pub(crate) struct MetaBlock {
    ledger: Arc<Ledger>,
    cut: Cut,
}

impl MetaBlock {
    pub(crate) fn new(ledger: &Arc<Ledger>, kind: Kind, bytes: usize) -> Self {
        let cut =
            ledger.lock().memory.cut(kind, bytes).expect("half the address space is enough for a dry run");
        Self { ledger: Arc::clone(ledger), cut }
    }
}

impl Drop for MetaBlock {
    fn drop(&mut self) {
        self.ledger.lock().memory.give_back(self.cut);
    }
}
