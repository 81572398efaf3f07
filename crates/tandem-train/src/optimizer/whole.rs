//! Parameters that are updated whole, of which ranks may hold parts.

use std::ops::Range;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::{self, DecayedUpdate, Gradient, Update};
use tandem_kernels::{DType, Device, MemoryKind, Tensor};
use tandem_model::{Decoder, LayerId, ParamKind, TrainedTensor, trained_tensors};

use super::Run;
use super::groups::{ParameterGroups, ParameterSettings};
use crate::Result;
use crate::parallel::{Partition, collective_buffer};

/// A parameter that is updated whole.
pub(super) struct WholeParameter {
    pub part: ParamKind,
    /// Elements of the layer.
    pub range: Range<usize>,
    /// The rank's own, if any.
    pub run: Option<Run>,
    /// Elements that each rank holds.
    counts: Vec<usize>,
    /// The tensors in it.
    pub pieces: Vec<Piece>,
    pub settings: ParameterSettings,
}

/// A tensor as PyTorch has it: queries, keys and values are three.
pub(super) struct Piece {
    /// Elements of the layer.
    pub range: Range<usize>,
    pub rows: usize,
    pub cols: usize,
    /// Shape in the files: its dimensions are columns and rows where a family stores it transposed.
    pub shape: Vec<usize>,
}

impl WholeParameter {
    /// Returns those of a layer that `is_whole` names, without the frozen ones.
    pub(super) fn of_layer(
        decoder: &Decoder,
        layer: LayerId,
        groups: &ParameterGroups,
        (partition, index): (&Partition, usize),
        is_whole: impl Fn(ParamKind) -> bool,
    ) -> Vec<Self> {
        let tensors = trained_tensors(decoder, layer);
        let piece = |TrainedTensor { range, matrix: (rows, cols), shape, .. }: &TrainedTensor| Piece {
            range: range.clone(),
            rows: *rows,
            cols: *cols,
            shape: shape.clone(),
        };
        let params = decoder.trained(layer).params.iter().filter(|param| is_whole(param.part));
        let all = params.filter_map(|param| {
            let (range, settings) = (param.range(), groups.of(layer, param));
            let run = overlap(&range, &partition.owned(index)).map(|own| Run {
                first: own.start - param.offset,
                range: own,
                layer,
                part: param.part,
                columns: None,
                settings,
            });
            let mut start = 0;
            let counts = partition.counts(index).iter().map(|&count| {
                start += count;
                overlap(&range, &(start - count..start)).map_or(0, |part| part.len())
            });
            let counts = counts.collect();
            let pieces = tensors.iter().filter(|tensor| tensor.part == param.part).map(piece);
            (!settings.frozen).then(|| Self {
                part: param.part,
                counts,
                run,
                pieces: pieces.collect(),
                range,
                settings,
            })
        });
        all.collect()
    }

    /// A parameter that one rank holds.
    #[cfg(test)]
    pub(super) fn alone(run: Run, pieces: Vec<Piece>) -> Self {
        let (part, range, settings) = (run.part, run.range.clone(), run.settings);
        Self { part, counts: vec![range.len()], run: Some(run), pieces, range, settings }
    }

    /// Place of a range of the layer in the parameter.
    pub(super) fn place(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.range.start..range.end - self.range.start
    }

    /// Brings the other ranks' elements of the parameter into `room`, where the own ones are.
    pub(super) fn gather(&self, home: &Device, room: &mut Tensor, group: &mut ProcessGroup) -> Result<()> {
        if self.counts.len() > 1 {
            let all = 0..self.range.len();
            group.all_gather_numbers(collective_buffer::range(home, room, all), &self.counts)?;
        }
        Ok(())
    }
}

/// Returns the elements of both ranges, if there are some.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// Allocates room for the largest parameter; `None` if none is updated whole.
pub(super) fn room(home: &Device, layers: &[Vec<WholeParameter>]) -> Result<Option<Tensor>> {
    let longest = layers.iter().flatten().map(|parameter| parameter.range.len()).max();
    let alloc = |len| home.alloc(MemoryKind::Scratch, 1, len, DType::F32);
    Ok(longest.map(alloc).transpose()?)
}

/// Operands of a layer.
pub(super) struct Operands<'a> {
    /// Of the rank's elements.
    pub grad: Gradient<'a>,
    pub grad_scale: f32,
    /// The rank's elements of the layer.
    pub owned: Range<usize>,
    pub master: &'a mut Tensor,
    /// Element of the layer that is the first one of `master`.
    pub master_start: usize,
    /// Compute copy of the layer's first elements.
    pub copy: Option<&'a mut Tensor>,
}

impl Operands<'_> {
    /// Returns the gradient of a rank's elements, to be written to their place in `room`.
    pub(super) fn gradient<'b>(
        &'b self,
        parameter: &WholeParameter,
        run: &Run,
        room: &'b mut Tensor,
    ) -> Update<'b> {
        let own = run.range.start - self.owned.start..run.range.end - self.owned.start;
        let out = room.view_mut().col_range(parameter.place(&run.range));
        Update::new(self.grad.range(own), self.grad_scale, out, None)
    }

    /// Moves a rank's elements of a parameter by the direction in `room`.
    pub(super) fn move_by(
        &mut self,
        home: &Device,
        update: &DecayedUpdate,
        parameter: &WholeParameter,
        own: &Range<usize>,
        room: &Tensor,
    ) -> Result<()> {
        let copy = self.copy.as_deref_mut().filter(|copy| own.end <= copy.cols());
        let direction = room.view().col_range(parameter.place(own));
        let held = own.start - self.master_start..own.end - self.master_start;
        let master = self.master.view_mut().col_range(held);
        let copy = copy.map(|copy| copy.view_mut().col_range(own.clone()));
        Ok(ops::decayed_update(home, update, Update::new(direction, 1.0, master, copy))?)
    }
}
