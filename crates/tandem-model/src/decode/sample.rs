//! From logits to a token.

use tandem_kernels::ops::HeadShape;

use crate::random::uniform;
use crate::{ModelError, Result};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token (of equals, the one with the smallest id).
    pub temperature: f32,
    /// Only this many most likely tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens with at least this probability is drawn from; 1 is everything.
    pub top_p: f32,
    /// Seed. What is drawn depends on it and on the prompt's, the answer's and the token's number alone.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 };

    /// # Errors
    /// If a number is out of range.
    pub(super) fn check(&self) -> Result<()> {
        let Self { temperature, top_k, top_p, .. } = *self;
        let problem = if !(temperature >= 0.0 && temperature.is_finite()) {
            format!("temperature is {temperature}, expected 0 or more")
        } else if !(top_p > 0.0 && top_p <= 1.0) {
            format!("top_p is {top_p}, expected more than 0 and at most 1")
        } else if top_k == Some(0) {
            "top_k is 0, expected at least 1".into()
        } else {
            return Ok(());
        };
        Err(ModelError::Invalid(problem))
    }

    /// Draws a token. `place` is the prompt's, the answer's and the token's number.
    pub(super) fn draw(&self, logits: &[f32], head: &HeadShape, place: [u64; 3]) -> u32 {
        // Scale and softcap grow with the logit: they do not change which is largest.
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        let mut candidates = self.candidates(logits, head);
        let total: f64 = candidates.iter().map(|c| c.0).sum();
        if self.top_p < 1.0 {
            keep_nucleus(&mut candidates, f64::from(self.top_p) * total);
        }
        let total: f64 = candidates.iter().map(|c| c.0).sum();
        let mut left = uniform(self.seed, place) * total;
        for &(weight, id) in &candidates {
            left -= weight;
            if left < 0.0 {
                return id;
            }
        }
        // Rounding may leave a crumb.
        candidates.last().map_or_else(|| argmax(logits), |c| c.1)
    }

    /// `(weight, id)` of the `top_k` tokens, weights relative to the likeliest.
    fn candidates(&self, logits: &[f32], head: &HeadShape) -> Vec<(f64, u32)> {
        let shaped = |logit: f32| {
            let scaled = f64::from(logit) * f64::from(head.logit_scale.unwrap_or(1.0));
            head.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
        };
        let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(shaped(l)));
        let weight = |&logit: &f32| ((shaped(logit) - largest) / f64::from(self.temperature)).exp();
        let mut candidates: Vec<(f64, u32)> = logits.iter().map(weight).zip(0..).collect();
        if let Some(k) = self.top_k.filter(|&k| k < candidates.len()) {
            candidates.select_nth_unstable_by(k - 1, likelier);
            candidates.truncate(k);
            candidates.sort_unstable_by_key(|c| c.1);
        }
        candidates
    }
}

/// Likelier first; of equals the smaller id, so that the order is one.
fn likelier(a: &(f64, u32), b: &(f64, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Keeps the likeliest candidates whose weights first add up to `mass`.
fn keep_nucleus(candidates: &mut Vec<(f64, u32)>, mass: f64) {
    let total: f64 = candidates.iter().map(|c| c.0).sum();
    // What is dropped here weighs less than `total − mass` together, so the nucleus is among the rest: the sort is short.
    let least = (total - mass) / candidates.len() as f64;
    candidates.retain(|c| c.0 >= least);
    candidates.sort_unstable_by(likelier);
    let mut sum = 0.0;
    let inside = candidates.iter().take_while(|c| {
        let before = sum;
        sum += c.0;
        before < mass
    });
    let inside = inside.count();
    candidates.truncate(inside.max(1));
}

/// The first of the largest.
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
            counts[sampling.draw(&logits, &HEAD, [0, i, 0]) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn near(found: &[f64], expected: &[f64]) {
        for (f, e) in found.iter().zip(expected) {
            // Five standard errors of 20,000 draws.
            assert!((f - e).abs() < 5.0 * (0.25f64 / 20_000.0).sqrt(), "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let sampling = Sampling { temperature: 1.0, top_k: None, top_p: 1.0, seed: 3 };
        near(&shares(sampling, &[0.5, 0.2, 0.3], 20_000), &[0.5, 0.2, 0.3]);
    }

    #[test]
    fn temperature_sharpens() {
        let sampling = Sampling { temperature: 0.5, top_k: None, top_p: 1.0, seed: 3 };
        near(&shares(sampling, &[0.75, 0.25], 20_000), &[0.9, 0.1]);
    }

    #[test]
    fn top_k_draws_from_the_k_likeliest() {
        let sampling = Sampling { temperature: 1.0, top_k: Some(2), top_p: 1.0, seed: 3 };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 20_000), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_it() {
        let sampling = Sampling { temperature: 1.0, top_k: None, top_p: 0.6, seed: 3 };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 20_000), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        // Smaller than any token: the likeliest alone.
        let sampling = Sampling { top_p: 1e-6, ..sampling };
        near(&shares(sampling, &[0.1, 0.5, 0.15, 0.25], 100), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(Sampling::GREEDY.draw(&[0.0, 2.0, 2.0, 1.0], &HEAD, [0; 3]), 1);
    }

    #[test]
    fn softcap_flattens() {
        let head = HeadShape { softcap: Some(0.001), logit_scale: None };
        let sampling = Sampling { temperature: 1.0, top_k: None, top_p: 1.0, seed: 3 };
        let ones = (0..20_000).filter(|&i| sampling.draw(&[0.0, 9.0], &head, [0, i, 0]) == 1).count();
        near(&[ones as f64 / 20_000.0], &[0.5]);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in [
            Sampling { temperature: -1.0, ..Sampling::GREEDY },
            Sampling { temperature: f32::NAN, ..Sampling::GREEDY },
            Sampling { top_p: 0.0, ..Sampling::GREEDY },
            Sampling { top_k: Some(0), ..Sampling::GREEDY },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(Sampling::GREEDY.check().is_ok());
    }
}
