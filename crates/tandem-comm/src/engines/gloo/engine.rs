//! Gloo engine: compares the calls, then runs the ring.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::call_check::{Answer, CallCheck};
use super::mesh::{Fault, FullMesh, Slot, Transfer};
use super::rendezvous;
use super::ring::Ring;
use crate::collective::call::{Call, fnv1a};
use crate::collective::engine::{Engine, MAX_MESSAGE_BYTES, MAX_MESSAGES};
use crate::engines::buffer_pool::BufferPool;
use crate::error::{CommError, Result};
use crate::health::abort_flag::AbortFlag;
use crate::health::failure;
use crate::store::{Store, StoreError};

/// Time that a finished rank waits for the others. Closing a connection loses unsent data.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for the ranks of a stuck group to notice it, one after another.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct Gloo {
    // Transfers come before their data: fields are dropped in this order.
    messages: VecDeque<Message>,
    spare: BufferPool,
    call_check: CallCheck,
    mesh: Arc<FullMesh>,
    /// Store with the job's prefix, on this group's connection.
    job: Store,
    /// This group's prefix behind the job's; empty for the job's own group.
    path: String,
    /// Store with both prefixes.
    store: Store,
    abort_flag: AbortFlag,
    rank: usize,
    size: usize,
    /// Ranks of this group as ranks of the job.
    members: Vec<usize>,
    deadline: Duration,
    /// Number of collectives so far.
    num_calls: u64,
    scratch: Vec<u64>,
    failure: Option<CommError>,
}

/// A message in flight: its transfers and its data.
struct Message {
    transfers: Vec<Transfer>,
    _len: Vec<u8>,
    data: Vec<u8>,
}

impl Gloo {
    /// Meets the other ranks under `path` in the job's store. `members` are ranks of the job; this
    /// is number `rank` among them.
    pub(super) fn meet(
        job: Store,
        path: String,
        rank: usize,
        members: Vec<usize>,
        deadline: Duration,
        abort_flag: AbortFlag,
    ) -> Result<Self> {
        let (size, store) = (members.len(), job.prefixed(&path));
        let mesh = rendezvous::connect(&store, rank, size, deadline, &abort_flag);
        let mesh = mesh.map_err(|error| match error {
            // A surplus process must not break the others' group.
            CommError::Invalid { .. } => error,
            error => failure::report(&store, rank, error),
        })?;
        let call_check = CallCheck::new(&mesh, rank, size)
            .map_err(|fault| failure::report(&store, rank, CommError::PeerLost { rank: fault.peer }))?;
        Ok(Self {
            messages: VecDeque::new(),
            spare: BufferPool::default(),
            call_check,
            mesh,
            job,
            path,
            store,
            abort_flag,
            rank,
            size,
            members,
            deadline,
            num_calls: 0,
            scratch: Vec::new(),
            failure: None,
        })
    }

