//! Storage of optimiser states: f32, bf16, or 8 bits with a scale per block. Every update computes
//! in f32 and rounds the result.
//!
//! * bf16 is rounded stochastically, with probabilities that keep the mean. Round-to-nearest would
//!   freeze a second moment that moves by a thousandth of itself: bf16 has 128 values per octave.
//!   The random bits are a hash ([`StochasticRounding`]), so results do not depend on the rank.
//! * 8 bits are codes of a dynamic map (arXiv 1511.04561; block-wise as in arXiv 2110.02861, with
//!   the values of bitsandbytes). It has seven decades, each ten times as wide and cut into twice
//!   as many steps as the one below; it is signed for first moments and unsigned for second ones.
//!   The scale of a block of [`STATE_BLOCK`] elements is its element of largest magnitude with its
//!   sign, so that element is exact. Other elements take the nearest code, but a nonzero second
//!   moment never becomes zero, since its root is a divisor. A block of nothing beyond 2⁻¹⁰⁰
//!   becomes zero.
//!
//! Stored states read as f32 exactly, and writing back what was read gives the same bits.

use std::ops::Range;

use crate::cpu;
use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::numerics::random::{STEP, mix};
use crate::{DType, Device, MemoryKind, Result};

/// Elements per scale of 8-bit states.
pub const STATE_BLOCK: usize = 256;

/// Codes per f32 word of a tensor.
const CODES: usize = 4;

/// Storage format of optimiser states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateForm {
    /// f32: 4 bytes per element.
    #[default]
    F32,
    /// bf16, rounded stochastically: 2 bytes.
    Bf16,
    /// Codes of a dynamic map with a scale per [`STATE_BLOCK`]: 1 + 1/64 bytes.
    EightBit,
}

impl StateForm {
    /// Every format with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("f32", Self::F32), ("bf16", Self::Bf16), ("8bit", Self::EightBit)];
}

/// Moment that a state stores; each has its own 8-bit map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdamMoment {
    /// First moment, of either sign.
    First,
    /// Second moment, never negative.
    Second,
}

/// Random bits of stochastic rounding: a function of a key and of the element's index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StochasticRounding {
    pub(crate) key: u32,
    /// Index of the first element, or of the first of its columns.
    pub(crate) first: u32,
    pub(crate) columns: RowColumns,
}

/// Columns of a matrix whose elements follow one another: row `r` begins `r · stride` elements after the
/// first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowColumns {
    /// Number of columns; 0 if elements have the indices of a row.
    pub(crate) width: u32,
    pub(crate) stride: u32,
    /// Elements before the first.
    pub(crate) skipped: u32,
}

impl StochasticRounding {
    /// Creates the random bits of elements from index `first` on, for the update, layer and
    /// parameter named by `what`. Indices are modulo 2³².
    pub fn new(what: &[u64], first: usize) -> Self {
        let add = |state: u64, number: &u64| mix((state ^ number).wrapping_add(STEP));
        let key = (what.iter().fold(0, add) >> 32) as u32;
        Self { key, first: first as u32, columns: RowColumns::default() }
    }

    /// Returns the random bits of some columns of a matrix of `stride` columns: `width` from index
    /// `first` on, of which `skipped` elements precede the first.
    #[must_use]
    pub fn in_columns(self, width: usize, stride: usize, skipped: usize) -> Self {
        let [width, stride, skipped] = [width, stride, skipped].map(|n| n as u32);
        Self { columns: RowColumns { width, stride, skipped }, ..self }
    }

    /// Cuts elements `range` where their indices do not follow one another: each piece with the index of
    /// its first element.
    pub(crate) fn pieces(self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, u32)> {
        let RowColumns { width, stride, skipped } = self.columns;
        let mut start = range.start;
        std::iter::from_fn(move || {
            (start < range.end).then(|| {
                let place = skipped.wrapping_add(start as u32);
                let (first, end) = match place.checked_div(width) {
                    None => (place, range.end),
                    Some(row) => {
                        let column = place % width;
                        let end = start + (width - column) as usize;
                        (row.wrapping_mul(stride).wrapping_add(column), end.min(range.end))
                    }
                };
                let piece = start..end;
                start = end;
                (piece, self.first.wrapping_add(first))
            })
        })
    }
}

/// A row of states in device memory.
pub struct States {
    moment: AdamMoment,
    form: StateForm,
    len: usize,
    /// `[1, len]` f32 or bf16, or codes, four per f32.
    values: Tensor,
    /// f32, one per block.
    scales: Option<Tensor>,
}

