//! Advice in words where a run's metrics show a known trouble.
//!
//! A loss that falls does not say that the model gets better: with preferences it falls fastest where the
//! model forgets how to write. What tells is in the other metrics. Each trouble is reported once, when the
//! mean of the last steps has moved far from that of the first ones.

use std::collections::VecDeque;
use std::fmt;

use super::record::{Record, Split};
use crate::config::{Algorithm, Config, Method, OnlineConfig, ReferenceKind};

/// Steps of a mean.
const WINDOW: usize = 4;
/// Least log-ratio of chosen answers to the reference, nats: e³ = 20 times less likely.
const CHOSEN_FALL: f64 = -3.0;
/// Least change of a margin that counts as growth.
const MARGIN_GROWTH: f64 = 0.1;
/// Drop of the share of tokens that the model would have chosen.
const ACCURACY_DROP: f64 = 0.1;
/// Loss below which there is nothing left to learn.
const NO_LOSS: f64 = 1e-3;
/// Entropy of a token, nats, below which its ratios say nothing.
const LEAST_ENTROPY: f64 = 0.1;
/// Growth of answers of an online run that counts as length.
const LENGTH_GROWTH: f64 = 1.5;

/// A trouble that metrics show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Chosen answers become less likely while the margin grows: the model learns to avoid the rejected
    /// ones, and what it says instead is in neither (Razin et al. 2024, arXiv 2410.08847; Pal et al. 2024,
    /// arXiv 2402.13228).
    ChosenFalls,
    /// The model would write fewer of the chosen answers' tokens than at the start.
    TokenAccuracyFalls,
    /// The training loss stays at nothing: pairs are learned by heart.
    NothingToLearn,
    /// The entropy of the next token has doubled: the model no longer knows what to say.
    EntropyDoubles,
    /// The entropy of the next token has halved: the model says the same always.
    EntropyHalves,
    /// The held-out loss has risen twice in a row: overfitting.
    HeldOutLossRises,
    /// Answers become longer as their scores rise: judges may reward length alone (Singhal et al. 2023,
    /// arXiv 2310.03716).
    LengthGrows,
}

/// Publications that describe troubles: name and address.
const RAZIN: [&str; 2] = ["Razin et al. 2024", "https://arxiv.org/abs/2410.08847"];
const PAL: [&str; 2] = ["Pal et al. 2024", "https://arxiv.org/abs/2402.13228"];
const AZAR: [&str; 2] = ["Azar et al. 2023", "https://arxiv.org/abs/2310.12036"];
const KIRK: [&str; 2] = ["Kirk et al. 2023", "https://arxiv.org/abs/2310.06452"];
const PRECHELT: [&str; 2] = ["Prechelt 1998", "https://doi.org/10.1007/3-540-49430-8_3"];
const SINGHAL: [&str; 2] = ["Singhal et al. 2023", "https://arxiv.org/abs/2310.03716"];

impl Trouble {
    /// Every trouble.
    pub const ALL: [Self; 7] = [
        Self::ChosenFalls,
        Self::TokenAccuracyFalls,
        Self::NothingToLearn,
        Self::EntropyDoubles,
        Self::EntropyHalves,
        Self::HeldOutLossRises,
        Self::LengthGrows,
    ];

    /// Returns publications that describe the trouble, as name and address.
    pub const fn sources(self) -> &'static [[&'static str; 2]] {
        match self {
            Self::ChosenFalls => &[RAZIN, PAL],
            Self::TokenAccuracyFalls | Self::EntropyDoubles => &[RAZIN],
            Self::NothingToLearn => &[AZAR],
            Self::EntropyHalves => &[KIRK],
            Self::HeldOutLossRises => &[PRECHELT],
            Self::LengthGrows => &[SINGHAL],
        }
    }
}

/// A trouble, with its numbers and what to change.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The trouble.
    pub trouble: Trouble,
    /// Step at which it showed.
    pub step: u64,
    /// What the metrics show, with numbers.
    pub finding: String,
    /// Keys to change, and how.
    pub remedy: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.finding, self.remedy)
    }
}

/// First and last values of a metric.
#[derive(Default)]
struct Course {
    first: Vec<f64>,
    last: VecDeque<f64>,
}

