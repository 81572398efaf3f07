//! Which items of a call wait, are in flight, or have a verdict, and whose fault it is when the command ends.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::Verdict;

/// The items of one call.
pub struct Round {
    first_id: u64,
    items: Vec<Item>,
    /// Not asked, or asked again after another item's time was over.
    waiting: VecDeque<usize>,
    /// In flight when the command ended. Each is asked again alone, so that the next end is the fault of one.
    suspects: VecDeque<usize>,
    /// Asked and not answered, the oldest first.
    in_flight: VecDeque<usize>,
    /// The oldest, and since when it is.
    oldest: Option<(usize, Instant)>,
    num_open: usize,
    asked_again: u64,
}

#[derive(Clone, Default)]
struct Item {
    verdict: Option<Verdict>,
    /// The verdict is that a line came that was no answer, and this item was the oldest. An answer replaces it.
    is_guess: bool,
    /// The command ended while it was in flight.
    is_suspect: bool,
}

impl Round {
    /// A round of items whose numbers begin with `first_id`.
    pub fn new(first_id: u64, num_items: usize) -> Self {
        Self {
            first_id,
            items: vec![Item::default(); num_items],
            waiting: (0..num_items).collect(),
            suspects: VecDeque::new(),
            in_flight: VecDeque::new(),
            oldest: None,
            num_open: num_items,
            asked_again: 0,
        }
    }

    /// Whether each item has a verdict.
    pub fn is_done(&self) -> bool {
        self.num_open == 0
    }

    /// How many items were asked once more.
    pub fn asked_again(&self) -> u64 {
        self.asked_again
    }

    /// The verdicts, once it is done.
    pub fn into_verdicts(self) -> Vec<Verdict> {
        self.items.into_iter().filter_map(|item| item.verdict).collect()
    }

    /// The item to be asked next, if there may be one more in flight.
    pub fn next(&mut self, limit: usize) -> Option<usize> {
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

    /// How long the oldest item in flight has been the oldest.
    pub fn waited(&self) -> Duration {
        self.oldest.map_or(Duration::ZERO, |(_, since)| since.elapsed())
    }

    /// Takes an answer. False if it is none of an item that was asked. The first answer to an item stands.
    pub fn answered(&mut self, id: u64, verdict: Verdict) -> bool {
        let Some(index) = id.checked_sub(self.first_id) else {
            return true; // An item of an earlier call.
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        match self.items.get_mut(index) {
            Some(item) if item.is_guess => {
                item.is_guess = false;
                item.verdict = Some(verdict);
            }
            Some(Item { verdict: Some(_), .. }) => {}
            _ if self.in_flight.contains(&index) => self.settle(index, verdict),
            _ => return false,
        }
        true
    }

    /// A line came that is no answer: the oldest item's, most likely.
    pub fn garbage(&mut self, why: String) {
        if let Some(index) = self.in_flight.front().copied() {
            self.settle(index, Verdict::none(why));
            self.items[index].is_guess = true;
        }
    }

    /// The oldest item's time is over, and the command will be killed for it. The others are asked again.
    pub fn hung(&mut self, why: String) {
        if let Some(index) = self.in_flight.front().copied() {
            self.settle(index, Verdict::none(why));
        }
        self.asked_again += self.in_flight.len() as u64;
        while let Some(index) = self.in_flight.pop_back() {
            self.waiting.push_front(index);
        }
        self.look_at_oldest();
    }

    /// The command ended. Which item was it? One that was asked alone because the command had ended before gets no score.
    pub fn died(&mut self, how: &str) {
        if let Some(index) = self.in_flight.front().copied().filter(|index| self.items[*index].is_suspect) {
            self.settle(
                index,
                Verdict::none(format!("the command ended twice while it had this item ({how})")),
            );
        }
        self.asked_again += self.in_flight.len() as u64;
        while let Some(index) = self.in_flight.pop_back() {
            self.items[index].is_suspect = true;
            self.suspects.push_front(index);
        }
        self.look_at_oldest();
    }

    fn settle(&mut self, index: usize, verdict: Verdict) {
        self.items[index].verdict = Some(verdict);
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

    fn asked(round: &mut Round, limit: usize) -> Vec<usize> {
        std::iter::from_fn(|| round.next(limit)).collect()
    }

    fn scores(round: Round) -> Vec<Option<f64>> {
        round.into_verdicts().into_iter().map(|verdict| verdict.score).collect()
    }

    fn yes() -> Verdict {
        Verdict::of(1.0, "")
    }

    #[test]
    fn no_more_are_in_flight_than_may_be() {
        let mut round = Round::new(0, 3);
        assert_eq!(asked(&mut round, 2), [0, 1]);
        assert!(round.answered(1, yes()));
        assert_eq!(asked(&mut round, 2), [2]);
    }

    #[test]
    fn suspects_are_asked_alone_and_only_the_guilty_loses_its_score() {
        let mut round = Round::new(10, 4);
        assert_eq!(asked(&mut round, 3), [0, 1, 2]);
        round.died("");
        assert_eq!(asked(&mut round, 3), [0]);
        assert!(round.answered(10, yes()));
        assert_eq!(asked(&mut round, 3), [1]);
        round.died("");
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
        let mut round = Round::new(0, 3);
        asked(&mut round, 3);
        round.hung(String::new());
        round.died("");
        assert_eq!(asked(&mut round, 3), [1, 2]);
    }

    #[test]
    fn an_answer_replaces_a_guess_but_no_other_answer() {
        let mut round = Round::new(0, 2);
        asked(&mut round, 2);
        round.garbage("noise".to_owned());
        assert!(round.answered(0, yes()));
        assert!(round.answered(0, Verdict::of(7.0, "")));
        assert!(!round.is_done());
        round.garbage("noise".to_owned());
        assert!(round.is_done());
        assert_eq!(scores(round), [Some(1.0), None]);
    }

    #[test]
    fn numbers_of_earlier_calls_are_late_and_unknown_ones_are_no_answers() {
        let mut round = Round::new(5, 2);
        assert_eq!(asked(&mut round, 1), [0]);
        assert!(round.answered(4, yes()));
        assert!(!round.answered(6, yes()), "not asked yet");
        assert!(!round.answered(7, yes()));
        assert!(!round.answered(u64::MAX, yes()));
        assert_eq!(asked(&mut round, 1), [] as [usize; 0]);
    }
}
