//! What happened to the rows on their way to tokens: every one that did not pass unchanged, with its reason.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::place::Origin;
use crate::place::Place;

/// What can happen to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Dropped: the prompt alone is `max_length` tokens or more, so no answer token would be left.
    PromptTooLong,
    /// Dropped: an answer with its prompt is longer than `max_length`, and its end is what counts.
    TooLong,
    /// Dropped: no token is left that a loss could be computed on.
    NothingToScore,
    /// Dropped: a prompt of no tokens cannot be answered.
    EmptyPrompt,
    /// Dropped: behind the prompt there is no room for an answer of the length that is asked for.
    NoRoom,
    /// Left out because the file's weight is below 1.
    LeftOutByWeight,
    /// The chosen answer (or the whole of a supervised row) was cut at `max_length`.
    Truncated,
    /// The rejected answer was cut at `max_length`.
    RejectedTruncated,
    /// The prompt's last tokens differ when an answer follows: they merge with it, or the template renders them
    /// differently. They belong to the answers and are trained on.
    Merged,
    /// A text prompt beside conversations that contain the prompt: the conversations' common beginning was used.
    PromptIgnored,
}

impl Reason {
    /// Whether the row is absent from the data set.
    pub fn drops(self) -> bool {
        match self {
            Self::PromptTooLong
            | Self::TooLong
            | Self::NothingToScore
            | Self::EmptyPrompt
            | Self::NoRoom
            | Self::LeftOutByWeight => true,
            Self::Truncated | Self::RejectedTruncated | Self::Merged | Self::PromptIgnored => false,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::PromptTooLong => "dropped: the prompt alone fills max_length",
            Self::TooLong => "dropped: longer than max_length",
            Self::NothingToScore => "dropped: no token to score",
            Self::EmptyPrompt => "dropped: the prompt has no token",
            Self::NoRoom => "dropped: behind the prompt is no room for max_new_tokens within max_length",
            Self::LeftOutByWeight => "left out by the file's weight",
            Self::Truncated => "cut at max_length",
            Self::RejectedTruncated => "rejected answer cut at max_length",
            Self::Merged => {
                "prompt tokens that change when the answer follows; they are scored as part of the answers"
            }
            Self::PromptIgnored => "text prompt ignored, because the conversations contain it",
        }
    }
}

/// Counts and places of everything that did not pass unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Rows found in the files.
    pub rows_read: u64,
    /// Rows in the data set, repetitions by weight included.
    pub rows_kept: u64,
    /// Tokens in the data set (a pair's prompt counted once), each row once.
    pub num_tokens: u64,
    /// The longest sequence, prompt included.
    pub longest: u64,
    /// The largest token id, which the model's vocabulary has to hold.
    pub largest_id: u32,
    /// The rows concerned, by reason.
    pub reasons: BTreeMap<Reason, Concerned>,
}

/// The rows that something happened to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concerned {
    /// How many.
    pub rows: u64,
    /// The first of them, in file order, up to [`Concerned::PLACES`]: it may happen to every row of a large file.
    pub first: Vec<Origin>,
}

impl Concerned {
    /// Places that are kept.
    pub const PLACES: usize = 100;
}

impl Report {
    /// Counts a kept row: its token ids in parts, and its longest sequence.
    pub(crate) fn keep(&mut self, parts: [&[u32]; 3], longest: usize) {
        self.num_tokens += parts.iter().map(|ids| ids.len() as u64).sum::<u64>();
        self.longest = self.longest.max(longest as u64);
        let largest = parts.iter().filter_map(|ids| ids.iter().max()).max();
        self.largest_id = self.largest_id.max(largest.copied().unwrap_or_default());
    }

    pub(crate) fn note(&mut self, reason: Reason, origin: Origin) {
        let concerned = self.reasons.entry(reason).or_default();
        concerned.rows += 1;
        if concerned.first.len() < Concerned::PLACES {
            concerned.first.push(origin);
        }
    }

    /// Number of rows that something happened to.
    pub fn count(&self, reason: Reason) -> u64 {
        self.reasons.get(&reason).map_or(0, |concerned| concerned.rows)
    }

    /// The report in lines: one for the whole, one per reason with the first places.
    pub fn lines(&self, files: &[PathBuf]) -> Vec<String> {
        const SHOWN: usize = 3;
        let mut lines = vec![format!(
            "{} rows read, {} kept, {} tokens, longest sequence {}",
            self.rows_read, self.rows_kept, self.num_tokens, self.longest
        )];
        for (reason, Concerned { rows, first }) in &self.reasons {
            let mut places: Vec<_> =
                first.iter().take(SHOWN).map(|&o| Place::of(o, files).to_string()).collect();
            if first.len() > SHOWN {
                places.push("…".into());
            }
            let percent = 100.0 * *rows as f64 / self.rows_read.max(1) as f64;
            lines.push(format!("{rows} rows ({percent:.1} %) {} [{}]", reason.words(), places.join(", ")));
        }
        lines
    }
}
