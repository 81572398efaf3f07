//! Ranks that make different calls, on any engine between processes.

use tandem_comm::{CommError, ProcessGroup, Reduction};

/// Calls of rank 1 in the first cases of [`different_calls`]; the others sum four f32.
pub const DIFFERENT_CALLS: [&str; 5] =
    ["barrier", "all_reduce(sum) of 5 f32", "all_reduce(sum) of 4 i64", "all_reduce(max) of 4 f32", "split"];

/// Number of cases in which rank 1 makes a call of another kind or length than the others, who move more
/// than a round. See [`long_different_calls`].
pub const LONG_DIFFERENT_CALLS: usize = 9;

/// Elements of a long buffer.
const LONG: usize = 1 << 20;

/// Makes this rank's calls of a case; returns the two that differ as the error names them. A call that
/// does not move numbers to a rank may succeed there; one of the next then fails.
pub fn long_different_calls(case: usize, group: &mut ProcessGroup) -> String {
    let size = group.size();
    let is_other = group.rank() == 1;
    let calls = |group: &mut ProcessGroup| match (is_other, case) {
        // Longer, shorter and of another type than the others expect, round the ring.
        (true, 0) => group.all_reduce(&mut vec![0f32; LONG + 8], Reduction::Sum),
        (true, 1) => group.all_reduce(&mut vec![0f32; LONG / 4], Reduction::Sum),
        (true, 2) => group.reduce_scatter(&mut vec![0f64; LONG / 2], &even(LONG / 2, size), Reduction::Sum),
        (_, 0..=2) => group.all_reduce(&mut vec![0f32; LONG], Reduction::Sum),
        // A collective that is not the others'.
        (true, 3) => group.broadcast(&mut vec![0u8; LONG], 1),
        (_, 3) => group.all_gather(&mut vec![0i64; LONG], &even(LONG, size)),
        (true, 4) => group.all_gather(&mut [0u8; 48], &even(48, size)),
        (_, 4) => group.broadcast(&mut [0u8; 48], 0),
        (true, 5) => group.barrier(),
        (_, 5) => group.reduce_scatter(&mut vec![0i64; 6000], &even(6000, size), Reduction::Sum),
        // The same collective, of which one rank moves much more, or much less.
        (true, 6) => group.broadcast(&mut vec![0u8; LONG / 2], 1),
        (_, 6) => group.broadcast(&mut [0u8; 8], 1),
        (true, 7) => group.all_gather(&mut vec![0f32; 3 * LONG], &even(3 * LONG, size)),
        (_, 7) => group.all_gather(&mut [0f32; 9], &even(9, size)),
        (true, _) => group.all_reduce(&mut [0i64; 4], Reduction::Max),
        _ => group.all_gather(&mut vec![0i64; LONG], &even(LONG, size)),
    };
    // A root does not hear of the others. Its call after next needs them.
    let failed = calls(group).and_then(|()| group.barrier()).and_then(|()| group.barrier());
    match failed {
        Err(CommError::Mismatch { rank, call, other_rank, other_call }) => {
            let (call, other_call) = if rank == 1 { (other_call, call) } else { (call, other_call) };
            let names = if rank == 1 || other_rank == 1 { "" } else { "without rank 1: " };
            let kind = |call: &str| call.split(" in parts").next().unwrap_or_default().to_owned();
            format!("{names}{} / {}", kind(&call), kind(&other_call))
        }
        other => format!("{other:?}"),
    }
}

/// Returns what [`long_different_calls`] returns where the engine does well.
pub fn long_difference(case: usize) -> String {
    let names = [
        ("all_reduce(sum) of 1048576 f32", "all_reduce(sum) of 1048584 f32"),
        ("all_reduce(sum) of 1048576 f32", "all_reduce(sum) of 262144 f32"),
        ("all_reduce(sum) of 1048576 f32", "reduce_scatter(sum) of 524288 f64"),
        ("all_gather of 1048576 i64", "broadcast of 1048576 u8 from rank 1"),
        ("broadcast of 48 u8 from rank 0", "all_gather of 48 u8"),
        ("reduce_scatter(sum) of 6000 i64", "barrier"),
        ("broadcast of 8 u8 from rank 1", "broadcast of 524288 u8 from rank 1"),
        ("all_gather of 9 f32", "all_gather of 3145728 f32"),
        ("all_gather of 1048576 i64", "all_reduce(max) of 4 i64"),
    ];
    let (call, other_call) = names[case];
    format!("{call} / {other_call}")
}

fn even(len: usize, size: usize) -> Vec<usize> {
    let end = |rank: usize| len * rank / size;
    (0..size).map(|rank| end(rank + 1) - end(rank)).collect()
}

/// Makes this rank's call of a case; returns rank 0's call and rank 1's as the error names them. The last
/// case is number 5: gathers in unequal parts.
pub fn different_calls(case: usize, group: &mut ProcessGroup) -> String {
    let first = match (group.rank(), case) {
        (1, 0) => group.barrier(),
        (1, 1) => group.all_reduce(&mut [0f32; 5], Reduction::Sum),
        (1, 2) => group.all_reduce(&mut [0i64; 4], Reduction::Sum),
        (1, 3) => group.all_reduce(&mut [0f32; 4], Reduction::Max),
        (1, 4) => group.split(0).map(|_| ()),
        (1, 5) => group.all_gather(&mut [0f32; 4], &[2, 1, 1]),
        (_, 5) => group.all_gather(&mut [0f32; 4], &[1, 1, 2]),
        _ => group.all_reduce(&mut [0f32; 4], Reduction::Sum),
    };
    assert_eq!(group.barrier(), first, "a group that failed stays so");
    match first {
        Err(CommError::Mismatch { rank: 0, call, other_rank: 1, other_call }) => {
            format!("{call} / {other_call}")
        }
        other => format!("{other:?}"),
    }
}
