//! Protocol differences between servers: paths, terms, requests and replies.

use serde_json::Value;
use tandem_judge::http::Reply;

use super::super::generate::GenerationRequest;
use super::completion::CompletionRequest;
use super::sglang::Sglang;
use super::vllm::Vllm;
use crate::config::ServerKind;

pub(crate) trait Protocol: Sync {
    fn words(&self) -> &'static ServerMessages;

    /// Completion request for a prompt; completion `i` has seed `seed + i`.
    fn body(&self, form: &CompletionRequest<'_>, asked: &GenerationRequest, seed: u64) -> Value;

    /// Parses completions in order, or describes the reply's defect.
    fn told(&self, form: &CompletionRequest<'_>, reply: &Value) -> Result<Vec<ServerReply>, String>;

    /// A request for one token that a server must refuse, and the adapter that it names: a server
    /// that does not say which adapter answered must be seen to refuse one that it does not have.
    fn impossible(&self, name: &str) -> Option<(String, Value)>;

    /// Checks the reply to loading an adapter.
    fn loaded(&self, name: &str, reply: &Reply) -> Result<(), String>;

    /// Returns whether unloading failed because no such adapter is loaded.
    fn is_gone(&self, name: &str, reply: &Reply) -> bool;
}

/// Names, paths and advice.
pub(crate) struct ServerMessages {
    /// The server's name.
    pub name: &'static str,
    /// Path of the model list.
    pub models: &'static str,
    /// The path that answers.
    pub answers: &'static str,
    /// Message for an adapter that is already loaded.
    pub already: &'static str,
    /// Server options needed for loading adapters.
    pub needs: &'static str,
    /// Option that enables loading at run time.
    pub switches: &'static str,
    /// Option for the context length.
    pub whole: &'static str,
}

/// An answer, as a server tells it.
pub(crate) struct ServerReply {
    /// Token ids; an end token may be missing.
    pub tokens: Vec<u32>,
    /// The cause.
    pub end: End,
    /// Summed log-probability of the tokens, if reported.
    pub log_probs: Option<Vec<Option<f64>>>,
    /// The prompt that it answered.
    pub prompt: Option<Vec<u32>>,
    /// How long that was.
    pub prompt_length: Option<usize>,
}

pub(crate) enum End {
    Length,
    /// An end token that the server does not name.
    Own,
    Token(u32),
    /// A string, in tokens that are all there.
    Text,
}

impl End {
    /// A stop token of this id.
    pub(crate) fn token(number: &Value) -> Result<Self, String> {
        let id = number.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(Self::Token).ok_or_else(|| format!("a completion ended by {number}, which is not a token"))
    }
}

/// How a server is spoken to.
pub(crate) fn for_kind(kind: ServerKind) -> &'static dyn Protocol {
    match kind {
        ServerKind::Vllm => &Vllm,
        ServerKind::Sglang => &Sglang,
    }
}
