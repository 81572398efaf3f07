//! A completion in progress: jobs for the engine and their messages, whole or streamed.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::asked::CompletionRequest;
use super::error::ApiError;
use super::kind::Heading;
use super::state::State;
use crate::generation::engine::{Ended, Job, Message, Piece};

/// Response state of one request.
pub(crate) struct Completion {
    state: Arc<State>,
    heading: Heading,
    asked: CompletionRequest,
    log_probs: bool,
    /// Number of tokens per prompt.
    prompts: Vec<usize>,
    /// Receivers, one per prompt.
    messages: UnboundedReceiver<(usize, Message)>,
}

impl Completion {
    /// Sends the jobs to the engine.
    pub(crate) fn begin(
        state: Arc<State>,
        heading: Heading,
        asked: CompletionRequest,
        log_probs: bool,
        prompts: Vec<Vec<u32>>,
    ) -> Result<Self, ApiError> {
        let lengths = prompts.iter().map(Vec::len).collect();
        let numbered = (0..).zip(prompts);
        let requests: Vec<_> = numbered
            .map(|(number, prompt)| asked.request(state.model(), number, prompt))
            .collect::<Result<_, _>>()?;
        let (sender, messages) = unbounded_channel();
        for (index, request) in requests.into_iter().enumerate() {
            let sender = sender.clone();
            let listener = Box::new(move |message| sender.send((index, message)).is_ok());
            state.ask(Job { request, stop: asked.stop.clone(), listener })?;
        }
        Ok(Self { state, heading, asked, log_probs, prompts: lengths, messages })
    }

    /// Responds when all is done, or streams.
    pub(crate) async fn respond(mut self) -> Result<Response, ApiError> {
        if !self.asked.stream {
            return Ok(Json(self.whole().await?).into_response());
        }
        // Refuse before a stream begins.
        let first = self.next().await?;
        Ok(self.stream(first).into_response())
    }

    async fn next(&mut self) -> Result<(usize, Message), ApiError> {
        match self.messages.recv().await {
            Some((_, Message::Refused(why))) => Err(ApiError::invalid(None, why)),
            Some((_, Message::Failed(why))) => Err(ApiError::own(why)),
            Some(message) => Ok(message),
            None => Err(ApiError::own("the engine has ended")),
        }
    }

    async fn whole(&mut self) -> Result<Value, ApiError> {
        let answers = self.asked.num_answers;
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); answers * self.prompts.len()];
        let mut ends: Vec<Vec<Ended>> = vec![Vec::new(); self.prompts.len()];
        while ends.iter().any(Vec::is_empty) {
            match self.next().await? {
                (prompt, Message::Piece(piece)) => pieces[prompt * answers + piece.answer].push(piece),
                (prompt, Message::Done(ended)) => ends[prompt] = ended,
                (_, Message::Refused(_) | Message::Failed(_)) => unreachable!("they are errors"),
            }
        }
        let ends: Vec<Ended> = ends.into_iter().flatten().collect();
        let choices = pieces.iter().zip(&ends).enumerate().map(|(index, (pieces, end))| {
            let text: String =
                pieces.iter().map(|piece| piece.text.as_str()).chain([end.rest.as_str()]).collect();
            self.heading.kind.choice(index, &text, self.log_probs_of(pieces), reason(end))
        });
        let choices = choices.collect();
        let tokens = ends.iter().map(|end| end.num_tokens).sum();
        Ok(self.heading.whole(choices, self.usage(tokens)))
    }

    /// Streams from a task. When the client is gone, the engine's messages find no reader and it
    /// stops.
    fn stream(self, first: (usize, Message)) -> Response {
        let (sender, parts) = unbounded_channel();
        tokio::spawn(self.send(first, sender));
        let events = UnboundedReceiverStream::new(parts);
        Sse::new(events.map(|part: String| Ok::<_, Infallible>(Event::default().data(part)))).into_response()
    }

    async fn send(mut self, first: (usize, Message), parts: UnboundedSender<String>) {
        let beginning = |index| self.heading.kind.beginning(index);
        for choice in (0..self.asked.num_answers * self.prompts.len()).filter_map(beginning) {
            if parts.send(self.heading.part(vec![choice], None).to_string()).is_err() {
                return;
            }
        }
        let (mut left, mut tokens, mut message) = (self.prompts.len(), 0, first);
        loop {
            if let Message::Done(ends) = &message.1 {
                left -= 1;
                tokens += ends.iter().map(|end| end.num_tokens).sum::<usize>();
            }
            for choice in self.choices_of(message) {
                if parts.send(self.heading.part(vec![choice], None).to_string()).is_err() {
                    return;
                }
            }
            if left == 0 {
                break;
            }
            message = match self.next().await {
                Ok(message) => message,
                Err(error) => return drop(parts.send(error.body().to_string())),
            };
        }
        if self.asked.include_usage {
            let usage = self.heading.part(Vec::new(), Some(self.usage(tokens)));
            drop(parts.send(usage.to_string()));
        }
        drop(parts.send("[DONE]".to_owned()));
    }

    /// Response chunks of one engine message.
    fn choices_of(&self, (prompt, message): (usize, Message)) -> Vec<Value> {
        let (kind, first) = (self.heading.kind, prompt * self.asked.num_answers);
        match message {
            Message::Piece(piece) if piece.text.is_empty() && !self.log_probs => Vec::new(),
            Message::Piece(piece) => {
                let log_probs = self.log_probs_of(std::slice::from_ref(&piece));
                vec![kind.delta(first + piece.answer, &piece.text, log_probs, None)]
            }
            Message::Done(ends) => {
                let end = |(answer, end): (usize, &Ended)| {
                    kind.delta(first + answer, &end.rest, Value::Null, Some(reason(end)))
                };
                ends.iter().enumerate().map(end).collect()
            }
            Message::Refused(_) | Message::Failed(_) => unreachable!("they are errors"),
        }
    }

    fn log_probs_of(&self, pieces: &[Piece]) -> Value {
        if self.log_probs {
            self.heading.kind.log_probs(self.state.model().tokenizer(), pieces)
        } else {
            Value::Null
        }
    }

    fn usage(&self, completion: usize) -> Value {
        let prompt: usize = self.prompts.iter().sum();
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
    }
}

fn reason(end: &Ended) -> &'static str {
    if end.by_length { "length" } else { "stop" }
}
