//! Text from ids that come one by one, as in generation.

use crate::error::DataError;
use crate::text::tokenizer::Tokenizer;

/// Turns ids into text as they come.
///
/// A character may be spread over several tokens, and some decoders treat the first token of a text differently, so
/// a window of recent ids is decoded anew each time and what it adds to the text already given out is returned.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// Recent ids; the first `given` of them have been returned as text.
    window: Vec<u32>,
    given: usize,
}

impl<'a> DecodeStream<'a> {
    /// Creates a stream without ids.
    pub fn new(tokenizer: &'a Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, window: Vec::new(), given: 0 }
    }

    /// Adds one id; the text that it completes, empty while a character is unfinished.
    ///
    /// # Errors
    /// If the id is unknown.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        self.window.push(id);
        let text = self.pending()?;
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        // What was just given out stays as the context of the next token.
        self.window.drain(..self.given);
        self.given = self.window.len();
        Ok(text)
    }

    /// The text of an unfinished character at the end, if there is one.
    ///
    /// # Errors
    /// None that [`DecodeStream::push`] has not reported.
    pub fn finish(&mut self) -> Result<String, DataError> {
        let text = self.pending()?;
        self.window.clear();
        self.given = 0;
        Ok(text)
    }

    fn pending(&self) -> Result<String, DataError> {
        let before = self.tokenizer.decode(&self.window[..self.given], self.skip_special_tokens)?;
        let after = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        Ok(after.strip_prefix(&before).unwrap_or(&after).to_string())
    }
}
