//! Generation thread that serves all requests in one batch.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError};

use tandem_data::text_stream::TextStream;
use tandem_model::decode::{Answer, Finish, Flow, NewToken};
use tandem_model::{ModelError, Request};
use tandem_train::chain;

use super::Loaded;

pub(crate) struct Job {
    /// The request.
    pub request: Request,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Receives the messages of this job; returns false when nobody listens any more.
    pub listener: Box<dyn FnMut(Message) -> bool + Send>,
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
    listener: Box<dyn FnMut(Message) -> bool + Send>,
    texts: Vec<TextStream<'a>>,
    ended: Vec<Option<Ended>>,
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
            Ok(Job { request, stop, mut listener }) => {
                let count = request.num_answers;
                match generator.submit(request) {
                    Ok(number) => {
                        let texts = (0..count).map(|_| TextStream::new(model.tokenizer(), &stop)).collect();
                        let under = InFlight { listener, texts, ended: vec![None; count], is_wanted: true };
                        under_way.insert(number, under);
                    }
                    Err(error) => drop(listener(Message::Refused(chain(&error)))),
                }
                continue;
            }
            Err(TryRecvError::Disconnected) if generator.is_idle() => return Ok(()),
            Err(_) => {}
        }
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
                    if under.ended.iter().all(Option::is_some) {
                        let mut under = under_way.remove(&number).expect("just found");
                        (under.listener)(Message::Done(under.ended.into_iter().flatten().collect()));
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
        let unwanted: Vec<usize> =
            under_way.iter().filter(|(_, under)| !under.is_wanted).map(|(&number, _)| number).collect();
        for number in unwanted {
            under_way.remove(&number);
            generator.cancel(number);
        }
    }
}

fn fail(under_way: BTreeMap<usize, InFlight>, error: &ModelError) {
    for mut under in under_way.into_values() {
        (under.listener)(Message::Failed(chain(error)));
    }
}

impl InFlight<'_> {
    fn hear(&mut self, NewToken { answer, token, log_prob, .. }: NewToken) -> Flow {
        let text = match self.texts[answer].push(token) {
            Ok(text) => text,
            Err(error) => {
                self.is_wanted = false;
                (self.listener)(Message::Failed(chain(&error)));
                return Flow::End;
            }
        };
        let piece = Piece { answer, text, token: (token, log_prob) };
        self.is_wanted &= (self.listener)(Message::Piece(piece));
        if self.texts[answer].is_ended() || !self.is_wanted { Flow::End } else { Flow::Continue }
    }

    fn end(&mut self, Answer { answer, tokens, finish, .. }: Answer) {
        let text = &mut self.texts[answer];
        // The tokens decoded before, so the rest is valid text.
        let rest = text.finish().unwrap_or_default();
        let by_length = finish == Finish::Length && !text.is_ended();
        self.ended[answer] = Some(Ended { rest, num_tokens: tokens.len(), by_length });
    }
}
