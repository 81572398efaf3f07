//! Whole runs on GPUs that the processor emulates: as those on the processor, and the same bits on any number of them.
//!
//! `TANDEM_TEST_CUDA=1` runs them on this machine's GPUs instead.

mod gpus;
mod memory;
mod processor;
#[path = "../run/small.rs"]
#[allow(dead_code, reason = "the other runs use more of it")]
mod small;

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// GPUs of the emulated machine, and what each has. No test names the last one, which one of them fills.
const MACHINE: (usize, usize) = (5, 256 << 20);

/// Has this process find its GPUs.
fn machine() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("TANDEM_TEST_CUDA").is_none() {
            tandem_emulated::install(MACHINE.0, MACHINE.1);
        }
    });
}

/// For a test that computes on all GPUs, or fills one.
fn all_gpus() -> MutexGuard<'static, ()> {
    static ALL: Mutex<()> = Mutex::new(());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}
