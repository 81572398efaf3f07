//! Where weights come from and where gradients go, as the walk sees it.

mod packing;
mod resident;

pub use packing::{PackedLayer, Packing, Piece};
pub use resident::{FlatWeights, ResidentGradients, ResidentWeights};

use tandem_kernels::{View, ViewMut};

use crate::layout::{LayerId, LayerLayout, Part};
use crate::lora::{Adapter, Site};
use crate::{ModelError, Result};

/// The weights of one layer, borrowed from a source for as long as the layer runs.
#[derive(Clone, Copy)]
pub struct LayerWeights<'a> {
    base: Base<'a>,
    /// What is added to the base, if something is.
    adapter: Option<AdapterWeights<'a>>,
}

/// The model's own parameters of a layer.
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
    /// Over a flat f32 buffer `[1, len]` and, where the compute type is not f32, a copy of at least the first
    /// `compute_len` elements in that type.
    pub fn new(layout: &'a LayerLayout, master: View<'a>, compute: Option<View<'a>>) -> Self {
        debug_assert_eq!(master.cols(), layout.len, "flat buffer of another layer");
        debug_assert!(
            compute.is_none_or(|c| c.cols() >= layout.compute_len),
            "compute copy of another layer"
        );
        Self { layout, master, master_start: 0, compute }
    }

    /// Over matrices in the compute type alone, where their masters are elsewhere: `compute` `[1, ≥ compute_len]`, and
    /// `rest` `[1, len − compute_len]`, the f32 of everything after them.
    pub fn without_masters(layout: &'a LayerLayout, rest: View<'a>, compute: View<'a>) -> Self {
        debug_assert_eq!(rest.cols(), layout.len - layout.compute_len, "flat buffer of another layer");
        debug_assert!(compute.cols() >= layout.compute_len, "compute copy of another layer");
        Self { layout, master: rest, master_start: layout.compute_len, compute: Some(compute) }
    }

    fn get(&self, part: Part) -> Option<View<'a>> {
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

    fn precise(&self, part: Part) -> Option<View<'a>> {
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
    /// What the adapter is.
    pub adapter: &'a Adapter,
    /// Which layer.
    pub layer: LayerId,
    /// Its parameters in this layer.
    pub weights: FlatLayer<'a>,
}

/// The low-rank terms of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct LowRank<'a> {
    /// The sites.
    pub(crate) sites: &'a [Site],
    /// The rank of each site's term.
    pub(crate) rank: usize,
    /// The factor on the terms.
    pub(crate) scale: f32,
    /// Rate at which inputs are dropped in training.
    pub(crate) dropout: f32,
    /// Tells this matrix from every other one of the model.
    pub(crate) place: u64,
    /// `[S·r, in]`.
    pub(crate) a: View<'a>,
    /// `[Σ rows of sites, r]`.
    pub(crate) b: View<'a>,
    /// `[1, Σ rows of sites]` f32, with DoRA.
    pub(crate) magnitude: Option<View<'a>>,
}

impl<'a> LayerWeights<'a> {
    /// Of a layer without an adapter.
    pub fn new(base: FlatLayer<'a>) -> Self {
        Self { base: Base::Flat(base), adapter: None }
    }

    /// Of a frozen layer without an adapter.
    pub fn packed(base: PackedLayer<'a>) -> Self {
        Self { base: Base::Packed(base), adapter: None }
    }

    /// The same base with this adapter, or none.
    #[must_use]
    pub fn with_adapter(self, adapter: Option<AdapterWeights<'a>>) -> Self {
        Self { adapter, ..self }
    }

