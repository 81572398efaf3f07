//! The gradient of the whole model, summed over the micro-batches of a step and over ranks.
//!
//! `exact`: a layer's f32 gradient of one micro-batch forms in a shared buffer and is added to
//! 64-bit fixed-point sums ([`tandem_kernels::exact`]). Integer addition has no order, so neither
//! the division into ranks nor the engine changes a bit. `fast`: gradients are added in f32 in
//! place, with half the memory and traffic, but the last bits depend on the division.
//!
//! With sharded sums, a layer is reduced when emitted and added when the next one is, so its
//! reduction overlaps backward.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::{CollectiveBuffer, ProcessGroup, Reduction};
use tandem_kernels::exact::{FixedPointSum, limit};
use tandem_kernels::ops::Gradient;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};
use tandem_model::{
    Decoder, GradientSink, LayerGradients, LayerId, LayerLayout, ParamSpec, Result as ModelResult,
};

use crate::Result;
use crate::config::SumForm;
use crate::gradients::reducer::{Buffer, Reducer, Terms};
use crate::parallel::{DeviceMesh, Partition, collective_buffer};
use crate::placement::MemoryPlacement;

/// Gradient sums, laid out like the weights.
pub struct Accumulator {
    /// Device of gradient computation.
    pub(super) device: Device,
    /// Device of the sums.
    pub(super) home: Device,
    pub(super) decoder: Arc<Decoder>,
    pub(super) partition: Arc<Partition>,
    /// Present if only this rank's part of the sums is held.
    pub(super) sharded: Option<Reducer>,
    pub(super) sums: Sums,
    /// Layer whose gradient is in the shared buffer.
    open: Option<LayerId>,
    /// Per parameter of that layer: whether the buffer holds values.
    holds: Vec<bool>,
    /// Per layer: whether its sums hold values of this step.
    begun: Vec<bool>,
    /// The largest magnitude that one micro-batch's gradient may have (exact form).
    limit: f32,
    /// Per layer: elements whose squares this rank sums for the norm.
    counted: Vec<Vec<Range<usize>>>,
}

pub(super) enum Sums {
    Exact {
        /// A layer's gradient of one micro-batch `[1, longest layer]`.
        layer: Tensor,
        sums: Vec<FixedPointSum>,
    },
    Fast {
        /// Shared buffer; absent where gradients are added in place.
        layer: Option<Tensor>,
        sums: Vec<Tensor>,
    },
}

impl Sums {
    /// Range of a layer's held sums.
    fn range<'a>(
        &'a mut self,
        device: &'a Device,
        index: usize,
        range: Range<usize>,
    ) -> CollectiveBuffer<'a> {
        match self {
            Self::Exact { sums, .. } => collective_buffer::fixed(device, &mut sums[index], range),
            Self::Fast { sums, .. } => collective_buffer::floats(device, &mut sums[index], range),
        }
    }

    /// Makes a layer zero that nothing was added to; sums in f32 begin so.
    fn clear(&mut self, device: &Device, index: usize) -> Result<()> {
        match self {
            Self::Exact { sums, .. } => Ok(sums[index].clear(device)?),
            Self::Fast { .. } => Ok(()),
        }
    }
}

impl Accumulator {
    /// Allocates the sums on the placement's device. After reduction this rank holds its shard's;
    /// with `sharded`, a group of its own, it never holds more.
    pub fn new(
        placement: &MemoryPlacement,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        sharded: Option<ProcessGroup>,
        form: SumForm,
    ) -> Result<Self> {
        let sharded = sharded.filter(|group| group.size() > 1);
        let layers = 0..partition.num_layers();
        let lengths = layers.clone().map(|layer| partition.len(layer));
        let longest = lengths.max().unwrap_or(0);
        let held = layers.map(|layer| match sharded {
            Some(_) => partition.owned(layer).len(),
            None => partition.len(layer),
        });
        let (device, home) = (&placement.device, placement.gradient_device());
        let floats = |device: &Device, len| device.alloc(MemoryKind::Gradients, 1, len, DType::F32);
        let fixed = |device: &Device, len| FixedPointSum::new(device, MemoryKind::Gradients, len);
        let forms_apart = sharded.is_some() || placement.is_offloaded();
        let sums = match form {
            SumForm::Fast => Sums::Fast {
                layer: forms_apart.then(|| floats(device, longest)).transpose()?,
                sums: held.map(|len| floats(home, len)).collect::<Result<_, _>>()?,
            },
            SumForm::Exact => Sums::Exact {
                layer: floats(device, longest)?,
                sums: held.map(|len| fixed(home, len)).collect::<Result<_, _>>()?,
            },
        };
        let reducer = |group| {
            let room = match form {
                SumForm::Fast => Buffer::Floats(floats(device, longest)?),
                SumForm::Exact => Buffer::Fixed(fixed(device, longest)?),
            };
            Reducer::new(device, partition.clone(), group, room)
        };
        let sharded = sharded.map(reducer).transpose()?;
        let begun = vec![false; partition.num_layers()];
        let (device, home) = (device.clone(), home.clone());
        let counted = decoder.layers().into_iter().map(|layer| counted(&decoder, layer)).collect();
        Ok(Self {
            device,
            home,
            decoder,
            partition,
            sharded,
            sums,
            open: None,
            holds: Vec::new(),
            begun,
            limit: 0.0,
            counted,
        })
    }

