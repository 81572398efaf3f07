//! World: MPI, initialised, with all ranks of the job.

use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tandem_dlopen::text;

use super::communicator::{Communicator, Request};
use super::library::MpiLibrary;
use super::raw::{MAX_TEXT, SUCCESS};
use crate::error::{CommError, Result};
use crate::launch::meeting::Meeting;

/// Interval of looking whether a blocking call is still awaited.
const LOOK: Duration = Duration::from_millis(20);

/// MPI of this process, from its initialisation on.
pub(super) struct World {
    pub(super) library: MpiLibrary,
    /// Whether a group has failed: the others then cannot be waited for.
    has_failed: AtomicBool,
    /// Farewells of groups that others have not answered yet.
    farewells: Mutex<Vec<(Communicator, Request)>>,
}

/// Thread that initialised MPI and alone may finalise it.
pub(super) struct MpiThread {
    finalize: Sender<()>,
    finalized: Receiver<()>,
}

/// MPI can be initialised once in a process.
static IS_INITIALIZED: OnceLock<()> = OnceLock::new();

impl World {
    /// Initialises MPI, which returns when all ranks do so.
    pub(super) fn initialize(
        library: MpiLibrary,
        meeting: &mut Meeting<'_>,
    ) -> Result<(Arc<Self>, MpiThread)> {
        let failed = |reason| CommError::Engine { reason };
        let mut is_initialized = 0;
        // SAFETY: this may be asked at any time; the flag is written to a valid address.
        unsafe { (library.functions.initialized)(&raw mut is_initialized) };
        if is_initialized != 0 || IS_INITIALIZED.set(()).is_err() {
            return Err(failed("MPI is initialised already, and a process can do so once".to_owned()));
        }
        let name = library.found.file.display().to_string();
        let (to_caller, begun) = channel();
        let (finalize, is_told) = channel::<()>();
        let (has_finalized, finalized) = channel();
        let run = move || {
            let world = Self { library, has_failed: AtomicBool::new(false), farewells: Mutex::default() };
            let world = world.begin().map(Arc::new);
            let functions = world.as_ref().ok().map(|world| world.library.functions.finalize);
            // A caller that has given up is not there any more.
            let _ = to_caller.send(world);
            if let (Some(function), Ok(())) = (functions, is_told.recv()) {
                // SAFETY: this is the thread that initialised MPI, and no other call comes later.
                unsafe { function() };
                let _ = has_finalized.send(());
            }
        };
        std::thread::Builder::new()
            .name("mpi".to_owned())
            .spawn(run)
            .map_err(|error| failed(format!("the system refuses a thread for MPI: {error}")))?;
        loop {
            match begun.recv_timeout(meeting.pause()) {
                Ok(world) => return Ok((world.map_err(failed)?, MpiThread { finalize, finalized })),
                Err(_) if meeting.is_overdue() => {
                    return Err(failed(format!(
                        "MPI_Init_thread of {name} did not return within {} s: a rank did not start, or the library is not \
                         the launcher's",
                        meeting.deadline().as_secs_f64()
                    )));
                }
                Err(_) => meeting.look(|| format!("the other ranks, in MPI_Init_thread of {name}"))?,
            }
        }
    }

    fn begin(self) -> std::result::Result<Self, String> {
        let (needed, mut provided) = (self.library.constants.thread_multiple, 0);
        let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: MPI is not initialised yet; since MPI-2 it needs no arguments.
        let outcome =
            unsafe { (self.library.functions.init_thread)(none, nothing, needed, &raw mut provided) };
        if outcome != SUCCESS {
            return Err(format!("MPI_Init_thread failed: {}", self.text(outcome)));
        }
        if provided < needed {
            // SAFETY: the thread that initialised MPI.
            unsafe { (self.library.functions.finalize)() };
            return Err(format!(
                "{} ({}) does not allow calls from several threads (MPI_THREAD_MULTIPLE, {needed}; it provides {provided}): \
                 build or choose an MPI that does",
                self.library.found.file.display(),
                self.library.found.version
            ));
        }
        Ok(self)
    }

    /// Returns MPI's text of an error.
    pub(super) fn text(&self, code: c_int) -> String {
        let (mut words, mut len) = (vec![0; MAX_TEXT], 0);
        // SAFETY: there is room for the longest text.
        let outcome =
            unsafe { (self.library.functions.error_string)(code, words.as_mut_ptr(), &raw mut len) };
        // SAFETY: MPI has written a text that ends in zero; before, all was zero.
        let words = if outcome == SUCCESS { unsafe { text(words.as_ptr()) } } else { String::new() };
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        if words.is_empty() { format!("MPI error {code}") } else { format!("{words} (MPI error {code})") }
    }

    pub(super) fn set_failed(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Keeps the farewell of a group until the others have answered it.
    pub(super) fn keep_farewell(&self, communicator: Communicator, request: Request) {
        let mut farewells = self.farewells.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        farewells.push((communicator, request));
    }

    /// Waits until all farewells are answered; returns whether they were when `is_over` ended it.
    pub(super) fn await_farewells(&self, mut is_over: impl FnMut() -> bool) -> bool {
        let mut farewells = {
            let mut kept = self.farewells.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            std::mem::take(&mut *kept)
        };
        loop {
            farewells.retain_mut(|(communicator, request)| {
                let is_done = communicator.is_done(request) == Ok(true);
                if is_done {
                    communicator.memory(request);
                }
                !is_done
            });
            if farewells.is_empty() {
                return true;
            }
            if is_over() {
                return false;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Ends all ranks through the launcher. It may return where the launcher takes its time.
    pub(super) fn abort(&self, code: c_int) {
        // SAFETY: MPI is initialised.
        unsafe { (self.library.functions.abort)(self.library.constants.comm_world, code) };
    }
}

impl MpiThread {
    /// Finalises MPI; returns when that is done, or when `is_over`. No other thread may call MPI
    /// any more.
    pub(super) fn finalize(&self, is_over: impl FnMut() -> bool) {
        if self.finalize.send(()).is_ok() {
            wait(&self.finalized, is_over);
        }
    }
}

/// Runs a blocking call of MPI on a thread of its own. Returns `None` when `is_over`: the thread
/// then blocks until the process ends.
pub(super) fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
    is_over: impl FnMut() -> bool,
) -> Option<T> {
    let (to_caller, outcome) = channel();
    let run = move || {
        // A caller that has given up is not there any more.
        let _ = to_caller.send(call());
    };
    std::thread::Builder::new().name("mpi call".to_owned()).spawn(run).ok()?;
    wait(&outcome, is_over)
}

fn wait<T>(outcome: &Receiver<T>, mut is_over: impl FnMut() -> bool) -> Option<T> {
    let mut pause = Duration::from_micros(50);
    loop {
        let began = Instant::now();
        match outcome.recv_timeout(pause) {
            Ok(outcome) => return Some(outcome),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) if is_over() => return None,
            Err(RecvTimeoutError::Timeout) => pause = (began.elapsed() + pause).min(LOOK),
        }
    }
}
