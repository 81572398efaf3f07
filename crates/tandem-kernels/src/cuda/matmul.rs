//! Shapes of GEMMs: their key in the choice of an algorithm, and memory for one.
//!
//! Batches differ in their number of tokens, so the choice is made for that number rounded up to three
//! bits. Addresses count by their alignment up to 16 bytes: a tensor's position does not change bits.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use super::driver::{Algorithm, Factor, FactorType, Matmul};

/// Widest access in bytes: the largest alignment that matters.
const WIDEST: u64 = 16;

/// Distance between operands that [`Matmul::placed`] lays out, in bytes.
const BOUNDARY: u64 = 256;

/// Returns the alignment of an address in bytes, 1 to 16.
pub(crate) fn alignment(address: u64) -> u32 {
    1 << (address | WIDEST).trailing_zeros()
}

/// Rounds a number of tokens up to three bits; a number of at most 8 is kept.
pub fn rounded(tokens: usize) -> usize {
    tokens.next_multiple_of((tokens.next_power_of_two() / 8).max(1))
}

/// Returns the rounded numbers of tokens above half of `tokens`, up to its own, in descending order.
pub fn token_counts(tokens: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (tokens / 2 + 1..=rounded(tokens)).map(rounded).collect();
    counts.dedup();
    counts.reverse();
    counts
}

impl Matmul {
    /// Returns the GEMM with its number of tokens rounded, if it has one: where the number of rows or
    /// the depth is no distance in memory.
    #[must_use]
    pub fn rounded(&self) -> Self {
        match self.tokens() {
            Some(tokens) => self.with_tokens(rounded(tokens)),
            None => *self,
        }
    }

    /// Returns the dimension that may be a number of tokens: rows, or the depth of a sum over rows of
    /// both factors.
    pub fn tokens(&self) -> Option<usize> {
        match [self.a.along_depth, self.b.along_depth] {
            [true, _] => Some(self.size[0]),
            [false, false] => Some(self.size[2]),
            [false, true] => None,
        }
    }

    /// Replaces the number of tokens.
    #[must_use]
    pub fn with_tokens(&self, tokens: usize) -> Self {
        let [m, n, k] = self.size;
        let size = if self.a.along_depth { [tokens, n, k] } else { [m, n, tokens] };
        Self { size, ..*self }
    }

    /// Returns the GEMM with each address replaced by its alignment: equal for all of a shape.
    #[must_use]
    pub fn without_addresses(&self) -> Self {
        let aligned = |address: u64| u64::from(alignment(address));
        let factor = |factor: Factor| Factor { address: aligned(factor.address), ..factor };
        Self {
            a: factor(self.a),
            b: factor(self.b),
            c: self.c.map(|(address, stride)| (aligned(address), stride)),
            d: (aligned(self.d.0), self.d.1),
            ..*self
        }
    }

    /// Returns the name of the rounded shape: size, types, strides and alignments.
    pub fn key(&self) -> String {
        let Self { size: [m, n, k], dtype, a, b, c, d, d_type, tf32 } = self.rounded();
        let factor = |factor: Factor| {
            let rows = if factor.along_depth { "k" } else { "mn" };
            format!("{}/{rows}/{}", factor.stride, alignment(factor.address))
        };
        let sum = |(address, stride): (u64, usize)| format!("{stride}/{}", alignment(address));
        let tf32 = if tf32 && dtype == FactorType::F32 { " tf32" } else { "" };
        let c = c.map_or("none".to_owned(), sum);
        format!("{m}x{n}x{k} {dtype} to {d_type}{tf32}, a {} b {} c {c} d {}", factor(a), factor(b), sum(d))
    }

    /// Returns the GEMM with all operands in scratch memory from `base` on, aligned as they are, and the
    /// bytes of that memory. An addend is the result itself.
    pub fn placed(&self, base: u64) -> (Self, usize) {
        let [m, n, k] = self.size;
        let mut end = base;
        let mut place = |rows: usize, stride: usize, size: usize, address: u64| {
            let start = end.next_multiple_of(BOUNDARY) + u64::from(alignment(address)) % WIDEST;
            end = start + (rows * stride.max(1) * size) as u64;
            start
        };
        let mut factor = |factor: Factor, beside: usize| {
            let rows = if factor.along_depth { beside } else { k };
            Factor { address: place(rows, factor.stride, self.dtype.size(), factor.address), ..factor }
        };
        let (a, b) = (factor(self.a, m), factor(self.b, n));
        let d = (place(m, self.d.1, self.d_type.size(), self.d.0), self.d.1);
        // Addend and result of a GEMM are alike but in their strides.
        let c = self.c.map(|(address, stride)| match stride == self.d.1 {
            true => d,
            false => (place(m, stride, self.d_type.size(), address), stride),
        });
        (Self { a, b, c, d, ..*self }, (end - base) as usize)
    }

