//! The ranks that hold the slices of one stage of a model, and the sums over them.
//!
//! A group of 2, 4 or 8 ranks sums by pairs of ranks: level after level of a binary tree, each in a group
//! of two. A sum of two numbers has no order, so every engine gives the same bits, which are those of one
//! rank with all blocks. Where each rank needs some rows, a level halves the rows that a rank goes on
//! with, so a rank sends as much as in a ring.
//!
//! Sums may travel in another type than f32 (on GPUs, `compute.reduction = "fast"`): they are rounded before
//! each level and keep no bits.

use std::cell::RefCell;
use std::ops::Range;

use tandem_comm::{Element, ProcessGroup, Reduction};
use tandem_kernels::{DType, Device, Extent, MemoryKind, Tensor, ops};
use tandem_model::{RankOrder, Result as ModelResult, TensorParallelOps, TensorParallelShard};

use crate::Result;
use crate::error::lost;
use crate::parallel::collective_buffer;

/// The ranks that hold the slices of one stage of a model.
pub(super) struct TensorGroup {
    all: RefCell<ProcessGroup>,
    /// Pairs of ranks that this rank belongs to, one for each level of the tree, neighbours first; none
    /// in a group of two or one that does not keep bits.
    pairs: Vec<RefCell<ProcessGroup>>,
    /// Type in which sums of f32 travel, if it is another one.
    wire: Option<DType>,
}

impl TensorGroup {
    /// Divides the world into groups of `count` neighbours. Sums of f32 travel in `wire`, by default as they
    /// are. All ranks call this.
    pub(super) fn new(world: &mut ProcessGroup, count: usize, wire: Option<DType>) -> Result<Self> {
        let wire = wire.filter(|wire| *wire != DType::F32);
        let all = RefCell::new(world.split_by(|rank| rank / count)?);
        let is_tree = count > 2 && TensorParallelShard { index: 0, count }.keeps_bits();
        let levels = if is_tree { count.ilog2() } else { 0 };
        let mut pair = |level: u32| world.split_by(|rank| rank & !(1 << level)).map(RefCell::new);
        Ok(Self { all, pairs: (0..levels).map(&mut pair).collect::<Result<_, _>>()?, wire })
    }

    /// Makes `sum` of a tensor in the type in which sums travel.
    fn in_wire(
        &self,
        device: &Device,
        x: &mut Tensor,
        sum: impl FnOnce(&mut Tensor) -> ModelResult<()>,
    ) -> ModelResult<()> {
        let Some(wire) = self.wire.filter(|_| x.dtype() == DType::F32) else { return sum(x) };
        let cols = Extent::exact(x.cols());
        let mut rounded = device.alloc_in(MemoryKind::Activations, x.extent(), cols, wire)?;
        ops::cast(device, x.view(), rounded.view_mut())?;
        sum(&mut rounded)?;
        Ok(ops::cast(device, rounded.view(), x.view_mut())?)
    }

    /// This rank's pair at each level of the tree; none if sums have no tree.
    fn levels(&self) -> Vec<&RefCell<ProcessGroup>> {
        if self.shard().count == 2 { vec![&self.all] } else { self.pairs.iter().collect() }
    }

    /// Which slice this rank holds.
    pub(super) fn shard(&self) -> TensorParallelShard {
        let all = self.all.borrow();
        TensorParallelShard { index: all.rank(), count: all.size() }
    }

    /// Sums numbers whose sum has no order.
    pub(super) fn all_reduce<T: Element>(&self, numbers: &mut [T]) -> Result<()> {
        Ok(self.all.borrow_mut().all_reduce(numbers, Reduction::Sum)?)
    }

    /// All ranks' elements in their order.
    pub(super) fn gather_all<T: Element>(&self, own: &[T], counts: &[usize]) -> Result<Vec<T>> {
        Ok(self.all.borrow_mut().gather(own, counts)?)
    }

