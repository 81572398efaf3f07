//! Prefetching of cache lines.

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Prefetches a cache line into all caches.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    prefetch_to::<false>(address);
}

/// Prefetches a cache line into the second-level cache: more lines can be under way than into the first.
#[inline(always)]
pub(crate) fn prefetch_far(address: *const u8) {
    prefetch_to::<true>(address);
}

#[inline(always)]
fn prefetch_to<const FAR: bool>(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; any address will do.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if FAR {
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
