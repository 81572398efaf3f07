//! The GPUs of this process.

use std::sync::OnceLock;

use super::driver::{Drivers, Properties};
use super::nvidia;
use crate::Result;

/// Source of GPU drivers.
pub trait Gpus: Send + Sync {
    /// Lists the GPUs that this process may use, in the order of their numbers.
    ///
    /// # Errors
    /// If there is none, or a library is missing: the message says which, and where it comes from.
    fn list(&self) -> Result<Vec<Properties>>;

    /// Opens the driver of a GPU.
    fn open(&self, ordinal: usize) -> Result<Drivers>;
}

static STAND_INS: OnceLock<Box<dyn Gpus>> = OnceLock::new();

/// Replaces NVIDIA's GPUs for this process, for tests. The first call counts.
pub fn install_emulator(gpus: impl Gpus + 'static) {
    let _ = STAND_INS.set(Box::new(gpus));
}

/// Returns whether [`install_emulator`] was called.
pub fn is_stand_in() -> bool {
    STAND_INS.get().is_some()
}

/// Lists the GPUs that this process may use.
pub fn list() -> Result<Vec<Properties>> {
    gpus().list()
}

/// Opens the driver of a GPU.
pub fn open(ordinal: usize) -> Result<Drivers> {
    gpus().open(ordinal)
}

fn gpus() -> &'static dyn Gpus {
    STAND_INS.get().map_or(&Nvidia, |gpus| &**gpus)
}

struct Nvidia;

impl Gpus for Nvidia {
    fn list(&self) -> Result<Vec<Properties>> {
        nvidia::list()
    }

    fn open(&self, ordinal: usize) -> Result<Drivers> {
        nvidia::open(ordinal)
    }
}
