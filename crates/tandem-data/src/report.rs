//! Rows that tokenisation dropped or changed, with the reasons.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::place::Places;

/// Reason why a row was dropped or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Dropped: the prompt alone has `max_length` tokens or more.
    PromptTooLong,
    /// Dropped: prompt and response exceed `max_length`, and truncation would cut the scored end.
    TooLong,
    /// Dropped: no token remains for the loss.
    NothingToScore,
    /// Dropped: the prompt has no tokens.
    EmptyPrompt,
    /// Dropped: the prompt leaves no room for `max_new_tokens` within `max_length`.
    NoRoom,
    /// Omitted because the file's weight is below 1.
    LeftOutByWeight,
    /// Dropped: the prompt has more than `max_prompt_length` tokens.
    LongPrompt,
    /// Dropped: the ratio of the scores is below 2 (SHP).
    LowScoreRatio,
    /// Dropped: fewer than two answers, or none better than another.
    NoPair,
    /// Kept, with a prompt without text.
    WithoutPrompt,
    /// The chosen response, or the whole of a supervised row, was truncated to `max_length`.
    Truncated,
    /// The rejected response was truncated to `max_length`.
    RejectedTruncated,
    /// The prompt's last tokens change when a response follows: they merge, or the template renders
    /// them differently. They count as part of the response and are trained on.
    Merged,
    /// A text prompt beside conversations that contain it was ignored.
    PromptIgnored,
    /// Kept: chosen and rejected have the same tokens, perhaps since they were truncated.
    SameAnswers,
}

impl Reason {
    /// Returns whether the row is absent from the data set.
    pub fn drops(self) -> bool {
        match self {
            Self::PromptTooLong
            | Self::TooLong
            | Self::NothingToScore
            | Self::EmptyPrompt
            | Self::NoRoom
            | Self::LongPrompt
            | Self::LowScoreRatio
            | Self::NoPair
            | Self::LeftOutByWeight => true,
            Self::WithoutPrompt
            | Self::Truncated
            | Self::RejectedTruncated
            | Self::Merged
            | Self::PromptIgnored
            | Self::SameAnswers => false,
        }
    }

    /// Returns the sentence about this many rows.
    fn words(self, rows: u64) -> &'static str {
        let of = |one: &'static str, several: &'static str| if rows == 1 { one } else { several };
        match self {
            Self::PromptTooLong => "dropped: the prompt alone fills max_length",
            Self::TooLong => "dropped: longer than max_length",
            Self::NothingToScore => "dropped: no token to score",
            Self::EmptyPrompt => "dropped: the prompt has no token",
            Self::NoRoom => "dropped: the prompt leaves no room for max_new_tokens within max_length",
            Self::LongPrompt => "dropped: the prompt is longer than max_prompt_length",
            Self::LowScoreRatio => "dropped: the ratio of the scores is below 2",
            Self::NoPair => "dropped: no two answers of which one is better",
            Self::WithoutPrompt => of("has an empty prompt", "have an empty prompt"),
            Self::LeftOutByWeight => "left out by the file's weight",
            Self::Truncated => "cut at max_length",
            Self::RejectedTruncated => {
                of("has a rejected answer cut at max_length", "have a rejected answer cut at max_length")
            }
            Self::Merged => of(
                "has prompt tokens that change when a response follows; they are scored as part of the responses",
                "have prompt tokens that change when a response follows; they are scored as part of the responses",
            ),
            Self::PromptIgnored => of(
                "has a text prompt that is ignored, because the conversations contain it",
                "have a text prompt that is ignored, because the conversations contain it",
            ),
            Self::SameAnswers => of(
                "has the same tokens as chosen and rejected, which teaches no preference; remove it, or raise max_length \
                 if it was cut",
                "have the same tokens as chosen and rejected, which teaches no preference; remove them, or raise \
                 max_length if they were cut",
            ),
        }
    }
}

/// Statistics of a data set, with the rows that were dropped or changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Rows found in the files.
    pub rows_read: u64,
    /// Rows in the data set, including repetitions by weight; each completion of a pair for KTO.
    pub rows_kept: u64,
    /// Tokens in the data set; each row and each pair's prompt counted once.
    pub num_tokens: u64,
    /// Length of the longest sequence, prompt included.
    pub longest: u64,
    /// Largest token id; the model's vocabulary must contain it.
    pub largest_id: u32,
    /// The affected rows by reason.
    pub reasons: BTreeMap<Reason, AffectedRows>,
    /// Columns of the rows up to the one where the last ignored column occurs; empty if none is ignored.
    pub columns: BTreeSet<String>,
}

/// Rows affected by one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AffectedRows {
    /// Number of rows.
    pub rows: u64,
    /// Numbers of the first rows, from 0, at most [`AffectedRows::PLACES`].
    pub first: Vec<u64>,
}

impl AffectedRows {
    /// Maximum number of stored places; a reason may apply to every row of a large file.
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

    pub(crate) fn note(&mut self, reason: Reason, row: u64) {
        let concerned = self.reasons.entry(reason).or_default();
        concerned.rows += 1;
        if concerned.first.len() < AffectedRows::PLACES {
            concerned.first.push(row);
        }
    }

    /// Returns the number of rows affected by `reason`.
    pub fn count(&self, reason: Reason) -> u64 {
        self.reasons.get(&reason).map_or(0, |concerned| concerned.rows)
    }

    /// Formats the report: one line for the data set, one per reason with the first places.
    pub(crate) fn lines(&self, places: &Places) -> Vec<String> {
        const SHOWN: usize = 3;
        let mut lines = vec![format!(
            "{} read, {} kept, {} tokens, longest sequence {}",
            counted(self.rows_read),
            self.rows_kept,
            self.num_tokens,
            self.longest
        )];
        for (reason, AffectedRows { rows, first }) in &self.reasons {
            let mut shown: Vec<_> =
                first.iter().take(SHOWN).map(|&row| places.place(row).to_string()).collect();
            if first.len() > SHOWN {
                shown.push("…".into());
            }
            let percent = 100.0 * *rows as f64 / self.rows_read.max(1) as f64;
            let (counted, words) = (counted(*rows), reason.words(*rows));
            lines.push(format!("{counted} ({percent:.1} %) {words} [{}]", shown.join(", ")));
        }
        lines
    }
}

fn counted(rows: u64) -> String {
    format!("{rows} row{}", if rows == 1 { "" } else { "s" })
}
