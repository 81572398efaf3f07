//! Ranks that are processes: from a launcher's environment to a group.

use std::time::Duration;

use crate::gloo::Lifeline;
use crate::launch::Launch;
use crate::open_files::{self, Raised};
use crate::store::{Store, StoreServer};
use crate::vigil::Vigil;
use crate::{Group, Result, gloo};

/// How long ranks look for the place where they meet: pods and their names come up one after another.
const MEETING: Duration = Duration::from_secs(600);

/// How long a request to the store may take once it is found. A machine that vanishes closes no connection, and a rank that
/// wants to file why it gives up should not be held long by the store's machine being the one.
const PATIENCE: Duration = Duration::from_secs(5);

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
/// Where the launcher does not serve a store, the first rank does. Attempts that torchrun's agent counts
/// (`TORCHELASTIC_RESTART_COUNT`) use keys of their own, so that nothing of a failed attempt is found by the next.
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
    let store = Store::connect(&meeting.host, meeting.port, PATIENCE)?;
    let attempt = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|_| "0".to_owned());
    let store = store.prefixed(&format!("tandem/attempt-{attempt}/"));
    let (own, lifeline) = (store.reconnect()?, Lifeline::default());
    let group = gloo::group(store, rank, size, deadline, lifeline.clone())?;
    let vigil = Vigil::begin(own, (rank, size), deadline, group.progress().clone(), lifeline, serves)?;
    Ok(Joined { group, vigil: Some(vigil), raised, server })
}
