//! E4M3, an 8-bit floating-point type: a sign, four bits of exponent (bias 7), three of mantissa.
//!
//! The variant without infinities (OCP 8-bit Floating Point Specification, E4M3; torch's
//! `float8_e4m3fn`): the largest number is 448, the smallest normal one 2⁻⁶, the smallest subnormal
//! one 2⁻⁹; `0x7f` and `0xff` are NaN. The functions have no branches, so loops over them become
//! vector instructions.

/// Largest number.
pub const MAX: f32 = 448.0;

/// Code of NaN, without its sign.
const NAN: u32 = 0x7f;

/// Bits of f32 to the right of E4M3's mantissa.
const SHIFT: u32 = f32::MANTISSA_DIGITS - 1 - 3;

/// Difference of the exponents' biases, in E4M3's bits and in f32's.
const BIAS: u32 = (127 - 7) << 3;
const WIDE_BIAS: u32 = BIAS << SHIFT;

/// Smallest normal number.
const MIN_NORMAL: f32 = 1.0 / 64.0;

/// Rounds to nearest, ties to even. Larger numbers than [`MAX`] become it, infinity too; NaN stays.
#[inline(always)]
pub fn from_f32(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let half = (1 << (SHIFT - 1)) - 1 + (magnitude >> SHIFT & 1);
    let normal = ((magnitude + half) >> SHIFT).wrapping_sub(BIAS);
    // Neighbours of 2^14 are 2^-9 apart, as subnormal numbers are.
    const STEPS: f32 = 16_384.0;
    let subnormal = (f32::from_bits(magnitude) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let code = if magnitude < MIN_NORMAL.to_bits() { subnormal } else { normal };
    let code = if code < NAN { code } else { NAN - 1 };
    let code = if magnitude > f32::INFINITY.to_bits() { NAN } else { code };
    (code | bits >> 24 & 0x80) as u8
}

/// Returns the number of a code, which f32 holds exactly.
#[inline(always)]
pub fn to_f32(code: u8) -> f32 {
    let code = u32::from(code);
    let magnitude = code & 0x7f;
    let normal = (magnitude << SHIFT) + WIDE_BIAS;
    // One more of exponent makes the first bit, which a subnormal number lacks: it is taken off.
    let subnormal = (f32::from_bits(normal + (1 << (SHIFT + 3))) - MIN_NORMAL).to_bits();
    let bits = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == NAN { f32::NAN.to_bits() } else { bits };
    f32::from_bits(bits | (code & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of a code by the type's definition.
    fn number(code: u8) -> f64 {
        let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    /// Nearest code by a search over all, ties to even; of zero the one with the number's sign.
    fn nearest(value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let distance = |code: u8| (number(code) - f64::from(value.abs()).min(448.0)).abs();
        let better = |a: u8, b: u8| {
            let order = distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
            if order.is_le() { a } else { b }
        };
        (0..=0x7e).reduce(better).expect("codes") | sign
    }

    #[test]
    fn all_codes_are_the_numbers_of_the_definition() {
        for code in 0..=u8::MAX {
            let (found, expected) = (to_f32(code), number(code));
            assert_eq!(found.is_nan(), code & 0x7f == 0x7f, "{code:#x}");
            if !found.is_nan() {
                let found = f64::from(found);
                assert_eq!((found, found.is_sign_negative()), (expected, code >> 7 == 1), "{code:#x}");
            }
            assert_eq!(from_f32(to_f32(code)), code, "{code:#x}");
        }
        assert_eq!((to_f32(0x7e), to_f32(0x08), to_f32(0x01)), (MAX, 2f32.powi(-6), 2f32.powi(-9)));
    }

    #[test]
    fn numbers_become_their_nearest_codes() {
        let mut values = vec![0.0, f32::MIN_POSITIVE, 1e-45, 2f32.powi(-10), 464.0, 480.0, 1e30, f32::MAX];
        // Codes, the ties between them, and the neighbours of both.
        for code in 0..0x7e {
            let (low, high) = (to_f32(code), to_f32(code + 1));
            for value in [low, f32::midpoint(low, high), high] {
                values.extend([value.next_down().abs(), value, value.next_up()]);
            }
        }
        // All exponents.
        values.extend((0..255).map(|exponent| f32::from_bits(exponent << 23 | 0x0059_1234)));
        for value in values {
            for value in [value, -value] {
                assert_eq!(from_f32(value), nearest(value), "{value:e}");
            }
        }
    }

    #[test]
    fn infinity_saturates_and_nan_stays() {
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY].map(from_f32), [0x7e, 0xfe]);
        for bits in [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff] {
            assert_eq!([bits, bits | 1 << 31].map(|bits| from_f32(f32::from_bits(bits))), [0x7f, 0xff]);
        }
    }
}
