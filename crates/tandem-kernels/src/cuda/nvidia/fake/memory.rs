//! Memory: of the GPU, of the host, and what lies where.

use std::ffi::{c_int, c_uint, c_void};

use super::{GRANULARITY, Gpu, INVALID_VALUE, OK, OUT_OF_MEMORY, on_gpu};
use crate::cuda::nvidia::raw::{
    AccessDescription, AllocationHandle, AllocationProperties, Copy2D, DevicePointer, Opaque,
};

impl Gpu {
    /// Bytes that are not allocated.
    pub(super) fn free(&self) -> usize {
        self.kind.memory - self.allocated.values().sum::<usize>()
    }

    /// Returns whether a range is memory of the GPU that may be touched, or lies in host memory
    /// that was registered at once.
    pub(super) fn can_touch(&self, at: u64, bytes: usize) -> bool {
        let end = at + bytes as u64;
        let inside = |(&start, &len): (&u64, &usize)| start <= at && end <= start + len as u64;
        let mut reached = at;
        for (&start, &(len, _, may)) in &self.mapped {
            if may && (start..start + len as u64).contains(&reached) {
                reached = start + len as u64;
            }
        }
        reached >= end || self.registered.iter().any(inside)
    }
}

fn result(is_fine: bool) -> c_int {
    if is_fine { OK } else { INVALID_VALUE }
}

pub(super) unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> c_int {
    on_gpu(|gpu| {
        // SAFETY: as in CUDA.
        unsafe { (*free, *total) = (gpu.free(), gpu.kind.memory) };
        OK
    })
}

/// # Safety
/// As in CUDA.
unsafe fn is_of_this_gpu(properties: *const AllocationProperties) -> bool {
    // SAFETY: the structure begins with four numbers: type, kind of handles, kind of place, and
    // which.
    let words = unsafe { *properties.cast::<[c_int; 4]>() };
    words[..3] == [1, 0, 1] && super::CURRENT.get() == Some((words[3] - 100) as usize)
}

pub(super) unsafe extern "C" fn granularity(
    place: *mut usize,
    properties: *const AllocationProperties,
    option: c_int,
) -> c_int {
    // SAFETY: as in CUDA.
    unsafe {
        *place = GRANULARITY;
        result(is_of_this_gpu(properties) && (0..2).contains(&option))
    }
}

pub(super) unsafe extern "C" fn reserve(
    place: *mut DevicePointer,
    bytes: usize,
    _: usize,
    _: DevicePointer,
    _: u64,
) -> c_int {
    on_gpu(|gpu| {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which nobody can touch yet.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let base = base.expose_provenance() as u64;
        gpu.reserved.insert(base, bytes);
        // SAFETY: as in CUDA.
        unsafe { *place = base };
        OK
    })
}

pub(super) unsafe extern "C" fn free_addresses(base: DevicePointer, bytes: usize) -> c_int {
    on_gpu(|gpu| {
        if gpu.reserved.get(&base) != Some(&bytes)
            || gpu.mapped.range(base..base + bytes as u64).next().is_some()
        {
            return INVALID_VALUE;
        }
        gpu.reserved.remove(&base);
        gpu.log(format!("free addresses {bytes}"));
        // SAFETY: the mapping was made by `reserve`.
        result(unsafe { libc::munmap(pointer(base), bytes) } == 0)
    })
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

pub(super) unsafe extern "C" fn create(
    place: *mut AllocationHandle,
    bytes: usize,
    properties: *const AllocationProperties,
    _: u64,
) -> c_int {
    on_gpu(|gpu| {
        // SAFETY: as in CUDA.
        if !bytes.is_multiple_of(GRANULARITY) || !unsafe { is_of_this_gpu(properties) } {
            return INVALID_VALUE;
        }
        if bytes > gpu.free() {
            return OUT_OF_MEMORY;
        }
        let handle = gpu.number();
        gpu.allocated.insert(handle, bytes);
        gpu.log(format!("create {bytes}"));
        // SAFETY: as in CUDA.
        unsafe { *place = handle };
        OK
    })
}

pub(super) unsafe extern "C" fn release(handle: AllocationHandle) -> c_int {
    on_gpu(|gpu| {
        let is_mapped = gpu.mapped.values().any(|&(_, of, _)| of == handle);
        gpu.log("release".to_owned());
        result(!is_mapped && gpu.allocated.remove(&handle).is_some())
    })
}

pub(super) unsafe extern "C" fn map(
    at: DevicePointer,
    bytes: usize,
    offset: usize,
    handle: AllocationHandle,
    _: u64,
) -> c_int {
    on_gpu(|gpu| {
        let end = at + bytes as u64;
        let is_reserved = gpu.reserved.iter().any(|(&base, &len)| base <= at && end <= base + len as u64);
        let is_free = gpu.mapped.range(at..end).next().is_none();
        if !is_reserved || !is_free || offset != 0 || gpu.allocated.get(&handle) != Some(&bytes) {
            return INVALID_VALUE;
        }
        gpu.mapped.insert(at, (bytes, handle, false));
        OK
    })
}

pub(super) unsafe extern "C" fn set_access(
    at: DevicePointer,
    bytes: usize,
    access: *const AccessDescription,
    count: usize,
) -> c_int {
    // SAFETY: as in CUDA.
    let access = unsafe { std::slice::from_raw_parts(access.cast::<[c_int; 3]>(), count) };
    let is_for_gpus = access.iter().all(|access| access[0] == 1 && access[2] == 3);
    let devices: Vec<usize> = access.iter().map(|access| (access[1] - 100) as usize).collect();
    let is_own = devices.first().copied() == super::CURRENT.get();
    on_gpu(|gpu| match gpu.mapped.get_mut(&at) {
        Some(mapped) if mapped.0 == bytes && is_for_gpus && is_own => {
            mapped.2 = true;
            gpu.opened_to = devices;
            // SAFETY: the range lies inside a mapping of `reserve`. Nobody may rely on what new
            // memory holds.
            unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                assert_eq!(libc::mprotect(pointer(at), bytes, access), 0);
                pointer(at).cast::<u8>().write_bytes(0xab, bytes);
            }
            OK
        }
        _ => INVALID_VALUE,
    })
}

