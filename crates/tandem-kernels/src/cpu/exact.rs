//! Conversion of gradients to fixed point and back, and the squares of sums.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Cpu;
use super::rows::RowsMut;
use super::squares::add_squares;
use super::vector::vector_kernel;
use crate::View;
use crate::numerics::exact::FRACTION_BITS;
use crate::numerics::squares::BlockSquares;
use crate::ops::SQUARES_BLOCK;

/// Elements per block.
const BLOCK: usize = SQUARES_BLOCK;

/// Elements of a block that stay in the first-level cache from one pass to the next.
const CHUNK: usize = 1 << 10;

const SCALE: f64 = (1u64 << FRACTION_BITS) as f64;

impl Cpu {
    /// Overwrites the sums with terms, or adds the terms; without sums, they stay the only ones. Squares the
    /// new sums into one number per block of [`SQUARES_BLOCK`], if wanted. Returns whether all terms are below
    /// the limit.
    pub(crate) fn exact_sum(
        &self,
        terms: View,
        sums: Option<&mut [i64]>,
        add: bool,
        limit: f32,
        squares: Option<&mut [BlockSquares]>,
    ) -> bool {
        let (terms, isa) = (terms.as_slice::<f32>(), self.isa());
        let sums = sums.map(RowsMut::from_slice);
        let squares = squares.map(RowsMut::from_slice);
        let in_range = AtomicBool::new(true);
        self.parallel_ranges(terms.len(), BLOCK, |block, range| {
            let mut square = BlockSquares::default();
            let mut converted = [0.0; CHUNK];
            let mut good = true;
            for start in range.clone().step_by(CHUNK) {
                let terms = &terms[start..range.end.min(start + CHUNK)];
                let converted = &mut converted[..terms.len()];
                // SAFETY: chunks are disjoint; all slices are of a chunk's length; the CPU has this level.
                unsafe {
                    let sums = sums.as_ref().map(|sums| sums.part(0, start, terms.len()));
                    match sums {
                        Some(sums) => {
                            good &= if add {
                                accumulate(isa, terms, sums, limit)
                            } else {
                                store(isa, terms, sums, limit)
                            };
                            if squares.is_some() {
                                to_f32(isa, sums, converted);
                            }
                        }
                        None => {
                            good &= is_below(isa, terms, limit);
                            terms_to_f32(isa, terms, converted);
                        }
                    }
                    if squares.is_some() {
                        add_squares(isa, converted, &mut square);
                    }
                }
            }
            if let Some(squares) = &squares {
                // SAFETY: each block writes its own element.
                unsafe { squares.part(0, block, 1)[0] = square };
            }
            if !good {
                in_range.store(false, Ordering::Relaxed);
            }
        });
        in_range.into_inner()
    }
}

impl Cpu {
    pub(crate) fn exact_merge(&self, other: &[i64], sums: &mut [i64], add: bool) {
        let sums = RowsMut::from_slice(sums);
        self.parallel_ranges(other.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let sums = unsafe { sums.part(0, range.start, range.len()) };
            let other = &other[range];
            if add {
                sums.iter_mut().zip(other).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            } else {
                sums.copy_from_slice(other);
            }
        });
    }
}

/// Rounds towards zero; values out of range saturate, and NaN becomes 0.
#[inline(always)]
fn fixed(x: f32) -> i64 {
    (f64::from(x) * SCALE) as i64
}

/// Returns the f32 that a sum is read as, by way of f64.
#[inline(always)]
fn nearest(sum: i64) -> f32 {
    (sum as f64 * (1.0 / SCALE)) as f32
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn store<V: Vector>(terms: &[f32], sums: &mut [i64], limit: f32) -> bool {
        let mut good = true;
        for (sum, &term) in sums.iter_mut().zip(terms) {
            // The comparison is false for NaN.
            good &= term.abs() < limit;
            *sum = fixed(term);
        }
        good
    }
}

vector_kernel! {
    /// Returns whether all terms are below the limit.
    unsafe fn is_below<V: Vector>(terms: &[f32], limit: f32) -> bool {
        terms.iter().fold(true, |good, term| good & (term.abs() < limit))
    }
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn accumulate<V: Vector>(terms: &[f32], sums: &mut [i64], limit: f32) -> bool {
        // As in the rows of a token table that no token of the batch looks up.
        if terms.iter().fold(0, |bits, term| bits | term.to_bits()) == 0 {
            return true;
        }
        let mut good = true;
        for (sum, &term) in sums.iter_mut().zip(terms) {
            good &= term.abs() < limit;
            *sum = sum.wrapping_add(fixed(term));
        }
        good
    }
}

vector_kernel! {
    /// Adds terms to sums that are f32: the only term so far, or a sum as [`to_f32`] reads it, which they
    /// become. The slices have one length.
    pub(super) unsafe fn add_to_terms<V: Vector>(terms: &[f32], sums: &mut [f32], limit: f32) -> bool {
        let mut good = true;
        for (sum, &term) in sums.iter_mut().zip(terms) {
            good &= term.abs() < limit;
            *sum = nearest(fixed(*sum).wrapping_add(fixed(term)));
        }
        good
    }
}

vector_kernel! {
    /// Converts each sum to f32. The slices have one length.
    pub(super) unsafe fn to_f32<V: Vector>(sums: &[i64], values: &mut [f32]) {
        for (value, &sum) in values.iter_mut().zip(sums) {
            *value = nearest(sum);
        }
    }
}

vector_kernel! {
    /// Converts each term to the f32 that a sum of it alone is read as: whole multiples of the last place,
    /// which f32 holds. The slices have one length.
    pub(super) unsafe fn terms_to_f32<V: Vector>(terms: &[f32], values: &mut [f32]) {
        for (value, &term) in values.iter_mut().zip(terms) {
            *value = (term * SCALE as f32).trunc() * (1.0 / SCALE as f32);
        }
    }
}
