//! A device that computes nothing: it records allocations and operations. The plan is a dry run on it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::arena::{ALIGNMENT, Kind, MemoryUse};

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
#[derive(Debug, Default)]
pub struct Ledger {
    state: Mutex<LedgerState>,
}

#[derive(Debug, Default)]
struct LedgerState {
    usage: MemoryUse,
    costs: BTreeMap<&'static str, Cost>,
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
        self.lock().usage.clone()
    }
}

/// A recorded allocation: counted until dropped.
#[derive(Debug)]
pub(crate) struct MetaBlock {
    ledger: Arc<Ledger>,
    kind: Kind,
    length: usize,
}

impl MetaBlock {
    pub(crate) fn new(ledger: &Arc<Ledger>, kind: Kind, bytes: usize) -> Self {
        let length = bytes.max(1).next_multiple_of(ALIGNMENT);
        ledger.lock().usage.add(kind, length);
        Self { ledger: Arc::clone(ledger), kind, length }
    }
}

impl Drop for MetaBlock {
    fn drop(&mut self) {
        self.ledger.lock().usage.remove(self.kind, self.length);
    }
}
