//! From the rewards of a group of answers to their advantages, as in TRL's `GRPOTrainer`.

use super::answers::{Batch, CompletedPrompt};
use crate::config::{Aggregation, Baseline, GrpoConfig, ScaleRewards, ServerRatio};
use crate::objective::PolicyAnswer;
use crate::recipe::{SampledAnswer, ScoredPrompt};

/// Added to a deviation before it divides.
pub(super) const EPSILON: f64 = 1e-4;

/// Least deviation of rewards that are not equal, in TRL's count.
const EQUAL: f64 = 1e-8;

/// Groups of answers with their advantages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advantages {
    /// Rewards after penalties of length, by prompt and answer; `None` where no judge gave a score.
    pub rewards: Vec<Vec<Option<f64>>>,
    /// Advantages, by prompt and answer: 0 for an answer without a score.
    pub advantages: Vec<Vec<f64>>,
    /// Whether the answers of a group have equal rewards, or fewer than two have one.
    pub is_uniform: Vec<bool>,
    /// Part of the answers that are compared with rewards without deviation: of their group, or of the batch
    /// where that scales.
    pub unscaled: f64,
}

impl Advantages {
    /// Compares the rewards of a step's answers.
    pub fn new(prompts: &[CompletedPrompt], config: &GrpoConfig, max_new_tokens: usize) -> Self {
        let reward = |answer: &super::Answer| {
            answer
                .score
                .map(|score| score - penalty(answer.num_sampled(), config.overlong_tokens, max_new_tokens))
        };
        let rewards: Vec<Vec<Option<f64>>> =
            prompts.iter().map(|prompt| prompt.answers.iter().map(reward).collect()).collect();
        if config.aggregation == Aggregation::NormalizeThenSum {
            return Self::of_normalized(prompts, rewards);
        }
        let of_batch = deviation(rewards.iter().flatten().flatten().copied());
        let groups = rewards.iter().map(|group| {
            let scored = || group.iter().flatten().copied();
            let (count, sum) = (scored().count() as f64, scored().sum::<f64>());
            let (mean, of_group) = (mean(scored()), deviation(scored()));
            let divisor = match config.scale_rewards {
                ScaleRewards::Group => of_group + EPSILON,
                ScaleRewards::Batch => of_batch + EPSILON,
                ScaleRewards::None => 1.0,
            };
            let advantage = |reward: &Option<f64>| {
                let Some(reward) = reward else { return 0.0 };
                let baseline = match config.baseline {
                    Baseline::Mean => mean,
                    Baseline::LeaveOneOut if of_group > 0.0 => (sum - reward) / (count - 1.0),
                    // Alone, or equal to the others, whose sum is rounded.
                    Baseline::LeaveOneOut => *reward,
                };
                (reward - baseline) / divisor
            };
            (group.iter().map(advantage).collect(), of_group <= EQUAL)
        });
        let (advantages, is_uniform): (Vec<_>, Vec<bool>) = groups.unzip();
        let num_uniform = is_uniform.iter().filter(|is_uniform| **is_uniform).count();
        let unscaled = match config.scale_rewards {
            ScaleRewards::Batch => f64::from(u8::from(of_batch <= EQUAL)),
            _ => num_uniform as f64 / is_uniform.len().max(1) as f64,
        };
        Self { rewards, advantages, is_uniform, unscaled }
    }

    /// Compares sums of scores that are compared with their group's, with those of the batch.
    fn of_normalized(prompts: &[CompletedPrompt], rewards: Vec<Vec<Option<f64>>>) -> Self {
        let all = || prompts.iter().flat_map(|prompt| &prompt.answers).filter_map(|answer| answer.normalized);
        let (mean, of_batch) = (mean(all()), deviation(all()));
        let advantage = |answer: &super::Answer| {
            answer.normalized.map_or(0.0, |reward| (reward - mean) / (of_batch + EPSILON))
        };
        let of_group = |prompt: &CompletedPrompt| prompt.answers.iter().map(advantage).collect();
        // Each judge's scores are equal, or there are none.
        let is_uniform = |prompt: &CompletedPrompt| {
            prompt.answers.iter().all(|answer| answer.normalized.is_none_or(|reward| reward.abs() <= EQUAL))
        };
        Self {
            advantages: prompts.iter().map(of_group).collect(),
            is_uniform: prompts.iter().map(is_uniform).collect(),
            unscaled: f64::from(u8::from(of_batch <= EQUAL)),
            rewards,
        }
    }
}

