//! Whole runs on GPUs that the processor emulates: as those on the processor, and the same bits on any number of them.
//!
//! `TANDEM_TEST_CUDA=1` runs them on this machine's GPUs instead.

mod gpus;
mod memory;
mod processor;
#[path = "../run/small.rs"]
#[allow(dead_code, reason = "the other runs use more of it")]
mod small;

use std::sync::Once;

/// GPUs of the emulated machine, and what each has.
const MACHINE: (usize, usize) = (4, 256 << 20);

/// Has this process find its GPUs.
fn machine() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("TANDEM_TEST_CUDA").is_none() {
            tandem_emulated::install(MACHINE.0, MACHINE.1);
        }
    });
}
