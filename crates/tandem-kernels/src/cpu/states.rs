//! Optimiser states in bf16 and 8 bits: widened for an update, then rounded.

use std::ops::Range;

use super::Isa;
use super::convert::convert;
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use crate::numerics::states::{AdamMoment, STATE_BLOCK, StatesMut, StatesView, StochasticRounding};
use crate::{ViewMut, bf16};

/// States that threads access chunk by chunk.
pub(super) enum StateStorage<'a> {
    F32(RowsMut<'a, f32>),
    Bf16(RowsMut<'a, bf16>, StochasticRounding),
    EightBit { map: &'static Map, codes: RowsMut<'a, u8>, scales: RowsMut<'a, f32> },
}

impl<'a> StateStorage<'a> {
    pub(super) fn new(states: StatesMut<'a>) -> Self {
        match states {
            StatesMut::F32(view) => Self::F32(flat(view)),
            StatesMut::Bf16(view, dither) => Self::Bf16(flat(view), dither),
            StatesMut::EightBit(view) => {
                let map = Map::for_moment(view.moment());
                let (codes, scales) = view.into_parts();
                Self::EightBit { map, codes: RowsMut::from_slice(codes), scales: RowsMut::from_slice(scales) }
            }
        }
    }

    /// Returns a chunk as f32, in place or in `room`. [`Self::close`] follows.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps it may exist. An 8-bit chunk begins at a
    /// block.
    pub(super) unsafe fn open<'b>(
        &'b self,
        isa: Isa,
        chunk: &Range<usize>,
        room: &'b mut [f32],
    ) -> &'b mut [f32] {
        let room = &mut room[..chunk.len()];
        // SAFETY: the caller's promise; slices have one length, and there is a scale for each
        // block.
        unsafe {
            match self {
                Self::F32(states) => return states.part(0, chunk.start, chunk.len()),
                Self::Bf16(states, _) => convert(isa, states.part(0, chunk.start, chunk.len()), room),
                Self::EightBit { map, codes, scales } => {
                    decode(isa, map, codes.part(0, chunk.start, chunk.len()), blocks(scales, chunk), room);
                }
            }
        }
        room
    }

    /// Stores an updated chunk.
    ///
    /// # Safety
    /// No other part that overlaps the chunk may exist. An 8-bit chunk begins at a block.
    pub(super) unsafe fn close(&self, isa: Isa, chunk: &Range<usize>, values: &[f32]) {
        debug_assert_eq!(values.len(), chunk.len());
        // SAFETY: the caller's promise; slices have one length, and there is a scale for each
        // block.
        unsafe {
            match self {
                Self::F32(_) => {}
                Self::Bf16(states, dither) => {
                    for (piece, first) in dither.pieces(chunk.clone()) {
                        let own = piece.start - chunk.start..piece.end - chunk.start;
                        round(isa, dither.key, first, &values[own], states.part(0, piece.start, piece.len()));
                    }
                }
                Self::EightBit { map, codes, scales } => {
                    encode(isa, map, values, codes.part(0, chunk.start, chunk.len()), blocks(scales, chunk));
                }
            }
        }
    }
}