    fn ring(&self) -> Ring<'_> {
        Ring { mesh: &self.mesh, rank: self.rank, size: self.size, deadline: self.deadline }
    }

    /// Fails the group, here and through the store for all.
    fn fail(&mut self, error: CommError) -> CommError {
        let error = match self.abort_flag.verdict() {
            Some(verdict) if self.abort_flag.is_cut() => verdict,
            _ if self.abort_flag.store_is_lost() => error,
            _ => failure::report(&self.store, self.rank, error),
        };
        // The job is told before connections close. Ranks that wait for this rank in another group
        // then learn which rank is lost, instead of blaming this one.
        let mut verdict = failure::in_parent(error.clone(), &self.members);
        if !self.path.is_empty() && !self.abort_flag.is_cut() && !self.abort_flag.store_is_lost() {
            verdict = failure::report(&self.job, self.members[self.rank], verdict);
        }
        self.abort_flag.note(verdict);
        self.mesh.close();
        self.messages.clear();
        self.failure.insert(error).clone()
    }

    fn check_alive(&mut self) -> Result<()> {
        if self.abort_flag.is_cut() && self.failure.is_none() {
            self.failure = self.abort_flag.verdict();
            self.mesh.close();
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn fault(&mut self, call: &str, Fault { peer, late }: Fault) -> CommError {
        let error = if late {
            CommError::Deadline { call: call.to_owned(), missing: vec![peer], deadline: self.deadline }
        } else {
            CommError::PeerLost { rank: peer }
        };
        self.fail(error)
    }

    /// Runs a collective: waits until all ranks have arrived with the same call, then does `work`.
    fn collective<T>(
        &mut self,
        call: &Call,
        work: impl FnOnce(&mut Self) -> std::result::Result<T, Fault>,
    ) -> Result<T> {
        self.check_alive()?;
        self.num_calls += 1;
        let text = call.to_string();
        self.compare(&text)?;
        work(self).map_err(|fault| {
            if !fault.late {
                return self.fault(&text, fault);
            }
            // A hanging rank blocks its neighbours one after another: the ring alone does not tell
            // which rank hangs.
            let all: Vec<_> = (0..self.size).collect();
            let missing = self.hanging(&all).unwrap_or(vec![fault.peer]);
            self.fail(CommError::Deadline { call: text, missing, deadline: self.deadline })
        })
    }

    /// Waits until all ranks have arrived, and fails unless their calls are equal.
    fn compare(&mut self, text: &str) -> Result<()> {
        let (own, deadline) = (fingerprint(text, self.num_calls), self.deadline);
        let (stuck, store, mut said) = (failure::stuck(self.rank), &self.store, false);
        let answer = self.call_check.take(own, deadline, || said = store.set(&stuck, b"").is_ok());
        let answer = answer.map_err(|fault| self.fault(text, fault))?;
        let error = match answer {
            Answer::Missing(missing) => {
                // A rank stuck in the previous call is not the one that hangs.
                let missing = self.hanging(&missing).unwrap_or(missing);
                CommError::Deadline { call: text.to_owned(), missing, deadline }
            }
            Answer::Same => {
                if said {
                    // The call was only slow. If the store is gone, its next user finds out.
                    let _ = self.store.delete(&stuck);
                }
                return Ok(());
            }
            Answer::Different => self.mismatch(text).unwrap_or_else(CommError::Store),
        };
        Err(self.fail(error))
    }

    /// Returns the `suspects` that hang, if that can be determined.
    fn hanging(&self, suspects: &[usize]) -> Option<Vec<usize>> {
        if self.abort_flag.store_is_lost() {
            return None;
        }
        let hanging = failure::hanging(&self.store, self.rank, suspects, self.deadline.min(PATIENCE)).ok()?;
        Some(hanging).filter(|hanging| !hanging.is_empty())
    }

    /// Returns the ranks' different calls.
    fn mismatch(&self, text: &str) -> std::result::Result<CommError, StoreError> {
        let key = |rank: usize| format!("calls/{}/{rank}", self.num_calls);
        self.store.set(&key(self.rank), text.as_bytes())?;
        let call =
            |rank| Ok(String::from_utf8_lossy(&self.store.get(&key(rank), self.deadline)?).into_owned());
        let calls = (0..self.size).map(call).collect::<std::result::Result<Vec<_>, StoreError>>()?;
        let other = calls.iter().position(|call| *call != calls[0]).unwrap_or(0);
        Ok(CommError::Mismatch {
            rank: 0,
            call: calls[0].clone(),
            other_rank: other,
            other_call: calls[other].clone(),
        })
    }

    /// Gathers every rank's `own`.
    fn gather(&self, own: u64) -> std::result::Result<Vec<u64>, Fault> {
        let mut all = vec![0; self.size];
        all[self.rank] = own;
        let parts: Vec<_> = (0..self.size).map(|rank| 8 * rank..8 * (rank + 1)).collect();
        self.ring().all_gather(bytemuck::cast_slice_mut(&mut all), &parts)?;
        Ok(all)
    }

    /// Waits until the oldest message has been received.
    fn settle_one(&mut self) -> Result<()> {
        let Some(mut message) = self.messages.pop_front() else { return Ok(()) };
        for transfer in message.transfers.drain(..) {
            let call = format!("send of {} bytes to rank {}", message.data.len(), transfer.peer());
            transfer.wait(self.deadline).map_err(|fault| self.fault(&call, fault))?;
        }
        self.spare.put(std::mem::take(&mut message.data));
        Ok(())
    }

    /// Tells the others that this rank is done and waits briefly for them.
    fn farewell(&mut self) -> Result<()> {
        while !self.messages.is_empty() {
            self.settle_one()?;
        }
        if self.store.add("done", 1)? == self.size as i64 {
            self.store.set("all-done", b"")?;
        }
        Ok(self.store.wait(&["all-done"], FAREWELL)?)
    }
}

impl Engine for Gloo {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        let (size, width) = (self.size, call.kind.size());
        let end = move |rank: usize| call.len * rank / size * width;
        let parts: Vec<_> = (0..size).map(|rank| end(rank)..end(rank + 1)).collect();
        self.collective(&call, |this| {
            let mut scratch = std::mem::take(&mut this.scratch);
            this.ring().reduce_scatter(call.kind, call.reduction(), data, &parts, &mut scratch)?;
            this.scratch = scratch;
            this.ring().all_gather(data, &parts)
        })
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this| {
            let mut scratch = std::mem::take(&mut this.scratch);
            this.ring().reduce_scatter(call.kind, call.reduction(), data, &parts, &mut scratch)?;
            this.scratch = scratch;
            Ok(())
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this| this.ring().all_gather(data, &parts))
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        self.collective(&call, |this| this.ring().broadcast(root, data))
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.collective(&call, |_| Ok(()))
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        self.check_alive()?;
        let under_way = |messages: &VecDeque<Message>| messages.iter().map(|m| m.data.len()).sum::<usize>();
        while self.messages.len() >= MAX_MESSAGES
            || !self.messages.is_empty() && under_way(&self.messages) + data.len() > MAX_MESSAGE_BYTES
        {
            self.settle_one()?;
        }
        let (len, mut copy) = ((data.len() as u64).to_le_bytes().to_vec(), self.spare.take(data.len()));
        copy.extend_from_slice(data);
        let data = copy;
        // SAFETY: the message keeps both copies in place as long as it has the transfers.
        let begun = unsafe {
            self.mesh.send(to, Slot::MessageLen, len.as_ptr(), 8).and_then(|first| {
                let mut transfers = vec![first];
                if !data.is_empty() {
                    transfers.push(self.mesh.send(to, Slot::Message, data.as_ptr(), data.len())?);
                }
                Ok(transfers)
            })
        };
        let transfers = begun.map_err(|fault| {
            let call = format!("send of {} bytes to rank {to}", data.len());
            self.fault(&call, fault)
        })?;
        self.messages.push_back(Message { transfers, _len: len, data });
        Ok(())
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        self.check_alive()?;
        let call = format!("recv of {} bytes from rank {from}", data.len());
        let mut receive = |slot, room: &mut [u8]| {
            // SAFETY: the buffer is borrowed until the transfer is over.
            let transfer = unsafe { self.mesh.recv(from, slot, room.as_mut_ptr(), room.len()) };
            transfer
                .and_then(|transfer| transfer.wait(self.deadline))
                .map_err(|fault| self.fault(&call, fault))
        };
        let mut len = [0; 8];
        receive(Slot::MessageLen, &mut len)?;
        let len = u64::from_le_bytes(len);
        if len != data.len() as u64 {
            let (rank, other_call) = (self.rank, format!("send of {len} bytes"));
            return Err(self.fail(CommError::Mismatch { rank, call, other_rank: from, other_call }));
        }
        if data.is_empty() { Ok(()) } else { receive(Slot::Message, data) }
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        let colors = self.collective(&call, |this| this.gather(color as u64))?;
        let members: Vec<_> = (0..self.size).filter(|&rank| colors[rank] == colors[self.rank]).collect();
        let rank = members.iter().filter(|&&member| member < self.rank).count();
        let path = format!("{}split-{}-{color}/", self.path, self.num_calls);
        let child = self.job.reconnect().map_err(CommError::Store).and_then(|job| {
            let of_job = members.iter().map(|&member| self.members[member]).collect();
            Self::meet(job, path, rank, of_job, self.deadline, self.abort_flag.clone())
        });
        child.map(|child| Box::new(child) as Box<dyn Engine>).map_err(|error| {
            let error = failure::in_parent(error, &members);
            self.fail(error)
        })
    }

    fn abort(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.fail(CommError::Aborted { rank: self.rank, reason: reason.to_owned() });
        }
    }

    fn check(&mut self) -> Result<()> {
        self.check_alive()?;
        self.call_check.look().map_err(|fault| self.fail(CommError::PeerLost { rank: fault.peer }))
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        // A rank that panics, or of which another group failed, does not wait: the others should
        // not wait for it.
        if self.failure.is_none() && self.abort_flag.verdict().is_none() && !std::thread::panicking() {
            // On an error the others continue without this rank; they are told at their next call.
            let _ = self.farewell();
        }
        self.mesh.close();
        self.messages.clear();
    }
}

/// Hashes (FNV-1a) a call and its number in the order of calls.
fn fingerprint(call: &str, number: u64) -> u64 {
    let bytes = call.bytes().chain(number.to_le_bytes());
    fnv1a(bytes.map(u64::from))
}