pub(super) unsafe extern "C" fn unmap(at: DevicePointer, bytes: usize) -> c_int {
    on_gpu(|gpu| {
        if gpu.mapped.get(&at).is_none_or(|mapped| mapped.0 != bytes) {
            return INVALID_VALUE;
        }
        gpu.mapped.remove(&at);
        gpu.log(format!("unmap {bytes}"));
        // SAFETY: the range lies inside a mapping of `reserve`.
        result(unsafe { libc::mprotect(pointer(at), bytes, libc::PROT_NONE) } == 0)
    })
}

pub(super) unsafe extern "C" fn register(at: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    on_gpu(|gpu| {
        let start = at.expose_provenance() as u64;
        let end = start + bytes as u64;
        let meets = gpu.registered.iter().any(|(&other, &len)| other < end && start < other + len as u64);
        if flags != 3 || meets || !start.is_multiple_of(4096) || !bytes.is_multiple_of(4096) {
            return INVALID_VALUE;
        }
        if gpu.registered.values().sum::<usize>() + bytes > gpu.kind.host {
            return OUT_OF_MEMORY;
        }
        gpu.registered.insert(start, bytes);
        gpu.log(format!("register {bytes}"));
        OK
    })
}

pub(super) unsafe extern "C" fn unregister(at: *mut c_void) -> c_int {
    on_gpu(|gpu| {
        gpu.log("unregister".to_owned());
        result(gpu.registered.remove(&(at.expose_provenance() as u64)).is_some())
    })
}

pub(super) unsafe extern "C" fn copy(to: u64, from: u64, bytes: usize, stream: Opaque) -> c_int {
    on_gpu(|gpu| {
        gpu.log(format!("copy {bytes}"));
        if !gpu.can_touch(from, bytes) || !gpu.can_touch(to, bytes) {
            return INVALID_VALUE;
        }
        // SAFETY: both may be touched.
        gpu.do_or_keep(stream, move || unsafe {
            std::ptr::copy(pointer(from).cast::<u8>(), pointer(to).cast::<u8>(), bytes);
        })
    })
}

pub(super) unsafe extern "C" fn copy_2d(copy: *const Copy2D, _: Opaque) -> c_int {
    // SAFETY: as in CUDA. The kinds of memory stand where its header has them.
    let (copy, kinds) = unsafe {
        let kind = |offset: usize| copy.cast::<c_int>().byte_add(offset).read();
        (&*copy, [kind(16), kind(72)])
    };
    let Copy2D { from, from_pitch, to, to_pitch, width, height, .. } = *copy;
    on_gpu(|gpu| {
        gpu.log(format!("copy {height} rows of {width}"));
        let all = |pitch: usize| (height - 1) * pitch + width;
        let is_there = gpu.can_touch(from, all(from_pitch)) && gpu.can_touch(to, all(to_pitch));
        if kinds != [4, 4] || from_pitch < width || to_pitch < width || !is_there {
            return INVALID_VALUE;
        }
        for row in 0..height {
            let at = |start: u64, pitch: usize| pointer(start + (row * pitch) as u64).cast::<u8>();
            // SAFETY: both may be touched.
            unsafe { std::ptr::copy(at(from, from_pitch), at(to, to_pitch), width) };
        }
        OK
    })
}

pub(super) unsafe extern "C" fn set_bytes(
    at: DevicePointer,
    value: u8,
    bytes: usize,
    stream: Opaque,
) -> c_int {
    on_gpu(|gpu| {
        let refused = gpu.refuse_captured(stream);
        if refused != OK {
            return refused;
        }
        if !gpu.can_touch(at, bytes) {
            return INVALID_VALUE;
        }
        // SAFETY: it may be touched.
        unsafe { pointer(at).cast::<u8>().write_bytes(value, bytes) };
        OK
    })
}
