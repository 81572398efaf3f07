//! Shared state of a communicator's ranks, and the execution of their operations.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use crate::collective::element::{ElementKind, Reduction, reduce};

/// CUDA stream of a rank.
#[derive(Default)]
pub(super) struct Stream {
    /// Unfinished operations: the communicator, and the operation's number in it.
    pub(super) waits_for: Vec<(Arc<Shared>, usize)>,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct What {
    pub(super) name: &'static str,
    pub(super) reduction: Option<c_int>,
    pub(super) root: c_int,
    pub(super) data_type: c_int,
    pub(super) count: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Posted {
    pub(super) what: What,
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    pub(super) stream: *mut Stream,
}

// SAFETY: the buffers are accessed under the lock of the communicator's state, while their owners
// wait.
unsafe impl Send for Posted {}

/// A communicator, shared by its ranks.
pub(super) struct Shared {
    pub(super) size: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// Device of each rank that has joined.
    pub(super) devices: HashMap<usize, usize>,
    /// Operations of each rank, in order.
    pub(super) posted: Vec<Vec<Posted>>,
    pub(super) num_done: usize,
    pub(super) num_finalized: usize,
    pub(super) error: c_int,
}

/// One rank's communicator.
pub(super) struct Rank {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
    /// Operations that are not in their streams yet.
    pub(super) launching: Vec<Posted>,
    /// Number of further polls that report a busy communicator.
    pub(super) busy: u32,
    pub(super) is_finalized: bool,
}

impl State {
    /// Executes the operations that all ranks have posted.
    pub(super) fn carry_out(&mut self) {
        while let Some(all) =
            self.posted.iter().map(|own| own.get(self.num_done).copied()).collect::<Option<Vec<_>>>()
        {
            // NCCL does not compare what ranks ask for: it hangs.
            if all.iter().any(|one| one.what != all[0].what) {
                return;
            }
            // SAFETY: NCCL's callers keep the buffers, and these callers wait.
            unsafe { carry_out(&all) };
            self.num_done += 1;
        }
    }
}

/// # Safety
/// The buffers have NCCL's lengths, and their owners do not access them.
unsafe fn carry_out(all: &[Posted]) {
    let What { name, reduction, root, data_type, count } = all[0].what;
    let kind = match data_type {
        1 => ElementKind::U8,
        4 => ElementKind::I64,
        7 => ElementKind::F32,
        8 => ElementKind::F64,
        9 => ElementKind::Bf16,
        other => panic!("data type {other}"),
    };
    let reduction = reduction.map(|reduction| match reduction {
        0 => Reduction::Sum,
        2 => Reduction::Max,
        other => panic!("reduction {other}"),
    });
    let bytes = count * kind.size();
    // SAFETY: the caller guarantees it.
    let from = |rank: usize, len: usize| unsafe { std::slice::from_raw_parts(all[rank].from, len) };
    let sum = |len: usize| {
        let mut words = vec![0u64; len.div_ceil(8)];
        let result = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..len];
        result.copy_from_slice(from(0, len));
        for rank in 1..all.len() {
            reduce(kind, reduction.expect("an operation that reduces"), result, from(rank, len));
        }
        result.to_vec()
    };
    let results: Vec<(usize, Vec<u8>)> = match name {
        "all_reduce" => (0..all.len()).map(|rank| (rank, sum(bytes))).collect(),
        "reduce" => vec![(root as usize, sum(bytes))],
        "reduce_scatter" => {
            let whole = sum(bytes * all.len());
            whole.chunks_exact(bytes).map(<[u8]>::to_vec).enumerate().collect()
        }
        "all_gather" => {
            let whole = (0..all.len()).flat_map(|rank| from(rank, bytes)).copied().collect::<Vec<_>>();
            (0..all.len()).map(|rank| (rank, whole.clone())).collect()
        }
        "broadcast" => {
            let whole = from(root as usize, bytes);
            (0..all.len()).map(|rank| (rank, whole.to_vec())).collect()
        }
        other => panic!("no operation {other}"),
    };
    for (rank, result) in results {
        // SAFETY: the caller guarantees it; nothing else accesses the place.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), all[rank].to, result.len()) };
    }
}
