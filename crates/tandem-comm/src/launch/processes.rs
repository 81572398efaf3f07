//! Ranks that are processes: from a launcher's environment to a group.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::health::watchdog::Vigil;
use crate::health::{abort_flag::Lifeline, failure};
use crate::launch::Launch;
use crate::launch::open_files::{self, Raised};
use crate::store::{Store, StoreServer};
use crate::{CommError, Group, Result, gloo};

/// How long ranks look for the place where they meet: pods and their names come up one after another.
const MEETING: Duration = Duration::from_secs(600);

/// How long a request to the store may take once it is found. A machine that vanishes closes no connection, and a rank that
/// wants to file why it gives up should not be held long by the store's machine being the one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks for the name of an attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// A rank's membership of the job's group.
pub struct Joined {
    /// The group.
    pub group: Group,
    /// The watch over the others, where there are any: until the run ends.
    pub vigil: Option<Vigil>,
    /// What was done about the limit of open files.
    pub raised: Option<Raised>,
    /// Where the others look things up, if this process serves it: until the run ends.
    pub server: Option<StoreServer>,
}

/// Joins the group of all ranks of a launch. Every process calls this, and each is one rank. In a collective a rank waits for
/// another until `deadline`: a process that died is noticed at once, this is for one that hangs.
///
/// Where the launcher does not serve a store, the first rank does. Under torchrun, whose store outlives failed attempts, each
/// attempt has keys of its own.
///
/// # Errors
/// If the place cannot be reached in time, another rank does not come, or the process may not open enough files.
pub fn join(launch: &Launch, deadline: Duration) -> Result<Joined> {
    let Some(meeting) = &launch.meeting_point else {
        return Ok(Joined { group: Group::alone(), vigil: None, raised: None, server: None });
    };
    let (rank, size) = (launch.process, launch.num_processes);
    let serves = !meeting.served && rank == 0;
    let raised = open_files::suffice(open_files::needed(size, true, serves), size)?;
    let server = if serves { Some(StoreServer::bind(meeting.port)?) } else { None };
    Store::connect(&meeting.host, meeting.port, MEETING)?;
    let store = Store::connect(&meeting.host, meeting.port, PATIENCE)?.prefixed("tandem/");
    let has_attempts = std::env::var_os("TORCHELASTIC_RESTART_COUNT").is_some();
    let store = if has_attempts { this_attempt(&store, rank, size)? } else { store };
    let (own, lifeline) = (store.reconnect()?, Lifeline::default());
    let group = gloo::group(store, rank, size, deadline, lifeline.clone())?;
    let vigil = Vigil::begin(own, (rank, size), deadline, group.progress().clone(), lifeline, serves)?;
    Ok(Joined { group, vigil: Some(vigil), raised, server })
}

/// A view of the store for this attempt alone. Agents of several machines count restarts each for itself, and a change of their
/// number not at all, so the count tells no attempt from another. The first rank makes up a name instead. One under which
/// this rank was before, or which is of another number of ranks, or under which a failure is filed, is an earlier attempt's.
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
