//! Incremental decoding of token ids to text, as in generation.

use crate::error::DataError;
use crate::text::tokenizer::Tokenizer;

/// Most ids without text, in a row. A character has four bytes at most, so these are no character's.
const MOST_PENDING: usize = 16;

/// Decoder that receives ids one by one.
///
/// A character may span several tokens, and some decoders treat the first token of a text
/// differently. The stream therefore decodes a window of recent ids and returns the part after the
/// text already returned.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// Recent ids; the text of the first `given` is already returned.
    window: Vec<u32>,
    given: usize,
}

impl<'a> DecodeStream<'a> {
    /// Creates a stream without ids.
    pub fn new(tokenizer: &'a Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, window: Vec::new(), given: 0 }
    }

    /// Creates a stream that goes on after these ids, whose text is not returned.
    pub fn after(tokenizer: &'a Tokenizer, skip_special_tokens: bool, ids: &[u32]) -> Self {
        let window = ids[ids.len().saturating_sub(MOST_PENDING)..].to_vec();
        Self { given: window.len(), window, ..Self::new(tokenizer, skip_special_tokens) }
    }

    /// Adds one id and returns the text that it completes; empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        self.window.push(id);
        let text = self.pending()?;
        let is_unfinished = text.is_empty() || text.ends_with('\u{fffd}');
        if is_unfinished && self.window.len() - self.given < MOST_PENDING {
            return Ok(String::new());
        }
        // The ids just returned are the context of the next token.
        self.window.drain(..self.given);
        self.given = self.window.len();
        Ok(text)
    }

    /// Returns the text of an unfinished character at the end: one U+FFFD, however many tokens it has.
    pub fn finish(&mut self) -> Result<String, DataError> {
        let text = self.pending()?;
        self.window.clear();
        self.given = 0;
        let whole = text.trim_end_matches('\u{fffd}');
        Ok(if whole.len() < text.len() { format!("{whole}\u{fffd}") } else { text })
    }

    fn pending(&self) -> Result<String, DataError> {
        let before = self.tokenizer.decode(&self.window[..self.given], self.skip_special_tokens)?;
        let after = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        let same = before.chars().zip(after.chars()).take_while(|(before, after)| before == after);
        let given: usize = same.map(|(both, _)| both.len_utf8()).sum();
        Ok(after[given..].to_string())
    }
}
