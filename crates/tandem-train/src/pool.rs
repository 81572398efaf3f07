//! Threads of the process for work on the host that no device does: reading, tokenising, planning.

use std::error::Error;

use rayon::ThreadPoolBuilder;

use crate::{Result, TrainError};

/// Starts the pool that rayon starts at its first use otherwise, where threads that the system refuses are a panic.
///
/// # Errors
/// The system refuses them.
pub(crate) fn start() -> Result<()> {
    match ThreadPoolBuilder::new().build_global() {
        // Without a source the pool is there already.
        Err(refused) if refused.source().is_some() => {
            Err(TrainError::thread(std::io::Error::other(refused.to_string())))
        }
        _ => Ok(()),
    }
}
