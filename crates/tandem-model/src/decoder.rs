//! A spec with what follows from it: layouts and the rotary table.

use tandem_kernels::ops::RopeTable;

use crate::layout::{LayerId, LayerLayout};
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// A decoder, ready to be walked. Holds no weights.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: DecoderSpec,
    embedding: LayerLayout,
    block: LayerLayout,
    head: LayerLayout,
    rope: Option<RopeTable>,
    positions: usize,
}

impl Decoder {
    /// A decoder for sequences of up to `positions` tokens. With rotary embedding that may be more than the model
    /// was made for (the angles just continue); a learned position table ends where it ends.
    ///
    /// # Errors
    /// If positions are learned and there are fewer than asked for.
    pub fn new(spec: DecoderSpec, positions: usize) -> Result<Self> {
        if let Some(learned) = spec.embedding.learned_positions
            && positions > learned
        {
            return Err(ModelError::Invalid(format!(
                "sequences of {positions} tokens do not fit a model with {learned} learned positions; \
                 lower max_length"
            )));
        }
        Ok(Self {
            embedding: LayerLayout::embedding(&spec),
            block: LayerLayout::block(&spec),
            head: LayerLayout::head(&spec),
            rope: spec.rotary.map(|r| RopeTable::new(&r.inverse_frequencies(), positions)),
            spec,
            positions,
        })
    }

    /// What the decoder is made of.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// How many tokens a sequence may have.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The layers in walk order: embedding, blocks, head.
    pub fn layers(&self) -> Vec<LayerId> {
        let blocks = (0..self.spec.num_layers).map(LayerId::Block);
        std::iter::once(LayerId::Embedding).chain(blocks).chain([LayerId::Head]).collect()
    }

    /// A layer's place in [`Decoder::layers`].
    pub fn index(&self, layer: LayerId) -> usize {
        match layer {
            LayerId::Embedding => 0,
            LayerId::Block(i) => 1 + i,
            LayerId::Head => 1 + self.spec.num_layers,
        }
    }

    /// Where the layer's parameters lie in its flat buffer. All blocks share one layout.
    pub fn layout(&self, layer: LayerId) -> &LayerLayout {
        match layer {
            LayerId::Embedding => &self.embedding,
            LayerId::Block(_) => &self.block,
            LayerId::Head => &self.head,
        }
    }

    /// Number of parameters of the model; a tied table counts once.
    pub fn num_parameters(&self) -> usize {
        self.layers().iter().map(|&l| self.layout(l).num_parameters()).sum()
    }

    /// Cosines and sines by position, if the model rotates.
    pub(crate) fn rope(&self) -> Option<&RopeTable> {
        self.rope.as_ref()
    }
}
