//! The C interface of CUDA's driver, `libcuda.so.1`: types, constants and functions as in `cuda.h`
//! from CUDA 11.2 to 13. Later drivers keep every symbol of earlier ones.

use std::ffi::{c_char, c_int, c_uint, c_void};

use tandem_dlopen::functions;

/// An opaque pointer: `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`.
pub(super) type Opaque = u64;
/// `CUdeviceptr`.
pub(super) type DevicePointer = u64;
/// `CUmemGenericAllocationHandle`.
pub(super) type AllocationHandle = u64;
/// `CUdevice`.
pub(super) type DeviceHandle = c_int;

const _: () = assert!(size_of::<*const ()>() == size_of::<Opaque>(), "CUDA is for machines of 64 bits");

/// Oldest supported driver, as `cuDriverGetVersion` writes it: from here on drivers run the output
/// of all compilers of their major version.
pub(super) const OLDEST: c_int = 11_020;

/// The `CUresult` values that matter here.
pub(super) mod result {
    use std::ffi::c_int;

    pub(crate) const CUDA_SUCCESS: c_int = 0;
    pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: c_int = 2;
    pub(crate) const CUDA_ERROR_STUB_LIBRARY: c_int = 34;
    pub(crate) const CUDA_ERROR_NO_DEVICE: c_int = 100;
    pub(crate) const CUDA_ERROR_NOT_FOUND: c_int = 500;
}

/// The `CUdevice_attribute` values that are queried.
pub(super) mod attribute {
    use std::ffi::c_int;

