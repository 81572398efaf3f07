//! The NCCL engine on fakes of NCCL and CUDA, with ranks that are threads: the only test of its
//! protocol without a GPU.

#[path = "../../../tests/it/conformance/mod.rs"]
#[allow(unreachable_pub)] // shared with the integration tests
mod conformance;
mod streams;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::fake::{self, Trouble};
use crate::collective::call::{Call, Operation};
use crate::collective::call_chain::COMPARED_CALLS;
use crate::collective::element::Reduction;
use crate::collective::engine::Engine;
use crate::engines::threads;
use crate::error::{CommError, Result};
use crate::group::ProcessGroup;

const DEADLINE: Duration = Duration::from_secs(300);
/// A deadline that is missed on purpose, long enough for the other ranks on a busy machine.
const MISSED: Duration = Duration::from_secs(3);

/// Runs `rank` on every rank of these groups over the fakes, and returns each result.
fn on<T: Send>(
    controls: Vec<ProcessGroup>,
    deadline: Duration,
    rank: impl Fn(Result<ProcessGroup>) -> T + Sync,
) -> Vec<T> {
    static WORLD: AtomicU64 = AtomicU64::new(1);
    let (rank, world) = (&rank, WORLD.fetch_add(1, Ordering::Relaxed));
    std::thread::scope(|scope| {
        let start = |control| {
            scope.spawn(move || {
                fake::begin(world);
                rank(fake::libraries().group(control, None, deadline))
            })
        };
        let handles: Vec<_> = controls.into_iter().map(start).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn on_ranks<T: Send>(size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    on(threads::groups(size, DEADLINE), DEADLINE, |group| rank(group.unwrap()))
}

#[test]
fn the_conformance_suite_passes_on_1_to_8_ranks() {
    for size in [1, 2, 3, 4, 8] {
        on_ranks(size, |mut group| conformance::everything(&mut group));
    }
}

#[test]
fn a_hundred_megabytes_are_reduced() {
    on_ranks(3, |mut group| conformance::hundred_megabytes(&mut group));
}

/// Controls over TCP, whose ranks could be processes.
fn tcp_groups(size: usize, deadline: Duration) -> Vec<ProcessGroup> {
    use crate::engines::tcp::{self, AbortFlag};
    use crate::store::{Store, StoreServer};

    let server = StoreServer::bind(0).unwrap();
    // The server must outlive the groups.
    let port = Box::leak(Box::new(server)).port();
    std::thread::scope(|scope| {
        let meet = |rank| {
            let store = Store::connect("127.0.0.1", port, DEADLINE).unwrap();
            scope.spawn(move || tcp::group(store, rank, size, deadline, AbortFlag::default()).unwrap())
        };
        let handles: Vec<_> = (0..size).map(meet).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn the_conformance_suite_passes_where_tcp_compares_the_calls() {
    on(tcp_groups(3, DEADLINE), DEADLINE, |group| conformance::everything(&mut group.unwrap()));
}

/// Returns each rank's calls of NCCL and CUDA during one collective.
fn asked(size: usize, collective: impl Fn(&mut ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    on_ranks(size, |mut group| {
        fake::calls();
        collective(&mut group).unwrap();
        fake::calls().join("; ")
    })
}

#[test]
fn types_and_reductions_are_those_of_nccls_header() {
    let one = |data_type: i32, op: i32, bytes: usize| {
        let call = format!("all_reduce of 3 type {data_type} op {op} root 0 from 0 to 0");
        vec![format!("upload {bytes}; {call}; download {bytes}"); 2]
    };
    use half::bf16;
    assert_eq!(asked(2, |g| g.all_reduce(&mut [0u8; 3], Reduction::Max)), one(1, 2, 3));
    assert_eq!(asked(2, |g| g.all_reduce(&mut [0i64; 3], Reduction::Sum)), one(4, 0, 24));
    assert_eq!(asked(2, |g| g.all_reduce(&mut [0f32; 3], Reduction::Max)), one(7, 2, 12));
    assert_eq!(asked(2, |g| g.all_reduce(&mut [0f64; 3], Reduction::Sum)), one(8, 0, 24));
    assert_eq!(asked(2, |g| g.all_reduce(&mut [bf16::ZERO; 3], Reduction::Sum)), one(9, 0, 6));
}

#[test]
fn even_parts_are_one_operation_in_place_and_uneven_ones_a_group() {
    let counts = [2, 2, 2];
    assert_eq!(
        asked(3, |g| g.reduce_scatter(&mut [0f32; 6], &counts, Reduction::Sum))[1],
        "upload 24; reduce_scatter of 2 type 7 op 0 root 0 from 0 to 8; download 8"
    );
    assert_eq!(
        asked(3, |g| g.all_gather(&mut [0f32; 6], &counts))[1],
        "upload 8; all_gather of 2 type 7 root 0 from 8 to 0; download 8; download 8"
    );
    let counts = [3, 0, 1];
    assert_eq!(
        asked(3, |g| g.reduce_scatter(&mut [0i64; 4], &counts, Reduction::Max)),
        [
            "upload 32; group; reduce of 3 type 4 op 2 root 0 from 0 to 0; reduce of 1 type 4 op 2 root 2 from 24 to 24; end; \
             download 24",
            "upload 32; group; reduce of 3 type 4 op 2 root 0 from 0 to 0; reduce of 1 type 4 op 2 root 2 from 24 to 24; end",
            "upload 32; group; reduce of 3 type 4 op 2 root 0 from 0 to 0; reduce of 1 type 4 op 2 root 2 from 24 to 24; end; \
             download 8",
        ]
    );
    assert_eq!(
        asked(3, |g| g.all_gather(&mut [0i64; 4], &counts)),
        [
            "upload 24; group; broadcast of 3 type 4 root 0 from 0 to 0; broadcast of 1 type 4 root 2 from 24 to 24; end; \
             download 8",
            "group; broadcast of 3 type 4 root 0 from 0 to 0; broadcast of 1 type 4 root 2 from 24 to 24; end; download 24; download 8",
            "upload 8; group; broadcast of 3 type 4 root 0 from 0 to 0; broadcast of 1 type 4 root 2 from 24 to 24; end; \
             download 24",
        ]
    );
    // What the last rank has beyond equal parts is one more operation, and what one rank has the only one.
    assert_eq!(
        asked(3, |g| g.reduce_scatter(&mut [0f32; 11], &[3, 3, 5], Reduction::Sum))[1],
        "upload 44; group; reduce_scatter of 3 type 7 op 0 root 0 from 0 to 12; reduce of 2 type 7 op 0 root 2 from 36 to 36; end; \
         download 12"
    );
    assert_eq!(
        asked(3, |g| g.all_gather(&mut [0f32; 11], &[3, 3, 5]))[1],
        "upload 12; group; all_gather of 3 type 7 root 0 from 12 to 0; broadcast of 2 type 7 root 2 from 36 to 36; end; download 12; \
         download 20"
    );
    assert_eq!(
        asked(3, |g| g.all_gather(&mut [0f32; 4], &[0, 4, 0]))[0],
        "broadcast of 4 type 7 root 1 from 0 to 0; download 16"
    );
    assert_eq!(
        asked(2, |g| g.broadcast(&mut [0u8; 5], 1)),
        [
            "broadcast of 5 type 1 root 1 from 0 to 0; download 5",
            "upload 5; broadcast of 5 type 1 root 1 from 0 to 0"
        ]
    );
    assert_eq!(asked(2, ProcessGroup::barrier), ["", ""]);
    assert_eq!(asked(2, |g| g.all_gather(&mut [0u8; 0], &[0, 0])), ["", ""]);
}

#[test]
fn different_calls_are_named() {
    for other_is_barrier in [false, true] {
        let results = on_ranks(3, |mut group| {
            let is_other = group.rank() == 1;
            let first = if is_other && other_is_barrier {
                group.barrier()
            } else {
                group.all_reduce(&mut vec![0f32; if is_other { 5 } else { 4 }], Reduction::Sum)
            };
            assert_eq!(group.barrier(), first, "a group that failed stays so");
            first.unwrap_err()
        });
        let call = "all_reduce(sum) of 4 f32";
        let other_call = if other_is_barrier { "barrier" } else { "all_reduce(sum) of 5 f32" };
        let calls = |error: &CommError| match error {
            CommError::Mismatch { rank: 0, call, other_rank: 1, other_call } => {
                (call.clone(), other_call.clone())
            }
            CommError::Mismatch { rank: 1, call, other_rank: 2, other_call } => {
                (other_call.clone(), call.clone())
            }
            other => panic!("{other}"),
        };
        assert_eq!(calls(&results[0]), (call.to_owned(), other_call.to_owned()));
        assert!(results.iter().all(|error| *error == results[0]), "{results:?}");
    }
}

/// Over TCP, NCCL is asked before the calls are compared: it hangs, or fails.
#[test]
fn different_calls_are_named_by_tcp_while_nccl_hangs() {
    let calls = |case: usize, is_other: bool, group: &mut ProcessGroup| match (case, is_other) {
        (0, true) => group.all_reduce(&mut [0f32; 5], Reduction::Sum),
        (1, true) => group.broadcast(&mut [0f32; 4], 1),
        (2, true) => group.barrier(),
        (3, true) => group.split(0).map(|_| ()),
        _ => group.all_reduce(&mut [0f32; 4], Reduction::Sum),
    };
    for trouble in [Trouble::Nothing, Trouble::RemoteError] {
        for (case, other_call) in
            ["all_reduce(sum) of 5 f32", "broadcast of 4 f32 from rank 1", "barrier", "split"]
                .into_iter()
                .enumerate()
        {
            let results = on(tcp_groups(3, DEADLINE), DEADLINE, |group| {
                let mut group = group.unwrap();
                group.all_reduce(&mut [0f32; 4], Reduction::Sum).unwrap();
                fake::trouble(trouble);
                let first = calls(case, group.rank() == 1, &mut group);
                assert_eq!(group.barrier(), first, "a group that failed stays so");
                first
            });
            let (call, other_call) = ("all_reduce(sum) of 4 f32".to_owned(), other_call.to_owned());
            let error = CommError::Mismatch { rank: 0, call, other_rank: 1, other_call };
            assert_eq!(results, vec![Err(error); 3], "{trouble:?}");
        }
    }
}

#[test]
fn a_difference_that_nccl_does_not_see_is_found_after_a_few_calls() {
    let results = on(tcp_groups(3, DEADLINE), DEADLINE, |group| {
        let mut group = group.unwrap();
        let first = if group.rank() == 1 {
            group.all_reduce(&mut [0f32; 0], Reduction::Sum)
        } else {
            group.all_reduce(&mut [0i64; 0], Reduction::Sum)
        };
        assert_eq!(first, Ok(()), "it moves nothing");
        (0..COMPARED_CALLS).find_map(|_| group.all_reduce(&mut [0f32; 4], Reduction::Sum).err())
    });
    let call = |kind: &str| format!("all_reduce(sum) of 0 {kind}");
    let error = CommError::Mismatch { rank: 0, call: call("i64"), other_rank: 1, other_call: call("f32") };
    assert_eq!(results, vec![Some(error); 3]);
}

#[test]
fn a_rank_that_hangs_is_named_at_the_deadline() {
    for controls in [threads::groups(3, MISSED), tcp_groups(3, MISSED)] {
        let results = on(controls, MISSED, |group| {
            let mut group = group.unwrap();
            if group.rank() == 1 {
                std::thread::sleep(2 * MISSED);
            }
            group.all_reduce(&mut [0f32; 4], Reduction::Sum)
        });
        let call = "all_reduce(sum) of 4 f32".to_owned();
        assert_eq!(results, vec![Err(CommError::Deadline { call, missing: vec![1], deadline: MISSED }); 3]);
    }
}

#[test]
fn a_rank_that_is_slow_more_than_once_fails_nobody() {
    let results = on(tcp_groups(3, DEADLINE), DEADLINE, |group| {
        let mut group = group.unwrap();
        for call in 0..2 * COMPARED_CALLS {
            if call % 20 == 7 && group.rank() as u64 == call % 3 {
                // Longer than the time after which the others look around.
                std::thread::sleep(Duration::from_millis(1200));
            }
            group.all_reduce(&mut [0f32; 4], Reduction::Sum)?;
        }
        Result::Ok(())
    });
    assert_eq!(results, vec![Ok(()); 3]);
}

/// Returns all ranks' errors of an all-reduce with trouble on rank 1.
fn with_trouble(trouble: Trouble, deadline: Duration) -> Vec<String> {
    trouble_of(threads::groups(3, DEADLINE), trouble, deadline)
}

fn trouble_of(groups: Vec<ProcessGroup>, trouble: Trouble, deadline: Duration) -> Vec<String> {
    let results = on(groups, deadline, |group| {
        let mut group = group.unwrap();
        if group.rank() == 1 {
            fake::trouble(trouble);
        }
        let first = group.all_reduce(&mut [0f32; 4], Reduction::Sum);
        assert_eq!(group.barrier(), first, "a group that failed stays so");
        drop(group);
        assert_eq!(fake::calls().iter().filter(|call| *call == "abort").count(), 1);
        first.unwrap_err().to_string()
    });
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    results
}

#[test]
fn what_nccl_reports_ends_all_ranks_with_its_words() {
    assert_eq!(
        with_trouble(Trouble::RemoteError, DEADLINE)[0],
        "rank 1 gave up: all_reduce(sum) of 4 f32: what was under way failed: NCCL error 6, remote process exited or there was a \
         network error: the stand-in's words; NCCL_DEBUG=INFO shows more"
    );
}

#[test]
fn a_gpu_without_room_ends_all_ranks() {
    assert_eq!(
        with_trouble(Trouble::NoMemory, DEADLINE)[0],
        "rank 1 gave up: all_reduce(sum) of 4 f32: making room for 1048576 bytes on GPU 1 failed: CUDA error 2, out of memory"
    );
}

#[test]
fn nccl_that_hangs_is_given_up_at_the_deadline() {
    for groups in [threads::groups(3, DEADLINE), tcp_groups(3, MISSED)] {
        let result = &trouble_of(groups, Trouble::Hangs, MISSED)[0];
        let expected =
            " gave up: all_reduce(sum) of 4 f32: NCCL did not finish within 3 s, and no rank is known";
        assert!(result.contains(expected), "{result}");
    }
}

/// Control of a rank that arrives at an all-reduce and then disappears.
struct Deserter {
    control: Option<Box<dyn Engine>>,
    rank: usize,
    size: usize,
}

impl Deserter {
    fn of(control: Box<dyn Engine>) -> Result<Box<dyn Engine>> {
        let (rank, size) = (control.rank(), control.size());
        Ok(Box::new(Self { control: Some(control), rank, size }))
    }

    fn control(&mut self) -> &mut dyn Engine {
        &mut **self.control.as_mut().expect("it is still there")
    }
}

impl Engine for Deserter {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn all_reduce(&mut self, _: Call, _: &mut [u8]) -> Result<()> {
        unreachable!("a control moves no numbers")
    }
    fn reduce_scatter(&mut self, _: Call, _: &mut [u8], _: &[usize]) -> Result<()> {
        unreachable!("a control moves no numbers")
    }
    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        self.control().all_gather(call, data, counts)
    }
    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        self.control().broadcast(call, root, data)
    }
    fn barrier(&mut self, call: Call) -> Result<()> {
        self.control().barrier(call)
    }
    fn note(&mut self, call: Call) -> Result<()> {
        self.control().note(call)?;
        if matches!(call.operation, Operation::AllReduce(_)) {
            self.control = None;
            return Err(CommError::PeerLost { rank: self.rank });
        }
        Ok(())
    }
    fn send(&mut self, _: usize, _: &[u8]) -> Result<()> {
        unreachable!("nobody sends")
    }
    fn recv(&mut self, _: usize, _: &mut [u8]) -> Result<()> {
        unreachable!("nobody receives")
    }
    fn split(&mut self, _: Call, _: usize) -> Result<Box<dyn Engine>> {
        unreachable!("nobody divides")
    }
    fn abort(&mut self, _: &str) {}
    fn check(&mut self) -> Result<()> {
        Ok(())
    }
}

/// NCCL hangs, or notices the loss before the control.
fn a_deserter_is_named(groups: fn(usize) -> Vec<ProcessGroup>) {
    for (deserter, trouble) in [(1, Trouble::Nothing), (1, Trouble::RemoteError), (0, Trouble::RemoteError)] {
        let make = |control: ProcessGroup| {
            if control.rank() == deserter { control.carried_by(Deserter::of).unwrap() } else { control }
        };
        let results = on(groups(3).into_iter().map(make).collect(), DEADLINE, |group| {
            let mut group = group.unwrap();
            if group.rank() != deserter {
                fake::trouble(trouble);
            }
            group.all_reduce(&mut [0f32; 4], Reduction::Sum)
        });
        assert_eq!(results, vec![Err(CommError::PeerLost { rank: deserter }); 3], "{trouble:?}");
    }
}

#[test]
fn a_rank_that_is_gone_in_the_middle_is_named_by_the_control() {
    a_deserter_is_named(|size| threads::groups(size, DEADLINE));
}

#[test]
fn a_rank_that_is_gone_in_the_middle_is_named_by_tcp() {
    a_deserter_is_named(|size| tcp_groups(size, DEADLINE));
}

#[test]
fn a_group_that_cannot_be_made_says_why_on_every_rank() {
    let results = on(threads::groups(fake::DEVICES + 1, DEADLINE), DEADLINE, |group| group.err().unwrap());
    for (rank, error) in results.iter().enumerate() {
        let reason = "rank 8 is number 8 of its machine, counted from 0, but there are 8 GPUs";
        match error {
            CommError::Engine { reason: found } if rank == 8 => assert!(found.starts_with(reason), "{found}"),
            CommError::Aborted { rank: 8, reason: found } => assert!(found.starts_with(reason), "{found}"),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_group_that_cannot_divide_fails_for_its_members_and_their_parent() {
    let results = on_ranks(3, |mut group| {
        if group.rank() == 2 {
            fake::trouble(Trouble::NoCommunicator);
        }
        let child = group.split(0).map(|_| ()).unwrap_err();
        let parent = group.barrier().unwrap_err();
        assert!(child.to_string().contains("split: "), "{child}");
        assert!(child.to_string().contains("NCCL error 2, unhandled system error"), "{child}");
        (child, parent)
    });
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    assert!(results.iter().all(|(child, parent)| child == parent), "{results:?}");
}

#[test]
fn a_group_that_ends_frees_what_it_has() {
    let ends = on_ranks(3, |mut group| {
        group.all_reduce(&mut [0f32; 4], Reduction::Sum).unwrap();
        assert_eq!(fake::num_buffers(), 1);
        // The buffer grows, and the smaller one stays: CUDA frees memory when the GPU is idle.
        group.all_reduce(&mut vec![0u8; 5 << 20], Reduction::Max).unwrap();
        assert_eq!(fake::num_buffers(), 2);
        fake::calls();
        drop(group);
        assert_eq!(fake::num_buffers(), 0);
        fake::calls().join("; ")
    });
    assert_eq!(ends, vec!["finalize; destroy"; 3]);
}
