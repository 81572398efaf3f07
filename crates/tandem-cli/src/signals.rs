//! Signal handlers: the first Ctrl-C, SIGTERM or SIGHUP asks the run to save and stop, a second one kills.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;

use dialoguer::console::Term;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::signal::SIGXFSZ;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tandem_comm::launch::LAUNCHER_PROCESS;

/// The last signal that came, or 0.
static LAST: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// Installs the handlers and returns the flag that they set. While the flag is set, Ctrl-C or SIGTERM
/// ends the process at once. Checkpoints are renamed into place when complete, so this damages
/// nothing. A second SIGHUP does nothing: a terminal that closes may send one, and its shell another.
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ending() {
        // Handlers run in the order of registration: the first signal passes this one and then sets
        // the flag.
        if signal != SIGHUP {
            flag::register_conditional_default(signal, Arc::clone(&stop))?;
        }
        flag::register(signal, Arc::clone(&stop))?;
        flag::register_usize(signal, Arc::clone(&LAST), signal as usize)?;
    }
    Ok(stop)
}

/// Shows the terminal's cursor again before Ctrl-C ends the process: lists to choose from hide it.
pub(crate) fn show_cursor_when_interrupted() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT])?;
    thread::spawn(move || {
        if signals.forever().next().is_some() {
            // A terminal that is gone needs no cursor.
            let _ = Term::stderr().show_cursor();
            let _ = emulate_default_handler(SIGINT);
        }
    });
    Ok(())
}

/// Makes a write beyond the limit of file sizes (`ulimit -f`) an error, which names the file. By default the signal ends the
/// process without a word.
pub(crate) fn survive_file_limit() {
    // Without the handler all is as before.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// As [`stop_flag`]. While `at_once` is set, the first signal ends the process: it prepares, which may take long, and
/// has nothing to save.
pub(crate) fn stop_flag_of_run(at_once: &Arc<AtomicBool>) -> io::Result<Arc<AtomicBool>> {
    for signal in ending() {
        flag::register_conditional_default(signal, Arc::clone(at_once))?;
    }
    stop_flag()
}

/// Returns the signals that ask this process to end: SIGHUP only if it was not ignored when the
/// process began, as it is under `nohup`.
fn ending() -> Vec<i32> {
    static IS_HANGUP_HEARD: LazyLock<bool> = LazyLock::new(|| !is_ignored(SIGHUP));
    let mut signals = vec![SIGINT, SIGTERM];
    signals.extend(IS_HANGUP_HEARD.then_some(SIGHUP));
    signals
}

/// Returns whether this process ignores a signal, as far as the system tells.
#[cfg(target_os = "linux")]
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Elsewhere nothing tells without unsafe code, so the signal keeps its default.
#[cfg(not(target_os = "linux"))]
fn is_ignored(_: i32) -> bool {
    true
}

/// Returns 128 plus the number of the last signal, or of SIGTERM if none came.
pub(crate) fn exit_code() -> u8 {
    let last = LAST.load(Ordering::Relaxed);
    128 + u8::try_from(if last == 0 { SIGTERM as usize } else { last }).unwrap_or_default()
}

/// Installs the handler of SIGUSR1 and returns the flag that it sets: the wish for a checkpoint.
pub(crate) fn save_flag() -> io::Result<Arc<AtomicBool>> {
    let save = Arc::new(AtomicBool::new(false));
    flag::register(SIGUSR1, Arc::clone(&save))?;
    Ok(save)
}

/// Signals to a launcher, which passes them on and ends after its ranks.
pub(crate) struct Received(Signals);

impl Received {
    /// Installs the handlers. From now on no such signal ends this process.
    pub(crate) fn begin() -> io::Result<Self> {
        Ok(Self(Signals::new(ending().into_iter().chain([SIGUSR1]))?))
    }

    /// Returns the next signal that came, if any.
    pub(crate) fn next(&mut self) -> Option<Signal> {
        let signal = self.0.pending().next()?;
        if signal == SIGUSR1 {
            return Some(Signal::USR1);
        }
        LAST.store(signal as usize, Ordering::Relaxed);
        Some(match signal {
            SIGINT => Signal::INT,
            SIGHUP => Signal::HUP,
            _ => Signal::TERM,
        })
    }
}

/// Sends a signal to a process that leads a group of its own.
pub(crate) fn send(process: u32, signal: Signal) {
    // A process that has ended needs no signal.
    let _ = pid(process).map(|pid| kill_process(pid, signal));
}

/// Kills a process that leads a group, and the group.
pub(crate) fn kill_group(process: u32) {
    let _ = pid(process).map(|pid| kill_process_group(pid, Signal::KILL));
}

fn pid(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// Makes this process end with the launcher that started it, if one did: its checkpoints stay, and no
/// rank is left behind.
#[cfg(target_os = "linux")]
pub(crate) fn end_with_launcher() {
    let launcher = std::env::var(LAUNCHER_PROCESS).ok().and_then(|id| id.parse().ok()).and_then(pid);
    let Some(launcher) = launcher else { return };
    // Where the kernel has no such signal, the end of the launcher's store stops its ranks a little
    // later.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // The launcher may have ended before. A program that a rank started has the variable too.
    let is_own = rustix::process::getppid() == Some(launcher);
    if !is_own && has_ended(launcher) {
        std::process::exit(i32::from(crate::exit::PEER_LOST));
    }
}

/// Returns whether a process has ended, also if its parent has not yet asked for its status.
#[cfg(target_os = "linux")]
fn has_ended(process: Pid) -> bool {
    if rustix::process::test_kill_process(process).is_err() {
        return true;
    }
    let line = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The state follows the name, which may hold anything.
    let state = line.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('Z' | 'X'))
}

/// There is no such signal elsewhere: the end of the launcher's store stops its ranks.
#[cfg(not(target_os = "linux"))]
pub(crate) fn end_with_launcher() {}
