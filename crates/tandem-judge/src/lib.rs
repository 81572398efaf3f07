//! Judges: scores of generated responses, from which preferences are made during training.
//!
//! * A [`PromptWithCompletions`] is several responses to one prompt. A [`Judge`] gives each a [`Verdict`].
//! * [`RuleJudge`] computes a score from text: length, regular expression, reference answer, JSON,
//!   EOS.
//! * [`CommandJudge`] keeps a user's program running and exchanges lines of JSON with it.
//! * [`EndpointJudge`] lets a chat model at an OpenAI-compatible address compare responses in
//!   pairs.
//! * [`OwnJudge`] calls a function that the program has [registered](register).
//! * An [`Environment`] continues conversations and rewards them, by a user's program.
//! * A [`Panel`] adds the weighted scores of several judges.
//!
//! [`http`] is the client of endpoints, and [`GroupLeader`] a started program; both are used elsewhere too.
//!
//! No score is invented: a failure for one response leaves it without a score and with the reason;
//! a failure for all of them is a [`JudgeError`].

#![warn(unreachable_pub)]

mod backoff;
mod command;
mod endpoint;
mod environment;
mod error;
mod group_leader;
pub mod http;
mod judge;
mod own;
mod panel;
mod rules;

pub use command::{CommandConfig, CommandJudge, StderrLine};
pub use endpoint::{DEFAULT_TEMPLATE, EndpointConfig, EndpointJudge};
pub use environment::{Conversation, Environment, EnvironmentReply, Message};
pub use error::JudgeError;
pub use group_leader::GroupLeader;
pub use judge::{Candidate, Counts, Judge, Prompt, PromptWithCompletions, Verdict};
pub use own::{OwnConfig, OwnJudge, Score, register};
pub use panel::{Assessment, Member, Panel};
pub use rules::{
    Compare, ExactConfig, Expect, JsonConfig, LengthConfig, LengthUnit, MissingEosConfig, RegexConfig, Rule,
    RuleJudge,
};

/// The result of judging, or of building a judge.
pub type Result<T, E = JudgeError> = std::result::Result<T, E>;
