//! Joining the process group of a launch, one process per rank.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::engines::mpi::{PATH, Session};
use crate::health::abort_flag::AbortFlag;
use crate::health::failure;
use crate::health::watchdog::Watchdog;
use crate::launch::addresses::StoreCard;
use crate::launch::meeting::Meeting;
use crate::launch::open_files::{self, FdLimit};
use crate::launch::{Environment, Launch, environment};
use crate::store::{Store, StoreError, StoreServer};
use crate::{CommError, ProcessGroup, Result, tcp};

/// Timeout of a request to the store. A machine that vanishes closes no connection; a rank that
/// reports its failure should not wait long for a store on that machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval of looking for an attempt's name.
const PAUSE: Duration = Duration::from_millis(100);

/// Maximum bytes of a store's card.
const MAX_CARD: usize = 16 << 10;

/// Engine between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEngine {
    /// [`tcp`].
    Tcp,
    /// The launcher's MPI.
    Mpi,
}

impl ProcessEngine {
    /// Chooses the launcher's MPI if there is one, else TCP.
    pub fn choose(environment: &Environment) -> Self {
        if Session::find(environment).is_ok() { Self::Mpi } else { Self::Tcp }
    }
}

/// A rank's membership of the job's group. Its fields must live until the run ends, in this order.
pub struct JoinedGroup {
    /// The group.
    pub group: ProcessGroup,
    /// MPI, if the group uses it. It ends before the watchdog and the store, which tell it of ranks that
    /// fail at the end.
    pub session: Option<Session>,
    /// Watchdog over the other ranks, if there are any.
    pub watchdog: Option<Watchdog>,
    /// The raised limit of open files, if it was too low.
    pub raised: Option<FdLimit>,
    /// The store's server, if this process serves it.
    pub server: Option<StoreServer>,
}

/// Joins the group of all ranks of a launch; every process is one rank. `deadline` is how long a
/// rank waits for another inside a collective, for processes that hang: a dead process is noticed
/// at once.
///
/// Rank 0 serves the store unless the launcher does. Over MPI it also sends its address. torchrun's
/// store outlives failed attempts, so each attempt has keys of its own.
///
/// # Errors
/// If the ranks do not meet before the meeting's deadline, or it is told to stop.
pub fn join(
    launch: &Launch,
    engine: ProcessEngine,
    deadline: Duration,
    meeting: &mut Meeting<'_>,
) -> Result<JoinedGroup> {
    if launch.num_processes == 1 {
        let group = ProcessGroup::alone();
        return Ok(JoinedGroup { group, session: None, watchdog: None, raised: None, server: None });
    }
    match engine {
        ProcessEngine::Mpi => join_over_mpi(launch, deadline, meeting),
        ProcessEngine::Tcp => join_over_tcp(launch, deadline, meeting),
    }
}

fn join_over_mpi(launch: &Launch, deadline: Duration, meeting: &mut Meeting<'_>) -> Result<JoinedGroup> {
    let mut session = Session::open(&environment(), meeting)?;
    let (rank, size) = (session.rank(), session.size());
    if (rank, size) != (launch.process, launch.num_processes) {
        let found = session.library();
        return Err(CommError::Engine {
            reason: format!(
                "{} ({}) counts this process as rank {rank} of {size}, and {} as {} of {}: it is not the launcher's MPI; \
                 {PATH} names that one's library",
                found.file.display(),
                found.version,
                launch.launcher,
                launch.process,
                launch.num_processes
            ),
        });
    }
    let serves = rank == 0;
    let raised = open_files::suffice(open_files::needed(size, false, serves), size)?;
    let server = if serves { Some(StoreServer::bind(0)?) } else { None };
    let card = match &server {
        Some(server) => StoreCard::new(server.port(), PATIENCE)?.encode(),
        None => Vec::new(),
    };
    let card = session.broadcast(&card, MAX_CARD, meeting)?;
    let card = StoreCard::decode(&card).ok_or_else(|| CommError::Engine {
        reason: format!("rank {rank} cannot read the address of rank 0: all ranks must run the same program"),
    })?;
    let store = card.connect(meeting, PATIENCE)?.prefixed("tandem/");
    let (own, abort_flag) = (store.reconnect()?, AbortFlag::default());
    let group = session.group(store, deadline, abort_flag.clone())?;
    let progress = group.progress().clone();
    let watchdog = Watchdog::begin(own, (rank, size), deadline, progress, abort_flag, serves)?;
    Ok(JoinedGroup { group, session: Some(session), watchdog: Some(watchdog), raised, server })
}

fn join_over_tcp(launch: &Launch, deadline: Duration, meeting: &mut Meeting<'_>) -> Result<JoinedGroup> {
    let (rank, size) = (launch.process, launch.num_processes);
    let place = launch.meeting_point.as_ref().ok_or_else(|| CommError::Engine {
        reason: format!("MASTER_ADDR and MASTER_PORT are not set: {}", super::NO_ADDRESS),
    })?;
    let serves = !place.served && rank == 0;
    let raised = open_files::suffice(open_files::needed(size, true, serves), size)?;
    let server = if serves { Some(StoreServer::bind(place.port)?) } else { None };
    let prefix = launch.job.as_ref().map_or("tandem/".to_owned(), |job| format!("tandem/{job}/"));
    let store = Store::meet(&place.host, place.port, meeting, PATIENCE)?.prefixed(&prefix);
    let has_attempts = std::env::var_os("TORCHELASTIC_RESTART_COUNT").is_some();
    let store = if has_attempts { this_attempt(&store, rank, size, meeting)? } else { store };
    let (own, abort_flag) = (store.reconnect()?, AbortFlag::default());
    let group = tcp::group_with(
        store,
        (rank, size),
        meeting,
        deadline,
        abort_flag.clone(),
        &tcp::Options::from_environment(),
    )?;
    let progress = group.progress().clone();
    let watchdog = Watchdog::begin(own, (rank, size), deadline, progress, abort_flag, serves)?;
    Ok(JoinedGroup { group, session: None, watchdog: Some(watchdog), raised, server })
}

/// Returns a view of the store for this attempt alone. torchrun's restart counts differ between
/// machines and ignore membership changes, so rank 0 invents a name. A name belongs to an earlier
/// attempt if this rank already used it, the number of ranks differs, or a failure is filed under
/// it.
fn this_attempt(store: &Store, rank: usize, size: usize, meeting: &mut Meeting<'_>) -> Result<Store> {
    const KEY: &str = "attempt";
    if rank == 0 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{size}-{}-{}/", std::process::id(), since.as_nanos());
        store.set(KEY, name.as_bytes())?;
        return Ok(store.prefixed(&name));
    }
    let of_size = format!("{size}-");
    let mut earlier = Vec::new();
    loop {
        let name = match store.get(KEY, meeting.pause()) {
            Err(StoreError::Timeout { .. }) => Vec::new(),
            other => other?,
        };
        if name != earlier {
            let text = String::from_utf8_lossy(&name);
            let attempt = store.prefixed(&text);
            if text.starts_with(&of_size)
                && failure::filed(&attempt)?.is_none()
                && attempt.add(&format!("came/{rank}"), 1)? == 1
            {
                return Ok(attempt);
            }
            earlier = name;
        }
        meeting.look(|| "rank 0, which names the attempt".to_owned())?;
        if meeting.is_overdue() {
            let call = "meeting of an attempt".to_owned();
            return Err(CommError::Deadline { call, missing: vec![0], deadline: meeting.deadline() });
        }
        std::thread::sleep(PAUSE);
    }
}
