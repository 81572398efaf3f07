//! Joining the process group of a launch, one process per rank.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::health::watchdog::Watchdog;
use crate::health::{abort_flag::AbortFlag, failure};
use crate::launch::Launch;
use crate::launch::open_files::{self, FdLimit};
use crate::store::{Store, StoreServer};
use crate::{CommError, ProcessGroup, Result, tcp};

/// Time to find the store: pods and their names appear one after another.
const MEETING: Duration = Duration::from_secs(600);

/// Timeout of a request to the store. A machine that vanishes closes no connection; a rank that
/// reports its failure should not wait long for a store on that machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval of looking for an attempt's name.
const PAUSE: Duration = Duration::from_millis(100);

/// Transport between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// [`tcp`].
    #[default]
    Tcp,
    /// Gloo, for comparisons.
    #[cfg(feature = "gloo")]
    Gloo,
}

impl Transport {
    fn group(
        self,
        store: Store,
        rank: usize,
        size: usize,
        deadline: Duration,
        abort_flag: AbortFlag,
    ) -> Result<ProcessGroup> {
        match self {
            Self::Tcp => tcp::group(store, rank, size, deadline, abort_flag),
            #[cfg(feature = "gloo")]
            Self::Gloo => crate::gloo::group(store, rank, size, deadline, abort_flag),
        }
    }
}

/// A rank's membership of the job's group. Its fields must live until the run ends.
pub struct JoinedGroup {
    /// The group.
    pub group: ProcessGroup,
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
/// Rank 0 serves the store unless the launcher does. torchrun's store outlives failed attempts, so
/// each attempt has keys of its own.
pub fn join(launch: &Launch, deadline: Duration, transport: Transport) -> Result<JoinedGroup> {
    let Some(meeting) = &launch.meeting_point else {
        return Ok(JoinedGroup { group: ProcessGroup::alone(), watchdog: None, raised: None, server: None });
    };
    let (rank, size) = (launch.process, launch.num_processes);
    let serves = !meeting.served && rank == 0;
    let raised = open_files::suffice(open_files::needed(size, true, serves), size)?;
    let server = if serves { Some(StoreServer::bind(meeting.port)?) } else { None };
    Store::connect(&meeting.host, meeting.port, MEETING)?;
    let store = Store::connect(&meeting.host, meeting.port, PATIENCE)?.prefixed("tandem/");
    let has_attempts = std::env::var_os("TORCHELASTIC_RESTART_COUNT").is_some();
    let store = if has_attempts { this_attempt(&store, rank, size)? } else { store };
    let (own, abort_flag) = (store.reconnect()?, AbortFlag::default());
    let group = transport.group(store, rank, size, deadline, abort_flag.clone())?;
    let watchdog =
        Watchdog::begin(own, (rank, size), deadline, group.progress().clone(), abort_flag, serves)?;
    Ok(JoinedGroup { group, watchdog: Some(watchdog), raised, server })
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
