//! Elementary functions on registers, within a few units in the last place of f32.
//!
//! The polynomials were fitted for this file by least squares with Lawson's weights (minimax), in
//! f64.

use crate::cpu::vector::Vector;

/// Evaluates the polynomial with these coefficients, highest power first.
#[inline(always)]
fn polynomial<V: Vector, const N: usize>(x: V, coefficients: [f32; N]) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        let mut sum = V::splat(coefficients[0]);
        for coefficient in &coefficients[1..] {
            sum = sum.mul_add(x, V::splat(*coefficient));
        }
        sum
    }
}

/// Computes `e^x`: 0 below -87.3, at most 2.4e38. All functions here return NaN for NaN.
#[inline(always)]
pub(crate) fn exp<V: Vector>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        // ln 2 in two parts: the first has so few bits that its product with the exponent is exact.
        let (high, low) = (V::splat(-0.693_359_4), V::splat(2.121_944_4e-4));
        let clamped = V::splat(-87.3).max(V::splat(88.37).min(x));
        let n = clamped.mul(V::splat(std::f32::consts::LOG2_E)).round();
        let r = n.mul_add(low, n.mul_add(high, clamped));
        let tail = polynomial(r, [1.381_455_8e-3, 8.368_736e-3, 4.166_839e-2, 0.166_665_21, 0.499_999_94]);
        let e = tail.mul_add(r.mul(r), r).add(V::splat(1.0));
        x.if_less(V::splat(-87.3), V::splat(0.0), e.mul(n.exp2_integer()))
    }
}

#[inline(always)]
fn magnitude<V: Vector>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    x.max(unsafe { V::splat(0.0) }.sub(x))
}

/// Computes `1 / (1 + e^-x)` with a small relative error everywhere.
#[inline(always)]
pub(crate) fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        let e = exp(zero.sub(magnitude(x)));
        x.if_less(zero, e, one).div(one.add(e))
    }
}

/// Computes `tanh x` with a small relative error near zero: an odd polynomial there, exponentials
/// beyond.
#[inline(always)]
pub(crate) fn tanh<V: Vector>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        let z = magnitude(x);
        let e = exp(z.mul(V::splat(-2.0)));
        let far = one.sub(e).div(one.add(e));
        let square = x.mul(x);
        let near = polynomial(square, TANH).mul(square.mul(z)).add(z);
        let value = z.if_less(V::splat(0.625), near, far);
        x.if_less(zero, zero.sub(value), value)
    }
}

/// Computes `cap · tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap<V: Vector>(x: V, cap: f32) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe { tanh(x.mul(V::splat(1.0 / cap))).mul(V::splat(cap)) }
}

/// `(tanh x − x) / x³` in powers of x², for |x| ≤ 0.63.
const TANH: [f32; 5] = [-5.660_788_6e-3, 2.060_200_6e-2, -5.372_923e-2, 0.133_313_28, -0.333_332_78];

/// Computes `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus<V: Vector>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        let zero = V::splat(0.0);
        let e = exp(zero.sub(magnitude(x)));
        // ln(1 + e) = 2 artanh(e / (2 + e)), of at most 1/3.
        let z = e.div(e.add(V::splat(2.0)));
        let square = z.mul(z);
        let log = polynomial(square, ARTANH).mul(square.mul(z)).add(z);
        // A NaN in `x` stays one: it is in `log`.
        zero.max(x).add(log.add(log))
    }
}

/// `(artanh x − x) / x³` in powers of x², for |x| ≤ 1/3: the series.
const ARTANH: [f32; 7] = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0];

/// Computes the normal distribution's `Φ(x)` and density `φ(x)`.
#[inline(always)]
pub(crate) fn normal<V: Vector>(x: V) -> (V, V) {
    // SAFETY: `x` exists, so the CPU has V.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        // Beyond 14 both are 0 or 1 in f32; the clamp keeps the square finite.
        let z = V::splat(14.0).min(magnitude(x));
        let e = exp(z.mul(z).mul(V::splat(-0.5)));
        // erfc(y) = t·P(t)·exp(-y²) with t = 1/(1 + 0.4 y), y = z/√2; the half of Φ = erfc/2 is in
        // the product below.
        let t = one.div(z.mul_add(V::splat(0.4 * std::f32::consts::FRAC_1_SQRT_2), one));
        let tail = polynomial(t, ERFC).mul(t).mul(e).mul(V::splat(0.5));
        (x.if_less(zero, tail, one.sub(tail)), e.mul(V::splat(0.398_942_3)))
    }
}

