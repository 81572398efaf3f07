//! Sums of gradients in either form, and how they travel.

use std::ops::Range;

use tandem_comm::{CollectiveBuffer, ProcessGroup, Reduction};
use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::ops::Gradient;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, View, ops};

use crate::Result;
use crate::config::SumForm;
use crate::parallel::collective_buffer;
use crate::placement::async_transfer::{Outcome, not_made};

/// A row of sums.
pub(super) enum Buffer {
    Fixed(FixedPointSum),
    Floats(Tensor),
}

impl Buffer {
    /// Allocates `len` sums of unspecified value.
    pub(super) fn new(device: &Device, form: SumForm, len: usize) -> Result<Self> {
        Ok(match form {
            SumForm::Exact => Self::Fixed(FixedPointSum::new(device, MemoryKind::Gradients, len)?),
            SumForm::Fast => Self::Floats(device.alloc(MemoryKind::Gradients, 1, len, DType::F32)?),
        })
    }

    /// Sums in a range, in a collective call.
    pub(super) fn numbers<'a>(&'a mut self, device: &'a Device, range: Range<usize>) -> CollectiveBuffer<'a> {
        match self {
            Self::Fixed(sums) => collective_buffer::fixed(device, sums, range),
            Self::Floats(sums) => collective_buffer::range(device, sums, range),
        }
    }

    /// Sums in a range, as the optimizer reads them.
    pub(super) fn gradient(&self, range: Range<usize>) -> Gradient<'_> {
        let all: Gradient = match self {
            Self::Fixed(sums) => sums.view().into(),
            Self::Floats(sums) => sums.view().into(),
        };
        all.range(range)
    }

    /// Makes a range zero.
    pub(super) fn clear(&mut self, device: &Device, range: Range<usize>) -> tandem_kernels::Result<()> {
        match self {
            Self::Fixed(sums) => sums.view_mut().range(range).clear(device),
            Self::Floats(sums) => ops::fill_zero(device, sums.view_mut().col_range(range)),
        }
    }

    /// Overwrites a range with terms, or adds them; each must be below `limit` in fixed point.
    pub(super) fn put(
        &mut self,
        device: &Device,
        terms: View,
        range: Range<usize>,
        add: bool,
        limit: f32,
    ) -> tandem_kernels::Result<()> {
        match self {
            Self::Fixed(sums) => ops::exact_sum(device, terms, sums.view_mut().range(range), add, limit),
            Self::Floats(sums) if add => ops::add(device, terms, sums.view_mut().col_range(range)),
            Self::Floats(sums) => ops::cast(device, terms, sums.view_mut().col_range(range)),
        }
    }

    /// Overwrites all sums with a range of others of the same form, or adds them.
    pub(super) fn merge(
        &mut self,
        device: &Device,
        others: &Self,
        range: Range<usize>,
        add: bool,
    ) -> tandem_kernels::Result<()> {
        match (self, others) {
            (Self::Fixed(sums), Self::Fixed(others)) => {
                ops::exact_merge(device, others.view().range(range), sums.view_mut(), add)
            }
            (Self::Floats(sums), Self::Floats(others)) if add => {
                ops::add(device, others.view().col_range(range), sums.view_mut())
            }
            (Self::Floats(sums), Self::Floats(others)) => {
                ops::cast(device, others.view().col_range(range), sums.view_mut())
            }
            _ => unreachable!("sums of one run have one form"),
        }
    }
}

/// How sums travel: as they are, or rounded to bf16.
pub(super) struct Wire {
    /// bf16 `[1, N]`, N the most that travels at once.
    rounded: Option<Tensor>,
}

impl Wire {
    /// Allocates what travels in `dtype` needs; sums in fixed point travel as they are.
    pub(super) fn new(device: &Device, form: SumForm, dtype: DType, longest: usize) -> Result<Self> {
        let rounds = form == SumForm::Fast && dtype == DType::Bf16;
        let room = || device.alloc(MemoryKind::Gradients, 1, longest, dtype);
        Ok(Self { rounded: rounds.then(room).transpose()? })
    }

    /// Sums a range over all ranks of a group.
    pub(super) fn all_reduce(
        &mut self,
        device: &Device,
        group: &mut ProcessGroup,
        buffer: &mut Buffer,
        range: Range<usize>,
    ) -> Outcome {
        let written = 0..range.len();
        self.travel(device, group, buffer, range, written, &mut |group, numbers| {
            group.all_reduce_numbers(numbers, Reduction::Sum)
        })
    }

    /// Sums a buffer over all ranks of a group; each then has its part of `counts`, in place.
    pub(super) fn reduce_scatter(
        &mut self,
        device: &Device,
        group: &mut ProcessGroup,
        buffer: &mut Buffer,
        counts: &[usize],
    ) -> Outcome {
        let start: usize = counts[..group.rank()].iter().sum();
        let written = start..start + counts[group.rank()];
        self.travel(device, group, buffer, 0..counts.iter().sum(), written, &mut |group, numbers| {
            group.reduce_scatter_numbers(numbers, counts, Reduction::Sum)
        })
    }

    /// Makes `call` on a range, of which it writes a part.
    fn travel(
        &mut self,
        device: &Device,
        group: &mut ProcessGroup,
        buffer: &mut Buffer,
        range: Range<usize>,
        written: Range<usize>,
        call: &mut dyn FnMut(&mut ProcessGroup, CollectiveBuffer) -> Outcome,
    ) -> Outcome {
        if range.is_empty() || group.size() == 1 {
            return Ok(());
        }
        match (&mut self.rounded, buffer) {
            (Some(rounded), Buffer::Floats(sums)) => {
                let all = 0..range.len();
                let sums = sums.view_mut().col_range(range);
                ops::cast(device, sums.view(), rounded.view_mut().col_range(all.clone()))
                    .map_err(not_made)?;
                call(group, collective_buffer::range(device, rounded, all))?;
                ops::cast(device, rounded.view().col_range(written.clone()), sums.col_range(written))
                    .map_err(not_made)
            }
            (_, buffer) => call(group, buffer.numbers(device, range)),
        }
    }
}
