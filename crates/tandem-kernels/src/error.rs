//! What can go wrong in a kernel call.

use crate::memory::memory_use::MemoryUse;
use crate::numerics::dtype::DType;

/// An operation was called with operands that do not fit, or memory ran out.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// An operand has a shape that the operation cannot take.
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
    /// An operand has an element type that the operation cannot take.
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
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The device's arena cannot hold another tensor.
    #[error(
        "out of device memory: {requested} bytes for {kind} asked, {capacity} bytes in the arena; in use: {in_use}"
    )]
    OutOfMemory {
        /// Bytes asked for.
        requested: usize,
        /// What for.
        kind: &'static str,
        /// Size of the arena in bytes.
        capacity: usize,
        /// What holds the memory.
        in_use: Box<MemoryUse>,
    },
    /// A GPU has no more memory: what the run planned for was free when it began, and somebody else took it.
    #[error("{what}: out of memory: {}{free} of the {total} bytes of {gpu} are free", bytes_wanted(*wanted))]
    GpuFull {
        /// What for.
        what: String,
        /// Which GPU: its number and name.
        gpu: String,
        /// Bytes asked for, if that is known.
        wanted: Option<usize>,
        /// Bytes that nobody uses.
        free: usize,
        /// Bytes that it has.
        total: usize,
    },
    /// CUDA or one of its libraries failed.
    #[error("{what}: {reason}")]
    Cuda {
        /// What was attempted.
        what: String,
        /// What the library says, and what to do.
        reason: String,
    },
    /// The operating system refused memory or threads.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

fn bytes_wanted(wanted: Option<usize>) -> String {
    wanted.map_or_else(String::new, |bytes| format!("{bytes} bytes wanted, "))
}

impl KernelError {
    /// Whether a device's memory did not suffice.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::GpuFull { .. })
    }

    /// Shorthand for [`KernelError::Invalid`].
    pub fn invalid(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { op, reason: reason.into() }
    }
}