/// A borrowed range of states.
#[derive(Clone, Copy)]
pub enum StatesView<'a> {
    /// f32 `[1,N]`.
    F32(View<'a>),
    /// bf16 `[1,N]`.
    Bf16(View<'a>),
    /// Codes and scales.
    EightBit(CodesView<'a>),
}

/// A borrowed range of states in 8 bits.
#[derive(Clone, Copy)]
pub struct CodesView<'a> {
    moment: AdamMoment,
    codes: View<'a>,
    scales: View<'a>,
    /// Index of the first element in `codes`.
    start: usize,
    len: usize,
}

/// A mutably borrowed range of states.
pub enum StatesMut<'a> {
    /// f32 `[1,N]`.
    F32(ViewMut<'a>),
    /// bf16 `[1,N]`, and the random bits that round them.
    Bf16(ViewMut<'a>, StochasticRounding),
    /// Codes and scales.
    EightBit(CodesMut<'a>),
}

/// A mutably borrowed range of 8-bit states that begins at a block.
pub struct CodesMut<'a> {
    moment: AdamMoment,
    codes: ViewMut<'a>,
    scales: ViewMut<'a>,
    len: usize,
}

impl<'a> From<ViewMut<'a>> for StatesMut<'a> {
    fn from(view: ViewMut<'a>) -> Self {
        Self::F32(view)
    }
}

impl<'a> From<View<'a>> for StatesView<'a> {
    fn from(view: View<'a>) -> Self {
        match view.dtype() {
            DType::F32 => Self::F32(view),
            DType::Bf16 => Self::Bf16(view),
        }
    }
}

impl<'a> From<&'a [f32]> for StatesView<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(View::from_slice(values))
    }
}

impl States {
    /// Does the same as [`Tensor::prefetch_pages`].
    pub fn prefetch_pages(&self) {
        self.values.prefetch_pages();
        self.scales.iter().for_each(Tensor::prefetch_pages);
    }

    /// Does the same as [`Tensor::evict_pages`].
    pub fn evict_pages(&self) {
        self.values.evict_pages();
        self.scales.iter().for_each(Tensor::evict_pages);
    }

    /// Allocates `len` zeros.
    pub fn zeros(
        device: &Device,
        kind: MemoryKind,
        moment: AdamMoment,
        form: StateForm,
        len: usize,
    ) -> Result<Self> {
        let (width, dtype) = match form {
            StateForm::F32 => (len, DType::F32),
            StateForm::Bf16 => (len, DType::Bf16),
            StateForm::EightBit => (len.div_ceil(CODES), DType::F32),
        };
        let values = device.zeros(kind, 1, width, dtype)?;
        let scales = match form {
            StateForm::EightBit => Some(device.zeros(kind, 1, len.div_ceil(STATE_BLOCK), DType::F32)?),
            StateForm::F32 | StateForm::Bf16 => None,
        };
        Ok(Self { moment, form, len, values, scales })
    }

    /// Allocates `len` zeros of the same moment and format.
    pub fn zeros_like(&self, device: &Device, kind: MemoryKind, len: usize) -> Result<Self> {
        Self::zeros(device, kind, self.moment, self.form, len)
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a view of all elements.
    pub fn view(&self) -> StatesView<'_> {
        match (self.form, &self.scales) {
            (StateForm::EightBit, Some(scales)) => StatesView::EightBit(CodesView {
                moment: self.moment,
                codes: self.values.view(),
                scales: scales.view(),
                start: 0,
                len: self.len,
            }),
            _ => self.values.view().into(),
        }
    }

    /// Borrows elements `range` mutably; bf16 elements are rounded with `dither`.
    ///
    /// # Panics
    /// If the range is not inside, or 8-bit states do not begin at a block.
    pub fn range_mut(&mut self, range: Range<usize>, dither: StochasticRounding) -> StatesMut<'_> {
        assert!(range.start <= range.end && range.end <= self.len, "states {range:?} of {}", self.len);
        match (self.form, &mut self.scales) {
            (StateForm::EightBit, Some(scales)) => {
                assert!(
                    range.start.is_multiple_of(STATE_BLOCK),
                    "states {range:?} begin in the middle of a block"
                );
                let words = range.start / CODES..range.end.div_ceil(CODES);
                let blocks = range.start / STATE_BLOCK..range.end.div_ceil(STATE_BLOCK);
                StatesMut::EightBit(CodesMut {
                    moment: self.moment,
                    codes: self.values.view_mut().col_range(words),
                    scales: scales.view_mut().col_range(blocks),
                    len: range.len(),
                })
            }
            (StateForm::Bf16, _) => StatesMut::Bf16(self.values.view_mut().col_range(range), dither),
            _ => StatesMut::F32(self.values.view_mut().col_range(range)),
        }
    }

    /// Borrows elements from `start` on, to be overwritten with rounding to nearest.
    ///
    /// # Panics
    /// As [`States::range_mut`], and if a partial block is not the last.
    pub(crate) fn part_mut(&mut self, start: usize, len: usize) -> StatesMut<'_> {
        let end = start + len;
        assert!(end == self.len || len.is_multiple_of(STATE_BLOCK), "part of a block is written");
        self.range_mut(start..end, StochasticRounding::default())
    }
}

