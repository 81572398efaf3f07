//! Text of a completion as its tokens arrive.

use crate::Result;
use crate::text::decode_stream::DecodeStream;
use crate::text::stop_strings::StopStrings;
use crate::text::tokenizer::Tokenizer;

/// Incremental text of one completion, up to a stop string.
pub struct TextStream<'a> {
    decode: DecodeStream<'a>,
    stop: StopStrings,
    /// Tokens that end the text, which leaves them out: the tokenizer's, and stop strings that are special tokens.
    stop_tokens: Vec<u32>,
    is_ended: bool,
}

impl<'a> TextStream<'a> {
    /// Creates an empty text.
    pub fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Self {
        Self::continuing(tokenizer, stop, &[])
    }

    /// Creates an empty text that goes on from the one of these tokens. Some decoders leave out the space at the
    /// beginning of a text.
    pub fn continuing(tokenizer: &'a Tokenizer, stop: &[String], before: &[u32]) -> Self {
        let is_special = |id: &u32| tokenizer.decode(&[*id], true).is_ok_and(|text| text.is_empty());
        let of_strings = stop.iter().filter_map(|stop| tokenizer.id(stop)).filter(is_special);
        let stop_tokens = tokenizer.eos_ids().iter().copied().chain(of_strings).collect();
        let stop = StopStrings::new(stop.iter().cloned());
        let decode = DecodeStream::after(tokenizer, true, before);
        Self { decode, stop, stop_tokens, is_ended: false }
    }

    /// Adds a token and returns the new text; empty after a stop string.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if self.stop_tokens.contains(&token) {
            let rest = self.finish()?;
            self.is_ended = true;
            return Ok(rest);
        }
        let piece = self.decode.push(token)?;
        Ok(self.show(&piece))
    }

    /// Ends the text and returns the rest.
    pub fn finish(&mut self) -> Result<String> {
        let piece = self.decode.finish()?;
        let mut shown = self.show(&piece);
        if !self.is_ended {
            shown += &self.stop.finish();
        }
        Ok(shown)
    }

    /// Returns whether a stop string was found.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    fn show(&mut self, piece: &str) -> String {
        if self.is_ended {
            return String::new();
        }
        let (shown, is_ended) = self.stop.push(piece);
        self.is_ended = is_ended;
        shown
    }
}
