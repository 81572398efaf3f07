//! Weights and gradients as the layers see them: views of a layer, and the two traits behind which
//! they are stored.
//!
//! # The protocol
//!
//! [`LayerExecutor`](crate::LayerExecutor) makes these calls, and makes them in the same order on every rank whether
//! it has a batch or not ([`LayerExecutor::idle_forward`](crate::LayerExecutor::idle_forward)). So a [`WeightSource`]
//! may gather a layer from all ranks, and a [`GradientSink`] may reduce one, with no other
//! agreement between ranks.
//!
//! | pass | calls |
//! |---|---|
//! | forward, start | `prefetch(Embedding)`, `prefetch(Block(0))`, `fetch` and `release(Embedding)` |
//! | each block | `prefetch` of the next layer, `fetch` (or `fetch_packed`), forward, `release` |
//! | head | `fetch` and `release(Head)` for the final norm, then the same for the layer with the head's weight |
//! | backward, start | `prefetch` of the last block |
//! | head | `fetch` and `release(Head)`; `fetch`, `open`, `release` of the layer with the head's weight, and `emit` if that is the embedding; `fetch`, `open`, `release`, `emit(Head)` |
//! | each block, last first | `prefetch` of the block before, `fetch`, `open`, backward, `release`, `emit` |
//! | embedding | `open`, `fetch` and `release` if it has low-rank terms, `emit` |
//!
//! A pipeline stage makes the calls of its own layers. In generation it fetches its first block once
//! more, before it receives the stream. Held by types: weights borrow the source from `fetch` to
//! their last use, and gradients the sink from `open` to theirs, so neither `release` nor `emit` can
//! come too early.

mod packing;
mod resident;

pub use packing::{PackedLayer, PackedMatrix, Packing, WholeMatrix};
pub use resident::{FlatWeights, ResidentGradients, ResidentWeights};

use tandem_kernels::ops::Weight;
use tandem_kernels::{Format, View, ViewMut};

use crate::decoder::Fp8Matmul;
use crate::layout::{LayerId, LayerLayout, ParamKind};
use crate::lora::{Adapter, LoraTarget};
use crate::{ModelError, Result};

/// Weights of one layer, borrowed from a source while the layer runs.
#[derive(Clone, Copy)]
pub struct LayerWeights<'a> {
    base: Base<'a>,
    /// Adapter beside the base.
    adapter: Option<AdapterWeights<'a>>,
}

/// Parameters of a layer of the model itself.
#[derive(Clone, Copy)]
enum Base<'a> {
    Flat(FlatLayer<'a>),
    Packed(PackedLayer<'a>),
}

/// The parameters of a layer in flat buffers.
#[derive(Clone, Copy)]
pub struct FlatLayer<'a> {
    layout: &'a LayerLayout,
    /// f32 `[1, len − master_start]`.
    master: View<'a>,
    master_start: usize,
    /// Compute type `[1, ≥ compute_len]`.
    compute: Option<View<'a>>,
}

impl<'a> FlatLayer<'a> {
    /// Views a flat f32 buffer `[1, len]` and, where the compute type is not f32, a copy of at
    /// least the first `compute_len` elements in that type.
    pub fn new(layout: &'a LayerLayout, master: View<'a>, compute: Option<View<'a>>) -> Self {
        debug_assert_eq!(master.cols(), layout.len, "flat buffer of another layer");
        debug_assert!(
            compute.is_none_or(|c| c.cols() >= layout.compute_len),
            "compute copy of another layer"
        );
        Self { layout, master, master_start: 0, compute }
    }

    /// Views matrices `[1, ≥ compute_len]` in the compute type, without their f32 masters; `rest`
    /// `[1, len − compute_len]` holds the f32 parameters after them.
    pub fn without_masters(layout: &'a LayerLayout, rest: View<'a>, compute: View<'a>) -> Self {
        debug_assert_eq!(rest.cols(), layout.len - layout.compute_len, "flat buffer of another layer");
        debug_assert!(compute.cols() >= layout.compute_len, "compute copy of another layer");
        Self { layout, master: rest, master_start: layout.compute_len, compute: Some(compute) }
    }

