//! Staging of host memory on a rank's GPU: a stream and a buffer.

use std::ops::Range;

use super::gpu::Gpu;
use super::raw::{CUDA_NOT_READY, CUDA_STREAM_NON_BLOCKING, DevicePointer, RawStream};

/// Granularity of the buffer's length, so that it does not grow for every few bytes.
const GRAIN: usize = 1 << 20;

/// The stream and the buffer of a rank.
pub(super) struct Staging {
    gpu: Gpu,
    stream: RawStream,
    buffer: DevicePointer,
    capacity: usize,
    /// Buffers that were too small. To free one would wait for the GPU, where an operation of another
    /// group may wait for a rank that waits for this one.
    outgrown: Vec<DevicePointer>,
    /// Whether an operation may never end; freeing would wait for it.
    is_stuck: bool,
}

// SAFETY: any thread may use streams; the engine makes the GPU current.
unsafe impl Send for Staging {}

impl Staging {
    /// Creates a stream of the current GPU, and no buffer yet.
    pub(super) fn new(gpu: &Gpu) -> Result<Self, String> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver writes the stream to a valid address.
        let outcome = unsafe { (gpu.functions.cuda.new_stream)(&raw mut stream, CUDA_STREAM_NON_BLOCKING) };
        gpu.functions.cuda(&format!("a stream of GPU {}", gpu.ordinal), outcome)?;
        let outgrown = Vec::new();
        Ok(Self { gpu: gpu.clone(), stream, buffer: 0, capacity: 0, outgrown, is_stuck: false })
    }

    pub(super) fn stream(&self) -> RawStream {
        self.stream
    }

    /// Returns the buffer with room for `len` bytes; its content may be lost. The stream must be
    /// idle.
    pub(super) fn room(&mut self, len: usize) -> Result<DevicePointer, String> {
        if len > self.capacity {
            // At least twice as long, so that all outgrown buffers are no longer than this one.
            let capacity = len.max(2 * self.capacity).next_multiple_of(GRAIN);
            let mut buffer = 0;
            // SAFETY: the driver writes the address to a valid place.
            let outcome = unsafe { (self.gpu.functions.cuda.allocate)(&raw mut buffer, capacity) };
            let what = format!("making room for {capacity} bytes on GPU {}", self.gpu.ordinal);
            self.gpu.functions.cuda(&what, outcome)?;
            if self.capacity > 0 {
                self.outgrown.push(self.buffer);
            }
            (self.buffer, self.capacity) = (buffer, capacity);
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
            unsafe { (self.gpu.functions.cuda.upload)(to, from.as_ptr().cast(), from.len(), self.stream) };
        self.gpu.functions.cuda("copying to a GPU", outcome)
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
            let outcome =
                (self.gpu.functions.cuda.download)(to.as_mut_ptr().cast(), from, to.len(), self.stream);
            self.gpu.functions.cuda("copying from a GPU", outcome)?;
            self.gpu.functions.cuda("copying from a GPU", (self.gpu.functions.cuda.synchronize)(self.stream))
        }
    }

    pub(super) fn is_idle(&self) -> Result<bool, String> {
        // SAFETY: the stream lives.
        match unsafe { (self.gpu.functions.cuda.query_stream)(self.stream) } {
            CUDA_NOT_READY => Ok(false),
            outcome => self.gpu.functions.cuda("work on a GPU", outcome).map(|()| true),
        }
    }

    /// Marks an operation as endless: nothing is freed before the process ends.
    pub(super) fn give_up(&mut self) {
        self.is_stuck = true;
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_stuck {
            return;
        }
        let _ = self.gpu.enter();
        let buffer = (self.capacity > 0).then_some(self.buffer);
        for buffer in self.outgrown.iter().copied().chain(buffer) {
            // SAFETY: each buffer is freed once, and nothing in the stream uses it. Memory that cannot
            // be freed stays until the process ends.
            unsafe { (self.gpu.functions.cuda.free)(buffer) };
        }
        // SAFETY: the stream is not used afterwards.
        unsafe { (self.gpu.functions.cuda.destroy_stream)(self.stream) };
    }
}
