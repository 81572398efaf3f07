//! The watchdog: which ranks fail, and what the others report.

use std::time::Duration;

use crate::processes::{DEADLINE, Ranks, Role};
use tandem_comm::tcp::AbortFlag;
use tandem_comm::watchdog::Watchdog;
use tandem_comm::{CommError, Phase, ProcessGroup, Reduction, Result};

/// Limits that are exceeded on purpose, long enough for the other ranks on a busy machine.
const MISSED: Duration = Duration::from_secs(3);

/// The test that ranks run.
const CHILD: &str = "watchdog::child";

/// Runs a rank in its role; in the test process this is an empty test.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let abort_flag = AbortFlag::default();
    let mut group = role.meet_with(abort_flag.clone()).unwrap();
    let (place, progress) = ((role.rank, role.size), group.progress().clone());
    // Where silence is tested, the collectives' deadline is far away.
    let limit = if role.name == "stopped" { MISSED } else { role.deadline };
    let mut watchdog = Watchdog::begin(role.job_store(), place, limit, progress, abort_flag, false).unwrap();
    let result = match role.name.as_str() {
        "stopped" | "killed" => work(&mut group, &role),
        "stands" => stands(&mut group, &role),
        "gives up" if role.rank == 2 => {
            drop(group);
            watchdog.last_words("the disk is full");
            return role.report(&watchdog.own_place());
        }
        "gives up" => group.barrier(),
        "halves" => {
            let mut half = group.split(role.rank % 2).unwrap();
            work(&mut half, &role)
        }
        // Twice the limit of silence.
        "ends early" if role.rank != 1 => group.barrier().map(|()| std::thread::sleep(2 * MISSED)),
        "ends early" => group.barrier(),
        name => panic!("no role {name}"),
    };
    let Err(error) = result else {
        drop(watchdog);
        return role.report("ok");
    };
    let (verdict, story) = watchdog.story(&error);
    role.report(&format!("{story}: {verdict}"));
}

/// Takes steps until something happens.
fn work(group: &mut ProcessGroup, role: &Role) -> Result<()> {
    for step in 1.. {
        group.progress().step(step);
        group.progress().begin_phase(Phase::Reduce);
        group.all_reduce(&mut [0f32; 4], Reduction::Sum)?;
        role.store.add("ready", 1).unwrap();
    }
    unreachable!("there are more steps than time")
}

/// Rank 1 lives, but its forward pass exceeds the others' deadline.
fn stands(group: &mut ProcessGroup, role: &Role) -> Result<()> {
    group.progress().step(7);
    group.progress().begin_phase(Phase::Forward);
    if role.rank == 1 {
        role.store.wait(&["result/0", "result/2"], DEADLINE).unwrap();
    }
    group.progress().begin_phase(Phase::Reduce);
    group.barrier()
}

/// Starts ranks, waits until all of them work, and does `harm`.
fn harmed(role: &str, size: usize, harm: impl FnOnce(&mut Ranks)) -> Ranks {
    let mut ranks = Ranks::start(CHILD, role, size, 0..size, DEADLINE);
    while ranks.store.add("ready", 0).unwrap() < 4 * size as i64 {
        std::thread::sleep(Duration::from_millis(5));
    }
    harm(&mut ranks);
    ranks
}

fn says(result: &str, texts: &[&str]) {
    for text in texts {
        assert!(result.contains(text), "no {text:?} in: {result}");
    }
}

#[test]
fn a_stopped_rank_is_given_up_long_before_the_collectives_deadline() {
    for stopped in [0, 2] {
        let ranks = harmed("stopped", 3, |ranks| ranks.stop(stopped));
        for rank in (0..3).filter(|&rank| rank != stopped) {
            ranks.store.wait(&[&format!("result/{rank}")], DEADLINE).unwrap();
        }
        // Woken up, it finds that the others have failed it.
        ranks.go_on(stopped);
        let results = ranks.results();
        let verdict = CommError::Silent { silent: vec![stopped], limit: MISSED }.to_string();
        for (rank, result) in results.iter().enumerate() {
            says(result, &[&verdict, "at step ", "(process "]);
            let said = if rank == stopped { "was reported lost by the others" } else { "peer lost: rank " };
            says(result, &[said, &format!("rank {stopped} on ")]);
        }
    }
}

#[test]
fn a_rank_that_lives_and_does_not_come_is_named_with_what_it_does() {
    let results = Ranks::start(CHILD, "stands", 3, 0..3, MISSED).results();
    for rank in [0, 2] {
        let late = CommError::Deadline { call: "barrier".into(), missing: vec![1], deadline: MISSED };
        says(
            &results[rank],
            &["peer lost: rank 1 on ", "last seen at step 7, in forward for ", &late.to_string()],
        );
        says(&results[rank], &[&format!("This is rank {rank} on "), "at step 7, in reduce"]);
    }
    says(&results[1], &["was reported lost by the others"]);
}

#[test]
fn a_killed_rank_is_named_with_where_it_was() {
    let results = harmed("killed", 3, |ranks| ranks.kill(1)).results();
    for result in results {
        let lost = CommError::PeerLost { rank: 1 }.to_string();
        says(&result, &["peer lost: rank 1 on ", ", in reduce", &lost]);
    }
}

#[test]
fn the_words_of_a_rank_that_failed_reach_the_others_after_its_connections_closed() {
    let results = Ranks::start(CHILD, "gives up", 3, 0..3, DEADLINE).results();
    let words = CommError::Aborted { rank: 2, reason: "the disk is full".into() }.to_string();
    for rank in [0, 1] {
        says(&results[rank], &["peer lost: rank 2 on ", &words]);
    }
    says(&results[2], &["rank 2 on "]);
}

/// In a split group ranks have other numbers, and the other half's ranks hear nothing of it
/// directly.
#[test]
fn a_rank_lost_in_one_half_ends_both_and_is_named_as_the_job_counts() {
    let results = harmed("halves", 4, |ranks| ranks.kill(3)).results();
    let lost = CommError::PeerLost { rank: 3 }.to_string();
    for result in results {
        says(&result, &["peer lost: rank 3 on ", &lost]);
    }
}

#[test]
fn a_rank_that_is_done_is_not_taken_for_a_silent_one() {
    assert_eq!(Ranks::start(CHILD, "ends early", 3, 0..3, MISSED).results(), ["ok"; 3]);
}