pub(super) fn flat<E: crate::Element>(x: ViewMut<'_>) -> RowsMut<'_, E> {
    let len = x.len();
    RowsMut::new(x.reshape(1, len))
}

/// Returns the scales of a chunk's blocks.
#[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
unsafe fn blocks<'b>(scales: &'b RowsMut<'_, f32>, chunk: &Range<usize>) -> &'b mut [f32] {
    let first = chunk.start / STATE_BLOCK;
    // SAFETY: the caller's promise.
    unsafe { scales.part(0, first, chunk.end.div_ceil(STATE_BLOCK) - first) }
}

/// Reads states as f32 on the calling thread.
pub(crate) fn read(states: StatesView<'_>, out: &mut [f32]) {
    match states {
        StatesView::F32(view) => out.copy_from_slice(view.as_slice()),
        StatesView::Bf16(view) => convert(Isa::Portable, view.as_slice::<bf16>(), out),
        StatesView::EightBit(view) => {
            let (codes, scales, skipped) = view.parts();
            read_codes(view.moment(), codes, scales, skipped, out);
        }
    }
}

/// Reads codes as f32 on the calling thread; `skipped` codes of the first block precede them.
pub(crate) fn read_codes(moment: AdamMoment, codes: &[u8], scales: &[f32], skipped: usize, out: &mut [f32]) {
    let (map, mut codes, mut out, mut room) = (Map::for_moment(moment), codes, out, STATE_BLOCK - skipped);
    for scale in scales {
        let count = room.min(codes.len());
        let (mine, rest) = codes.split_at(count);
        let (values, after) = out.split_at_mut(count);
        for (value, &code) in values.iter_mut().zip(mine) {
            *value = map.values[usize::from(code)] * scale;
        }
        (codes, out, room) = (rest, after, STATE_BLOCK);
    }
}

/// Writes the nearest codes on the calling thread.
///
/// # Panics
/// If the lengths differ, or a scale is missing.
pub(crate) fn write_codes(moment: AdamMoment, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    assert!(values.len() == codes.len() && values.len().div_ceil(STATE_BLOCK) == scales.len(), "states");
    // SAFETY: slices have one length, and there is a scale for each block.
    unsafe { encode(Isa::Portable, Map::for_moment(moment), values, codes, scales) };
}

vector_kernel! {
    /// Rounds stochastically: up with the probability of the truncated fraction. The slices have
    /// one length.
    unsafe fn round<V: Vector>(key: u32, first: u32, values: &[f32], to: &mut [bf16]) {
        for (index, (to, value)) in to.iter_mut().zip(values).enumerate() {
            *to = rounded(*value, drawn(key, first.wrapping_add(index as u32)));
        }
    }
}

/// Hashes key and index: Ellis's `lowbias32` finaliser (public domain).
#[inline(always)]
fn drawn(key: u32, place: u32) -> u32 {
    let x = place ^ key;
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Adds 16 random bits to the half that bf16 lacks. Infinity and NaN stay.
#[inline(always)]
fn rounded(value: f32, drawn: u32) -> bf16 {
    let bits = value.to_bits();
    let up = bits.wrapping_add(drawn >> 16) >> 16;
    let kept = (bits >> 16) | if value.is_nan() { 0x40 } else { 0 };
    bf16::from_bits(if value.is_finite() { up as u16 } else { kept as u16 })
}

/// One decade of a map: its codes are the midpoints of steps of width `1 / slope`.
#[derive(Clone, Copy)]
struct Decade {
    /// Start: half-way between the last code below and its first.
    bound: f32,
    slope: f32,
    /// Number of steps.
    steps: f32,
}

/// A dynamic map of 256 codes: numbers in [-1, 1] or [0, 1].
///
/// Code 0 is zero. In the signed map, codes 1 to 127 are the steps of the seven decades in order,
/// 128 + n is the negative of n, and 128, otherwise a second zero, is 1. In the unsigned map, codes
/// 1 to 254 are the steps and 255 is 1.
pub(super) struct Map {
    is_signed: bool,
    values: [f32; 256],
    decades: [Decade; DECADES],
    /// Offset of a decade's first code from its number of steps, which doubles from decade to
    /// decade.
    shift: f32,
    /// Numbers not below it become 1.
    top: f32,
}

const DECADES: usize = 7;

static SIGNED: Map = Map::new(true);
static UNSIGNED: Map = Map::new(false);

/// Smaller scales become zero, so that the smallest code times a scale is a normal number.
const SMALLEST_SCALE: f32 = 1.0 / (1u128 << 100) as f32;

impl Map {
    fn for_moment(moment: AdamMoment) -> &'static Self {
        match moment {
            AdamMoment::First => &SIGNED,
            AdamMoment::Second => &UNSIGNED,
        }
    }

    const fn new(is_signed: bool) -> Self {
        let mut map = Self {
            is_signed,
            values: [0.0; 256],
            decades: [Decade { bound: 0.0, slope: 0.0, steps: 0.0 }; DECADES],
            shift: if is_signed { 0.0 } else { -1.0 },
            top: 0.0,
        };
        // The decade runs from a tenth of `unit` to `unit` in `steps` steps.
        let (mut unit, mut steps) = (1e-6, if is_signed { 1 } else { 2 });
        let (mut decade, mut code, mut before) = (0, 1, 0.0);
        while decade < DECADES {
            let width = 0.9 * unit / steps as f64;
            let mut step = 0;
            while step < steps {
                let value = 0.1 * unit + (step as f64 + 0.5) * width;
                if step == 0 {
                    let (bound, slope) = ((0.5 * (before + value)) as f32, (1.0 / width) as f32);
                    map.decades[decade] = Decade { bound, slope, steps: steps as f32 };
                }
                map.values[code] = value as f32;
                if is_signed {
                    map.values[128 + code] = -value as f32;
                }
                (before, code, step) = (value, code + 1, step + 1);
            }
            (unit, steps, decade) = (10.0 * unit, 2 * steps, decade + 1);
        }
        map.values[if is_signed { 128 } else { 255 }] = 1.0;
        map.top = (0.5 * (before + 1.0)) as f32;
        map
    }

    /// Returns the codes of numbers of [-1, 1] (or [0, 1]) as f32: whole numbers in 0..=255 for any
    /// lanes.
    ///
    /// # Safety
    /// The CPU has V.
    #[inline(always)]
    unsafe fn codes<V: Vector, const IS_SIGNED: bool>(&self, y: V) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            let zero = V::splat(0.0);
            let magnitude = if IS_SIGNED { y.max(zero.sub(y)) } else { y };
            let lowest = &self.decades[0];
            let (mut slope, mut steps) = (V::splat(lowest.slope), V::splat(lowest.steps));
            for decade in &self.decades[1..] {
                let bound = V::splat(decade.bound);
                slope = magnitude.if_less(bound, slope, V::splat(decade.slope));
                steps = magnitude.if_less(bound, steps, V::splat(decade.steps));
            }
            // A decade begins at a tenth of its end, a ninth of its steps' width. Between two whole
            // numbers the lower one counts.
            let offset = steps.mul_add(V::splat(8.0 / 9.0), V::splat(self.shift - 0.5));
            let code = magnitude.mul_add(slope, offset).round();
            // The last step reaches a little beyond the decade's end, since the next steps are
            // wider.
            let code = steps.mul_add(V::splat(2.0), V::splat(self.shift - 1.0)).min(code);
            let (signed, small, one) = if IS_SIGNED {
                (code.add(y.if_less(zero, V::splat(128.0), zero)), zero, 128.0)
            } else {
                // A nonzero number does not become zero.
                (code, zero.if_less(y, V::splat(1.0), zero), 255.0)
            };
            let code = magnitude.if_less(V::splat(lowest.bound), small, signed);
            y.if_less(V::splat(self.top), code, V::splat(one))
        }
    }
}

