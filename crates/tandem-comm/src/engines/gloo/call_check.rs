//! Check that all ranks make the same call: every rank sends its call's fingerprint to rank 0,
//! which replies to all whether they are equal.
//!
//! Rank 0 hears all others, so it knows which ranks are missing and whose connection broke; the
//! others wait for its reply only. An all-to-all exchange would need `N·(N−1)` packets instead of
//! `2·(N−1)`; with less than two cores per rank, Gloo's threads then delay each other by
//! milliseconds.
//!
//! The buffer of the next word is posted before this call returns. Gloo sends only to a posted
//! receive, so the word then takes one packet.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mesh::{Fault, FullMesh, Slot, Transfer};

/// Time for each rank to show at a deadline that it has arrived.
const LOOK: Duration = Duration::from_millis(10);
const WIDTH: usize = 8;
/// Replies of rank 0.
const SAME: u64 = 1;
const DIFFERENT: u64 = 2;

pub(super) enum Answer {
    /// All ranks made the same call.
    Same,
    /// All ranks arrived with different calls. All ranks get this answer.
    Different,
    /// These ranks missed the deadline.
    Missing(Vec<usize>),
}

/// A word in flight, which must stay in place.
struct PendingBroadcast<'a> {
    transfer: Transfer,
    _word: PhantomData<&'a u64>,
}

impl PendingBroadcast<'_> {
    fn wait(self, limit: Duration) -> Result<(), Fault> {
        self.transfer.wait(limit)
    }
}

/// One rank's side of the call checks of a group.
pub(super) struct CallCheck {
    // Declared before the words that transfers write to: fields are dropped in this order.
    receiving: Vec<Transfer>,
    /// On rank 0 every rank's fingerprint; on the others the first word is the reply.
    words: Vec<u64>,
    mesh: Arc<FullMesh>,
    rank: usize,
}

impl CallCheck {
    pub(super) fn new(mesh: &Arc<FullMesh>, rank: usize, size: usize) -> Result<Self, Fault> {
        let mut this = Self { receiving: Vec::new(), words: vec![0; size], mesh: mesh.clone(), rank };
        this.offer()?;
        Ok(this)
    }

    /// Sends `own`, the fingerprint of a call. Ranks that reach rank 0 later than `deadline` are
    /// missing. The others wait twice as long, because rank 0 may arrive just before their deadline
    /// and wait as long; they call `long` at half time.
    pub(super) fn take(
        &mut self,
        own: u64,
        deadline: Duration,
        long: impl FnOnce(),
    ) -> Result<Answer, Fault> {
        if self.rank == 0 { self.lead(own, deadline) } else { self.follow(own, deadline, long) }
    }

    /// Fails if a connection with an expected word has broken; does not wait.
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

    /// Starts sending a word.
    fn tell<'a>(&self, peer: usize, word: &'a u64) -> Result<PendingBroadcast<'a>, Fault> {
        // SAFETY: the word is borrowed for the lifetime of the transfer.
        let transfer = unsafe { self.mesh.send(peer, Slot::Call, std::ptr::from_ref(word).cast(), WIDTH)? };
        Ok(PendingBroadcast { transfer, _word: PhantomData })
    }

    /// Posts receives of the next words.
    fn offer(&mut self) -> Result<(), Fault> {
        let peers = if self.rank == 0 { 1..self.words.len() } else { 0..1 };
        let words = self.words.as_mut_ptr();
        // SAFETY: each peer has a word of its own, which nothing reads before the transfer ends and
        // which outlives it.
        let recv = |peer| unsafe { self.mesh.recv(peer, Slot::Call, words.add(peer).cast(), WIDTH) };
        self.receiving = peers.map(recv).collect::<Result<_, _>>()?;
        Ok(())
    }
}
