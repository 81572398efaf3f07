//! Generation thread that serves all requests in one batch.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError};

use tandem_data::text_stream::TextStream;
use tandem_model::decode::{Answer, Finish, Flow, NewToken};
use tandem_model::{ModelError, Request};
use tandem_train::chain;
use tokio::sync::mpsc::Sender;

use super::Loaded;

pub(crate) struct Job {
    /// Client, whose completions take turns with those of others.
    pub client: u64,
    /// The request.
    pub request: Request,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Whether the completions' texts go on from the prompt's, rather than beginning anew.
    pub continues: bool,
    /// Receives the messages of this job.
    pub listener: Listener,
}

/// Sender of a job's messages.
pub(crate) struct Listener {
    messages: Sender<(usize, Message)>,
    index: usize,
}

impl Listener {
    /// Sends messages with the index of their job.
    pub(crate) fn new(messages: Sender<(usize, Message)>, index: usize) -> Self {
        Self { messages, index }
    }

    /// Sends a message; returns false when nobody listens any more, or not fast enough. The engine waits for
    /// nobody.
    fn send(&self, message: Message) -> bool {
        self.messages.try_send((self.index, message)).is_ok()
    }

    fn is_gone(&self) -> bool {
        self.messages.is_closed()
    }
}

/// Message to the listener of a job.
#[derive(Debug)]
pub(crate) enum Message {
    /// A new token. The text that it completes may be empty.
    Piece(Piece),
    /// The job is done: finish reason per completion.
    Done(Vec<Ended>),
    /// The request was refused.
    Refused(String),
    /// The engine failed.
    Failed(String),
}

/// Text that a token adds to a completion.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Index of the completion.
    pub answer: usize,
    /// Text that can be shown now.
    pub text: String,
    /// Token id and log-probability.
    pub token: (u32, f32),
}

#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// Text that was held back for stop strings.
    pub rest: String,
    /// Number of tokens.
    pub num_tokens: usize,
    /// Whether the token limit ended the completion.
    pub by_length: bool,
}

struct InFlight<'a> {
    listener: Listener,
    /// Number of completions.
    count: usize,
    /// Texts of completions that have not ended.
    texts: BTreeMap<usize, TextStream<'a>>,
    ended: BTreeMap<usize, Ended>,
    is_wanted: bool,
}

/// Runs jobs until every sender is gone.
///
/// # Errors
/// The KV cache cannot be allocated. Later failures go to the listeners.
pub(crate) fn run(model: &Loaded, jobs: &Receiver<Job>) -> tandem_model::Result<()> {
    let (mut generator, mut source) = (model.generator()?, model.source());
    let mut under_way: BTreeMap<usize, InFlight> = BTreeMap::new();
    loop {
        // Without work, block on the channel.
        let next = if generator.is_idle() {
            jobs.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            jobs.try_recv()
        };
        match next {
            Ok(Job { client, request, stop, continues, listener }) => {
                let before = if continues { &request.prompt[..] } else { &[] };
                let text = |answer| (answer, TextStream::continuing(model.tokenizer(), &stop, before));
                let texts: BTreeMap<_, _> = (0..request.num_answers).map(text).collect();
                match generator.submit_for(client, request) {
                    Ok(number) => {
                        let (count, ended) = (texts.len(), BTreeMap::new());
                        let under = InFlight { listener, count, texts, ended, is_wanted: true };
                        under_way.insert(number, under);
                    }
                    Err(error) => {
                        listener.send(Message::Refused(chain(&error)));
                    }
                }
                continue;
            }
            Err(TryRecvError::Disconnected) if generator.is_idle() => return Ok(()),
            Err(_) => {}
        }
        // Also those that have not begun: their prompts need not be computed.
        under_way.retain(|&number, under| {
            let is_wanted = under.is_wanted && !under.listener.is_gone();
            if !is_wanted {
                generator.cancel(number);
            }
            is_wanted
        });
        let mut on_token = |new: NewToken| {
            let under = under_way.get_mut(&new.request).expect("it was submitted");
            under.hear(new)
        };
        match generator.step(&mut source, &mut on_token) {
            Ok(answers) => {
                for answer in answers {
                    let number = answer.request;
                    let under = under_way.get_mut(&number).expect("it was submitted");
                    under.end(answer);
                    if under.ended.len() == under.count {
                        let under = under_way.remove(&number).expect("just found");
                        under.listener.send(Message::Done(under.ended.into_values().collect()));
                    }
                }
            }
            Err(error) => {
                for &number in under_way.keys() {
                    generator.cancel(number);
                }
                fail(std::mem::take(&mut under_way), &error);
            }
        }
    }
}

fn fail(under_way: BTreeMap<usize, InFlight>, error: &ModelError) {
    for under in under_way.into_values() {
        under.listener.send(Message::Failed(chain(error)));
    }
}

impl InFlight<'_> {
    fn hear(&mut self, NewToken { answer, token, log_prob, .. }: NewToken) -> Flow {
        let stream = self.texts.get_mut(&answer).expect("it has not ended");
        let text = match stream.push(token) {
            Ok(text) => text,
            Err(error) => {
                self.is_wanted = false;
                self.listener.send(Message::Failed(chain(&error)));
                return Flow::End;
            }
        };
        let piece = Piece { answer, text, token: (token, log_prob) };
        self.is_wanted &= self.listener.send(Message::Piece(piece));
        if stream.is_ended() || !self.is_wanted { Flow::End } else { Flow::Continue }
    }

    fn end(&mut self, Answer { answer, tokens, finish, .. }: Answer) {
        let mut text = self.texts.remove(&answer).expect("it ends once");
        // The tokens decoded before, so the rest is valid text.
        let rest = text.finish().unwrap_or_default();
        let by_length = finish == Finish::Length && !text.is_ended();
        self.ended.insert(answer, Ended { rest, num_tokens: tokens.len(), by_length });
    }
}
