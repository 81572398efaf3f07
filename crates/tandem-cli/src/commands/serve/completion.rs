//! A completion in progress: jobs for the engine and their messages, whole or streamed.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::asked::CompletionRequest;
use super::connections::Client;
use super::error::ApiError;
use super::kind::{Heading, Kind};
use super::prepare::Parsed;
use super::state::State;
use super::ticket::Ticket;
use crate::generation::engine::{Ended, Job, Listener, Message, Piece};

/// Messages of the engine that may wait for a request. One whose client reads its stream more slowly than
/// it grows is cut off here, so that the rest of it does not fill memory.
const MESSAGES: usize = 8192;
/// Parts of a stream that may wait for the connection.
const PARTS: usize = 16;

/// Response state of one request.
pub(crate) struct Completion {
    state: Arc<State>,
    ticket: Ticket,
    heading: Heading,
    asked: CompletionRequest,
    log_probs: bool,
    /// Number of tokens per prompt.
    prompts: Vec<usize>,
    /// Characters of each completion before its next token.
    offsets: Vec<usize>,
    /// Receiver of all prompts' messages, with the prompt's index.
    messages: Receiver<(usize, Message)>,
}

impl Completion {
    /// Tokenises the prompts and sends the jobs to the engine.
    pub(crate) async fn begin(
        state: Arc<State>,
        client: Client,
        ticket: Ticket,
        parsed: Parsed,
    ) -> Result<Self, ApiError> {
        let Parsed { heading, asked, log_probs, inputs } = parsed;
        let mut prompts = Vec::with_capacity(inputs.len());
        // One at a time, so that requests take turns.
        for input in inputs {
            let own = Arc::clone(&state);
            prompts.push(state.prepare(move || input.encode(&own)).await?);
        }
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let requests = asked.requests(state.model(), prompts)?;
        state.metrics().prompt_tokens.fetch_add(lengths.iter().sum::<usize>() as u64, Ordering::Relaxed);
        let (sender, messages) = channel(MESSAGES);
        for (index, request) in requests.into_iter().enumerate() {
            let listener = Listener::new(sender.clone(), index);
            let (stop, continues) = (asked.stop.clone(), heading.kind == Kind::Text);
            state.ask(Job { client: client.0, request, stop, continues, listener })?;
        }
        let offsets = vec![0; lengths.len() * asked.num_answers];
        Ok(Self { state, ticket, heading, asked, log_probs, prompts: lengths, offsets, messages })
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
        let message = self.messages.recv().await;
        match message {
            Some((_, Message::Refused(why))) => Err(ApiError::invalid(None, why)),
            Some((_, Message::Failed(why))) => Err(ApiError::own(why)),
            Some(message) => {
                self.ticket.run();
                if let Message::Piece(_) = &message.1 {
                    self.state.metrics().completion_tokens.fetch_add(1, Ordering::Relaxed);
                }
                Ok(message)
            }
            None => Err(ApiError::own(format!(
                "the completion was cut off: more than {MESSAGES} tokens waited for the client, or the engine has ended"
            ))),
        }
    }

    async fn whole(&mut self) -> Result<Value, ApiError> {
        let answers = self.asked.num_answers;
        let mut texts = vec![String::new(); answers * self.prompts.len()];
        let mut tokens = vec![Vec::new(); texts.len()];
        let mut ends: Vec<Vec<Ended>> = vec![Vec::new(); self.prompts.len()];
        while ends.iter().any(Vec::is_empty) {
            match self.next().await? {
                (prompt, Message::Piece(Piece { answer, text, token })) => {
                    texts[prompt * answers + answer] += &text;
                    if self.log_probs {
                        tokens[prompt * answers + answer].push(token);
                    }
                }
                (prompt, Message::Done(ended)) => ends[prompt] = ended,
                (_, Message::Refused(_) | Message::Failed(_)) => unreachable!("they are errors"),
            }
        }
        let ends: Vec<Ended> = ends.into_iter().flatten().collect();
        let completions = texts.into_iter().zip(tokens).zip(&ends).enumerate();
        let mut choices = Vec::new();
        for (index, ((text, tokens), end)) in completions {
            let (text, log_probs) = (text + &end.rest, self.log_probs_of(index, &tokens));
            choices.push(self.heading.kind.choice(index, &text, log_probs, reason(end)));
        }
        let tokens = ends.iter().map(|end| end.num_tokens).sum();
        Ok(self.heading.whole(choices, self.usage(tokens)))
    }

    /// Streams from a task. When the client is gone, the engine's messages find no reader and it
    /// stops.
    fn stream(self, first: (usize, Message)) -> Response {
        let (sender, parts) = channel(PARTS);
        tokio::spawn(self.send(first, sender));
        let events = ReceiverStream::new(parts);
        Sse::new(events.map(|part: String| Ok::<_, Infallible>(Event::default().data(part)))).into_response()
    }

    async fn send(mut self, first: (usize, Message), parts: Sender<String>) {
        let beginning = |index| self.heading.kind.beginning(index);
        for choice in (0..self.asked.num_answers * self.prompts.len()).filter_map(beginning) {
            if parts.send(self.heading.part(vec![choice], None).to_string()).await.is_err() {
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
                if parts.send(self.heading.part(vec![choice], None).to_string()).await.is_err() {
                    return;
                }
            }
            if left == 0 {
                break;
            }
            let next = tokio::select! {
                next = self.next() => next,
                () = parts.closed() => return,
            };
            message = match next {
                Ok(message) => message,
                Err(error) => return drop(parts.send(error.body().to_string()).await),
            };
        }
        if self.asked.include_usage {
            let usage = self.heading.part(Vec::new(), Some(self.usage(tokens)));
            drop(parts.send(usage.to_string()).await);
        }
        drop(parts.send("[DONE]".to_owned()).await);
    }

    /// Response chunks of one engine message.
    fn choices_of(&mut self, (prompt, message): (usize, Message)) -> Vec<Value> {
        let (kind, first) = (self.heading.kind, prompt * self.asked.num_answers);
        match message {
            Message::Piece(piece) if piece.text.is_empty() && !self.log_probs => Vec::new(),
            Message::Piece(piece) => {
                let log_probs = self.log_probs_of(first + piece.answer, &[piece.token]);
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

    fn log_probs_of(&mut self, completion: usize, tokens: &[(u32, f32)]) -> Value {
        if self.log_probs {
            let offset = &mut self.offsets[completion];
            self.heading.kind.log_probs(self.state.model().tokenizer(), tokens, offset)
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
