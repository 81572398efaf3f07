//! Facts about each metric: its section of the page, its unit and its meaning.

/// A section of curves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Section {
    /// Metrics that tell whether the model learns.
    Learning,
    /// Of online runs.
    Answers,
    Likelihoods,
    Optimizer,
    Speed,
    /// Counts, and what is not known here.
    Other,
}

impl Section {
    /// Name of the section in the page.
    pub(crate) const fn id(self) -> &'static str {
        match self {
            Self::Learning => "learning",
            Self::Answers => "answers",
            Self::Likelihoods => "likelihoods",
            Self::Optimizer => "optimizer",
            Self::Speed => "speed",
            Self::Other => "other",
        }
    }
}

/// Unit of a metric, and so of its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Plain,
    /// From 0 to 1.
    Share,
    /// A number whose distance from zero matters.
    Amount,
    Bytes,
}

/// Facts about a metric.
pub(crate) struct About {
    pub section: Section,
    /// Place within the section.
    pub place: usize,
    pub unit: Unit,
    pub meaning: &'static str,
}

type Row = (&'static str, Section, Unit, &'static str);

/// The metrics in the order of the page. A name that ends in `*` is a beginning.
const METRICS: [Row; 58] = {
    use Section::{Answers, Learning, Likelihoods, Optimizer, Other, Speed};
    use Unit::{Amount, Bytes, Plain, Share};
    [
        ("loss", Learning, Plain, "mean over pairs, or tokens"),
        ("rewards/margins", Learning, Plain, "reward of chosen − rejected"),
        ("margin", Learning, Plain, "reward of chosen − rejected"),
        ("rewards/accuracies", Learning, Share, "chosen ahead of rejected"),
        ("accuracy", Learning, Share, "chosen ahead of rejected"),
        ("rewards/chosen", Learning, Plain, "β (log π − log π_ref)"),
        ("rewards/rejected", Learning, Plain, "β (log π − log π_ref)"),
        ("mean_token_accuracy", Learning, Share, "chosen tokens ranked first"),
        ("entropy", Learning, Plain, "nats a token"),
        ("distill/teacher_entropy", Learning, Plain, "nats a token"),
        ("distill/own_answers", Answers, Share, "rows that the student answered"),
        ("distill/*", Learning, Plain, "nats a token, between student and teacher"),
        ("objective/scores", Answers, Plain, "mean total of the judges"),
        ("reward", Answers, Plain, "mean total of the judges"),
        ("reward_std", Answers, Plain, "deviation of the totals"),
        ("frac_reward_zero_std", Answers, Share, "groups with equal rewards"),
        ("objective/scores_margin", Answers, Plain, "difference within a pair"),
        ("environment/turns", Answers, Plain, "turns of the policy, mean"),
        ("environment/dropped", Answers, Amount, "without a reward"),
        ("judges/*", Answers, Plain, "mean score of a judge"),
        ("completions/mean_length", Answers, Amount, "tokens"),
        ("val/contain_eos_token", Answers, Share, "answers with an end"),
        ("objective/kl", Answers, Plain, "nats, log π − log π_ref"),
        ("kl", Answers, Plain, "nats a token"),
        ("objective/entropy", Answers, Plain, "nats an answer"),
        ("objective/rlhf_reward", Answers, Plain, "score − β KL"),
        ("objective/*", Answers, Plain, ""),
        ("completions/*", Answers, Plain, ""),
        ("clip_ratio/*", Likelihoods, Share, "importance ratios that were clipped"),
        ("sampling/*", Likelihoods, Plain, "trainer beside generator"),
        ("logps/chosen", Likelihoods, Plain, "nats an answer"),
        ("logps/rejected", Likelihoods, Plain, "nats an answer"),
        ("logits/chosen", Likelihoods, Plain, "mean over the vocabulary"),
        ("logits/rejected", Likelihoods, Plain, "mean over the vocabulary"),
        ("mean_reward", Likelihoods, Plain, "over both answers"),
        ("min_reward", Likelihoods, Plain, "over both answers"),
        ("max_reward", Likelihoods, Plain, "over both answers"),
        ("learning_rate", Optimizer, Plain, "of the step"),
        ("grad_norm", Optimizer, Plain, "before clipping"),
        ("beta", Optimizer, Plain, "of the step"),
        ("tokens_per_second", Speed, Amount, "tokens/s"),
        ("memory", Speed, Bytes, "peak of the run"),
        ("arena", Speed, Bytes, "tensors of the run"),
        ("time_generate", Speed, Amount, "seconds"),
        ("time_judge", Speed, Amount, "seconds"),
        ("generated_tokens", Speed, Amount, "tokens of a step's answers"),
        ("age", Speed, Amount, "steps between answering and training"),
        ("time", Other, Amount, "seconds since the start"),
        ("epoch", Other, Amount, "passes over the rows"),
        ("num_tokens", Other, Amount, "tokens since the start"),
        ("num_rows", Other, Amount, "of an evaluation"),
        ("pairs", Other, Amount, "of the step"),
        ("ties", Other, Amount, "of the step"),
        ("unscored", Other, Amount, "of the step"),
        ("replayed", Other, Amount, "of the step"),
        ("replaced_prompts", Other, Amount, "of the step"),
        ("rewards/*", Likelihoods, Plain, ""),
        ("*", Other, Plain, ""),
    ]
};

impl About {
    /// Looks up a metric by its name in `metrics.jsonl`.
    pub(crate) fn metric(name: &str) -> Self {
        let fits = |(pattern, ..): &Row| match pattern.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == *pattern,
        };
        let place = METRICS.iter().position(fits).expect("the last one fits every name");
        let (_, section, unit, meaning) = METRICS[place];
        Self { section, place, unit, meaning }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_a_section_also_if_they_are_unknown() {
        let section = |name| About::metric(name).section;
        assert_eq!(section("loss"), Section::Learning);
        assert_eq!(section("judges/brevity"), Section::Answers);
        assert_eq!(section("a/new/one"), Section::Other);
        assert!(About::metric("loss").place < About::metric("rewards/margins").place);
    }
}
