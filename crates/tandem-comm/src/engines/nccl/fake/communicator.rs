//! Shared state of a communicator's ranks, and the execution of their operations.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use super::stream::Stream;
use super::{Rank, lock};
use crate::collective::element::{ElementKind, Reduction, reduce};

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct What {
    pub(super) name: &'static str,
    pub(super) reduction: Option<c_int>,
    pub(super) root: c_int,
    pub(super) data_type: c_int,
    pub(super) count: usize,
}

impl What {
    /// Returns whether two ranks' operations are the same one.
    fn meets(&self, rank: usize, other: &Self, of: usize) -> bool {
        let pair = |send: &Self, recv: &Self| {
            send.name == "send" && *recv == Self { name: "recv", root: recv.root, ..*send }
        };
        let are_peers = self.root == of as c_int && other.root == rank as c_int;
        self == other || are_peers && (pair(self, other) || pair(other, self))
    }

    /// Returns whether all ranks take part.
    fn is_collective(&self) -> bool {
        !matches!(self.name, "send" | "recv")
    }
}

/// An operation on its way into a stream.
#[derive(Clone)]
pub(super) struct Posted {
    pub(super) what: What,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) stream: Arc<Mutex<Stream>>,
}

/// A communicator, shared by its ranks.
pub(super) struct Shared {
    pub(super) size: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// Device of each rank that has joined.
    pub(super) devices: HashMap<usize, usize>,
    /// Per rank: the operation that its stream has come to, if any.
    current: Vec<Option<Posted>>,
    /// Per rank: number of operations that are done.
    num_done: Vec<usize>,
    /// Ranks that have aborted.
    aborted: Vec<bool>,
    pub(super) num_finalized: usize,
    pub(super) error: c_int,
    /// Colour and key of each rank that divides the communicator.
    pub(super) colors: HashMap<usize, (c_int, c_int)>,
    /// Parts of the division in progress, by colour, and how many ranks have taken theirs.
    pub(super) parts: HashMap<c_int, Arc<Shared>>,
    pub(super) num_taken: usize,
}

impl Shared {
    pub(super) fn new(size: usize) -> Arc<Self> {
        let state = State {
            current: vec![None; size],
            num_done: vec![0; size],
            aborted: vec![false; size],
            ..State::default()
        };
        Arc::new(Self { size, state: Mutex::new(state) })
    }

    pub(super) fn abort(&self, rank: usize) {
        let mut state = lock(&self.state);
        state.aborted[rank] = true;
        state.current[rank] = None;
    }
}

/// One rank's communicator.
pub(super) struct OfRank {
    pub(super) own: Arc<Rank>,
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
    /// Operations that are not in their streams yet.
    pub(super) launching: Vec<Posted>,
    /// Address for this rank's part of a division in progress.
    pub(super) dividing: Option<usize>,
    /// Number of operations put into streams, and the last one's.
    pub(super) num_posted: usize,
    last: Option<Arc<Mutex<Stream>>>,
    /// Number of further polls that report a busy communicator.
    pub(super) busy: u32,
    pub(super) is_finalized: bool,
}

impl OfRank {
    pub(super) fn new(own: Arc<Rank>, shared: Arc<Shared>, rank: usize, busy: u32) -> Self {
        let launching = Vec::new();
        Self {
            own,
            shared,
            rank,
            launching,
            dividing: None,
            num_posted: 0,
            last: None,
            busy,
            is_finalized: false,
        }
    }

    /// Returns whether an operation in a stream is not done.
    pub(super) fn is_in_flight(&self) -> bool {
        if let Some(stream) = &self.last {
            super::stream::advance(stream);
        }
        lock(&self.shared.state).num_done[self.rank] < self.num_posted
    }

    /// Puts operations into their streams.
    pub(super) fn post(&mut self, hangs: bool) {
        for posted in std::mem::take(&mut self.launching) {
            let (shared, rank, number) = (self.shared.clone(), self.rank, self.num_posted);
            self.num_posted += 1;
            let stream = posted.stream.clone();
            self.last = Some(stream.clone());
            super::stream::push(&stream, move || {
                let mut state = lock(&shared.state);
                if state.aborted[rank] || state.num_done[rank] > number {
                    return true;
                }
                // NCCL keeps the order of a communicator's operations in different streams.
                if hangs || state.num_done[rank] < number {
                    return false;
                }
                state.current[rank] = Some(posted.clone());
                state.carry_out();
                state.num_done[rank] > number
            });
        }
    }
}

impl State {
    /// Executes the operation that the ranks' streams have come to, if they have.
    fn carry_out(&mut self) {
        // NCCL does not compare what ranks ask for: it hangs.
        let here: Vec<(usize, Posted)> =
            self.current.iter().enumerate().filter_map(|(rank, at)| Some((rank, at.clone()?))).collect();
        let is_whole = here.len() == self.current.len()
            && here.iter().all(|(_, one)| one.what == here[0].1.what && one.what.is_collective());
        let messages = here.iter().find_map(|(to, recv)| {
            let (from, send) = here
                .iter()
                .find(|(from, send)| recv.what.name == "recv" && send.what.meets(*from, &recv.what, *to))?;
            Some(((*from, send.clone()), (*to, recv.clone())))
        });
        if is_whole {
            // SAFETY: NCCL's callers keep the buffers until their streams have come so far, and
            // the streams of all ranks wait here.
            unsafe { carry_out(&here.iter().map(|(_, one)| one.clone()).collect::<Vec<_>>()) };
            (0..here.len()).for_each(|rank| self.finish(rank));
        } else if let Some(((from, send), (to, recv))) = messages {
            let len = send.what.count * kind(send.what.data_type).size();
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(send.from as *const u8, recv.to as *mut u8, len) };
            self.finish(from);
            self.finish(to);
        }
    }

    fn finish(&mut self, rank: usize) {
        self.current[rank] = None;
        self.num_done[rank] += 1;
    }
}

fn kind(data_type: c_int) -> ElementKind {
    match data_type {
        1 => ElementKind::U8,
        4 => ElementKind::I64,
        7 => ElementKind::F32,
        8 => ElementKind::F64,
        9 => ElementKind::Bf16,
        other => panic!("data type {other}"),
    }
}

/// # Safety
/// The buffers have NCCL's lengths, and their owners do not access them.
unsafe fn carry_out(all: &[Posted]) {
    let What { name, reduction, root, data_type, count } = all[0].what;
    let kind = kind(data_type);
    let reduction = reduction.map(|reduction| match reduction {
        0 => Reduction::Sum,
        2 => Reduction::Max,
        other => panic!("reduction {other}"),
    });
    let bytes = count * kind.size();
    // SAFETY: the caller guarantees it.
    let from =
        |rank: usize, len: usize| unsafe { std::slice::from_raw_parts(all[rank].from as *const u8, len) };
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
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), all[rank].to as *mut u8, result.len()) };
    }
}
