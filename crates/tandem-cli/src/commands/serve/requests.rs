//! Requests as a function of bytes, without connections and without an engine, for tests with hostile ones.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::mpsc::channel;

use clap::Parser;

use super::error::ApiError;
use super::kind::Kind;
use super::prepare::{Parsed, parse};
use super::state::State;
use crate::args::ServeArguments;

/// Reader of the requests of a server with its default limits.
pub struct Requests(State);

/// `tandem serve` on its own.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Arguments {
    #[command(flatten)]
    serve: ServeArguments,
}

impl Requests {
    /// Loads a model's folder.
    ///
    /// # Errors
    /// If it is no model with a tokenizer.
    pub fn open(model: &Path) -> anyhow::Result<Self> {
        let Arguments { serve } =
            Arguments::try_parse_from([model.as_os_str(), OsStr::new("--threads"), OsStr::new("1")])?;
        let (model, name) = super::open(&serve)?;
        // Nothing is sent to an engine.
        let (jobs, _) = channel();
        Ok(Self(State::new(model, name, None, jobs, serve.limits)))
    }

    /// Reads the body of a request, of chat completions or of text completions, up to what the engine would get.
    /// Returns the number of its prompts.
    ///
    /// # Errors
    /// The status and the body of the answer to a request that is refused.
    pub fn read(&self, is_chat: bool, body: &[u8]) -> Result<usize, (u16, String)> {
        let kind = if is_chat { Kind::Chat } else { Kind::Text };
        self.accept(kind, body).map_err(|error| (error.status().as_u16(), error.body().to_string()))
    }

    fn accept(&self, kind: Kind, body: &[u8]) -> Result<usize, ApiError> {
        let Parsed { asked, inputs, .. } = parse(&self.0, kind, body)?;
        let prompts = inputs.into_iter().map(|input| input.encode(&self.0)).collect::<Result<_, _>>()?;
        Ok(asked.requests(self.0.model(), prompts)?.len())
    }
}
