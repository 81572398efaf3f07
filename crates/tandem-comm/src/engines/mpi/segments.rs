//! Segments: the memory that MPI reads and writes.
//!
//! A wait may end before its transfer does: at the deadline, or because another rank failed. MPI
//! then still holds the address, and a network card may write there. So MPI never sees a caller's
//! buffer. Numbers pass through segments of the engine's own, which stay in the cache; the segment
//! of an abandoned transfer is leaked.

use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a segment, unless a call needs more.
pub(super) const SEGMENT: usize = 1 << 20;
/// Number of segments that a pool keeps; more are freed.
const MAX_KEPT: usize = 64;

/// A segment, aligned for every element type.
pub(super) struct Segment(Vec<u64>);

impl Segment {
    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Pool of segments. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Segments(Arc<Mutex<Vec<Segment>>>);

impl Segments {
    /// Takes a segment with room for `len` bytes.
    pub(super) fn take(&self, len: usize) -> Segment {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().rposition(|segment| segment.bytes().len() >= len);
        // A fresh segment is zeroed, which the system does where it is first touched.
        fits.map_or_else(|| Segment(vec![0; len.max(SEGMENT).div_ceil(8)]), |index| kept.swap_remove(index))
    }

    pub(super) fn put(&self, segment: Segment) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT {
            kept.push(segment);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_used_again_where_they_fit() {
        let segments = Segments::default();
        let mut small = segments.take(5);
        assert_eq!(small.bytes().len(), SEGMENT);
        small.bytes_mut()[4] = 7;
        segments.put(small);
        let large = segments.take(SEGMENT + 3);
        assert_eq!(large.bytes().len(), SEGMENT + 8, "whole numbers");
        assert_eq!(segments.clone().take(SEGMENT).bytes()[4], 7, "the first again");
    }
}
