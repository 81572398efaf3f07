//! Cache of a block: keys and values, or the states of linear attention.

use std::borrow::Cow;

use tandem_kernels::{DType, Device, MemoryKind, Runs, Tensor, View, ops};

use super::batch::{NextTokens, Prompts};
use crate::Result;
use crate::decoder::Decoder;
use crate::layers::{AttentionKernel, Heads, Recurrence};
use crate::spec::TokenPlaces;

/// Memory of every block.
pub(super) struct Cache {
    device: Device,
    /// The first block, of a pipeline stage.
    first: usize,
    blocks: Vec<BlockCache>,
}

/// Memory of a block.
enum BlockCache {
    /// Keys and values of attention `[rows, K·d]`, by token.
    Tokens { keys: Tensor, values: Tensor },
    /// States of linear attention, by slot: after a prompt, or of a completion.
    Slots { history: Tensor, states: Tensor },
}

/// Sizes of a cache.
#[derive(Clone, Copy)]
pub(super) struct CacheSize {
    /// Tokens of prompts and completions.
    pub(super) rows: usize,
    /// Prompts and completions.
    pub(super) slots: usize,
}

impl Cache {
    pub(super) fn new(decoder: &Decoder, device: &Device, dtype: DType, size: CacheSize) -> Result<Self> {
        let spec = decoder.spec();
        let alloc = |rows, width, dtype| device.alloc(MemoryKind::Cache, rows, width, dtype);
        let block = |layer| -> Result<BlockCache> {
            let Some(linear) = spec.linear_attention(layer) else {
                let width = spec.attention.kv_width();
                let (keys, values) = (alloc(size.rows, width, dtype)?, alloc(size.rows, width, dtype)?);
                return Ok(BlockCache::Tokens { keys, values });
            };
            let rows = size.slots * (linear.conv_width - 1);
            let history = alloc(rows, linear.conv_channels(), dtype)?;
            let states = alloc(size.slots, linear.shape.state_len(), DType::F32)?;
            Ok(BlockCache::Slots { history, states })
        };
        let first = decoder.blocks().start;
        let blocks = decoder.blocks().map(block).collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), first, blocks })
    }

    /// Returns the address of its first block's memory; 0 if it has none.
    pub(super) fn address(&self) -> u64 {
        self.blocks.first().map_or(0, |block| match block {
            BlockCache::Tokens { keys: memory, .. } | BlockCache::Slots { history: memory, .. } => {
                memory.view().address()
            }
        })
    }

    /// Copies keys and values into these cache rows, and returns all that the cache holds.
    fn store(&mut self, layer: usize, k: View, v: View, rows: &[u32]) -> Result<(View<'_>, View<'_>)> {
        let BlockCache::Tokens { keys, values } = &mut self.blocks[layer - self.first] else {
            unreachable!("a block of linear attention has no keys");
        };
        ops::scatter_rows(&self.device, k, rows, keys.view_mut())?;
        ops::scatter_rows(&self.device, v, rows, values.view_mut())?;
        Ok((keys.view(), values.view()))
    }

    /// Returns the slots of a block of linear attention, with the texts that read and keep them.
    fn recurrence<'a>(&'a mut self, layer: usize, runs: &'a Runs) -> Recurrence<'a> {
        let BlockCache::Slots { history, states } = &mut self.blocks[layer - self.first] else {
            unreachable!("a block of attention has no slots");
        };
        let (history, states) = (Some(history.view_mut()), Some(states.view_mut()));
        Recurrence { runs: Cow::Borrowed(runs), history, states }
    }
}

/// Attention over prompts, which are cached.
pub(super) struct Prefill<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) prompts: &'a Prompts,
}

impl AttentionKernel for Prefill<'_> {
    fn places(&self) -> TokenPlaces<'_> {
        let Prompts { forest, first, .. } = self.prompts;
        TokenPlaces { positions: &forest.positions[*first..], lengths: &forest.lengths[*first..] }
    }

    fn attend(&mut self, layer: usize, heads: Heads) -> Result<()> {
        let Prompts { forest, first, rows, .. } = self.prompts;
        let device = self.cache.device.clone();
        let (keys, values) = self.cache.store(layer, heads.k, heads.v, rows)?;
        if *first == 0 {
            return heads.attend_forest(&device, forest);
        }
        // The rows of a prompt lie side by side.
        let begin = rows[0] as usize - first;
        let [k, v] = [keys, values].map(|cached| cached.row_range(begin..begin + forest.num_tokens()));
        Heads { k, v, ..heads }.attend_from(*first, &device, forest)
    }

    fn recurrence(&mut self, layer: usize) -> Recurrence<'_> {
        self.cache.recurrence(layer, &self.prompts.runs)
    }
}

/// Attention of one new token per text over the cache.
pub(super) struct Step<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) next: &'a NextTokens,
    /// The tokens, each a run of its own.
    pub(super) runs: &'a Runs,
}

impl AttentionKernel for Step<'_> {
    fn places(&self) -> TokenPlaces<'_> {
        TokenPlaces { positions: &self.next.positions, lengths: &self.next.lengths }
    }

    fn attend(&mut self, layer: usize, heads: Heads) -> Result<()> {
        let NextTokens { rows, visible, .. } = self.next;
        let device = self.cache.device.clone();
        let (keys, values) = self.cache.store(layer, heads.k, heads.v, rows)?;
        let Heads { q, shape, out, .. } = heads;
        let call = ops::AttentionDecode { q, k: keys, v: values, visible, shape, out };
        Ok(ops::attention_decode(&device, call)?)
    }

    fn recurrence(&mut self, layer: usize) -> Recurrence<'_> {
        self.cache.recurrence(layer, self.runs)
    }
}
