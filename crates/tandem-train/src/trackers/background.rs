//! Thread of a tracker: it delivers what waits in the queue, pauses after a failure, and says once what
//! is wrong, and at the end what it has lost.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::queue::Queue;
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

/// Says what is wrong with a tracker: one sentence, the first, and one of what was lost.
struct Voice {
    key: &'static str,
    grace: Duration,
    warn: Sender<String>,
    has_spoken: AtomicBool,
    has_told_loss: AtomicBool,
}

impl Voice {
    fn say(&self, sentence: String) {
        self.say_first(&self.has_spoken, sentence);
    }

    fn say_undelivered(&self, num: usize) {
        let (key, seconds) = (self.key, self.grace.as_secs_f64());
        let sentence = format!(
            "{key}: {num} records did not reach it, during the run or in {seconds} s after its end (logging.grace_s); \
             metrics.jsonl has all records"
        );
        self.say_first(&self.has_told_loss, sentence);
    }

    fn say_first(&self, has_said: &AtomicBool, sentence: String) {
        if !has_said.swap(true, Ordering::Relaxed) {
            // The receiver is gone when the run is over.
            let _ = self.warn.send(sentence);
        }
    }
}

impl Background {
    pub(super) fn start(mut tracker: Box<dyn Tracker>, grace: Duration, warn: Sender<String>) -> Self {
        let (key, queue) = (tracker.key(), Arc::new(Queue::default()));
        let voice = Arc::new(Voice {
            key,
            grace,
            warn,
            has_spoken: AtomicBool::new(false),
            has_told_loss: AtomicBool::new(false),
        });
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
            voice.say(format!("{key}: no thread can be started ({error}); the run goes on without it"));
        }
        Self { queue, voice, ended }
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
            match (result, self.queue.ended()) {
                (Err(trouble), ended) => {
                    if !self.waits_after(trouble, ended.map(|(_, deadline)| deadline)) {
                        return;
                    }
                }
                (Ok(()), Some((end, deadline))) => {
                    let is_all = hand.is_empty() && self.queue.is_empty();
                    if is_all && let Err(trouble) = tracker.end(&end, deadline) {
                        self.voice.say(trouble.warning);
                    }
                    if is_all || Instant::now() >= deadline {
                        return self.say_undelivered();
                    }
                }
                (Ok(()), None) if hand.is_empty() => self.queue.pause(tracker.interval()),
                (Ok(()), None) => {}
            }
            if hand.is_empty() {
                self.queue.take(&mut hand, LOOK);
            }
        }
    }

    /// Pauses after a failure; returns whether to try again.
    fn waits_after(&self, trouble: Trouble, deadline: Option<Instant>) -> bool {
        let is_late = |pause| deadline.is_some_and(|deadline| Instant::now() + pause >= deadline);
        let is_over = trouble.pause.is_none_or(is_late);
        if is_over || !trouble.is_passing {
            self.voice.say(trouble.warning);
        }
        match trouble.pause {
            None => self.queue.close(),
            Some(_) if is_over => self.say_undelivered(),
            Some(pause) if deadline.is_some() => std::thread::sleep(pause),
            Some(pause) => self.queue.pause(pause),
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
