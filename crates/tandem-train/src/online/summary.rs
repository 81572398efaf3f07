//! Statistics of a step's completions, under TRL's names where they exist.

use super::advantages::{Advantages, deviation, mean};
use super::answers::Batch;
use super::pairs::Paired;
use crate::config::GrpoConfig;
use crate::metrics::Record;

/// Counts and means of the answers to a step's prompts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    answers: usize,
    ended: usize,
    /// Least, sum, most tokens.
    lengths: [usize; 3],
    scored: usize,
    score: f64,
    pairs: usize,
    margin: f64,
    ties: usize,
    replayed: usize,
    /// Steps that the weights took since.
    age: u64,
    log_prob: f64,
    /// Name, sum and count of each judge's scores.
    judges: Vec<(String, f64, usize)>,
    /// Of runs that train on groups.
    groups: Option<Groups>,
    /// Prompts, of a distillation, and those that the policy answered.
    own: Option<[usize; 2]>,
}

/// Rewards of a step's groups.
#[derive(Clone, Debug, Default, PartialEq)]
struct Groups {
    /// Mean and deviation of the rewards.
    reward: Option<[f64; 2]>,
    /// See [`Advantages::unscaled`].
    uniform: f64,
    /// Mean and deviation of each judge's scores.
    judges: Vec<(String, [f64; 2])>,
    /// Least, sum, most tokens of the answers that the model ended.
    ended_lengths: [usize; 3],
    /// Prompts that others replaced; `None` where none may be.
    replaced: Option<usize>,
    /// Mean turns of the policy, and conversations without a reward; of runs with an environment.
    environment: Option<(f64, usize)>,
}

impl Summary {
    /// Computes statistics of a batch and its pairs; `names` are the judges'.
    pub fn new(batch: &Batch, paired: &[Paired], names: &[String]) -> Self {
        let mut summary = Self {
            age: batch.step - batch.answered_after,
            lengths: [usize::MAX, 0, 0],
            judges: names.iter().map(|name| (name.clone(), 0.0, 0)).collect(),
            ..Self::default()
        };
        for (answered, paired) in batch.prompts.iter().zip(paired) {
            for answer in &answered.answers {
                let length = answer.num_sampled();
                let [least, sum, most] = &mut summary.lengths;
                (*least, *sum, *most) = ((*least).min(length), *sum + length, (*most).max(length));
                summary.answers += 1;
                summary.ended += usize::from(answer.is_ended);
                summary.log_prob += answer.log_prob;
                if let Some(score) = answer.score {
                    summary.scored += 1;
                    summary.score += score;
                }
                for ((_, sum, count), opinion) in summary.judges.iter_mut().zip(&answer.opinions) {
                    if let Some(score) = opinion.score {
                        (*sum, *count) = (*sum + score, *count + 1);
                    }
                }
            }
            summary.add_pairs(answered, paired);
        }
        summary
    }

    fn add_pairs(&mut self, answered: &super::CompletedPrompt, paired: &Paired) {
        let score = |answer: usize| answered.answers[answer].score.expect("what is in a pair has a score");
        self.ties += paired.ties;
        self.pairs += paired.pairs.len();
        self.margin += paired.pairs.iter().map(|&[better, worse]| score(better) - score(worse)).sum::<f64>();
    }

    /// Adds the share of prompts whose own answers a distillation trains on.
    pub fn add_own_answers(&mut self, batch: &Batch) {
        let own = batch.prompts.iter().filter(|prompt| !prompt.answers.is_empty()).count();
        self.own = Some([batch.prompts.len(), own]);
    }

    /// Writes what a distillation reports of the policy's answers.
    fn report_own(&self, [prompts, own]: [usize; 2], record: &mut Record) {
        record.set("distill/own_answers", own as f64 / prompts as f64);
        self.report_lengths(record);
        self.report_clipped(record);
        record.set_count("age", self.age);
    }

    /// Writes lengths and likelihood of the answers, if there are some.
    fn report_lengths(&self, record: &mut Record) {
        if self.answers == 0 {
            return;
        }
        let [least, sum, most] = self.lengths;
        record.set("completions/mean_length", sum as f64 / self.answers as f64);
        record.set_count("completions/min_length", least as u64);
        record.set_count("completions/max_length", most as u64);
        record.set("completions/log_prob", self.log_prob / self.answers as f64);
    }

    /// Writes the share of answers that the length limit ended, if there are some.
    fn report_clipped(&self, record: &mut Record) {
        if self.answers > 0 {
            record.set("completions/clipped_ratio", (self.answers - self.ended) as f64 / self.answers as f64);
        }
    }

