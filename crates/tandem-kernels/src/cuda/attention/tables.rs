//! Tables of attention kernels: tiles of queries or keys, and the rows of the other side.
//!
//! An entry is four words. Tiles come first, longest work first, then *pieces*. A piece covers the
//! numbers below its first word that no earlier piece covers: the row of a number is the number
//! plus the second word, its position the number plus the third, modulo 2³².

use crate::{Forest, Segment};

/// A tile or a piece.
pub(super) type Entry = [u32; 4];

/// Creates a piece of `len` numbers from `start` on, and advances `start`.
fn piece(start: &mut u32, len: u32, row: u32, position: u32) -> Entry {
    let entry = [*start + len, row.wrapping_sub(*start), position.wrapping_sub(*start), 0];
    *start += len;
    entry
}

fn len(segment: &Segment) -> u32 {
    segment.range.end - segment.range.start
}

/// Returns tiles of at most `size` queries of one segment, from the token `first` on: first row
/// counted from there, length, first position, and the entry of the first piece of the path from the
/// root. Keys are numbered by their position on the path.
pub(super) fn query_tiles(forest: &Forest, first: usize, size: usize) -> (usize, Vec<Entry>) {
    let (first, size) = (first as u32, size as u32);
    let mut pieces = Vec::with_capacity(2 * forest.segments.len());
    let mut tiles = Vec::with_capacity(forest.segments.len() + forest.num_tokens() / size as usize);
    for (index, segment) in forest.segments.iter().enumerate() {
        let first_piece = pieces.len() as u32;
        pieces.push(segment);
        pieces.extend(forest.ancestors(index));
        pieces[first_piece as usize..].reverse();
        let before = first.saturating_sub(segment.range.start);
        for start in (before..len(segment)).step_by(size as usize) {
            let (row, position) = (segment.range.start + start - first, segment.first_position + start);
            tiles.push([row, size.min(len(segment) - start), position, first_piece]);
        }
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile[1] + tile[2]));
    let count = tiles.len();
    tiles.iter_mut().for_each(|tile| tile[3] += count as u32);
    tiles.extend(pieces.into_iter().map(|segment| {
        let mut first = segment.first_position;
        piece(&mut first, len(segment), segment.range.start, segment.first_position)
    }));
    (count, tiles)
}

/// Returns the descendants of each segment, in order.
fn descendants(forest: &Forest) -> Vec<Vec<u32>> {
    let mut below = vec![Vec::new(); forest.segments.len()];
    for index in 0..forest.segments.len() {
        let mut parent = forest.segments[index].parent;
        while let Some(ancestor) = parent {
            below[ancestor as usize].push(index as u32);
            parent = forest.segments[ancestor as usize].parent;
        }
    }
    below
}

/// Returns tiles of at most `size` keys of one segment, in two entries: first row, length, first
/// position, and the first piece of the queries that see some of the keys; then the number of those
/// queries. They are numbered from the tile's first row to the end of its segment, and on through
/// its descendants.
pub(super) fn key_tiles(forest: &Forest, size: usize, window: u32) -> (usize, Vec<Entry>) {
    let size = size as u32;
    let below = descendants(forest);
    let mut pieces = Vec::with_capacity(forest.num_tokens() / size as usize + 2 * forest.segments.len());
    let mut tiles = Vec::with_capacity(forest.segments.len() + forest.num_tokens() / size as usize);
    for (segment, below) in forest.segments.iter().zip(&below) {
        for start in (0..len(segment)).step_by(size as usize) {
            let (row, position) = (segment.range.start + start, segment.first_position + start);
            let count = size.min(len(segment) - start);
            // No query at this position or beyond sees one of these keys.
            let limit = (position + count - 1).saturating_add(window);
            let (first_piece, mut queries) = (pieces.len() as u32, 0);
            let own = (row, position, len(segment) - start);
            let others = below.iter().map(|&index| &forest.segments[index as usize]);
            let others = others.map(|segment| (segment.range.start, segment.first_position, len(segment)));
            for (row, position, len) in std::iter::once(own).chain(others) {
                let len = len.min(limit.saturating_sub(position));
                if len > 0 {
                    pieces.push(piece(&mut queries, len, row, position));
                }
            }
            tiles.push([[row, count, position, first_piece], [queries, 0, 0, 0]]);
        }
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile[1][0]));
    let count = tiles.len();
    tiles.iter_mut().for_each(|tile| tile[0][3] += 2 * count as u32);
    (count, tiles.into_iter().flatten().chain(pieces).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment of 3, its children of 5 and of 2, and a child of the first child, of 1.
    fn forest() -> Forest {
        let segment = |range, parent, first_position| Segment { range, parent, first_position };
        let segments = vec![
            segment(0..3, None, 0),
            segment(3..8, Some(0), 3),
            segment(8..10, Some(0), 3),
            segment(10..11, Some(1), 8),
        ];
        Forest::new(vec![0; 11], segments, vec![], 0).unwrap()
    }

    /// Row and position of a number.
    fn look_up(entries: &[Entry], first: u32, number: u32) -> (u32, u32) {
        let piece = entries[first as usize..].iter().find(|piece| number < piece[0]).unwrap();
        (number.wrapping_add(piece[1]), number.wrapping_add(piece[2]))
    }

    #[test]
    fn keys_of_a_tile_of_queries_are_its_path() {
        let (count, entries) = query_tiles(&forest(), 0, 4);
        assert_eq!(
            entries[..count].iter().map(|tile| [tile[0], tile[1], tile[2]]).collect::<Vec<_>>(),
            [[10, 1, 8], [7, 1, 7], [3, 4, 3], [8, 2, 3], [0, 3, 0],]
        );
        let keys = |tile: usize, len: u32| (0..len).map(|n| look_up(&entries, entries[tile][3], n)).unzip();
        let (rows, positions): (Vec<u32>, Vec<u32>) = keys(0, 9);
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7, 10]);
        assert_eq!(positions, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let (rows, _): (Vec<u32>, Vec<u32>) = keys(3, 5);
        assert_eq!(rows, [0, 1, 2, 8, 9]);
    }

    #[test]
    fn queries_of_a_tile_of_keys_are_those_that_see_it() {
        let (count, entries) = key_tiles(&forest(), 2, u32::MAX);
        let queries = |index: usize, entries: &[Entry]| -> (Vec<u32>, Vec<u32>) {
            let [tile, [len, ..]] = [entries[2 * index], entries[2 * index + 1]];
            (0..len).map(|n| look_up(entries, tile[3], n)).unzip()
        };
        assert_eq!(count, 7);
        assert_eq!(entries[0][..3], [0, 2, 0]);
        assert_eq!(queries(0, &entries).0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(entries[2][..3], [2, 1, 2]);
        assert_eq!(queries(1, &entries), (vec![2, 3, 4, 5, 6, 7, 8, 9, 10], vec![2, 3, 4, 5, 6, 7, 3, 4, 8]));
        // The last key at position 1 is seen from positions up to 3.
        let (_, entries) = key_tiles(&forest(), 2, 3);
        assert_eq!(entries[0][..3], [0, 2, 0]);
        assert_eq!(queries(0, &entries).0, [0, 1, 2, 3, 8]);
    }
}