    fn get(&self, part: ParamKind) -> Option<View<'a>> {
        let param = self.layout.param(part)?;
        let flat = match self.compute {
            Some(copy) if param.offset < self.layout.compute_len => copy.col_range(param.range()),
            _ => {
                let start = param.offset - self.master_start;
                self.master.col_range(start..start + param.len())
            }
        };
        Some(flat.reshape(param.rows, param.cols))
    }

    fn precise(&self, part: ParamKind) -> Option<View<'a>> {
        let param = self.layout.param(part)?;
        if self.master_start > param.offset {
            return self.get(part);
        }
        let start = param.offset - self.master_start;
        Some(self.master.col_range(start..start + param.len()).reshape(param.rows, param.cols))
    }
}

/// The weights of an adapter in one layer.
#[derive(Clone, Copy)]
pub struct AdapterWeights<'a> {
    /// The adapter.
    pub adapter: &'a Adapter,
    /// The layer.
    pub layer: LayerId,
    /// Parameters of the adapter in this layer.
    pub weights: FlatLayer<'a>,
}

/// The low-rank terms of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct LowRank<'a> {
    /// Modules of the matrix that have a term.
    pub(crate) sites: &'a [LoraTarget],
    /// The rank of each site's term.
    pub(crate) rank: usize,
    /// The factor on the terms.
    pub(crate) scale: f32,
    /// Rate at which inputs are dropped in training.
    pub(crate) dropout: f32,
    /// Key of this matrix for dropout, unique in the model.
    pub(crate) place: u64,
    /// Columns that `A` reads of the whole matrix's, and their number, if it reads some.
    pub(crate) columns: Option<&'a (std::ops::Range<usize>, usize)>,
    /// `[S·r, in]`.
    pub(crate) a: View<'a>,
    /// `[Σ rows of sites, r]`.
    pub(crate) b: View<'a>,
    /// `[1, Σ rows of sites]` f32, with DoRA.
    pub(crate) magnitude: Option<View<'a>>,
}

impl<'a> LayerWeights<'a> {
    /// Makes a layer without an adapter.
    pub fn new(base: FlatLayer<'a>) -> Self {
        Self { base: Base::Flat(base), adapter: None }
    }

    /// Makes a frozen layer without an adapter.
    pub fn packed(base: PackedLayer<'a>) -> Self {
        Self { base: Base::Packed(base), adapter: None }
    }

    /// Replaces the adapter.
    #[must_use]
    pub fn with_adapter(self, adapter: Option<AdapterWeights<'a>>) -> Self {
        Self { adapter, ..self }
    }

    /// Returns a parameter in the compute type if it has a copy there, else in f32. `None` if the
    /// layer has no such part.
    pub fn get(&self, part: ParamKind) -> Option<View<'a>> {
        let own = self.adapter.and_then(|adapter| adapter.weights.get(part));
        own.or_else(|| match &self.base {
            Base::Flat(layer) => layer.get(part),
            Base::Packed(layer) => layer.get(part),
        })
    }

    /// Returns the f32 master of a parameter, or the compute copy if there is none. A look-up loses
    /// nothing by reading f32.
    pub fn precise(&self, part: ParamKind) -> Option<View<'a>> {
        let own = self.adapter.and_then(|adapter| adapter.weights.precise(part));
        own.or_else(|| match &self.base {
            Base::Flat(layer) => layer.precise(part),
            Base::Packed(layer) => layer.get(part),
        })
    }

    /// Returns a part that the spec guarantees, as [`LayerWeights::get`].
    ///
    /// # Errors
    /// If the layer has no such part: the source returned another layer's weights.
    pub fn require(&self, part: ParamKind) -> Result<View<'a>> {
        self.get(part).ok_or_else(|| ModelError::Invalid(format!("the weight source gave no {part:?}")))
    }

    /// Returns a matrix of a block for a forward product, as [`LayerWeights::require`]; packed, if the layer came
    /// from [`WeightSource::fetch_packed`] or the product is of FP8.
    pub(crate) fn weight(&self, part: ParamKind) -> Result<Weight<'a>> {
        self.weight_for(part, Fp8Matmul::Forward)
    }

    /// Returns a matrix of a block for the gradient of its input, as [`LayerWeights::weight`].
    pub(crate) fn backward_weight(&self, part: ParamKind) -> Result<Weight<'a>> {
        self.weight_for(part, Fp8Matmul::ForwardAndBackward)
    }

    fn weight_for(&self, part: ParamKind, product: Fp8Matmul) -> Result<Weight<'a>> {
        let own = self.adapter.and_then(|adapter| adapter.weights.get(part));
        match (own, &self.base) {
            (None, Base::Packed(layer)) => {
                layer.weight(part, product).unwrap_or_else(|| self.require(part).map(Weight::from))
            }
            _ => self.require(part).map(Weight::from),
        }
    }

    /// Returns the low-rank terms of a matrix, if it has some.
    pub(crate) fn low_rank(&self, part: ParamKind) -> Option<LowRank<'a>> {
        let AdapterWeights { adapter, layer, weights } = self.adapter?;
        let adapted = adapter.get(part)?;
        let parts = part.low_rank()?;
        Some(LowRank {
            sites: &adapted.sites,
            columns: adapted.columns.as_ref(),
            rank: adapter.config().rank,
            scale: adapter.scale(),
            dropout: adapter.config().dropout as f32,
            place: match layer {
                LayerId::Embedding => 0,
                LayerId::Head => 1,
                LayerId::Block(index) => 2 + index as u64,
            } << 8
                | part as u64,
            a: weights.get(parts.a)?,
            b: weights.get(parts.b)?,
            magnitude: parts.magnitude.and_then(|part| weights.get(part)),
        })
    }
}

