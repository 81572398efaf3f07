//! C interfaces: NCCL's since 2.18, and the functions of CUDA's driver that it needs.
//!
//! Both interfaces only ever grow, so later versions match too.

use std::ffi::{c_char, c_int, c_uint, c_void};

use tandem_dlopen::functions;

use crate::collective::element::{ElementKind, Reduction};

/// Oldest supported NCCL, in its own notation. It has non-blocking communicators that can be
/// aborted at any point, and this layout of [`Config`].
pub(super) const OLDEST: c_int = 21800;
/// First version that asks whether a GPU may touch the buffer of another rank of the process, before it writes there.
pub(super) const ASKS_FOR_ACCESS: c_int = 22300;

/// `ncclResult_t`: success.
pub(super) const SUCCESS: c_int = 0;
/// `ncclResult_t`: a non-blocking communicator is still working.
pub(super) const IN_PROGRESS: c_int = 7;
/// `CUresult`: success.
pub(super) const CUDA_SUCCESS: c_int = 0;
/// `CUresult`: no device.
pub(super) const CUDA_NO_DEVICE: c_int = 100;
/// `CUresult`: the work is not done yet.
pub(super) const CUDA_NOT_READY: c_int = 600;
/// Flag of a stream that does not synchronise with CUDA's default stream.
pub(super) const CUDA_STREAM_NON_BLOCKING: c_uint = 1;
/// Flag of an event that takes no time.
pub(super) const CUDA_EVENT_DISABLE_TIMING: c_uint = 2;

/// `ncclComm_t`.
pub(super) type RawCommunicator = *mut c_void;
/// `CUstream`, equal to `cudaStream_t`.
pub(super) type RawStream = *mut c_void;
/// `CUevent`.
pub(super) type RawEvent = *mut c_void;
/// `CUcontext`.
pub(super) type RawContext = *mut c_void;
/// `CUdeviceptr`: an address in device memory, `void*` for NCCL.
pub(super) type DevicePointer = u64;

/// `ncclUniqueId`: the rendezvous of a communicator's ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of 2.18. Later versions append fields; they read `size` bytes and use defaults
/// for fields that `version` lacks.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

const _: () = {
    use std::mem::{align_of, offset_of};
    assert!(size_of::<UniqueId>() == 128 && align_of::<UniqueId>() == 1);
    assert!(size_of::<Config>() == 48 && align_of::<Config>() == 8);
    assert!(offset_of!(Config, size) == 0 && offset_of!(Config, magic) == 8);
    assert!(offset_of!(Config, version) == 12 && offset_of!(Config, blocking) == 16);
    assert!(offset_of!(Config, cga_cluster_size) == 20 && offset_of!(Config, min_ctas) == 24);
    assert!(offset_of!(Config, max_ctas) == 28 && offset_of!(Config, net_name) == 32);
    assert!(offset_of!(Config, split_share) == 40);
};

impl Config {
    /// Configures a non-blocking communicator; the rest is NCCL's choice.
    pub(super) fn non_blocking() -> Self {
        /// `NCCL_API_MAGIC`.
        const MAGIC: c_uint = 0xcafe_beef;
        /// `NCCL_CONFIG_UNDEF_INT`.
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Returns the `ncclDataType_t`.
pub(super) const fn data_type(kind: ElementKind) -> c_int {
    match kind {
        ElementKind::U8 => 1,
        ElementKind::I64 => 4,
        ElementKind::F32 => 7,
        ElementKind::F64 => 8,
        ElementKind::Bf16 => 9,
    }
}

/// Returns the `ncclRedOp_t`.
pub(super) const fn operation(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
    }
}

functions! {
    pub(super) struct NcclFunctions {
        get_version = c"ncclGetVersion" (*mut c_int) -> c_int;
        get_unique_id = c"ncclGetUniqueId" (*mut UniqueId) -> c_int;
        init_rank = c"ncclCommInitRankConfig" (*mut RawCommunicator, c_int, UniqueId, c_int, *mut Config) -> c_int;
        split = c"ncclCommSplit" (RawCommunicator, c_int, c_int, *mut RawCommunicator, *mut Config) -> c_int;
        async_error = c"ncclCommGetAsyncError" (RawCommunicator, *mut c_int) -> c_int;
        all_reduce = c"ncclAllReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        reduce_scatter = c"ncclReduceScatter"
            (*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        all_gather = c"ncclAllGather"
            (*const c_void, *mut c_void, usize, c_int, RawCommunicator, RawStream) -> c_int;
        reduce = c"ncclReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        broadcast = c"ncclBroadcast"
            (*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        send = c"ncclSend" (*const c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        recv = c"ncclRecv" (*mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
        group_start = c"ncclGroupStart" () -> c_int;
        group_end = c"ncclGroupEnd" () -> c_int;
        finalize = c"ncclCommFinalize" (RawCommunicator) -> c_int;
        destroy = c"ncclCommDestroy" (RawCommunicator) -> c_int;
        abort = c"ncclCommAbort" (RawCommunicator) -> c_int;
        error_string = c"ncclGetErrorString" (c_int) -> *const c_char;
        last_error = c"ncclGetLastError" (RawCommunicator) -> *const c_char;
    }
}

functions! {
    pub(super) struct CudaFunctions {
        init = c"cuInit" (c_uint) -> c_int;
        device_count = c"cuDeviceGetCount" (*mut c_int) -> c_int;
        device = c"cuDeviceGet" (*mut c_int, c_int) -> c_int;
        retain_context = c"cuDevicePrimaryCtxRetain" (*mut RawContext, c_int) -> c_int;
        set_context = c"cuCtxSetCurrent" (RawContext) -> c_int;
        allocate = c"cuMemAlloc_v2" (*mut DevicePointer, usize) -> c_int;
        free = c"cuMemFree_v2" (DevicePointer) -> c_int;
        new_stream = c"cuStreamCreate" (*mut RawStream, c_uint) -> c_int;
        destroy_stream = c"cuStreamDestroy_v2" (RawStream) -> c_int;
        query_stream = c"cuStreamQuery" (RawStream) -> c_int;
        synchronize = c"cuStreamSynchronize" (RawStream) -> c_int;
        new_event = c"cuEventCreate" (*mut RawEvent, c_uint) -> c_int;
        destroy_event = c"cuEventDestroy_v2" (RawEvent) -> c_int;
        record_event = c"cuEventRecord" (RawEvent, RawStream) -> c_int;
        query_event = c"cuEventQuery" (RawEvent) -> c_int;
        upload = c"cuMemcpyHtoDAsync_v2" (DevicePointer, *const c_void, usize, RawStream) -> c_int;
        download = c"cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePointer, usize, RawStream) -> c_int;
        error_string = c"cuGetErrorString" (c_int, *mut *const c_char) -> c_int;
    }
}
