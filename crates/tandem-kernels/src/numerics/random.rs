//! The generator behind dropout masks and stochastic rounding: SplitMix64 (Steele, Lea and Flood,
//! 2014).

/// Increment of the state.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes a state: each bit of the result depends on every bit of `x`.
#[inline(always)]
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
