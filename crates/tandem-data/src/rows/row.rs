//! Tokenisation of records: preferences as TRL 1.16's `DPOTrainer`, supervised rows as its
//! `SFTTrainer`.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::DataError;
use crate::report::Reason;
use crate::rows::tokens::PairTokens;
use crate::source::columns::Columns;
use crate::source::record::{Content, Message, Record, RowKind, Text};
use crate::text::chat_template::RenderOptions;
use crate::text::tokenizer::Tokenizer;

/// Tokens of a supervised row that enter the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossMask {
    /// The completion, the assistant's turns, or all of a `text`.
    #[default]
    Answer,
    /// Every token.
    All,
}

/// End of a sequence that is kept when it exceeds `max_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The beginning. A row whose prompt alone fills `max_length` is dropped.
    #[default]
    KeepStart,
    /// The end of each response separately. The two may then see different parts of the prompt and
    /// share nothing.
    KeepEnd,
}

/// Options of tokenisation, besides the tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowOptions {
    /// The use of the rows.
    pub kind: RowKind,
    /// Maximum tokens of a sequence, prompt included. Longer sequences are truncated; rows for
    /// reward models are dropped. `None` is no limit.
    #[serde(default)]
    pub max_length: Option<usize>,
    /// The end that truncation keeps.
    #[serde(default)]
    pub truncation: Truncation,
    /// Tokens in the loss, for supervised rows.
    #[serde(default)]
    pub loss_on: LossMask,
    /// Maximum tokens of a prompt; rows with a longer one are dropped. `None` is no limit.
    #[serde(default)]
    pub max_prompt_length: Option<usize>,
    /// Number of rows after which reading stops. `None` is no limit.
    #[serde(default)]
    pub max_rows: Option<usize>,
    /// Reading of the columns.
    #[serde(default)]
    pub columns: Columns,
}

impl RowOptions {
    /// Creates options without truncation and with the loss on responses.
    pub fn new(kind: RowKind) -> Self {
        Self {
            kind,
            max_length: None,
            truncation: Truncation::KeepStart,
            loss_on: LossMask::Answer,
            max_prompt_length: None,
            max_rows: None,
            columns: Columns::default(),
        }
    }
}

impl RowOptions {
    fn is_too_long(&self, prompt: &[u32]) -> bool {
        self.max_prompt_length.is_some_and(|max| prompt.len() > max)
    }
}

/// A row as token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenRow {
    /// A preference.
    Pair {
        /// The prompt's ids.
        prompt: Vec<u32>,
        /// Number of leading prompt tokens that chosen and rejected do not see; at least one of
        /// them is 0.
        unseen: [usize; 2],
        /// The chosen response's ids.
        chosen: Vec<u32>,
        /// The rejected response's ids.
        rejected: Vec<u32>,
        /// Margin by which the chosen reward should exceed the rejected one.
        margin: f32,
    },
    /// A completion with a label.
    Unpaired {
        /// The prompt's ids.
        prompt: Vec<u32>,
        /// The completion's ids.
        completion: Vec<u32>,
        /// Whether it is desirable.
        label: bool,
    },
    /// A prompt for generation.
    Prompt {
        /// The ids, up to the start of the response.
        tokens: Vec<u32>,
        /// The row's JSON.
        row: String,
    },
    /// A supervised row.
    Scored {
        /// The ids.
        tokens: Vec<u32>,
        /// 1 where the token is in the loss.
        scored: Vec<u8>,
    },
}

impl TokenRow {
    /// Returns the pair, if the row is one.
    pub fn as_pair(&self) -> Option<PairTokens<'_>> {
        match self {
            Self::Pair { prompt, unseen, chosen, rejected, .. } => {
                Some(PairTokens { prompt, unseen: *unseen, chosen, rejected })
            }
            Self::Scored { .. } | Self::Prompt { .. } | Self::Unpaired { .. } => None,
        }
    }

    /// Returns the ids of a pair's prompt, chosen and rejected response, or all ids of another row.
    pub(crate) fn parts(&self) -> [&[u32]; 3] {
        match self {
            Self::Pair { prompt, chosen, rejected, .. } => [prompt, chosen, rejected],
            Self::Unpaired { prompt, completion, .. } => [prompt, completion, &[]],
            Self::Scored { tokens, .. } | Self::Prompt { tokens, .. } => [&[], tokens, &[]],
        }
    }

    pub(crate) fn longest(&self) -> usize {
        match self.as_pair() {
            Some(pair) => pair.lengths()[0].max(pair.lengths()[1]),
            None => self.parts().iter().map(|part| part.len()).sum(),
        }
    }
}

