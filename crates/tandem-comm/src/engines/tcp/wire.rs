//! Links of one rank in one group, and the waiting on them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Fault;
use super::handshake::Purpose;
use super::header::{Frame, Header};
use super::link::{InLink, OutLink};
use super::member::Member;
use super::memory::Side;
use super::node::Node;
use super::schedule::after;
use crate::collective::call_chain::{CallChain, Comparison};

/// Time in a call without progress, after which a rank shows the others which call it is in.
const STUCK: Duration = Duration::from_secs(1);
/// Interval of looking at the other ranks' calls afterwards.
const LOOK: Duration = Duration::from_millis(500);
/// Number of looks at shared memory before a rank sleeps, and of those that let others run.
const SPINS: u32 = 4000;
const SPINS_BETWEEN_YIELDS: u32 = 100;

pub(super) struct Wire {
    pub(super) member: Arc<Member>,
    // Dropped after the member: the last group of the process ends the thread.
    pub(super) node: Arc<Node>,
    pub(super) chain: CallChain,
    pub(super) outs: Vec<OutLink>,
    pub(super) ins: Vec<InLink>,
    /// Time of the last progress in this call.
    pub(super) since: Instant,
    /// Whether the store knows that this rank waits.
    is_stuck: bool,
}

impl Wire {
    pub(super) fn new(node: Arc<Node>, member: Arc<Member>) -> Self {
        node.shared.enter(&member);
        let (outs, ins) = (Vec::new(), Vec::new());
        Self { member, node, chain: CallChain::new(), outs, ins, since: Instant::now(), is_stuck: false }
    }

