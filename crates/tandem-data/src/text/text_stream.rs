//! An answer's text as its tokens come.

use crate::Result;
use crate::text::decode_stream::DecodeStream;
use crate::text::stop_strings::StopStrings;
use crate::text::tokenizer::Tokenizer;

/// Turns tokens into text, up to a string that ends it.
pub struct TextStream<'a> {
    decode: DecodeStream<'a>,
    stop: StopStrings,
    is_ended: bool,
}

impl<'a> TextStream<'a> {
    /// An empty text.
    pub fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Self {
        let stop = StopStrings::new(stop.iter().cloned());
        Self { decode: DecodeStream::new(tokenizer, true), stop, is_ended: false }
    }

    /// Adds a token: the text that can be shown now. After a string that ends the text there is none.
    ///
    /// # Errors
    /// If the token is unknown.
    pub fn push(&mut self, token: u32) -> Result<String> {
        let piece = self.decode.push(token)?;
        Ok(self.show(&piece))
    }

    /// The rest, when no token comes any more.
    ///
    /// # Errors
    /// None that [`TextStream::push`] has not reported.
    pub fn finish(&mut self) -> Result<String> {
        let piece = self.decode.finish()?;
        let mut shown = self.show(&piece);
        if !self.is_ended {
            shown += &self.stop.finish();
        }
        Ok(shown)
    }

    /// Whether a string that ends the text has come.
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
