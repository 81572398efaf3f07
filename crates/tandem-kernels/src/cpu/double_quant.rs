//! Double quantisation of nf4 scales: each scale less the mean is a byte into one table, times the
//! largest of 256 neighbours. Matches the arithmetic order of bitsandbytes 0.50 and torch 2 on the
//! CPU.

use std::sync::LazyLock;

/// Values of the bytes, ascending: bitsandbytes' `create_dynamic_map(signed=True)`. They are 1, 2,
/// 4, … 64 numbers of seven decades, the last of which ends at 1, their negatives, 0 and 1.
pub(crate) static TABLE: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut numbers = vec![0.0, 1.0];
    for decade in 0..7 {
        let count = 1u32 << decade;
        // Bounds from 0.1 to 1, rounded as `torch.linspace` rounds them: from the nearer end, with
        // one rounding.
        let step = (1.0 - 0.1f32) / count as f32;
        let bound = |i: u32| {
            if 2 * i <= count {
                step.mul_add(i as f32, 0.1)
            } else {
                step.mul_add(-((count - i) as f32), 1.0)
            }
        };
        let factor = 10f64.powi(decade - 6) as f32;
        for i in 0..count {
            let middle = factor * ((bound(i) + bound(i + 1)) / 2.0);
            numbers.extend([middle, -middle]);
        }
    }
    numbers.sort_by(f32::total_cmp);
    numbers.try_into().expect("2 + 2·127 numbers")
});

/// Midpoints of [`TABLE`]: the byte of a number is the count of midpoints below it.
static BOUNDS: LazyLock<[f32; 255]> =
    LazyLock::new(|| std::array::from_fn(|i| 0.5 * (TABLE[i] + TABLE[i + 1])));

/// Steps of the grid on [-1, 1] that numbers are rounded to before the look-up. bitsandbytes does
/// so for speed; where the table is finer than the grid, the byte is not always the nearest.
const GRID: f32 = 65_535.0;

/// Quantises up to 256 scales less their mean to bytes, and returns their common factor.
pub(super) fn quantise(scales: &[f32], mean: f32, bytes: &mut [u8]) -> f32 {
    let (table_bounds, largest) =
        (&*BOUNDS, scales.iter().fold(0.0f32, |m, scale| m.max((scale - mean).abs())));
    if largest == 0.0 {
        bytes.fill(0);
        return 0.0;
    }
    let inverse = 1.0 / largest;
    for (byte, scale) in bytes.iter_mut().zip(scales) {
        let x = ((scale - mean) * inverse).clamp(-1.0, 1.0);
        let place = ((x + 1.0) * 0.5 * GRID + 0.5).floor();
        let x = 2.0 * place / GRID - 1.0;
        *byte = table_bounds.partition_point(|bound| *bound < x) as u8;
    }
    largest
}

/// Reads a scale back from its byte.
#[inline(always)]
pub(super) fn dequantise(byte: u8, largest: f32, mean: f32, table: &[f32; 256]) -> f32 {
    table[usize::from(byte)] * largest + mean
}

/// Computes the mean with the bits of `torch.mean` on one CPU thread. (With more threads, torch
/// splits rows of 32,768 or more numbers.)
pub(super) fn mean(x: &[f32]) -> f32 {
    /// f32 lanes of the registers of torch's sums.
    const LANES: usize = 8;
    let sum = if x.len() < LANES {
        lane_sums(x.as_chunks::<1>().0)[0]
    } else {
        let (registers, rest) = x.as_chunks::<LANES>();
        let rest: f32 = rest.iter().fold(0.0, |sum, x| sum + x);
        lane_sums(registers).iter().fold(rest, |sum, x| sum + x)
    };
    sum / x.len() as f32
}

/// Sums each lane as four sums of every fourth register. Each sums runs, then runs of runs, at four
/// levels, so that large sums do not swallow small numbers.
fn lane_sums<const N: usize>(registers: &[[f32; N]]) -> [f32; N] {
    const LEVELS: usize = 4;
    let add = |sums: &mut [f32; N], x: &[f32; N]| {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += x;
        }
    };
    let (groups, rest) = registers.as_chunks::<4>();
    let count = groups.len();
    let log2 = count.next_power_of_two().trailing_zeros() as usize;
    let power = (log2 / LEVELS).max(4);
    let run = 1usize << power;
    let mut sums = [[[0.0f32; N]; 4]; LEVELS];
    for (i, group) in groups.iter().enumerate() {
        for k in 0..4 {
            add(&mut sums[0][k], &group[k]);
        }
        // A complete run moves up a level, and further while it completes a run of runs.
        let mut done = i + 1;
        for level in 1..LEVELS {
            if !done.is_multiple_of(run) {
                break;
            }
            done /= run;
            for k in 0..4 {
                let below = std::mem::replace(&mut sums[level - 1][k], [0.0; N]);
                add(&mut sums[level][k], &below);
            }
        }
    }
    let [mut total, above @ ..] = sums;
    for level in above {
        for k in 0..4 {
            add(&mut total[k], &level[k]);
        }
    }
    let [mut first, others @ ..] = total;
    rest.iter().for_each(|x| add(&mut first, x));
    others.iter().for_each(|x| add(&mut first, x));
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits of `x.mean()` with torch 2.15.0 on one thread, for
    /// `i = torch.arange(n); x = (i * i * 7919 % 16_777_213).float() / 2**24; x = x * x * 3.0`.
    /// More scales are added up in more levels.
    #[test]
    fn the_mean_has_the_bits_of_torch() {
        let expected = [
            (1, 0),
            (7, 0x3963_c650),
            (8, 0x39cc_d26e),
            (100, 0x3f46_8412),
            (4097, 0x3f7d_01e4),
            (32_768, 0x3f7e_8021),
            (200_003, 0x3f7f_7f5e),
            (1_500_000, 0x3f80_01ba),
        ];
        for (count, bits) in expected {
            let number = |i: u64| {
                let x = (i * i * 7919 % 16_777_213) as f32 / (1 << 24) as f32;
                x * x * 3.0
            };
            let x: Vec<f32> = (0..count).map(number).collect();
            assert_eq!(mean(&x).to_bits(), bits, "{count} numbers");
        }
    }
}
