//! Sums behind the metrics, so that a mean does not depend on how a batch was cut.

use tandem_kernels::Prediction;
use tandem_kernels::ops::HeadScores;

use super::record::Record;
use crate::objective::{
    DistillStats, Loss, ObjectiveConfig, PairLogProbs, PolicyStats, Reward, WholeBatch, log_sigmoid,
    losses::orpo,
};

/// Which answers a forest's sequences are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    /// Even sequences are chosen, odd ones rejected.
    Pairs,
    /// Every sequence is an answer to learn (SFT).
    Single,
    /// As pairs, of which rewards are all there is.
    Rewards,
    /// Completions that are desirable or not.
    Unpaired,
}

/// Sums over any number of micro-batches. Adding the micro-batches of a batch in any cut gives the
/// same means (to f64 rounding); TRL instead averages the means of micro-batches, which depends on
/// the cut.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MetricSums {
    loss: f64,
    weight: f64,
    pairs: f64,
    chosen_reward: f64,
    rejected_reward: f64,
    accurate: f64,
    chosen_log_prob: f64,
    rejected_log_prob: f64,
    /// Sums over chosen and rejected tokens.
    entropy: [f64; 2],
    mean_logit: [f64; 2],
    hits: [f64; 2],
    tokens: [f64; 2],
    /// The least and the largest reward of a reward model; zeros before there is one.
    reward_range: [f64; 2],
    /// Answers that a policy gave itself, Σ of their log π, and of log π − log π_ref; this is no
    /// number without a reference.
    answers: [f64; 3],
    /// Sums of policy gradients.
    policy: PolicyStats,
    /// Σ −log π of the chosen completions and their scored tokens, of an SFT term.
    likelihood: [f64; 2],
    /// Of `orpo`: pairs, Σ log σ of the log odds ratio, and Σ of the log odds ratio.
    odds: [f64; 3],
    /// Of labelled completions: how many are desirable and how many are not.
    labelled: [f64; 2],
    /// The number that a loss shifts rewards by, summed over completions: an estimated divergence, or the
    /// mean reward.
    shift: [f64; 2],
    /// Completions with each.
    shifted: [f64; 2],
    /// Tokens, Σ of both divergences and Σ of the teacher's entropy, of a distillation.
    distill: [f64; 4],
    /// Which kind of sequences went in, for the choice of metrics that come out.
    sides: Option<Sides>,
}

impl MetricSums {
    /// Adds a micro-batch's loss, and the metrics that come with it.
    pub fn add_loss(&mut self, loss: &Loss) {
        self.loss += loss.sum;
        self.weight += loss.weight;
        loss.policy.iter().for_each(|stats| self.policy.merge(stats));
    }

    /// Adds a micro-batch's pairs: rewards are `beta` times the log ratio to the reference, or what
    /// the losses have instead, as in TRL.
    pub fn add_pairs(&mut self, batch: &PairLogProbs, objective: &ObjectiveConfig, beta: f64) {
        let reward = objective.reward();
        for i in 0..batch.num_pairs() {
            let sides = [2 * i, 2 * i + 1];
            let [chosen, rejected] = sides.map(|s| match reward {
                Reward::LogRatio => beta * batch.log_ratio(s),
                Reward::LogProb => beta * batch.policy[s],
                Reward::MeanLogProb => beta * batch.mean_log_prob(s),
            });
            let log_probs = sides.map(|s| match reward {
                Reward::LogRatio | Reward::LogProb => batch.policy[s],
                Reward::MeanLogProb => batch.mean_log_prob(s),
            });
            self.chosen_reward += chosen;
            self.rejected_reward += rejected;
            self.accurate += f64::from(u8::from(chosen > rejected));
            self.chosen_log_prob += log_probs[0];
            self.rejected_log_prob += log_probs[1];
            self.pairs += 1.0;
            if objective.has("sft") {
                let (log_prob, tokens) = batch.likelihood(i);
                self.likelihood[0] -= log_prob;
                self.likelihood[1] += f64::from(tokens);
            }
            if objective.has("orpo") {
                let odds = orpo::log_odds_ratio(sides.map(|s| batch.mean_log_prob(s)));
                self.odds[0] += 1.0;
                self.odds[1] += log_sigmoid(odds);
                self.odds[2] += odds;
            }
        }
    }

