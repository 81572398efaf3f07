//! Signal handlers: the first Ctrl-C or SIGTERM asks the run to save and stop, a second one kills.

use std::io;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Installs the handlers and returns the flag that they set. While the flag is set, either signal
/// ends the process at once. Checkpoints are renamed into place when complete, so this damages
/// nothing.
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Handlers run in the order of registration: the first signal passes this one and then sets
        // the flag.
        flag::register_conditional_default(signal, Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// Asks a process to save and stop.
pub(crate) fn terminate(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // A process that has ended needs no signal.
    let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
}
