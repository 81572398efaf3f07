//! Completions that wait for room, in turns over their clients.

use std::collections::VecDeque;
use std::ops::Range;

/// Queue of completions. Each completion that leaves it moves its client behind all other clients, so that
/// none waits for more than one completion of each of them.
#[derive(Default)]
pub(super) struct Waiting(VecDeque<Client>);

/// A completion whose turn it is.
pub(super) struct Turn {
    /// Place of its client.
    client: usize,
    pub(super) request: usize,
    /// Number of the completion.
    pub(super) answer: usize,
}

struct Client {
    number: u64,
    /// Requests in order, with the numbers of their completions that wait; none is empty.
    requests: VecDeque<(usize, Range<usize>)>,
}

impl Waiting {
    /// Queues the completions of a request behind those of its client.
    pub(super) fn push(&mut self, client: u64, request: usize, num_answers: usize) {
        let requests = match self.0.iter_mut().find(|known| known.number == client) {
            Some(known) => &mut known.requests,
            None => {
                self.0.push_back(Client { number: client, requests: VecDeque::new() });
                &mut self.0.back_mut().expect("just added").requests
            }
        };
        requests.push_back((request, 0..num_answers));
    }

    /// Returns the completion whose turn it is, among those of requests that may begin.
    pub(super) fn next(&self, may_begin: impl Fn(usize) -> bool) -> Option<Turn> {
        let turn = |(client, waiting): (usize, &Client)| {
            let (request, answers) = waiting.requests.front()?;
            Some(Turn { client, request: *request, answer: answers.start })
        };
        self.0.iter().enumerate().filter_map(turn).find(|turn| may_begin(turn.request))
    }

    /// Removes a completion whose turn it is. The next turn is the next client's.
    pub(super) fn take(&mut self, turn: &Turn) {
        let Some(mut client) = self.0.remove(turn.client) else { return };
        if let Some((_, answers)) = client.requests.front_mut() {
            answers.start += 1;
            if answers.start == answers.end {
                client.requests.pop_front();
            }
        }
        if !client.requests.is_empty() {
            self.0.push_back(client);
        }
    }

    /// Removes the completions of a request.
    pub(super) fn remove(&mut self, request: usize) {
        for client in &mut self.0 {
            client.requests.retain(|(number, _)| *number != request);
        }
        self.0.retain(|client| !client.requests.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(mut waiting: Waiting) -> Vec<(usize, usize)> {
        let mut order = Vec::new();
        while let Some(turn) = waiting.next(|_| true) {
            order.push((turn.request, turn.answer));
            waiting.take(&turn);
        }
        order
    }

    #[test]
    fn clients_take_turns() {
        let mut waiting = Waiting::default();
        waiting.push(7, 0, 4);
        waiting.push(8, 1, 1);
        waiting.push(9, 2, 2);
        waiting.push(8, 3, 1);
        assert_eq!(
            drain(waiting),
            [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (2, 1), (0, 2), (0, 3)],
            "one completion of each client in turn"
        );
    }

    #[test]
    fn clients_that_cannot_begin_are_passed_over_and_keep_their_turn() {
        let mut waiting = Waiting::default();
        waiting.push(7, 0, 2);
        waiting.push(8, 1, 2);
        let turn = waiting.next(|request| request != 0).unwrap();
        assert_eq!((turn.request, turn.answer), (1, 0));
        waiting.take(&turn);
        assert!(waiting.next(|request| request > 1).is_none());
        assert_eq!(drain(waiting), [(0, 0), (1, 1), (0, 1)]);
    }

    #[test]
    fn requests_of_one_client_keep_their_order() {
        let mut waiting = Waiting::default();
        waiting.push(0, 0, 2);
        waiting.push(0, 1, 1);
        assert_eq!(drain(waiting), [(0, 0), (0, 1), (1, 0)]);
    }

    #[test]
    fn a_removed_request_has_no_turn() {
        let mut waiting = Waiting::default();
        waiting.push(1, 0, 2);
        waiting.push(2, 1, 2);
        waiting.push(2, 2, 1);
        let next = |waiting: &Waiting| waiting.next(|_| true).unwrap();
        waiting.take(&next(&waiting));
        waiting.remove(1);
        assert_eq!(next(&waiting).request, 2);
        waiting.remove(2);
        assert_eq!(drain(waiting), [(0, 1)]);
    }
}