    /// Adds the rewards of groups.
    pub fn add_groups(&mut self, batch: &Batch, compared: &Advantages, config: &GrpoConfig) {
        let answers = || batch.prompts.iter().flat_map(|prompt| &prompt.answers);
        let of_judge = |(place, (name, ..)): (usize, &(String, f64, usize))| {
            let scores = answers().filter_map(|answer| answer.opinions.get(place)?.score);
            Some((name.clone(), mean_and_deviation(scores)?))
        };
        let ended = || answers().filter(|answer| answer.is_ended).map(super::Answer::num_sampled);
        let turns: Vec<usize> =
            answers().map(|answer| answer.turns.len()).filter(|turns| *turns > 0).collect();
        let dropped = answers().filter(|answer| !answer.turns.is_empty() && answer.score.is_none()).count();
        let mean_turns = turns.iter().sum::<usize>() as f64 / turns.len() as f64;
        self.groups = Some(Groups {
            environment: (!turns.is_empty()).then_some((mean_turns, dropped)),
            reward: mean_and_deviation(compared.rewards.iter().flatten().flatten().copied()),
            uniform: compared.unscaled,
            judges: self.judges.iter().enumerate().filter_map(of_judge).collect(),
            replaced: (config.max_resamples > 0).then_some(batch.replaced),
            ended_lengths: [ended().min().unwrap_or(0), ended().sum(), ended().max().unwrap_or(0)],
        });
    }

    /// Writes what runs on groups report, under the names of TRL's `GRPOTrainer`.
    fn report_groups(&self, groups: &Groups, record: &mut Record) {
        set_reward(groups.reward, record);
        record.set("frac_reward_zero_std", groups.uniform);
        if let Some(replaced) = groups.replaced {
            record.set_count("replaced_prompts", replaced as u64);
        }
        if let Some((turns, dropped)) = groups.environment {
            record.set("environment/turns", turns);
            record.set_count("environment/dropped", dropped as u64);
        }
        groups.judges.iter().for_each(|(name, both)| set_judge(name, *both, record));
        self.report_lengths(record);
        self.report_clipped(record);
        if self.answers > 0 {
            let [least, sum, most] = groups.ended_lengths;
            record.set("completions/mean_terminated_length", sum as f64 / self.ended.max(1) as f64);
            record.set_count("completions/min_terminated_length", least as u64);
            record.set_count("completions/max_terminated_length", most as u64);
        }
        record.set_count("unscored", (self.answers - self.scored) as u64);
        record.set_count("age", self.age);
    }

    /// Writes mean and deviation of a batch's rewards, and the lengths of its answers.
    pub fn report_rewards(batch: &Batch, names: &[String], record: &mut Record) {
        let answers = || batch.prompts.iter().flat_map(|prompt| &prompt.answers);
        set_reward(mean_and_deviation(answers().filter_map(|answer| answer.score)), record);
        for (place, name) in names.iter().enumerate() {
            let scores = answers().filter_map(|answer| answer.opinions.get(place)?.score);
            mean_and_deviation(scores).into_iter().for_each(|both| set_judge(name, both, record));
        }
        let (count, length) = answers().fold((0, 0), |(n, sum), answer| (n + 1, sum + answer.num_sampled()));
        record.set("completions/mean_length", length as f64 / f64::from(count));
        let cut = answers().filter(|answer| !answer.is_ended).count();
        record.set("completions/clipped_ratio", cut as f64 / f64::from(count));
        record.set_count("unscored", answers().filter(|answer| answer.score.is_none()).count() as u64);
    }

    /// Counts the prompts that join from earlier steps.
    pub fn add_replayed(&mut self, prompts: usize) {
        self.replayed += prompts;
    }

    /// Writes it into a step's record. `kl` is the mean log-ratio of policy to reference of the
    /// answers that were trained on, if there were any.
    pub fn report(&self, record: &mut Record, beta: f64, kl: Option<f64>) {
        let mean = |sum: f64, count: usize| sum / count as f64;
        if let Some(groups) = &self.groups {
            return self.report_groups(groups, record);
        }
        if let Some(own) = self.own {
            return self.report_own(own, record);
        }
        record.set("beta", beta);
        if self.scored > 0 {
            let scores = mean(self.score, self.scored);
            record.set("objective/scores", scores);
            kl.into_iter().for_each(|kl| record.set("objective/rlhf_reward", scores - beta * kl));
        }
        kl.into_iter().for_each(|kl| record.set("objective/non_score_reward", -beta * kl));
        if self.pairs > 0 {
            record.set("objective/scores_margin", mean(self.margin, self.pairs));
        }
        if self.answers > 0 {
            record.set("val/contain_eos_token", mean(self.ended as f64, self.answers));
        }
        self.report_lengths(record);
        for (name, sum, count) in &self.judges {
            if *count > 0 {
                record.set(&format!("judges/{name}"), mean(*sum, *count));
            }
        }
        record.set_count("pairs", self.pairs as u64);
        record.set_count("ties", self.ties as u64);
        record.set_count("unscored", (self.answers - self.scored) as u64);
        record.set_count("replayed", self.replayed as u64);
        record.set_count("age", self.age);
    }
}

/// Mean and deviation of some scores; `None` of none.
fn mean_and_deviation(scores: impl Iterator<Item = f64> + Clone) -> Option<[f64; 2]> {
    scores.clone().next()?;
    Some([mean(scores.clone()), deviation(scores)])
}

fn set_reward(reward: Option<[f64; 2]>, record: &mut Record) {
    if let Some([mean, deviation]) = reward {
        record.set("reward", mean);
        record.set("reward_std", deviation);
    }
}

fn set_judge(name: &str, [mean, deviation]: [f64; 2], record: &mut Record) {
    record.set(&format!("rewards/{name}/mean"), mean);
    record.set(&format!("rewards/{name}/std"), deviation);
}