/// Gradients of one layer: one flat f32 buffer that backward adds into. Matrices may be
/// uninitialised: the first product then writes them, which spares zeroing and reading.
pub struct LayerGradients<'a> {
    layout: &'a LayerLayout,
    flat: ViewMut<'a>,
    /// For each parameter of the layout, whether it is initialised. `None` if all are.
    holds: Option<&'a mut [bool]>,
    /// Limit of the terms of a sum in fixed point, if the token table holds the first of them.
    term_limit: Option<f32>,
}

impl<'a> LayerGradients<'a> {
    /// Views a flat f32 buffer `[1, len]` in the layout of the layer's trained parameters.
    pub fn new(layout: &'a LayerLayout, flat: ViewMut<'a>) -> Self {
        debug_assert_eq!(flat.cols(), layout.len, "gradient buffer of another layer");
        Self { layout, flat, holds: None, term_limit: None }
    }

    /// Views a buffer in which some matrices are uninitialised. `holds` says of each parameter
    /// whether it is initialised, and is kept up to date. Only parts that
    /// [`ParamKind::is_written_by_product`] may be uninitialised.
    pub fn partly(layout: &'a LayerLayout, flat: ViewMut<'a>, holds: &'a mut [bool]) -> Self {
        debug_assert_eq!(holds.len(), layout.params.len(), "gradients of another layer");
        Self { holds: Some(holds), ..Self::new(layout, flat) }
    }

    /// Says that the token table holds the head's term of a sum in fixed point: the look-up adds the second
    /// term with [`embedding_backward_exact`](tandem_kernels::ops::embedding_backward_exact), below `limit`.
    #[must_use]
    pub fn with_first_term(self, limit: f32) -> Self {
        Self { term_limit: Some(limit), ..self }
    }

    /// Returns the limit that [`LayerGradients::with_first_term`] was given.
    pub fn term_limit(&self) -> Option<f32> {
        self.term_limit
    }

    /// Marks a parameter as initialised, and returns whether it was: whether a product is to be
    /// added.
    pub fn begin_product(&mut self, part: ParamKind) -> bool {
        let index = self.layout.params.iter().position(|param| param.part == part);
        let holds = index.and_then(|index| self.holds.as_mut()?.get_mut(index));
        holds.is_none_or(|holds| std::mem::replace(holds, true))
    }

    /// Returns whether the layer has this part and it trains.
    pub fn trains(&self, part: ParamKind) -> bool {
        self.layout.param(part).is_some()
    }

    /// Returns the gradient of a matrix, and whether a product is to be added to it. `None` as in
    /// [`LayerGradients::get_mut`].
    pub fn product_mut(&mut self, part: ParamKind) -> Option<(ViewMut<'_>, bool)> {
        let adds = self.begin_product(part);
        self.view_mut(part).map(|gradient| (gradient, adds))
    }

