//! Thread of a tracker: it delivers what waits in the queue, pauses after a failure, and says once what
//! is wrong, once that it loses records, and at the end how many.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::message::Message;
use super::queue::{CAPACITY, Queue};
use super::{Tracker, Trouble};

/// Longest time without a delivery; one without messages looks whether a program still runs.
const LOOK: Duration = Duration::from_secs(1);

/// A tracker with its thread.
pub(super) struct Background {
    queue: Arc<Queue>,
    voice: Arc<Voice>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// Longest pause after the end of the run, when all of the time of grace is to be used.
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Matter of a sentence.
#[derive(Clone, Copy)]
enum Matter {
    Trouble,
    GivenUp,
    Dropping,
    Loss,
}

/// Says what is wrong with a tracker, each matter once.
struct Voice {
    key: &'static str,
    grace: Duration,
    warn: Sender<String>,
    /// Whether each [`Matter`] was told.
    told: [AtomicBool; 4],
}

impl Voice {
    fn say(&self, matter: Matter, sentence: String) {
        if !self.told[matter as usize].swap(true, Ordering::Relaxed) {
            // The receiver is gone when the run is over.
            let _ = self.warn.send(sentence);
        }
    }

    fn say_dropping(&self) {
        let key = self.key;
        let sentence = format!(
            "{key}: {CAPACITY} records wait for it, and the oldest is dropped for each new one: look whether it still reads; \
             metrics.jsonl has all records"
        );
        self.say(Matter::Dropping, sentence);
    }

    fn say_undelivered(&self, num: usize) {
        let (key, seconds) = (self.key, self.grace.as_secs_f64());
        let sentence = format!(
            "{key}: {num} records did not reach it, during the run or in {seconds} s after its end (logging.grace_s); \
             metrics.jsonl has all records"
        );
        self.say(Matter::Loss, sentence);
    }
}

impl Background {
    pub(super) fn start(mut tracker: Box<dyn Tracker>, grace: Duration, warn: Sender<String>) -> Self {
        let (key, queue) = (tracker.key(), Arc::new(Queue::default()));
        let voice = Arc::new(Voice { key, grace, warn, told: Default::default() });
        let (at_end, ended) = sync_channel(0);
        let worker = Worker { queue: queue.clone(), voice: voice.clone() };
        let work = move || {
            worker.run(&mut *tracker);
            // Kills a program before the process may end.
            drop(tracker);
            drop(at_end);
        };
        if let Err(error) = Builder::new().name(key.to_owned()).spawn(work) {
            queue.close();
            let sentence = format!("{key}: no thread can be started ({error}); the run goes on without it");
            voice.say(Matter::GivenUp, sentence);
        }
        Self { queue, voice, ended }
    }

    /// Appends a message to the queue.
    pub(super) fn send(&self, message: Arc<Message>) {
        if self.queue.push(message) {
            self.voice.say_dropping();
        }
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Waits for the end of the thread, but hardly longer than until `deadline`: one that is stuck in a
    /// request or a write is left to itself.
    pub(super) fn join(self, deadline: Instant) {
        let patience = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(500);
        if self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            self.voice.say_undelivered(self.queue.undelivered());
            self.queue.close();
        }
    }
}

/// The thread's side.
struct Worker {
    queue: Arc<Queue>,
    voice: Arc<Voice>,
}

impl Worker {
    fn run(&self, tracker: &mut dyn Tracker) {
        // The first delivery has no messages: a tracker that is missing is reported at the start.
        let mut hand = VecDeque::new();
        loop {
            let result = tracker.deliver(&mut hand);
            self.queue.hold(hand.len());
            let ended = self.queue.ended();
            let deadline = ended.as_ref().map(|(_, deadline)| *deadline);
            let outcome = match (result, ended) {
                (Ok(()), Some((end, deadline))) if hand.is_empty() && self.queue.is_empty() => {
                    match tracker.end(&end, deadline) {
                        Ok(()) => return self.say_undelivered(),
                        failed => failed,
                    }
                }
                (Ok(()), Some((_, deadline))) if Instant::now() >= deadline => return self.say_undelivered(),
                (result, _) => result,
            };
            match outcome {
                Err(trouble) => {
                    if !self.waits_after(trouble, deadline) {
                        return;
                    }
                }
                Ok(()) if deadline.is_none() && hand.is_empty() => self.queue.pause(tracker.interval()),
                Ok(()) => {}
            }
            if hand.is_empty() {
                self.queue.take(&mut hand, LOOK);
            }
        }
    }

    /// Pauses after a failure; returns whether to try again.
    fn waits_after(&self, trouble: Trouble, deadline: Option<Instant>) -> bool {
        let Some(pause) = trouble.pause else {
            self.voice.say(Matter::GivenUp, trouble.warning);
            if deadline.is_some() {
                self.say_undelivered();
            }
            self.queue.close();
            return false;
        };
        let pause = if deadline.is_some() { pause.min(LAST_PAUSE) } else { pause };
        let is_over = deadline.is_some_and(|deadline| Instant::now() + pause >= deadline);
        if is_over || !trouble.is_passing {
            self.voice.say(Matter::Trouble, trouble.warning);
        }
        match deadline {
            Some(_) if is_over => self.say_undelivered(),
            Some(_) => std::thread::sleep(pause),
            None => self.queue.pause(pause),
        }
        !is_over
    }

    fn say_undelivered(&self) {
        let num = self.queue.undelivered();
        if num > 0 {
            self.voice.say_undelivered(num);
        }
    }
}
