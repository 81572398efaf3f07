//! Operations on GPU memory: their order in streams, and what the host notices of them.

use std::time::Instant;

use super::*;
use crate::collective::element::{CollectiveBuffer, ElementKind};
use crate::engines::nccl::fake::Numbers;

const LEN: usize = 8;

/// Returns numbers of which the stream of each rank computes its own: `rank + 1`.
fn numbers(rank: usize) -> Numbers {
    let numbers = Numbers::new(LEN);
    numbers.compute(move |x| x.fill(rank as f32 + 1.0));
    numbers
}

fn buffer(numbers: &Numbers) -> CollectiveBuffer<'_> {
    CollectiveBuffer::on_device(ElementKind::F32, LEN, numbers)
}

fn sum(group: &mut ProcessGroup, numbers: &Numbers) -> Result<()> {
    group.all_reduce_numbers(buffer(numbers), Reduction::Sum)
}

#[test]
fn the_host_runs_ahead_of_the_stream_and_the_stream_stays_in_order() {
    for controls in [threads::groups(3, DEADLINE), tcp_groups(3, DEADLINE)] {
        let results = on(controls, DEADLINE, |group| {
            let mut group = group.unwrap();
            let numbers = Numbers::new(LEN);
            // Nothing is computed yet, on no rank.
            let goes_on = numbers.hold();
            let own = group.rank() as f32 + 1.0;
            numbers.compute(move |x| x.fill(own));
            for _ in 0..3 {
                sum(&mut group, &numbers).unwrap();
                numbers.compute(|x| x.iter_mut().for_each(|x| *x += 1.0));
            }
            assert!(!numbers.is_idle(), "the calls came back before anything ran");
            group.barrier().unwrap();
            goes_on.store(true, Ordering::Release);
            let result = numbers.result();
            group.barrier().unwrap();
            result
        });
        // ((6 + 1) 3 + 1) 3 + 1
        assert_eq!(results, vec![vec![67.0; LEN]; 3]);
    }
}

#[test]
fn parts_and_types_are_those_of_host_memory() {
    on_ranks(3, |mut group| {
        let (rank, part) = (group.rank(), |rank: usize| 2 * rank..2 * rank + 2);
        let numbers = Numbers::new(6);
        let buffer = || CollectiveBuffer::on_device(ElementKind::F32, 6, &numbers);
        numbers.compute(move |x| x.fill(rank as f32 + 1.0));
        fake::calls();
        group.reduce_scatter_numbers(buffer(), &[2; 3], Reduction::Sum).unwrap();
        numbers.compute(move |x| x[part(rank)].iter_mut().for_each(|x| *x += 10.0 * rank as f32));
        group.all_gather_numbers(buffer(), &[2; 3]).unwrap();
        let own = 8 * rank;
        assert_eq!(
            fake::calls(),
            [
                format!("reduce_scatter of 2 type 7 op 0 root 0 from 0 to {own}"),
                format!("all_gather of 2 type 7 root 0 from {own} to 0")
            ]
        );
        assert_eq!(numbers.result(), [6.0, 6.0, 16.0, 16.0, 26.0, 26.0]);
    });
}

#[test]
fn calls_together_are_one_operation() {
    on_ranks(2, |mut group| {
        let [a, b] = [numbers(group.rank()), numbers(group.rank())];
        let goes_on = a.hold();
        fake::calls();
        // Both are in the stream of the first.
        let one =
            |group: &mut ProcessGroup, numbers: &Numbers| group.all_gather_numbers(buffer(numbers), &[4; 2]);
        group
            .together(|group| {
                one(group, &a)?;
                assert_eq!(fake::calls(), [""; 0], "they begin together");
                one(group, &b)
            })
            .unwrap();
        let call = |at: usize| format!("all_gather of 4 type 7 root 0 from {at} to 0");
        let call = call(16 * group.rank());
        assert_eq!(fake::calls(), ["group", &call, &call, "end"]);
        goes_on.store(true, Ordering::Release);
        let both = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
        assert_eq!((a.result(), b.result()), (both.to_vec(), both.to_vec()));
    });
}

#[test]
fn messages_wait_in_the_stream_for_their_receiver() {
    on_ranks(2, |mut group| {
        let numbers = numbers(group.rank());
        if group.rank() == 0 {
            group.send_numbers(1, buffer(&numbers)).unwrap();
            assert!(!numbers.is_idle(), "nobody receives yet");
            group.barrier().unwrap();
        } else {
            group.barrier().unwrap();
            group.recv_numbers(0, buffer(&numbers)).unwrap();
            assert_eq!(numbers.result(), [1.0; LEN]);
        }
        numbers.result();
        group.barrier().unwrap();
    });
}

