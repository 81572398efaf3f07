//! Environment over a user's program: it continues a conversation after each turn of a policy, and
//! ends it with a reward.
//!
//! Failures are those of a command judge: a conversation without a usable reply is dropped, and a
//! program that keeps failing is an error.

use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value, json};

use crate::command::{CommandClient, Reply, fields};
use crate::{CommandConfig, Prompt, Result, StderrLine};

/// A message: `role`, `content`, and what a chat template takes beside.
pub type Message = Map<String, Value>;

/// A conversation after a turn of the policy.
#[derive(Clone, Debug)]
pub struct Conversation<'a> {
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// All messages after the prompt. The last one is the policy's.
    pub messages: &'a [Message],
    /// Number of the policy's turns.
    pub turn: usize,
    /// Whether a limit ends the conversation now.
    pub is_last: bool,
    /// Other fields of the prompt's row.
    pub row: &'a Map<String, Value>,
}

/// An environment's reply to a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum EnvironmentReply {
    /// The next messages, at least one.
    Messages(Vec<Message>),
    /// The end, with a finite reward and the explanation.
    End {
        /// Reward; more is better.
        reward: f64,
        /// Explanation, stored with the samples.
        reason: Value,
    },
    /// No usable reply, with the reason: the conversation has no reward.
    Dropped(Value),
}

impl Reply for EnvironmentReply {
    fn read(answer: &Value) -> Result<Self, &'static str> {
        match (answer.get("messages"), answer.get("reward")) {
            (Some(_), Some(_)) => Err("there are both `messages` and a `reward`"),
            (Some(messages), None) => self::messages(messages).map(Self::Messages),
            (None, Some(Value::Number(reward))) => {
                match reward.as_f64().filter(|reward| reward.is_finite()) {
                    Some(reward) => Ok(Self::End { reward, reason: answer["reason"].clone() }),
                    None => Err("the reward is too large"),
                }
            }
            (None, Some(Value::Null)) if answer["reason"].is_null() => {
                Ok(Self::none("the environment gave no reward and no reason".to_owned()))
            }
            (None, Some(Value::Null)) => Ok(Self::Dropped(answer["reason"].clone())),
            (None, Some(_)) => Err("the reward is no number"),
            (None, None) => Err("there are neither `messages` nor a `reward`"),
        }
    }

    fn none(why: String) -> Self {
        Self::Dropped(Value::from(why))
    }
}

fn messages(messages: &Value) -> Result<Vec<Message>, &'static str> {
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let messages = messages.ok_or("`messages` is no list with a message")?;
    let message = |message: &Value| match (&message["role"], &message["content"]) {
        (Value::String(role), Value::String(_)) if role == "assistant" => {
            Err("a message has the role \"assistant\", which is the policy's")
        }
        (Value::String(_), Value::String(_)) => Ok(message.as_object().cloned().unwrap_or_default()),
        _ => Err("a message has no `role` and `content` that are texts"),
    };
    messages.iter().map(message).collect()
}

/// Environment that asks a program.
pub struct Environment {
    client: CommandClient,
}

impl Environment {
    /// Starts the program, so that it is ready early. `on_stderr` is called on a thread of the
    /// environment.
    ///
    /// # Errors
    /// An option is out of range, or the program cannot be started.
    pub fn new(config: CommandConfig, on_stderr: StderrLine) -> Result<Self> {
        config.check("environment")?;
        Ok(Self { client: CommandClient::new("environment".to_owned(), config, on_stderr)? })
    }

    /// Returns the reply to each conversation, in order. To a conversation that must end, messages
    /// are no usable reply.
    ///
    /// # Errors
    /// The program cannot be started or ends again and again.
    /// [`JudgeError::Stopped`](crate::JudgeError::Stopped) soon after `stop` is set.
    pub fn step(
        &mut self,
        conversations: &[Conversation<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<EnvironmentReply>> {
        let item = |index: usize, id: u64| {
            let Conversation { prompt, messages: conversation, turn, is_last, row } = &conversations[index];
            let (prompt, messages) = fields(prompt);
            json!({
                "id": id,
                "prompt": prompt,
                "messages": messages,
                "conversation": conversation,
                "turn": turn,
                "is_last": is_last,
                "row": row,
            })
        };
        let replies = self.client.ask(conversations.len(), item, stop)?;
        let check = |(reply, conversation): (EnvironmentReply, &Conversation<'_>)| match reply {
            EnvironmentReply::Messages(_) if conversation.is_last => EnvironmentReply::none(
                "the environment gave messages, not a reward, to a conversation that had to end".to_owned(),
            ),
            reply => reply,
        };
        Ok(replies.into_iter().zip(conversations).map(check).collect())
    }
}