/// A tokenised row, `None` where it was dropped, and the reasons of every change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The ids.
    pub row: Option<TokenRow>,
    /// The reasons why the row was dropped or changed.
    pub reasons: Vec<Reason>,
}

/// Tokenises one record.
pub fn tokenise(record: &Record, tokenizer: &Tokenizer, options: &RowOptions) -> Result<Outcome, DataError> {
    if record.shape.is_chat() {
        let template = tokenizer.chat_template()?;
        template.check_reads_messages(record.tools.is_some())?;
        if let Some((key, role)) = record.unknown_role.as_ref().filter(|(_, role)| !template.names_role(role))
        {
            return Err(DataError::Role { key: key.clone(), found: role.clone() });
        }
    }
    let context = Context { tokenizer, tools: record.tools.as_ref(), kwargs: &record.template_kwargs };
    let mut outcome = match &record.content {
        Content::Preference { prompt, chosen, rejected } => {
            context.pair(prompt, chosen, rejected, record.margin, options)?
        }
        Content::Prompt(prompt) => {
            let row = record.row.as_ref().expect("kept with a prompt");
            finish_prompt(context.prompt(prompt)?, row, options)
        }
        Content::Completion { prompt, completion } => {
            let ([prompt_ids, whole], reasons) = context.completion(prompt, completion)?;
            if options.is_too_long(&prompt_ids) {
                return Ok(Outcome { row: None, reasons: vec![Reason::LongPrompt] });
            }
            if options.kind == RowKind::Unpaired {
                return Ok(finish_unpaired(prompt_ids, whole, reasons, record.label, options));
            }
            let mut scored = vec![1; whole.len()];
            if options.loss_on == LossMask::Answer {
                scored[..prompt_ids.len()].fill(0);
            }
            finish_scored(whole, scored, reasons, options)
        }
        Content::Messages(_) | Content::Text(_) if options.max_prompt_length.is_some() => {
            return Err(DataError::Option(
                "data.max_prompt_length: `messages` and `text` have no prompt of their own; remove it, or split the rows into \
                 `prompt` and `completion`"
                    .into(),
            ));
        }
        Content::Messages(messages) => {
            let (tokens, scored) = context.messages(messages, options.loss_on)?;
            finish_scored(tokens, scored, Vec::new(), options)
        }
        Content::Text(text) => {
            let tokens = tokenizer.encode(&with_eos(text, tokenizer.eos_token()?))?;
            let scored = vec![1; tokens.len()];
            finish_scored(tokens, scored, Vec::new(), options)
        }
    };
    if record.prompt_ignored {
        outcome.reasons.push(Reason::PromptIgnored);
    }
    let is_empty = record.has_empty_prompt() && !outcome.reasons.contains(&Reason::WithoutPrompt);
    if outcome.row.is_some() && is_empty {
        outcome.reasons.push(Reason::WithoutPrompt);
    }
    Ok(outcome)
}

/// Tokenises a prompt with its response, untruncated, as for training a reward model. A
/// conversation's response is messages, rendered with `tools` and `kwargs`; plain text ends with
/// the EOS token.
///
/// # Panics
/// If one is plain text and the other a conversation.
pub fn whole(
    prompt: &Text,
    answer: &Text,
    tools: Option<&Value>,
    kwargs: &Map<String, Value>,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, DataError> {
    Context { tokenizer, tools, kwargs }.whole(prompt, answer)
}

struct Context<'a> {
    tokenizer: &'a Tokenizer,
    tools: Option<&'a Value>,
    kwargs: &'a Map<String, Value>,
}

