//! A spec with what follows from it: layouts and the rotary table.

use std::ops::Range;
use std::sync::Arc;

use tandem_kernels::ops::RopeTable;

use crate::layout::Stage;
use crate::layout::slice::{self, Run, Slice};
use crate::layout::{LayerId, LayerLayout, ParamSpec};
use crate::lora::Adapter;
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// A decoder, or what one rank holds of it, a slice of the layers of a stage, ready to be walked. Holds no weights.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: DecoderSpec,
    embedding: LayerLayout,
    block: LayerLayout,
    head: LayerLayout,
    /// What trains, if it is not the weights themselves.
    adapter: Option<Arc<Adapted>>,
    rope: Option<RopeTable>,
    positions: usize,
    slice: Slice,
    stage: Stage,
    /// The layers of the stage, and which blocks are among them.
    layers: Vec<LayerId>,
    blocks: Range<usize>,
    /// What it is a part of, if it is not the whole.
    whole: Option<Arc<Self>>,
}

/// An adapter, and where its parameters lie.
#[derive(Debug)]
struct Adapted {
    adapter: Adapter,
    embedding: LayerLayout,
    block: LayerLayout,
    head: LayerLayout,
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
            embedding: LayerLayout::of(&spec, LayerId::Embedding),
            block: LayerLayout::of(&spec, LayerId::Block(0)),
            head: LayerLayout::of(&spec, LayerId::Head),
            adapter: None,
            rope: spec.rotary.map(|r| RopeTable::new(&r.inverse_frequencies(), positions)),
            layers: Stage::WHOLE.layers(&spec)?,
            blocks: 0..spec.num_layers,
            spec,
            positions,
            slice: Slice::WHOLE,
            stage: Stage::WHOLE,
            whole: None,
        })
    }

    /// The same, of which only this adapter trains.
    ///
    /// # Panics
    /// If it is a part of a decoder.
    #[must_use]
    pub fn with_adapter(self, adapter: Adapter) -> Self {
        assert!(self.whole.is_none(), "a decoder gets its adapter before it is divided");
        let layout = |layer, base| adapter.layout(&self.spec, layer, base);
        let adapted = Adapted {
            embedding: layout(LayerId::Embedding, &self.embedding),
            block: layout(LayerId::Block(0), &self.block),
            head: layout(LayerId::Head, &self.head),
            adapter,
        };
        Self { adapter: Some(Arc::new(adapted)), ..self }
    }

    /// The same, of which everything trains.
    ///
    /// # Panics
    /// If it is a part of a decoder.
    #[must_use]
    pub fn without_adapter(&self) -> Self {
        assert!(self.whole.is_none(), "a part of a decoder keeps its adapter");
        Self { adapter: None, ..self.clone() }
    }

    /// What trains, if it is not the weights themselves.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref().map(|adapted| &adapted.adapter)
    }

    /// A slice of a whole decoder: its spec and layouts are those of what the slice holds.
    ///
    /// # Errors
    /// If it cannot be divided into so many, or has an adapter.
    pub fn sliced(whole: &Arc<Self>, slice: Slice) -> Result<Arc<Self>> {
        debug_assert_eq!(whole.slice, Slice::WHOLE, "a slice is not sliced again");
        if slice.count == 1 {
            return Ok(whole.clone());
        }
        if whole.adapter.is_some() {
            return Err(ModelError::Invalid(
                "adapters of a model in slices are not there yet; divide it by compute.sharding or compute.pipeline".to_owned(),
            ));
        }
        let spec = slice.spec(&whole.spec)?;
        Ok(Arc::new(Self {
            embedding: LayerLayout::of(&spec, LayerId::Embedding),
            block: LayerLayout::of(&spec, LayerId::Block(0)),
            head: LayerLayout::of(&spec, LayerId::Head),
            rope: whole.rope.clone(),
            adapter: None,
            positions: whole.positions,
            layers: whole.layers.clone(),
            blocks: whole.blocks.clone(),
            spec,
            slice,
            stage: whole.stage,
            whole: Some(whole.clone()),
        }))
    }

    /// A stage of a decoder, or of a slice of one: its layers are those of the stage, under the names that they have in the
    /// whole.
    ///
    /// # Errors
    /// If there are more stages than blocks.
    pub fn staged(decoder: &Arc<Self>, stage: Stage) -> Result<Arc<Self>> {
        debug_assert_eq!(decoder.stage, Stage::WHOLE, "a stage is not divided again");
        if stage.count == 1 {
            return Ok(decoder.clone());
        }
        Ok(Arc::new(Self {
            stage,
            layers: stage.layers(&decoder.whole().spec)?,
            blocks: stage.blocks(&decoder.whole().spec)?,
            whole: decoder.whole.clone().or_else(|| Some(decoder.clone())),
            ..Self::clone(decoder)
        }))
    }

    /// Which slice it is.
    pub fn slice(&self) -> Slice {
        self.slice
    }

    /// Which stage it is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// What it is a part of: itself, if it is the whole.
    pub fn whole(&self) -> &Self {
        self.whole.as_deref().unwrap_or(self)
    }

    /// The tokens whose rows of table and head it holds.
    pub fn tokens(&self) -> Range<usize> {
        self.slice.of(self.whole().spec.vocab_size)
    }

    /// What the decoder, or the slice, is made of.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// How many tokens a sequence may have.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The layers in walk order: embedding, blocks, head; of a stage, those that it holds.
    pub fn layers(&self) -> Vec<LayerId> {
        self.layers.clone()
    }

    /// The blocks, or those of the stage.
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// A layer's place in [`Decoder::layers`].
    ///
    /// # Panics
    /// If it is another stage's.
    pub fn index(&self, layer: LayerId) -> usize {
        let before = usize::from(self.layers[0] == LayerId::Embedding);
        match layer {
            LayerId::Embedding if before == 1 => 0,
            LayerId::Block(i) if self.blocks.contains(&i) => before + i - self.blocks.start,
            LayerId::Head if self.stage.is_last() => before + self.blocks.len(),
            _ => panic!("stage {} of {} does not hold the {layer}", self.stage.index, self.stage.count),
        }
    }

    /// Whether the layer is held, and this stage's to write down and to count: see [`Stage::owns`].
    pub fn owns(&self, layer: LayerId) -> bool {
        self.layers.contains(&layer) && self.stage.owns(layer)
    }

    /// The stage that a layer is of, as [`Decoder::owns`] means it, of as many as this one's.
    pub fn owner(&self, layer: LayerId) -> usize {
        let count = self.stage.count;
        match layer {
            LayerId::Embedding => 0,
            LayerId::Head => count - 1,
            LayerId::Block(i) => {
                let holds = |&index: &usize| {
                    let blocks = Stage { index, count }.blocks(&self.whole().spec);
                    blocks.is_ok_and(|blocks| blocks.contains(&i))
                };
                (0..count).find(holds).expect("stages cover every block")
            }
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

    /// Where the parameters that train lie in the layer's flat buffer of them: the layer's own, or those of the adapter.
    pub fn trained(&self, layer: LayerId) -> &LayerLayout {
        match (&self.adapter, layer) {
            (None, _) => self.layout(layer),
            (Some(adapted), LayerId::Embedding) => &adapted.embedding,
            (Some(adapted), LayerId::Block(_)) => &adapted.block,
            (Some(adapted), LayerId::Head) => &adapted.head,
        }
    }

    /// Where the elements of a whole parameter lie that this slice holds: runs, in the order of the slice's parameter. `param`
    /// is of the [`Decoder::whole`]'s layout.
    pub fn runs(&self, param: &ParamSpec) -> Vec<Run> {
        slice::runs(self.slice, &self.whole().spec, param)
    }

    /// The columns of a whole parameter, where the slice has some columns of all its rows; all of them, where it has rows.
    pub fn columns(&self, param: &ParamSpec) -> Range<usize> {
        self.slice.columns(&self.whole().spec, param)
    }

    /// Elements of a layer's flat buffer, by slice.
    pub fn slice_lengths(&self, layer: LayerId) -> Vec<usize> {
        self.slices().map(|(_, spec)| LayerLayout::of(&spec, layer).len).collect()
    }

    /// Copies this slice of a layer out of the whole layer's flat buffer; padding becomes zero.
    ///
    /// # Panics
    /// If a buffer is not of the layer's length.
    pub fn cut(&self, layer: LayerId, whole: &[f32], part: &mut [f32]) {
        let layouts = (self.whole().layout(layer), self.layout(layer));
        slice::copy_out(self.slice, &self.whole().spec, layouts, whole, part);
    }

    /// Puts the flat buffers of all slices of a layer, one after another in `parts`, together in the whole layer's; what all
    /// hold is the last one's.
    ///
    /// # Panics
    /// If a buffer is not of the layer's length.
    pub fn join(&self, layer: LayerId, parts: &[f32], whole: &mut [f32]) {
        let mut rest = parts;
        for (slice, spec) in self.slices() {
            let layout = LayerLayout::of(&spec, layer);
            let (part, after) = rest.split_at(layout.len);
            let both = (self.whole().layout(layer), &layout);
            slice::copy_in(slice, &self.whole().spec, both, part, whole);
            rest = after;
        }
    }

    /// Every slice with its spec.
    fn slices(&self) -> impl Iterator<Item = (Slice, DecoderSpec)> {
        (0..self.slice.count).map(|index| {
            let slice = Slice { index, ..self.slice };
            (slice, slice.spec(&self.whole().spec).expect("this slice was made"))
        })
    }

    /// Number of parameters of the model, or of the layers of a stage; a tied table counts once.
    pub fn num_parameters(&self) -> usize {
        self.layers().iter().map(|&l| self.layout(l).num_parameters()).sum()
    }

    /// Number of parameters that train.
    pub fn num_trained(&self) -> usize {
        self.layers().iter().map(|&l| self.trained(l).num_parameters()).sum()
    }

    /// Cosines and sines by position, if the model rotates.
    pub(crate) fn rope(&self) -> Option<&RopeTable> {
        self.rope.as_ref()
    }
}
