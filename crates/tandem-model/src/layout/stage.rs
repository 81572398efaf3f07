//! Pipeline stages of a decoder.
//!
//! The first stage has the embedding, the last the head, and each some neighbouring blocks. A tied
//! head needs the token table at both ends: the last stage then holds the embedding layer a second
//! time.

use std::ops::Range;

use crate::layout::LayerId;
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// Pipeline stage of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineStage {
    /// Rank in the pipeline.
    pub index: usize,
    /// Number of stages.
    pub count: usize,
}

impl PipelineStage {
    /// The only stage: all layers.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Returns whether the stage has the embedding.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Returns whether the stage has the head.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// Returns the layers of this stage in forward order; a second copy of the embedding comes
    /// first.
    pub fn layers(self, spec: &DecoderSpec) -> Result<Vec<LayerId>> {
        let embedding = self.is_first() || self.is_last() && spec.head.tied;
        let blocks = self.blocks(spec)?.map(LayerId::Block);
        let front = embedding.then_some(LayerId::Embedding).into_iter();
        Ok(front.chain(blocks).chain(self.is_last().then_some(LayerId::Head)).collect())
    }

    /// Returns whether this stage saves and counts the layer. A token table on two stages is the
    /// first one's.
    pub fn owns(self, layer: LayerId) -> bool {
        layer != LayerId::Embedding || self.is_first()
    }

    /// Returns the blocks of this stage. Stages cost about the same: the last one, which has the
    /// head, may have fewer blocks, and so may the first ones, which keep the most for backward.
    pub fn blocks(self, spec: &DecoderSpec) -> Result<Range<usize>> {
        let Self { index, count } = self;
        let num_blocks = spec.num_layers;
        if count == 1 {
            return Ok(0..num_blocks);
        }
        if count > num_blocks {
            return Err(ModelError::Invalid(format!(
                "{num_blocks} blocks cannot be divided among {count} stages, each of which needs one at least"
            )));
        }
        let (block, head) = costs(spec);
        // Cost of the slowest stage, if the last one has this many blocks; ties go to more.
        let slowest = |last: &usize| {
            let others = (num_blocks - last).div_ceil(count - 1);
            (others * block).max(last * block + head)
        };
        let last = (1..=num_blocks + 1 - count).rev().min_by_key(slowest).expect("one block at least");
        let share = |index: usize| (num_blocks - last) * index / (count - 1);
        Ok(if self.is_last() { num_blocks - last..num_blocks } else { share(index)..share(index + 1) })
    }
}

/// Returns multiplications per token in the matrices of a block, on average over blocks, and in the
/// head, which scores about every second token. The token look-up costs nothing beside them.
fn costs(spec: &DecoderSpec) -> (usize, usize) {
    let (attention, mlp) = (&spec.attention, &spec.mlp);
    let mixers = (0..spec.num_layers).map(|layer| match spec.linear_attention(layer) {
        None => attention.qkv_width() + attention.query_width(),
        Some(linear) => linear.projected_widths().iter().sum::<usize>() + linear.shape.value_width(),
    });
    let widths = mixers.sum::<usize>() / spec.num_layers + mlp.up_width() + mlp.width;
    (widths * spec.hidden_size, spec.vocab_size * spec.hidden_size / 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::families::family_of;

    /// Llama with this many blocks, each of `2^14` multiplications a token; the head has `vocab ·
    /// 16`.
    fn llama(blocks: usize, vocab: usize, tied: bool) -> DecoderSpec {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
            "num_hidden_layers": blocks, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": vocab,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": tied,
        });
        let config = crate::Config::parse(std::path::Path::new("config.json"), &config.to_string()).unwrap();
        family_of(&config).unwrap().spec(&config).unwrap()
    }

    fn sizes(blocks: usize, vocab: usize, count: usize) -> Vec<usize> {
        let spec = llama(blocks, vocab, false);
        (0..count).map(|index| PipelineStage { index, count }.blocks(&spec).unwrap().len()).collect()
    }

    #[test]
    fn a_head_counts_as_the_blocks_that_it_costs() {
        let (block, head) = costs(&llama(1, 1024, false));
        assert_eq!((block, head), (16_384, 16_384));
        assert_eq!(sizes(8, 2, 4), [2, 2, 2, 2]);
        assert_eq!(sizes(7, 1024, 2), [4, 3], "as long as four blocks each");
        assert_eq!(sizes(9, 1024, 2), [5, 4]);
        assert_eq!(sizes(8, 3 * 1024, 2), [5, 3], "five blocks, and three with a head of three");
        assert_eq!(sizes(4, 100 * 1024, 3), [1, 2, 1], "every stage has a block");
        assert_eq!(sizes(7, 512, 3), [2, 3, 2], "the first keeps the most for backward");
        assert_eq!(sizes(3, 64, 3), [1, 1, 1]);
        assert_eq!(sizes(5, 64, 1), [5]);
    }

    #[test]
    fn stages_cover_every_layer_in_order() {
        for (blocks, vocab) in [(2, 64), (5, 9000), (12, 700)] {
            for count in 1..=blocks {
                let spec = llama(blocks, vocab, true);
                let stages = (0..count).map(|index| PipelineStage { index, count });
                let layers = stages.flat_map(|stage| {
                    let layers = stage.layers(&spec).unwrap().into_iter();
                    layers.filter(move |&layer| stage.owns(layer))
                });
                let all = (0..blocks).map(LayerId::Block);
                let all = std::iter::once(LayerId::Embedding).chain(all).chain([LayerId::Head]);
                assert!(layers.eq(all), "{blocks} blocks in {count} stages");
            }
        }
        let last = PipelineStage { index: 1, count: 2 };
        assert_eq!(last.layers(&llama(2, 64, true)).unwrap()[0], LayerId::Embedding);
        assert_eq!(last.layers(&llama(2, 64, false)).unwrap()[0], LayerId::Block(1));
        let error =
            PipelineStage { index: 0, count: 3 }.blocks(&llama(2, 64, false)).unwrap_err().to_string();
        assert_eq!(error, "2 blocks cannot be divided among 3 stages, each of which needs one at least");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Each stage has a block, blocks are in order, and moving the last stage's border makes no stage faster.
        #[test]
        fn any_division_into_stages_covers_the_blocks(
            blocks in 1..60_usize,
            count in 1..12_usize,
            vocab in 1..8000_usize,
            tied in any::<bool>(),
        ) {
            let spec = llama(blocks, vocab, tied);
            let stages = (0..count).map(|index| PipelineStage { index, count }.blocks(&spec));
            let Ok(stages) = stages.collect::<Result<Vec<_>>>() else {
                prop_assert!(count > blocks);
                return Ok(());
            };
            prop_assert!(stages.iter().all(|stage| !stage.is_empty()), "{:?}", stages);
            prop_assert!(stages.iter().cloned().flatten().eq(0..blocks), "{:?}", stages);
            let (block, head) = costs(&spec);
            let most = |last: usize| {
                let others = if count == 1 { 0 } else { (blocks - last).div_ceil(count - 1) };
                (others * block).max(last * block + head)
            };
            let last = stages[count - 1].len();
            let fastest = if count == 1 { most(last) } else { (1..=blocks + 1 - count).map(most).min().unwrap() };
            prop_assert_eq!(most(last), fastest);
        }
    }
}
