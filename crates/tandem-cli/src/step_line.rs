//! One-line summary of a training step.

use std::fmt;
use std::time::Duration;

use tandem_train::size;

/// Names of the margin, of which a method has at most one.
pub(crate) const MARGINS: [&str; 2] = ["rewards/margins", "margin"];

/// Names of an accuracy, the most telling first: of pairs, of a reward model, of tokens.
pub(crate) const ACCURACIES: [&str; 3] = ["rewards/accuracies", "accuracy", "mean_token_accuracy"];

/// Names of what judges gave: to pairs, and to groups.
pub(crate) const SCORES: [&str; 2] = ["objective/scores", "reward"];

/// Names of the divergence from the reference.
const DIVERGENCES: [&str; 2] = ["objective/kl", "kl"];

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
    /// Largest resident size of the process so far, bytes.
    pub memory: Option<f64>,
}

impl StepLine {
    /// Reads the metrics by the names that `metrics.jsonl` has.
    pub(crate) fn from_metrics(get: impl Fn(&str) -> Option<f64>) -> Self {
        // For online pairs, which are new in each step, accuracy says little.
        let pairs = get("pairs");
        Self {
            score: SCORES.into_iter().find_map(&get),
            pairs,
            loss: get("loss"),
            margin: MARGINS.into_iter().find_map(&get),
            kl: DIVERGENCES.into_iter().find_map(&get),
            length: get("completions/mean_length"),
            accuracy: ACCURACIES.into_iter().find_map(&get).filter(|_| pairs.is_none()),
            grad_norm: get("grad_norm"),
            learning_rate: get("learning_rate"),
            tokens_per_second: get("tokens_per_second"),
            memory: get("memory").filter(|bytes| *bytes > 0.0),
        }
    }

    /// Returns what fits into `width` columns: the time left, then the fields that say most.
    pub(crate) fn fitted(&self, left: Option<&str>, width: usize) -> String {
        let named = |name: &str| {
            let value = self.fields().into_iter().find(|field| field.0 == name)?.1;
            Some(format!("{name} {}", value?))
        };
        let mut quality = ["score", "margin", "accuracy"].into_iter().filter_map(named);
        let first = [left.map(|left| format!("left {left}")), named("loss"), quality.next(), self.speed()];
        let memory = self.memory.map(|bytes| size::in_words(bytes as u64));
        let last = ["length", "pairs", "kl", "grad", "lr"].into_iter().filter_map(named);
        let mut text = String::new();
        for field in first.into_iter().flatten().chain(memory).chain(quality).chain(last) {
            let gap = if text.is_empty() { "" } else { "  " };
            // A shorter field behind it would come and go with the digits of this one.
            if text.len() + gap.len() + field.len() > width {
                break;
            }
            text = text + gap + &field;
        }
        text
    }

    fn speed(&self) -> Option<String> {
        self.tokens_per_second.map(|rate| match rate {
            10e3.. => format!("{:.0}k tokens/s", rate / 1e3),
            _ => format!("{rate:.0} tokens/s"),
        })
    }

    fn fields(&self) -> [(&'static str, Option<String>); 10] {
        [
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
        ]
    }
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> =
            self.fields().into_iter().filter_map(|(name, v)| Some(format!("{name} {}", v?))).collect();
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
    fn a_narrow_terminal_shows_the_time_left_and_what_says_most() {
        let line = StepLine {
            loss: Some(0.484),
            margin: Some(0.677),
            accuracy: Some(1.0),
            grad_norm: Some(8.579),
            learning_rate: Some(4.22e-5),
            tokens_per_second: Some(58730.0),
            memory: Some((12u64 << 30) as f64),
            ..StepLine::default()
        };
        assert_eq!(line.fitted(Some("1 h 02 min"), 44), "left 1 h 02 min  loss 0.4840  margin 0.677");
        let wide = line.fitted(Some("3 min 05 s"), 200);
        assert!(wide.starts_with("left 3 min 05 s  loss 0.4840  margin 0.677  59k tokens/s  12.00 GiB  accuracy 100 %  grad 8.579"), "{wide}");
        assert_eq!(line.fitted(None, 13), "loss 0.4840");
    }

    #[test]
    fn durations_in_words() {
        for (seconds, words) in [(0, "0 s"), (59, "59 s"), (65, "1 min 05 s"), (3725, "1 h 02 min")] {
            assert_eq!(in_words(Duration::from_secs(seconds)), words);
        }
    }
}
