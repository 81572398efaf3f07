//! The gradient of the whole model, summed over the micro-batches of a step and over ranks.
//!
//! `exact`: a layer's f32 gradient of one micro-batch forms in a shared buffer and is added to
//! 64-bit fixed-point sums ([`tandem_kernels::exact`]). Integer addition has no order, so neither
//! the division into ranks nor the engine changes a bit. `fast`: gradients are added in f32 in
//! place, with half the memory and traffic, but the last bits depend on the division.
//!
//! If the step's only micro-batch belongs to a rank that has all sums to itself, the gradient forms in the
//! memory of the sums and stays f32; the optimizer rounds it as a sum of one term. With several, such a rank
//! squares the sums for the norm while it adds the last gradient, on a CPU.
//!
//! If no step of the run has more than one, such a rank holds no sums: a layer's f32 gradient is allocated
//! when backward comes to the layer, whose activations are freed then, and freed after the update. A tied
//! table holds the head's term first; the look-up adds its own in fixed point to the rows that it reads.
//!
//! Layers travel in buckets ([`Partition`]), and reductions overlap backward. Where a rank holds its
//! part of the sums, the gradient of every micro-batch is reduced, and added when the next bucket
//! begins. Sums that change no more are reduced during the last backward pass, from the last bucket to
//! the first: over the data group where ranks hold them whole, and over the replicas of a part.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::exact::limit;
use tandem_kernels::ops::Gradient;
use tandem_kernels::{Backend, DType, Device, MemoryKind, SquareSum, Tensor, ViewMut, ops};
use tandem_model::{
    Decoder, GradientSink, LayerGradients, LayerId, LayerLayout, ParamSpec, Result as ModelResult,
};

use crate::Result;
use crate::config::SumForm;
use crate::gradients::buffer::{Buffer, Wire};
use crate::gradients::reducer::{Bucket, MicroBatchReducer, SumReducer};
use crate::parallel::{DeviceMesh, Partition};
use crate::placement::MemoryPlacement;

/// Gradient sums, laid out like the weights.
pub struct Accumulator {
    /// Device of gradient computation.
    pub(super) device: Device,
    /// Device of the sums.
    pub(super) home: Device,
    pub(super) decoder: Arc<Decoder>,
    pub(super) partition: Arc<Partition>,
    form: SumForm,
    /// A layer's gradient of one micro-batch `[1, N]`; absent where it forms in the memory of the sums.
    layer: Option<Tensor>,
    /// Per bucket: this rank's part, or all of it; `None` while it is reduced, and before backward comes to
    /// it if it is transient. Floats in exact form are the only terms of their sums.
    sums: Vec<Option<Buffer>>,
    /// True if gradients are allocated in backward and freed after the update: this rank is alone, and no
    /// step has a second micro-batch.
    is_transient: bool,
    /// Present if only this rank's part of the sums is held.
    of_micro_batch: Option<MicroBatchReducer>,
    /// Present if sums are reduced once a step.
    of_sums: Option<SumReducer>,
    /// Layer whose gradient is in the shared buffer.
    open: Option<LayerId>,
    /// Per parameter of that layer: whether the buffer holds values.
    holds: Vec<bool>,
    /// Per layer: whether its sums hold values of this step.
    begun: Vec<bool>,
    /// In the last backward pass of a step: the first layers, whose sums still change.
    unfinished: Option<usize>,
    /// Whether the last pass began the reduction of a micro-batch's bucket that is waited for next: the one before
    /// leaves its first bucket's to it.
    is_pending_of_last: bool,
    /// The first buckets, whose reduction has not begun.
    unreduced: usize,
    /// The largest magnitude that one micro-batch's gradient may have (exact form).
    limit: f32,
    /// Per layer: elements whose squares this rank sums for the norm.
    counted: Vec<Vec<Range<usize>>>,
    /// Per layer: whether some elements are frozen.
    has_frozen: Vec<bool>,
    /// True if nobody changes the sums after this rank's last micro-batch, on the device that computes.
    is_alone: bool,
    /// True if this step's only micro-batch is this rank's, which is alone.
    is_single: bool,
    /// Per layer: the squares of complete sums, if known.
    squares: Vec<Option<SquareSum>>,
}

