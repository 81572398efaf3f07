//! From answers to what a step trains on.

use super::answers::CompletedPrompt;
use crate::config::Pairs;
use crate::draw::draw;
use crate::recipe::{Author, ScoredPrompt};

impl ScoredPrompt {
    /// Distillation: every answer of the policy.
    pub fn own(answered: &CompletedPrompt, prompt: &[u32]) -> Self {
        Self {
            row: answered.row,
            prompt: prompt.to_vec(),
            answers: answered.answers.iter().map(|answer| answer.tokens.clone()).collect(),
            author: Some(Author::Policy),
            ..Self::default()
        }
    }

    /// Nash-MD: preference of the policy's completion over the mixture's from their scores. `None`
    /// without scores.
    pub fn for_nash(answered: &CompletedPrompt, prompt: &[u32]) -> Self {
        let ranked = Self { row: answered.row, prompt: prompt.to_vec(), ..Self::default() };
        let [own, other] = &answered.answers[..] else { panic!("two answers to a prompt") };
        let (Some(score), Some(others)) = (own.score, other.score) else { return ranked };
        let preferred = 1.0 / (1.0 + (others - score).exp());
        Self { answers: vec![own.tokens.clone()], advantages: vec![preferred - 0.5], ..ranked }
    }
}

/// The pairs of a prompt's answers, as numbers of answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Paired {
    /// The better and the worse one of each.
    pub pairs: Vec<[usize; 2]>,
    /// Pairs that were dropped because both have the same score.
    pub ties: usize,
}

impl Paired {
    /// Makes pairs of scored completions. `seed` drives sampling.
    pub fn new(answered: &CompletedPrompt, how: Pairs, seed: u64) -> Self {
        let scores: Vec<(usize, f64)> =
            answered.answers.iter().enumerate().filter_map(|(i, answer)| Some((i, answer.score?))).collect();
        let mut found = Self::default();
        if scores.len() < 2 {
            return found;
        }
        match how {
            Pairs::BestWorst => {
                // Ties take the first.
                let best = scores.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are two");
                let worst = scores.iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("there are two");
                found.add(*best, *worst);
            }
            Pairs::All => {
                for (i, &first) in scores.iter().enumerate() {
                    scores[i + 1..].iter().for_each(|&second| found.add(first, second));
                }
            }
            Pairs::Random => {
                let count = scores.len() as u64;
                let drawn = draw(&[seed]) % (count * (count - 1));
                let (first, other) = (drawn / (count - 1), drawn % (count - 1));
                let second = other + u64::from(other >= first);
                let [low, high] = [first.min(second), first.max(second)];
                found.add(scores[low as usize], scores[high as usize]);
            }
        }
        found
    }

    fn add(&mut self, first: (usize, f64), second: (usize, f64)) {
        match first.1.total_cmp(&second.1) {
            _ if first.1 == second.1 => self.ties += 1,
            std::cmp::Ordering::Less => self.pairs.push([second.0, first.0]),
            _ => self.pairs.push([first.0, second.0]),
        }
    }

    /// The answers that are in pairs, each once, with the prompt's tokens. From the answer `own` on
    /// they are the reference's.
    pub fn rank(&self, answered: &CompletedPrompt, prompt: &[u32], own: usize) -> ScoredPrompt {
        let mut used: Vec<usize> = self.pairs.iter().flatten().copied().collect();
        used.sort_unstable();
        used.dedup();
        let place = |answer: usize| used.binary_search(&answer).expect("it is in a pair") as u32;
        ScoredPrompt {
            row: answered.row,
            prompt: prompt.to_vec(),
            answers: used.iter().map(|&i| answered.answers[i].tokens.clone()).collect(),
            pairs: self.pairs.iter().map(|pair| pair.map(place)).collect(),
            explored: used.iter().filter(|&&answer| answer >= own).map(|&answer| place(answer)).collect(),
            ..ScoredPrompt::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::online::answers::Answer;

    fn answered(scores: &[Option<f64>]) -> CompletedPrompt {
        let answer = |(i, &score): (usize, &Option<f64>)| Answer {
            tokens: vec![i as u32; i + 1],
            score,
            ..Answer::default()
        };
        CompletedPrompt { row: 7, answers: scores.iter().enumerate().map(answer).collect() }
    }

    fn paired(how: Pairs, scores: &[Option<f64>]) -> (Vec<[usize; 2]>, usize) {
        let Paired { pairs, ties } = Paired::new(&answered(scores), how, 3);
        (pairs, ties)
    }

    #[test]
    fn best_and_worst_are_one_pair() {
        let scores = [Some(1.0), None, Some(3.0), Some(-2.0), Some(3.0), Some(-2.0)];
        assert_eq!(paired(Pairs::BestWorst, &scores), (vec![[2, 3]], 0));
        assert_eq!(paired(Pairs::BestWorst, &[Some(0.0), Some(0.0), Some(-0.0)]), (vec![], 1));
        assert_eq!(
            paired(Pairs::BestWorst, &[Some(1.0), None]),
            (vec![], 0),
            "one score compares with nothing"
        );
    }

    #[test]
    fn all_pairs_have_the_better_one_first_and_ties_are_counted() {
        let scores = [Some(1.0), Some(2.0), None, Some(1.0)];
        assert_eq!(paired(Pairs::All, &scores), (vec![[1, 0], [1, 3]], 1));
    }

    #[test]
    fn a_drawn_pair_is_any_of_them() {
        let scores = answered(&[Some(3.0), Some(2.0), Some(1.0)]);
        let mut counts = [0; 3];
        for seed in 0..600 {
            let Paired { pairs, ties } = Paired::new(&scores, Pairs::Random, seed);
            let kinds = [[0, 1], [0, 2], [1, 2]];
            let [pair] = pairs[..] else { panic!("one pair, found {pairs:?}") };
            counts[kinds.iter().position(|kind| *kind == pair).expect("the better one first")] += 1;
            assert_eq!(ties, 0);
        }
        // Five standard errors.
        assert!(counts.iter().all(|count| (142..=258).contains(count)), "{counts:?}");
    }

    #[test]
    fn answers_outside_pairs_are_left_out() {
        let scores = answered(&[Some(1.0), Some(2.0), Some(0.0)]);
        let ranked = Paired::new(&scores, Pairs::BestWorst, 0).rank(&scores, &[9, 9], 1);
        let expected = ScoredPrompt {
            row: 7,
            prompt: vec![9, 9],
            answers: vec![vec![1, 1], vec![2, 2, 2]],
            pairs: vec![[0, 1]],
            explored: vec![0, 1],
            ..ScoredPrompt::default()
        };
        assert_eq!(ranked, expected);
        let counts = ranked.counts(true);
        assert_eq!((counts.tokens, counts.scored_rows, counts.sequence_tokens), (7, 4, 9));
    }
}
