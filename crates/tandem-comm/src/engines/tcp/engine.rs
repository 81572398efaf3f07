//! TCP engine: one rank's calls.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Fault;
use super::flow::PIECE;
use super::member::Member;
use super::node::Node;
use super::wire::Wire;
use crate::collective::call::{Call, fnv1a};
use crate::collective::engine::Engine;
use crate::error::{CommError, Result};

pub(super) struct Tcp {
    pub(super) wire: Wire,
    pub(super) post: super::post::Post,
    pub(super) buffers: Buffers,
}

/// Buffers that calls reuse: a call like an earlier one allocates nothing.
#[derive(Default)]
pub(super) struct Buffers {
    /// Byte ranges of the ranks' parts.
    pub(super) parts: Vec<Range<usize>>,
    /// Memory for other parts, while those of the caller are kept.
    pub(super) spare: Vec<Range<usize>>,
    pub(super) outgoing: Vec<Range<usize>>,
    pub(super) incoming: Vec<Range<usize>>,
    /// Elements that arrive through a socket and are reduced.
    pub(super) room: Vec<u64>,
    /// All ranks' buffers of a small reduction.
    pub(super) gathered: Vec<u64>,
}

impl Tcp {
    pub(super) fn new(node: Arc<Node>, member: Arc<Member>) -> Self {
        let buffers = Buffers { room: vec![0; PIECE / 8], ..Buffers::default() };
        Self { wire: Wire::new(node, member), post: super::post::Post::default(), buffers }
    }

    pub(super) fn member(&self) -> &Arc<Member> {
        &self.wire.member
    }

    fn check_alive(&self) -> Result<()> {
        let member = self.member();
        if !member.must_end() || member.calls_differ() {
            return Ok(());
        }
        member.failure().map_or(Ok(()), Err)
    }

    /// Runs a collective. `detail` are arguments that the call does not have.
    fn collective<T>(
        &mut self,
        call: Call,
        detail: u64,
        work: impl FnOnce(&mut Self) -> std::result::Result<T, Fault>,
    ) -> Result<T> {
        self.check_alive()?;
        self.wire.chain.push(call, detail);
        if self.member().calls_differ() {
            return Err(self.verdict());
        }
        self.wire.begin();
        let done = self.wire.check_probes().and_then(|()| work(self));
        let done = done.map_err(|fault| self.fault(&call, fault));
        self.wire.end();
        done
    }

    /// Fails the group.
    fn fault(&mut self, call: &dyn Display, fault: Fault) -> CommError {
        let member = self.member();
        match fault {
            Fault::Gone(peer) => {
                member.lose(peer);
                self.verdict()
            }
            Fault::Over => self.verdict(),
            Fault::Different => member.compare_calls(&self.wire.chain.report()),
            // A hanging rank blocks its neighbours one after another: the links alone do not tell
            // which rank hangs.
            Fault::Late(peer) => {
                let missing = member.hanging().unwrap_or(vec![peer]);
                member.late(call.to_string(), missing)
            }
            Fault::Other(error) => member.fail(error),
        }
    }

    /// Returns why calls end.
    fn verdict(&self) -> CommError {
        let member = self.member();
        match member.failure() {
            Some(failure) => failure,
            None if member.calls_differ() => member.compare_calls(&self.wire.chain.report()),
            None => member.fail(CommError::PeerLost { rank: member.first_gone().unwrap_or(member.rank) }),
        }
    }

    /// Fails the group because of a message.
    fn message_fault(&mut self, call: &str, fault: Fault) -> CommError {
        match fault {
            Fault::Late(peer) => self.member().late(call.to_owned(), vec![peer]),
            fault => self.fault(&call, fault),
        }
    }

    /// Creates the engine of a subgroup: no rank needs to wait for another.
    fn part(&self, color: u64, members: &[usize]) -> Result<Box<dyn Engine>> {
        let own = self.member();
        let path = format!("{}split-{}-{color}/", own.path, self.wire.chain.number());
        let rank = members.iter().filter(|&&member| member < own.rank).count();
        let of_job = members.iter().map(|&member| own.members[member]).collect();
        let part = own.part(path, rank, of_job).map_err(|error| own.fail(error))?;
        Ok(Box::new(Self::new(self.wire.node.clone(), part)))
    }

