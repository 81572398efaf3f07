//! Keys of `[train]` about evaluations: when, of what, and what follows from them.

use toml::Value;

use super::error::Result;
use super::form::{COUNT, Form, boolean, choice, custom, integer, number};
use super::keys::keys;
use super::notes::SAMPLE_TOKENS;
use super::reader::Entry;
use super::tree::Places;
use super::{Config, Method, Offload, Sharding};

keys! {
    /// Evaluations, samples, and the best checkpoint.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct EvaluationConfig(method: Method, has_eval: bool) {
        /// Evaluate before the first step too.
        eval_first: bool = boolean()
            .or(true)
            .only(has_eval, NO_HELD_OUT_ROWS)
            .free(),
        /// Prompts that the model answers before the first step, at each evaluation and after the last
        /// step; written to `samples.jsonl`, and the first and last answers are shown. They are those of
        /// the first held-out rows, else of the first training rows; an answer takes the most likely
        /// tokens. Only `"sft"`, `"dpo"` and `"distill"` have it. 0 answers none. `"auto"` is 3; 0 where weights are sharded (`"zero3"`), offloaded or
        /// divided into pipeline stages, for each token then moves all of them.
        samples: SampleCount = sample_count()
            .or(SampleCount::Auto)
            .only(has_samples(method), match method {
                Method::Online | Method::Grpo => "an online run keeps answers of its own: `online.samples_every`",
                Method::Kto => {
                    "method = \"kto\" has no samples; `tandem generate` answers from a checkpoint; remove it"
                }
                _ => "a reward model answers nothing; remove it",
            })
            .free(),
        /// Most tokens of an answer of `samples`.
        sample_tokens: usize = integer(1..=1 << 16)
            .unit("tokens")
            .or(SAMPLE_TOKENS)
            .only(has_samples(method), "nothing is sampled with this method; remove it")
            .free(),
        /// Metric of the held-out rows whose best checkpoint is kept beside the newest ones. `final/` then
        /// has the weights of that step, not of the last. `eval/loss` is best where it is lowest, the
        /// others where they are highest.
        keep_best: Option<BestMetric> = best_metric(method)
            .optional()
            .only(has_eval, NO_HELD_OUT_ROWS)
            .free(),
        /// With `keep_best`: evaluations in a row without an improvement after which the run ends. 0 never
        /// ends it early.
        early_stopping_patience: Option<u64> = integer(COUNT)
            .zero_is_none()
            .or(None)
            .only(keep_best.is_some(), "it follows the metric of `train.keep_best`, which is missing"),
        /// With `early_stopping_patience`: the run goes on while values differ by more than this from the best before.
        early_stopping_threshold: f64 = number(0.0..)
            .or(0.0)
            .only(early_stopping_patience.is_some(), "it belongs to `train.early_stopping_patience`, which is missing"),
    }
}

const NO_HELD_OUT_ROWS: &str = "it is about held-out rows: set `data.eval`, or remove it";

/// Number of sampled prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleCount {
    /// As many as cost little.
    Auto,
    /// So many.
    Count(usize),
}

/// A metric of the held-out rows, and which of its values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BestMetric {
    /// The key's value.
    pub key: &'static str,
    /// Whether lower values are better.
    pub is_lowest: bool,
    methods: &'static [Method],
}

const WITH_ACCURACY: &[Method] = &[Method::Sft, Method::Dpo, Method::Distill];

impl BestMetric {
    pub(crate) const ALL: [Self; 10] = [
        Self {
            key: "eval/loss",
            is_lowest: true,
            methods: &[Method::Sft, Method::Dpo, Method::Kto, Method::Reward, Method::Distill],
        },
        Self { key: "eval/mean_token_accuracy", is_lowest: false, methods: WITH_ACCURACY },
        Self { key: "eval/rewards/accuracies", is_lowest: false, methods: &[Method::Dpo] },
        Self { key: "eval/rewards/margins", is_lowest: false, methods: &[Method::Dpo, Method::Kto] },
        Self { key: "eval/rewards/chosen", is_lowest: false, methods: &[Method::Dpo, Method::Kto] },
        Self { key: "eval/logps/chosen", is_lowest: false, methods: &[Method::Dpo, Method::Kto] },
        Self { key: "eval/accuracy", is_lowest: false, methods: &[Method::Reward] },
        Self { key: "eval/margin", is_lowest: false, methods: &[Method::Reward] },
        Self { key: "eval/min_reward", is_lowest: false, methods: &[Method::Reward] },
        Self { key: "eval/reward", is_lowest: false, methods: &[Method::Online, Method::Grpo] },
    ];

    /// Returns the metric's name in `metrics.jsonl`.
    pub fn name(&self) -> &'static str {
        self.key.trim_start_matches("eval/")
    }

    /// Returns whether a method has the metric of this name.
    pub(super) fn is_of(key: &str, method: Method) -> bool {
        Self::ALL.iter().any(|metric| metric.key == key && metric.methods.contains(&method))
    }

    /// Returns whether a value improves on another by more than `threshold`. What is not a number
    /// improves on nothing.
    pub fn improves(&self, value: f64, on: f64, threshold: f64) -> bool {
        let gain = if self.is_lowest { on - value } else { value - on };
        gain > threshold
    }
}

fn best_metric<'a>(method: Method) -> Form<'a, BestMetric> {
    choice(BestMetric::ALL.map(|metric| (metric.key, metric))).unless(move |metric: &BestMetric| {
        (!metric.methods.contains(&method)).then(|| {
            let all = BestMetric::ALL.iter().filter(|metric| metric.methods.contains(&method));
            let keys: Vec<_> = all.map(|metric| format!("{:?}", metric.key)).collect();
            format!("method = \"{method}\" has no such metric; it has {}", keys.join(", "))
        })
    })
}

fn has_samples(method: Method) -> bool {
    matches!(method, Method::Sft | Method::Dpo | Method::Distill)
}

fn sample_count<'a>() -> Form<'a, SampleCount> {
    let read = |entry: Entry| match entry.is_string("auto") {
        true => Ok(SampleCount::Auto),
        false => (integer(0..=1024).read)(entry).map(SampleCount::Count),
    };
    custom("`\"auto\"` or integer, 0 to 1024", read, |count: &SampleCount| match count {
        SampleCount::Auto => Value::from("auto"),
        SampleCount::Count(count) => Value::Integer(*count as i64),
    })
}

impl Config {
    /// Number of prompts that the model answers at each evaluation.
    pub fn num_samples(&self) -> usize {
        let compute = &self.compute;
        let is_cheap =
            compute.pipeline == 1 && compute.offload == Offload::None && compute.sharding != Sharding::Zero3;
        match self.train.evaluation.samples {
            // A run that generates keeps answers of its own.
            _ if !has_samples(self.method) || self.online.is_some() => 0,
            SampleCount::Count(count) => count,
            SampleCount::Auto if is_cheap => 3,
            SampleCount::Auto => 0,
        }
    }
}

/// Rules that need later keys.
pub(super) fn check(config: &Config, places: &Places) -> Result<()> {
    let EvaluationConfig { keep_best, .. } = config.train.evaluation;
    if keep_best.is_some() && config.train.eval_every.is_none() {
        return Err(places.conflict(
            "train.keep_best",
            "only the last step would be evaluated; set train.eval_every to the steps between evaluations",
        ));
    }
    Ok(())
}
