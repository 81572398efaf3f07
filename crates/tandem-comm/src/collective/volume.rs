//! Communication volume of a rank.

use crate::collective::call::{Call, Operation};

/// Calls and bytes of a rank, comparable between engines: bytes are those of the best known
/// algorithms, not those that an engine really sends.
///
/// With `N` ranks and a buffer of `b` bytes a rank sends `2·b·(N−1)/N` in an all-reduce,
/// `b·(N−1)/N` in a reduce-scatter or all-gather, and `b` in a broadcast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Number of collective calls.
    pub num_calls: u64,
    /// Bytes sent by this rank.
    pub bytes_sent: u64,
}

impl Volume {
    pub(crate) fn count(&mut self, call: &Call, size: usize) {
        let is_message = matches!(call.operation, Operation::Send { .. } | Operation::Recv { .. });
        self.num_calls += u64::from(!is_message);
        self.bytes_sent += call.bytes_sent(size);
    }
}

impl Call {
    /// Returns the bytes that each of `size` ranks sends.
    pub fn bytes_sent(&self, size: usize) -> u64 {
        let (bytes, size) = ((self.len * self.kind.size()) as u64, size as u64);
        match self.operation {
            Operation::AllReduce(_) => 2 * bytes * (size - 1) / size,
            Operation::ReduceScatter(_) | Operation::AllGather => bytes * (size - 1) / size,
            Operation::Broadcast { .. } => bytes * u64::from(size > 1),
            Operation::Send { .. } => bytes,
            Operation::Barrier | Operation::Split | Operation::Recv { .. } => 0,
        }
    }
}
