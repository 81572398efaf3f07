//! Per-thread scratch memory, grown once and then reused.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;

const ALIGNMENT: usize = 64;

/// Aligned memory, initialised once.
struct Buffer {
    pointer: NonNull<u8>,
    bytes: usize,
}

impl Buffer {
    fn layout(bytes: usize) -> Layout {
        // Fails only for a size near the end of the address space or a bad alignment.
        Layout::from_size_align(bytes, ALIGNMENT).expect("scratch sizes are far below isize::MAX")
    }

    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: callers request at least one byte.
        let pointer = unsafe { alloc_zeroed(layout) };
        Self { pointer: NonNull::new(pointer).unwrap_or_else(|| handle_alloc_error(layout)), bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.pointer.as_ptr(), Self::layout(self.bytes)) };
    }
}

thread_local! {
    /// Free buffers, innermost last: nested uses find the same buffer at the same depth.
    static FREE: RefCell<Vec<Buffer>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `bytes` initialised bytes of unspecified content, aligned to a cache line.
pub(crate) fn with_bytes<R>(bytes: usize, f: impl FnOnce(NonNull<u8>) -> R) -> R {
    let free = FREE.with_borrow_mut(Vec::pop);
    let buffer = match free {
        Some(buffer) if buffer.bytes >= bytes => buffer,
        outgrown => {
            drop(outgrown);
            Buffer::new(bytes.max(1).next_multiple_of(4096))
        }
    };
    let result = f(buffer.pointer);
    FREE.with_borrow_mut(|free| free.push(buffer));
    result
}

/// Calls `f` with `len` numbers of unspecified content, aligned to a cache line.
pub(crate) fn with_f32<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    with_bytes(len * size_of::<f32>(), |pointer| {
        // SAFETY: the buffer is exclusive during the call, large enough, aligned, and was zeroed at
        // allocation.
        f(unsafe { std::slice::from_raw_parts_mut(pointer.cast::<f32>().as_ptr(), len) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_uses_do_not_overlap_and_buffers_are_reused() {
        let addresses = || {
            with_f32(1000, |outer| {
                outer.fill(1.0);
                let inner = with_f32(500, |inner| {
                    inner.fill(2.0);
                    inner.as_ptr().addr()
                });
                assert!(outer.iter().all(|x| *x == 1.0));
                (outer.as_ptr().addr(), inner)
            })
        };
        let first = addresses();
        assert_eq!(first.0 % ALIGNMENT, 0);
        assert_eq!(first, addresses());
    }
}
