//! Ranks that make different calls, on any engine between processes.

use tandem_comm::{CommError, ProcessGroup, Reduction};

/// Calls of rank 1 in the first cases of [`different_calls`]; the others sum four f32.
pub const DIFFERENT_CALLS: [&str; 5] =
    ["barrier", "all_reduce(sum) of 5 f32", "all_reduce(sum) of 4 i64", "all_reduce(max) of 4 f32", "split"];

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
