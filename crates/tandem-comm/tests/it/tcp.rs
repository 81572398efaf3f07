//! The TCP engine with ranks that are processes: the conformance suite, and ranks that disagree,
//! hang or die.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::conformance;
use crate::disagreement::{
    DIFFERENT_CALLS, LONG_DIFFERENT_CALLS, different_calls, long_difference, long_different_calls,
};
use crate::processes::{DEADLINE, Ranks, Role};
use tandem_comm::launch::meeting::Meeting;
use tandem_comm::store::{Store, StoreServer};
use tandem_comm::tcp::{self, AbortFlag, Options};
use tandem_comm::{CommError, ProcessGroup, Reduction, Result};

/// A deadline that is missed on purpose, long enough for the other ranks on a busy machine.
const MISSED: Duration = Duration::from_secs(3);

/// The test that ranks run.
const CHILD: &str = "tcp::child";

/// Runs a rank in its role; in the test process this is an empty test.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let outcome = |result: Result<()>| match result {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    };
    let result = match role.meet() {
        Err(error) => error.to_string(),
        Ok(mut group) => match role.name.as_str() {
            "conformance" => {
                conformance::everything(&mut group);
                "ok".to_owned()
            }
            "hundred megabytes" => {
                conformance::hundred_megabytes(&mut group);
                "ok".to_owned()
            }
            "floats" => floats(&mut group),
            "gathers once" => {
                outcome(group.gather(&[group.rank() as u8], &vec![1; group.size()]).map(|_| ()))
            }
            "killed while others wait" => {
                group.barrier().unwrap();
                role.store.add("ready", 1).unwrap();
                if group.rank() == 1 {
                    std::thread::sleep(Duration::from_secs(1000));
                }
                outcome(group.all_reduce(&mut [0f32; 4], Reduction::Sum))
            }
            "stopped or killed in the middle" => loop {
                let mut data = vec![1i64; 1 << 20];
                if let Err(error) = group.all_reduce(&mut data, Reduction::Sum) {
                    break error.to_string();
                }
                role.store.add("ready", 1).unwrap();
            },
            "first is late" | "second is late" => {
                let late = usize::from(role.name == "second is late");
                if group.rank() == late {
                    let others: Vec<_> =
                        (0..4).filter(|&rank| rank != late).map(|rank| format!("result/{rank}")).collect();
                    let others: Vec<_> = others.iter().map(String::as_str).collect();
                    role.store.wait(&others, DEADLINE).unwrap();
                }
                outcome(group.barrier())
            }
            "hangs in a split" => {
                let mut half = group.split(group.rank() % 2).unwrap();
                if group.rank() == 3 {
                    role.store.wait(&["result/1"], DEADLINE).unwrap();
                }
                outcome(half.barrier())
            }
            "leaves after another group failed" => {
                let mut half = group.split(usize::from(group.rank() > 0)).unwrap();
                role.store.add("ready", 1).unwrap();
                match group.rank() {
                    1 => {
                        let lost = half.barrier();
                        drop((half, group));
                        role.store.set("left", b"").unwrap();
                        outcome(lost)
                    }
                    2 => {
                        std::thread::sleep(Duration::from_secs(1000));
                        unreachable!("it is killed")
                    }
                    _ => {
                        role.store.wait(&["left"], DEADLINE).unwrap();
                        outcome(group.barrier())
                    }
                }
            }
            "abort" => {
                if group.rank() == 3 {
                    group.abort("the disk is full");
                }
                let first = group.barrier();
                assert_eq!(group.all_gather(&mut [0u8; 4], &[1; 4]), first, "a group that failed stays so");
                outcome(first)
            }
            "ends early" if group.rank() == 2 => "ok".to_owned(),
            "ends early" => outcome(group.barrier()),
            "messages that wait" => messages_that_wait(&mut group),
            "message of another length" if group.rank() == 0 => outcome(group.send(1, &[1u8; 3])),
            "message of another length" => outcome(group.recv(0, &mut [0u8; 4])),
            case => match case.strip_prefix("long ") {
                Some(case) => long_different_calls(case.parse().unwrap(), &mut group),
                None => different_calls(case.parse().unwrap(), &mut group),
            },
        },
    };
    role.report(&result);
}

fn all(role: &str, size: usize, deadline: Duration) -> Vec<String> {
    Ranks::start(CHILD, role, size, 0..size, deadline).results()
}

