//! Draws that a seed repeats.

/// A linear congruential generator.
pub struct Random(u64);

impl Random {
    /// Begins with `TANDEM_TEST_SEED`, which is printed, or with `seed`.
    pub fn from_environment(seed: u64) -> Self {
        let seed = number("TANDEM_TEST_SEED", seed);
        println!("TANDEM_TEST_SEED={seed}");
        Self(seed)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    pub fn choose<T: Clone>(&mut self, among: &[T]) -> T {
        among[self.below(among.len() as u64) as usize].clone()
    }
}

/// Returns `TANDEM_TEST_ROUNDS`, or `rounds`.
pub fn rounds(rounds: u64) -> u64 {
    number("TANDEM_TEST_ROUNDS", rounds)
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}")))
}
