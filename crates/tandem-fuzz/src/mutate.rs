//! Mutations of inputs that a seed decides: bits, bytes, lengths, numbers, and parts of other inputs.

/// Generator of mutations: SplitMix64 (Steele et al. 2014).
pub struct Mutator(u64);

/// Numbers that readers should not trust, as text.
const NUMBERS: [&str; 16] = [
    "0",
    "-1",
    "1e308",
    "-1e400",
    "0.5",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1000000000000000000000000000000",
    "null",
];

/// Numbers that readers should not trust, as bytes.
const WORDS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

impl Mutator {
    /// Creates a generator from a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws a number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// Mutates one of `seeds` in one to four places.
    ///
    /// # Panics
    /// If there are no seeds.
    pub fn mutate(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(4) {
            self.change(&mut bytes, seeds);
        }
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let at = self.below(bytes.len());
        match self.below(9) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = self.below(256) as u8,
            2 => bytes.truncate(at),
            3 => _ = bytes.drain(at..at + self.length(bytes.len() - at)),
            4 => {
                let part = bytes[at..at + self.length(bytes.len() - at)].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
            5 => {
                let other = &seeds[self.below(seeds.len())];
                let from = self.below(other.len());
                let part = &other[from..from + self.length(other.len() - from)];
                let end = at + self.length(bytes.len() - at);
                bytes.splice(at..end, part.iter().copied());
            }
            6 => self.word(bytes, at),
            _ => self.number(bytes),
        }
    }

    /// Draws a length up to `most`, mostly a short one.
    fn length(&mut self, most: usize) -> usize {
        let bound = if self.below(4) == 0 { most } else { most.min(16) };
        self.below(bound + 1)
    }

    /// Overwrites one, two, four or eight bytes, mostly where a field of that width may begin.
    fn word(&mut self, bytes: &mut [u8], at: usize) {
        let width = 1 << self.below(4);
        let at = if self.below(2) == 0 { at } else { at / width * width };
        let word = WORDS[self.below(WORDS.len())].to_le_bytes();
        for (byte, new) in bytes.iter_mut().skip(at).zip(&word[..width]) {
            *byte = *new;
        }
    }

    /// Replaces a number that is written in digits.
    fn number(&mut self, bytes: &mut Vec<u8>) {
        let is_digit = |&at: &usize| bytes[at].is_ascii_digit();
        let starts: Vec<usize> =
            (0..bytes.len()).filter(is_digit).filter(|&at| at == 0 || !is_digit(&(at - 1))).collect();
        if starts.is_empty() {
            return;
        }
        let start = starts[self.below(starts.len())];
        let end = (start..bytes.len()).find(|at| !is_digit(at)).unwrap_or(bytes.len());
        let number = NUMBERS[self.below(NUMBERS.len())];
        bytes.splice(start..end, number.bytes());
    }
}
