//! Judges: what scores generated answers, so that preferences can be made of them while a model trains.
//!
//! * A [`Group`] is several answers to one prompt. A [`Judge`] gives each a [`Verdict`]: a score, or why there is none.
//! * [`RuleJudge`] computes a score from the text: length, a regular expression, the right answer, JSON, how it ended.
//! * [`CommandJudge`] asks a program of the user's, kept running, over lines of JSON.
//! * [`EndpointJudge`] has a chat model behind an OpenAI-compatible address compare answers in pairs, in both orders.
//! * A [`Panel`] adds several judges' scores up, each with its weight.
//!
//! [`http`] is how endpoints are reached, for others who reach some too.
//!
//! A score is never made up. What fails for one answer leaves that answer without a score and says why; what fails for all of
//! them is a [`JudgeError`].

mod backoff;
mod command;
mod endpoint;
mod error;
pub mod http;
mod judge;
mod panel;
mod rules;

pub use command::{CommandConfig, CommandJudge, StderrLine};
pub use endpoint::{DEFAULT_TEMPLATE, EndpointConfig, EndpointJudge};
pub use error::JudgeError;
pub use judge::{Candidate, Counts, Group, Judge, Prompt, Verdict};
pub use panel::{Assessment, Member, Panel};
pub use rules::{
    Compare, ExactConfig, Expect, JsonConfig, LengthConfig, LengthUnit, MissingEosConfig, RegexConfig, Rule,
    RuleJudge,
};

/// The result of judging, or of building a judge.
pub type Result<T, E = JudgeError> = std::result::Result<T, E>;
