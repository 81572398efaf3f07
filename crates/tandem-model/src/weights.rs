//! Where weights come from and where gradients go, as the walk sees it.

use tandem_kernels::{View, ViewMut};

use crate::layout::{LayerId, LayerLayout, Part};
use crate::{ModelError, Result};

/// The weights of one layer, borrowed from a source for as long as the layer runs.
#[derive(Clone, Copy)]
pub struct LayerWeights<'a> {
    layout: &'a LayerLayout,
    /// f32 `[1, len − master_start]`.
    master: View<'a>,
    master_start: usize,
    /// Compute type `[1, ≥ compute_len]`.
    compute: Option<View<'a>>,
}

impl<'a> LayerWeights<'a> {
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

    /// Over matrices in the compute type alone, for weights that do not train: `compute` `[1, ≥ compute_len]`, and
    /// `rest` `[1, len − compute_len]`, the f32 of everything after them.
    pub fn frozen(layout: &'a LayerLayout, rest: View<'a>, compute: View<'a>) -> Self {
        debug_assert_eq!(rest.cols(), layout.len - layout.compute_len, "flat buffer of another layer");
        debug_assert!(compute.cols() >= layout.compute_len, "compute copy of another layer");
        Self { layout, master: rest, master_start: layout.compute_len, compute: Some(compute) }
    }

    /// A parameter: in the compute type if it has a copy there, else f32. `None` if the layer has no such part.
    pub fn get(&self, part: Part) -> Option<View<'a>> {
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

    /// The f32 master of a parameter, where there is one: what is looked up rather than multiplied loses nothing
    /// by staying f32. Falls back to the compute copy.
    pub fn precise(&self, part: Part) -> Option<View<'a>> {
        let param = self.layout.param(part)?;
        if self.master_start > param.offset {
            return self.get(part);
        }
        let start = param.offset - self.master_start;
        Some(self.master.col_range(start..start + param.len()).reshape(param.rows, param.cols))
    }

    /// As [`LayerWeights::get`], for a part that the spec guarantees.
    ///
    /// # Errors
    /// If the layer has no such part: the source returned another layer's weights.
    pub fn require(&self, part: Part) -> Result<View<'a>> {
        self.get(part).ok_or_else(|| ModelError::Invalid(format!("the weight source gave no {part:?}")))
    }
}

/// The gradients of one layer: one flat f32 buffer that the walk adds into.
pub struct LayerGradients<'a> {
    layout: &'a LayerLayout,
    flat: ViewMut<'a>,
    frozen: u32,
}

impl<'a> LayerGradients<'a> {
    /// Over a flat f32 buffer `[1, len]`; every parameter trains.
    pub fn new(layout: &'a LayerLayout, flat: ViewMut<'a>) -> Self {
        debug_assert_eq!(flat.cols(), layout.len, "gradient buffer of another layer");
        Self { layout, flat, frozen: 0 }
    }

    /// Marks parts that do not train: no gradient is computed for them.
    #[must_use]
    pub fn freeze(mut self, parts: &[Part]) -> Self {
        self.frozen = parts.iter().fold(self.frozen, |mask, &part| mask | 1 << part as u32);
        self
    }

    /// Whether the layer has this part and it trains.
    pub fn trains(&self, part: Part) -> bool {
        self.frozen & (1 << part as u32) == 0 && self.layout.param(part).is_some()
    }

    /// The gradient of a parameter, to be added to. `None` if the layer has no such part or it does not train.
    pub fn get_mut(&mut self, part: Part) -> Option<ViewMut<'_>> {
        if !self.trains(part) {
            return None;
        }
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

    /// The walk is done with this layer for now.
    fn release(&mut self, layer: LayerId);
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
