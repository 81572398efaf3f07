//! Joining the process group of a launch, one process per rank.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::engines::mpi::{PATH, Session};
use crate::health::abort_flag::AbortFlag;
use crate::health::failure;
use crate::health::watchdog::Watchdog;
use crate::launch::addresses::StoreCard;
use crate::launch::open_files::{self, FdLimit};
use crate::launch::{Environment, Launch, environment};
use crate::store::{Store, StoreServer};
use crate::{CommError, ProcessGroup, Result, tcp};

/// Time to find the store: pods and their names appear one after another.
const MEETING: Duration = Duration::from_secs(600);

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
pub fn join(launch: &Launch, engine: ProcessEngine, deadline: Duration) -> Result<JoinedGroup> {
    if launch.num_processes == 1 {
        let group = ProcessGroup::alone();
        return Ok(JoinedGroup { group, session: None, watchdog: None, raised: None, server: None });
    }
    match engine {
        ProcessEngine::Mpi => join_over_mpi(launch, deadline),
        ProcessEngine::Tcp => join_over_tcp(launch, deadline),
    }
}

fn join_over_mpi(launch: &Launch, deadline: Duration) -> Result<JoinedGroup> {
    let mut session = Session::open(&environment(), MEETING)?;
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
    let card = session.broadcast(&card, MAX_CARD, MEETING)?;
    let card = StoreCard::decode(&card).ok_or_else(|| CommError::Engine {
        reason: format!("rank {rank} cannot read the address of rank 0: all ranks must run the same program"),
    })?;
    let store = card.connect(MEETING, PATIENCE)?.prefixed("tandem/");
    let (own, abort_flag) = (store.reconnect()?, AbortFlag::default());
    let group = session.group(store, deadline, abort_flag.clone())?;
    let progress = group.progress().clone();
    let watchdog = Watchdog::begin(own, (rank, size), deadline, progress, abort_flag, serves)?;
    Ok(JoinedGroup { group, session: Some(session), watchdog: Some(watchdog), raised, server })
}

fn join_over_tcp(launch: &Launch, deadline: Duration) -> Result<JoinedGroup> {
    let (rank, size) = (launch.process, launch.num_processes);
    let meeting = launch.meeting_point.as_ref().ok_or_else(|| CommError::Engine {
        reason: format!("MASTER_ADDR and MASTER_PORT are not set: {}", super::NO_ADDRESS),
    })?;
    let serves = !meeting.served && rank == 0;
    let raised = open_files::suffice(open_files::needed(size, true, serves), size)?;
    let server = if serves { Some(StoreServer::bind(meeting.port)?) } else { None };
    Store::connect(&meeting.host, meeting.port, MEETING)?;
    let store = Store::connect(&meeting.host, meeting.port, PATIENCE)?.prefixed("tandem/");
    let has_attempts = std::env::var_os("TORCHELASTIC_RESTART_COUNT").is_some();
    let store = if has_attempts { this_attempt(&store, rank, size)? } else { store };
    let (own, abort_flag) = (store.reconnect()?, AbortFlag::default());
    let group = tcp::group(store, rank, size, deadline, abort_flag.clone())?;
    let progress = group.progress().clone();
    let watchdog = Watchdog::begin(own, (rank, size), deadline, progress, abort_flag, serves)?;
    Ok(JoinedGroup { group, session: None, watchdog: Some(watchdog), raised, server })
}

/// Returns a view of the store for this attempt alone. torchrun's restart counts differ between
/// machines and ignore membership changes, so rank 0 invents a name. A name belongs to an earlier
/// attempt if this rank already used it, the number of ranks differs, or a failure is filed under
/// it.
fn this_attempt(store: &Store, rank: usize, size: usize) -> Result<Store> {
    const KEY: &str = "attempt";
    if rank == 0 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{size}-{}-{}/", std::process::id(), since.as_nanos());
        store.set(KEY, name.as_bytes())?;
        return Ok(store.prefixed(&name));
    }
    let (until, of_size) = (Instant::now() + MEETING, format!("{size}-"));
    let mut earlier = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let name = store.get(KEY, left)?;
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
        if left.is_zero() {
            let call = "meeting of an attempt".to_owned();
            return Err(CommError::Deadline { call, missing: vec![0], deadline: MEETING });
        }
        std::thread::sleep(PAUSE.min(left));
    }
}
