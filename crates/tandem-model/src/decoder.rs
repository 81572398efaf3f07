//! A decoder: its spec, layouts, adapter and rotary table, whole or sharded.

use std::ops::Range;
use std::sync::Arc;

use tandem_kernels::{Backend, DType};

use crate::layout::PipelineStage;
use crate::layout::blocks::Blocks;
use crate::layout::slice::{self, Run, TensorParallelShard};
use crate::layout::{Block, LayerId, LayerLayout, ParamKind, ParamSpec};
use crate::lora::{Adapter, AdapterKind};
use crate::spec::{DecoderSpec, Rope, RotarySpec};
use crate::{ModelError, Result};

/// Decoder without weights, or one rank's part of it: a tensor-parallel shard of a pipeline stage's
/// layers.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: DecoderSpec,
    embedding: LayerLayout,
    /// By block; blocks of one kind share a layout.
    block_layouts: Vec<Arc<LayerLayout>>,
    head: LayerLayout,
    /// Adapter, if the base is frozen.
    adapter: Option<Arc<Adapted>>,
    /// Rotary tables of each block; blocks that rotate alike share them.
    rope: Vec<Option<Arc<Rope>>>,
    positions: usize,
    slice: TensorParallelShard,
    sum_blocks: Blocks,
    /// Type of the residual stream.
    residual: DType,
    fp8_matmul: Fp8Matmul,
    stage: PipelineStage,
    /// Layers of the stage, and the blocks among them.
    layers: Vec<LayerId>,
    blocks: Range<usize>,
    /// The whole decoder, if this is a part.
    whole: Option<Arc<Self>>,
}

/// Products of a linear layer that multiply a frozen FP8 matrix as it is packed, on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Matmul {
    /// No product: matrices are unpacked.
    #[default]
    None,
    /// The forward pass.
    Forward,
    /// The forward pass, and the gradient of the input.
    ForwardAndBackward,
}

/// Adapter and the layouts of its parameters.
#[derive(Debug)]
struct Adapted {
    adapter: Adapter,
    embedding: LayerLayout,
    /// By block.
    block_layouts: Vec<Arc<LayerLayout>>,
    head: LayerLayout,
}

