//! Sums of squares that do not depend on their order: integers at three scales.
//!
//! A square of an f32 is exact in f64. It is cut into multiples of 2⁻¹⁰, 2⁻⁵⁰ and 2⁻⁹⁰, which are summed
//! as integers; what remains is at most 2⁻⁹¹ per element. Squares beyond `LARGE`, which no sum in fixed
//! point has, are added in f64.

/// Squares from here on are added in f64.
pub(crate) const LARGE: f64 = (1u64 << 38) as f64;

/// Bits between two scales.
const BITS: u32 = 40;

/// Integers of the sum over one block: multiples of 2⁻¹⁰, 2⁻⁵⁰ and 2⁻⁹⁰, and the squares beyond
/// [`LARGE`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct BlockSquares {
    pub parts: [i64; 3],
    pub large: f64,
}

/// Sum of squares. Sums over any division of the same elements are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SquareSum {
    parts: [i128; 3],
    large: f64,
}

impl SquareSum {
    /// Number of integers in [`SquareSum::to_integers`].
    pub const INTEGERS: usize = 4;

    /// Adds up blocks.
    pub(crate) fn of_blocks(blocks: &[BlockSquares]) -> Self {
        let mut sum = Self::default();
        for BlockSquares { parts, large } in blocks {
            sum.parts.iter_mut().zip(parts).for_each(|(sum, part)| *sum += i128::from(*part));
            sum.large += large;
        }
        sum
    }

    /// Adds the sum over other elements.
    pub fn add(&mut self, other: &Self) {
        self.parts.iter_mut().zip(other.parts).for_each(|(sum, part)| *sum += part);
        self.large += other.large;
    }

    /// Returns integers that ranks add up. All but the first are at least 0 and less than 2⁴⁰.
    pub fn to_integers(&self) -> [i64; Self::INTEGERS] {
        let [high, middle, low] = self.parts;
        let middle = middle + (low >> BITS);
        let high = high + (middle >> BITS);
        let below = |x: i128| (x & ((1 << BITS) - 1)) as i64;
        [(high >> BITS) as i64, below(high), below(middle), below(low)]
    }

    /// Makes a sum from integers of [`SquareSum::to_integers`], or sums of them, and the sum of
    /// [`SquareSum::large`].
    pub fn from_integers([highest, high, middle, low]: [i64; Self::INTEGERS], large: f64) -> Self {
        let high = (i128::from(highest) << BITS) + i128::from(high);
        Self { parts: [high, i128::from(middle), i128::from(low)], large }
    }

    /// Returns the part of the sum whose order matters: 0, unless elements are beyond 2¹⁹ or not finite.
    pub fn large(&self) -> f64 {
        self.large
    }

    /// Returns the sum. It is infinite or NaN if an element is.
    pub fn value(&self) -> f64 {
        let scale = |exponent: i32| 2f64.powi(exponent);
        let [highest, high, middle, low] = self.to_integers().map(|x| x as f64);
        let exact = highest * scale(30) + (high * scale(-10) + (middle * scale(-50) + low * scale(-90)));
        if self.large == 0.0 { exact } else { exact + self.large }
    }
}