    /// Begins to wait for other ranks.
    pub(super) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Ends a call.
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.is_stuck) {
            self.member.say_moving();
        }
    }

    /// Returns the place of the link to a rank, connected if necessary.
    pub(super) fn out_link(&mut self, peer: usize) -> Result<usize, Fault> {
        if self.member.is_gone(peer) {
            return Err(Fault::Gone(peer));
        }
        if let Some(i) = self.outs.iter().position(|link| link.connection.peer == peer) {
            return Ok(i);
        }
        let shared = &self.node.shared;
        let connection = shared.addresses.connect(&shared.token, &self.member, peer, Purpose::Collectives)?;
        shared.watch(connection.clone(), &self.member);
        self.outs.push(OutLink::new(connection));
        Ok(self.outs.len() - 1)
    }

    /// Returns the place of the link from a rank, if that rank has connected.
    pub(super) fn in_link(&mut self, peer: usize) -> Result<Option<usize>, Fault> {
        let find = |ins: &[InLink]| ins.iter().position(|link| link.connection.peer == peer);
        if let Some(i) = find(&self.ins) {
            return Ok(Some(i));
        }
        let was_silent = self.member.is_silent(peer);
        self.take_arrivals();
        match find(&self.ins) {
            None if was_silent => Err(Fault::Gone(peer)),
            found => Ok(found),
        }
    }

    fn take_arrivals(&mut self) {
        let ins = &mut self.ins;
        self.member.take_arrivals(Purpose::Collectives, |connection| ins.push(InLink::new(connection)));
    }

    /// Returns whether the next frame of a link has come, of the same call as this rank's.
    pub(super) fn has_frame(&mut self, i: usize) -> Result<bool, Fault> {
        let link = &mut self.ins[i];
        loop {
            let peer = link.connection.peer;
            let Some(header) = link.next_header().map_err(|_| Fault::Gone(peer))? else { return Ok(false) };
            match (header.frame, self.chain.compare(&header.position)) {
                (Frame::Farewell, _) => return Err(Fault::Gone(peer)),
                (Frame::Probe, Comparison::Same | Comparison::Earlier) => link.accept(),
                (Frame::Probe, Comparison::Later) => {
                    link.probe = Some(header);
                    link.accept();
                }
                (Frame::Call, Comparison::Same) => {
                    link.accept();
                    return Ok(true);
                }
                // A frame of an earlier call that this rank did not expect, or none of this call.
                _ => return Err(Fault::Different),
            }
        }
    }

    /// Sleeps until a link may move: `input` receives, `output` sends and was full. `awaited` is
    /// the rank to name at the deadline.
    pub(super) fn wait(
        &mut self,
        input: Option<usize>,
        output: Option<usize>,
        awaited: usize,
    ) -> Result<(), Fault> {
        for spin in 1..=SPINS {
            if self.is_ready(input, output) {
                return Ok(());
            }
            // A rank on the same core may be the one that this rank waits for.
            if spin % SPINS_BETWEEN_YIELDS == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            if self.needs_poll(input, output) {
                break;
            }
        }
        self.announce_sleep(input, output);
        if self.is_ready(input, output) {
            return Ok(());
        }
        let member = &self.member;
        let input_fd = input.map(|i| (&*self.ins[i].connection, PollFlags::IN));
        let output_fd = output.map(|i| {
            let connection = &*self.outs[i].connection;
            let flags = if connection.memory.is_some() { PollFlags::IN } else { PollFlags::OUT };
            (connection, flags)
        });
        let fds = [input_fd, output_fd]
            .map(|fd| fd.map(|(connection, flags)| (std::os::fd::AsFd::as_fd(connection), flags)));
        sleep(member, fds, self.timeout())?;
        if let Some(i) = input {
            self.ins[i].clear_wakes();
        }
        if let Some(i) = output {
            let peer = self.outs[i].connection.peer;
            self.outs[i].clear_wakes().map_err(|_| Fault::Gone(peer))?;
            if self.member.is_gone(peer) {
                return Err(Fault::Gone(peer));
            }
        }
        if self.since.elapsed() >= self.member.deadline {
            return Err(Fault::Late(awaited));
        }
        if self.since.elapsed() >= patience(self.member.deadline) {
            self.look_around(input)?;
        }
        Ok(())
    }

    fn is_ready(&self, input: Option<usize>, output: Option<usize>) -> bool {
        input.is_some_and(|i| self.ins[i].is_ready()) || output.is_some_and(|i| self.outs[i].is_ready())
    }

    /// Returns whether only a poll tells when links move.
    fn needs_poll(&self, input: Option<usize>, output: Option<usize>) -> bool {
        let through_memory = |memory: bool| !memory;
        input.is_some_and(|i| through_memory(self.ins[i].connection.memory.is_some()))
            || output.is_some_and(|i| through_memory(self.outs[i].connection.memory.is_some()))
            || input.is_none() && output.is_none()
    }

    fn announce_sleep(&self, input: Option<usize>, output: Option<usize>) {
        if let Some(memory) = input.and_then(|i| self.ins[i].connection.memory.as_ref()) {
            memory.announce_sleep(Side::Reader);
        }
        if let Some(memory) = output.and_then(|i| self.outs[i].connection.memory.as_ref()) {
            memory.announce_sleep(Side::Writer);
        }
    }

    fn timeout(&self) -> Duration {
        let (waited, deadline) = (self.since.elapsed(), self.member.deadline);
        let patience = patience(deadline);
        let next = if waited < patience { patience } else { deadline.min(waited + LOOK) };
        // A poll's clock may be a little early.
        next.saturating_sub(waited) + Duration::from_millis(1)
    }

    /// Shows this rank's call to the next rank, and compares those that others show. Links that the
    /// call does not use are read here only.
    pub(super) fn look_around(&mut self, used: Option<usize>) -> Result<(), Fault> {
        if !self.is_stuck {
            self.is_stuck = self.member.say_stuck();
            self.probe();
        }
        self.take_arrivals();
        for i in 0..self.ins.len() {
            if used != Some(i) {
                self.look(i)?;
            }
        }
        Ok(())
    }

    /// Compares the calls that arrive at a link.
    fn look(&mut self, i: usize) -> Result<(), Fault> {
        let link = &mut self.ins[i];
        // A link that has ended is found where it is needed, or by the poll thread.
        while let Ok(Some(header)) = link.next_header() {
            if header.frame == Frame::Farewell {
                break;
            }
            let comparison = self.chain.compare(&header.position);
            match (header.frame, comparison) {
                (_, Comparison::Different) => return Err(Fault::Different),
                (Frame::Probe, comparison) => {
                    link.probe = Some(header).filter(|_| comparison == Comparison::Later);
                    link.accept();
                }
                // This call does not read the link, so the frame belongs to a later one.
                (_, Comparison::Later) => break,
                _ => break,
            }
        }
        Ok(())
    }

    /// Compares probes that came before this rank made its call.
    pub(super) fn check_probes(&mut self) -> Result<(), Fault> {
        for link in &mut self.ins {
            let Some(probe) = link.probe else { continue };
            match self.chain.compare(&probe.position) {
                Comparison::Different => return Err(Fault::Different),
                Comparison::Later => {}
                Comparison::Same | Comparison::Earlier => link.probe = None,
            }
        }
        Ok(())
    }

    /// Shows this rank's call to the next rank. A rank that has made all of its calls and left needs no
    /// probe; one that is lost is found where it is needed.
    fn probe(&mut self) {
        let (rank, size) = (self.member.rank, self.member.size());
        if size == 1 {
            return;
        }
        let Ok(i) = self.out_link(after(rank, 1, size)) else { return };
        let (link, number) = (&mut self.outs[i], self.chain.number());
        // The frame of this call shows as much.
        if link.call < number && link.is_header_sent() {
            let header = Header { frame: Frame::Probe, position: self.chain.position() };
            let before = link.call;
            link.begin(&header);
            let _ = link.write(&[], 1);
            link.call = before;
        }
    }
}

/// Returns the time without progress after which a rank counts as stuck.
pub(super) fn patience(deadline: Duration) -> Duration {
    STUCK.min(deadline / 4)
}

/// Sleeps until a descriptor is ready, another thread wakes this one, or the time is over. Fails
/// if calls must end.
pub(super) fn sleep(
    member: &Member,
    fds: [Option<(BorrowedFd<'_>, PollFlags)>; 2],
    timeout: Duration,
) -> Result<(), Fault> {
    let none = || PollFd::new(&member.wake, PollFlags::IN);
    let mut polled = [none(), none(), none()];
    for (place, (fd, flags)) in polled[1..].iter_mut().zip(fds.into_iter().flatten()) {
        *place = PollFd::from_borrowed_fd(fd, flags);
    }
    let num = 1 + fds.iter().flatten().count();
    let timeout = Timespec::try_from(timeout).ok();
    // After an interruption nothing is ready, and the caller looks again.
    let _ = poll(&mut polled[..num], timeout.as_ref());
    if !polled[0].revents().is_empty() {
        member.wake.clear();
    }
    if member.must_end() { Err(Fault::Over) } else { Ok(()) }
}
