//! Schedules of collectives: which parts a rank sends and receives, and when.
//!
//! *Ring.* Every rank sends to the next rank. Part `p` is reduced in the order of ranks
//! `p+1, p+2, …, p`. Each rank sends the minimum, in `N−1` steps for a reduction or a gather.
//!
//! *Circulant graph* (Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
//! 2024). In a round every rank sends to the rank at a distance, its *skip*, and receives from the
//! rank at the same distance before it. Skips halve, rounded up, from `N` to 1. A gather or a
//! reduction takes `⌈log₂ N⌉` rounds for any `N`, and each rank sends the minimum. The last skip is
//! the ring's.

use std::ops::Range;

/// One round: the skip, and the skip of the round with larger distances (`N` for the first).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) skip: usize,
    pub(super) larger: usize,
}

/// Returns the rounds of a group, from the largest skip to 1.
pub(super) fn rounds(size: usize) -> impl DoubleEndedIterator<Item = Round> + Clone {
    let halve = |larger: usize| (larger > 1).then(|| larger.div_ceil(2));
    let num = std::iter::successors(Some(size), |&larger| halve(larger)).count() - 1;
    (0..num).map(move |round| {
        let larger = (0..round).fold(size, |larger, _| larger.div_ceil(2));
        Round { skip: larger.div_ceil(2), larger }
    })
}

/// Rank at a distance behind `rank` on the circle.
pub(super) fn before(rank: usize, distance: usize, size: usize) -> usize {
    (rank + size - distance % size) % size
}

/// Rank at a distance in front of `rank` on the circle.
pub(super) fn after(rank: usize, distance: usize, size: usize) -> usize {
    (rank + distance) % size
}

/// Appends the places of `count` parts from part `first` on, around the circle. `ends` are the
/// places of all parts.
pub(super) fn append_parts(to: &mut Vec<Range<usize>>, parts: &[Range<usize>], first: usize, count: usize) {
    // Neighbouring parts are one piece, unless they lie at both ends.
    let until_end = count.min(parts.len() - first);
    for (first, count) in [(first, until_end), (0, count - until_end)] {
        if count > 0 {
            to.push(parts[first].start..parts[first + count - 1].end);
        }
    }
}

/// Appends the ring's incoming parts: `num_steps` parts before part `first`, backwards.
pub(super) fn append_ring(
    to: &mut Vec<Range<usize>>,
    parts: &[Range<usize>],
    first: usize,
    num_steps: usize,
) {
    to.extend((1..=num_steps).map(|step| parts[before(first, step, parts.len())].clone()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs all ranks' rounds on sets of contributions: (owner of the part, contributors).
    fn reduced(size: usize) -> Vec<Vec<Vec<usize>>> {
        let mut held: Vec<Vec<Vec<usize>>> = (0..size).map(|rank| vec![vec![rank]; size]).collect();
        for Round { skip, larger } in rounds(size) {
            let previous = held.clone();
            for rank in 0..size {
                let from = before(rank, skip, size);
                for i in 0..larger - skip {
                    let part = after(rank, i, size);
                    held[rank][part].extend(previous[from][part].iter().copied());
                }
            }
        }
        held
    }

    #[test]
    fn every_part_is_reduced_once_over_all_ranks() {
        for size in 1..40 {
            for (rank, held) in reduced(size).into_iter().enumerate() {
                let mut contributors = held[rank].clone();
                contributors.sort_unstable();
                assert_eq!(contributors, (0..size).collect::<Vec<_>>(), "rank {rank} of {size}");
            }
        }
    }

    #[test]
    fn every_part_is_gathered_once() {
        for size in 1..40 {
            let mut held: Vec<Vec<usize>> = (0..size).map(|rank| vec![rank]).collect();
            for Round { skip, larger } in rounds(size).rev() {
                let previous = held.clone();
                for rank in 0..size {
                    let from = before(rank, skip, size);
                    let first = before(from, larger - skip - 1, size);
                    let parts = (0..larger - skip).map(|i| after(first, i, size));
                    for part in parts {
                        assert!(previous[from].contains(&part), "{from} sends what it has");
                        assert!(!held[rank].contains(&part), "{rank} receives part {part} once");
                        held[rank].push(part);
                    }
                }
            }
            assert!(held.iter().all(|held| held.len() == size), "{size}");
        }
    }

    #[test]
    fn a_thousand_ranks_need_ten_rounds_and_the_ring_is_the_last() {
        assert_eq!(rounds(1000).count(), 10);
        assert_eq!(rounds(6).map(|round| round.skip).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(rounds(1).count(), 0);
    }

    #[test]
    fn parts_around_the_end_are_two_pieces() {
        let parts = [0..2, 2..2, 2..7, 7..8];
        let mut pieces = Vec::new();
        append_parts(&mut pieces, &parts, 2, 3);
        assert_eq!(pieces, [2..8, 0..2]);
        pieces.clear();
        append_parts(&mut pieces, &parts, 1, 2);
        assert_eq!(pieces, [Range { start: 2, end: 7 }]);
    }
}