impl Course {
    fn push(&mut self, value: Option<f64>) {
        let Some(value) = value else { return };
        if self.first.len() < WINDOW {
            self.first.push(value);
            return;
        }
        if self.last.len() == WINDOW {
            self.last.pop_front();
        }
        self.last.push_back(value);
    }

    /// Returns the means of the first and of the last steps, once there are enough.
    fn means(&self) -> Option<[f64; 2]> {
        let mean = |values: &mut dyn Iterator<Item = &f64>| values.sum::<f64>() / WINDOW as f64;
        (self.last.len() == WINDOW).then(|| [mean(&mut self.first.iter()), mean(&mut self.last.iter())])
    }
}

/// Watches a run's records.
pub struct Advisor {
    method: Method,
    /// Strength of the reference, if rewards are log-ratios to one.
    beta: Option<f64>,
    learning_rate: f64,
    /// Whether a loss of nothing is the least that there is.
    has_least: bool,
    chosen: Course,
    margin: Course,
    accuracy: Course,
    entropy: Course,
    length: Course,
    score: Course,
    /// Steps in a row whose loss is nothing.
    without_loss: usize,
    held_out: Vec<f64>,
    found: Vec<Advice>,
}

impl Advisor {
    /// Watches a run of this configuration from its first record.
    pub fn new(config: &Config) -> Self {
        let has_reference = config.reference.kind != ReferenceKind::None && !config.objective.reference_free;
        let is_preference = matches!(config.method, Method::Dpo | Method::Online);
        let beta = (has_reference && is_preference).then_some(config.objective.beta);
        // Terms of XPO and Nash-MD may be negative.
        let is_signed = |online: &OnlineConfig| {
            matches!(online.algorithm, Algorithm::Xpo { .. } | Algorithm::NashMd { .. })
        };
        let mut advisor = Self::of(config.method, beta, config.train.learning_rate);
        advisor.has_least &= !config.online.as_ref().is_some_and(is_signed);
        advisor
    }