    /// Adds a micro-batch's labelled completions. The estimated divergence is 0
    /// for a loss without one, as in TRL.
    pub fn add_unpaired(
        &mut self,
        batch: &PairLogProbs,
        whole: &WholeBatch,
        objective: &ObjectiveConfig,
        beta: f64,
    ) {
        let is_other = objective.terms.iter().any(|term| term.loss.name != "bco");
        let divergence = is_other.then(|| whole.shift(objective, "kto").unwrap_or(0.0));
        let shifts = [divergence, whole.shift(objective, "bco")];
        for (i, &label) in batch.labels.iter().enumerate() {
            let (reward, log_prob) = if label {
                (&mut self.chosen_reward, &mut self.chosen_log_prob)
            } else {
                (&mut self.rejected_reward, &mut self.rejected_log_prob)
            };
            *reward += beta * batch.log_ratio(2 * i);
            *log_prob += batch.policy[2 * i];
            self.labelled[usize::from(!label)] += 1.0;
            for (i, shift) in shifts.into_iter().enumerate().filter_map(|(i, shift)| Some((i, shift?))) {
                self.shift[i] += shift;
                self.shifted[i] += 1.0;
            }
        }
    }

    /// Sum of the rewards of labelled completions, and their number.
    pub fn rewards(&self) -> (f64, u64) {
        (self.chosen_reward + self.rejected_reward, (self.labelled[0] + self.labelled[1]) as u64)
    }

    /// Adds answers that the policy gave itself, by their log-probabilities.
    pub fn add_answers(&mut self, policy: &[f64], reference: Option<&[f64]>) {
        for (sequence, log_prob) in policy.iter().enumerate() {
            let [count, sum, log_ratio] = &mut self.answers;
            *count += 1.0;
            *sum += log_prob;
            *log_ratio += log_prob - reference.map_or(f64::NAN, |reference| reference[sequence]);
        }
    }

    /// The mean log-ratio of policy to reference over the answers added, an estimate of the
    /// divergence; `None` without answers or without a reference.
    pub fn kl(&self) -> Option<f64> {
        let [count, _, log_ratio] = self.answers;
        (count > 0.0 && !log_ratio.is_nan()).then(|| log_ratio / count)
    }

    /// Adds the rewards `[2B]` of a micro-batch's pairs, from a reward model.
    pub fn add_rewards(&mut self, rewards: &[f64]) {
        let mut own = Self { sides: (!rewards.is_empty()).then_some(Sides::Rewards), ..Self::default() };
        for &[chosen, rejected] in rewards.as_chunks::<2>().0 {
            own.chosen_reward += chosen;
            own.rejected_reward += rejected;
            own.accurate += f64::from(u8::from(chosen > rejected));
            own.pairs += 1.0;
        }
        own.reward_range = match rewards {
            [] => [0.0; 2],
            [first, rest @ ..] => {
                rest.iter().fold([*first; 2], |[least, most], &r| [least.min(r), most.max(r)])
            }
        };
        self.merge(&own);
    }

    /// Adds a micro-batch's tokens. `rows[i]` is the row of `scores` that prediction `i` was scored
    /// at ([`Forest::scored_rows`](tandem_kernels::Forest::scored_rows)). A row that predicts a
    /// token of both answers counts once for each, as in TRL, where the answers are separate
    /// sequences. `side` is that of a sequence, 0 for answers to learn; those without one are left out.
    ///
    /// # Panics
    /// If `scores` is not of these predictions.
    pub fn add_tokens(
        &mut self,
        scores: &HeadScores,
        rows: &[u32],
        predictions: &[Prediction],
        side: &dyn Fn(u32) -> Option<usize>,
        sides: Sides,
    ) {
        assert!(
            rows.len() == predictions.len() && scores.hit.len() == predictions.len(),
            "{} predictions, {} rows, {} hits",
            predictions.len(),
            rows.len(),
            scores.hit.len()
        );
        self.sides = Some(sides);
        for ((prediction, &row), &hit) in predictions.iter().zip(rows).zip(&scores.hit) {
            let Some(side) = side(prediction.sequence) else { continue };
            self.entropy[side] += f64::from(scores.entropy[row as usize]);
            self.mean_logit[side] += f64::from(scores.mean_logit[row as usize]);
            self.hits[side] += f64::from(u8::from(hit));
            self.tokens[side] += 1.0;
        }
    }