impl Context<'_> {
    fn pair(
        &self,
        prompt: &Text,
        chosen: &Text,
        rejected: &Text,
        margin: f32,
        options: &RowOptions,
    ) -> Result<Outcome, DataError> {
        let mut prompt_ids = self.prompt(prompt)?;
        let mut chosen_ids = self.whole(prompt, chosen)?;
        let mut rejected_ids = self.whole(prompt, rejected)?;
        if let Some(reason) = (options.kind == RowKind::Reward)
            .then(|| unscorable([&chosen_ids, &rejected_ids], options.max_length))
            .flatten()
        {
            return Ok(Outcome { row: None, reasons: vec![reason] });
        }
        // The responses start where the prompt alone diverges from either whole; merged tokens are
        // theirs.
        let start = common(&prompt_ids, &chosen_ids).min(common(&prompt_ids, &rejected_ids));
        let mut reasons = prompt_reasons(&prompt_ids, start);
        prompt_ids.truncate(start);
        if options.is_too_long(&prompt_ids) {
            return Ok(Outcome { row: None, reasons: vec![Reason::LongPrompt] });
        }
        let (mut chosen, mut rejected) = (chosen_ids.split_off(start), rejected_ids.split_off(start));
        let mut unseen = [0, 0];
        if let Some(max_length) = options.max_length {
            if options.truncation == Truncation::KeepStart && start >= max_length {
                reasons.push(Reason::PromptTooLong);
                return Ok(Outcome { row: None, reasons });
            }
            let answers = [(&mut chosen, Reason::Truncated), (&mut rejected, Reason::RejectedTruncated)];
            for ((answer, reason), unseen) in answers.into_iter().zip(&mut unseen) {
                let excess = (start + answer.len()).saturating_sub(max_length);
                if excess > 0 {
                    reasons.push(reason);
                }
                match options.truncation {
                    Truncation::KeepStart => answer.truncate(answer.len() - excess),
                    Truncation::KeepEnd => {
                        *unseen = excess.min(start);
                        answer.drain(..excess - *unseen);
                    }
                }
            }
            // Tokens that neither response sees are removed.
            let neither = unseen[0].min(unseen[1]);
            prompt_ids.drain(..neither);
            unseen = unseen.map(|n| n - neither);
        }
        // A reward model scores whole texts, also those without an answer.
        let is_scored = |answer: &[u32], unseen| num_scored(prompt_ids.len() - unseen, answer.len()) > 0;
        if options.kind == RowKind::Preference
            && !is_scored(&chosen, unseen[0])
            && !is_scored(&rejected, unseen[1])
        {
            return Ok(Outcome { row: None, reasons: vec![Reason::NothingToScore] });
        }
        // Equal answers see the same part of the prompt.
        if chosen == rejected {
            reasons.push(Reason::SameAnswers);
        }
        Ok(Outcome {
            row: Some(TokenRow::Pair { prompt: prompt_ids, unseen, chosen, rejected, margin }),
            reasons,
        })
    }

    /// Tokenises prompt and whole of a completion; also returns what is to be reported of the prompt.
    fn completion(
        &self,
        prompt: &Text,
        completion: &Text,
    ) -> Result<([Vec<u32>; 2], Vec<Reason>), DataError> {
        let mut prompt_ids = self.prompt(prompt)?;
        let whole = self.whole(prompt, completion)?;
        let start = common(&prompt_ids, &whole);
        let reasons = prompt_reasons(&prompt_ids, start);
        prompt_ids.truncate(start);
        Ok(([prompt_ids, whole], reasons))
    }

    fn prompt(&self, prompt: &Text) -> Result<Vec<u32>, DataError> {
        match prompt {
            Text::Plain(text) => self.tokenizer.encode(text),
            Text::Chat(messages) => self.tokenizer.encode_chat(messages, self.options(true)),
        }
    }

    fn whole(&self, prompt: &Text, answer: &Text) -> Result<Vec<u32>, DataError> {
        match (prompt, answer) {
            (Text::Plain(prompt), Text::Plain(answer)) => {
                let answer = with_eos(answer, self.tokenizer.eos_token()?);
                self.tokenizer.encode(&format!("{prompt}{answer}"))
            }
            (Text::Chat(prompt), Text::Chat(answer)) => {
                self.tokenizer.encode_chat(&[prompt.as_slice(), answer].concat(), self.options(false))
            }
            _ => unreachable!("a record's prompt and answers are of one kind"),
        }
    }

    fn options(&self, add_generation_prompt: bool) -> RenderOptions<'_> {
        RenderOptions { tools: self.tools, kwargs: Some(self.kwargs), add_generation_prompt }
    }

    fn messages(&self, messages: &[Message], loss_on: LossMask) -> Result<(Vec<u32>, Vec<u8>), DataError> {
        let template = self.tokenizer.chat_template()?;
        if loss_on == LossMask::All {
            let tokens = self.tokenizer.encode_rendered(&template.render(messages, self.options(false))?)?;
            let scored = vec![1; tokens.len()];
            return Ok((tokens, scored));
        }
        let ends = self.tokenizer.eos_texts();
        let (text, ranges) = template.render_with_turns(messages, self.options(false), &ends)?;
        let (tokens, offsets) = self.tokenizer.encode_with_offsets(&text)?;
        // A token that crosses a boundary is the assistant's, as a merged token is the response's.
        let inside = |token: &Range<usize>| {
            // Turns come in order; a conversation may have thousands.
            let first = ranges.partition_point(|range| range.end <= token.start);
            ranges.get(first).is_some_and(|range| range.start < token.end)
        };
        Ok((tokens, offsets.iter().map(|token| u8::from(inside(token))).collect()))
    }
}