#[test]
fn the_conformance_suite_passes_on_1_to_8_processes() {
    for size in [1, 2, 3, 4, 8] {
        assert_eq!(all("conformance", size, DEADLINE), vec!["ok"; size]);
    }
}

#[test]
fn a_hundred_megabytes_are_reduced() {
    assert_eq!(all("hundred megabytes", 3, DEADLINE), ["ok"; 3]);
}

/// Ranks that end at different moments: what one of them sent before it left is not lost, however late its
/// connection is accepted.
#[test]
fn ranks_that_leave_after_a_call_fail_nobody() {
    for _ in 0..5 {
        assert_eq!(all("gathers once", 24, DEADLINE), vec!["ok"; 24]);
    }
}

/// Sums whose last bits depend on the order.
fn floats(group: &mut ProcessGroup) -> String {
    let rank = group.rank() as f32;
    let own: Vec<f32> =
        (0..1_000_003).map(|i| ((i as f32 + rank) * 0.37).sin() * (rank + 1.0).exp()).collect();
    let mut sums = (0..2).map(|_| {
        let mut data = own.clone();
        group.all_reduce(&mut data, Reduction::Sum).unwrap();
        data.iter().fold(0u64, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3))
    });
    let (first, second) = (sums.next().unwrap(), sums.next().unwrap());
    assert_eq!(first, second, "the same sum twice");
    format!("{first:x}")
}

#[test]
fn sums_of_floats_are_the_same_bits_on_every_rank() {
    let results = all("floats", 4, DEADLINE);
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
}

#[test]
fn different_calls_are_named_on_every_rank_and_nobody_hangs() {
    for (case, other) in DIFFERENT_CALLS.iter().enumerate() {
        let expected = format!("all_reduce(sum) of 4 f32 / {other}");
        assert_eq!(all(&case.to_string(), 3, DEADLINE), vec![expected; 3]);
    }
    let parts = all("5", 3, DEADLINE);
    assert!(parts.iter().all(|result| *result == parts[0] && result.contains("in parts")), "{parts:?}");
}

#[test]
fn different_long_calls_are_named_on_every_rank_and_nobody_hangs() {
    for case in 0..LONG_DIFFERENT_CALLS {
        assert_eq!(all(&format!("long {case}"), 3, DEADLINE), vec![long_difference(case); 3], "case {case}");
    }
}