/// Groups of ranks that reduce gradients while others compute, for nothing else.
pub struct ReductionGroups {
    /// The ranks that hold parts of the sums, and reduce the gradient of every micro-batch.
    pub of_parts: Option<ProcessGroup>,
    /// The ranks that hold all sums, and reduce them once a step.
    pub of_all: Option<ProcessGroup>,
    /// The ranks that hold the same part in the end.
    pub replicas: Option<ProcessGroup>,
}

/// Form of the sums.
#[derive(Clone, Copy, Debug)]
pub struct SumOptions {
    /// How gradients are added.
    pub form: SumForm,
    /// Type in which sums in f32 travel.
    pub wire: DType,
    /// Whether no step is expected to have more than one micro-batch, of all ranks: a rank that is alone then
    /// allocates gradients when they form.
    pub single_micro_batches: bool,
}

impl Accumulator {
    /// Allocates the sums on the placement's device. After reduction this rank holds its shard's;
    /// if a group holds parts it never holds more. The norm leaves out the `frozen` elements of each layer.
    pub fn new(
        placement: &MemoryPlacement,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        groups: ReductionGroups,
        options: SumOptions,
        frozen: Vec<Vec<Range<usize>>>,
    ) -> Result<Self> {
        let SumOptions { form, wire, single_micro_batches } = options;
        let with_peers = |group: Option<ProcessGroup>| group.filter(|group| group.size() > 1);
        let [of_parts, of_all, replicas] = [groups.of_parts, groups.of_all, groups.replicas].map(with_peers);
        let (device, home) = (placement.device.clone(), placement.gradient_device().clone());
        let buckets = (0..partition.buckets().len()).map(|bucket| partition.bucket_len(bucket));
        let longest_bucket = buckets.max().unwrap_or(0);
        let wire = |device: &Device| Wire::new(device, form, wire, longest_bucket);
        let is_alone = of_parts.is_none()
            && of_all.is_none()
            && replicas.is_none()
            && decoder.stage().count == 1
            && decoder.slice().count == 1
            && !placement.is_offloaded();
        let is_transient = is_alone && single_micro_batches;
        let (mut layer, mut sums) = (None, (0..partition.buckets().len()).map(|_| None).collect());
        if !is_transient {
            let is_in_place = form == SumForm::Fast && of_parts.is_none() && !placement.is_offloaded();
            layer = (!is_in_place).then(|| layer_buffer(&device, &partition)).transpose()?;
            let held = (0..partition.buckets().len()).map(|bucket| match of_parts {
                Some(_) => partition.bucket_owned(bucket).len(),
                None => partition.bucket_len(bucket),
            });
            sums = held.map(|len| Buffer::new(&home, form, len).map(Some)).collect::<Result<_>>()?;
        }
        let of_micro_batch = match of_parts {
            Some(group) => {
                let room = Buffer::new(&device, form, longest_bucket)?;
                let wire = wire(&device)?;
                Some(MicroBatchReducer::new(&device, partition.clone(), group, wire, room)?)
            }
            None => None,
        };
        let of_sums = if of_all.is_some() || replicas.is_some() {
            Some(SumReducer::new(&home, partition.clone(), of_all, replicas, wire(&home)?)?)
        } else {
            None
        };
        let layers = decoder.layers().into_iter().zip(&frozen);
        let counted = layers.map(|(layer, frozen)| without(counted(&decoder, layer), frozen)).collect();
        Ok(Self {
            form,
            is_transient,
            is_alone,
            is_single: false,
            squares: vec![None; partition.num_layers()],
            device,
            home,
            decoder,
            layer,
            sums,
            of_micro_batch,
            of_sums,
            open: None,
            holds: Vec::new(),
            begun: vec![false; partition.num_layers()],
            unfinished: None,
            is_pending_of_last: false,
            unreduced: partition.buckets().len(),
            partition,
            limit: 0.0,
            counted,
            has_frozen: frozen.iter().map(|frozen| !frozen.is_empty()).collect(),
        })
    }

