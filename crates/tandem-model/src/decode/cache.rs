//! Key/value cache.

use std::ops::Range;

use tandem_kernels::{DType, Device, MemoryKind, Tensor, View, ops};

use super::batch::{NextTokens, Prompts};
use crate::Result;
use crate::decoder::Decoder;
use crate::layers::{AttentionKernel, Heads};

/// Keys and values `[rows, K·d]` of every block.
pub(super) struct Cache {
    device: Device,
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl Cache {
    pub(super) fn new(decoder: &Decoder, device: &Device, dtype: DType, rows: usize) -> Result<Self> {
        let spec = decoder.spec();
        let width = spec.attention.kv_width();
        let tensors = || -> Result<Vec<Tensor>> {
            let one = |_| Ok(device.alloc(MemoryKind::Cache, rows, width, dtype)?);
            (0..spec.num_layers).map(one).collect()
        };
        Ok(Self { device: device.clone(), keys: tensors()?, values: tensors()? })
    }

    /// Copies rows of keys and values into the cache; a move is a row range of the operands and a
    /// first cache row.
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

/// Attention over prompts, whose keys and values are cached.
pub(super) struct Prefill<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) prompts: &'a Prompts,
}

impl AttentionKernel for Prefill<'_> {
    fn positions(&self) -> &[u32] {
        &self.prompts.forest.positions
    }

    fn attend(&mut self, layer: usize, heads: Heads) -> Result<()> {
        let Prompts { forest, rows, .. } = self.prompts;
        let segments = forest.segments.iter().zip(rows);
        let moves = segments.map(|(s, &row)| (s.range.start as usize..s.range.end as usize, row as usize));
        self.cache.store(layer, heads.k, heads.v, moves)?;
        heads.attend_forest(&self.cache.device, forest)
    }
}

/// Attention of one new token per text over the cache.
pub(super) struct Step<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) next: &'a NextTokens,
}

impl AttentionKernel for Step<'_> {
    fn positions(&self) -> &[u32] {
        &self.next.positions
    }

    fn attend(&mut self, layer: usize, heads: Heads) -> Result<()> {
        let NextTokens { rows, visible, .. } = self.next;
        let moves = rows.iter().enumerate().map(|(i, &row)| (i..i + 1, row as usize));
        self.cache.store(layer, heads.k, heads.v, moves)?;
        let Cache { device, keys, values } = &*self.cache;
        let (keys, values) = (keys[layer].view(), values[layer].view());
        let Heads { q, shape, out, .. } = heads;
        let call = ops::AttentionDecode { q, k: keys, v: values, visible, shape, out };
        Ok(ops::attention_decode(device, call)?)
    }
}
