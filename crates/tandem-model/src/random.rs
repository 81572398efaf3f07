//! Random numbers as a function of their purpose, not of how many were drawn before.

use tandem_kernels::numerics::random;

/// Returns SplitMix64's output (Steele, Lea and Flood, 2014) after one step from state `x`.
pub(crate) fn mix(x: u64) -> u64 {
    random::mix(x.wrapping_add(random::STEP))
}

/// Returns a number in [0, 1) with 53 bits, a function of the seed and these coordinates.
pub(crate) fn uniform(seed: u64, coordinates: [u64; 3]) -> f64 {
    let bits = coordinates.into_iter().fold(mix(seed), |state, c| mix(state ^ mix(c)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