impl Decoder {
    /// Makes a decoder for sequences of up to `positions` tokens. With rotary embedding that may be
    /// more than the model was trained for: the angles continue. A learned position table ends
    /// where it ends.
    ///
    /// # Errors
    /// If positions are learned and fewer than `positions`.
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
            embedding: LayerLayout::from_spec(&spec, LayerId::Embedding),
            block_layouts: block_layouts(&spec, |index| LayerLayout::from_spec(&spec, LayerId::Block(index))),
            head: LayerLayout::from_spec(&spec, LayerId::Head),
            adapter: None,
            rope: rope_tables(&spec.rotary, positions),
            layers: PipelineStage::WHOLE.layers(&spec)?,
            blocks: 0..spec.num_layers,
            sum_blocks: Blocks::new(&spec, TensorParallelShard::WHOLE, &spec),
            residual: DType::F32,
            fp8_matmul: Fp8Matmul::None,
            spec,
            positions,
            slice: TensorParallelShard::WHOLE,
            stage: PipelineStage::WHOLE,
            whole: None,
        })
    }

    /// Freezes the base, and trains this adapter.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn with_adapter(self, adapter: Adapter) -> Self {
        assert!(self.whole.is_none(), "a decoder gets its adapter before it is divided");
        self.adapted(adapter)
    }

    fn adapted(self, adapter: Adapter) -> Self {
        let layout = |layer, base| adapter.layout(&self.spec, layer, base);
        let adapted = Adapted {
            embedding: layout(LayerId::Embedding, &self.embedding),
            block_layouts: block_layouts(&self.spec, |index| {
                layout(LayerId::Block(index), &self.block_layouts[index])
            }),
            head: layout(LayerId::Head, &self.head),
            adapter,
        };
        Self { adapter: Some(Arc::new(adapted)), ..self }
    }

    /// Returns the decoder without its adapter.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn without_adapter(&self) -> Self {
        assert!(self.whole.is_none(), "a part of a decoder keeps its adapter");
        Self { adapter: None, ..self.clone() }
    }

    /// Keeps the residual stream in this type, f32 or the compute type. Its gradient stays f32.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn with_residual(self, residual: DType) -> Self {
        assert!(self.whole.is_none(), "a decoder gets the type of its stream before it is divided");
        Self { residual, ..self }
    }

    /// Returns the type of the residual stream.
    pub fn residual(&self) -> DType {
        self.residual
    }

    /// Sums as suits one device that shares no model with others: on a GPU without blocks
    /// ([`Self::without_sum_blocks`]), where they are operations of their own.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn alone_on(self, backend: Backend) -> Self {
        match backend {
            Backend::Cpu => self,
            Backend::Cuda => self.without_sum_blocks(),
        }
    }

    /// Sets which products on GPUs multiply frozen FP8 matrices of blocks as they are packed. They must pass
    /// [`Packing::check_fp8`](crate::Packing::check_fp8), unless there are none.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn with_fp8_matmul(self, fp8_matmul: Fp8Matmul) -> Self {
        assert!(self.whole.is_none(), "a decoder is told before it is divided");
        Self { fp8_matmul, ..self }
    }

    /// Returns which products multiply frozen FP8 matrices of blocks as they are packed.
    pub fn fp8_matmul(&self) -> Fp8Matmul {
        self.fp8_matmul
    }

    /// Sums over sharded dimensions without blocks: each device chooses the order, and the bits depend on
    /// the number of tensor-parallel ranks.
    ///
    /// # Panics
    /// If this is a part of a decoder.
    #[must_use]
    pub fn without_sum_blocks(self) -> Self {
        assert!(self.whole.is_none(), "a decoder gets its blocks before it is divided");
        Self { sum_blocks: Blocks::one(), ..self }
    }

    /// Returns whether the adapter is DoRA, whose norms read every adapted matrix.
    pub fn has_dora(&self) -> bool {
        self.adapter().is_some_and(|adapter| adapter.config().kind == AdapterKind::Dora)
    }

    /// Returns the adapter, if the base is frozen.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref().map(|adapted| &adapted.adapter)
    }

    /// Makes a tensor-parallel shard of a whole decoder, with the spec and layouts of the shard.
    pub fn sliced(whole: &Arc<Self>, slice: TensorParallelShard) -> Result<Arc<Self>> {
        debug_assert_eq!(whole.slice, TensorParallelShard::WHOLE, "a slice is not sliced again");
        if slice.count == 1 {
            return Ok(whole.clone());
        }
        let spec = slice.spec(&whole.spec)?;
        let adapter = whole.adapter().map(|adapter| whole.adapter_of(adapter, slice));
        let part = Self {
            embedding: LayerLayout::from_spec(&spec, LayerId::Embedding),
            block_layouts: block_layouts(&spec, |index| LayerLayout::from_spec(&spec, LayerId::Block(index))),
            head: LayerLayout::from_spec(&spec, LayerId::Head),
            rope: whole.rope.clone(),
            adapter: None,
            positions: whole.positions,
            layers: whole.layers.clone(),
            blocks: whole.blocks.clone(),
            sum_blocks: if whole.sum_blocks.is_one() {
                Blocks::one()
            } else {
                Blocks::new(&whole.spec, slice, &spec)
            },
            residual: whole.residual,
            fp8_matmul: whole.fp8_matmul,
            spec,
            slice,
            stage: whole.stage,
            whole: Some(whole.clone()),
        };
        Ok(Arc::new(match adapter {
            Some(adapter) => part.adapted(adapter),
            None => part,
        }))
    }

    /// Cuts this whole decoder's adapter.
    fn adapter_of(&self, adapter: &Adapter, slice: TensorParallelShard) -> Adapter {
        let param = |part| self.layers.iter().find_map(|&layer| self.layout(layer).param(part).copied());
        adapter.sliced(slice, &self.spec, &param)
    }

    /// Makes a pipeline stage of a decoder or of a tensor-parallel shard. Layers keep their names.
    pub fn staged(decoder: &Arc<Self>, stage: PipelineStage) -> Result<Arc<Self>> {
        debug_assert_eq!(decoder.stage, PipelineStage::WHOLE, "a stage is not divided again");
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

    /// Returns the tensor-parallel shard.
    pub fn slice(&self) -> TensorParallelShard {
        self.slice
    }

    /// Returns the blocks of sums over sharded dimensions.
    pub(crate) fn sum_blocks(&self) -> &Blocks {
        &self.sum_blocks
    }

    /// Returns the pipeline stage.
    pub fn stage(&self) -> PipelineStage {
        self.stage
    }

    /// Returns the whole decoder: itself, if this is no part.
    pub fn whole(&self) -> &Self {
        self.whole.as_deref().unwrap_or(self)
    }

    /// Returns the tokens whose rows of table and head this shard holds.
    pub fn tokens(&self) -> Range<usize> {
        self.slice.range(self.whole().spec.vocab_size)
    }

    /// Returns the spec of the decoder, or of the shard.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// Returns the longest sequence, in tokens.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns the layers in forward order, embedding, blocks, head; of a stage its own.
    pub fn layers(&self) -> Vec<LayerId> {
        self.layers.clone()
    }

    /// Returns the blocks, of a stage its own.
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// Returns a layer's index in [`Decoder::layers`].
    ///
    /// # Panics
    /// If another stage holds the layer.
    pub fn index(&self, layer: LayerId) -> usize {
        let before = usize::from(self.layers[0] == LayerId::Embedding);
        match layer {
            LayerId::Embedding if before == 1 => 0,
            LayerId::Block(i) if self.blocks.contains(&i) => before + i - self.blocks.start,
            LayerId::Head if self.stage.is_last() => before + self.blocks.len(),
            _ => panic!("stage {} of {} does not hold the {layer}", self.stage.index, self.stage.count),
        }
    }

    /// Returns whether this stage holds the layer.
    pub fn holds(&self, layer: LayerId) -> bool {
        self.layers.contains(&layer)
    }

    /// Returns whether this stage holds the layer, and saves and counts it ([`PipelineStage::owns`]).
    pub fn owns(&self, layer: LayerId) -> bool {
        self.holds(layer) && self.stage.owns(layer)
    }

    /// Returns the stage that owns a layer, in the sense of [`Decoder::owns`].
    pub fn owner(&self, layer: LayerId) -> usize {
        let count = self.stage.count;
        match layer {
            LayerId::Embedding => 0,
            LayerId::Head => count - 1,
            LayerId::Block(i) => {
                let holds = |&index: &usize| {
                    let blocks = PipelineStage { index, count }.blocks(&self.whole().spec);
                    blocks.is_ok_and(|blocks| blocks.contains(&i))
                };
                (0..count).find(holds).expect("stages cover every block")
            }
        }
    }

    /// Returns the layout of the layer's own parameters.
    pub fn layout(&self, layer: LayerId) -> &LayerLayout {
        match layer {
            LayerId::Embedding => &self.embedding,
            LayerId::Block(index) => &self.block_layouts[index],
            LayerId::Head => &self.head,
        }
    }

    /// Returns the layout of the layer's trained parameters: its own, or those of the adapter.
    pub fn trained(&self, layer: LayerId) -> &LayerLayout {
        match (&self.adapter, layer) {
            (None, _) => self.layout(layer),
            (Some(adapted), LayerId::Embedding) => &adapted.embedding,
            (Some(adapted), LayerId::Block(index)) => &adapted.block_layouts[index],
            (Some(adapted), LayerId::Head) => &adapted.head,
        }
    }

    /// Returns the runs of a whole parameter that this shard holds, in the order of its own
    /// parameter. `param` is of the [`Decoder::whole`]'s layout.
    pub fn runs(&self, param: &ParamSpec) -> Vec<Run> {
        slice::runs(&self.block(self.slice, param), param.cols)
    }

    /// Returns the shard's columns of a whole parameter that is divided by columns; else all
    /// columns.
    pub fn columns(&self, param: &ParamSpec) -> Range<usize> {
        let is_factor =
            matches!(param.part, ParamKind::OutLoraA | ParamKind::DownLoraA | ParamKind::DeltaOutLoraA);
        match &self.block(self.slice, param).cols[..] {
            [columns] if is_factor || param.part.is_divided_by_columns() => columns.clone(),
            _ => 0..param.cols,
        }
    }

    /// Returns the block of a whole parameter, of the base or the adapter, that a shard holds.
    fn block(&self, slice: TensorParallelShard, param: &ParamSpec) -> Block {
        let whole = self.whole();
        let of_adapter = whole.adapter().and_then(|adapter| adapter.block(slice, &whole.spec, param));
        of_adapter.unwrap_or_else(|| slice.block(&whole.spec, param))
    }

    /// Returns the elements of the flat buffer of a layer's trained parameters, by tensor-parallel rank.
    pub fn slice_lengths(&self, layer: LayerId) -> Vec<usize> {
        self.slices(layer).map(|(_, layout)| layout.len).collect()
    }

    /// Copies this shard of a layer's own parameters out of the whole layer's flat buffer; padding
    /// becomes zero.
    pub fn cut(&self, layer: LayerId, whole: &[f32], part: &mut [f32]) {
        let layouts = (self.whole().layout(layer), self.layout(layer));
        slice::copy_out(|param| self.block(self.slice, param), layouts, whole, part);
    }

    /// Copies this shard of a layer's trained parameters, as [`Decoder::cut`].
    pub fn cut_trained(&self, layer: LayerId, whole: &[f32], part: &mut [f32]) {
        let layouts = (self.whole().trained(layer), self.trained(layer));
        slice::copy_out(|param| self.block(self.slice, param), layouts, whole, part);
    }

    /// Joins the flat buffers of all shards of a layer's trained parameters, one after another in
    /// `parts`, into the whole layer's. Of parameters that every rank holds whole, the last copy stays.
    pub fn join(&self, layer: LayerId, parts: &[f32], whole: &mut [f32]) {
        let mut rest = parts;
        for (slice, layout) in self.slices(layer) {
            let (part, after) = rest.split_at(layout.len);
            let both = (self.whole().trained(layer), &layout);
            slice::copy_in(|param| self.block(slice, param), both, part, whole);
            rest = after;
        }
    }

    /// Lists every tensor-parallel shard with the layout of a layer's trained parameters.
    fn slices(&self, layer: LayerId) -> impl Iterator<Item = (TensorParallelShard, LayerLayout)> {
        let whole = self.whole();
        (0..self.slice.count).map(move |index| {
            let slice = TensorParallelShard { index, ..self.slice };
            let spec = slice.spec(&whole.spec).expect("this slice was made");
            let base = LayerLayout::from_spec(&spec, layer);
            let layout = match whole.adapter() {
                None => base,
                Some(adapter) if slice.count == 1 => adapter.layout(&spec, layer, &base),
                Some(adapter) => {
                    let own = whole.adapter_of(adapter, slice);
                    own.layout(&spec, layer, &base)
                }
            };
            (slice, layout)
        })
    }

    /// Returns the number of parameters of the model, or of a stage's layers; a tied table counts
    /// once.
    pub fn num_parameters(&self) -> usize {
        self.layers().iter().map(|&l| self.layout(l).num_parameters()).sum()
    }

    /// Returns the number of trained parameters.
    pub fn num_trained(&self) -> usize {
        self.layers().iter().map(|&l| self.trained(l).num_parameters()).sum()
    }

    /// Returns whether the rotary embedding of a text within [`Decoder::positions`] depends on its length.
    pub fn rotates_by_length(&self) -> bool {
        self.rope.iter().flatten().any(|rope| rope.depends_on_length())
    }

    /// Returns the rotary tables of a block, if it rotates.
    pub(crate) fn rope(&self, block: usize) -> Option<&Rope> {
        self.rope.get(block)?.as_deref()
    }
}

