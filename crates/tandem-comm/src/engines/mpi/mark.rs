//! Mark of a call: the hash of a rank's calls, which travels behind the numbers of its messages.
//!
//! MPI delivers whatever fits, so a rank that makes another call would be taken at its word. Behind
//! the last number of a call's first round every rank finds the others' marks, or garbage where a
//! message was shorter. Hashes of a chain do not recur, so an older mark in the same memory differs.

use super::wait::Fault;
use crate::collective::element::Reduction;

/// Bytes of a mark: the hash and its complement.
pub(super) const MARK: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(pub(super) u64);

impl Mark {
    /// Writes the mark behind `len` bytes.
    pub(super) fn write(self, segment: &mut [u8], len: usize) {
        segment[len..len + MARK].copy_from_slice(&self.bytes(1));
    }

    /// Wipes what was behind `len` bytes, such as this rank's own mark, where a message is to come.
    pub(super) fn wipe(segment: &mut [u8], len: usize) {
        segment[len..len + MARK].fill(0);
    }

    /// Fails unless this rank's mark is behind `len` bytes that came from one rank.
    pub(super) fn check(self, segment: &[u8], len: usize) -> Result<(), Fault> {
        self.expect(segment, len, 1)
    }

    /// Fails unless marks behind `len` bytes, reduced over `size` ranks, were all this rank's. If
    /// any differs, at least one rank finds out.
    pub(super) fn check_reduced(
        self,
        segment: &[u8],
        len: usize,
        reduction: Reduction,
        size: usize,
    ) -> Result<(), Fault> {
        let times = match reduction {
            Reduction::Sum => size as u64,
            // The largest hash, and that of the smallest one's complement.
            Reduction::Max => 1,
        };
        self.expect(segment, len, times)
    }

    fn expect(self, segment: &[u8], len: usize, times: u64) -> Result<(), Fault> {
        if segment[len..len + MARK] == self.bytes(times) { Ok(()) } else { Err(Fault::Different) }
    }

    fn bytes(self, times: u64) -> [u8; MARK] {
        let words = [self.0, !self.0].map(|word| word.wrapping_mul(times));
        bytemuck::cast(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::element::{ElementKind, reduce};

    fn reduced(marks: &[u64], reduction: Reduction) -> [u8; 8 + MARK] {
        let written = |mark: u64| {
            let mut bytes = [0; 8 + MARK];
            Mark(mark).write(&mut bytes, 8);
            bytes
        };
        let mut all = marks.iter().map(|&mark| written(mark));
        let first = all.next().expect("a rank");
        all.fold(first, |mut sum, other| {
            reduce(ElementKind::I64, reduction, &mut sum, &other);
            sum
        })
    }

    #[test]
    fn equal_marks_are_found_equal_and_a_different_one_by_at_least_one_rank() {
        let sets: [&[u64]; 5] =
            [&[1, 2], &[5, 5, u64::MAX], &[1 << 63, 0, 0, 0], &[7, 7, 8, 8], &[u64::MAX, 1, 0]];
        for reduction in [Reduction::Sum, Reduction::Max] {
            for mark in [0, 9, 1 << 63, u64::MAX] {
                let sum = reduced(&[mark; 3], reduction);
                assert!(Mark(mark).check_reduced(&sum, 8, reduction, 3).is_ok());
            }
            for set in sets {
                let sum = reduced(set, reduction);
                let finds = |mark: &u64| Mark(*mark).check_reduced(&sum, 8, reduction, set.len()).is_err();
                assert!(set.iter().any(finds), "{set:?}, {reduction}");
            }
        }
    }

    #[test]
    fn a_message_that_was_shorter_is_found() {
        let mut segment = [0; 8 + MARK];
        Mark(3).write(&mut segment, 0);
        assert!(Mark(3).check(&segment, 0).is_ok());
        assert!(Mark(3).check(&segment, 8).is_err());
        assert!(Mark(4).check(&segment, 0).is_err());
    }
}
