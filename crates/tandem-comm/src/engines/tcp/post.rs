//! Sending and receiving messages.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::Fault;
use super::engine::left;
use super::handshake::Purpose;
use super::mail::Inbox;
use super::member::{Member, ON_ITS_WAY};
use super::node::Node;
use super::wire::{patience, sleep};
use crate::error::CommError;

/// Incoming messages of a rank. The outgoing ones are the poll thread's too.
#[derive(Default)]
pub(super) struct Post {
    inboxes: Vec<Inbox>,
}

impl Post {
    /// Copies a message, to be sent from now on.
    pub(super) fn send(
        &mut self,
        node: &Node,
        member: &std::sync::Arc<Member>,
        to: usize,
        data: &[u8],
    ) -> Result<(), Fault> {
        let (outbox, shared) = (&member.outbox, &node.shared);
        if !outbox.is_connected(to) {
            let connection = shared.addresses.connect(&shared.token, member, to, Purpose::Messages)?;
            outbox.connect(connection.clone());
            shared.watch(connection, member);
        }
        wait_until(member, || outbox.has_room(data.len()))?;
        if member.is_gone(to) {
            return Err(Fault::Gone(to));
        }
        if outbox.send(to, data).map_err(|_| Fault::Gone(to))? {
            shared.send_later();
        }
        Ok(())
    }

    /// Waits until all messages are sent.
    pub(super) fn flush(&mut self, node: &Node, member: &Member) -> Result<(), Fault> {
        if member.outbox.is_empty() {
            return Ok(());
        }
        node.shared.send_later();
        wait_until(member, || member.outbox.is_empty())
    }

    /// Receives a rank's next message.
    pub(super) fn recv(&mut self, member: &Member, from: usize, data: &mut [u8]) -> Result<(), Fault> {
        let mut wait = Wait::begin(member);
        // Where it fails, the others still have to find that this rank waits.
        self.receive(&mut wait, from, data)?;
        wait.progressed();
        Ok(())
    }

    fn receive(&mut self, wait: &mut Wait<'_>, from: usize, data: &mut [u8]) -> Result<(), Fault> {
        let member = wait.member;
        let inbox = loop {
            if let Some(i) = self.inbox(member, from)? {
                break &mut self.inboxes[i];
            }
            wait.rest(None, from)?;
        };
        let gone = |_| Fault::Gone(from);
        let len = loop {
            match inbox.next_len().map_err(gone)? {
                Some(len) => break len,
                None => wait.rest(Some(inbox), from)?,
            }
        };
        if len != data.len() {
            return Err(Fault::Other(CommError::Mismatch {
                rank: member.rank,
                call: call_of_recv(data.len(), from),
                other_rank: from,
                other_call: format!("send of {len} bytes"),
            }));
        }
        inbox.accept();
        let mut arrived = 0;
        while arrived < len {
            match inbox.connection.socket.recv(&mut data[arrived..]).map_err(gone)? {
                0 => wait.rest(Some(inbox), from)?,
                read => {
                    arrived += read;
                    wait.progressed();
                }
            }
        }
        Ok(())
    }

    fn inbox(&mut self, member: &Member, from: usize) -> Result<Option<usize>, Fault> {
        let find = |inboxes: &[Inbox]| inboxes.iter().position(|inbox| inbox.connection.peer == from);
        if let Some(i) = find(&self.inboxes) {
            return Ok(Some(i));
        }
        let was_silent = member.is_silent(from);
        member.take_arrivals(Purpose::Messages, |connection| self.inboxes.push(Inbox::new(connection)));
        match find(&self.inboxes) {
            None if was_silent => Err(Fault::Gone(from)),
            found => Ok(found),
        }
    }
}

/// Call that a message's receiver makes, in words.
pub(super) fn call_of_recv(len: usize, from: usize) -> String {
    format!("recv of {len} bytes from rank {from}")
}

/// Waits until the outbox satisfies `done`; the deadline counts from its last progress.
fn wait_until(member: &Member, done: impl Fn() -> bool) -> Result<(), Fault> {
    let (mut wait, mut sent) = (Wait::begin(member), member.outbox.num_sent());
    while !done() {
        sleep(member, [None, None], wait.pause())?;
        let now = member.outbox.num_sent();
        if now != sent {
            wait.progressed();
            sent = now;
        } else {
            wait.look(member.outbox.awaited().unwrap_or(member.rank))?;
        }
    }
    wait.progressed();
    Ok(())
}

/// Wait of a rank for another one's message, or for room for its own.
struct Wait<'a> {
    member: &'a Member,
    /// Time of the last progress.
    since: Instant,
    /// Whether the store says that this rank waits.
    is_said: bool,
}

impl<'a> Wait<'a> {
    fn begin(member: &'a Member) -> Self {
        Self { member, since: Instant::now(), is_said: false }
    }

    fn progressed(&mut self) {
        self.since = Instant::now();
        if std::mem::take(&mut self.is_said) {
            self.member.say_met();
        }
    }

    /// Returns the time until the next [`Wait::look`].
    fn pause(&self) -> Duration {
        let waited = self.since.elapsed();
        let limit = if self.is_said { self.member.deadline } else { patience(self.member.deadline) };
        left(limit, waited)
    }

    /// Says after a while that this rank waits for `peer`, and fails at the deadline.
    fn look(&mut self, peer: usize) -> Result<(), Fault> {
        let waited = self.since.elapsed();
        if waited >= self.member.deadline {
            return Err(Fault::Late(peer));
        }
        if !self.is_said && waited >= patience(self.member.deadline) {
            // Without the store the others know less, and nothing is said again.
            self.member.say_waiting_for(peer);
            self.is_said = true;
        }
        Ok(())
    }

    /// Waits until bytes or connections may have arrived.
    fn rest(&mut self, inbox: Option<&Inbox>, from: usize) -> Result<(), Fault> {
        let fd = inbox.map(|inbox| (inbox.as_fd(), PollFlags::IN));
        // A rank that has left is waited for a little, and nothing wakes this one then.
        let pause = if inbox.is_none() { self.pause().min(ON_ITS_WAY / 2) } else { self.pause() };
        sleep(self.member, [fd, None], pause)?;
        self.look(from)
    }
}