    /// Returns the gradient of a parameter, to be added to. `None` if the layer has no such part or
    /// it does not train.
    ///
    /// # Panics
    /// If the gradient is uninitialised.
    pub fn get_mut(&mut self, part: ParamKind) -> Option<ViewMut<'_>> {
        assert!(self.begin_product(part), "the first product of {part:?} writes it");
        self.view_mut(part)
    }

    fn view_mut(&mut self, part: ParamKind) -> Option<ViewMut<'_>> {
        let param = self.layout.param(part)?;
        Some(self.flat.reborrow().col_range(param.range()).reshape(param.rows, param.cols))
    }

    /// Returns two gradients at once, for kernels that add to both; each is `None` as in
    /// [`LayerGradients::get_mut`]. `first` lies before `second` in the layout, as weights do
    /// before their biases.
    pub fn each_mut(
        &mut self,
        first: ParamKind,
        second: ParamKind,
    ) -> (Option<ViewMut<'_>>, Option<ViewMut<'_>>) {
        if !self.trains(first) {
            return (None, self.get_mut(second));
        }
        if !self.trains(second) {
            return (self.get_mut(first), None);
        }
        let place = |part| *self.layout.param(part).expect("trains() found it");
        let (a, b) = (place(first), place(second));
        let (between, rest) = (b.offset - a.range().end, self.layout.len - b.range().end);
        let [_, a_view, _, b_view, _] =
            self.flat.reborrow().split_cols([a.offset, a.len(), between, b.len(), rest]);
        (Some(a_view.reshape(a.rows, a.cols)), Some(b_view.reshape(b.rows, b.cols)))
    }
}

/// Storage of weights: resident, sharded over ranks, offloaded. The [module](self) lists the order
/// of calls.
pub trait WeightSource {
    /// Prefetches a layer that will be fetched soon. May do nothing.
    fn prefetch(&mut self, layer: LayerId) -> Result<()>;

    /// Returns the layer's weights, valid until the next call.
    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>>;

    /// Format of matrices that [`WeightSource::fetch_packed`] may leave packed.
    fn packed_format(&self) -> Option<Format> {
        None
    }

    /// Returns the layer's weights as [`WeightSource::fetch`], for products that read packed matrices, those of few
    /// rows on the CPU and FP8 products, or for none: matrices of blocks may be left packed. Transfers are those of `fetch`,
    /// which other ranks may call meanwhile.
    fn fetch_packed(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetch(layer)
    }

    /// Returns the layer's weights as [`WeightSource::fetch_packed`] if `may_be_packed`, else as
    /// [`WeightSource::fetch`].
    fn fetch_for(&mut self, layer: LayerId, may_be_packed: bool) -> Result<LayerWeights<'_>> {
        if may_be_packed { self.fetch_packed(layer) } else { self.fetch(layer) }
    }

    /// Returns the layer's weights of the policy and of a reference that shares its base, as
    /// [`WeightSource::fetch_packed`] if `may_be_packed`.
    ///
    /// # Errors
    /// If the reference has weights of its own.
    fn fetch_both(
        &mut self,
        layer: LayerId,
        _may_be_packed: bool,
    ) -> Result<(LayerWeights<'_>, LayerWeights<'_>)> {
        Err(ModelError::Invalid(format!(
            "the reference has weights of its own: the {layer} cannot be fetched for both models"
        )))
    }

    /// Says that the pass is done with the layer: its memory may be used for another one.
    fn release(&mut self, layer: LayerId);

    /// Says that nothing is fetched for a while: prefetched layers may be dropped. May do nothing.
    fn release_all(&mut self) {}
}

/// Storage of gradients: an accumulator, a reduction over ranks. The [module](self) lists the order
/// of calls.
///
/// A layer is opened, perhaps more than once, added to, and emitted before another layer is opened.
/// Layers come from last to first. With a tied head the embedding comes twice: first for the head's
/// gradient of the token table, last for the look-up's.
pub trait GradientSink {
    /// Returns the buffer to add the layer's gradients to.
    fn open(&mut self, layer: LayerId) -> Result<LayerGradients<'_>>;

    /// Says that the layer's gradients of this micro-batch are complete (a tied table's after the
    /// second call).
    fn emit(&mut self, layer: LayerId) -> Result<()>;
}