    fn of(method: Method, beta: Option<f64>, learning_rate: f64) -> Self {
        Self {
            method,
            beta,
            learning_rate,
            // The loss of policy gradients has no least value, and a small divergence is what is asked of a student.
            has_least: !matches!(method, Method::Grpo | Method::Distill),
            chosen: Course::default(),
            margin: Course::default(),
            accuracy: Course::default(),
            entropy: Course::default(),
            length: Course::default(),
            score: Course::default(),
            without_loss: 0,
            held_out: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Takes the run's next record; returns what it adds to [`Advisor::found`].
    pub fn see(&mut self, record: &Record) -> &[Advice] {
        let known = self.found.len();
        match record.split() {
            Split::Train => self.see_step(record),
            Split::Eval => self.see_evaluation(record),
        }
        &self.found[known..]
    }

    /// All that was found, in order.
    pub fn found(&self) -> &[Advice] {
        &self.found
    }

    fn see_step(&mut self, record: &Record) {
        let courses = [
            (&mut self.chosen, "rewards/chosen"),
            (&mut self.margin, "rewards/margins"),
            (&mut self.accuracy, "mean_token_accuracy"),
            (&mut self.entropy, "entropy"),
            (&mut self.length, "completions/mean_length"),
            (&mut self.score, if self.method == Method::Grpo { "reward" } else { "objective/scores" }),
        ];
        for (course, name) in courses {
            course.push(record.get(name));
        }
        let is_low = |loss: f64| loss < NO_LOSS && self.has_least;
        let has_loss = !record.get("loss").is_some_and(is_low);
        self.without_loss = if has_loss { 0 } else { self.without_loss + 1 };
        let step = record.step();
        self.look_at_chosen(step);
        self.look_at_accuracy(step);
        self.look_at_loss(step);
        self.look_at_entropy(step);
        self.look_at_length(step);
    }

    fn look_at_chosen(&mut self, step: u64) {
        let (Some(beta), Some([_, chosen]), Some([before, margin])) =
            (self.beta, self.chosen.means(), self.margin.means())
        else {
            return;
        };
        if chosen / beta < CHOSEN_FALL && margin > before + MARGIN_GROWTH {
            let finding = format!(
                "chosen answers have become less likely than under the reference (rewards/chosen {chosen:.2}) while the margin grows \
                 ({before:.2} to {margin:.2}): the model learns to avoid the rejected answers, not to give the chosen ones"
            );
            let remedy = format!(
                "Lower train.learning_rate (now {:e}), raise objective.beta (now {beta}), train for fewer steps, or hold the chosen \
                 answers with objective.loss = {{ sigmoid = 1.0, sft = 1.0 }}",
                self.learning_rate
            );
            self.report(Trouble::ChosenFalls, step, finding, remedy);
        }
    }

    fn look_at_accuracy(&mut self, step: u64) {
        let Some([before, now]) = self.accuracy.means() else { return };
        if now < before - ACCURACY_DROP {
            let finding = format!(
                "the model would write fewer of the chosen answers' tokens than at the start (mean_token_accuracy {before:.2} to {now:.2}): \
                 it unlearns to write"
            );
            let remedy = self.gentler();
            self.report(Trouble::TokenAccuracyFalls, step, finding, remedy);
        }
    }

    fn look_at_loss(&mut self, step: u64) {
        if self.without_loss >= WINDOW {
            let finding = format!(
                "the loss has stayed below {NO_LOSS} for {WINDOW} steps: the rows are known by heart, and further steps change the model \
                 without teaching it"
            );
            let remedy = format!(
                "Lower train.epochs or train.steps or train.learning_rate (now {:e}), or give more rows",
                self.learning_rate
            );
            self.report(Trouble::NothingToLearn, step, finding, remedy);
        }
    }

    fn look_at_entropy(&mut self, step: u64) {
        // A student's entropy follows its teacher's.
        let Some([before, now]) = self.entropy.means().filter(|_| self.method != Method::Distill) else {
            return;
        };
        let numbers = format!("(entropy {before:.2} to {now:.2} nats a token)");
        if now > 2.0 * before && now > LEAST_ENTROPY {
            let finding =
                format!("the model has become twice as unsure of every token as at the start {numbers}");
            let remedy = self.gentler();
            self.report(Trouble::EntropyDoubles, step, finding, remedy);
        }
        // Demonstrations are meant to make a model sure of them.
        if self.method != Method::Sft && now < 0.5 * before && before > LEAST_ENTROPY {
            let finding = format!("the model's answers have become half as varied as at the start {numbers}");
            let remedy = self.gentler();
            self.report(Trouble::EntropyHalves, step, finding, remedy);
        }
    }

    fn look_at_length(&mut self, step: u64) {
        let (Some([short, long]), Some([low, high])) = (self.length.means(), self.score.means()) else {
            return;
        };
        if long > LENGTH_GROWTH * short && high > low {
            let finding = format!(
                "answers grow ({short:.0} to {long:.0} tokens) as their scores rise ({low:.2} to {high:.2}): the judges may reward length \
                 alone"
            );
            let remedy =
                "Read samples.jsonl; add a judge of length, or lower online.max_new_tokens".to_owned();
            self.report(Trouble::LengthGrows, step, finding, remedy);
        }
    }

    fn see_evaluation(&mut self, record: &Record) {
        let Some(loss) = record.get("loss") else { return };
        self.held_out.push(loss);
        if let [.., first, second, third] = self.held_out[..]
            && first < second
            && second < third
        {
            let finding = format!(
                "the loss of the held-out rows has risen twice in a row ({first:.4}, {second:.4}, {third:.4}): the model overfits"
            );
            let remedy = "Stop earlier (train.epochs, train.steps; an earlier checkpoint has the better model), lower \
                          train.learning_rate, or give more rows"
                .to_owned();
            self.report(Trouble::HeldOutLossRises, record.step(), finding, remedy);
        }
    }

    fn gentler(&self) -> String {
        let rate = format!("Lower train.learning_rate (now {:e})", self.learning_rate);
        match self.beta {
            Some(beta) => format!("{rate}, raise objective.beta (now {beta}), or train for fewer steps"),
            None => format!("{rate}, or train for fewer steps"),
        }
    }

    /// Reports a trouble the first time.
    fn report(&mut self, trouble: Trouble, step: u64, finding: String, remedy: String) {
        if self.found.iter().all(|known| known.trouble != trouble) {
            self.found.push(Advice { trouble, step, finding, remedy });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is found in steps whose metrics go evenly from the first value to the second.
    fn found(method: Method, steps: u64, metrics: &[(&str, f64, f64)]) -> Vec<Trouble> {
        let beta = (method == Method::Dpo).then_some(0.1);
        let mut advisor = Advisor::of(method, beta, 1e-4);
        for step in 1..=steps {
            let mut record = Record::new(step, Split::Train);
            let share = (step - 1) as f64 / (steps - 1) as f64;
            for (name, from, to) in metrics {
                record.set(name, from + share * (to - from));
            }
            let new: Vec<_> = advisor.see(&record).to_vec();
            assert!(new.iter().all(|advice| advice.step == step), "{new:?}");
        }
        advisor.found().iter().map(|advice| advice.trouble).collect()
    }

    #[test]
    fn a_run_that_unlearns_to_write_is_told_apart_from_one_that_learns() {
        let spoiled = [
            ("loss", 0.69, 0.0066),
            ("rewards/chosen", 0.0, -2.5),
            ("rewards/margins", 0.0, 5.9),
            ("mean_token_accuracy", 0.92, 0.58),
            ("entropy", 0.4, 0.9),
        ];
        let troubles = found(Method::Dpo, 24, &spoiled);
        for trouble in [Trouble::ChosenFalls, Trouble::TokenAccuracyFalls, Trouble::EntropyDoubles] {
            assert_eq!(troubles.iter().filter(|found| **found == trouble).count(), 1, "{troubles:?}");
        }
        let well = [
            ("loss", 0.69, 0.35),
            ("rewards/chosen", 0.0, -0.1),
            ("rewards/margins", 0.0, 1.2),
            ("mean_token_accuracy", 0.62, 0.58),
            ("entropy", 0.8, 0.7),
        ];
        assert_eq!(found(Method::Dpo, 24, &well), []);
    }

    #[test]
    fn a_learning_rate_that_is_far_too_high_is_noticed_in_a_short_run() {
        let metrics = [("loss", 0.0, 0.0), ("rewards/chosen", -80.0, -90.0), ("rewards/margins", 0.0, 232.0)];
        let troubles = found(Method::Dpo, 8, &metrics);
        assert_eq!(troubles, [Trouble::NothingToLearn, Trouble::ChosenFalls]);
    }

    #[test]
    fn demonstrations_may_make_a_model_sure_and_preferences_may_not() {
        let metrics = [("loss", 2.0, 0.5), ("entropy", 2.0, 0.3), ("mean_token_accuracy", 0.4, 0.8)];
        assert_eq!(found(Method::Sft, 30, &metrics), []);
        assert_eq!(found(Method::Dpo, 30, &metrics), [Trouble::EntropyHalves]);
    }

    #[test]
    fn answers_that_grow_with_their_scores_are_noticed() {
        let metrics = |high| [("completions/mean_length", 20.0, 60.0), ("objective/scores", 0.1, high)];
        assert_eq!(found(Method::Online, 20, &metrics(0.9)), [Trouble::LengthGrows]);
        assert_eq!(found(Method::Online, 20, &metrics(-0.9)), []);
    }

    #[test]
    fn a_held_out_loss_that_rises_twice_is_noticed_once() {
        let mut advisor = Advisor::of(Method::Sft, None, 1e-5);
        let mut told = Vec::new();
        for (step, loss) in [2.0, 1.5, 1.6, 1.4, 1.5, 1.6, 1.7].into_iter().enumerate() {
            let mut record = Record::new(step as u64, Split::Eval);
            record.set("loss", loss);
            told.extend(advisor.see(&record).iter().map(|advice| (advice.step, advice.trouble)));
        }
        assert_eq!(told, [(5, Trouble::HeldOutLossRises)]);
    }

    #[test]
    fn metrics_that_are_missing_or_no_number_say_nothing() {
        assert_eq!(found(Method::Reward, 20, &[("accuracy", 0.5, 0.9)]), []);
        assert_eq!(found(Method::Dpo, 20, &[("loss", f64::NAN, f64::NAN)]), []);
    }
}
