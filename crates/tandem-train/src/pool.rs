//! Threads of the process for work on the host that no device does: reading, tokenising, planning.

use std::error::Error;

use rayon::ThreadPoolBuilder;
use tandem_kernels::KernelError;

use crate::Result;

/// Starts the pool that rayon starts at its first use otherwise, where threads that the system refuses are a panic.
///
/// # Errors
/// The system refuses them.
pub(crate) fn start() -> Result<()> {
    match ThreadPoolBuilder::new().build_global() {
        // Without a source the pool is there already.
        Err(refused) if refused.source().is_some() => {
            let source = std::io::Error::other(refused.to_string());
            Err(KernelError::System { what: "starting threads", source }.into())
        }
        _ => Ok(()),
    }
}