    /// Zeroes the sums. `num_micro_batches` counts those of all ranks.
    ///
    /// # Errors
    /// The last step was aborted and a rank is lost.
    pub fn begin(&mut self, num_micro_batches: usize) -> Result<()> {
        self.finish_pending()?;
        self.begun.fill(false);
        self.open = None;
        // A tied table is emitted twice.
        self.limit = limit(2 * num_micro_batches);
        // Pending overflow flag of an earlier step.
        self.device.take_in_range()?;
        if let Sums::Fast { sums, .. } = &mut self.sums {
            for layer in sums {
                ops::fill_zero(&self.home, layer.view_mut())?;
            }
        }
        Ok(())
    }

    /// Returns whether every gradient since [`Accumulator::begin`] or the last call was finite and
    /// in range of the sums.
    ///
    /// # Errors
    /// A GPU operation failed.
    pub fn take_in_range(&self) -> Result<bool> {
        Ok(self.device.take_in_range()?)
    }

    /// Reduces the sums over all ranks; afterwards every rank holds its shard's.
    pub fn reduce(&mut self, mesh: &mut DeviceMesh) -> Result<ReducedGradients<'_>> {
        self.finish_pending()?;
        let (shard, mut replicas) = mesh.reduction_groups();
        let Self { home, partition, sums, begun, sharded, .. } = self;
        for (index, begun) in begun.iter().enumerate() {
            if !begun {
                sums.clear(home, index)?;
            }
            let mut own = 0..partition.owned(index).len();
            // Sharded sums were reduced when emitted.
            if sharded.is_none() {
                let whole = sums.range(home, index, 0..partition.len(index));
                if partition.is_divided() {
                    shard.reduce_scatter_numbers(whole, partition.counts(index), Reduction::Sum)?;
                } else if shard.size() > 1 {
                    shard.all_reduce_numbers(whole, Reduction::Sum)?;
                }
                own = partition.owned(index);
            }
            if let Some(replicas) = &mut replicas {
                replicas.all_reduce_numbers(sums.range(home, index, own), Reduction::Sum)?;
            }
        }
        self.join_tied(mesh.stages())?;
        Ok(ReducedGradients(self))
    }

    /// The gradient of this rank's part of a layer, by the layer's place in walk order.
    pub fn owned(&self, index: usize) -> Gradient<'_> {
        let held: Gradient = match &self.sums {
            Sums::Exact { sums, .. } => sums[index].view().into(),
            Sums::Fast { sums, .. } => sums[index].view().into(),
        };
        if self.sharded.is_some() { held } else { held.range(self.partition.owned(index)) }
    }

    fn norm(&self, mesh: &mut DeviceMesh) -> Result<f64> {
        let mut parts = Vec::new();
        for (index, ranges) in self.counted.iter().enumerate() {
            let (owned, gradient) = (self.partition.owned(index), self.owned(index));
            for range in ranges {
                let (start, end) = (range.start.max(owned.start), range.end.min(owned.end));
                if start < end {
                    parts.push(gradient.range(start - owned.start..end - owned.start));
                }
            }
        }
        let own = ops::block_squares(&self.home, &parts)?;
        Ok(mesh.sum_squares(own, self.partition.is_divided())?.value().sqrt())
    }
}

/// Sums that are reduced over all ranks.
pub struct ReducedGradients<'a>(&'a mut Accumulator);

impl ReducedGradients<'_> {
    /// The gradient's global L2 norm; not finite if an element is not. Squares are added as integers, so
    /// the bits do not depend on the division of the gradient.
    pub fn norm(self, mesh: &mut DeviceMesh) -> Result<f64> {
        self.0.norm(mesh)
    }
}

/// Elements whose squares this rank sums: its own shard's; the first tensor rank adds replicated
/// ones. The first of two stages counts a tied table.
fn counted(decoder: &Decoder, layer: LayerId) -> Vec<Range<usize>> {
    let (layout, slice) = (decoder.trained(layer), decoder.slice());
    if !decoder.owns(layer) {
        return Vec::new();
    }
    if slice.index == 0 {
        let all = 0..layout.len;
        return vec![all];
    }
    layout.params.iter().filter(|param| slice.splits(param.part)).map(ParamSpec::range).collect()
}

