//! Errors of kernel calls.

use std::fmt;

use crate::memory::memory_use::MemoryUse;
use crate::numerics::dtype::DType;

/// A failed kernel call: wrong operands, exhausted memory, or an error of the system or of CUDA.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// An operand of the wrong shape.
    #[error("{op}: {operand} is {found_rows}x{found_cols}, expected {expected_rows}x{expected_cols}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand's name.
        operand: &'static str,
        /// Rows found.
        found_rows: usize,
        /// Columns found.
        found_cols: usize,
        /// Rows expected.
        expected_rows: usize,
        /// Columns expected.
        expected_cols: usize,
    },
    /// An operand of the wrong element type.
    #[error("{op}: {operand} is {found}, expected {expected}")]
    Type {
        /// The operation.
        op: &'static str,
        /// The operand's name.
        operand: &'static str,
        /// The type found.
        found: DType,
        /// The types accepted, in words.
        expected: &'static str,
    },
    /// A value that breaks the operation's contract.
    #[error("{op}: {reason}")]
    Invalid {
        /// The operation.
        op: &'static str,
        /// Reason, with the numbers.
        reason: String,
    },
    /// An arena cannot hold another tensor.
    #[error(
        "out of {place}: {requested} bytes for {kind} asked, {capacity} bytes in the arena; in use: {in_use}"
    )]
    OutOfMemory {
        /// Memory of the arena.
        place: ArenaPlace,
        /// Bytes asked for.
        requested: usize,
        /// Purpose of the memory.
        kind: &'static str,
        /// Size of the arena in bytes.
        capacity: usize,
        /// Memory in use by kind.
        in_use: Box<MemoryUse>,
    },
    /// A GPU has no free memory left. The plan fitted when the run began, so another process has
    /// taken it since.
    #[error("{what}: out of memory: {}{free} of the {total} bytes of {gpu} are free", bytes_wanted(*wanted))]
    GpuFull {
        /// Purpose of the memory.
        what: String,
        /// Number and name of the GPU.
        gpu: String,
        /// Bytes asked for, if known.
        wanted: Option<usize>,
        /// Free bytes.
        free: usize,
        /// Total bytes.
        total: usize,
    },
    /// CUDA or one of its libraries failed.
    #[error("{what}: {reason}")]
    Cuda {
        /// Attempted action.
        what: String,
        /// Message of the library, and the remedy.
        reason: String,
    },
    /// The operating system refused memory or threads.
    #[error("{what}")]
    System {
        /// Attempted action.
        what: &'static str,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

fn bytes_wanted(wanted: Option<usize>) -> String {
    wanted.map_or_else(String::new, |bytes| format!("{bytes} bytes wanted, "))
}

/// Memory that an arena lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaPlace {
    /// The memory in which the device computes.
    Device,
    /// Pinned memory of a GPU's host.
    PinnedHost,
    /// A mapped file.
    File,
}

impl fmt::Display for ArenaPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device memory",
            Self::PinnedHost => "pinned host memory",
            Self::File => "space in the file of offloaded tensors",
        })
    }
}

impl KernelError {
    /// Returns whether a device has run out of memory.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::GpuFull { .. })
    }

    /// Creates a [`KernelError::Invalid`].
    pub fn invalid(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { op, reason: reason.into() }
    }
}
