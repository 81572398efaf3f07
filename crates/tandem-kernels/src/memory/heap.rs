//! The process's heap, which no arena is part of.

/// Returns free memory of the heap to the system: tokenizers and readers of files leave it in pieces that
/// the allocator would keep. Without effect where the allocator has no such call.
pub fn release_free_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call has no preconditions, and may be made from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