impl Accumulator {
    /// Starts reducing the shared buffer over all ranks.
    fn emit_sharded(&mut self, index: usize) -> ModelResult<()> {
        self.finish_pending()?;
        let Some(reducer) = &mut self.sharded else { return Ok(()) };
        match (&mut self.sums, reducer.room()) {
            (Sums::Exact { layer, .. }, Buffer::Fixed(terms)) => {
                let gradient = layer.view().col_range(0..self.partition.len(index));
                ops::exact_sum(&self.device, gradient, terms, false, self.limit)?;
            }
            (Sums::Fast { layer: Some(layer), .. }, Buffer::Floats(terms)) => std::mem::swap(layer, terms),
            _ => unreachable!("{FORMS}"),
        }
        reducer.begin(index);
        Ok(())
    }

    /// Waits for the reduction of [`Accumulator::emit_sharded`] and adds this rank's part.
    fn finish_pending(&mut self) -> ModelResult<()> {
        let Self { home, partition, sharded: Some(reducer), sums, begun, .. } = self else { return Ok(()) };
        reducer.end(|Terms { index, buffer }| {
            let owned = partition.owned(*index);
            let add = std::mem::replace(&mut begun[*index], true);
            match (sums, buffer) {
                (Sums::Exact { sums, .. }, Buffer::Fixed(terms)) => {
                    ops::exact_merge(home, terms.view().range(owned), &mut sums[*index], add)?;
                }
                (Sums::Fast { sums, .. }, Buffer::Floats(terms)) => {
                    ops::add(home, terms.view().col_range(owned), sums[*index].view_mut())?;
                }
                _ => unreachable!("{FORMS}"),
            }
            Ok(())
        })
    }
}

/// Buffer ranges that no matmul writes: other parameters and padding.
fn unwritten(layout: &LayerLayout) -> impl Iterator<Item = Range<usize>> {
    let ends = layout.params.iter().skip(1).map(|next| next.offset).chain([layout.len]);
    layout.params.iter().zip(ends).map(|(param, end)| {
        let Range { start, end: filled } = param.range();
        if param.part.is_written_by_product() { filled..end } else { start..end }
    })
}

/// Makes ranges of a buffer zero, neighbours together.
fn clear(
    device: &Device,
    buffer: &mut Tensor,
    ranges: impl Iterator<Item = Range<usize>>,
) -> ModelResult<()> {
    let mut ranges = ranges.filter(|range| !range.is_empty()).peekable();
    while let Some(mut range) = ranges.next() {
        while let Some(next) = ranges.next_if(|next| next.start == range.end) {
            range.end = next.end;
        }
        ops::fill_zero(device, buffer.view_mut().col_range(range))?;
    }
    Ok(())
}

const FORMS: &str = "terms are of the form of the sums";

impl GradientSink for Accumulator {
    fn open(&mut self, layer: LayerId) -> ModelResult<LayerGradients<'_>> {
        let layout = self.decoder.trained(layer);
        // A layer may be opened again before it is emitted, to be added to.
        let is_new = self.open.replace(layer) != Some(layer);
        match &mut self.sums {
            Sums::Fast { layer: None, sums } => {
                Ok(LayerGradients::new(layout, sums[self.decoder.index(layer)].view_mut()))
            }
            Sums::Exact { layer: buffer, .. } | Sums::Fast { layer: Some(buffer), .. } => {
                if is_new {
                    self.holds.clear();
                    self.holds.extend(layout.params.iter().map(|param| !param.part.is_written_by_product()));
                    clear(&self.device, buffer, unwritten(layout))?;
                }
                Ok(LayerGradients::partly(
                    layout,
                    buffer.view_mut().col_range(0..layout.len),
                    &mut self.holds,
                ))
            }
        }
    }

    fn emit(&mut self, layer: LayerId) -> ModelResult<()> {
        let index = self.decoder.index(layer);
        if self.open.take() == Some(layer)
            && let Sums::Exact { layer: buffer, .. } | Sums::Fast { layer: Some(buffer), .. } = &mut self.sums
        {
            // Zero contribution of a rank without a micro-batch.
            let params = self.decoder.trained(layer).params.iter().zip(&self.holds);
            clear(
                &self.device,
                buffer,
                params.filter(|(_, holds)| !**holds).map(|(param, _)| param.range()),
            )?;
        }
        if self.sharded.is_some() {
            return self.emit_sharded(index);
        }
        match &mut self.sums {
            Sums::Exact { layer: buffer, sums } => {
                let terms = buffer.view().col_range(0..sums[index].len());
                ops::exact_sum(&self.home, terms, &mut sums[index], self.begun[index], self.limit)?;
            }
            Sums::Fast { layer: Some(buffer), sums } => {
                let terms = buffer.view().col_range(0..sums[index].cols());
                ops::add(&self.home, terms, sums[index].view_mut())?;
            }
            Sums::Fast { layer: None, .. } => {}
        }
        self.begun[index] = true;
        Ok(())
    }
}