    pub(crate) const MAX_PITCH: c_int = 11;
    pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
    pub(crate) const L2_CACHE_SIZE: c_int = 38;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(crate) const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: c_int = 91;
    pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
    pub(crate) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_TYPE_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub(super) const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: kernels can read and write it.
pub(super) const HOST_REGISTER_DEVICEMAP: c_uint = 2;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the stream that CUDA has by itself.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: a kernel may be loaded during a capture.
pub(super) const CAPTURE_RELAXED: c_int = 2;
/// `CU_EVENT_DEFAULT`: tells time.
pub(super) const EVENT_DEFAULT: c_uint = 0;
/// `CU_EVENT_WAIT_DEFAULT`.
pub(super) const EVENT_WAIT_DEFAULT: c_uint = 0;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`: a kernel's shared memory beside what it is launched with.
pub(super) const FUNC_SHARED_SIZE_BYTES: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
/// `CU_MEMORYTYPE_UNIFIED`: the driver finds out from the address.
const MEMORYTYPE_UNIFIED: c_int = 4;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_int,
    requested_handle_types: c_int,
    pub(super) location: Location,
    win32_handle_meta_data: *mut c_void,
    compression_type: u8,
    gpu_direct_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(super) struct Copy2D {
    from_x: usize,
    from_y: usize,
    from_kind: c_int,
    from_host: *const c_void,
    pub(super) from: DevicePointer,
    from_array: Opaque,
    pub(super) from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: c_int,
    to_host: *mut c_void,
    pub(super) to: DevicePointer,
    to_array: Opaque,
    pub(super) to_pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Location>() == 8 && size_of::<AccessDescription>() == 12);
    assert!(size_of::<AllocationProperties>() == 32 && offset_of!(AllocationProperties, location) == 8);
    assert!(offset_of!(AllocationProperties, win32_handle_meta_data) == 16);
    assert!(offset_of!(AllocationProperties, compression_type) == 24);
    assert!(size_of::<Copy2D>() == 128 && offset_of!(Copy2D, from_kind) == 16);
    assert!(offset_of!(Copy2D, from_host) == 24 && offset_of!(Copy2D, from) == 32);
    assert!(offset_of!(Copy2D, from_pitch) == 48 && offset_of!(Copy2D, to_x) == 56);
    assert!(offset_of!(Copy2D, to_kind) == 72 && offset_of!(Copy2D, to) == 88);
    assert!(offset_of!(Copy2D, to_pitch) == 104 && offset_of!(Copy2D, width) == 112);
};

impl Location {
    fn new(device: DeviceHandle) -> Self {
        Self { kind: LOCATION_TYPE_DEVICE, id: device }
    }
}

impl AllocationProperties {
    /// Describes memory of a device.
    pub(super) fn new(device: DeviceHandle) -> Self {
        Self {
            kind: ALLOCATION_TYPE_PINNED,
            requested_handle_types: 0,
            location: Location::new(device),
            win32_handle_meta_data: std::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

impl AccessDescription {
    /// Grants a device read and write access.
    pub(super) fn new(device: DeviceHandle) -> Self {
        Self { location: Location::new(device), flags: ACCESS_FLAGS_PROT_READWRITE }
    }
}

impl Copy2D {
    /// Describes a copy of `height` rows of `width` bytes, by address and pitch of each side.
    pub(super) fn new(from: (u64, usize), to: (u64, usize), height: usize, width: usize) -> Self {
        Self {
            from_x: 0,
            from_y: 0,
            from_kind: MEMORYTYPE_UNIFIED,
            from_host: std::ptr::null(),
            from: from.0,
            from_array: 0,
            from_pitch: from.1,
            to_x: 0,
            to_y: 0,
            to_kind: MEMORYTYPE_UNIFIED,
            to_host: std::ptr::null_mut(),
            to: to.0,
            to_array: 0,
            to_pitch: to.1,
            width,
            height,
        }
    }
}

functions! {
    /// Functions that load all kernels of a module, of drivers since CUDA 12.4.
    pub(super) struct LoadFunctions {
        count = c"cuModuleGetFunctionCount" (*mut c_uint, Opaque) -> c_int;
        list = c"cuModuleEnumerateFunctions" (*mut Opaque, c_uint, Opaque) -> c_int;
        load = c"cuFuncLoad" (Opaque) -> c_int;
    }
}

functions! {
    /// Functions of CUDA graphs, of drivers since CUDA 11.4.
    pub(super) struct GraphFunctions {
        begin_capture = c"cuStreamBeginCapture_v2" (Opaque, c_int) -> c_int;
        end_capture = c"cuStreamEndCapture" (Opaque, *mut Opaque) -> c_int;
        instantiate = c"cuGraphInstantiateWithFlags" (*mut Opaque, Opaque, u64) -> c_int;
        destroy = c"cuGraphDestroy" (Opaque) -> c_int;
        launch = c"cuGraphLaunch" (Opaque, Opaque) -> c_int;
        destroy_executable = c"cuGraphExecDestroy" (Opaque) -> c_int;
    }
}

functions! {
    /// Functions of CUDA's driver.
    pub(super) struct DriverFunctions {
        init = c"cuInit" (c_uint) -> c_int;
        driver_version = c"cuDriverGetVersion" (*mut c_int) -> c_int;
        error_name = c"cuGetErrorName" (c_int, *mut *const c_char) -> c_int;
        error_string = c"cuGetErrorString" (c_int, *mut *const c_char) -> c_int;
        device_count = c"cuDeviceGetCount" (*mut c_int) -> c_int;
        device = c"cuDeviceGet" (*mut DeviceHandle, c_int) -> c_int;
        device_name = c"cuDeviceGetName" (*mut c_char, c_int, DeviceHandle) -> c_int;
        device_memory = c"cuDeviceTotalMem_v2" (*mut usize, DeviceHandle) -> c_int;
        device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, DeviceHandle) -> c_int;
        pci_bus_id = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, DeviceHandle) -> c_int;
        can_access_peer = c"cuDeviceCanAccessPeer" (*mut c_int, DeviceHandle, DeviceHandle) -> c_int;
        retain_context = c"cuDevicePrimaryCtxRetain" (*mut Opaque, DeviceHandle) -> c_int;
        release_context = c"cuDevicePrimaryCtxRelease_v2" (DeviceHandle) -> c_int;
        set_context = c"cuCtxSetCurrent" (Opaque) -> c_int;
        synchronize_context = c"cuCtxSynchronize" () -> c_int;
        memory_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize) -> c_int;
        granularity = c"cuMemGetAllocationGranularity"
            (*mut usize, *const AllocationProperties, c_int) -> c_int;
        reserve_addresses = c"cuMemAddressReserve"
            (*mut DevicePointer, usize, usize, DevicePointer, u64) -> c_int;
        free_addresses = c"cuMemAddressFree" (DevicePointer, usize) -> c_int;
        create_memory = c"cuMemCreate"
            (*mut AllocationHandle, usize, *const AllocationProperties, u64) -> c_int;
        release_memory = c"cuMemRelease" (AllocationHandle) -> c_int;
        map_memory = c"cuMemMap" (DevicePointer, usize, usize, AllocationHandle, u64) -> c_int;
        unmap_memory = c"cuMemUnmap" (DevicePointer, usize) -> c_int;
        set_access = c"cuMemSetAccess" (DevicePointer, usize, *const AccessDescription, usize) -> c_int;
        register_host = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint) -> c_int;
        unregister_host = c"cuMemHostUnregister" (*mut c_void) -> c_int;
        copy = c"cuMemcpyAsync" (DevicePointer, DevicePointer, usize, Opaque) -> c_int;
        copy_2d = c"cuMemcpy2DAsync_v2" (*const Copy2D, Opaque) -> c_int;
        set_bytes = c"cuMemsetD8Async" (DevicePointer, u8, usize, Opaque) -> c_int;
        create_stream = c"cuStreamCreate" (*mut Opaque, c_uint) -> c_int;
        destroy_stream = c"cuStreamDestroy_v2" (Opaque) -> c_int;
        synchronize_stream = c"cuStreamSynchronize" (Opaque) -> c_int;
        wait_event = c"cuStreamWaitEvent" (Opaque, Opaque, c_uint) -> c_int;
        create_event = c"cuEventCreate" (*mut Opaque, c_uint) -> c_int;
        destroy_event = c"cuEventDestroy_v2" (Opaque) -> c_int;
        record_event = c"cuEventRecord" (Opaque, Opaque) -> c_int;
        synchronize_event = c"cuEventSynchronize" (Opaque) -> c_int;
        elapsed = c"cuEventElapsedTime" (*mut f32, Opaque, Opaque) -> c_int;
        load_module = c"cuModuleLoadData" (*mut Opaque, *const c_void) -> c_int;
        unload_module = c"cuModuleUnload" (Opaque) -> c_int;
        module_function = c"cuModuleGetFunction" (*mut Opaque, Opaque, *const c_char) -> c_int;
        function_attribute = c"cuFuncGetAttribute" (*mut c_int, c_int, Opaque) -> c_int;
        set_function_attribute = c"cuFuncSetAttribute" (Opaque, c_int, c_int) -> c_int;
        launch = c"cuLaunchKernel"
            (Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void)
            -> c_int;
    }
}
