//! Engine for ranks that are processes, over the cluster's own MPI.
//!
//! Neither building nor starting needs an MPI: [`Session::open`] opens the library at run time, by
//! the constants of its ABI. No header is read and nothing is linked.
//!
//! | ABI | library |
//! |---|---|
//! | MPI 5 standard | `libmpi_abi.so.1` |
//! | MPICH's | `libmpi.so.12` |
//! | Open MPI's | `libmpi.so.40` |
//!
//! `TANDEM_MPI_LIBRARY` in the environment names a file. Otherwise the launcher's folder, the loader
//! and an active virtual environment are searched, for the launcher's own library first.
//!
//! *Same calls.* Each rank chains a hash of its calls, which travels as a mark behind the numbers of
//! each call: no message is sent for it. A rank that finds another mark, or that waits for a second
//! while the rank beside it waits in another call, writes its last calls to the store, and the others
//! follow. The error names the first call that differs, and both ranks. Of the MPIs
//! that were tried, only MPICH bears a message that is longer than its receive. With others, ranks compare
//! marks before each of MPI's own collectives, by a reduction of 16 bytes; sums round the ring need none.
//!
//! *Numbers.* Gathers, broadcasts and short sums of integers are MPI's own, non-blocking and polled,
//! in segments of 1 MiB. MPI's order of float sums is not fixed, so these are added in a fixed order:
//! part `p` of the buffer in the order of ranks `p+1, p+2, …, p`, by a ring of sends and receives.
//! So are bytes, bfloat16, which MPI does not have, and long sums of integers, for which the ring is
//! faster. MPI never sees a caller's memory, because a wait may end before its transfer.
//!
//! *Failures.* The first rank that fails files the reason in the store and sends a notice to the
//! others, whose waits then end with the same error. At the deadline the ranks that hang are those
//! that do not say in the store that they wait. Most launchers end the whole job when a process
//! dies; where they do not, the watchdog cuts the rank's [`AbortFlag`].
//!
//! *End.* MPI is finalised when all ranks have ended well. After a failure, also of the meeting, it is
//! not: finalising waits for all ranks. Then a rank leaves when the others have left too, and after a while ends the
//! job through `MPI_Abort`.

mod abi;
mod communicator;
mod direct;
mod engine;
mod library;
mod mark;
mod messages;
mod raw;
mod ring;
mod segments;
mod staged;
mod wait;
mod world;

pub use direct::Direct;
pub use library::PATH;

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_dlopen::Found;

use self::communicator::Communicator;
use self::library::MpiLibrary;
use self::segments::Segments;
use self::world::{MpiThread, World, blocking};
use crate::error::{CommError, Result};
use crate::group::ProcessGroup;
use crate::health::abort_flag::AbortFlag;
use crate::launch::meeting::Meeting;
use crate::launch::{Environment, mpi};
use crate::store::Store;

/// Returns the most bytes of segments that a rank needs for the collectives of a group of `size` ranks.
pub fn buffer_bytes(size: usize) -> u64 {
    if size <= 1 {
        return 0;
    }
    let of_gather = staged::DEPTH * (staged::MIN_PART * size).max(segments::SEGMENT);
    of_gather.max(ring::MAX_SEGMENTS * segments::SEGMENT) as u64
}

/// Time for the other ranks to leave after a failure.
const LEAVING: Duration = Duration::from_secs(4);
/// Interval of looking whether they have.
const PAUSE: Duration = Duration::from_millis(20);
/// Exit code of a job that can go on from its newest checkpoint, with which a stuck one is aborted.
const LOST: c_int = 75;

/// MPI of this process: initialised until the value is dropped, after all groups. There is one in a
/// process, ever.
pub struct Session {
    world: Arc<World>,
    thread: MpiThread,
    communicator: Communicator,
    /// Job whose failure ends the wait for the other ranks.
    job: Option<(Store, AbortFlag)>,
    /// Whether all ranks have met.
    has_met: bool,
}

impl Session {
    /// Opens the launcher's MPI and initialises it, which returns when all ranks do so.
    ///
    /// # Errors
    /// If no MPI launcher started this process, so that MPI would not find the other ranks; if no
    /// library is found, with all names that were tried; if it does not allow calls from several
    /// threads; if a rank does not start before the meeting's deadline, or the meeting is told to stop.
    pub fn open(environment: &Environment, meeting: &mut Meeting<'_>) -> Result<Self> {
        let failed = |reason| CommError::Engine { reason };
        let launcher = mpi::launcher(environment).map_err(failed)?;
        let library = MpiLibrary::find(launcher, environment).map_err(failed)?;
        let (world, thread) = World::initialize(library, meeting)?;
        let constants = &world.library.constants;
        // Errors of a request that MPI does not ascribe to a communicator are this one's.
        Communicator::new(world.clone(), constants.comm_self).map_err(failed)?;
        let communicator = Communicator::new(world.clone(), constants.comm_world).map_err(failed)?;
        Ok(Self { world, thread, communicator, job: None, has_met: false })
    }