impl<'a> StatesView<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view) => view.len(),
            Self::EightBit(view) => view.len,
        }
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns elements `range`.
    ///
    /// # Panics
    /// If it is not inside.
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "states {range:?} of {}", self.len());
        match self {
            Self::F32(view) => Self::F32(view.col_range(range)),
            Self::Bf16(view) => Self::Bf16(view.col_range(range)),
            Self::EightBit(view) => {
                Self::EightBit(CodesView { start: view.start + range.start, len: range.len(), ..view })
            }
        }
    }

    /// Returns the elements in place if they are f32, on the CPU.
    pub fn as_f32(self) -> Option<&'a [f32]> {
        match self {
            Self::F32(view) => Some(view.as_slice()),
            Self::Bf16(_) | Self::EightBit(_) => None,
        }
    }

    /// Reads the elements as f32, on the CPU and the calling thread; [`Device::read_states`] reads
    /// them on every device.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read(self, out: &mut [f32]) {
        assert_eq!(out.len(), self.len(), "room for other states");
        cpu::states::read(self, out);
    }
}

impl<'a> CodesView<'a> {
    /// Returns the number of elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Returns the moment whose map the codes use.
    pub(crate) fn moment(self) -> AdamMoment {
        self.moment
    }

    /// Returns the codes, the scales of their blocks, and the index of the first code in its block.
    pub(crate) fn parts(self) -> (&'a [u8], &'a [f32], usize) {
        let codes = &self.codes.as_bytes()[self.start..self.start + self.len];
        (codes, self.scales.col_range(self.blocks()).as_slice(), self.start % STATE_BLOCK)
    }

    /// Returns the words of codes from the first block on, the scales, and the index of the first
    /// code in its block.
    pub(crate) fn blocks_of_words(self) -> (View<'a>, View<'a>, usize) {
        let blocks = self.blocks();
        let words = blocks.start * (STATE_BLOCK / CODES)..(self.start + self.len).div_ceil(CODES);
        (self.codes.col_range(words), self.scales.col_range(blocks), self.start % STATE_BLOCK)
    }

    /// Returns words of codes and scales if the first code begins a block.
    pub(crate) fn tensors(self) -> Option<(View<'a>, View<'a>)> {
        let words = self.start / CODES..(self.start + self.len).div_ceil(CODES);
        let begins = self.start.is_multiple_of(STATE_BLOCK);
        begins.then(|| (self.codes.col_range(words), self.scales.col_range(self.blocks())))
    }

    fn blocks(self) -> Range<usize> {
        self.start / STATE_BLOCK..(self.start + self.len).div_ceil(STATE_BLOCK)
    }
}

impl StatesMut<'_> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view, _) => view.len(),
            Self::EightBit(view) => view.len,
        }
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the stored size in bytes.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view, _) => view.num_bytes(),
            Self::EightBit(view) => view.len + 4 * view.len.div_ceil(STATE_BLOCK),
        }
    }
}

impl<'a> CodesMut<'a> {
    /// Returns the moment whose map the codes use.
    pub(crate) fn moment(&self) -> AdamMoment {
        self.moment
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the codes, and the scales of their blocks.
    pub(crate) fn into_parts(self) -> (&'a mut [u8], &'a mut [f32]) {
        let (words, scales) = (self.codes.into_slice::<f32>(), self.scales.into_slice());
        // SAFETY: the exclusively borrowed words are at least as many bytes, and every bit pattern
        // is a byte.
        let codes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), self.len) };
        (codes, scales)
    }

    /// Returns the words of codes, and scales.
    pub(crate) fn into_tensors(self) -> (ViewMut<'a>, ViewMut<'a>) {
        (self.codes, self.scales)
    }
}