    /// Adds a micro-batch's divergences from a teacher.
    pub fn add_distill(&mut self, stats: &DistillStats) {
        let DistillStats { tokens, forward_kl, reverse_kl, teacher_entropy } = *stats;
        add(&mut self.distill, [tokens, forward_kl, reverse_kl, teacher_entropy]);
    }

    /// The sums as plain numbers, to be sent between ranks.
    pub fn to_numbers(&self) -> [f64; Self::WIDTH] {
        let [entropy, mean_logit, hits, tokens] = [self.entropy, self.mean_logit, self.hits, self.tokens];
        let sides = match self.sides {
            None => 0.0,
            Some(Sides::Pairs) => 1.0,
            Some(Sides::Single) => 2.0,
            Some(Sides::Rewards) => 3.0,
            Some(Sides::Unpaired) => 4.0,
        };
        let own = [
            self.loss,
            self.weight,
            self.pairs,
            self.chosen_reward,
            self.rejected_reward,
            self.accurate,
            self.chosen_log_prob,
            self.rejected_log_prob,
            entropy[0],
            entropy[1],
            mean_logit[0],
            mean_logit[1],
            hits[0],
            hits[1],
            tokens[0],
            tokens[1],
            self.reward_range[0],
            self.reward_range[1],
            self.answers[0],
            self.answers[1],
            self.answers[2],
            self.likelihood[0],
            self.likelihood[1],
            self.odds[0],
            self.odds[1],
            self.odds[2],
            self.labelled[0],
            self.labelled[1],
            self.shift[0],
            self.shift[1],
            self.shifted[0],
            self.shifted[1],
            self.distill[0],
            self.distill[1],
            self.distill[2],
            self.distill[3],
            sides,
        ];
        let mut numbers = [0.0; Self::WIDTH];
        numbers[..own.len()].copy_from_slice(&own);
        numbers[own.len()..].copy_from_slice(&self.policy.to_numbers());
        numbers
    }

    /// The opposite of [`MetricSums::to_numbers`].
    pub fn from_numbers(numbers: &[f64; Self::WIDTH]) -> Self {
        let n = numbers;
        Self {
            loss: n[0],
            weight: n[1],
            pairs: n[2],
            chosen_reward: n[3],
            rejected_reward: n[4],
            accurate: n[5],
            chosen_log_prob: n[6],
            rejected_log_prob: n[7],
            entropy: [n[8], n[9]],
            mean_logit: [n[10], n[11]],
            hits: [n[12], n[13]],
            tokens: [n[14], n[15]],
            reward_range: [n[16], n[17]],
            answers: [n[18], n[19], n[20]],
            likelihood: [n[21], n[22]],
            odds: [n[23], n[24], n[25]],
            labelled: [n[26], n[27]],
            shift: [n[28], n[29]],
            shifted: [n[30], n[31]],
            distill: [n[32], n[33], n[34], n[35]],
            policy: PolicyStats::from_numbers(n.last_chunk().expect("they end with it")),
            sides: match n[36] {
                1.0 => Some(Sides::Pairs),
                2.0 => Some(Sides::Single),
                3.0 => Some(Sides::Rewards),
                4.0 => Some(Sides::Unpaired),
                _ => None,
            },
        }
    }

    /// Numbers in [`MetricSums::to_numbers`].
    pub const WIDTH: usize = 37 + PolicyStats::WIDTH;