/// Truncates a completion with a label at its end, as TRL does.
fn finish_unpaired(
    prompt: Vec<u32>,
    mut whole: Vec<u32>,
    mut reasons: Vec<Reason>,
    label: bool,
    options: &RowOptions,
) -> Outcome {
    let max_length = options.max_length.unwrap_or(usize::MAX);
    if prompt.len() >= max_length {
        reasons.push(Reason::PromptTooLong);
        return Outcome { row: None, reasons };
    }
    if whole.len() > max_length {
        reasons.push(Reason::Truncated);
        whole.truncate(max_length);
    }
    let completion = whole.split_off(prompt.len());
    if num_scored(prompt.len(), completion.len()) == 0 {
        return Outcome { row: None, reasons: vec![Reason::NothingToScore] };
    }
    Outcome { row: Some(TokenRow::Unpaired { prompt, completion, label }), reasons }
}

/// Checks a prompt's length; `max_length` already excludes `max_new_tokens`.
fn finish_prompt(tokens: Vec<u32>, row: &Map<String, Value>, options: &RowOptions) -> Outcome {
    let dropped = |reason| Outcome { row: None, reasons: vec![reason] };
    if tokens.is_empty() {
        return dropped(Reason::EmptyPrompt);
    }
    if options.is_too_long(&tokens) {
        return dropped(Reason::LongPrompt);
    }
    if options.max_length.is_some_and(|max| tokens.len() > max) {
        return dropped(Reason::NoRoom);
    }
    let row = serde_json::to_string(row).expect("it was JSON");
    Outcome { row: Some(TokenRow::Prompt { tokens, row }), reasons: Vec::new() }
}

fn finish_scored(
    mut tokens: Vec<u32>,
    mut scored: Vec<u8>,
    mut reasons: Vec<Reason>,
    options: &RowOptions,
) -> Outcome {
    let excess = options.max_length.map_or(0, |max| tokens.len().saturating_sub(max));
    let cut = excess > 0;
    match options.truncation {
        Truncation::KeepStart => {
            tokens.truncate(tokens.len() - excess);
            scored.truncate(scored.len() - excess);
        }
        Truncation::KeepEnd => {
            tokens.drain(..excess);
            scored.drain(..excess);
        }
    }
    // The first token is never predicted, so a mark on it alone trains nothing.
    if !scored.iter().skip(1).any(|&s| s != 0) {
        let filled = cut && options.truncation == Truncation::KeepStart;
        reasons.push(if filled { Reason::PromptTooLong } else { Reason::NothingToScore });
        return Outcome { row: None, reasons };
    }
    if cut {
        reasons.push(Reason::Truncated);
    }
    Outcome { row: Some(TokenRow::Scored { tokens, scored }), reasons }
}

/// Returns why a pair cannot be scored. As in TRL's `RewardTrainer` no text is truncated: the score
/// is read at its end.
fn unscorable(texts: [&[u32]; 2], max_length: Option<usize>) -> Option<Reason> {
    if texts.iter().any(|text| text.is_empty()) {
        return Some(Reason::NothingToScore);
    }
    texts.iter().any(|text| max_length.is_some_and(|max| text.len() > max)).then_some(Reason::TooLong)
}

/// Returns what is to be reported of a prompt whose first `start` tokens its responses share.
fn prompt_reasons(prompt: &[u32], start: usize) -> Vec<Reason> {
    match prompt {
        [] => vec![Reason::WithoutPrompt],
        _ if start < prompt.len() => vec![Reason::Merged],
        _ => Vec::new(),
    }
}

/// Returns the number of an answer's tokens that are predicted: the first of a sequence is not.
fn num_scored(prompt: usize, answer: usize) -> usize {
    (prompt + answer).saturating_sub(1).min(answer)
}

/// Appends the EOS token unless the text ends with it.
fn with_eos(text: &str, eos: &str) -> String {
    if text.ends_with(eos) { text.to_string() } else { format!("{text}{eos}") }
}

/// Returns the length of the longest common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
