//! Optimiser states as they are kept: in f32, in bf16, or in 8 bits with a scale for each block. Every update computes in
//! f32; what is kept of the result is rounded.
//!
//! * bf16 is rounded stochastically: up or down with probabilities that make the mean right. A second moment that moves by a
//!   thousandth of itself would stay where it is if it were rounded to the nearest bf16, of which there are 128 to an octave.
//!   What is drawn is a hash ([`Dither`]), so the bits depend on nobody's place or number.
//! * 8 bits are codes of a dynamic map (arXiv 1511.04561; block by block as in arXiv 2110.02861, with bitsandbytes'
//!   values): seven decades, each ten times as wide and cut into twice as many steps as the one below. The map is signed
//!   for first moments, unsigned for second ones. The scale of a block of [`STATE_BLOCK`] is its element of the largest
//!   magnitude, sign included, so that this one is kept exactly. Others get the nearest code, but a second moment that is
//!   not zero never becomes zero, for its root divides. A block of nothing beyond 2⁻¹⁰⁰ becomes zero.
//!
//! What is kept reads as f32 exactly, and writing what was read gives the same bits again, so states may be carried
//! as f32.

use std::ops::Range;

use crate::cpu;
use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::{DType, Device, Kind, Result};

/// Elements that have a scale in common in 8 bits.
pub const STATE_BLOCK: usize = 256;

/// Codes in a word of a tensor.
const CODES: usize = 4;

/// What optimiser states are kept in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateForm {
    /// As they are computed: 4 bytes an element.
    #[default]
    F32,
    /// Rounded stochastically: 2 bytes.
    Bf16,
    /// Codes of a dynamic map with a scale for each [`STATE_BLOCK`]: 1 + 1/64 bytes.
    EightBit,
}

impl StateForm {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("f32", Self::F32), ("bf16", Self::Bf16), ("8bit", Self::EightBit)];
}

/// Which state it is: 8 bits have a map for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Of either sign.
    First,
    /// Never negative.
    Second,
}

/// What stochastic rounding draws: a number for each element, a function of a key and of the element's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dither {
    pub(crate) key: u32,
    pub(crate) first: u32,
}

impl Dither {
    /// For elements that begin with the `first` of what is named by `what` (the update, the layer, the parameter, …).
    /// Places count modulo 2³².
    pub fn new(what: &[u64], first: usize) -> Self {
        // SplitMix64's finaliser, once for each number.
        let mix = |state: u64, number: &u64| {
            let z = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self { key: (what.iter().fold(0, mix) >> 32) as u32, first: first as u32 }
    }

    /// As if elements began `by` further on.
    pub(crate) fn after(self, by: usize) -> Self {
        Self { first: self.first.wrapping_add(by as u32), ..self }
    }
}

/// A row of states in device memory.
pub struct States {
    moment: Moment,
    form: StateForm,
    len: usize,
    /// f32 or bf16 `[1, len]`; codes, four in an f32.
    values: Tensor,
    /// f32, one a block.
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
    moment: Moment,
    codes: View<'a>,
    scales: View<'a>,
    /// The first element, of those that `codes` holds.
    start: usize,
    len: usize,
}

/// A mutably borrowed range of states.
pub enum StatesMut<'a> {
    /// f32 `[1,N]`.
    F32(ViewMut<'a>),
    /// bf16 `[1,N]`, and what is drawn to round them.
    Bf16(ViewMut<'a>, Dither),
    /// Codes and scales.
    EightBit(CodesMut<'a>),
}

/// A mutably borrowed range of states in 8 bits, which begins with a block.
pub struct CodesMut<'a> {
    moment: Moment,
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
        Self::F32(View::of_slice(values))
    }
}

impl States {
    /// As [`Tensor::announce`].
    pub fn announce(&self) {
        self.values.announce();
        self.scales.iter().for_each(Tensor::announce);
    }

    /// As [`Tensor::let_go`].
    pub fn let_go(&self) {
        self.values.let_go();
        self.scales.iter().for_each(Tensor::let_go);
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn zeros(device: &Device, kind: Kind, moment: Moment, form: StateForm, len: usize) -> Result<Self> {
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

    /// As many zeros of the same kind and form.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn zeros_like(&self, device: &Device, kind: Kind, len: usize) -> Result<Self> {
        Self::zeros(device, kind, self.moment, self.form, len)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of them.
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

    /// Elements `range` to be written, bf16 with what `dither` draws.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin with a block in 8 bits.
    pub fn range_mut(&mut self, range: Range<usize>, dither: Dither) -> StatesMut<'_> {
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

    /// Elements from `start` on, to be overwritten to the nearest.
    ///
    /// # Panics
    /// As [`States::range_mut`]; and if fewer elements than a block are not the last ones.
    pub(crate) fn part_mut(&mut self, start: usize, len: usize) -> StatesMut<'_> {
        let end = start + len;
        assert!(end == self.len || len.is_multiple_of(STATE_BLOCK), "part of a block is written");
        self.range_mut(start..end, Dither::default())
    }
}

impl<'a> StatesView<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view) => view.len(),
            Self::EightBit(view) => view.len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements `range`.
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

    /// The elements where they lie, if they are f32; on the CPU.
    pub fn as_f32(self) -> Option<&'a [f32]> {
        match self {
            Self::F32(view) => Some(view.as_slice()),
            Self::Bf16(_) | Self::EightBit(_) => None,
        }
    }

    /// The elements as f32, on the CPU and the calling thread. [`Device::read_states`] gives those of every device.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read(self, out: &mut [f32]) {
        assert_eq!(out.len(), self.len(), "room for other states");
        cpu::states::read(self, out);
    }
}

impl<'a> CodesView<'a> {
    /// Number of elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Whose map the codes are of.
    pub(crate) fn moment(self) -> Moment {
        self.moment
    }

    /// The codes; the scales of their blocks; the first code's place in its block.
    pub(crate) fn parts(self) -> (&'a [u8], &'a [f32], usize) {
        let codes = &self.codes.as_bytes()[self.start..self.start + self.len];
        (codes, self.scales.col_range(self.blocks()).as_slice(), self.start % STATE_BLOCK)
    }

    /// Words of codes from the first block on, and scales; the first code's place in its block.
    pub(crate) fn blocks_of_words(self) -> (View<'a>, View<'a>, usize) {
        let blocks = self.blocks();
        let words = blocks.start * (STATE_BLOCK / CODES)..(self.start + self.len).div_ceil(CODES);
        (self.codes.col_range(words), self.scales.col_range(blocks), self.start % STATE_BLOCK)
    }

    /// Words of codes, and scales, if the first code begins a block.
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
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view, _) => view.len(),
            Self::EightBit(view) => view.len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that hold the elements.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::F32(view) | Self::Bf16(view, _) => view.num_bytes(),
            Self::EightBit(view) => view.len + 4 * view.len.div_ceil(STATE_BLOCK),
        }
    }
}

impl<'a> CodesMut<'a> {
    /// Whose map the codes are of.
    pub(crate) fn moment(&self) -> Moment {
        self.moment
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The codes, and the scales of their blocks.
    pub(crate) fn into_parts(self) -> (&'a mut [u8], &'a mut [f32]) {
        let (words, scales) = (self.codes.into_slice::<f32>(), self.scales.into_slice());
        // SAFETY: the exclusively borrowed words are at least as many bytes, and every pattern of bits is a byte.
        let codes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), self.len) };
        (codes, scales)
    }

    /// Words of codes, and scales.
    pub(crate) fn into_tensors(self) -> (ViewMut<'a>, ViewMut<'a>) {
        (self.codes, self.scales)
    }
}
