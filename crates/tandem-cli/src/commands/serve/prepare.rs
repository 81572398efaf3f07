//! Requests from bytes to tokens. All of it takes time in proportion to what a client sent, and runs outside
//! the async workers.

use tandem_data::chat_template::RenderOptions;
use tandem_data::record::Message;
use tandem_train::chain;

use super::asked::CompletionRequest;
use super::error::ApiError;
use super::fields::Fields;
use super::json::Prompt;
use super::kind::{Heading, Kind};
use super::state::State;

/// A parsed request.
pub(crate) struct Parsed {
    pub heading: Heading,
    pub asked: CompletionRequest,
    pub log_probs: bool,
    pub inputs: Vec<Input>,
}

/// Text before a completion.
pub(crate) enum Input {
    Conversation(Vec<Message>),
    Prompt(Prompt),
}

/// Parses a request, and checks all that can be checked without the tokenizer.
pub(crate) fn parse(state: &State, kind: Kind, body: &[u8]) -> Result<Parsed, ApiError> {
    let mut fields = Fields::read(body, state.limits().max_prompts.get())?;
    let heading = state.heading(kind, &mut fields)?;
    let inputs: Vec<Input> = match kind {
        Kind::Chat => vec![Input::Conversation(fields.messages()?)],
        Kind::Text => fields.prompts()?.into_iter().map(Input::Prompt).collect(),
    };
    let positions = state.model().room().positions;
    let asked = CompletionRequest::take(&mut fields, state.limits(), positions)?;
    let log_probs = match kind {
        Kind::Chat => fields.switch("logprobs")?,
        // Log-probability of the sampled token; those of other tokens are not computed.
        Kind::Text => fields.count("logprobs", 0, 1)?.is_some(),
    };
    fields.end()?;
    asked.check_total(inputs.len(), 1)?;
    for input in &inputs {
        input.check(state)?;
    }
    Ok(Parsed { heading, asked, log_probs, inputs })
}

impl Input {
    /// Checks the length before anything is tokenised, and tokens that are given.
    fn check(&self, state: &State) -> Result<(), ApiError> {
        match self {
            Self::Conversation(messages) => {
                let texts = messages.iter().flat_map(|message| message.values());
                let bytes = texts.map(|value| value.as_str().map_or(0, str::len)).sum();
                check_bytes(state, "messages", bytes)
            }
            Self::Prompt(Prompt::Text(text)) => check_bytes(state, "prompt", text.len()),
            Self::Prompt(Prompt::Tokens(tokens)) => {
                let vocabulary = state.model().vocabulary();
                match tokens.iter().find(|&&token| token as usize >= vocabulary) {
                    None => Ok(()),
                    Some(token) => Err(ApiError::invalid(
                        Some("prompt"),
                        format!("token {token} is outside the model's vocabulary of {vocabulary}"),
                    )),
                }
            }
        }
    }

    /// Returns the tokens.
    pub(crate) fn encode(self, state: &State) -> Result<Vec<u32>, ApiError> {
        let tokenizer = state.model().tokenizer();
        let invalid = |field, error| ApiError::invalid(Some(field), chain(&error));
        match self {
            Self::Conversation(messages) => {
                let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
                let template = tokenizer.chat_template().map_err(|error| invalid("messages", error))?;
                let text = template.render(&messages, options).map_err(|error| invalid("messages", error))?;
                // A template may multiply what it is given.
                check_bytes(state, "messages", text.len())?;
                tokenizer.encode_rendered(&text).map_err(|error| invalid("messages", error))
            }
            Self::Prompt(Prompt::Text(text)) => {
                tokenizer.encode(&text).map_err(|error| invalid("prompt", error))
            }
            Self::Prompt(Prompt::Tokens(tokens)) => Ok(tokens),
        }
    }
}

fn check_bytes(state: &State, field: &str, bytes: usize) -> Result<(), ApiError> {
    let positions = state.model().room().positions;
    let most = state.limits().prompt_bytes(positions);
    if bytes <= most {
        return Ok(());
    }
    Err(ApiError::invalid(
        Some(field),
        format!(
            "`{field}` has {bytes} bytes, more than {most} (--max-prompt-bytes); this server has room for {positions} tokens \
             (--context)"
        ),
    ))
}