    /// Zeroes the sums. `num_micro_batches` counts those of all ranks.
    ///
    /// # Errors
    /// The last step was aborted and a rank is lost; memory is missing for sums of several micro-batches that
    /// were not expected.
    pub fn begin(&mut self, num_micro_batches: usize) -> Result<()> {
        self.finish_pending()?;
        self.take_reduced()?;
        self.begun.fill(false);
        self.squares.fill(None);
        let stays_f32 = self.form == SumForm::Exact || self.is_transient;
        self.is_single = self.is_alone && stays_f32 && num_micro_batches == 1;
        self.open = None;
        self.unfinished = None;
        self.unreduced = self.partition.buckets().len();
        // A tied table is emitted twice.
        self.limit = limit(2 * num_micro_batches);
        // Pending overflow flag of an earlier step.
        self.device.take_in_range()?;
        self.release();
        if self.is_transient && !self.is_single {
            // Not planned for, but right.
            let sums =
                (0..self.unreduced).map(|b| Buffer::new(&self.home, self.form, self.partition.bucket_len(b)));
            self.sums = sums.map(|sums| sums.map(Some)).collect::<Result<_>>()?;
            if self.form == SumForm::Exact {
                self.layer = Some(layer_buffer(&self.device, &self.partition)?);
            }
        }
        if self.adds_in_place() {
            for bucket in 0..self.unreduced {
                let all = 0..self.partition.bucket_len(bucket);
                held(&mut self.sums, bucket).clear(&self.home, all)?;
            }
        }
        Ok(())
    }

    /// Frees gradients that are held from backward to the update only. After the update, or if there is
    /// none.
    pub fn release(&mut self) {
        if self.is_transient {
            self.layer = None;
            self.sums.fill_with(|| None);
        }
    }

    /// Returns whether every gradient is added to the sums where they are, in f32.
    fn adds_in_place(&self) -> bool {
        self.layer.is_none() && !self.is_single
    }

    /// Tells that the next backward pass is this rank's last of the step: a bucket that it completes
    /// is reduced over ranks while backward goes on.
    pub fn begin_last_pass(&mut self) {
        self.unfinished = Some(self.partition.num_layers());
    }

    /// Returns whether every gradient since [`Accumulator::begin`] or the last call was finite and
    /// in range of the sums.
    ///
    /// # Errors
    /// A GPU operation failed.
    pub fn take_in_range(&self) -> Result<bool> {
        Ok(self.device.take_in_range()?)
    }

    /// Begins all reductions that no backward pass of this rank has begun, and waits for none.
    pub fn begin_reduction(&mut self) -> Result<()> {
        self.finish_pending()?;
        while self.unreduced > 0 {
            self.reduce_next()?;
        }
        Ok(())
    }

