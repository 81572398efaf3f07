//! Descriptions of calls, which ranks can compare.

use std::fmt;
use std::ops::Range;

use crate::collective::element::{ElementKind, Reduction};

/// A collective, or one side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Reduction of all ranks' buffers, for every rank.
    AllReduce(Reduction),
    /// Reduction of all ranks' buffers, for every rank its part.
    ReduceScatter(Reduction),
    /// All ranks' parts, for every rank.
    AllGather,
    /// The root's buffer, for every rank.
    Broadcast {
        /// The rank that sends.
        root: usize,
    },
    /// Wait for all ranks.
    Barrier,
    /// Division of the group.
    Split,
    /// A message to one rank.
    Send {
        /// The receiver.
        to: usize,
    },
    /// A message from one rank.
    Recv {
        /// The sender.
        from: usize,
    },
}

/// One call. All ranks of a group must make equal collective calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The element type.
    pub kind: ElementKind,
    /// Number of elements in the whole buffer.
    pub len: usize,
    /// Fingerprint of the ranks' parts; 0 without parts.
    pub parts: u64,
}

impl Call {
    /// Creates a call without parts.
    pub fn whole(operation: Operation, kind: ElementKind, len: usize) -> Self {
        Self { operation, kind, len, parts: 0 }
    }

    /// Creates a call on a buffer of parts, with `counts` elements per rank.
    pub fn parted(operation: Operation, kind: ElementKind, counts: &[usize]) -> Self {
        // The sum alone would not distinguish [1, 2] from [2, 1].
        let parts = fnv1a(counts.iter().map(|&count| count as u64));
        Self { operation, kind, len: counts.iter().sum(), parts }
    }

    /// Returns the reduction of a call that has one.
    pub(crate) fn reduction(&self) -> Reduction {
        match self.operation {
            Operation::AllReduce(reduction) | Operation::ReduceScatter(reduction) => reduction,
            other => unreachable!("{} reduces nothing", other.name()),
        }
    }

    /// Returns the byte ranges of the ranks' parts.
    pub(crate) fn places(&self, counts: &[usize]) -> impl Iterator<Item = Range<usize>> {
        let width = self.kind.size();
        counts.iter().scan(0, move |end, &count| {
            let start = *end;
            *end += count * width;
            Some(start..*end)
        })
    }
}

/// Hashes numbers: FNV-1a, with numbers in place of bytes.
pub(crate) fn fnv1a(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0xcbf2_9ce4_8422_2325, |hash, number| (hash ^ number).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Operation {
    /// Returns the operation's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, kind, len, .. } = self;
        match operation {
            Operation::AllReduce(reduction) => write!(f, "all_reduce({reduction}) of {len} {kind}"),
            Operation::ReduceScatter(reduction) => {
                write!(f, "reduce_scatter({reduction}) of {len} {kind} in parts {:x}", self.parts)
            }
            Operation::AllGather => write!(f, "all_gather of {len} {kind} in parts {:x}", self.parts),
            Operation::Broadcast { root } => write!(f, "broadcast of {len} {kind} from rank {root}"),
            Operation::Barrier => f.write_str("barrier"),
            Operation::Split => f.write_str("split"),
            Operation::Send { to } => write!(f, "send of {len} {kind} to rank {to}"),
            Operation::Recv { from } => write!(f, "recv of {len} {kind} from rank {from}"),
        }
    }
}