    /// A parameter: in the compute type if it has a copy there, else f32. `None` if the layer has no such part.
    pub fn get(&self, part: Part) -> Option<View<'a>> {
        let own = self.adapter.and_then(|adapter| adapter.weights.get(part));
        own.or_else(|| match &self.base {
            Base::Flat(layer) => layer.get(part),
            Base::Packed(layer) => layer.get(part),
        })
    }

    /// The f32 master of a parameter, where there is one: what is looked up rather than multiplied loses nothing
    /// by staying f32. Falls back to the compute copy.
    pub fn precise(&self, part: Part) -> Option<View<'a>> {
        let own = self.adapter.and_then(|adapter| adapter.weights.precise(part));
        own.or_else(|| match &self.base {
            Base::Flat(layer) => layer.precise(part),
            Base::Packed(layer) => layer.get(part),
        })
    }

    /// As [`LayerWeights::get`], for a part that the spec guarantees.
    ///
    /// # Errors
    /// If the layer has no such part: the source returned another layer's weights.
    pub fn require(&self, part: Part) -> Result<View<'a>> {
        self.get(part).ok_or_else(|| ModelError::Invalid(format!("the weight source gave no {part:?}")))
    }

    /// The low-rank terms of a matrix, if it has some.
    pub(crate) fn low_rank(&self, part: Part) -> Option<LowRank<'a>> {
        let AdapterWeights { adapter, layer, weights } = self.adapter?;
        let sites = &adapter.of(part)?.sites[..];
        let parts = part.low_rank()?;
        Some(LowRank {
            sites,
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

/// The gradients of one layer: one flat f32 buffer that the walk adds into. Matrices may hold nothing yet: the first product
/// then writes them, which spares zeros, and reading them.
pub struct LayerGradients<'a> {
    layout: &'a LayerLayout,
    flat: ViewMut<'a>,
    /// By parameter, as the layout has them: whether it holds numbers. `None` if all do.
    holds: Option<&'a mut [bool]>,
}

impl<'a> LayerGradients<'a> {
    /// Over a flat f32 buffer `[1, len]`, laid out as what trains of the layer.
    pub fn new(layout: &'a LayerLayout, flat: ViewMut<'a>) -> Self {
        debug_assert_eq!(flat.cols(), layout.len, "gradient buffer of another layer");
        Self { layout, flat, holds: None }
    }

    /// The same, where `holds` tells of each parameter of the layout whether it holds numbers; it is kept true. All but those
    /// that [`Part::is_written_by_product`] do.
    pub fn partly(layout: &'a LayerLayout, flat: ViewMut<'a>, holds: &'a mut [bool]) -> Self {
        debug_assert_eq!(holds.len(), layout.params.len(), "gradients of another layer");
        Self { holds: Some(holds), ..Self::new(layout, flat) }
    }

    /// Whether a parameter holds numbers, to which a product is to be added; from now on it does.
    pub fn begin_product(&mut self, part: Part) -> bool {
        let index = self.layout.params.iter().position(|param| param.part == part);
        let holds = index.and_then(|index| self.holds.as_mut()?.get_mut(index));
        holds.is_none_or(|holds| std::mem::replace(holds, true))
    }

    /// Whether the layer has this part and it trains.
    pub fn trains(&self, part: Part) -> bool {
        self.layout.param(part).is_some()
    }

    /// The gradient of a matrix that a product goes into, and whether it is to be added to. `None` as in
    /// [`LayerGradients::get_mut`].
    pub fn product_mut(&mut self, part: Part) -> Option<(ViewMut<'_>, bool)> {
        let adds = self.begin_product(part);
        self.view_mut(part).map(|gradient| (gradient, adds))
    }

    /// The gradient of a parameter, to be added to. `None` if the layer has no such part or it does not train.
    ///
    /// # Panics
    /// If it holds nothing yet.
    pub fn get_mut(&mut self, part: Part) -> Option<ViewMut<'_>> {
        assert!(self.begin_product(part), "the first product of {part:?} writes it");
        self.view_mut(part)
    }

    fn view_mut(&mut self, part: Part) -> Option<ViewMut<'_>> {
        let param = self.layout.param(part)?;
        Some(self.flat.reborrow().col_range(param.range()).reshape(param.rows, param.cols))
    }

    /// Two parameters at once, for kernels that add to both; each is `None` as in [`LayerGradients::get_mut`].
    /// `first` lies before `second` in the layout, as weights do before their biases.
    pub fn each_mut(&mut self, first: Part, second: Part) -> (Option<ViewMut<'_>>, Option<ViewMut<'_>>) {
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

/// Where weights come from: resident, gathered from shards, uploaded from the host.
pub trait WeightSource {
    /// Announces that `layer` will be fetched soon. May do nothing.
    ///
    /// # Errors
    /// If the layer cannot be had.
    fn prefetch(&mut self, layer: LayerId) -> Result<()>;

    /// The layer's weights, valid until the next call.
    ///
    /// # Errors
    /// If the layer cannot be had.
    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>>;

    /// The layer's weights as the reference has them, where it shares the base: fetched together with
    /// [`WeightSource::fetch`]'s.
    ///
    /// # Errors
    /// If the layer cannot be had, or the reference has weights of its own.
    fn fetch_both(&mut self, layer: LayerId) -> Result<(LayerWeights<'_>, LayerWeights<'_>)> {
        Err(ModelError::Invalid(format!(
            "the reference shares no weights with the policy, not the {layer}'s either"
        )))
    }

    /// The walk is done with this layer for now.
    fn release(&mut self, layer: LayerId);

    /// Nothing is fetched for a while: what was brought need not stay. May do nothing.
    fn rest(&mut self) {}
}

/// Where gradients go: an accumulator, a reduction, the host.
///
/// The walk opens a layer (more than once, if need be), adds to what it got, and emits it before it opens another; layers
/// come from last to first. With a tied head the
/// embedding layer comes twice: first for the head's share of the token table, last for the look-up's.
pub trait GradientSink {
    /// A buffer to add the layer's gradients to.
    ///
    /// # Errors
    /// If there is no room for it.
    fn open(&mut self, layer: LayerId) -> Result<LayerGradients<'_>>;

    /// The layer's gradients of this walk are complete (see the trait for a tied table).
    ///
    /// # Errors
    /// If they cannot be taken.
    fn emit(&mut self, layer: LayerId) -> Result<()>;
}
