//! What differs between the servers: their paths, words, requests and replies.

use serde_json::Value;
use tandem_judge::http::Reply;

use super::super::generate::GenerationRequest;
use super::completion::CompletionRequest;
use super::sglang::Sglang;
use super::vllm::Vllm;
use crate::config::ServerKind;

/// One kind of server.
pub trait Protocol: Sync {
    /// What it calls things.
    fn words(&self) -> &'static ServerMessages;

    /// A request for the answers to a prompt, whose first has the `seed`, the second the next, and so on.
    fn body(&self, form: &CompletionRequest<'_>, asked: &GenerationRequest, seed: u64) -> Value;

    /// The answers in a reply, in their order, or what is wrong with it.
    fn told(&self, form: &CompletionRequest<'_>, reply: &Value) -> Result<Vec<ServerReply>, String>;

    /// A request for one token that a server must refuse, and the adapter that it names: a server that does not say which adapter
    /// answered must be seen to refuse one that it does not have.
    fn impossible(&self, name: &str) -> Option<(String, Value)>;

    /// What is wrong with the reply of a server that says that it has loaded an adapter.
    fn loaded(&self, name: &str, reply: &Reply) -> Result<(), String>;

    /// Whether it does not unload an adapter because it has none of that name.
    fn is_gone(&self, name: &str, reply: &Reply) -> bool;
}

/// Names, paths and advice.
pub struct ServerMessages {
    /// The server's name.
    pub name: &'static str,
    /// The path that lists what it serves.
    pub models: &'static str,
    /// The path that answers.
    pub answers: &'static str,
    /// What it says of an adapter that is there already.
    pub already: &'static str,
    /// What loading needs.
    pub needs: &'static str,
    /// What makes it load anything while it runs.
    pub switches: &'static str,
    /// What makes it take whole prompts.
    pub whole: &'static str,
}

/// An answer, as a server tells it.
pub struct ServerReply {
    /// Its tokens; the last may be left out.
    pub tokens: Vec<u32>,
    /// What ended it.
    pub end: End,
    /// Of all tokens that the server gave, if it tells them.
    pub log_probs: Option<Vec<Option<f64>>>,
    /// The prompt that it answered.
    pub prompt: Option<Vec<u32>>,
    /// How long that was.
    pub prompt_length: Option<usize>,
}

/// What ends an answer.
pub enum End {
    /// It may be no longer.
    Length,
    /// An end token, of which the server says nothing.
    Own,
    /// This token.
    Token(u32),
    /// A string, in tokens that are all there.
    Text,
}

impl End {
    /// By a token of this number.
    pub fn token(number: &Value) -> Result<Self, String> {
        let id = number.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(Self::Token).ok_or_else(|| format!("an answer ended by {number}, which is no token"))
    }
}

/// How a server is spoken to.
pub fn of(kind: ServerKind) -> &'static dyn Protocol {
    match kind {
        ServerKind::Vllm => &Vllm,
        ServerKind::Sglang => &Sglang,
    }
}
