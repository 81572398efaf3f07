//! Fake of CUDA's driver.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};

use super::communicator::Stream;
use super::{CURRENT, DEVICES, TROUBLE, Trouble, lock, write_down};
use crate::engines::nccl::raw::{CudaFunctions, DevicePointer, RawContext, RawStream};

// CUresult.
const OK: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
const NO_CONTEXT: c_int = 201;
const NOT_READY: c_int = 600;
const WRONG_ORDER: c_int = 999;

thread_local! {
    static MEMORY: RefCell<HashMap<DevicePointer, Vec<u64>>> = RefCell::default();
}

pub(super) fn functions() -> CudaFunctions {
    CudaFunctions {
        init,
        device_count,
        device,
        retain_context,
        set_context,
        allocate,
        free,
        new_stream,
        destroy_stream,
        query_stream,
        synchronize,
        upload,
        download,
        error_string,
    }
}

/// Returns the number of this rank's device buffers.
pub(in crate::engines::nccl) fn num_buffers() -> usize {
    MEMORY.with_borrow(HashMap::len)
}

/// Returns the offset of an address in this rank's buffer.
pub(super) fn offset(at: DevicePointer) -> Option<u64> {
    MEMORY.with_borrow(|memory| {
        let within = |(start, words): (&u64, &Vec<u64>)| {
            let end = start + 8 * words.len() as u64;
            (*start..end).contains(&at).then(|| at - start)
        };
        memory.iter().find_map(within)
    })
}

unsafe extern "C" fn init(_: c_uint) -> c_int {
    OK
}

unsafe extern "C" fn device_count(count: *mut c_int) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { *count = DEVICES as c_int };
    OK
}

unsafe extern "C" fn device(place: *mut c_int, ordinal: c_int) -> c_int {
    if ordinal as usize >= DEVICES {
        return 101;
    }
    // SAFETY: as in CUDA. A handle differs from the ordinal on purpose.
    unsafe { *place = ordinal + 100 };
    OK
}

unsafe extern "C" fn retain_context(place: *mut RawContext, device: c_int) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { *place = device as usize as RawContext };
    OK
}

unsafe extern "C" fn set_context(context: RawContext) -> c_int {
    CURRENT.set(context as usize);
    OK
}

unsafe extern "C" fn allocate(place: *mut DevicePointer, len: usize) -> c_int {
    if TROUBLE.get() == Trouble::NoMemory {
        return OUT_OF_MEMORY;
    }
    if CURRENT.get() == 0 {
        return NO_CONTEXT;
    }
    // New memory has arbitrary content.
    let words = vec![0xabab_abab_abab_abab_u64; len.div_ceil(8)];
    let at = words.as_ptr() as DevicePointer;
    MEMORY.with_borrow_mut(|memory| memory.insert(at, words));
    // SAFETY: as in CUDA.
    unsafe { *place = at };
    OK
}

unsafe extern "C" fn free(at: DevicePointer) -> c_int {
    if MEMORY.with_borrow_mut(|memory| memory.remove(&at)).is_some() { OK } else { WRONG_ORDER }
}

unsafe extern "C" fn new_stream(place: *mut RawStream, flags: c_uint) -> c_int {
    if CURRENT.get() == 0 || flags != 1 {
        return NO_CONTEXT;
    }
    // SAFETY: as in CUDA.
    unsafe { *place = Box::into_raw(Box::<Stream>::default()).cast() };
    OK
}

unsafe extern "C" fn destroy_stream(stream: RawStream) -> c_int {
    // SAFETY: as in CUDA; it came from a box.
    drop(unsafe { Box::from_raw(stream.cast::<Stream>()) });
    OK
}

unsafe extern "C" fn query_stream(stream: RawStream) -> c_int {
    // SAFETY: as in CUDA.
    let stream = unsafe { &mut *stream.cast::<Stream>() };
    stream.waits_for.retain(|(shared, number)| lock(&shared.state).num_done <= *number);
    if stream.waits_for.is_empty() { OK } else { NOT_READY }
}

unsafe extern "C" fn synchronize(stream: RawStream) -> c_int {
    // SAFETY: as in CUDA. Waiting here for another rank would be waiting without a deadline.
    if unsafe { query_stream(stream) } == OK { OK } else { WRONG_ORDER }
}

unsafe extern "C" fn upload(to: DevicePointer, from: *const c_void, len: usize, stream: RawStream) -> c_int {
    // SAFETY: as in CUDA.
    unsafe {
        if query_stream(stream) != OK {
            return WRONG_ORDER;
        }
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, len);
    }
    write_down(format!("upload {len}"));
    OK
}

unsafe extern "C" fn download(to: *mut c_void, from: DevicePointer, len: usize, stream: RawStream) -> c_int {
    // SAFETY: as in CUDA.
    unsafe {
        if query_stream(stream) != OK {
            return WRONG_ORDER;
        }
        std::ptr::copy_nonoverlapping(from as *const u8, to.cast::<u8>(), len);
    }
    write_down(format!("download {len}"));
    OK
}

unsafe extern "C" fn error_string(code: c_int, place: *mut *const c_char) -> c_int {
    let text = if code == OUT_OF_MEMORY { c"out of memory" } else { c"an error" };
    // SAFETY: as in CUDA.
    unsafe { *place = text.as_ptr() };
    OK
}