/// Makes the layouts of all blocks, one for those of a kind.
fn block_layouts(spec: &DecoderSpec, layout: impl Fn(usize) -> LayerLayout) -> Vec<Arc<LayerLayout>> {
    let mut made: [Option<Arc<LayerLayout>>; 2] = [None, None];
    let of_block = |index: usize| {
        let kind = &mut made[usize::from(spec.linear_attention(index).is_some())];
        kind.get_or_insert_with(|| Arc::new(layout(index))).clone()
    };
    (0..spec.num_layers).map(of_block).collect()
}

/// Makes the rotary tables of all blocks, equal ones once.
fn rope_tables(specs: &[Option<RotarySpec>], positions: usize) -> Vec<Option<Arc<Rope>>> {
    let mut made: Vec<(&RotarySpec, Arc<Rope>)> = Vec::new();
    let mut tables = Vec::with_capacity(specs.len());
    for spec in specs {
        let Some(spec) = spec else {
            tables.push(None);
            continue;
        };
        let table = match made.iter().find(|(known, _)| *known == spec) {
            Some((_, table)) => table.clone(),
            None => {
                let table = Arc::new(Rope::new(spec, positions));
                made.push((spec, table.clone()));
                table
            }
        };
        tables.push(Some(table));
    }
    tables
}
