//! MPI's C interface: the functions that this engine calls, the same under every ABI.
//!
//! An MPI's opaque handles are pointers (the MPI 5 standard ABI, Open MPI) or 32-bit integers
//! (MPICH's ABI). [`Handle`] is as wide as a pointer and serves both: 64-bit Linux passes either in
//! a whole register or stack slot, of which a callee reads its low half. A handle that MPI writes
//! as an integer lands in the low half of a handle that was zero, on little-endian machines;
//! [`super::library`] refuses others.

use std::ffi::{c_char, c_int, c_void};

use tandem_dlopen::functions;

/// `MPI_Comm`, `MPI_Datatype`, `MPI_Op`, `MPI_Request` or `MPI_Errhandler`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Handle(pub(super) usize);

/// `MPI_SUCCESS` of every ABI.
pub(super) const SUCCESS: c_int = 0;
/// Room for a text of MPI; the longest `MPI_MAX_ERROR_STRING` and
/// `MPI_MAX_LIBRARY_VERSION_STRING` are 8192.
pub(super) const MAX_TEXT: usize = 16 << 10;

functions! {
    pub(super) struct MpiFunctions {
        init_thread = c"MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
        initialized = c"MPI_Initialized" (*mut c_int) -> c_int;
        finalize = c"MPI_Finalize" () -> c_int;
        abort = c"MPI_Abort" (Handle, c_int) -> c_int;
        library_version = c"MPI_Get_library_version" (*mut c_char, *mut c_int) -> c_int;
        error_string = c"MPI_Error_string" (c_int, *mut c_char, *mut c_int) -> c_int;
        set_error_handler = c"MPI_Comm_set_errhandler" (Handle, Handle) -> c_int;
        rank = c"MPI_Comm_rank" (Handle, *mut c_int) -> c_int;
        size = c"MPI_Comm_size" (Handle, *mut c_int) -> c_int;
        split = c"MPI_Comm_split" (Handle, c_int, c_int, *mut Handle) -> c_int;
        test = c"MPI_Test" (*mut Handle, *mut c_int, *mut c_void) -> c_int;
        probe = c"MPI_Iprobe" (c_int, c_int, Handle, *mut c_int, *mut c_void) -> c_int;
        send = c"MPI_Isend" (*const c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;
        recv = c"MPI_Irecv" (*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;
        broadcast = c"MPI_Ibcast" (*mut c_void, c_int, Handle, c_int, Handle, *mut Handle) -> c_int;
        all_reduce = c"MPI_Iallreduce"
            (*const c_void, *mut c_void, c_int, Handle, Handle, Handle, *mut Handle) -> c_int;
        reduce_scatter = c"MPI_Ireduce_scatter"
            (*const c_void, *mut c_void, *const c_int, Handle, Handle, Handle, *mut Handle) -> c_int;
        all_gather = c"MPI_Iallgatherv"
            (*const c_void, c_int, Handle, *mut c_void, *const c_int, *const c_int, Handle, Handle, *mut Handle)
            -> c_int;
    }
}