#[test]
fn a_killed_process_is_named_by_those_that_wait_for_it() {
    let mut ranks = Ranks::start(CHILD, "killed while others wait", 4, 0..4, DEADLINE);
    while ranks.store.add("ready", 0).unwrap() < 4 {
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks.kill(1);
    assert_eq!(ranks.results(), vec![CommError::PeerLost { rank: 1 }.to_string(); 3]);
}

/// Rank 1 notices first, in a group with ranks 2 and 3, and closes the job's.
#[test]
fn a_rank_that_leaves_because_of_a_killed_one_is_not_taken_for_it() {
    let mut ranks = Ranks::start(CHILD, "leaves after another group failed", 4, 0..4, DEADLINE);
    while ranks.store.add("ready", 0).unwrap() < 4 {
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks.kill(2);
    let lost = |rank| CommError::PeerLost { rank }.to_string();
    assert_eq!(ranks.results(), [lost(2), lost(1), lost(2)], "rank 1 tells it as its own group counts");
}

#[test]
fn a_process_killed_in_the_middle_of_a_transfer_is_named_on_every_other() {
    // Between transfers, and sometimes in the middle of one.
    for moment in 0..10 {
        let mut ranks = Ranks::start(CHILD, "stopped or killed in the middle", 4, 0..4, DEADLINE);
        while ranks.store.add("ready", 0).unwrap() < 10 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(700 * moment));
        ranks.kill(2);
        assert_eq!(ranks.results(), vec![CommError::PeerLost { rank: 2 }.to_string(); 3]);
    }
}

#[test]
fn a_process_that_hangs_is_named_at_the_deadline() {
    for rank in [1, 3, 0] {
        let mut ranks = Ranks::start(CHILD, "stopped or killed in the middle", 4, 0..4, MISSED);
        while ranks.store.add("ready", 0).unwrap() < 10 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ranks.stop(rank);
        for other in (0..4).filter(|&other| other != rank) {
            ranks.store.wait(&[&format!("result/{other}")], DEADLINE).unwrap();
        }
        ranks.kill(rank);
        let call = "all_reduce(sum) of 1048576 i64".to_owned();
        let late = CommError::Deadline { call, missing: vec![rank], deadline: MISSED };
        assert_eq!(ranks.results(), vec![late.to_string(); 3]);
    }
}

#[test]
fn a_process_that_ends_early_is_named() {
    let lost = CommError::PeerLost { rank: 2 }.to_string();
    assert_eq!(all("ends early", 3, DEADLINE), [lost.clone(), lost, "ok".to_owned()]);
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline() {
    let results = Ranks::start(CHILD, "never reached", 3, [0, 2].into_iter(), MISSED).results();
    let call = "meeting of 3 ranks".to_owned();
    let late = CommError::Deadline { call, missing: vec![1], deadline: MISSED };
    assert_eq!(results, vec![late.to_string(); 2]);
}

#[test]
fn a_rank_that_comes_too_late_is_named_at_the_deadline() {
    let late = |missing| CommError::Deadline { call: "barrier".to_owned(), missing, deadline: MISSED };
    for (rank, role) in ["first is late", "second is late"].into_iter().enumerate() {
        let results = all(role, 4, MISSED);
        assert_eq!(results, vec![late(vec![rank]).to_string(); 4], "also on the one that came too late");
    }
    // In the group of ranks 1 and 3 the latter is the second; the other half continues.
    let ok = "ok".to_owned();
    let late = late(vec![1]).to_string();
    assert_eq!(all("hangs in a split", 4, MISSED), [ok.clone(), late.clone(), ok, late]);
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    let aborted = CommError::Aborted { rank: 3, reason: "the disk is full".to_owned() };
    assert_eq!(all("abort", 4, DEADLINE), vec![aborted.to_string(); 4]);
}

/// Many messages, sent before any is received; the sender ends at once.
fn messages_that_wait(group: &mut ProcessGroup) -> String {
    let lens = [0usize, 3, 100_000, 1];
    if group.rank() == 0 {
        for i in 0..40 {
            group.send(1, &vec![i as i64; lens[i % 4]]).unwrap();
        }
    }
    group.barrier().unwrap();
    if group.rank() == 1 {
        for i in 0..40 {
            let mut data = vec![-1i64; lens[i % 4]];
            group.recv(0, &mut data).unwrap();
            assert!(data.iter().all(|&x| x == i as i64));
        }
    }
    "ok".to_owned()
}

#[test]
fn messages_overtake_nothing_and_outlive_their_sender() {
    assert_eq!(all("messages that wait", 3, DEADLINE), ["ok"; 3]);
    let results = all("message of another length", 2, DEADLINE);
    let [recv, send] = ["recv of 4 bytes from rank 0", "send of 3 bytes"];
    assert!(results[1].contains(recv) && results[1].contains(send), "{results:?}");
}

#[test]
fn the_same_rank_does_not_come_twice_under_one_prefix() {
    let server = StoreServer::bind(0).unwrap();
    let store = Store::connect("127.0.0.1", server.port(), DEADLINE).unwrap();
    drop(tcp::group(store.clone(), 0, 1, DEADLINE, AbortFlag::default()).unwrap());
    let again = tcp::group(store.clone(), 0, 1, DEADLINE, AbortFlag::default()).err().unwrap();
    assert!(
        matches!(&again, CommError::Invalid { reason, .. } if reason.contains("rank 0 under this prefix")),
        "{again}"
    );
    tcp::group(store.prefixed("attempt-1/"), 0, 1, DEADLINE, AbortFlag::default()).unwrap();
}

/// Runs ranks that are threads of this process, over an address of the store.
fn on_threads<T: Send>(
    address: &str,
    size: usize,
    options: &Options,
    rank: impl Fn(ProcessGroup, &Store) -> T + Sync,
) -> Vec<T> {
    let server = StoreServer::bind(0).unwrap();
    std::thread::scope(|scope| {
        let one = |number| {
            let store = Store::connect(address, server.port(), DEADLINE).unwrap();
            let (rank, options) = (&rank, options.clone());
            scope.spawn(move || {
                let (flag, meeting) = (AbortFlag::default(), &mut Meeting::silent(DEADLINE));
                let group = tcp::group_with(store.clone(), (number, size), meeting, DEADLINE, flag, &options)
                    .unwrap();
                rank(group, &store)
            })
        };
        let ranks: Vec<_> = (0..size).map(one).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn the_conformance_suite_passes_over_sockets_alone_and_over_ipv6() {
    let sockets = Options { same_host: false, ..Options::default() };
    on_threads("127.0.0.1", 3, &sockets, |mut group, _| conformance::everything(&mut group));
    // A machine without IPv6 has nothing to test.
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        on_threads("::1", 3, &sockets, |mut group, _| conformance::everything(&mut group));
        on_threads("::1", 2, &Options::default(), |mut group, _| conformance::everything(&mut group));
    } else {
        eprintln!("SKIPPED: this machine has no IPv6");
    }
}

#[test]
fn sixty_four_ranks_sum_whole_numbers_and_odd_lengths_of_floats() {
    let size = 64;
    on_threads("127.0.0.1", size, &Options::default(), |mut group, _| {
        let rank = group.rank();
        for len in [1, 63, 1001, 40_001] {
            let mut whole: Vec<i64> = (0..len).map(|i| (i * rank) as i64).collect();
            group.all_reduce(&mut whole, Reduction::Sum).unwrap();
            assert!((0..len).all(|i| whole[i] == (i * size * (size - 1) / 2) as i64));
            let mut floats = vec![rank as f32; len];
            group.all_reduce(&mut floats, Reduction::Sum).unwrap();
            assert!(floats.iter().all(|&x| x == (size * (size - 1) / 2) as f32));
        }
    });
}

/// Strangers that speak first, say nothing, or have another token: closed, and nothing else changes.
#[test]
fn strangers_are_hung_up_on_and_change_nothing() {
    let sockets = Options { same_host: false, ..Options::default() };
    on_threads("127.0.0.1", 2, &sockets, |mut group, store| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            let card = String::from_utf8(store.get("addresses/0", DEADLINE).unwrap()).unwrap();
            let address: SocketAddr = card.lines().nth(1).unwrap().parse().unwrap();
            let connect = || {
                let stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                stream
            };
            let mut hello = b"TANDEM\x00\x01".to_vec();
            hello.extend([7; 72]);
            for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &hello, &[0; 4096]] {
                let mut stream = connect();
                // The other side may have closed before all is written.
                let _ = stream.write_all(words);
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer);
                assert!(answer.is_empty(), "a stranger was answered");
            }
            // One that leaves in the middle of its hello, and one that only listens.
            connect().write_all(&hello[..20]).unwrap();
            let quiet = connect();
            group.barrier().unwrap();
            drop(quiet);
        } else {
            group.barrier().unwrap();
        }
        let mut sum = [1i64; 1000];
        group.all_reduce(&mut sum, Reduction::Sum).unwrap();
        assert_eq!(sum, [2; 1000]);
    });
}

