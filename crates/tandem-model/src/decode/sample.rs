//! Sampling of a token from logits.

use tandem_kernels::ops::{Draw, HeadShape};
use tandem_kernels::{Device, ops};

use crate::random::uniform;
use crate::{ModelError, Result};

/// Sampling options, applied in this order: penalty, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides positive logits, and multiplies negative ones, of tokens in prompt or completion; 1
    /// leaves them.
    pub repetition_penalty: f32,
    /// Divides the logits; 0, or less than a normal f32, takes the most likely token (the smallest id of equals).
    pub temperature: f32,
    /// Samples from this many most likely tokens.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of most likely tokens with at least this probability; 1 is
    /// all.
    pub top_p: f32,
    /// Samples from tokens of at least this fraction of the largest probability; 0 is all.
    pub min_p: f32,
    /// Seed. A draw depends on it and on the numbers of prompt, completion and token alone.
    pub seed: u64,
}

impl Default for Sampling {
    /// Returns the model's own distribution.
    fn default() -> Self {
        Self { repetition_penalty: 1.0, temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self =
        Self { repetition_penalty: 1.0, temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Checks the ranges of the options.
    pub fn check(&self) -> Result<()> {
        let Self { repetition_penalty, temperature, top_k, top_p, min_p, .. } = *self;
        let problem = if !(temperature >= 0.0 && temperature.is_finite()) {
            format!("temperature is {temperature}, expected 0 or more")
        } else if !(top_p > 0.0 && top_p <= 1.0) {
            format!("top_p is {top_p}, expected more than 0 and at most 1")
        } else if !(0.0..=1.0).contains(&min_p) {
            format!("min_p is {min_p}, expected 0 to 1")
        } else if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            format!("repetition_penalty is {repetition_penalty}, expected more than 0")
        } else if top_k == Some(0) {
            "top_k is 0, expected at least 1".into()
        } else {
            return Ok(());
        };
        Err(ModelError::Invalid(problem))
    }

    /// Samples a token from raw logits, which are overwritten. `seen` are the tokens so far;
    /// `place` holds the numbers of prompt, completion and token.
    pub(super) fn draw(
        &self,
        device: &Device,
        logits: &mut [f32],
        head: &HeadShape,
        seen: [&[u32]; 2],
        place: [u64; 3],
    ) -> Result<u32> {
        // Mixtures have logits of −∞. Without a branch in the loop it is as fast as memory.
        if !logits.iter().fold(true, |are_numbers, &logit| are_numbers & (logit < f32::INFINITY)) {
            return Err(ModelError::NotFinite { token: place[2] });
        }
        let is_penalised = self.repetition_penalty != 1.0;
        // Scale and softcap grow with the logit: they do not change which is largest.
        if is_penalised || !self.is_greedy() {
            ops::shape_logits(device, logits, head)?;
        }
        if is_penalised {
            self.penalise(logits, seen);
        }
        if self.is_greedy() {
            return Ok(argmax(logits));
        }
        ops::relative_weights(device, logits, self.temperature)?;
        let uniform = uniform(self.seed, place);
        let picked = match self.draws_from_all(logits.len()) {
            true => pick_of_all(logits, uniform),
            false => pick(self.candidates(logits).into_iter(), uniform),
        };
        // Without a pick every logit is −∞.
        picked.ok_or(ModelError::NotFinite { token: place[2] })
    }

    /// Returns the draw from all tokens that a GPU can make, as [`Sampling::draw`] would, if the options ask for
    /// one. Sums of weights may differ in their last bits, and with them a token at a border.
    pub(super) fn whole_draw(&self, vocabulary: usize, place: [u64; 3]) -> Option<Draw> {
        let is_greedy = self.is_greedy();
        let is_whole = self.repetition_penalty == 1.0 && (is_greedy || self.draws_from_all(vocabulary));
        let temperature = if is_greedy { 0.0 } else { self.temperature };
        is_whole.then(|| Draw { temperature, uniform: uniform(self.seed, place) })
    }

    /// Returns whether the most likely token is taken. The inverse of a smaller temperature is infinite.
    fn is_greedy(&self) -> bool {
        self.temperature < f32::MIN_POSITIVE
    }

    /// Returns whether no option leaves a token out.
    fn draws_from_all(&self, vocabulary: usize) -> bool {
        self.top_k.is_none_or(|k| k >= vocabulary) && self.top_p >= 1.0 && self.min_p == 0.0
    }

    fn penalise(&self, logits: &mut [f32], seen: [&[u32]; 2]) {
        let mut seen = seen.concat();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            let logit = &mut logits[token as usize];
            let penalised = if *logit < 0.0 {
                *logit * self.repetition_penalty
            } else {
                *logit / self.repetition_penalty
            };
            *logit = penalised.clamp(f32::MIN, f32::MAX);
        }
    }

    /// Returns `(weight, id)` of the tokens to sample from, by their weights relative to the
    /// likeliest.
    fn candidates(&self, weights: &[f32]) -> Vec<(f32, u32)> {
        // Without `top_p`, `min_p` may be applied first: the result is the same.
        let least = if self.top_p < 1.0 { 0.0 } else { self.min_p };
        let mut candidates: Vec<(f32, u32)> =
            weights.iter().copied().zip(0..).filter(|c| c.0 >= least).collect();
        if let Some(k) = self.top_k.filter(|&k| k < candidates.len()) {
            candidates.select_nth_unstable_by(k - 1, likelier);
            candidates.truncate(k);
        }
        if self.top_p < 1.0 {
            keep_nucleus(&mut candidates, self.top_p);
            candidates.retain(|c| c.0 >= self.min_p);
        }
        candidates.sort_unstable_by_key(|c| c.1);
        candidates
    }
}

/// Returns the candidate at this fraction of the total weight.
fn pick(candidates: impl Iterator<Item = (f32, u32)> + Clone, uniform: f64) -> Option<u32> {
    let total: f64 = candidates.clone().map(|c| f64::from(c.0)).sum();
    let (mut left, mut last) = (uniform * total, None);
    for (weight, id) in candidates.filter(|c| c.0 > 0.0) {
        left -= f64::from(weight);
        last = Some(id);
        if left < 0.0 {
            break;
        }
    }
    // Rounding may leave a remainder.
    last
}

/// Returns the token at this fraction of the total weight, as [`pick`], for all tokens in order.
/// Sums of chunks round differently.
fn pick_of_all(weights: &[f32], uniform: f64) -> Option<u32> {
    const MANY: usize = 512;
    let total: f64 = weights.chunks(MANY).map(sum).sum();
    let mut left = uniform * total;
    let mut last = None;
    for (index, chunk) in weights.chunks(MANY).enumerate() {
        let whole = sum(chunk);
        if left >= whole {
            left -= whole;
            continue;
        }
        let first = (index * MANY) as u32;
        for (&weight, id) in chunk.iter().zip(first..).filter(|(weight, _)| **weight > 0.0) {
            left -= f64::from(weight);
            last = Some(id);
            if left < 0.0 {
                return last;
            }
        }
        // Rounding left a remainder of this chunk.
        if last.is_some() {
            return last;
        }
    }
    weights.iter().rposition(|&weight| weight > 0.0).map(|last| last as u32)
}

/// Sums in eight lanes.
fn sum(weights: &[f32]) -> f64 {
    let (eights, rest) = weights.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for eight in eights {
        sums.iter_mut().zip(eight).for_each(|(sum, &weight)| *sum += f64::from(weight));
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&weight| f64::from(weight)).sum::<f64>()
}

/// Orders likelier first; of equals the smaller id, so that the order is total.
fn likelier(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Keeps the likeliest candidates whose weights first reach this fraction of the total.
fn keep_nucleus(candidates: &mut Vec<(f32, u32)>, part: f32) {
    let total: f64 = candidates.iter().map(|c| f64::from(c.0)).sum();
    let mass = f64::from(part) * total;
    // Together, candidates dropped here weigh less than `total − mass`, so the nucleus is among the
    // rest, and the sort is short.
    let least = (total - mass) / candidates.len() as f64;
    candidates.retain(|c| f64::from(c.0) >= least);
    candidates.sort_unstable_by(likelier);
    let mut sum = 0.0;
    let inside = candidates.iter().take_while(|c| {
        let before = sum;
        sum += f64::from(c.0);
        before < mass
    });
    let inside = inside.count();
    candidates.truncate(inside.max(1));
}

/// Returns the first of the largest.
fn argmax(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .zip(0u32..)
        .fold((f32::NEG_INFINITY, 0), |best, (&logit, id)| if logit > best.0 { (logit, id) } else { best });
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: HeadShape = HeadShape { softcap: None, logit_scale: None };

    /// Logits whose softmax is these probabilities.
    fn logits(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    fn shares(sampling: Sampling, probabilities: &[f64], draws: u64) -> Vec<f64> {
        let logits = logits(probabilities);
        let mut counts = vec![0.0; logits.len()];
        for i in 0..draws {
            counts[draw(sampling, &logits, &HEAD, i) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn draw(sampling: Sampling, logits: &[f32], head: &HeadShape, answer: u64) -> u32 {
        let device = Device::meta();
        sampling.draw(&device, &mut logits.to_vec(), head, [&[], &[]], [0, answer, 0]).unwrap()
    }

    fn near(found: &[f64], expected: &[f64]) {
        for (f, e) in found.iter().zip(expected) {
            // Five standard errors of 20,000 draws, which a fixed seed makes the same everywhere.
            assert!((f - e).abs() < 5.0 * (0.25f64 / 20_000.0).sqrt(), "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        near(&shares(sampling, &[0.5, 0.2, 0.3], 20_000), &[0.5, 0.2, 0.3]);
    }

    #[test]
    fn temperature_sharpens() {
        let sampling = Sampling { temperature: 0.5, seed: 3, ..Sampling::default() };
        near(&shares(sampling, &[0.75, 0.25], 20_000), &[0.9, 0.1]);
    }

    #[test]
    fn top_k_draws_from_the_k_likeliest() {
        let sampling = Sampling { top_k: Some(2), seed: 3, ..Sampling::default() };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 20_000), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_it() {
        let sampling = Sampling { top_p: 0.6, seed: 3, ..Sampling::default() };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 20_000), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        // Smaller than any token: the likeliest alone.
        let sampling = Sampling { top_p: 1e-6, ..sampling };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 100), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn min_p_drops_what_is_far_below_the_likeliest() {
        let sampling = Sampling { min_p: 0.4, seed: 3, ..Sampling::default() };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 20_000), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        // After the nucleus, which drops the second.
        let sampling = Sampling { top_p: 0.5, min_p: 0.1, ..sampling };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 100), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_penalty_makes_tokens_that_are_there_less_likely() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY };
        let device = Device::meta();
        let greedy = |logits: [f32; 3], prompt: &[u32], answer: &[u32]| {
            sampling.draw(&device, &mut logits.to_vec(), &HEAD, [prompt, answer], [0; 3]).unwrap()
        };
        assert_eq!(greedy([3.0, 2.0, 1.0], &[], &[]), 0);
        assert_eq!(greedy([3.0, 2.0, 1.0], &[0], &[]), 1);
        assert_eq!(greedy([3.0, 2.0, 1.0], &[0], &[1, 0]), 0, "however often a token is there");
        assert_eq!(greedy([-3.0, -2.0, -5.0], &[], &[1]), 0);
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(draw(Sampling::GREEDY, &[0.0, 2.0, 2.0, 1.0], &HEAD, 0), 1);
    }

    #[test]
    fn options_as_small_as_can_be_are_no_error() {
        for temperature in [f32::from_bits(1), 1e-40, 1e-38, f32::MIN_POSITIVE, 1e-30] {
            let sampling = Sampling { temperature, ..Sampling::default() };
            assert_eq!(draw(sampling, &[0.0, 2.0, 1.0], &HEAD, 0), 1, "{temperature:e}");
            let whole = sampling.whole_draw(3, [0; 3]).unwrap();
            assert!(whole.temperature == 0.0 || (1.0 / whole.temperature).is_finite());
        }
        let device = Device::meta();
        for (repetition_penalty, expected) in [(1e-40, 0), (1e38, 1)] {
            let sampling = Sampling { repetition_penalty, seed: 3, ..Sampling::default() };
            let drawn = sampling.draw(&device, &mut [9.0, 8.0, -9.0], &HEAD, [&[0, 2], &[]], [0; 3]);
            assert_eq!(drawn.unwrap(), expected);
        }
    }

    #[test]
    fn softcap_flattens() {
        let head = HeadShape { softcap: Some(0.001), logit_scale: None };
        let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let ones = (0..20_000).filter(|&i| draw(sampling, &[0.0, 9.0], &head, i) == 1).count();
        near(&[ones as f64 / 20_000.0], &[0.5]);
    }

    /// Picks each token at its fraction, in weights of more than one chunk with zeros among them.
    #[test]
    fn of_all_tokens_each_is_picked_at_its_part() {
        let weights: Vec<f32> =
            (0..1700).map(|i| if i % 7 == 0 { 0.0 } else { (i % 13) as f32 + 0.5 }).collect();
        let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        let mut before = 0.0;
        for (id, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            let middle = (before + 0.5 * f64::from(weight)) / total;
            assert_eq!(pick_of_all(&weights, middle), Some(id as u32));
            assert_eq!(pick(weights.iter().copied().zip(0..), middle), Some(id as u32));
            before += f64::from(weight);
        }
        assert_eq!(pick_of_all(&weights, 1.0), Some(1699), "rounding leaves a crumb");
        assert_eq!(pick_of_all(&[0.0, 2.0, 0.0], 1.0), Some(1));
        assert_eq!((pick_of_all(&[0.0; 9], 0.5), pick_of_all(&[f32::NAN; 9], 0.5)), (None, None));
    }

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        for sampling in [Sampling::GREEDY, Sampling { temperature: 1.0, ..Sampling::default() }] {
            for bad in [f32::NAN, f32::INFINITY] {
                let drawn =
                    sampling.draw(&Device::meta(), &mut [0.0, bad, 1.0], &HEAD, [&[], &[]], [0, 0, 7]);
                assert!(matches!(drawn, Err(ModelError::NotFinite { token: 7 })), "{drawn:?}");
            }
        }
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        let drawn = sampling.draw(&Device::meta(), &mut [f32::NEG_INFINITY; 3], &HEAD, [&[], &[]], [0, 0, 7]);
        assert!(matches!(drawn, Err(ModelError::NotFinite { token: 7 })), "{drawn:?}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in [
            Sampling { temperature: -1.0, ..Sampling::GREEDY },
            Sampling { temperature: f32::NAN, ..Sampling::GREEDY },
            Sampling { top_p: 0.0, ..Sampling::GREEDY },
            Sampling { top_k: Some(0), ..Sampling::GREEDY },
            Sampling { min_p: 1.1, ..Sampling::GREEDY },
            Sampling { repetition_penalty: 0.0, ..Sampling::GREEDY },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(Sampling::GREEDY.check().is_ok());
    }
}
