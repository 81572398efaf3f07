//! `MPI_Allreduce` itself, the yardstick of this engine's speed.

use std::ffi::{c_int, c_void};

use tandem_dlopen::functions;

use super::communicator::Communicator;
use super::raw::Handle;
use crate::collective::element::{Element, ElementKind};
use crate::error::{CommError, Result};

functions! {
    struct BlockingFunctions {
        all_reduce = c"MPI_Allreduce" (*const c_void, *mut c_void, c_int, Handle, Handle, Handle) -> c_int;
    }
}

/// Sums by MPI, without comparison of calls, deadline, or a fixed order of floats.
pub struct Direct {
    communicator: Communicator,
    functions: BlockingFunctions,
    float: Handle,
}

impl Direct {
    pub(super) fn new(communicator: Communicator) -> std::result::Result<Self, String> {
        let library = &communicator.world.library;
        let functions = BlockingFunctions::load(&library.library)?;
        let float = library.abi.float(&library.library)?;
        Ok(Self { functions, float, communicator })
    }

    /// Sums 64-bit integers or 32-bit floats of all ranks, which must all call this.
    pub fn all_reduce<T: Element>(&self, data: &mut [T]) -> Result<()> {
        let library = &self.communicator.world.library;
        let invalid =
            |reason: &str| CommError::Invalid { call: "MPI_Allreduce".into(), reason: reason.into() };
        let kind = match T::KIND {
            ElementKind::I64 => library.constants.int64,
            ElementKind::F32 => self.float,
            _ => return Err(invalid("only i64 and f32 are measured")),
        };
        let len = c_int::try_from(data.len()).map_err(|_| invalid("more than 2^31 numbers"))?;
        let in_place = library.constants.in_place as *const c_void;
        // SAFETY: the call blocks while the buffer is borrowed; the numbers are of this type.
        let outcome = unsafe {
            (self.functions.all_reduce)(
                in_place,
                data.as_mut_ptr().cast(),
                len,
                kind,
                library.constants.sum,
                self.communicator.handle(),
            )
        };
        let failed = |reason| CommError::Engine { reason };
        self.communicator.world.outcome("MPI_Allreduce", outcome).map_err(failed)
    }
}
