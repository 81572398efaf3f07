//! Choice of the algorithm of a GEMM by timing.
//!
//! The library's heuristic ranks its algorithms without running them. Here the best of its list run on
//! scratch memory of the shape, in turns, each with the operands out of the second-level cache.

use super::driver::{Algorithm, Drivers, Event, Matmul, MatmulChoice, Region, Stream};
use crate::Result;

/// Most algorithms that are timed for a shape.
pub const CANDIDATES: usize = 16;

/// Timed runs of an algorithm, after one that is not timed. An odd number: the median is one of them.
const RUNS: usize = 7;

/// Algorithms slower than this times the fastest in the first timed run have no further runs.
const NEAR: f32 = 1.5;

/// Part of the first choice's time that another algorithm must not exceed. Smaller differences are
/// noise, and would make choices differ from machine to machine for nothing.
const MARGIN: f32 = 0.98;

/// Bytes copied from the host to fill scratch memory.
const PATTERN: usize = 1 << 16;

/// Median time of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedAlgorithm {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Median of its runs in milliseconds; of one run if that was far from the fastest.
    pub milliseconds: f32,
}

/// Outcome of [`Autotuner::choose`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// An algorithm that is kept on disk.
    Chosen(MatmulChoice),
    /// The library offers no choice.
    NotOffered,
    /// Nothing can be kept, so that the next run might choose otherwise.
    NotKept,
}

/// Timer of GEMMs on a GPU, with scratch memory of its own.
pub struct Autotuner {
    driver: Drivers,
    stream: Stream,
    events: [Event; 2],
    scratch: Box<dyn Region>,
    /// Bytes at the beginning that are cleared before each run, to empty the cache.
    flushed: usize,
}

impl Autotuner {
    /// Allocates memory for the largest of these shapes.
    ///
    /// # Errors
    /// The GPU has no room.
    pub fn new(driver: Drivers, products: &[Matmul]) -> Result<Self> {
        let flushed = 2 * driver.properties().l2_cache;
        let operands = products.iter().map(|product| product.rounded().placed(flushed as u64).1).max();
        let bytes = (flushed + operands.unwrap_or(0)).max(PATTERN);
        let scratch = driver.reserve(bytes)?;
        scratch.grow(bytes)?;
        let (stream, events) = (driver.new_stream()?, [driver.new_event()?, driver.new_event()?]);
        let this = Self { driver, stream, events, scratch, flushed };
        this.fill(bytes)?;
        Ok(this)
    }