impl Advantages {
    /// The prompts of a batch with the answers that a step trains on, with the use of a server's
    /// probabilities, if one gave them.
    pub fn train_on<'a>(
        &self,
        batch: &'a Batch,
        config: &GrpoConfig,
        server: Option<ServerRatio>,
        prompt: impl Fn(&'a CompletedPrompt) -> &'a [u32],
    ) -> Vec<ScoredPrompt> {
        let has_ratios = server == Some(ServerRatio::Policy);
        let is_on_policy = batch.answered_after == batch.step && !has_ratios;
        let is_served = server.is_some() && !has_ratios;
        let groups = batch.prompts.iter().zip(&self.advantages).zip(&self.is_uniform);
        let kept = groups.filter(|(_, is_uniform)| !(config.drop_uniform && **is_uniform));
        let ready = |((answered, advantages), _): ((&'a CompletedPrompt, &Vec<f64>), &bool)| {
            let policy = answered.answers.iter().zip(advantages).map(|(answer, &advantage)| {
                let is_masked = config.is_masked(answer.is_ended);
                let has_old = !answer.old_log_probs.is_empty();
                SampledAnswer {
                    answer: PolicyAnswer { advantage, is_on_policy, is_masked },
                    sampled: if has_old { &answer.old_log_probs } else { &answer.log_probs }.clone(),
                    served: is_served.then(|| answer.log_probs.clone()),
                }
            });
            ScoredPrompt {
                row: answered.row,
                prompt: prompt(answered).to_vec(),
                answers: answered.answers.iter().map(|answer| answer.tokens.clone()).collect(),
                turns: answered.answers.iter().map(super::Answer::sampled).collect(),
                policy: policy.collect(),
                ..ScoredPrompt::default()
            }
        };
        kept.map(ready).collect()
    }
}

/// DAPO's penalty for length (arXiv 2503.14476, equation 13): from 0 to 1 over the last tokens.
fn penalty(length: usize, overlong: Option<usize>, most: usize) -> f64 {
    let Some(overlong) = overlong else { return 0.0 };
    length.saturating_sub(most - overlong) as f64 / overlong as f64
}

/// Mean of a sample, 0 of an empty one: of equal values exactly their value, though their sum is rounded.
pub(super) fn mean(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let first = values.clone().next().unwrap_or_default();
    if values.clone().all(|value| value == first) {
        return first;
    }
    values.clone().sum::<f64>() / values.count() as f64
}

/// Deviation of a sample; 0 of fewer than two.
pub(super) fn deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count() as f64;
    if count < 2.0 {
        return 0.0;
    }
    let mean = mean(values.clone());
    (values.map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::objective::{ImportanceSampling, PolicyLoss};
    use crate::online::Answer;

    const CONFIG: GrpoConfig = GrpoConfig {
        loss: PolicyLoss::Dapo,
        num_iterations: 1,
        importance_sampling_level: ImportanceSampling::Token,
        epsilon: 0.2,
        epsilon_high: 0.2,
        delta: None,
        sapo_temperature_pos: 1.0,
        sapo_temperature_neg: 1.0,
        vespo_k_pos: 1.0,
        vespo_lambda_pos: 1.0,
        vespo_k_neg: 1.0,
        vespo_lambda_neg: 1.0,
        use_bias_correction_kl: true,
        off_policy_mask_threshold: None,
        baseline: Baseline::Mean,
        scale_rewards: ScaleRewards::Group,
        mask_truncated: false,
        overlong_tokens: None,
        drop_uniform: false,
        max_resamples: 0,
        top_entropy_quantile: 1.0,
        aggregation: Aggregation::SumThenNormalize,
    };

    fn prompts(rewards: &[Option<f64>], group: usize) -> Vec<CompletedPrompt> {
        let answer = |(i, &score): (usize, &Option<f64>)| Answer {
            tokens: vec![0; i + 1],
            score,
            ..Answer::default()
        };
        let groups = rewards.chunks(group).enumerate();
        groups
            .map(|(row, rewards)| CompletedPrompt {
                row: row as u32,
                answers: rewards.iter().enumerate().map(answer).collect(),
            })
            .collect()
    }

    #[test]
    fn advantages_are_trls() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/grpo/losses.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let rewards: Vec<Option<f64>> = serde_json::from_value(golden["rewards"].clone()).unwrap();
        let prompts = prompts(&rewards, golden["group"].as_u64().unwrap() as usize);
        let scales =
            [("group", ScaleRewards::Group), ("batch", ScaleRewards::Batch), ("none", ScaleRewards::None)];
        for (name, scale_rewards) in scales {
            let found = Advantages::new(&prompts, &GrpoConfig { scale_rewards, ..CONFIG }, 64);
            let expected: Vec<f64> = serde_json::from_value(golden["advantages"][name].clone()).unwrap();
            for (found, expected) in found.advantages.concat().into_iter().zip(expected) {
                assert!((found - expected).abs() < 1e-12, "{name}: {found}, TRL {expected}");
            }
            assert_eq!(found.is_uniform, [false, false]);
        }
    }

