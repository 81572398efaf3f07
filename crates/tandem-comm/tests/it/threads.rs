//! The threads engine: the conformance suite, and ranks that disagree or end.

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::conformance;
use tandem_comm::{Call, CollectiveObserver, CommError, ProcessGroup, Reduction, threads};

/// For ranks that are to succeed; only a bug waits for it.
const DEADLINE: Duration = Duration::from_secs(300);
/// For deadlines that are to be missed: longer than a busy machine keeps a thread waiting for a core.
const MISSED: Duration = Duration::from_secs(3);

/// Runs `rank` on every rank of a group and returns each result.
fn on_ranks<T: Send>(size: usize, deadline: Duration, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let groups = threads::groups(size, deadline).into_iter();
        let handles: Vec<_> = groups.map(|group| scope.spawn(move || rank(group))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn the_conformance_suite_passes_on_1_to_8_ranks() {
    for size in [1, 2, 3, 4, 8] {
        on_ranks(size, DEADLINE, |mut group| conformance::everything(&mut group));
    }
}

#[test]
fn a_hundred_megabytes_are_reduced() {
    on_ranks(3, DEADLINE, |mut group| conformance::hundred_megabytes(&mut group));
}

#[test]
fn the_sum_of_floats_has_one_order() {
    // 1e8 + 1 − 1e8 in rank order is 0 in f32; the same on every rank and in every run.
    let results = on_ranks(3, DEADLINE, |mut group| {
        let mut data = [[1e8f32, 1.0, -1e8][group.rank()]; 1000];
        group.all_reduce(&mut data, Reduction::Sum).unwrap();
        data
    });
    assert!(results.iter().flatten().all(|&x| x == 0.0));
}

#[test]
fn different_calls_are_named_on_every_rank_and_nobody_hangs() {
    type Wrong = fn(&mut ProcessGroup) -> tandem_comm::Result<()>;
    let cases: [(Wrong, &str, &str); 4] = [
        (|g| g.barrier(), "all_reduce(sum) of 4 f32", "barrier"),
        (
            |g| g.all_reduce(&mut [0f32; 5], Reduction::Sum),
            "all_reduce(sum) of 4 f32",
            "all_reduce(sum) of 5 f32",
        ),
        (
            |g| g.all_reduce(&mut [0i64; 4], Reduction::Sum),
            "all_reduce(sum) of 4 f32",
            "all_reduce(sum) of 4 i64",
        ),
        (
            |g| g.all_reduce(&mut [0f32; 4], Reduction::Max),
            "all_reduce(sum) of 4 f32",
            "all_reduce(max) of 4 f32",
        ),
    ];
    for (wrong, expected, found) in cases {
        let results = on_ranks(3, DEADLINE, |mut group| {
            let first = if group.rank() == 1 {
                wrong(&mut group)
            } else {
                group.all_reduce(&mut [0f32; 4], Reduction::Sum)
            };
            assert_eq!(group.barrier(), first, "a group that failed stays so");
            first
        });
        let error = CommError::Mismatch {
            rank: 0,
            call: expected.to_owned(),
            other_rank: 1,
            other_call: found.to_owned(),
        };
        assert_eq!(results, vec![Err(error); 3]);
    }
}

#[test]
fn parts_in_another_order_are_different_calls() {
    let results = on_ranks(2, DEADLINE, |mut group| {
        let counts = if group.rank() == 0 { [1, 2] } else { [2, 1] };
        group.all_gather(&mut [0u8; 3], &counts)
    });
    assert!(results.iter().all(|result| matches!(result, Err(CommError::Mismatch { .. }))), "{results:?}");
}

#[test]
fn a_rank_that_ends_is_named_by_those_that_wait() {
    for early in [true, false] {
        let results = on_ranks(3, DEADLINE, |mut group| {
            if group.rank() == 2 {
                // Before or while the others wait: the result is the same, whatever the pause.
                std::thread::sleep(Duration::from_millis(if early { 0 } else { 50 }));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(if early { 50 } else { 0 }));
            group.barrier()
        });
        let lost = Err(CommError::PeerLost { rank: 2 });
        assert_eq!(results, [lost.clone(), lost, Ok(())]);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    // Ranks 0 and 2 call within `MISSED` of each other; rank 1 comes when both have given it up.
    let (started, given_up) = (Barrier::new(3), Barrier::new(3));
    let results = on_ranks(3, MISSED, |mut group| {
        started.wait();
        if group.rank() == 1 {
            given_up.wait();
            return group.barrier();
        }
        let result = group.barrier();
        given_up.wait();
        result
    });
    let late = CommError::Deadline { call: "barrier".to_owned(), missing: vec![1], deadline: MISSED };
    assert_eq!(results, vec![Err(late); 3], "also on the one that came too late");
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    let results = on_ranks(4, DEADLINE, |mut group| {
        if group.rank() == 3 {
            group.abort("the disk is full");
        }
        group.barrier()
    });
    let aborted = CommError::Aborted { rank: 3, reason: "the disk is full".to_owned() };
    assert_eq!(results, vec![Err(aborted); 4]);
}

#[test]
fn a_message_of_another_length_is_a_mismatch_and_a_sender_that_ended_is_lost() {
    let results = on_ranks(2, DEADLINE, |mut group| {
        if group.rank() == 0 { group.send(1, &[1u8; 3]) } else { group.recv(0, &mut [0u8; 4]) }
    });
    assert!(matches!(results[1], Err(CommError::Mismatch { .. })), "{results:?}");
    let results =
        on_ranks(
            2,
            DEADLINE,
            |mut group| {
                if group.rank() == 0 { Ok(()) } else { group.recv(0, &mut [0u8; 4]) }
            },
        );
    assert_eq!(results[1], Err(CommError::PeerLost { rank: 0 }));
}

/// Without a limit a rank that is ahead would fill the memory. The short deadline cannot fire
/// elsewhere: at the barriers no other call waits.
#[test]
fn a_message_waits_where_many_or_large_ones_have_not_been_received() {
    let (deadline, both) = (Duration::from_millis(200), Barrier::new(2));
    let one_too_many_waits = |sent: &[usize], received: usize| {
        let results = on_ranks(2, deadline, |mut group| {
            let is_sender = group.rank() == 0;
            if is_sender {
                sent.iter().for_each(|&len| group.send(1, &vec![0u8; len]).unwrap());
            }
            both.wait();
            if !is_sender {
                (0..received).for_each(|_| group.recv(0, &mut [0u8]).unwrap());
            }
            both.wait();
            let mut result = Ok(());
            if is_sender {
                (0..received).for_each(|_| group.send(1, &[0u8]).unwrap());
                result = group.send(1, &[0u8]);
            }
            // No rank waits for one that is gone.
            both.wait();
            result
        });
        let late = "send of 1 bytes to rank 1".to_owned();
        assert_eq!(results, [Err(CommError::Deadline { call: late, missing: vec![1], deadline }), Ok(())]);
    };
    one_too_many_waits(&[1; 64], 0);
    one_too_many_waits(&[1; 64], 3);
    // A single message may exceed the limit, but not together with another.
    one_too_many_waits(&[65 << 20], 0);
}

#[test]
fn volume_is_counted_as_the_formulas_say() {
    let volumes = on_ranks(4, DEADLINE, |mut group| {
        group.all_reduce(&mut [0f32; 100], Reduction::Sum).unwrap();
        group.all_gather(&mut [0i64; 40], &[10; 4]).unwrap();
        group.reduce_scatter(&mut [0f32; 40], &[10; 4], Reduction::Sum).unwrap();
        group.barrier().unwrap();
        let (next, before) = ((group.rank() + 1) % 4, (group.rank() + 3) % 4);
        group.send(next, &[0f64; 10]).unwrap();
        group.recv(before, &mut [0f64; 10]).unwrap();
        *group.volume()
    });
    for volume in volumes {
        assert_eq!(
            (volume.num_calls, volume.bytes_sent),
            (4, 2 * 400 * 3 / 4 + 320 * 3 / 4 + 160 * 3 / 4 + 80)
        );
    }
}

#[test]
fn who_watches_a_group_is_told_of_its_calls_and_of_those_of_its_parts() {
    #[derive(Default)]
    struct Told(Mutex<Vec<(String, usize)>>);
    impl CollectiveObserver for Told {
        fn called(&self, call: &Call, num_ranks: usize, began: Instant) {
            assert!(began <= Instant::now());
            self.0.lock().unwrap().push((call.to_string(), num_ranks));
        }
    }
    let told = on_ranks(2, DEADLINE, |mut group| {
        let told = Arc::new(Told::default());
        group.barrier().unwrap();
        group.watched_by(told.clone());
        let mut part = group.split(group.rank()).unwrap();
        part.all_reduce(&mut [0f32; 3], Reduction::Sum).unwrap();
        if group.rank() == 0 { group.send(1, &[1u8; 5]) } else { group.recv(0, &mut [0u8; 5]) }.unwrap();
        // A call that is refused beforehand does not count.
        assert!(group.broadcast(&mut [0u8], 7).is_err());
        drop((group, part));
        Arc::into_inner(told).unwrap().0.into_inner().unwrap()
    });
    let calls = |message: &str| {
        let all = [("all_reduce(sum) of 3 f32", 1), (message, 2)];
        all.map(|(call, num_ranks)| (call.to_owned(), num_ranks)).to_vec()
    };
    assert_eq!(told, [calls("send of 5 u8 to rank 1"), calls("recv of 5 u8 from rank 0")]);
}