    /// Adds another's sums.
    pub fn merge(&mut self, other: &Self) {
        let pairs = [
            (&mut self.loss, other.loss),
            (&mut self.weight, other.weight),
            (&mut self.pairs, other.pairs),
            (&mut self.chosen_reward, other.chosen_reward),
            (&mut self.rejected_reward, other.rejected_reward),
            (&mut self.accurate, other.accurate),
            (&mut self.chosen_log_prob, other.chosen_log_prob),
            (&mut self.rejected_log_prob, other.rejected_log_prob),
        ];
        for (mine, theirs) in pairs {
            *mine += theirs;
        }
        for side in 0..2 {
            self.entropy[side] += other.entropy[side];
            self.mean_logit[side] += other.mean_logit[side];
            self.hits[side] += other.hits[side];
            self.tokens[side] += other.tokens[side];
        }
        add(&mut self.answers, other.answers);
        add(&mut self.likelihood, other.likelihood);
        add(&mut self.odds, other.odds);
        add(&mut self.labelled, other.labelled);
        add(&mut self.shift, other.shift);
        add(&mut self.shifted, other.shifted);
        add(&mut self.distill, other.distill);
        self.policy.merge(&other.policy);
        self.reward_range = match (self.sides, other.sides) {
            (Some(Sides::Rewards), Some(Sides::Rewards)) => {
                let ([a, b], [c, d]) = (self.reward_range, other.reward_range);
                [a.min(c), b.max(d)]
            }
            (Some(Sides::Rewards), _) => self.reward_range,
            _ => other.reward_range,
        };
        self.sides = self.sides.or(other.sides);
    }

    /// The loss: a mean over pairs, or over tokens for SFT.
    pub fn loss(&self) -> f64 {
        // No token of a policy gradient counts: its loss is none, as in TRL.
        if self.weight == 0.0 && self.policy.loss.is_some() { self.loss } else { self.loss / self.weight }
    }

    /// Number of pairs added.
    pub fn num_pairs(&self) -> u64 {
        self.pairs as u64
    }

    /// Writes the means into a record under TRL's names. Metrics of which nothing was added are
    /// left out.
    pub fn report(&self, record: &mut Record) {
        if self.weight > 0.0 || self.policy.loss.is_some() {
            record.set("loss", self.loss());
        }
        if self.sides == Some(Sides::Rewards) {
            record.set("accuracy", self.accurate / self.pairs);
            record.set("margin", (self.chosen_reward - self.rejected_reward) / self.pairs);
            record.set("min_reward", self.reward_range[0]);
            record.set("mean_reward", (self.chosen_reward + self.rejected_reward) / (2.0 * self.pairs));
            record.set("max_reward", self.reward_range[1]);
            return;
        }
        if self.pairs > 0.0 {
            record.set("rewards/chosen", self.chosen_reward / self.pairs);
            record.set("rewards/rejected", self.rejected_reward / self.pairs);
            record.set("rewards/accuracies", self.accurate / self.pairs);
            record.set("rewards/margins", (self.chosen_reward - self.rejected_reward) / self.pairs);
            record.set("logps/chosen", self.chosen_log_prob / self.pairs);
            record.set("logps/rejected", self.rejected_log_prob / self.pairs);
        }
        self.policy.report(record);
        self.report_unpaired(record);
        if self.likelihood[1] > 0.0 {
            record.set("nll_loss", self.likelihood[0] / self.likelihood[1]);
        }
        if self.odds[0] > 0.0 {
            record.set("log_odds_ratio", self.odds[1] / self.odds[0]);
            record.set("log_odds_chosen", self.odds[2] / self.odds[0]);
        }
        self.kl().into_iter().for_each(|kl| record.set("objective/kl", kl));
        if self.answers[0] > 0.0 {
            record.set("objective/entropy", -self.answers[1] / self.answers[0]);
        }
        let Some(sides) = self.sides else { return };
        // TRL answers 0 where no token was scored.
        let mean = |sum: f64, count: f64| if count > 0.0 { sum / count } else { 0.0 };
        if sides == Sides::Unpaired {
            for (name, side) in [("logits/chosen", 0), ("logits/rejected", 1)] {
                if self.tokens[side] > 0.0 {
                    record.set(name, self.mean_logit[side] / self.tokens[side]);
                }
            }
        }
        if sides == Sides::Pairs {
            record.set("logits/chosen", mean(self.mean_logit[0], self.tokens[0]));
            record.set("logits/rejected", mean(self.mean_logit[1], self.tokens[1]));
        }
        let [tokens, of_distill @ ..] = self.distill;
        if tokens > 0.0 {
            let names = ["distill/forward_kl", "distill/reverse_kl", "distill/teacher_entropy"];
            names.into_iter().zip(of_distill).for_each(|(name, sum)| record.set(name, sum / tokens));
        }
        record.set("entropy", mean(self.entropy[0] + self.entropy[1], self.tokens[0] + self.tokens[1]));
        if sides == Sides::Unpaired {
            return;
        }
        // Of the chosen answers only.
        record.set("mean_token_accuracy", mean(self.hits[0], self.tokens[0]));
    }
}

