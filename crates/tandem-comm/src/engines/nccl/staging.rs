//! Staging of host memory on a rank's GPU: a stream and a buffer.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use super::libraries::Functions;
use super::raw::{CUDA_NOT_READY, CUDA_STREAM_NON_BLOCKING, DevicePointer, RawContext, RawStream};

/// Granularity of the buffer's length, so that it does not grow for every few bytes.
const GRAIN: usize = 1 << 20;

/// The stream and the buffer of a rank.
pub(super) struct Staging {
    functions: Arc<Functions>,
    ordinal: usize,
    context: RawContext,
    stream: RawStream,
    buffer: DevicePointer,
    capacity: usize,
    /// Whether an operation may never end; freeing would wait for it.
    is_stuck: bool,
}

// SAFETY: any thread may use contexts and streams; `enter` makes the context current.
unsafe impl Send for Staging {}

impl Staging {
    /// Opens the GPU `ordinal` of this process and makes it the thread's current device.
    pub(super) fn on(functions: &Arc<Functions>, ordinal: usize) -> Result<Self, String> {
        let (cuda, gpu) = (&functions.cuda, format!("of GPU {ordinal}"));
        let (mut device, mut context, mut stream): (c_int, RawContext, RawStream) =
            (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the driver writes its results to valid addresses, and the device is one of its
        // results. The context is the process's primary one, which NCCL shares and which stays
        // until the process ends.
        unsafe {
            functions.cuda(&format!("the choice {gpu}"), (cuda.device)(&raw mut device, ordinal as c_int))?;
            let outcome = (cuda.retain_context)(&raw mut context, device);
            functions.cuda(&format!("the context {gpu}"), outcome)?;
            functions.cuda(&format!("the use {gpu}"), (cuda.set_context)(context))?;
            let outcome = (cuda.new_stream)(&raw mut stream, CUDA_STREAM_NON_BLOCKING);
            functions.cuda(&format!("a stream {gpu}"), outcome)?;
        }
        let functions = functions.clone();
        Ok(Self { functions, ordinal, context, stream, buffer: 0, capacity: 0, is_stuck: false })
    }

    /// Makes the GPU the thread's current device.
    pub(super) fn enter(&self) -> Result<(), String> {
        // SAFETY: the context stays until the process ends.
        let outcome = unsafe { (self.functions.cuda.set_context)(self.context) };
        self.functions.cuda("the use of a GPU", outcome)
    }

    pub(super) fn stream(&self) -> RawStream {
        self.stream
    }

    /// Returns the buffer with room for `len` bytes; its content may be lost. The stream must be
    /// idle.
    pub(super) fn room(&mut self, len: usize) -> Result<DevicePointer, String> {
        if len > self.capacity {
            self.free()?;
            let capacity = len.next_multiple_of(GRAIN);
            // SAFETY: the driver writes the address to a valid place.
            let outcome = unsafe { (self.functions.cuda.allocate)(&raw mut self.buffer, capacity) };
            let what = format!("making room for {capacity} bytes on GPU {}", self.ordinal);
            self.functions.cuda(&what, outcome)?;
            self.capacity = capacity;
        }
        Ok(self.buffer)
    }

    /// Copies `bytes` of `data` to the same place of the buffer, in the stream's order. The data
    /// must stay unchanged until the stream is idle.
    pub(super) fn upload(&self, data: &[u8], bytes: Range<usize>) -> Result<(), String> {
        assert!(data.len() <= self.capacity, "more data than there is room for");
        if bytes.is_empty() {
            return Ok(());
        }
        let (to, from) = (self.buffer + bytes.start as u64, &data[bytes]);
        // SAFETY: the range is within data and buffer.
        let outcome =
            unsafe { (self.functions.cuda.upload)(to, from.as_ptr().cast(), from.len(), self.stream) };
        self.functions.cuda("copying to a GPU", outcome)
    }

    /// Copies `bytes` back to the same place of `data` and waits. The stream must be idle: the wait
    /// has no deadline.
    pub(super) fn download(&self, data: &mut [u8], bytes: Range<usize>) -> Result<(), String> {
        assert!(data.len() <= self.capacity, "more data than there is room for");
        if bytes.is_empty() {
            return Ok(());
        }
        let (from, to) = (self.buffer + bytes.start as u64, &mut data[bytes]);
        // SAFETY: the range is within data and buffer, and borrowed until the copy is done.
        unsafe {
            let outcome = (self.functions.cuda.download)(to.as_mut_ptr().cast(), from, to.len(), self.stream);
            self.functions.cuda("copying from a GPU", outcome)?;
            self.functions.cuda("copying from a GPU", (self.functions.cuda.synchronize)(self.stream))
        }
    }

    pub(super) fn is_idle(&self) -> Result<bool, String> {
        // SAFETY: the stream lives.
        match unsafe { (self.functions.cuda.query_stream)(self.stream) } {
            CUDA_NOT_READY => Ok(false),
            outcome => self.functions.cuda("work on a GPU", outcome).map(|()| true),
        }
    }

    /// Marks an operation as endless: nothing is freed before the process ends.
    pub(super) fn give_up(&mut self) {
        self.is_stuck = true;
    }

    fn free(&mut self) -> Result<(), String> {
        if self.capacity == 0 {
            return Ok(());
        }
        self.capacity = 0;
        // SAFETY: the buffer is freed once, and nothing in the stream uses it.
        self.functions.cuda("freeing memory of a GPU", unsafe { (self.functions.cuda.free)(self.buffer) })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_stuck {
            return;
        }
        // Memory that cannot be freed stays until the process ends.
        let _ = self.enter();
        let _ = self.free();
        // SAFETY: the stream is not used afterwards.
        unsafe { (self.functions.cuda.destroy_stream)(self.stream) };
    }
}
