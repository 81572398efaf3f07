//! One-line summary of a training step.

use std::fmt;
use std::time::Duration;

/// Metrics shown for a step. A metric that a method lacks (SFT has no margin) is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepLine {
    /// Online runs: judge scores and number of pairs.
    pub score: Option<f64>,
    pub pairs: Option<f64>,
    pub loss: Option<f64>,
    pub margin: Option<f64>,
    /// Online runs: divergence from the reference, and tokens.
    pub kl: Option<f64>,
    pub length: Option<f64>,
    pub accuracy: Option<f64>,
    pub grad_norm: Option<f64>,
    pub learning_rate: Option<f64>,
    pub tokens_per_second: Option<f64>,
}

impl StepLine {
    /// Reads the metrics by the names that `metrics.jsonl` has.
    pub(crate) fn from_metrics(get: impl Fn(&str) -> Option<f64>) -> Self {
        // SFT reports token accuracy, preference methods pair accuracy. For online pairs, which are
        // new in each step, accuracy says little.
        let accuracies = ["rewards/accuracies", "accuracy", "mean_token_accuracy"];
        let pairs = get("pairs");
        Self {
            score: get("objective/scores"),
            pairs,
            loss: get("loss"),
            margin: get("rewards/margins").or_else(|| get("margin")),
            kl: get("objective/kl"),
            length: get("completions/mean_length"),
            accuracy: accuracies.into_iter().find_map(&get).filter(|_| pairs.is_none()),
            grad_norm: get("grad_norm"),
            learning_rate: get("learning_rate"),
            tokens_per_second: get("tokens_per_second"),
        }
    }
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = [
            ("score", self.score.map(|x| format!("{x:.3}"))),
            ("pairs", self.pairs.map(|x| format!("{x:.0}"))),
            ("loss", self.loss.map(|x| format!("{x:.4}"))),
            ("margin", self.margin.map(|x| format!("{x:.3}"))),
            ("kl", self.kl.map(|x| format!("{x:.3}"))),
            ("length", self.length.map(|x| format!("{x:.1}"))),
            ("accuracy", self.accuracy.map(|x| format!("{:.0} %", x * 100.0))),
            ("grad", self.grad_norm.map(|x| format!("{x:.3}"))),
            ("lr", self.learning_rate.map(|x| format!("{x:.2e}"))),
            ("tokens/s", self.tokens_per_second.map(|x| format!("{x:.0}"))),
        ];
        let words: Vec<_> =
            fields.into_iter().filter_map(|(name, v)| Some(format!("{name} {}", v?))).collect();
        f.write_str(&words.join("  "))
    }
}

/// "1 h 02 min", "3 min 05 s", "12 s".
pub(crate) fn in_words(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_each_kind_shows_what_it_has() {
        let dpo = [
            ("loss", 0.69312),
            ("rewards/margins", 0.12),
            ("rewards/accuracies", 0.875),
            ("learning_rate", 1e-5),
        ];
        let get = |name: &str| dpo.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        assert_eq!(
            StepLine::from_metrics(get).to_string(),
            "loss 0.6931  margin 0.120  accuracy 88 %  lr 1.00e-5"
        );
        let online = [
            ("loss", 0.5),
            ("rewards/margins", 0.4),
            ("rewards/accuracies", 0.75),
            ("objective/kl", -0.0625),
            ("objective/scores", 1.2656),
            ("completions/mean_length", 16.703),
            ("pairs", 12.0),
        ];
        let get = |name: &str| online.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        assert_eq!(
            StepLine::from_metrics(get).to_string(),
            "score 1.266  pairs 12  loss 0.5000  margin 0.400  kl -0.062  length 16.7"
        );
        let sft = |name: &str| (name == "mean_token_accuracy").then_some(0.5);
        assert_eq!(StepLine::from_metrics(sft).to_string(), "accuracy 50 %");
    }

    #[test]
    fn durations_in_words() {
        for (seconds, words) in [(0, "0 s"), (59, "59 s"), (65, "1 min 05 s"), (3725, "1 h 02 min")] {
            assert_eq!(in_words(Duration::from_secs(seconds)), words);
        }
    }
}
