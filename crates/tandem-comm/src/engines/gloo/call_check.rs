//! Every rank tells the first what it is about to call, and the first tells all whether that is the same.
//!
//! The first rank hears all others itself, so it knows who is missing and whose connection broke; the others wait for its
//! word alone. Everybody saying it to everybody would tell each rank as much directly, with `N·(N−1)` packets for
//! `2·(N−1)`: where ranks have less than two cores each, Gloo's threads then get in each other's way for milliseconds.
//!
//! Room for the next word is offered to the peers before this call is answered. Gloo sends only where somebody is ready to
//! receive, so a word that finds the room takes one packet.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mesh::{Fault, Mesh, Slot, Transfer};

/// At a deadline, how long each of the others may take to show that it has come.
const LOOK: Duration = Duration::from_millis(10);
/// Bytes of a word.
const WIDTH: usize = 8;
/// The first rank's answers.
const SAME: u64 = 1;
const DIFFERENT: u64 = 2;

/// How a roll call ended.
pub(super) enum Answer {
    /// All have come to the same call.
    Same,
    /// All have come, but not to the same call. All ranks get this answer.
    Different,
    /// These have not come in time.
    Missing(Vec<usize>),
}

/// A word on its way, which must stay where it is.
struct Telling<'a> {
    transfer: Transfer,
    _word: PhantomData<&'a u64>,
}

impl Telling<'_> {
    fn wait(self, limit: Duration) -> Result<(), Fault> {
        self.transfer.wait(limit)
    }
}

/// One rank's part in the roll calls of a group.
pub(super) struct RollCall {
    // Before what they write to: fields are dropped in this order.
    receiving: Vec<Transfer>,
    /// On the first rank every rank's fingerprint; on the others its answer comes to the first place.
    words: Vec<u64>,
    mesh: Arc<Mesh>,
    rank: usize,
}

impl RollCall {
    pub(super) fn new(mesh: &Arc<Mesh>, rank: usize, size: usize) -> Result<Self, Fault> {
        let mut this = Self { receiving: Vec::new(), words: vec![0; size], mesh: mesh.clone(), rank };
        this.offer()?;
        Ok(this)
    }

    /// Says `own`, the fingerprint of a call. Whoever comes to the first rank later than `deadline` after it is missing; the
    /// others wait twice as long, for it may itself come just before their deadline and wait as long as they did. They call
    /// `long` at the half.
    pub(super) fn take(
        &mut self,
        own: u64,
        deadline: Duration,
        long: impl FnOnce(),
    ) -> Result<Answer, Fault> {
        if self.rank == 0 { self.lead(own, deadline) } else { self.follow(own, deadline, long) }
    }

    /// Fails if a connection has broken on which a word is to come; waits for nobody.
    pub(super) fn look(&self) -> Result<(), Fault> {
        for transfer in &self.receiving {
            match transfer.wait(Duration::ZERO) {
                Err(Fault { late: true, .. }) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn lead(&mut self, own: u64, deadline: Duration) -> Result<Answer, Fault> {
        let until = Instant::now() + deadline;
        let mut missing = Vec::new();
        for transfer in self.receiving.drain(..) {
            let (peer, left) = (transfer.peer(), until.saturating_duration_since(Instant::now()));
            match transfer.wait(left.max(LOOK)) {
                Err(Fault { late: true, .. }) => missing.push(peer),
                other => other?,
            }
        }
        if !missing.is_empty() {
            return Ok(Answer::Missing(missing));
        }
        let same = self.words[1..].iter().all(|word| *word == own);
        self.offer()?;
        let answer = if same { SAME } else { DIFFERENT };
        let sending =
            (1..self.words.len()).map(|peer| self.tell(peer, &answer)).collect::<Result<Vec<_>, _>>()?;
        sending.into_iter().try_for_each(|transfer| transfer.wait(deadline))?;
        Ok(if same { Answer::Same } else { Answer::Different })
    }

    fn follow(&mut self, own: u64, deadline: Duration, long: impl FnOnce()) -> Result<Answer, Fault> {
        let sending = self.tell(0, &own)?;
        let answer = &self.receiving[0];
        let come = answer.wait(deadline).or_else(|fault| {
            if !fault.late {
                return Err(fault);
            }
            long();
            answer.wait(deadline)
        });
        match come {
            Err(Fault { late: true, .. }) => return Ok(Answer::Missing(vec![0])),
            other => other?,
        }
        sending.wait(deadline)?;
        let same = self.words[0] == SAME;
        self.offer()?;
        Ok(if same { Answer::Same } else { Answer::Different })
    }

    /// Begins to send a word.
    fn tell<'a>(&self, peer: usize, word: &'a u64) -> Result<Telling<'a>, Fault> {
        // SAFETY: the word is borrowed for as long as the transfer is there.
        let transfer = unsafe { self.mesh.send(peer, Slot::Call, std::ptr::from_ref(word).cast(), WIDTH)? };
        Ok(Telling { transfer, _word: PhantomData })
    }

    /// Offers room for the next words.
    fn offer(&mut self) -> Result<(), Fault> {
        let peers = if self.rank == 0 { 1..self.words.len() } else { 0..1 };
        let words = self.words.as_mut_ptr();
        // SAFETY: each peer has room of its own, which nobody reads until the transfer is over and which the transfers do
        // not outlive.
        let recv = |peer| unsafe { self.mesh.recv(peer, Slot::Call, words.add(peer).cast(), WIDTH) };
        self.receiving = peers.map(recv).collect::<Result<_, _>>()?;
        Ok(())
    }
}