impl MetricSums {
    /// Writes the metrics of labelled completions; as in TRL, those of a side that the batch lacks are
    /// left out.
    fn report_unpaired(&self, record: &mut Record) {
        for (name, i) in [("kl", 0), ("delta", 1)] {
            if self.shifted[i] > 0.0 {
                record.set(name, self.shift[i] / self.shifted[i]);
            }
        }
        let [chosen, rejected] = self.labelled;
        if chosen > 0.0 {
            record.set("rewards/chosen", self.chosen_reward / chosen);
            record.set("logps/chosen", self.chosen_log_prob / chosen);
        }
        if rejected > 0.0 {
            record.set("rewards/rejected", self.rejected_reward / rejected);
            record.set("logps/rejected", self.rejected_log_prob / rejected);
        }
        if chosen > 0.0 && rejected > 0.0 {
            record.set("rewards/margins", self.chosen_reward / chosen - self.rejected_reward / rejected);
        }
    }
}

fn add<const N: usize>(sums: &mut [f64; N], others: [f64; N]) {
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Split;
    use crate::objective::tests::config;

    fn prediction(hidden_row: u32, sequence: u32) -> Prediction {
        Prediction { hidden_row, target: 0, sequence }
    }

    fn report(sums: &MetricSums) -> Record {
        let mut record = Record::new(1, Split::Train);
        sums.report(&mut record);
        record
    }

    /// Two pairs by hand. Row 0 is shared: it predicts the first token of both answers of pair 0.
    fn tokens(sums: &mut MetricSums) {
        let scores = HeadScores {
            log_prob: vec![-1.0; 5],
            hit: vec![true, false, true, true, false],
            entropy: vec![1.0, 2.0, 4.0, 8.0],
            mean_logit: vec![0.5, 1.0, -2.0, 3.0],
            log_sum_exp: vec![0.0; 4],
            log_sum_squares: vec![0.0; 4],
        };
        let predictions =
            [prediction(3, 0), prediction(3, 1), prediction(4, 1), prediction(9, 2), prediction(12, 3)];
        sums.add_tokens(&scores, &[0, 0, 1, 2, 3], &predictions, &|s| Some(s as usize % 2), Sides::Pairs);
    }

    #[test]
    fn a_shared_row_counts_once_for_each_answer() {
        let mut sums = MetricSums::default();
        tokens(&mut sums);
        let record = report(&sums);
        // Chosen: rows 0 and 2. Rejected: rows 0, 1 and 3.
        assert_eq!(record.get("logits/chosen"), Some((0.5 - 2.0) / 2.0));
        assert_eq!(record.get("logits/rejected"), Some((0.5 + 1.0 + 3.0) / 3.0));
        assert_eq!(record.get("entropy"), Some((1.0 + 1.0 + 2.0 + 4.0 + 8.0) / 5.0));
        // Hits of chosen tokens only: predictions 0 and 3.
        assert_eq!(record.get("mean_token_accuracy"), Some(1.0));
    }

    #[test]
    fn answers_have_a_divergence_where_there_is_a_reference() {
        for (reference, expected) in [(Some(&[-1.5, -1.0][..]), Some(-0.75)), (None, None)] {
            let mut sums = MetricSums::default();
            sums.add_answers(&[-1.0, -3.0], reference);
            let record = report(&sums);
            assert_eq!((record.get("objective/kl"), record.get("objective/entropy")), (expected, Some(2.0)));
        }
    }

    #[test]
    fn sft_has_no_sides() {
        let scores = HeadScores {
            log_prob: vec![-1.0; 2],
            hit: vec![true, false],
            entropy: vec![1.0, 3.0],
            mean_logit: vec![0.0; 2],
            log_sum_exp: vec![0.0; 2],
            log_sum_squares: vec![0.0; 2],
        };
        let mut sums = MetricSums::default();
        sums.add_tokens(&scores, &[0, 1], &[prediction(0, 0), prediction(1, 1)], &|_| Some(0), Sides::Single);
        sums.add_loss(&Loss { sum: 6.0, weight: 2.0, ..Loss::default() });
        let record = report(&sums);
        assert_eq!(record.get("loss"), Some(3.0));
        assert_eq!(record.get("entropy"), Some(2.0));
        assert_eq!(record.get("mean_token_accuracy"), Some(0.5), "a sequence of odd number is an answer too");
        assert_eq!((record.get("logits/chosen"), record.get("rewards/chosen")), (None, None));
    }

    #[test]
    fn rewards_are_beta_times_log_ratios_and_a_tie_is_not_accurate() {
        let pairs = PairLogProbs {
            policy: &[-4.0, -9.0, -5.0, -5.0],
            reference: Some(&[-6.0, -8.0, -5.0, -5.0]),
            answer_tokens: &[1; 4],
            scored_tokens: &[1; 4],
            ..PairLogProbs::default()
        };
        let mut sums = MetricSums::default();
        sums.add_pairs(&pairs, &config(&[("sigmoid", 1.0)]), 0.5);
        let record = report(&sums);
        assert_eq!(record.get("rewards/chosen"), Some(0.5));
        assert_eq!(record.get("rewards/rejected"), Some(-0.25));
        assert_eq!(record.get("rewards/margins"), Some(0.75));
        assert_eq!(record.get("rewards/accuracies"), Some(0.5));
        assert_eq!((record.get("logps/chosen"), record.get("logps/rejected")), (Some(-4.5), Some(-7.0)));
    }

    #[test]
    fn rewards_keep_their_range_over_micro_batches_and_ranks() {
        let [mut sums, mut second] = [MetricSums::default(); 2];
        sums.add_rewards(&[3.0, 1.0, 2.0, 2.0]);
        second.add_rewards(&[-4.0, -2.0]);
        // A rank that computed nothing of a batch reports zeros.
        sums.merge(&MetricSums::from_numbers(&MetricSums::default().to_numbers()));
        sums.merge(&MetricSums::from_numbers(&second.to_numbers()));
        let record = report(&sums);
        let found =
            ["min_reward", "mean_reward", "max_reward", "margin", "accuracy"].map(|name| record.get(name));
        assert_eq!(found, [-4.0, 2.0 / 6.0, 3.0, 0.0, 1.0 / 3.0].map(Some));
        assert_eq!((record.get("rewards/chosen"), record.get("entropy")), (None, None));
    }

    /// Guards against means of means, as in TRL: unequal micro-batches must give the whole batch's
    /// mean.
    #[test]
    fn merged_micro_batches_report_the_mean_of_the_whole() {
        let [mut whole, mut first, mut second] = [MetricSums::default(); 3];
        let policy = [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0];
        let pairs = |policy| {
            let ones = &[1; 6][..<[f64]>::len(policy)];
            PairLogProbs { policy, answer_tokens: ones, scored_tokens: ones, ..PairLogProbs::default() }
        };
        let config = config(&[("cpo", 1.0), ("sft", 1.0)]);
        whole.add_pairs(&pairs(&policy), &config, 1.0);
        first.add_pairs(&pairs(&policy[..2]), &config, 1.0);
        second.add_pairs(&pairs(&policy[2..]), &config, 1.0);
        tokens(&mut whole);
        tokens(&mut second);
        let loss = |sum, weight| Loss { sum, weight, ..Loss::default() };
        whole.add_loss(&loss(7.0, 3.0));
        first.add_loss(&loss(1.0, 1.0));
        second.add_loss(&loss(6.0, 2.0));
        first.merge(&MetricSums::from_numbers(&second.to_numbers()));
        assert_eq!(first, whole);
        assert_eq!(first.num_pairs(), 3);
    }
}
