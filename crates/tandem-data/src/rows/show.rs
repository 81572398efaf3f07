//! Rows as text, token by token, with the scored tokens marked.
//!
//! In colour, adjacent tokens have two shades of one background: grey for unscored tokens, green
//! for scored ones (chosen, supervised), red for rejected ones. Without colour, `│` separates
//! tokens and `[ ]` encloses each scored token.

use crate::error::DataError;
use crate::rows::tokens::{PairTokens, ScoredTokens, UnpairedTokens};
use crate::text::byte_alphabet::bytes_of;
use crate::text::tokenizer::Tokenizer;

/// Options for showing rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShowOptions {
    /// ANSI colours instead of markers.
    pub color: bool,
    /// Whether each token's id follows it.
    pub ids: bool,
    /// Maximum number of tokens shown per part, half from each end; 0 shows all.
    pub limit: usize,
}

/// Two shades of the 256-colour palette for adjacent tokens.
#[derive(Clone, Copy)]
enum Paint {
    Given,
    Good,
    Bad,
}

impl Paint {
    fn codes(self) -> [&'static str; 2] {
        match self {
            Self::Given => ["\x1b[38;5;250;48;5;236m", "\x1b[38;5;250;48;5;239m"],
            Self::Good => ["\x1b[38;5;255;48;5;22m", "\x1b[38;5;255;48;5;28m"],
            Self::Bad => ["\x1b[38;5;255;48;5;52m", "\x1b[38;5;255;48;5;88m"],
        }
    }
}

/// Shows a preference: one line each for prompt, chosen and rejected, with the number of tokens.
/// The prompt comes twice where the responses see different parts of it.
pub fn show_pair(
    tokenizer: &Tokenizer,
    pair: &PairTokens,
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let [prompt, other] = pair.prompts();
    // Nothing predicts the first token of a sequence: without a prompt it is not scored.
    let first = |prompt: &[u32]| usize::from(prompt.is_empty());
    let mut parts = vec![
        ("prompt", prompt, Paint::Given, usize::MAX),
        ("chosen", pair.chosen, Paint::Good, first(prompt)),
        ("rejected", pair.rejected, Paint::Bad, first(other)),
    ];
    if prompt.len() != other.len() {
        parts.insert(2, ("prompt", other, Paint::Given, usize::MAX));
    }
    parts
        .into_iter()
        .map(|(name, ids, paint, from)| {
            let scored = |t: usize| t >= from;
            let text = line(tokenizer, ids, scored, paint, options)?;
            Ok(format!("{name:>8} {:5}  {text}", ids.len()))
        })
        .collect()
}

/// Shows a labelled completion in two lines.
pub fn show_unpaired(
    tokenizer: &Tokenizer,
    row: &UnpairedTokens,
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let (name, paint) = if row.label { ("good", Paint::Good) } else { ("bad", Paint::Bad) };
    let first = usize::from(row.prompt.is_empty());
    [("prompt", row.prompt, Paint::Given, usize::MAX), (name, row.completion, paint, first)]
        .into_iter()
        .map(|(name, ids, paint, from)| {
            let text = line(tokenizer, ids, |t| t >= from, paint, options)?;
            Ok(format!("{name:>8} {:5}  {text}", ids.len()))
        })
        .collect()
}

/// Shows a prompt in one line.
pub fn show_prompt(
    tokenizer: &Tokenizer,
    ids: &[u32],
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let text = line(tokenizer, ids, |_| false, Paint::Given, options)?;
    Ok(vec![format!("{:>8} {:5}  {text}", "prompt", ids.len())])
}

/// Shows a supervised row in one line.
pub fn show_scored(
    tokenizer: &Tokenizer,
    row: &ScoredTokens,
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let scored = |t: usize| t > 0 && row.scored[t] != 0;
    let text = line(tokenizer, row.tokens, scored, Paint::Good, options)?;
    let count = (0..row.tokens.len()).filter(|&t| scored(t)).count();
    Ok(vec![format!("{:>8} {:5}  {text}", "tokens", row.tokens.len()), format!("{:>8} {count:5}", "scored")])
}

fn line(
    tokenizer: &Tokenizer,
    ids: &[u32],
    scored: impl Fn(usize) -> bool,
    paint: Paint,
    options: ShowOptions,
) -> Result<String, DataError> {
    let mut out = String::new();
    let hidden = match options.limit {
        0 => 0..0,
        limit if ids.len() <= limit => 0..0,
        limit => limit.div_ceil(2)..ids.len() - limit / 2,
    };
    for (t, &id) in ids.iter().enumerate() {
        if hidden.contains(&t) {
            if t == hidden.start {
                out.push_str(&format!(" … {} more … ", hidden.len()));
            }
            continue;
        }
        let mut text = token_text(tokenizer, id)?;
        if options.ids {
            text.push_str(&format!("·{id}"));
        }
        if options.color {
            let paint = if scored(t) { paint } else { Paint::Given };
            out.push_str(&format!("{}{text}\x1b[0m", paint.codes()[t % 2]));
        } else if scored(t) {
            out.push_str(&format!("[{text}]"));
        } else {
            if t > 0 && !out.ends_with(' ') {
                out.push('│');
            }
            out.push_str(&text);
        }
    }
    Ok(out)
}

/// Returns a token's text with visible white space; bytes of an unfinished character are
/// hexadecimal.
fn token_text(tokenizer: &Tokenizer, id: u32) -> Result<String, DataError> {
    let token = tokenizer.token(id).ok_or_else(|| DataError::Tokenizer {
        path: tokenizer.folder().join("tokenizer.json"),
        reason: format!("no token has id {id}; the vocabulary has {} ids", tokenizer.vocab_size()),
    })?;
    let text = match tokenizer.is_byte_level().then(|| bytes_of(&token)).flatten() {
        Some(bytes) => String::from_utf8(bytes)
            .unwrap_or_else(|e| e.as_bytes().iter().map(|byte| format!("‹{byte:02x}›")).collect()),
        // SentencePiece writes a space as ▁; other tokens are legible as they are.
        None => token.replace('▁', " "),
    };
    Ok(text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        match c {
            '\r' => shown.push('␍'),
            '\n' => shown.push('⏎'),
            '\t' => shown.push('⇥'),
            // A terminal would obey it.
            c if c.is_control() => shown.push_str(&format!("‹{:02x}›", c as u32)),
            c => shown.push(c),
        }
        shown
    }))
}