    /// Sends what is left, and tells the others that this rank leaves in order.
    fn leave(&mut self) {
        let member = self.member().clone();
        if self.post.flush(&self.wire.node, &member).is_ok() {
            member.leave();
        }
    }
}

impl Engine for Tcp {
    fn rank(&self) -> usize {
        self.member().rank
    }

    fn size(&self) -> usize {
        self.member().size()
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        self.collective(call, 0, |this| this.reduce_to_all(&call, data))
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        self.collective(call, 0, |this| {
            this.buffers.set_parts(&call, counts);
            this.reduce_to_parts(&call, data)
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        self.collective(call, 0, |this| {
            this.buffers.set_parts(&call, counts);
            this.gather(call.kind, data)
        })
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        self.collective(call, 0, |this| this.send_to_all(call.kind, root, data))
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.collective(call, 0, |this| {
            this.buffers.set_even_parts(0, 1, this.size());
            this.gather(call.kind, &mut [])
        })
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        self.check_alive()?;
        let sent = self.post.send(&self.wire.node, &self.wire.member, to, data);
        sent.map_err(|fault| self.message_fault(&format!("send of {} bytes to rank {to}", data.len()), fault))
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        self.check_alive()?;
        let received = self.post.recv(&self.wire.member, from, data);
        received.map_err(|fault| self.message_fault(&super::post::call_of_recv(data.len(), from), fault))
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        let (rank, size) = (self.rank(), self.size());
        let mut colors = vec![0u64; size];
        colors[rank] = color as u64;
        self.collective(call, 0, |this| {
            this.buffers.set_even_parts(size, 8, size);
            this.gather(call.kind, bytemuck::cast_slice_mut(&mut colors))
        })?;
        let members: Vec<_> = (0..size).filter(|&rank| colors[rank] == color as u64).collect();
        self.part(color as u64, &members)
    }

    /// Needs no message: all ranks know all colours, and the next call compares them.
    fn split_by(&mut self, call: Call, colors: &[usize]) -> Result<Box<dyn Engine>> {
        let color = colors[self.rank()];
        let detail = fnv1a(colors.iter().map(|&color| color as u64));
        self.collective(call, detail, |_| Ok(()))?;
        let members: Vec<_> = (0..colors.len()).filter(|&rank| colors[rank] == color).collect();
        self.part(color as u64, &members)
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.rank();
        self.member().fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    /// The chain goes out with the next message.
    fn note(&mut self, call: Call) -> Result<()> {
        self.collective(call, 0, |_| Ok(()))
    }

    fn look_around(&mut self, what: &dyn Display) -> Result<()> {
        self.check()?;
        self.wire.look_around(None).map_err(|fault| self.fault(what, fault))
    }

    fn at_deadline(&mut self, what: &dyn Display) -> Result<()> {
        self.look_around(what)?;
        match self.member().hanging() {
            Some(missing) => Err(self.member().late(what.to_string(), missing)),
            None => Ok(()),
        }
    }

    fn end_noted(&mut self) {
        self.wire.end();
    }

    fn check(&mut self) -> Result<()> {
        self.check_alive()?;
        match self.member().first_gone() {
            Some(rank) => Err(self.fault(&"check", Fault::Gone(rank))),
            None => Ok(()),
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let member = self.member().clone();
        // A rank that panics, or of which another group failed, does not wait: the others should
        // not wait for it.
        let in_order =
            !member.must_end() && member.abort_flag.verdict().is_none() && !std::thread::panicking();
        if in_order {
            self.leave();
        } else {
            member.close();
        }
        self.wire.node.shared.leave(member.id);
    }
}

/// Time to wait for at a deadline from which `waited` has passed.
pub(super) fn left(deadline: Duration, waited: Duration) -> Duration {
    deadline.saturating_sub(waited) + Duration::from_millis(1)
}