    /// Returns the library that [`Session::open`] would open, without initialising it.
    ///
    /// # Errors
    /// As those of [`Session::open`].
    pub fn find(environment: &Environment) -> Result<Found> {
        let library = mpi::launcher(environment).and_then(|launcher| MpiLibrary::find(launcher, environment));
        library.map(|library| library.found).map_err(|reason| CommError::Engine { reason })
    }

    /// Returns this rank, from 0.
    pub fn rank(&self) -> usize {
        self.communicator.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.communicator.size
    }

    /// Returns the library's version and file.
    pub fn library(&self) -> &Found {
        &self.world.library.found
    }

    /// Creates a group of all ranks, which must all call this. `store` has a prefix that belongs to
    /// this group alone.
    ///
    /// A call in which a rank waits longer than `deadline` for another fails.
    pub fn group(&mut self, store: Store, deadline: Duration, abort_flag: AbortFlag) -> Result<ProcessGroup> {
        self.job = Some((store.clone(), abort_flag.clone()));
        let (world, until) = (self.communicator.clone(), Instant::now() + deadline);
        let own = blocking(move || world.split(0), || abort_flag.is_cut() || Instant::now() >= until);
        let members: Vec<usize> = (0..self.size()).collect();
        let missing = members.iter().copied().filter(|&rank| rank != self.rank()).collect();
        let call = "meeting of the ranks".to_owned();
        let own = own.ok_or(CommError::Deadline { call, missing, deadline })?;
        let own = own.map_err(|reason| CommError::Engine { reason })?;
        self.has_met = true;
        Ok(ProcessGroup::new(Box::new(engine::Mpi::new(
            own,
            store,
            String::new(),
            members,
            deadline,
            abort_flag_of(&self.job),
        ))))
    }

    /// Returns MPI's own sums, for measurements.
    ///
    /// # Panics
    /// If the library has none, which no MPI lacks.
    pub fn direct(&self) -> Direct {
        Direct::new(self.communicator.clone()).expect("every MPI has MPI_Allreduce and floats")
    }

    /// Replaces every rank's `text` by rank 0's, at most `limit` bytes.
    pub fn broadcast(&self, text: &[u8], limit: usize, meeting: &mut Meeting<'_>) -> Result<Vec<u8>> {
        let failed = |reason| CommError::Engine { reason };
        let mut segment = Segments::default().take(8 + limit);
        segment.bytes_mut()[..8].copy_from_slice(&(text.len() as u64).to_le_bytes());
        segment.bytes_mut()[8..8 + text.len()].copy_from_slice(text);
        let request = self.communicator.broadcast(segment, 8 + limit, 0);
        let mut request = request.map_err(failed)?;
        while !self.communicator.is_done(&mut request).map_err(failed)? {
            meeting.look(|| "the address of rank 0's store, over MPI".to_owned())?;
            if meeting.is_overdue() {
                let call = "broadcast of rank 0's address".to_owned();
                return Err(CommError::Deadline { call, missing: vec![0], deadline: meeting.deadline() });
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let segment = self.communicator.memory(&mut request);
        let (len, bytes) = segment.bytes().split_at(8);
        let len = u64::from_le_bytes(*len.first_chunk().expect("8 bytes")) as usize;
        Ok(bytes[..len].to_vec())
    }

    /// Returns whether a failure makes it useless to wait for the other ranks.
    fn is_over(&self) -> bool {
        self.world.has_failed()
            || std::thread::panicking()
            || self.job.as_ref().is_some_and(|(_, abort_flag)| abort_flag.verdict().is_some())
    }

    /// Leaves after a failure: a process that ends without finalising makes the launcher end the
    /// others, which need a moment to report.
    fn leave(&self) {
        const KEY: &str = "left";
        let Some((store, abort_flag)) = &self.job else { return };
        let until = Instant::now() + LEAVING;
        let mut num_left = store.add(KEY, 1);
        while Instant::now() < until && num_left.as_ref().is_ok_and(|&left| (left as usize) < self.size()) {
            std::thread::sleep(PAUSE);
            num_left = store.add(KEY, 0);
        }
        let own_failure = |error| matches!(error, CommError::Aborted { rank, .. } if rank == self.rank());
        let is_own = abort_flag.verdict().is_none_or(own_failure);
        // The last resort, against ranks that hang. A rank's own failure has an exit code of its own.
        if !is_own && num_left.is_ok_and(|left| (left as usize) < self.size()) {
            self.world.abort(LOST);
        }
    }
}

fn abort_flag_of(job: &Option<(Store, AbortFlag)>) -> AbortFlag {
    job.as_ref().map(|(_, abort_flag)| abort_flag.clone()).unwrap_or_default()
}

impl Drop for Session {
    fn drop(&mut self) {
        // Finalising would wait for ranks that never come. Without it, the end of this process makes the
        // launcher end the others.
        if !self.has_met {
            return;
        }
        if self.world.await_farewells(|| self.is_over()) && !self.is_over() {
            self.thread.finalize(|| self.is_over());
        }
        if self.is_over() && !std::thread::panicking() {
            self.leave();
        }
    }
}
