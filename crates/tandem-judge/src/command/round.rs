//! Bookkeeping of a call's items: waiting, in flight or answered, and which item is to blame for the
//! command's end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::answer::Reply;

/// Items of one call.
pub(super) struct CommandBatch<R> {
    first_id: u64,
    items: Vec<Item<R>>,
    /// Items not asked yet, or asked again after another item's timeout.
    waiting: VecDeque<usize>,
    /// Items in flight when the command ended. Each is asked again alone, so that the next end has
    /// one suspect.
    suspects: VecDeque<usize>,
    /// Unanswered items, oldest first.
    in_flight: VecDeque<usize>,
    /// The oldest item in flight, and since when it is the oldest.
    oldest: Option<(usize, Instant)>,
    num_open: usize,
    asked_again: u64,
}

#[derive(Clone)]
struct Item<R> {
    reply: Option<R>,
    /// Whether the reply is an invalid line attributed to the oldest item. An answer replaces it.
    is_guess: bool,
    /// Whether the command ended while it was in flight.
    is_suspect: bool,
}

impl<R: Reply> CommandBatch<R> {
    /// Creates a round of items numbered from `first_id`.
    pub(super) fn new(first_id: u64, num_items: usize) -> Self {
        Self {
            first_id,
            items: vec![Item { reply: None, is_guess: false, is_suspect: false }; num_items],
            waiting: (0..num_items).collect(),
            suspects: VecDeque::new(),
            in_flight: VecDeque::new(),
            oldest: None,
            num_open: num_items,
            asked_again: 0,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.num_open == 0
    }

    /// Returns the number of repeated items.
    pub(super) fn asked_again(&self) -> u64 {
        self.asked_again
    }

    pub(super) fn into_replies(self) -> Vec<R> {
        self.items.into_iter().filter_map(|item| item.reply).collect()
    }

    /// Returns the next item to ask, if one more may be in flight.
    pub(super) fn next(&mut self, limit: usize) -> Option<usize> {
        let is_alone = self.in_flight.front().is_some_and(|index| self.items[*index].is_suspect);
        let limit = if is_alone || !self.suspects.is_empty() { 1 } else { limit };
        if self.in_flight.len() >= limit {
            return None;
        }
        let index = self.suspects.pop_front().or_else(|| self.waiting.pop_front())?;
        self.in_flight.push_back(index);
        self.look_at_oldest();
        Some(index)
    }

    /// Returns for how long the oldest item in flight has been the oldest.
    pub(super) fn waited(&self) -> Duration {
        self.oldest.map_or(Duration::ZERO, |(_, since)| since.elapsed())
    }

    /// Takes an answer; returns false if no such item was asked. The first answer to an item
    /// counts.
    pub(super) fn answered(&mut self, id: u64, reply: R) -> bool {
        let Some(index) = id.checked_sub(self.first_id) else {
            return true; // An item of an earlier call.
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        match self.items.get_mut(index) {
            Some(item) if item.is_guess => {
                item.is_guess = false;
                item.reply = Some(reply);
            }
            Some(Item { reply: Some(_), .. }) => {}
            _ if self.in_flight.contains(&index) => self.record_reply(index, reply),
            _ => return false,
        }
        true
    }

    /// Records an invalid line, attributed to the oldest item.
    pub(super) fn record_invalid_line(&mut self, why: String) {
        if let Some(index) = self.in_flight.front().copied() {
            self.record_reply(index, R::none(why));
            self.items[index].is_guess = true;
        }
    }

    /// Records the oldest item's timeout, after which the command is killed; the other items are
    /// asked again.
    pub(super) fn record_timeout(&mut self, why: String) {
        if let Some(index) = self.in_flight.front().copied() {
            self.record_reply(index, R::none(why));
        }
        self.asked_again += self.in_flight.len() as u64;
        while let Some(index) = self.in_flight.pop_back() {
            self.waiting.push_front(index);
        }
        self.look_at_oldest();
    }

    /// Records the command's end. An item that was asked alone as a suspect gets no reply.
    pub(super) fn record_exit(&mut self, how: &str) {
        if let Some(index) = self.in_flight.front().copied().filter(|index| self.items[*index].is_suspect) {
            self.record_reply(
                index,
                R::none(format!("the command ended twice while it had this item ({how})")),
            );
        }
        self.asked_again += self.in_flight.len() as u64;
        while let Some(index) = self.in_flight.pop_back() {
            self.items[index].is_suspect = true;
            self.suspects.push_front(index);
        }
        self.look_at_oldest();
    }

    fn record_reply(&mut self, index: usize, reply: R) {
        self.items[index].reply = Some(reply);
        self.in_flight.retain(|other| *other != index);
        self.num_open -= 1;
        self.look_at_oldest();
    }

    fn look_at_oldest(&mut self) {
        let oldest = self.in_flight.front().copied();
        if oldest != self.oldest.map(|(index, _)| index) {
            self.oldest = oldest.map(|index| (index, Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    fn asked(round: &mut CommandBatch<Verdict>, limit: usize) -> Vec<usize> {
        std::iter::from_fn(|| round.next(limit)).collect()
    }

    fn scores(round: CommandBatch<Verdict>) -> Vec<Option<f64>> {
        round.into_replies().into_iter().map(|verdict| verdict.score).collect()
    }

    fn yes() -> Verdict {
        Verdict::new(1.0, "")
    }

    #[test]
    fn no_more_are_in_flight_than_may_be() {
        let mut round = CommandBatch::<Verdict>::new(0, 3);
        assert_eq!(asked(&mut round, 2), [0, 1]);
        assert!(round.answered(1, yes()));
        assert_eq!(asked(&mut round, 2), [2]);
    }

    #[test]
    fn suspects_are_asked_alone_and_only_the_guilty_loses_its_score() {
        let mut round = CommandBatch::<Verdict>::new(10, 4);
        assert_eq!(asked(&mut round, 3), [0, 1, 2]);
        round.record_exit("");
        assert_eq!(asked(&mut round, 3), [0]);
        assert!(round.answered(10, yes()));
        assert_eq!(asked(&mut round, 3), [1]);
        round.record_exit("");
        assert_eq!(asked(&mut round, 3), [2]);
        assert!(round.answered(12, yes()));
        assert_eq!(asked(&mut round, 3), [3]);
        assert!(round.answered(13, yes()));
        assert!(round.is_done());
        assert_eq!(round.asked_again(), 3);
        assert_eq!(scores(round), [Some(1.0), None, Some(1.0), Some(1.0)]);
    }

    #[test]
    fn when_the_oldest_hangs_the_others_are_no_suspects() {
        let mut round = CommandBatch::<Verdict>::new(0, 3);
        asked(&mut round, 3);
        round.record_timeout(String::new());
        round.record_exit("");
        assert_eq!(asked(&mut round, 3), [1, 2]);
    }

    #[test]
    fn an_answer_replaces_a_guess_but_no_other_answer() {
        let mut round = CommandBatch::<Verdict>::new(0, 2);
        asked(&mut round, 2);
        round.record_invalid_line("noise".to_owned());
        assert!(round.answered(0, yes()));
        assert!(round.answered(0, Verdict::new(7.0, "")));
        assert!(!round.is_done());
        round.record_invalid_line("noise".to_owned());
        assert!(round.is_done());
        assert_eq!(scores(round), [Some(1.0), None]);
    }

    #[test]
    fn numbers_of_earlier_calls_are_late_and_unknown_ones_are_no_answers() {
        let mut round = CommandBatch::<Verdict>::new(5, 2);
        assert_eq!(asked(&mut round, 1), [0]);
        assert!(round.answered(4, yes()));
        assert!(!round.answered(6, yes()), "not asked yet");
        assert!(!round.answered(7, yes()));
        assert!(!round.answered(u64::MAX, yes()));
        assert_eq!(asked(&mut round, 1), [] as [usize; 0]);
    }
}
