//! Requests to a generator, and completions.

use super::Sampling;

/// Prompt with the options of its completions.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Number of the prompt in sampling. With the sampling seed, the completion's and the token's
    /// number it determines every random draw.
    pub number: u64,
    /// Number of completions.
    pub num_answers: usize,
    /// Sampling options.
    pub sampling: Sampling,
    /// Largest number of tokens of a completion, its end token included. A rotary embedding that
    /// depends on a text's length takes the prompt's with as many new tokens, also if it ends before.
    pub max_new_tokens: usize,
    /// Tokens that end a completion, and stay in it. Usually the spec's `eos_token_ids`.
    pub stop: Vec<u32>,
}

/// Newly sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewToken {
    /// Number of the request, from [`Generator::submit`](super::Generator::submit).
    pub request: usize,
    /// Number of the completion.
    pub answer: usize,
    /// Index of the token in the completion.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Log-probability under the model without temperature, penalties and cuts; of a mixture, under
    /// the policy. NaN if not requested.
    pub log_prob: f32,
    /// End of the completion, if this is its last token.
    pub finish: Option<Finish>,
}

/// Continuation after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Sample the next token.
    Continue,
    /// End the completion, as after a stop token.
    End,
}

/// Reason for the end of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, which is its last, or [`Flow::End`].
    Stop,
    /// The token limit, or the decoder's last position.
    Length,
    /// Cancellation.
    Interrupted,
}

/// Finished completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Number of the request, from [`Generator::submit`](super::Generator::submit).
    pub request: usize,
    /// Number of the completion.
    pub answer: usize,
    /// Tokens of the completion.
    pub tokens: Vec<u32>,
    /// Log-probability of each token, as [`NewToken::log_prob`]; empty if not requested.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
}