    /// Reduces the sums over all ranks; afterwards every rank holds its shard's.
    pub fn reduce(&mut self, mesh: &DeviceMesh) -> Result<ReducedGradients<'_>> {
        self.begin_reduction()?;
        self.take_reduced()?;
        self.join_tied(mesh.stages())?;
        Ok(ReducedGradients(self))
    }

    /// The gradient of this rank's part of a layer, by the layer's place in walk order.
    pub fn owned(&self, index: usize) -> Gradient<'_> {
        let (bucket, place) = (self.partition.bucket_of(index), self.owned_place(index));
        match self.sums[bucket].as_ref().expect(AWAY) {
            Buffer::Fixed(sums) if self.begun[index] && self.is_term(index) => {
                Gradient::Terms(sums.view().range(place).terms())
            }
            Buffer::Floats(terms) if self.form == SumForm::Exact => {
                Gradient::Terms(terms.view().col_range(place))
            }
            sums => sums.gradient(place),
        }
    }

    /// Returns whether a layer's gradient of this step stays f32. That of a tied table, which is emitted
    /// twice, does if it is transient.
    fn is_term(&self, index: usize) -> bool {
        self.is_single && (self.is_transient || !self.is_tied(index))
    }

    /// Returns whether a layer has a tied table, and is emitted twice.
    fn is_tied(&self, index: usize) -> bool {
        let table = LayerId::Embedding;
        self.decoder.spec().head.tied && self.decoder.holds(table) && index == self.decoder.index(table)
    }

    /// Allocates the transient gradient of a layer's bucket, if that is not done.
    fn allocate(&mut self, index: usize) -> ModelResult<()> {
        let bucket = self.partition.bucket_of(index);
        if self.is_transient && self.sums[bucket].is_none() {
            let len = self.partition.bucket_len(bucket);
            let terms = self.home.alloc(MemoryKind::Gradients, 1, len, DType::F32)?;
            self.sums[bucket] = Some(Buffer::Floats(terms));
        }
        Ok(())
    }

    /// Where this rank's part of a layer is in the sums of the layer's bucket.
    pub(super) fn owned_place(&self, index: usize) -> Range<usize> {
        if self.of_micro_batch.is_some() {
            return self.partition.owned_place(index);
        }
        let (start, owned) = (self.partition.place(index).start, self.partition.owned(index));
        start + owned.start..start + owned.end
    }

    /// The sums of a layer's bucket.
    pub(super) fn bucket_of(&mut self, index: usize) -> &mut Buffer {
        held(&mut self.sums, self.partition.bucket_of(index))
    }

    fn norm(&self, mesh: &mut DeviceMesh) -> Result<f64> {
        let (mut parts, mut known) = (Vec::new(), SquareSum::default());
        for (index, ranges) in self.counted.iter().enumerate() {
            if let Some(squares) = &self.squares[index] {
                known.add(squares);
                continue;
            }
            let (owned, gradient) = (self.partition.owned(index), self.owned(index));
            for range in ranges {
                let (start, end) = (range.start.max(owned.start), range.end.min(owned.end));
                if start < end {
                    parts.push(gradient.range(start - owned.start..end - owned.start));
                }
            }
        }
        let mut own = ops::block_squares(&self.home, &parts)?;
        own.add(&known);
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

/// Ranges without those that `left_out`, in order, has.
fn without(ranges: Vec<Range<usize>>, left_out: &[Range<usize>]) -> Vec<Range<usize>> {
    let cut = |ranges: Vec<Range<usize>>, out: &Range<usize>| {
        let parts = |range: Range<usize>| {
            [range.start..range.end.min(out.start), range.start.max(out.end)..range.end]
        };
        ranges.into_iter().flat_map(parts).filter(|part| part.start < part.end).collect()
    };
    left_out.iter().fold(ranges, cut)
}

/// The sums of a bucket.
fn held(sums: &mut [Option<Buffer>], bucket: usize) -> &mut Buffer {
    sums[bucket].as_mut().expect(AWAY)
}

const AWAY: &str = "sums change and are read only while they are not reduced";

impl Accumulator {
    /// Adds the micro-batch's gradient of a layer to the bucket that is reduced next, and begins with
    /// the bucket's last layer.
    fn emit_part(&mut self, index: usize) -> ModelResult<()> {
        let bucket = self.partition.bucket_of(index);
        let layers = self.partition.buckets()[bucket].clone();
        if index + 1 == layers.end {
            self.finish_pending()?;
        }
        let (Some(reducer), Some(layer)) = (&mut self.of_micro_batch, &self.layer) else { return Ok(()) };
        let gradient = layer.view().col_range(0..self.partition.len(index));
        reducer.room().put(&self.device, gradient, self.partition.place(index), false, self.limit)?;
        if index == layers.start {
            reducer.begin(bucket);
            self.is_pending_of_last = self.unfinished.is_some();
        }
        Ok(())
    }

    /// Waits for the reduction of [`Accumulator::emit_part`] and adds this rank's part.
    fn finish_pending(&mut self) -> ModelResult<()> {
        let Self { home, partition, of_micro_batch: Some(reducer), sums, begun, .. } = self else {
            return Ok(());
        };
        let mut reduced = None;
        reducer.end(|Bucket { index, sums: terms }| {
            let layers = partition.buckets()[*index].clone();
            let add = begun[layers.start];
            held(sums, *index).merge(home, terms, partition.bucket_owned(*index), add)?;
            begun[layers.clone()].fill(true);
            reduced = Some(layers);
            Ok(())
        })?;
        let complete = reduced.filter(|_| self.is_pending_of_last);
        complete.into_iter().flat_map(Range::rev).try_for_each(|index| self.complete(index))
    }

    /// Notes that a layer's gradient of the micro-batch is added, and begins the reduction of a bucket
    /// whose sums change no more. A tied table, emitted for the head as well, is completed at the end.
    fn complete(&mut self, index: usize) -> ModelResult<()> {
        let Some(unfinished) = &mut self.unfinished else { return Ok(()) };
        if index + 1 != *unfinished {
            return Ok(());
        }
        *unfinished = index;
        if self.partition.buckets()[self.unreduced - 1].start == index { self.reduce_next() } else { Ok(()) }
    }

    /// Begins the reduction of the last bucket that is not reduced yet.
    fn reduce_next(&mut self) -> ModelResult<()> {
        self.unreduced -= 1;
        let index = self.unreduced;
        // A layer without a gradient has one of zeros.
        self.allocate(self.partition.buckets()[index].start)?;
        let Self { home, partition, of_micro_batch, of_sums, sums, begun, .. } = self;
        let place = |layer| match of_micro_batch {
            Some(_) => partition.owned_place(layer),
            None => partition.place(layer),
        };
        for layer in partition.buckets()[index].clone().filter(|&layer| !begun[layer]) {
            held(sums, index).clear(home, place(layer))?;
        }
        if let Some(reducer) = of_sums
            && partition.bucket_len(index) > 0
        {
            reducer.begin(Bucket { index, sums: sums[index].take().expect(AWAY) });
        }
        Ok(())
    }

    /// Waits for all reductions of sums.
    fn take_reduced(&mut self) -> ModelResult<()> {
        let Self { of_sums: Some(reducer), sums, .. } = self else { return Ok(()) };
        reducer.end(|bucket| sums[bucket.index] = Some(bucket.sums))
    }
}

/// Allocates memory in which any layer's gradient of one micro-batch forms.
fn layer_buffer(device: &Device, partition: &Partition) -> Result<Tensor> {
    let longest = (0..partition.num_layers()).map(|layer| partition.len(layer)).max().unwrap_or(0);
    Ok(device.alloc(MemoryKind::Gradients, 1, longest, DType::F32)?)
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
    mut buffer: ViewMut,
    ranges: impl Iterator<Item = Range<usize>>,
) -> ModelResult<()> {
    let mut ranges = ranges.filter(|range| !range.is_empty()).peekable();
    while let Some(mut range) = ranges.next() {
        while let Some(next) = ranges.next_if(|next| next.start == range.end) {
            range.end = next.end;
        }
        ops::fill_zero(device, buffer.reborrow().col_range(range))?;
    }
    Ok(())
}

/// The memory in which a layer's gradient of one micro-batch forms: the shared buffer; without one, or for a
/// gradient that stays f32, that of the sums.
fn place_of_terms<'a>(
    buffer: &'a mut Option<Tensor>,
    sums: &'a mut [Option<Buffer>],
    partition: &Partition,
    index: usize,
    is_term: bool,
) -> ViewMut<'a> {
    let place = partition.place(index);
    match (buffer, held(sums, partition.bucket_of(index))) {
        (Some(buffer), _) if !is_term => buffer.view_mut().col_range(0..place.len()),
        (_, Buffer::Fixed(sums)) => sums.view_mut().range(place).into_terms(),
        (_, Buffer::Floats(sums)) => sums.view_mut().col_range(place),
    }
}

