//! Whole runs on GPUs that the processor emulates: as those on the processor, and the same bits on any number of them.
//!
//! `TANDEM_TEST_CUDA=1` runs them on this machine's GPUs instead.
//!
//! A binary of its own: the emulated GPUs are there for the whole process, and other tests are to find none.

mod attention;
mod autotune;
#[path = "../../../../goldens/formula.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod formula;
mod gpus;
mod measure;
mod memory;
mod offload;
mod one_gpu;
mod online;
mod processor;
#[path = "../it/small.rs"]
#[allow(dead_code, reason = "the other runs use more of it")]
mod small;
#[path = "../it/teacher.rs"]
mod teacher;

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tandem_cuda_emulator::Emulated;
use tandem_kernels::cuda;

/// GPUs of the emulated machine, and what each has. A test fills GPU 4.
const MACHINE: (usize, usize) = (8, 256 << 20);

/// The GPU on which the second algorithm of matmuls is the faster one.
const OTHERWISE: usize = 5;

/// The GPU that multiplies by warpgroups.
const HOPPER: usize = 7;

/// Has this process find its GPUs, and says how many there are.
fn machine() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        if std::env::var_os("TANDEM_TEST_CUDA").is_none() {
            tandem_cuda_emulator::install((0..MACHINE.0).map(|ordinal| {
                let gpu = Emulated::new(MACHINE.1);
                match ordinal {
                    OTHERWISE => gpu.with_faster_second_algorithm(),
                    HOPPER => gpu.with_capability(cuda::WGMMA),
                    _ => gpu,
                }
            }));
        }
        cuda::list().unwrap_or_else(|error| panic!("{error}")).len()
    })
}

/// Returns whether the machine has the GPUs that a test needs, and prints a line if not.
fn has_gpus(count: usize, test: &str) -> bool {
    let found = machine();
    if found < count {
        skipped(test, &format!("it needs {count} GPUs, and there are {found}"));
    }
    found >= count
}

/// Settings for this machine: GPU 0 in place of another single one that is not there, and none, with a line,
/// where a run needs more GPUs.
fn placed<'a>(place: &[&'a str]) -> Option<Vec<&'a str>> {
    const KEY: &str = "compute.devices=cuda:";
    let count = machine();
    let mut own = place.to_vec();
    for setting in &mut own {
        let Some(ordinals) = setting.strip_prefix(KEY) else { continue };
        let ordinals: Vec<usize> = ordinals.split(',').map(|number| number.parse().unwrap()).collect();
        if ordinals.iter().all(|&ordinal| ordinal < count) {
            continue;
        }
        if ordinals.len() > 1 {
            skipped(&place.join(" "), &format!("there are {count} GPUs"));
            return None;
        }
        *setting = "compute.devices=cuda:0";
    }
    Some(own)
}

/// Past the capture of what tests print: in a log, a skipped test must not look like one that passed.
fn skipped(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
}

/// Reserves the machine for a test that computes on all GPUs, or fills one.
fn all_gpus() -> MutexGuard<'static, ()> {
    static ALL: Mutex<()> = Mutex::new(());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}
