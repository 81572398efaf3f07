//! Rows as a reader sees them: token by token, with those in the loss standing out.
//!
//! In colour, tokens are told apart by shades of one background; unscored ones are grey, scored ones green (chosen,
//! supervised) or red (rejected). Without colour, `│` stands between tokens and `[ ]` around each scored one.

use crate::error::DataError;
use crate::rows::tokens::{PairTokens, ScoredTokens};
use crate::text::tokenizer::Tokenizer;

/// How rows are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShowOptions {
    /// ANSI colours; without them, markers.
    pub color: bool,
    /// Each token's id behind it.
    pub ids: bool,
    /// At most so many tokens of each part, from its beginning and its end; 0 shows all.
    pub limit: usize,
}

/// Two shades each for tokens next to one another, of the 256-colour palette.
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

/// A preference: one line each for prompt, chosen and rejected, with the number of tokens; the prompt twice where the
/// answers see different parts of it.
///
/// # Errors
/// If an id is not the tokenizer's.
pub fn show_pair(
    tokenizer: &Tokenizer,
    pair: &PairTokens,
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let [prompt, other] = pair.prompts();
    // The first token of a sequence is never predicted, so without a prompt it is not scored.
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

/// A prompt that is to be answered, in one line.
///
/// # Errors
/// If an id is not the tokenizer's.
pub fn show_prompt(
    tokenizer: &Tokenizer,
    ids: &[u32],
    options: ShowOptions,
) -> Result<Vec<String>, DataError> {
    let text = line(tokenizer, ids, |_| false, Paint::Given, options)?;
    Ok(vec![format!("{:>8} {:5}  {text}", "prompt", ids.len())])
}

/// A supervised row in one line.
///
/// # Errors
/// If an id is not the tokenizer's.
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

/// A token's text on one line: white space made visible where it would be lost, bytes of an unfinished character in
/// hexadecimal.
fn token_text(tokenizer: &Tokenizer, id: u32) -> Result<String, DataError> {
    let token = tokenizer.token(id).ok_or_else(|| DataError::Tokenizer {
        path: tokenizer.folder().join("tokenizer.json"),
        reason: format!("there is no token with id {id}; {} are known", tokenizer.vocab_size()),
    })?;
    let text = match tokenizer.is_byte_level().then(|| bytes_of(&token)).flatten() {
        Some(bytes) => String::from_utf8(bytes)
            .unwrap_or_else(|e| e.as_bytes().iter().map(|byte| format!("‹{byte:02x}›")).collect()),
        // SentencePiece writes a space as ▁ and is otherwise legible; special tokens are always themselves.
        None => token.replace('▁', " "),
    };
    Ok(text.replace('\r', "␍").replace('\n', "⏎").replace('\t', "⇥"))
}

/// The bytes behind a token in GPT-2's alphabet, where printable bytes are themselves and the others are shifted to
/// U+0100 and on in their order; `None` if it is not written in it.
fn bytes_of(token: &str) -> Option<Vec<u8>> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    token
        .chars()
        .map(|c| {
            let code = c as u32;
            if printable(code) {
                return u8::try_from(code).ok();
            }
            let index = code.checked_sub(0x100)? as usize;
            (0..=0xffu32).filter(|&b| !printable(b)).nth(index).and_then(|b| u8::try_from(b).ok())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2s_alphabet_is_read_back() {
        assert_eq!(bytes_of("ĠcafÃ©Ċ").unwrap(), " café\n".as_bytes());
        assert_eq!(bytes_of("ĀġŃ").unwrap(), [0x00, 0x7f, 0xad]);
        assert_eq!(bytes_of("日"), None);
    }
}
