//! Random numbers as a function of their purpose, not of how many were drawn before.

/// Returns SplitMix64's output (Steele, Lea and Flood, 2014) after one step from state `x`.
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Returns a number in [0, 1) with 53 bits, a function of the seed and these coordinates.
pub(crate) fn uniform(seed: u64, coordinates: [u64; 3]) -> f64 {
    let bits = coordinates.into_iter().fold(mix(seed), |state, c| mix(state ^ mix(c)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
