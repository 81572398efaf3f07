//! What is asked of a generator, and what it gives.

use super::Sampling;

/// A prompt and what is wanted of the answers to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its tokens.
    pub prompt: Vec<u32>,
    /// The name of the prompt in what is drawn: with the sampling's seed, the number of an answer and that of a token it decides.
    pub number: u64,
    /// Answers to it.
    pub num_answers: usize,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens of an answer at most, its end token included.
    pub max_new_tokens: usize,
    /// Tokens that end an answer; it holds the one that did. Usually the spec's `eos_token_ids`.
    pub stop: Vec<u32>,
}

/// One token, as it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewToken {
    /// What [`Generator::submit`](super::Generator::submit) returned for the request.
    pub request: usize,
    /// Number of the answer to it.
    pub answer: usize,
    /// Number of the token in the answer.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Its log-probability under the model as it is, without temperature, penalties and cuts; of a mixture, under the policy. NaN if
    /// it is not asked for.
    pub log_prob: f32,
    /// Whether the answer ends with it.
    pub finish: Option<Finish>,
}

/// How to go on after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// With the next.
    Continue,
    /// Without: the answer ends here, as with a stop token.
    End,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// With one of the stop tokens, which is its last, or because whoever saw the token said so.
    Stop,
    /// It has as many tokens as were allowed, or reached the decoder's last position.
    Length,
    /// It was broken off.
    Interrupted,
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What [`Generator::submit`](super::Generator::submit) returned for the request.
    pub request: usize,
    /// Number of the answer to it.
    pub answer: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The log-probability of each, as [`NewToken::log_prob`]; none if they are not asked for.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
}