    #[test]
    fn sums_of_compared_scores_are_compared_with_the_batchs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/grpo/losses.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let list = |name: &str| golden["judges"][name].clone();
        let scores: Vec<[Option<f64>; 2]> = serde_json::from_value(list("scores")).unwrap();
        let weights: Vec<f64> = serde_json::from_value(list("weights")).unwrap();
        let expected: Vec<f64> = serde_json::from_value(list("advantages")).unwrap();
        let group = golden["group"].as_u64().unwrap() as usize;
        let panel = super::super::judging::tests::panel(&weights);
        let normalized: Vec<Option<f64>> = scores
            .chunks(group)
            .flat_map(|group| super::super::judging::tests::normalized_scores(&panel, group))
            .collect();
        let mut prompts = prompts(&vec![Some(0.0); scores.len()], group);
        let answers = prompts.iter_mut().flat_map(|prompt| &mut prompt.answers);
        answers.zip(normalized).for_each(|(answer, normalized)| answer.normalized = normalized);
        let config = GrpoConfig { aggregation: Aggregation::NormalizeThenSum, ..CONFIG };
        let found = Advantages::new(&prompts, &config, 64).advantages.concat();
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found}, TRL {expected}");
        }
    }

    #[test]
    fn the_others_of_a_group_are_a_baseline_too() {
        let leave_one_out =
            GrpoConfig { baseline: Baseline::LeaveOneOut, scale_rewards: ScaleRewards::None, ..CONFIG };
        let found =
            Advantages::new(&prompts(&[Some(1.0), Some(3.0), None, Some(8.0)], 4), &leave_one_out, 64);
        assert_eq!(found.advantages, [[-4.5, -1.5, 0.0, 6.0]]);
        let alone = Advantages::new(&prompts(&[Some(1.0), None], 2), &leave_one_out, 64);
        assert_eq!((alone.advantages, alone.is_uniform), (vec![vec![0.0; 2]], vec![true]));
    }

    #[test]
    fn equal_rewards_have_advantages_of_exactly_0() {
        // Three times 0.1 is not 0.3 in f64.
        let rewards = [Some(0.1), Some(0.1), Some(0.1), Some(0.2), Some(0.7), Some(0.5)];
        for scale_rewards in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
            for baseline in [Baseline::Mean, Baseline::LeaveOneOut] {
                let config = GrpoConfig { scale_rewards, baseline, ..CONFIG };
                let found = Advantages::new(&prompts(&rewards, 3), &config, 64);
                assert_eq!(found.advantages[0], [0.0; 3], "{scale_rewards:?}");
                assert!(found.advantages[1].iter().all(|advantage| *advantage != 0.0), "{scale_rewards:?}");
                assert_eq!(found.is_uniform, [true, false]);
            }
        }
        let mut prompts = prompts(&[Some(0.1); 3], 3);
        prompts[0].answers.iter_mut().for_each(|answer| answer.normalized = Some(0.1));
        let config = GrpoConfig { aggregation: Aggregation::NormalizeThenSum, ..CONFIG };
        assert_eq!(Advantages::new(&prompts, &config, 64).advantages, [[0.0; 3]]);
        let panel = super::super::judging::tests::panel(&[1.0, 1.0]);
        let of_judges = super::super::judging::tests::normalized_scores(&panel, &[[Some(0.1), Some(0.7)]; 3]);
        assert_eq!(of_judges, [Some(0.0); 3]);
    }

    #[test]
    fn long_answers_are_penalised_over_the_last_tokens() {
        // Answers of 1 to 4 tokens, of 4 allowed.
        let penalised = GrpoConfig { overlong_tokens: Some(2), ..CONFIG };
        let found = Advantages::new(&prompts(&[Some(1.0); 4], 4), &penalised, 4);
        assert_eq!(found.rewards, [[1.0, 1.0, 0.5, 0.0].map(Some)]);
    }
}
