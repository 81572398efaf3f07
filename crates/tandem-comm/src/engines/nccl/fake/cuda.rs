//! Fake of CUDA's driver.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use super::stream::{self, Stream};
use super::{CURRENT, DEVICES, Rank, Trouble, lock, own};
use crate::engines::nccl::raw::{CudaFunctions, DevicePointer, RawContext, RawEvent, RawStream};

// CUresult.
const OK: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
const NO_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_READY: c_int = 600;
const WRONG_ORDER: c_int = 999;

/// Handle of the first device; it differs from the ordinal on purpose.
pub(super) const FIRST: usize = 100;

/// A buffer, and the rank that it belongs to.
struct Buffer {
    words: Vec<u64>,
    owner: Arc<Rank>,
}

type Memory = HashMap<DevicePointer, Buffer>;

fn memory() -> MutexGuard<'static, Memory> {
    static MEMORY: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);
    lock(&MEMORY)
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
        new_event,
        destroy_event,
        record_event,
        query_event,
        upload,
        download,
        error_string,
    }
}

/// Returns the number of this rank's device buffers.
pub(in crate::engines::nccl) fn num_buffers() -> usize {
    let own = own();
    memory().values().filter(|buffer| Arc::ptr_eq(&buffer.owner, &own)).count()
}

/// Returns the offset of an address in its buffer.
pub(super) fn offset(at: DevicePointer) -> Option<u64> {
    let within = |(start, buffer): (&u64, &Buffer)| {
        let end = start + 8 * buffer.words.len() as u64;
        (*start..end).contains(&at).then(|| at - start)
    };
    memory().iter().find_map(within)
}

/// Creates a buffer of this rank. New memory has arbitrary content.
pub(super) fn new_buffer(len: usize) -> DevicePointer {
    let buffer = Buffer { words: vec![0xabab_abab_abab_abab_u64; len.div_ceil(8).max(1)], owner: own() };
    let at = buffer.words.as_ptr() as DevicePointer;
    memory().insert(at, buffer);
    at
}

/// Frees a buffer; returns whether it was there.
pub(super) fn drop_buffer(at: DevicePointer) -> bool {
    memory().remove(&at).is_some()
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
    // SAFETY: as in CUDA.
    unsafe { *place = ordinal + FIRST as c_int };
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
    if own().trouble() == Trouble::NoMemory {
        return OUT_OF_MEMORY;
    }
    if CURRENT.get() == 0 {
        return NO_CONTEXT;
    }
    // SAFETY: as in CUDA.
    unsafe { *place = new_buffer(len) };
    OK
}

unsafe extern "C" fn free(at: DevicePointer) -> c_int {
    if drop_buffer(at) { OK } else { WRONG_ORDER }
}

unsafe extern "C" fn new_stream(place: *mut RawStream, flags: c_uint) -> c_int {
    if CURRENT.get() == 0 || flags != 1 {
        return NO_CONTEXT;
    }
    // SAFETY: as in CUDA.
    unsafe { *place = Arc::as_ptr(&stream::new()).cast_mut().cast() };
    OK
}

/// Returns a stream in use.
pub(super) fn stream_at(at: RawStream) -> Option<Arc<Mutex<Stream>>> {
    stream::find(at as usize)
}

unsafe extern "C" fn destroy_stream(at: RawStream) -> c_int {
    let Some(stream) = stream_at(at) else { return INVALID_HANDLE };
    let outcome = if stream::is_idle(&stream) { OK } else { WRONG_ORDER };
    stream::forget(&stream);
    outcome
}

unsafe extern "C" fn query_stream(at: RawStream) -> c_int {
    match stream_at(at) {
        Some(stream) if stream::is_idle(&stream) => OK,
        Some(_) => NOT_READY,
        None => INVALID_HANDLE,
    }
}

unsafe extern "C" fn synchronize(at: RawStream) -> c_int {
    // SAFETY: as in CUDA. Waiting here for another rank would be waiting without a deadline.
    if unsafe { query_stream(at) } == OK { OK } else { WRONG_ORDER }
}

/// An event: whether the stream has come to its last record.
#[derive(Clone, Default)]
struct Event {
    is_past: Arc<AtomicBool>,
    stream: Option<Arc<Mutex<Stream>>>,
}

unsafe extern "C" fn new_event(place: *mut RawEvent, flags: c_uint) -> c_int {
    if CURRENT.get() == 0 || flags != 2 {
        return NO_CONTEXT;
    }
    let event = Box::new(Mutex::new(Event::default()));
    // SAFETY: as in CUDA.
    unsafe { *place = Box::into_raw(event).cast() };
    OK
}

unsafe extern "C" fn destroy_event(event: RawEvent) -> c_int {
    // SAFETY: as in CUDA; it came from a box.
    drop(unsafe { Box::from_raw(event.cast::<Mutex<Event>>()) });
    OK
}

unsafe extern "C" fn record_event(event: RawEvent, at: RawStream) -> c_int {
    let Some(stream) = stream_at(at) else { return INVALID_HANDLE };
    let recorded = Event { stream: Some(stream.clone()), ..Event::default() };
    // SAFETY: as in CUDA.
    *lock(unsafe { &*event.cast::<Mutex<Event>>() }) = recorded.clone();
    stream::push(&stream, move || {
        recorded.is_past.store(true, Ordering::Release);
        true
    });
    OK
}

unsafe extern "C" fn query_event(event: RawEvent) -> c_int {
    // SAFETY: as in CUDA.
    let Event { is_past, stream } = lock(unsafe { &*event.cast::<Mutex<Event>>() }).clone();
    // An event that was never recorded is past.
    let Some(stream) = stream else { return OK };
    stream::advance(&stream);
    if is_past.load(Ordering::Acquire) { OK } else { NOT_READY }
}

unsafe extern "C" fn upload(to: DevicePointer, from: *const c_void, len: usize, at: RawStream) -> c_int {
    // SAFETY: as in CUDA.
    unsafe {
        if query_stream(at) != OK {
            return WRONG_ORDER;
        }
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, len);
    }
    own().write_down(format!("upload {len}"));
    OK
}

unsafe extern "C" fn download(to: *mut c_void, from: DevicePointer, len: usize, at: RawStream) -> c_int {
    // SAFETY: as in CUDA.
    unsafe {
        if query_stream(at) != OK {
            return WRONG_ORDER;
        }
        std::ptr::copy_nonoverlapping(from as *const u8, to.cast::<u8>(), len);
    }
    own().write_down(format!("download {len}"));
    OK
}

unsafe extern "C" fn error_string(code: c_int, place: *mut *const c_char) -> c_int {
    let text = if code == OUT_OF_MEMORY { c"out of memory" } else { c"an error" };
    // SAFETY: as in CUDA.
    unsafe { *place = text.as_ptr() };
    OK
}