/// `erfc(y)·exp(y²)/t` in powers of `t = 1/(1 + 0.4 y)`, for y in 0..10, to 4e-10.
const ERFC: [f32; 8] = [
    0.073_933_475,
    -0.387_885_12,
    0.658_269_94,
    -0.327_268_18,
    0.363_363_36,
    0.164_604_77,
    0.229_147_78,
    0.225_833_98,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::vector::{for_lanes, vector_kernel};

    vector_kernel! {
        /// Six results a number, one after another; `to` is six times as long as `from`.
        unsafe fn evaluate<V: Vector>(from: &[f32], to: &mut [f32]) {
            let len = from.len();
            for_lanes!(V, len, |i, n| {
                // SAFETY: inside the slices.
                unsafe {
                    let x = V::load(from.as_ptr().add(i), n);
                    let (cdf, density) = normal(x);
                    let to = to.as_mut_ptr().add(i);
                    exp(x).store(to, n);
                    sigmoid(x).store(to.add(len), n);
                    tanh(x).store(to.add(2 * len), n);
                    cdf.store(to.add(3 * len), n);
                    density.store(to.add(4 * len), n);
                    softplus(x).store(to.add(5 * len), n);
                }
            });
        }
    }

    /// Numbers of both signs and all magnitudes from 1e-6 to 100, at every level.
    #[test]
    fn functions_are_within_a_few_units_in_the_last_place() {
        let positive = (0..2000).map(|i| 10f32.powf(i as f32 / 250.0 - 6.0));
        let numbers: Vec<f32> = positive.flat_map(|x| [x, -x]).chain([0.0]).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut found = vec![0.0; 6 * numbers.len()];
            // SAFETY: six times as long.
            unsafe { evaluate(isa, &numbers, &mut found) };
            let results: Vec<&[f32]> = found.chunks(numbers.len()).collect();
            let check = |name: &str, found: f32, expected: f64, x: f32, error: f64| {
                let difference = (f64::from(found) - expected).abs();
                assert!(difference <= error, "{isa:?} {name}({x}): {found}, expected {expected}");
            };
            for (i, &x) in numbers.iter().enumerate() {
                let exact = f64::from(x);
                let unit = |y: f64| y.abs() * f64::from(f32::EPSILON);
                // Results below the smallest normal number are zeros.
                let exponential = exact.min(f64::from(88.37f32)).exp();
                let smallest = if x < -87.2 { 2e-38 } else { 0.0 };
                check("exp", results[0][i], exponential, x, 2.0 * unit(exponential) + smallest);
                let s = 1.0 / (1.0 + (-exact).exp());
                check("sigmoid", results[1][i], s, x, 3.0 * unit(s) + smallest);
                let t = exact.tanh();
                check("tanh", results[2][i], t, x, 3.0 * unit(t));
                let plus = exact.max(0.0) + (-exact.abs()).exp().ln_1p();
                check("softplus", results[5][i], plus, x, 3.0 * unit(plus) + smallest);
                let density = (-0.5 * exact * exact).exp() / std::f64::consts::TAU.sqrt();
                // The square's rounding is multiplied by the square.
                check("density", results[4][i], density, x, (2.0 + exact * exact) * unit(density) + 1e-37);
            }
            let mut nothing = [0.0; 6];
            // SAFETY: six times as long.
            unsafe { evaluate(isa, &[f32::NAN], &mut nothing) };
            assert!(nothing.iter().all(|x| x.is_nan()), "{isa:?}: {nothing:?} of NaN");
            // Φ at known points (Abramowitz and Stegun, table 26.1).
            for (x, expected) in
                [(0.0, 0.5), (0.5, 0.691_462_461), (1.0, 0.841_344_746), (2.0, 0.977_249_868)]
            {
                let mut values = [0.0; 12];
                // SAFETY: six times as long.
                unsafe { evaluate(isa, &[x, -x], &mut values) };
                check("cdf", values[6], expected, x, 2e-7);
                check("cdf", values[7], 1.0 - expected, -x, 2e-7);
            }
        }
    }
}
