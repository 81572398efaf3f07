//! The free ranges of an address space.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::memory::memory_use::{MemoryKind, MemoryUse};

/// Alignment of offsets: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Free ranges, first fit. The same sequence of requests always gives the same addresses, so a dry
/// run knows the real run's high-water mark.
#[derive(Debug)]
pub(crate) struct FreeList {
    /// Offset → length. Neighbours are always merged.
    free: BTreeMap<usize, usize>,
    usage: MemoryUse,
    /// End of the highest byte ever allocated or reserved: the resident size.
    high_water: usize,
    /// Number and total bytes of allocations.
    taken: (u64, u64),
}

/// A range allocated by a [`FreeList`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    kind: MemoryKind,
    offset: usize,
    length: usize,
}

impl Cut {
    /// Returns the start.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the end.
    pub(crate) fn end(&self) -> usize {
        self.offset + self.length
    }
}

impl FreeList {
    pub(crate) fn new(capacity: usize) -> Self {
        let free = BTreeMap::from([(0, capacity)]);
        Self { free, usage: MemoryUse::default(), high_water: 0, taken: (0, 0) }
    }

    /// Allocates at least `bytes`; `None` if no free range is long enough.
    pub(crate) fn cut(&mut self, kind: MemoryKind, bytes: usize) -> Option<Cut> {
        let length = bytes.max(1).next_multiple_of(ALIGNMENT);
        let (offset, free) = self.free.iter().find(|&(_, &free)| free >= length).map(|(&o, &l)| (o, l))?;
        self.free.remove(&offset);
        if free > length {
            self.free.insert(offset + length, free - length);
        }
        self.usage.add(kind, length);
        self.taken = (self.taken.0 + 1, self.taken.1 + length as u64);
        self.high_water = self.high_water.max(offset + length);
        Some(Cut { kind, offset, length })
    }

    /// Frees a range and merges it with its neighbours.
    pub(crate) fn free(&mut self, cut: Cut) {
        self.usage.remove(cut.kind, cut.length);
        let (mut offset, mut length) = (cut.offset, cut.length);
        if let Some((&before, &free)) = self.free.range(..offset).next_back()
            && before + free == offset
        {
            self.free.remove(&before);
            (offset, length) = (before, length + free);
        }
        if let Some(free) = self.free.remove(&(cut.offset + cut.length)) {
            length += free;
        }
        self.free.insert(offset, length);
    }

    /// Counts everything below `bytes` as resident.
    pub(crate) fn mark(&mut self, bytes: usize) {
        self.high_water = self.high_water.max(bytes);
    }

    /// Returns the free ranges below the high-water mark, in order.
    pub(crate) fn free_below_high_water(&self) -> impl Iterator<Item = Range<usize>> {
        let end = self.high_water;
        self.free
            .iter()
            .map(move |(&offset, &len)| offset..end.min(offset + len))
            .filter(|free| !free.is_empty())
    }

    pub(crate) fn usage(&self) -> &MemoryUse {
        &self.usage
    }

    /// Restarts the peak.
    pub(crate) fn begin(&mut self) {
        self.usage.begin();
    }

    pub(crate) fn high_water(&self) -> usize {
        self.high_water
    }

    pub(crate) fn taken(&self) -> (u64, u64) {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_merge_in_every_order_of_return() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut list = FreeList::new(3 * ALIGNMENT);
            let cuts = [0; 3].map(|_| list.cut(MemoryKind::Scratch, ALIGNMENT).unwrap());
            assert!(list.cut(MemoryKind::Scratch, 1).is_none());
            for i in order {
                list.free(cuts[i]);
            }
            let whole = list.cut(MemoryKind::Scratch, 3 * ALIGNMENT).expect("one range again");
            assert_eq!(whole.offset, 0, "{order:?}");
        }
    }

    #[test]
    fn a_gap_is_filled_by_what_fits_and_passed_by_what_does_not() {
        let mut list = FreeList::new(1 << 20);
        let [_first, gap, _last] = [0; 3].map(|_| list.cut(MemoryKind::Scratch, 1000).unwrap());
        list.free(gap);
        let large = list.cut(MemoryKind::Scratch, 1025).unwrap();
        assert_eq!(large.offset, 3 * 1024, "1000 bytes take 1024, a multiple of the alignment");
        assert_eq!(list.cut(MemoryKind::Scratch, 1024).unwrap().offset, gap.offset);
    }
}
