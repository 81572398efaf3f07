//! Training methods: one row of [`TABLE`] for each. No other file of the config names a method.

use std::fmt;

use tandem_data::record::RowKind;

/// A training method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Supervised fine-tuning: likelihood of the completions.
    Sft,
    /// Direct preference optimisation and its family.
    Dpo,
    /// A reward model from preferences.
    Reward,
    /// Online DPO: preferences between completions that the policy generates while it trains.
    Online,
    /// Policy gradients from rewards of completions that the policy generates while it trains.
    Grpo,
    /// Kahneman–Tversky optimisation and its family: completions that are desirable or not.
    Kto,
    /// Distillation: the next-token distributions of a teacher.
    Distill,
}

/// Properties of a method that decide which keys apply to it.
struct Traits {
    /// Name in the config.
    name: &'static str,
    /// Rows that it reads.
    rows: RowKind,
    /// Whether the loss compares the policy with a reference.
    has_reference: bool,
    /// Whether completions are generated and judged during training.
    generates: bool,
    /// Default of `objective.loss`; `None` for a method with a single loss of its own.
    default_loss: Option<&'static str>,
    /// Reason why `data.truncation` does not apply, if so.
    untruncated: Option<&'static str>,
}

const TABLE: [(Method, Traits); 7] = [
    (
        Method::Sft,
        Traits {
            name: "sft",
            rows: RowKind::Supervised,
            has_reference: false,
            generates: false,
            default_loss: Some("sft"),
            untruncated: None,
        },
    ),
    (
        Method::Dpo,
        Traits {
            name: "dpo",
            rows: RowKind::Preference,
            has_reference: true,
            generates: false,
            default_loss: Some("sigmoid"),
            untruncated: None,
        },
    ),
    (
        Method::Reward,
        Traits {
            name: "reward",
            rows: RowKind::Reward,
            has_reference: false,
            generates: false,
            default_loss: None,
            untruncated: Some("a reward model scores whole texts, so rows with longer texts are dropped"),
        },
    ),
    (
        Method::Online,
        Traits {
            name: "online",
            rows: RowKind::Prompt,
            has_reference: true,
            generates: true,
            default_loss: Some("sigmoid"),
            untruncated: Some("prompts are never cut, so rows with longer prompts are dropped"),
        },
    ),
    (
        Method::Grpo,
        Traits {
            name: "grpo",
            rows: RowKind::Prompt,
            has_reference: true,
            generates: true,
            default_loss: None,
            untruncated: Some("prompts are never cut, so rows with longer prompts are dropped"),
        },
    ),
    (
        Method::Kto,
        Traits {
            name: "kto",
            rows: RowKind::Unpaired,
            has_reference: true,
            generates: false,
            default_loss: Some("kto"),
            untruncated: Some("completions are cut at their end, the mismatched ones too"),
        },
    ),
    (
        Method::Distill,
        Traits {
            name: "distill",
            rows: RowKind::Supervised,
            has_reference: true,
            generates: false,
            default_loss: None,
            untruncated: None,
        },
    ),
];

impl Method {
    /// Iterates over all methods.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(method, _)| *method)
    }

    fn traits(self) -> &'static Traits {
        &TABLE.iter().find(|(method, _)| *method == self).expect("every method has a row").1
    }

    /// Name in the config.
    pub fn name(self) -> &'static str {
        self.traits().name
    }

    /// Rows that the method reads.
    pub fn rows(self) -> RowKind {
        self.traits().rows
    }

    /// Returns whether the loss compares the policy with a reference.
    pub fn has_reference(self) -> bool {
        self.traits().has_reference
    }

    /// Returns whether losses of `objective.loss` compare the policy with a reference.
    pub(super) fn compares_with_reference(self) -> bool {
        self.has_reference() && self.default_loss().is_some()
    }

    /// Returns whether they also compare the two completions of a pair.
    pub(super) fn compares_pairs(self) -> bool {
        self.compares_with_reference() && self.rows() != RowKind::Unpaired
    }

    /// Returns whether completions are generated and judged during training.
    pub fn generates(self) -> bool {
        self.traits().generates
    }

    pub(super) fn default_loss(self) -> Option<&'static str> {
        self.traits().default_loss
    }

    pub(super) fn untruncated(self) -> Option<&'static str> {
        self.traits().untruncated
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
