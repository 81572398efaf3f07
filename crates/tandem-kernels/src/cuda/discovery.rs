//! Which GPUs there are.

use std::sync::OnceLock;

use super::driver::{Drivers, Properties};
use super::nvidia;
use crate::Result;

/// Where drivers of GPUs come from.
pub trait Gpus: Send + Sync {
    /// What each GPU is that this process may use, in the order of their numbers.
    ///
    /// # Errors
    /// If there is none, or something is missing that one needs: what, and who has it.
    fn list(&self) -> Result<Vec<Properties>>;

    /// The driver of one.
    ///
    /// # Errors
    /// As [`Gpus::list`], and if there are not so many.
    fn open(&self, ordinal: usize) -> Result<Drivers>;
}

static STAND_INS: OnceLock<Box<dyn Gpus>> = OnceLock::new();

/// Has this process find these GPUs instead of NVIDIA's: for tests. The first call counts.
pub fn stand_in(gpus: impl Gpus + 'static) {
    let _ = STAND_INS.set(Box::new(gpus));
}

/// Whether [`stand_in`] was called.
pub fn is_stand_in() -> bool {
    STAND_INS.get().is_some()
}

/// What each GPU is that this process may use.
///
/// # Errors
/// As [`Gpus::list`].
pub fn list() -> Result<Vec<Properties>> {
    gpus().list()
}

/// The driver of a GPU.
///
/// # Errors
/// As [`Gpus::open`].
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
