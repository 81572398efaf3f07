//! The NCCL engine on GPUs, with ranks that are processes. Without a GPU every test reports that it
//! is skipped.

use std::io::Write;

use crate::conformance;
use crate::processes::{DEADLINE, Ranks, Role};
use tandem_comm::nccl::Libraries;
use tandem_comm::{CommError, ProcessGroup, Reduction, Result};

const MAX_RANKS: usize = 8;

/// The test that ranks run.
const CHILD: &str = "nccl::child";

/// Runs a rank in its role; in the test process this is an empty test.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let group = role.meet().and_then(|control| Libraries::open()?.group(control, None, role.deadline));
    let result = group.and_then(|mut group| act(&role, &mut group));
    role.report(&result.map_or_else(|error| error.to_string(), |()| "ok".to_owned()));
}

fn act(role: &Role, group: &mut ProcessGroup) -> Result<()> {
    match role.name.as_str() {
        "conformance" => {
            conformance::everything(group);
            Ok(())
        }
        "hundred megabytes" => {
            conformance::hundred_megabytes(group);
            Ok(())
        }
        "killed in the middle" => loop {
            group.all_reduce(&mut vec![1i64; 1 << 20], Reduction::Sum)?;
            role.store.add("ready", 1).unwrap();
        },
        name => panic!("no role {name}"),
    }
}

/// Returns the number of GPUs for ranks if there are `needed`; otherwise reports why not.
fn gpus(needed: usize) -> Option<usize> {
    let gpus = Libraries::open().and_then(|libraries| libraries.num_devices());
    let reason = match gpus {
        Ok(gpus) if gpus >= needed => return Some(gpus.min(MAX_RANKS)),
        Ok(gpus) => format!("there are {gpus} GPUs where {needed} are needed"),
        Err(error) => error.to_string(),
    };
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    // Bypasses the capture of test output: a skipped test must not look like a passed one.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {name}: {reason}");
    None
}

#[test]
fn the_conformance_suite_passes_on_as_many_ranks_as_there_are_gpus() {
    let Some(gpus) = gpus(1) else { return };
    for size in 1..=gpus {
        assert_eq!(Ranks::start(CHILD, "conformance", size, 0..size, DEADLINE).results(), vec!["ok"; size]);
    }
}

#[test]
fn a_hundred_megabytes_are_reduced() {
    let Some(gpus) = gpus(2) else { return };
    assert_eq!(Ranks::start(CHILD, "hundred megabytes", gpus, 0..gpus, DEADLINE).results(), vec!["ok"; gpus]);
}

#[test]
fn a_killed_process_is_named_by_the_others() {
    let Some(gpus) = gpus(2) else { return };
    let mut ranks = Ranks::start(CHILD, "killed in the middle", gpus, 0..gpus, DEADLINE);
    while ranks.store.add("ready", 0).unwrap() < 10 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    ranks.kill(1);
    assert_eq!(ranks.results(), vec![CommError::PeerLost { rank: 1 }.to_string(); gpus - 1]);
}
