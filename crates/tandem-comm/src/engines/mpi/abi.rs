//! Constants of the three ABIs that MPI libraries have.
//!
//! | ABI | library | handles |
//! |---|---|---|
//! | MPI 5 standard (the ABI chapter of MPI 5.0) | `libmpi_abi.so.1`: MPICH ≥ 5, Open MPI ≥ 6, Intel MPI ≥ 2021.17 | small numbers as pointers |
//! | MPICH's | `libmpi.so.12`: MPICH, Intel MPI, MVAPICH, Cray MPICH | 32-bit integers |
//! | Open MPI's | `libmpi.so.40`: Open MPI 4 and 5 | addresses of the library's variables |

use std::ffi::{CStr, c_int};
use std::fmt;

use tandem_dlopen::Library;

use super::raw::Handle;

/// Application binary interface of an MPI library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abi {
    /// MPI 5's standard ABI.
    Standard,
    /// MPICH's, since MPICH 3.1.
    Mpich,
    /// Open MPI's, since 4.0.
    OpenMpi,
}

impl fmt::Display for Abi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standard => "the MPI 5 standard ABI",
            Self::Mpich => "MPICH's ABI",
            Self::OpenMpi => "Open MPI's ABI",
        })
    }
}

/// Values of the constants that this engine uses, each named as in `mpi.h` without its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Constants {
    pub(super) comm_world: Handle,
    pub(super) comm_self: Handle,
    pub(super) errors_return: Handle,
    pub(super) byte: Handle,
    pub(super) int64: Handle,
    pub(super) uint64: Handle,
    pub(super) sum: Handle,
    pub(super) max: Handle,
    /// An address that is no address.
    pub(super) in_place: isize,
    /// The same.
    pub(super) status_ignore: isize,
    pub(super) any_source: c_int,
    pub(super) thread_multiple: c_int,
}

/// The standard ABI's.
pub(super) const STANDARD: Constants = Constants {
    comm_world: Handle(0x101),
    comm_self: Handle(0x102),
    errors_return: Handle(0x143),
    byte: Handle(0x247),
    int64: Handle(0x258),
    uint64: Handle(0x259),
    sum: Handle(0x21),
    max: Handle(0x23),
    in_place: 1,
    status_ignore: 0,
    any_source: -1,
    thread_multiple: 4096,
};

/// MPICH's. The second byte of a type's number is its size.
pub(super) const MPICH: Constants = Constants {
    comm_world: Handle(0x4400_0000),
    comm_self: Handle(0x4400_0001),
    errors_return: Handle(0x5400_0001),
    byte: Handle(0x4c00_010d),
    int64: Handle(0x4c00_083a),
    uint64: Handle(0x4c00_083e),
    sum: Handle(0x5800_0003),
    max: Handle(0x5800_0001),
    in_place: -1,
    status_ignore: 1,
    any_source: -2,
    thread_multiple: 3,
};

/// Open MPI's variables whose addresses are handles, in the order of [`Constants`].
pub(super) const OPEN_MPI_SYMBOLS: [&CStr; 8] = [
    c"ompi_mpi_comm_world",
    c"ompi_mpi_comm_self",
    c"ompi_mpi_errors_return",
    c"ompi_mpi_byte",
    c"ompi_mpi_int64_t",
    c"ompi_mpi_uint64_t",
    c"ompi_mpi_op_sum",
    c"ompi_mpi_op_max",
];

impl Constants {
    /// Returns an ABI's constants; Open MPI's are looked up in the library.
    pub(super) fn new(abi: Abi, library: &Library) -> Result<Self, String> {
        match abi {
            Abi::Standard => Ok(STANDARD),
            Abi::Mpich => Ok(MPICH),
            Abi::OpenMpi => {
                let mut handles = [Handle::default(); OPEN_MPI_SYMBOLS.len()];
                for (handle, symbol) in handles.iter_mut().zip(OPEN_MPI_SYMBOLS) {
                    *handle = Handle(library.symbol(symbol)?.as_ptr() as usize);
                }
                let [comm_world, comm_self, errors_return, byte, int64, uint64, sum, max] = handles;
                Ok(Self {
                    comm_world,
                    comm_self,
                    errors_return,
                    byte,
                    int64,
                    uint64,
                    sum,
                    max,
                    in_place: 1,
                    status_ignore: 0,
                    any_source: -1,
                    thread_multiple: 3,
                })
            }
        }
    }
}

impl Abi {
    /// Returns `MPI_FLOAT`, which only the measurement of MPI's own sums needs.
    pub(super) fn float(self, library: &Library) -> Result<Handle, String> {
        match self {
            Self::Standard => Ok(Handle(0x210)),
            Self::Mpich => Ok(Handle(0x4c00_040a)),
            Self::OpenMpi => Ok(Handle(library.symbol(c"ompi_mpi_float")?.as_ptr() as usize)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_constants_of_a_table_are_equal() {
        for table in [STANDARD, MPICH] {
            let Constants { comm_world, comm_self, errors_return, byte, int64, uint64, sum, max, .. } = table;
            let handles = [comm_world, comm_self, errors_return, byte, int64, uint64, sum, max];
            assert_eq!(handles.iter().map(|handle| handle.0).collect::<HashSet<_>>().len(), handles.len());
            assert!(handles.iter().all(|handle| handle.0 <= u32::MAX as usize), "{table:?}");
        }
        assert_eq!(OPEN_MPI_SYMBOLS.iter().collect::<HashSet<_>>().len(), OPEN_MPI_SYMBOLS.len());
    }

    /// Both ABIs encode the size of a type in its handle, each in its own way.
    #[test]
    fn handles_of_types_encode_their_sizes() {
        for (handle, size) in [(MPICH.byte, 1), (MPICH.int64, 8), (MPICH.uint64, 8)] {
            assert_eq!((handle.0 >> 8) & 0xff, size);
        }
        // The ABI chapter of MPI 5.0: fixed-size types are 0b1001_xxx_xxx with log2 of the size in the middle.
        for (handle, size) in [(STANDARD.byte, 1), (STANDARD.int64, 8), (STANDARD.uint64, 8)] {
            assert_eq!((handle.0 >> 6, 1 << ((handle.0 >> 3) & 0b111)), (0b1001, size));
        }
    }

    #[test]
    fn a_library_without_open_mpis_variables_is_named() {
        let library = Library::open("libc.so.6").unwrap();
        let error = Constants::new(Abi::OpenMpi, &library).unwrap_err();
        assert_eq!(error, "libc.so.6 has no ompi_mpi_comm_world");
    }
}
