//! Keys and values of the tokens that text is being continued from.

use std::collections::BTreeMap;
use std::ops::Range;

use tandem_kernels::ops::{AttentionShape, Visible};
use tandem_kernels::{DType, Device, Forest, Kind, Tensor, View, ViewMut, ops};

use crate::Result;
use crate::decoder::Decoder;
use crate::walk::Attend;

/// Keys and values `[rows, K·d]` of every block, and which rows are free.
pub(super) struct Cache {
    device: Device,
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    /// Free rows: start → end. Neighbours are always merged.
    free: BTreeMap<u32, u32>,
}

impl Cache {
    pub(super) fn new(decoder: &Decoder, device: &Device, dtype: DType, rows: usize) -> Result<Self> {
        let spec = decoder.spec();
        let width = spec.attention.kv_width();
        let tensors = || -> Result<Vec<Tensor>> {
            let one = |_| Ok(device.alloc(Kind::Cache, rows, width, dtype)?);
            (0..spec.num_layers).map(one).collect()
        };
        let free = BTreeMap::from([(0, rows as u32)]);
        Ok(Self { device: device.clone(), keys: tensors()?, values: tensors()?, free })
    }

    /// Adjacent free rows, if there are as many.
    pub(super) fn take(&mut self, rows: usize) -> Option<Range<u32>> {
        let rows = rows as u32;
        if rows == 0 {
            return Some(0..0);
        }
        let (&start, &end) = self.free.iter().find(|&(start, end)| end - start >= rows)?;
        self.free.remove(&start);
        if start + rows < end {
            self.free.insert(start + rows, end);
        }
        Some(start..start + rows)
    }

    /// Returns rows.
    pub(super) fn give(&mut self, rows: Range<u32>) {
        if rows.is_empty() {
            return;
        }
        let Range { mut start, mut end } = rows;
        if let Some((&before, &its_end)) = self.free.range(..start).next_back()
            && its_end == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(after) = self.free.remove(&end) {
            end = after;
        }
        self.free.insert(start, end);
    }

    /// Copies rows of keys and values into the cache: row range of the operands, first row of the cache.
    fn store(
        &mut self,
        layer: usize,
        k: View,
        v: View,
        moves: impl Iterator<Item = (Range<usize>, usize)>,
    ) -> Result<()> {
        for (from, to) in moves {
            let to = to..to + from.len();
            let keys = self.keys[layer].view_mut().row_range(to.clone());
            ops::cast(&self.device, k.row_range(from.clone()), keys)?;
            let values = self.values[layer].view_mut().row_range(to);
            ops::cast(&self.device, v.row_range(from), values)?;
        }
        Ok(())
    }
}

/// Attention over a forest of prompts whose keys and values stay behind: segment `i` in the cache from `rows[i]` on.
pub(super) struct Prefill<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) forest: &'a Forest,
    pub(super) rows: &'a [u32],
}

impl Attend for Prefill<'_> {
    fn positions(&self) -> &[u32] {
        &self.forest.positions
    }

    fn attend(
        &mut self,
        layer: usize,
        q: View,
        k: View,
        v: View,
        shape: &AttentionShape,
        out: ViewMut,
        log_sum_exp: ViewMut,
    ) -> Result<()> {
        let segments = self.forest.segments.iter().zip(self.rows);
        let moves = segments.map(|(s, &row)| (s.range.start as usize..s.range.end as usize, row as usize));
        self.cache.store(layer, k, v, moves)?;
        let device = &self.cache.device;
        Ok(ops::attention(device, q, k, v, self.forest, shape, out, log_sum_exp)?)
    }
}

/// Attention of one new token per text over the cache; token `i` goes to row `rows[i]`.
pub(super) struct Step<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) positions: &'a [u32],
    pub(super) rows: &'a [u32],
    pub(super) visible: &'a Visible,
}

impl Attend for Step<'_> {
    fn positions(&self) -> &[u32] {
        self.positions
    }

    fn attend(
        &mut self,
        layer: usize,
        q: View,
        k: View,
        v: View,
        shape: &AttentionShape,
        out: ViewMut,
        _: ViewMut,
    ) -> Result<()> {
        let moves = self.rows.iter().enumerate().map(|(i, &row)| (i..i + 1, row as usize));
        self.cache.store(layer, k, v, moves)?;
        let Cache { device, keys, values, .. } = &*self.cache;
        let (keys, values) = (keys[layer].view(), values[layer].view());
        Ok(ops::attention_decode(device, q, keys, values, self.visible, shape, out)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(rows: u32) -> Cache {
        let (keys, values) = (Vec::new(), Vec::new());
        Cache { device: Device::meta(), keys, values, free: BTreeMap::from([(0, rows)]) }
    }

    #[test]
    fn rows_come_back_and_merge() {
        let mut cache = cache(10);
        let (a, b, c) = (cache.take(3).unwrap(), cache.take(4).unwrap(), cache.take(3).unwrap());
        assert_eq!((a.clone(), b.clone(), c.clone()), (0..3, 3..7, 7..10));
        assert_eq!(cache.take(1), None);
        cache.give(a);
        cache.give(c);
        assert_eq!(cache.take(4), None, "six rows are free, but not side by side");
        cache.give(b);
        assert_eq!(cache.take(10), Some(0..10));
    }

    #[test]
    fn no_rows_are_always_free() {
        let mut cache = cache(1);
        assert_eq!(cache.take(1), Some(0..1));
        assert_eq!(cache.take(0), Some(0..0));
        cache.give(0..0);
        assert_eq!(cache.take(1), None);
    }
}