    /// Whether this rank is the second of its pair at a level.
    fn is_second(&self, level: usize) -> bool {
        self.shard().index >> level & 1 == 1
    }

    /// The halves of a range of parts, and their numbers of elements.
    fn halves(parts: &Range<usize>, counts: &[usize]) -> ([Range<usize>; 2], [usize; 2]) {
        let middle = parts.start + parts.len() / 2;
        let halves = [parts.start..middle, middle..parts.end];
        let sums = halves.clone().map(|half| counts[half].iter().sum());
        (halves, sums)
    }
}

impl TensorParallelOps for TensorGroup {
    fn sum(&self, device: &Device, x: &mut Tensor, order: RankOrder) -> ModelResult<()> {
        self.in_wire(device, x, |x| {
            let mut reduce = |group: &RefCell<ProcessGroup>| {
                let numbers = collective_buffer::tensor(device, x);
                group.borrow_mut().all_reduce_numbers(numbers, Reduction::Sum).map_err(lost)
            };
            let levels = self.levels();
            match order {
                _ if levels.is_empty() => reduce(&self.all),
                RankOrder::Ranks => levels.into_iter().try_for_each(reduce),
                // Neighbouring parts are of ranks that differ in the highest bit.
                RankOrder::TokenParts => levels.into_iter().rev().try_for_each(reduce),
            }
        })
    }

    fn gather_rows(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> ModelResult<()> {
        let counts = elements(x, counts);
        self.all.borrow_mut().all_gather_numbers(collective_buffer::tensor(device, x), &counts).map_err(lost)
    }

    fn gather_tokens(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> ModelResult<()> {
        let levels = self.levels();
        if levels.is_empty() {
            return self.gather_rows(device, x, counts);
        }
        let part = self.shard().token_part();
        let mut held = part..part + 1;
        for (level, pair) in levels.into_iter().enumerate().rev() {
            let len = held.len();
            held =
                if self.is_second(level) { held.start - len..held.end } else { held.start..held.end + len };
            let (_, sizes) = Self::halves(&held, counts);
            let rows = counts[..held.start].iter().sum::<usize>();
            let rows = rows..rows + sizes[0] + sizes[1];
            let (sizes, numbers) = (elements(x, &sizes), collective_buffer::rows(device, x, rows));
            pair.borrow_mut().all_gather_numbers(numbers, &sizes).map_err(lost)?;
        }
        Ok(())
    }

    fn sum_tokens(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> ModelResult<()> {
        self.in_wire(device, x, |x| {
            let levels = self.levels();
            if levels.is_empty() {
                let (counts, sum) = (elements(x, counts), Reduction::Sum);
                let numbers = collective_buffer::tensor(device, x);
                return self.all.borrow_mut().reduce_scatter_numbers(numbers, &counts, sum).map_err(lost);
            }
            let mut held = 0..counts.len();
            for (level, pair) in levels.into_iter().enumerate() {
                let ([first, second], sizes) = Self::halves(&held, counts);
                let rows = counts[..held.start].iter().sum::<usize>();
                let rows = rows..rows + sizes[0] + sizes[1];
                let (sizes, numbers) = (elements(x, &sizes), collective_buffer::rows(device, x, rows));
                pair.borrow_mut().reduce_scatter_numbers(numbers, &sizes, Reduction::Sum).map_err(lost)?;
                held = if self.is_second(level) { second } else { first };
            }
            Ok(())
        })
    }

    fn gather(&self, numbers: &mut [f64]) -> ModelResult<()> {
        let mut group = self.all.borrow_mut();
        let counts = vec![numbers.len() / group.size(); group.size()];
        group.all_gather(numbers, &counts).map_err(lost)
    }
}

/// How many elements of `x` some rows have.
fn elements(x: &Tensor, rows: &[usize]) -> Vec<usize> {
    rows.iter().map(|rows| rows * x.cols()).collect()
}