impl GradientSink for Accumulator {
    fn open(&mut self, layer: LayerId) -> ModelResult<LayerGradients<'_>> {
        let index = self.decoder.index(layer);
        self.allocate(index)?;
        let (is_term, adds_in_place) = (self.is_term(index), self.adds_in_place());
        // Of a tied table.
        let is_second = is_term && self.begun[index];
        let Self { decoder, partition, layer: buffer, sums, holds, .. } = self;
        let layout = decoder.trained(layer);
        // A layer may be opened again before it is emitted, to be added to.
        let is_new = self.open.replace(layer) != Some(layer);
        let mut terms = place_of_terms(buffer, sums, partition, index, is_term);
        if adds_in_place {
            return Ok(LayerGradients::new(layout, terms));
        }
        if is_new {
            holds.clear();
            holds.extend(layout.params.iter().map(|param| is_second || !param.part.is_written_by_product()));
            if !is_second {
                clear(&self.device, terms.reborrow(), unwritten(layout))?;
            }
        }
        let gradients = LayerGradients::partly(layout, terms, holds);
        let is_exact = self.form == SumForm::Exact;
        Ok(if is_second && is_exact { gradients.with_first_term(self.limit) } else { gradients })
    }

    fn emit(&mut self, layer: LayerId) -> ModelResult<()> {
        let index = self.decoder.index(layer);
        let is_term = self.is_term(index);
        let is_complete = self.unfinished == Some(index + 1);
        let is_first_of_two = self.is_tied(index) && !self.begun[index];
        let Self { device, home, decoder, partition, layer: buffer, sums, limit, .. } = self;
        if (buffer.is_some() || is_term) && self.open.take() == Some(layer) {
            // Zero contribution of a rank without a micro-batch.
            let params = decoder.trained(layer).params.iter().zip(&self.holds);
            let unheld = params.filter(|(_, holds)| !**holds).map(|(param, _)| param.range());
            clear(device, place_of_terms(buffer, sums, partition, index, is_term), unheld)?;
        }
        if self.of_micro_batch.is_some() {
            return self.emit_part(index);
        }
        let (place, add) = (partition.place(index), self.begun[index]);
        let squares_at_once = home.backend() == Backend::Cpu;
        let sums = held(sums, partition.bucket_of(index));
        self.squares[index] = if is_term && self.form == SumForm::Fast {
            None
        } else if is_term {
            let terms = match sums {
                Buffer::Fixed(sums) => sums.view().range(place).terms(),
                Buffer::Floats(terms) => terms.view().col_range(place),
            };
            // Both terms of a tied table were below the limit; their sum need not be.
            let limit = if self.begun[index] { f32::INFINITY } else { *limit };
            if squares_at_once && !is_first_of_two {
                Some(ops::exact_sum_squares(home, terms, None, false, limit)?)
            } else {
                if limit.is_finite() {
                    ops::check_terms(home, terms, limit)?;
                }
                None
            }
        } else if let Some(buffer) = buffer {
            let terms = buffer.view().col_range(0..partition.len(index));
            match sums {
                Buffer::Fixed(sums) if self.is_alone && is_complete && squares_at_once => {
                    let sums = Some(sums.view_mut().range(place));
                    Some(ops::exact_sum_squares(home, terms, sums, add, *limit)?)
                }
                sums => {
                    sums.put(home, terms, place, add, *limit)?;
                    None
                }
            }
        } else {
            None
        };
        if self.has_frozen[index] {
            // These are the squares of all elements.
            self.squares[index] = None;
        }
        self.open = None;
        self.begun[index] = true;
        self.complete(index)
    }
}
