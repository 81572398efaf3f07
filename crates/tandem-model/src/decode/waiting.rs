//! Completions that wait for room, in turns over their clients.

use std::collections::VecDeque;
use std::ops::Range;

/// Queue of completions. Each completion that leaves it moves its client behind all other clients, so that
/// none waits for more than one completion of each of them.
#[derive(Default)]
pub(super) struct Waiting(VecDeque<Client>);

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

    /// Returns the completion whose turn it is: request and number.
    pub(super) fn front(&self) -> Option<(usize, usize)> {
        let (request, answers) = self.0.front()?.requests.front()?;
        Some((*request, answers.start))
    }

    /// Removes the completion whose turn it is. The next turn is the next client's.
    pub(super) fn pop_front(&mut self) {
        let Some(mut client) = self.0.pop_front() else { return };
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
        while let Some(next) = waiting.front() {
            order.push(next);
            waiting.pop_front();
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
        waiting.pop_front();
        waiting.remove(1);
        assert_eq!(waiting.front(), Some((2, 0)));
        waiting.remove(2);
        assert_eq!(drain(waiting), [(0, 1)]);
    }
}
