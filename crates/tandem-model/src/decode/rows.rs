//! Allocator of cache rows.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free rows: start → end. Neighbours are always merged.
pub(super) struct Rows(BTreeMap<u32, u32>);

impl Rows {
    /// Makes `rows` free rows.
    pub(super) fn new(rows: usize) -> Self {
        Self(BTreeMap::from([(0, rows as u32)]))
    }

    /// Takes contiguous free rows, if there are as many.
    pub(super) fn take(&mut self, rows: usize) -> Option<Range<u32>> {
        let rows = rows as u32;
        if rows == 0 {
            return Some(0..0);
        }
        let (&start, &end) = self.0.iter().find(|&(start, end)| end - start >= rows)?;
        self.0.remove(&start);
        if start + rows < end {
            self.0.insert(start + rows, end);
        }
        Some(start..start + rows)
    }

    pub(super) fn give(&mut self, rows: Range<u32>) {
        if rows.is_empty() {
            return;
        }
        let Range { mut start, mut end } = rows;
        if let Some((&before, &its_end)) = self.0.range(..start).next_back()
            && its_end == start
        {
            self.0.remove(&before);
            start = before;
        }
        if let Some(after) = self.0.remove(&end) {
            end = after;
        }
        self.0.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_and_merge() {
        let mut all = Rows::new(10);
        let (a, b, c) = (all.take(3).unwrap(), all.take(4).unwrap(), all.take(3).unwrap());
        assert_eq!((a.clone(), b.clone(), c.clone()), (0..3, 3..7, 7..10));
        assert_eq!(all.take(1), None);
        all.give(a);
        all.give(c);
        assert_eq!(all.take(4), None, "six rows are free, but not side by side");
        all.give(b);
        assert_eq!(all.take(10), Some(0..10));
    }

    #[test]
    fn no_rows_are_always_free() {
        let mut all = Rows::new(1);
        assert_eq!(all.take(1), Some(0..1));
        assert_eq!(all.take(0), Some(0..0));
        all.give(0..0);
        assert_eq!(all.take(1), None);
    }
}
