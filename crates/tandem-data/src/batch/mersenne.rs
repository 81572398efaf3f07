//! Mersenne Twister MT19937 (Matsumoto and Nishimura 1998), the generator of torch on the CPU.

const LENGTH: usize = 624;
const MIDDLE: usize = 397;

/// Generator that equals `torch.Generator().manual_seed(seed)`.
pub(crate) struct Mersenne {
    state: [u32; LENGTH],
    next: usize,
}

impl Mersenne {
    /// Seeds the generator; as in torch only the low 32 bits count.
    pub(super) fn new(seed: u64) -> Self {
        let mut state = [seed as u32; LENGTH];
        for i in 1..LENGTH {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: LENGTH }
    }

    /// Returns the next 32 random bits.
    pub(super) fn next_u32(&mut self) -> u32 {
        if self.next == LENGTH {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..LENGTH {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % LENGTH] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + MIDDLE) % LENGTH] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_stream_comes_out() {
        // The C++ standard ([rand.predef]) requires this 10000th output of mt19937 seeded 5489.
        let mut generator = Mersenne::new(5489);
        let last = (0..10_000).map(|_| generator.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }
}