#[test]
fn a_meeting_says_who_is_missing_and_ends_at_a_signal() {
    let server = StoreServer::bind(0).unwrap();
    let store = |prefix: &str| Store::connect("127.0.0.1", server.port(), DEADLINE).unwrap().prefixed(prefix);
    let meet = |prefix: &str, rank, meeting: &mut Meeting<'_>| {
        let flag = AbortFlag::default();
        tcp::group_with(store(prefix), (rank, 3), meeting, DEADLINE, flag, &Options::default()).err().unwrap()
    };
    let (stop, mut lines) = (AtomicBool::new(false), Vec::new());
    let mut stop_at_line = |line: &str| {
        lines.push(line.to_owned());
        stop.store(true, Ordering::Relaxed);
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| meet("a/", 1, &mut Meeting::silent(DEADLINE)));
        let error = meet("a/", 0, &mut Meeting::begin(DEADLINE, &stop, &mut stop_at_line));
        assert_eq!(error, CommError::Stopped { awaited: "rank 2".to_owned() });
        let CommError::Aborted { rank: 0, reason } = other.join().unwrap() else { panic!("another error") };
        assert!(reason.contains("stopped by a signal while it waited for rank 2"), "{reason}");
    });
    assert!(began.elapsed() < DEADLINE / 2);
    assert_eq!(lines.len(), 1);
    assert!(lines[0].starts_with("waiting for rank 2 ("), "{lines:?}");
}
