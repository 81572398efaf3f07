//! One line of `metrics.jsonl`.

use serde_json::{Map, Number, Value};

/// Which rows a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The step's own batch.
    Train,
    /// The held-out rows.
    Eval,
}

impl Split {
    /// The name in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }
}

/// Metrics of the clock and the machine. All others have the same bits wherever a run computes.
pub const MACHINE_METRICS: [&str; 6] =
    ["time", "tokens_per_second", "memory", "arena", "time_generate", "time_judge"];

/// Metrics of one step by TRL's names (no `eval_` prefix: `split` says it), in the order they were
/// set.
///
/// | name | meaning |
/// |---|---|
/// | `loss` | mean over pairs (over scored tokens, for SFT) |
/// | `rewards/chosen`, `rewards/rejected` | mean of β (log π − log π_ref) |
/// | `rewards/margins`, `rewards/accuracies` | mean of their difference; share of pairs where it is positive |
/// | `logps/chosen`, `logps/rejected` | mean summed log-probability of the answers, nats |
/// | `kl` | of KTO: the batch's estimated divergence to the reference, which rewards are compared with |
/// | `delta` | of `bco`: mean reward so far |
/// | `distill/forward_kl`, `distill/reverse_kl` | of distillation: means over tokens of the divergence from teacher to policy, and from policy to teacher, nats |
/// | `distill/teacher_entropy` | of distillation: as `entropy`, under the teacher |
/// | `distill/own_answers` | of distillation: part of the rows whose completions the policy has just given |
/// | `nll_loss` | of a mix with `sft`: mean over chosen tokens of −log π |
/// | `log_odds_ratio`, `log_odds_chosen` | of `orpo`: means of log σ of the log odds ratio, and of that |
/// | `logits/chosen`, `logits/rejected` | mean over answer tokens of the mean over the vocabulary |
/// | `entropy` | mean over answer tokens, nats |
/// | `mean_token_accuracy` | share of chosen answer tokens with the largest logit |
/// | `accuracy`, `margin` | of a reward model: share of pairs whose chosen answer has the larger reward; mean of the difference |
/// | `min_reward`, `mean_reward`, `max_reward` | of a reward model, over both answers |
/// | `objective/kl`, `objective/entropy` | of an online run: means of log π − log π_ref and of −log π over the answers trained on |
/// | `objective/scores`, `objective/scores_margin` | mean of the judges' total; mean of its difference in a pair |
/// | `objective/non_score_reward`, `objective/rlhf_reward` | −β `objective/kl`; that and `objective/scores` |
/// | `val/contain_eos_token`, `beta` | share of answers that ended by themselves; β of this step |
/// | `completions/*`, `judges/NAME` | lengths and log-probability of answers; mean score of a judge |
/// | `reward`, `reward_std`, `rewards/*` | of policy gradients: mean and deviation of the rewards; of a judge's scores as `rewards/NAME/mean` and `rewards/NAME/std` |
/// | `frac_reward_zero_std` | share of groups with equal rewards |
/// | `kl` | of policy gradients: mean over tokens of the divergence to the reference |
/// | `clip_ratio/*`, `cispo_clip_ratio`, `vespo/phi_seq_mean` | share of importance ratios that were clipped; mean weight of an answer |
/// | `sampling/ratio`, `sampling/sampling_logp_difference/*` | the trainer's probability of a token over the generator's, mean; difference of the logarithms, mean and largest |
/// | `sampling/importance_sampling_ratio/*` | the trainer's probability over a server's, as it weighs the loss |
/// | `environment/turns`, `environment/dropped` | of conversations with an environment: mean turns of the policy; conversations without a reward |
/// | `replaced_prompts` | prompts of the step whose answers had equal rewards, and which others replaced |
/// | `pairs`, `ties`, `unscored`, `replayed`, `age` | counts of a step's answers; steps between answering and training |
/// | `time_generate`, `time_judge`, `generated_tokens` | of the answers that a step brought |
/// | `num_tokens` | tokens seen since the start, prompts counted for each answer |
/// | `grad_norm` | before clipping |
/// | `learning_rate` | of this step |
/// | `epoch` | passes over the data after this step |
/// | `tokens_per_second`, `time` | of this step; seconds since the start |
/// | `memory`, `arena` | bytes: peak of the process's resident memory; highest address used in rank 0's arena |
/// | `num_rows` | held-out rows of an evaluation |
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    step: u64,
    split: Split,
    values: Map<String, Value>,
}

impl Record {
    /// An empty record of a 1-based `step` (the number of optimiser steps done; 0 before the
    /// first).
    pub fn new(step: u64, split: Split) -> Self {
        Self { step, split, values: Map::new() }
    }

    /// Sets a metric. A value that is not finite is written `null`, as JSON has no other way.
    pub fn set(&mut self, name: &str, value: f64) {
        let value = Number::from_f64(value).map_or(Value::Null, Value::Number);
        self.values.insert(name.to_string(), value);
    }

    /// Sets a whole-number metric.
    pub fn set_count(&mut self, name: &str, value: u64) {
        self.values.insert(name.to_string(), value.into());
    }

    /// Reads what [`Record::to_json`] wrote; `None` if it is something else.
    pub fn from_json(line: &str) -> Option<Self> {
        let Ok(Value::Object(mut values)) = serde_json::from_str(line) else { return None };
        let step = values.shift_remove("step")?.as_u64()?;
        let split = match values.shift_remove("split")?.as_str()? {
            "train" => Split::Train,
            "eval" => Split::Eval,
            _ => return None,
        };
        Some(Self { step, split, values })
    }

    /// A metric's value; `None` if it was not set or is not finite.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).and_then(Value::as_f64)
    }

    /// All metrics in the order they were set; `None` for a value that is not finite.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, Option<f64>)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value.as_f64()))
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The split.
    pub fn split(&self) -> Split {
        self.split
    }

    /// The finite metrics, in the order they were set.
    pub fn finite_metrics(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?)))
    }

    /// The JSON object, `step` and `split` first.
    pub fn object(&self) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("step".into(), self.step.into());
        object.insert("split".into(), self.split.name().into());
        object.extend(self.values.clone());
        object
    }

    /// The JSON object on one line, without a newline.
    pub fn to_json(&self) -> String {
        Value::Object(self.object()).to_string()
    }
}
