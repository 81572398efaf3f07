//! What a rank calls, in a form that ranks can compare.

use std::fmt;
use std::ops::Range;

use crate::collective::element::{ElementKind, Reduction};

/// A collective, or one rank's side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Every rank gets the reduction of all ranks' buffers.
    AllReduce(Reduction),
    /// Every rank gets its part of the reduction.
    ReduceScatter(Reduction),
    /// Every rank gets all ranks' parts.
    AllGather,
    /// Every rank gets this rank's buffer.
    Broadcast {
        /// Whose.
        root: usize,
    },
    /// Nobody goes on before all have come.
    Barrier,
    /// The group divides.
    Split,
    /// A message goes to one rank.
    Send {
        /// Which.
        to: usize,
    },
    /// A message comes from one rank.
    Recv {
        /// Which.
        from: usize,
    },
}

/// One call: of a collective it is equal on all ranks of a group, or it is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// What.
    pub operation: Operation,
    /// On which numbers.
    pub kind: ElementKind,
    /// Number of elements of the whole buffer.
    pub len: usize,
    /// Fingerprint of the ranks' parts, where there are parts.
    pub parts: u64,
}

impl Call {
    /// A call without parts.
    pub fn whole(operation: Operation, kind: ElementKind, len: usize) -> Self {
        Self { operation, kind, len, parts: 0 }
    }

    /// A call whose buffer consists of the ranks' parts of `counts` elements.
    pub fn parted(operation: Operation, kind: ElementKind, counts: &[usize]) -> Self {
        // FNV-1a: the sum alone would not tell [1, 2] from [2, 1].
        let mix = |hash: u64, &n: &usize| (hash ^ n as u64).wrapping_mul(0x0000_0100_0000_01b3);
        let parts = counts.iter().fold(0xcbf2_9ce4_8422_2325, mix);
        Self { operation, kind, len: counts.iter().sum(), parts }
    }

    /// Where the ranks' parts of `counts` elements lie in the buffer, in bytes.
    pub(crate) fn places(&self, counts: &[usize]) -> impl Iterator<Item = Range<usize>> {
        let width = self.kind.size();
        counts.iter().scan(0, move |end, &count| {
            let start = *end;
            *end += count * width;
            Some(start..*end)
        })
    }
}

impl Operation {
    /// One word.
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