vector_kernel! {
    /// Converts a chunk. `codes` and `values` have one length, and each block has a scale.
    unsafe fn decode<V: Vector>(map: &Map, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        let blocks = codes.chunks(STATE_BLOCK).zip(values.chunks_mut(STATE_BLOCK));
        for ((codes, values), scale) in blocks.zip(scales) {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = map.values[usize::from(code)] * scale;
            }
        }
    }
}

vector_kernel! {
    /// Converts a chunk. `codes` and `values` have one length, and each block has a scale.
    unsafe fn encode<V: Vector>(map: &Map, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        let blocks = values.chunks(STATE_BLOCK).zip(codes.chunks_mut(STATE_BLOCK));
        for ((values, codes), scale) in blocks.zip(scales) {
            let (from, mut steps) = (values.as_ptr(), [0.0f32; STATE_BLOCK]);
            // SAFETY: the lanes lie inside the block; the caller runs where V exists.
            unsafe {
                let zero = V::splat(0.0);
                let (mut highest, mut lowest) = (zero, zero);
                for_lanes!(V, values.len(), |start, count| {
                    let x = V::load(from.add(start), count);
                    highest = highest.max(x);
                    lowest = lowest.min(x);
                });
                let (highest, lowest) = (highest.largest(), zero.sub(lowest).largest());
                let largest = if highest >= lowest { highest } else { -lowest };
                if largest.abs() < SMALLEST_SCALE {
                    *scale = 0.0;
                    codes.fill(0);
                    continue;
                }
                *scale = largest;
                let (inverse, to) = (V::splat(1.0 / largest), steps.as_mut_ptr());
                if map.is_signed {
                    for_lanes!(V, values.len(), |start, count| {
                        let y = V::load(from.add(start), count).mul(inverse);
                        map.codes::<V, true>(y).store(to.add(start), count);
                    });
                } else {
                    for_lanes!(V, values.len(), |start, count| {
                        let y = V::load(from.add(start), count).mul(inverse);
                        map.codes::<V, false>(y).store(to.add(start), count);
                    });
                }
                for (code, step) in codes.iter_mut().zip(&steps) {
                    // NaN is not below the top.
                    *code = step.to_int_unchecked::<i32>() as u8;
                }
            }
        }
    }
}