    /// Returns the floating-point operations.
    pub fn flops(&self) -> f64 {
        2.0 * self.size.iter().map(|&n| n as f64).product::<f64>()
    }
}

/// Eight words in hexadecimal.
impl Display for Algorithm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|word| write!(f, "{word:016x}"))
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("an algorithm is 128 hexadecimal digits, not {text:?}");
        if text.len() != 128 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut words = [0; 8];
        for (i, word) in words.iter_mut().enumerate() {
            *word = u64::from_str_radix(&text[16 * i..16 * (i + 1)], 16).map_err(|_| wrong())?;
        }
        Ok(Self(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn matmul(size: [usize; 3], [a, b]: [bool; 2]) -> Matmul {
        let factor = |address, along_depth| Factor { address, stride: 1 << 12, along_depth };
        Matmul {
            size,
            dtype: FactorType::Bf16,
            a: factor(1 << 20, a),
            b: factor(1 << 21, b),
            c: None,
            d: (1 << 22, 1 << 12),
            d_type: DType::F32,
            tf32: true,
        }
    }

    #[test]
    fn the_number_of_tokens_is_rounded_up_to_three_bits() {
        let size = |size, along_depth| matmul(size, along_depth).rounded().size;
        assert_eq!(size([16_197, 2047, 3071], [true, true]), [16_384, 2047, 3071]);
        assert_eq!(size([8193, 2047, 3071], [true, false]), [10_240, 2047, 3071]);
        assert_eq!(size([2047, 3071, 16_197], [false, false]), [2047, 3071, 16_384]);
        assert_eq!(size([2047, 3071, 16_197], [false, true]), [2047, 3071, 16_197]);
        for few in 1..=8 {
            assert_eq!(size([few, 5, 7], [true, true]), [few, 5, 7]);
        }
        assert_eq!(size([9, 5, 7], [true, true]), [10, 5, 7]);
        assert_eq!(token_counts(8192), [8192, 7168, 6144, 5120]);
        assert_eq!(token_counts(5000), [5120, 4096, 3584, 3072, 2560]);
        assert_eq!(token_counts(3), [3, 2]);
        assert_eq!(token_counts(1), [1]);
    }

    #[test]
    fn a_key_tells_shapes_apart_and_not_places() {
        let one = matmul([4096, 512, 256], [true, true]);
        let moved = Matmul { a: Factor { address: 48, ..one.a }, d: (1 << 30, 1 << 12), ..one };
        let near = Matmul { size: [3800, 512, 256], ..one };
        for same in [moved, near, one.without_addresses(), Matmul { tf32: false, ..one }] {
            assert_eq!(same.key(), one.key());
        }
        let others = [
            Matmul { size: [4097, 512, 256], ..one },
            Matmul { a: Factor { address: 8, ..one.a }, ..one },
            Matmul { b: Factor { along_depth: false, ..one.b }, ..one },
            Matmul { b: Factor { stride: 5000, ..one.b }, ..one },
            Matmul { c: Some(one.d), ..one },
            Matmul { d: (4, one.d.1), ..one },
            Matmul { dtype: FactorType::E4m3, ..one },
            Matmul { dtype: FactorType::F32, ..one },
            Matmul { dtype: FactorType::F32, tf32: false, ..one },
            Matmul { d_type: DType::Bf16, ..one },
        ];
        let mut keys: Vec<String> = others.iter().chain([&one]).map(Matmul::key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), others.len() + 1);
    }

    #[test]
    fn scratch_memory_has_room_for_every_operand_at_its_alignment() {
        let mut product = matmul([6, 5, 7], [true, false]);
        product.a.address += 2;
        product.c = Some((8, 100));
        let (placed, bytes) = product.placed(1 << 30);
        assert_eq!(placed.without_addresses(), product.without_addresses());
        let rows = |address: u64, rows: usize, stride: usize, size: usize| {
            (address, address + (rows * stride * size) as u64)
        };
        let mut all = [
            rows(placed.a.address, 6, 1 << 12, 2),
            rows(placed.b.address, 7, 1 << 12, 2),
            rows(placed.d.0, 6, 1 << 12, 4),
            rows(placed.c.unwrap().0, 6, 100, 4),
        ];
        all.sort_unstable();
        assert!(all[0].0 >= 1 << 30 && all[3].1 <= (1 << 30) + bytes as u64);
        assert!(all.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{all:?}");
        let in_place = Matmul { c: Some(product.d), ..product }.placed(1 << 30).0;
        assert_eq!(in_place.c, Some(in_place.d));
    }

    #[test]
    fn an_algorithm_is_read_as_it_is_written() {
        let algorithm = Algorithm([0, 1, u64::MAX, 3 << 40, 4, 5, 6, 1 << 63]);
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        for wrong in ["", "12", &"x".repeat(128), &"é".repeat(64), &"0".repeat(129)] {
            assert!(wrong.parse::<Algorithm>().unwrap_err().contains("128 hexadecimal digits"));
        }
    }
}