/// Runs rank 1 to its end before the others' streams can go on; returns the errors that the others get when
/// they read a result and go on.
fn lost_in_a_stream(trouble: Trouble) -> Vec<CommError> {
    let began = Instant::now();
    let results = on(tcp_groups(3, DEADLINE), DEADLINE, |group| {
        let mut group = group.unwrap();
        let mut other = group.split(0).unwrap();
        if group.rank() == 1 {
            // A rank that fails takes no leave.
            let lost = std::panic::AssertUnwindSafe(move || {
                let _ = (group, other);
                std::panic::resume_unwind(Box::new(()));
            });
            std::panic::catch_unwind(lost).unwrap_err();
            return None;
        }
        fake::trouble(trouble);
        let numbers = numbers(group.rank());
        sum(&mut group, &numbers).unwrap();
        // A host that waits for a result is not left waiting.
        numbers.result();
        // Whatever it makes of what it has read, no group takes it.
        let error = other.all_reduce(&mut [0f32; 4], Reduction::Sum).unwrap_err();
        assert_eq!(sum(&mut group, &numbers), Err(error.clone()));
        Some(error)
    });
    assert!(began.elapsed() < DEADLINE / 2, "nobody waits for the deadline");
    results.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_is_lost_is_named_by_those_that_wait_for_their_streams() {
    assert_eq!(lost_in_a_stream(Trouble::Nothing), vec![CommError::PeerLost { rank: 1 }; 2]);
}

#[test]
fn an_abort_that_takes_for_ever_keeps_no_error_back() {
    assert_eq!(lost_in_a_stream(Trouble::AbortHangs), vec![CommError::PeerLost { rank: 1 }; 2]);
}

#[test]
fn what_nccl_reports_of_a_stream_ends_all_ranks() {
    let results = on_ranks(3, |mut group| {
        if group.rank() == 1 {
            fake::trouble(Trouble::RemoteError);
        }
        let numbers = numbers(group.rank());
        let goes_on = numbers.hold();
        let put = sum(&mut group, &numbers);
        let first = put.and_then(|()| {
            // The others' operation waits for this rank's.
            if group.rank() != 2 {
                goes_on.store(true, Ordering::Release);
                numbers.result();
            }
            group.barrier()
        });
        goes_on.store(true, Ordering::Release);
        first.unwrap_err().to_string()
    });
    let expected = "rank 1 gave up: all_reduce(sum) of 8 f32: what was under way failed: NCCL error 6";
    assert!(results.iter().all(|error| error.starts_with(expected)), "{results:?}");
}

#[test]
fn the_deadline_counts_from_where_the_stream_comes_to_the_operation() {
    for (controls, expected) in [
        (
            threads::groups(2, DEADLINE),
            "rank 0 gave up: all_reduce(sum) of 8 f32: NCCL did not finish within 3 s, and no rank is known",
        ),
        (tcp_groups(2, MISSED), "all_reduce(sum) of 8 f32: no response from rank 1 within 3 s"),
    ] {
        let results = on(controls, MISSED, |group| {
            let mut group = group.unwrap();
            let numbers = numbers(group.rank());
            let goes_on = numbers.hold();
            sum(&mut group, &numbers).unwrap();
            // The GPU computes for longer than the deadline.
            std::thread::sleep(MISSED + Duration::from_secs(1));
            goes_on.store(true, Ordering::Release);
            assert_eq!(numbers.result(), [3.0; LEN]);
            group.barrier().unwrap();
            // Now one of them hangs.
            let goes_on = numbers.hold();
            goes_on.store(group.rank() == 0, Ordering::Release);
            sum(&mut group, &numbers).unwrap();
            if group.rank() == 0 {
                numbers.result();
            } else {
                std::thread::sleep(2 * MISSED);
                goes_on.store(true, Ordering::Release);
            }
            group.barrier().unwrap_err().to_string()
        });
        assert!(results.iter().all(|error| error.starts_with(expected)), "{results:?}");
    }
}

#[test]
fn a_group_that_ends_waits_for_its_operations_and_divides_without() {
    let results = on_ranks(2, |mut group| {
        let numbers = numbers(group.rank());
        let goes_on = numbers.hold();
        sum(&mut group, &numbers).unwrap();
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            goes_on.store(true, Ordering::Release);
        });
        fake::calls();
        // The stand-in refuses to divide a communicator with operations in streams.
        let mut part = group.split(0).unwrap();
        assert_eq!(fake::calls(), ["split 0"], "no new id");
        sum(&mut part, &numbers).unwrap();
        drop(part);
        drop(group);
        later.join().unwrap();
        assert_eq!(fake::calls().iter().filter(|call| *call == "abort").count(), 0);
        numbers.result()
    });
    assert_eq!(results, vec![vec![6.0; LEN]; 2]);
}

#[test]
fn different_calls_in_streams_are_named() {
    let results = on(tcp_groups(3, DEADLINE), DEADLINE, |group| {
        let mut group = group.unwrap();
        let numbers = numbers(group.rank());
        let put = if group.rank() == 1 {
            group.all_gather_numbers(buffer(&numbers), &[2, 3, 3])
        } else {
            sum(&mut group, &numbers)
        };
        put.unwrap();
        numbers.result();
        group.barrier().unwrap_err()
    });
    let CommError::Mismatch { rank: 0, call, other_rank: 1, other_call } = &results[0] else {
        panic!("{results:?}")
    };
    assert_eq!((call.as_str(), &other_call[..19]), ("all_reduce(sum) of 8 f32", "all_gather of 8 f32"));
    assert!(results.iter().all(|error| *error == results[0]), "{results:?}");
}