    /// Fills the scratch memory with small numbers: a GPU multiplies zeros with less power, and faster.
    fn fill(&self, bytes: usize) -> Result<()> {
        let pinned = self.driver.pinned(PATTERN)?;
        pinned.grow(PATTERN)?;
        let mut state = 1u32;
        let numbers = (0..PATTERN / 2).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            half::bf16::from_f32((state >> 8) as f32 / (1 << 24) as f32 - 0.5).to_bits()
        });
        let host = std::ptr::with_exposed_provenance_mut::<u16>(pinned.base() as usize);
        let base = self.scratch.base();
        // SAFETY: the pinned memory was just mapped and is unshared, as is the scratch memory, whose
        // filled part is copied behind itself.
        unsafe {
            numbers.enumerate().for_each(|(i, bits)| host.add(i).write(bits));
            self.driver.copy(self.stream, pinned.base(), base, PATTERN)?;
            let mut filled = PATTERN;
            while filled < bytes {
                let more = filled.min(bytes - filled);
                self.driver.copy(self.stream, base, base + filled as u64, more)?;
                filled += more;
            }
        }
        // Before the pinned memory is freed.
        self.driver.synchronize(self.stream)
    }

    /// Times the algorithms of a rounded shape, the library's first choice first.
    ///
    /// # Errors
    /// The library cannot multiply this shape, or the GPU fails.
    ///
    /// # Panics
    /// The shape is larger than those of [`Autotuner::new`].
    pub fn time(&self, product: &Matmul) -> Result<Vec<TimedAlgorithm>> {
        let product = product.rounded();
        let (placed, bytes) = product.placed(self.scratch.base() + self.flushed as u64);
        assert!(self.flushed + bytes <= self.scratch.mapped(), "scratch memory for {}", product.key());
        let algorithms = self.driver.algorithms(&placed, CANDIDATES)?;
        let mut samples = vec![Vec::with_capacity(RUNS); algorithms.len()];
        let mut is_out = vec![false; algorithms.len()];
        for run in 0..=RUNS {
            for (i, algorithm) in algorithms.iter().enumerate() {
                if is_out[i] {
                    continue;
                }
                match self.run(&placed, algorithm) {
                    // The first loads the algorithm's code.
                    Ok(_) if run == 0 => {}
                    Ok(milliseconds) => samples[i].push(milliseconds),
                    // The library listed an algorithm that it then refuses.
                    Err(_) if i > 0 => is_out[i] = true,
                    Err(error) => return Err(error),
                }
            }
            if run == 1 {
                let fastest = samples.iter().flatten().copied().fold(f32::INFINITY, f32::min);
                for (is_out, samples) in is_out.iter_mut().zip(&samples) {
                    *is_out |= samples.iter().any(|&milliseconds| milliseconds > NEAR * fastest);
                }
                // Others are compared with it.
                is_out.iter_mut().take(1).for_each(|is_out| *is_out = false);
            }
        }
        let median = |samples: &mut Vec<f32>| {
            samples.sort_by(f32::total_cmp);
            samples.get(samples.len() / 2).copied()
        };
        let timed = algorithms.into_iter().zip(&mut samples).filter_map(|(algorithm, samples)| {
            Some(TimedAlgorithm { algorithm, milliseconds: median(samples)? })
        });
        Ok(timed.collect())
    }

    /// Returns the milliseconds of one run.
    fn run(&self, product: &Matmul, algorithm: &Algorithm) -> Result<f32> {
        let (driver, [start, end]) = (&self.driver, self.events);
        // SAFETY: the scratch memory has room for what is cleared, and behind it for the operands.
        unsafe {
            driver.clear(self.stream, self.scratch.base(), self.flushed)?;
            driver.record(start, self.stream)?;
            driver.matmul_by(self.stream, product, algorithm)?;
        }
        driver.record(end, self.stream)?;
        driver.finish(end)?;
        driver.elapsed(start, end)
    }

    /// Chooses the algorithm of a shape: the one that is kept on disk, else the fastest, which is then
    /// kept.
    ///
    /// # Errors
    /// As [`Autotuner::time`].
    pub fn choose(&self, product: &Matmul) -> Result<Choice> {
        let shape = product.key();
        if let Some(algorithm) = self.driver.kept(&shape)
            && self.driver.accepts(product, &algorithm)?
        {
            return Ok(Choice::Chosen(MatmulChoice { shape, algorithm }));
        }
        let Some(algorithm) = fastest(&self.time(product)?) else { return Ok(Choice::NotOffered) };
        let kept = self.driver.keep(&MatmulChoice { shape: shape.clone(), algorithm });
        Ok(kept.map_or(Choice::NotKept, |algorithm| Choice::Chosen(MatmulChoice { shape, algorithm })))
    }
}

impl Drop for Autotuner {
    fn drop(&mut self) {
        // Its memory is freed after this.
        self.driver.end_stream(self.stream);
        self.events.into_iter().for_each(|event| self.driver.end_event(event));
    }
}

/// Returns the fastest algorithm, which is the first unless another is clearly faster.
pub fn fastest(timed: &[TimedAlgorithm]) -> Option<Algorithm> {
    let first = timed.first()?;
    let best = timed.iter().min_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds))?;
    let is_clear = best.milliseconds <= MARGIN * first.milliseconds;
    Some(if is_clear { best.algorithm } else { first.algorithm })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_difference_beats_the_first_choice() {
        let timed = |all: &[f32]| -> Vec<TimedAlgorithm> {
            let timed = |(i, &milliseconds): (usize, &f32)| TimedAlgorithm {
                algorithm: Algorithm([i as u64; 8]),
                milliseconds,
            };
            all.iter().enumerate().map(timed).collect()
        };
        let index = |all: &[f32]| fastest(&timed(all)).map(|algorithm| algorithm.0[0]);
        assert_eq!(index(&[]), None);
        assert_eq!(index(&[2.0]), Some(0));
        assert_eq!(index(&[2.0, 1.99, 2.5]), Some(0));
        assert_eq!(index(&[2.0, 1.9, 1.5, 1.5]), Some(2));
    }
}
