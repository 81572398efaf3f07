//! Engine of a dry run: one rank of a group records its calls and moves nothing.
//!
//! The record tells what a rank of any number of ranks would send, and whether all ranks would make
//! the same calls.

use std::sync::{Arc, Mutex, PoisonError};

use crate::collective::call::{Call, Operation};
use crate::collective::element::ElementKind;
use crate::collective::engine::Engine;
use crate::error::Result;
use crate::group::ProcessGroup;

/// Recorded calls in order, with their group: 0 is made by [`group`], splits count up. Methods panic
/// if the group does not exist.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    calls: Vec<(usize, Call)>,
    /// Members of each group as ranks of the first, and whether it was made by [`ProcessGroup::split`].
    groups: Vec<(Vec<usize>, bool)>,
}

impl Log {
    /// Takes the calls recorded so far.
    pub fn take(&self) -> Vec<(usize, Call)> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut entries.calls)
    }

    fn write(&self, group: usize, call: Call) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).calls.push((group, call));
    }

    /// Returns the number of ranks of a group.
    pub fn size(&self, group: usize) -> usize {
        self.members(group).len()
    }

    /// Returns the members of a group as ranks of the first group.
    pub fn members(&self, group: usize) -> Vec<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).groups[group].0.clone()
    }

    /// Returns the number of groups so far.
    pub fn num_groups(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).groups.len()
    }

    /// Returns whether a group was made by [`ProcessGroup::split`]: a second group of the same ranks, for
    /// concurrent calls.
    pub fn is_apart(&self, group: usize) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).groups[group].1
    }

    fn new_group(&self, members: Vec<usize>, apart: bool) -> usize {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.groups.push((members, apart));
        entries.groups.len() - 1
    }
}

/// Creates rank `rank` of `size`, and the log of its calls.
pub fn group(rank: usize, size: usize) -> (ProcessGroup, Log) {
    let log = Log::default();
    let recorder = Recorder { rank, size, id: log.new_group((0..size).collect(), false), log: log.clone() };
    (ProcessGroup::new(Box::new(recorder)), log)
}

struct Recorder {
    rank: usize,
    size: usize,
    id: usize,
    log: Log,
}

impl Recorder {
    fn write(&self, call: Call) -> Result<()> {
        self.log.write(self.id, call);
        Ok(())
    }

    /// Creates this rank's engine in a group of `members`.
    fn engine(&self, members: Vec<usize>, rank: usize, apart: bool) -> Box<dyn Engine> {
        let (size, log) = (members.len(), self.log.clone());
        Box::new(Self { rank, size, id: log.new_group(members, apart), log })
    }
}

impl Engine for Recorder {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn is_one_process(&self) -> bool {
        true
    }

    fn all_reduce(&mut self, call: Call, _: &mut [u8]) -> Result<()> {
        self.write(call)
    }

    fn reduce_scatter(&mut self, call: Call, _: &mut [u8], _: &[usize]) -> Result<()> {
        self.write(call)
    }

    fn all_gather(&mut self, call: Call, _: &mut [u8], _: &[usize]) -> Result<()> {
        self.write(call)
    }

    fn broadcast(&mut self, call: Call, _: usize, _: &mut [u8]) -> Result<()> {
        self.write(call)
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.write(call)
    }

    fn dry(&mut self, call: Call) -> Result<()> {
        self.write(call)
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        self.write(Call::whole(Operation::Send { to }, ElementKind::U8, data.len()))
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        self.write(Call::whole(Operation::Recv { from }, ElementKind::U8, data.len()))
    }

    /// Splits as if every rank gave the same colour.
    fn split(&mut self, call: Call, _: usize) -> Result<Box<dyn Engine>> {
        self.write(call)?;
        Ok(self.engine(self.log.members(self.id), self.rank, true))
    }

    fn split_by(&mut self, call: Call, colors: &[usize]) -> Result<Box<dyn Engine>> {
        self.write(call)?;
        let own = colors[self.rank];
        let parent = self.log.members(self.id);
        let is_own = |&(_, &color): &(usize, &usize)| color == own;
        let members =
            |colors: &[usize]| colors.iter().enumerate().filter(is_own).map(|(i, _)| parent[i]).collect();
        let rank = Vec::len(&members(&colors[..self.rank]));
        Ok(self.engine(members(colors), rank, false))
    }

    fn abort(&mut self, _: &str) {}

    fn check(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CollectiveBuffer, Reduction};

    #[test]
    fn calls_of_a_group_and_of_those_split_off_are_one_sequence() {
        let (mut group, log) = group(5, 1024);
        assert_eq!((group.rank(), group.size()), (5, 1024));
        let mut own = group.split(0).unwrap();
        own.all_reduce(&mut [0f32; 3], Reduction::Sum).unwrap();
        let counts = [2; 1024];
        group.all_gather_numbers(CollectiveBuffer::dry(ElementKind::I64, 2048), &counts).unwrap();
        let calls: Vec<_> = log.take().into_iter().map(|(id, call)| (id, call.operation, call.len)).collect();
        let expected = [
            (0, Operation::Split, 0),
            (1, Operation::AllReduce(Reduction::Sum), 3),
            (0, Operation::AllGather, 2048),
        ];
        assert_eq!(calls, expected);
        assert_eq!(group.volume().bytes_sent, 2048 * 8 * 1023 / 1024);
        assert_eq!((log.size(0), log.size(1), log.is_apart(1), log.num_groups()), (1024, 1024, true, 2));
        assert!(log.take().is_empty());
    }

    #[test]
    fn messages_are_written_down_on_both_sides() {
        let (mut group, log) = group(1, 3);
        group.recv(0, &mut [0u8; 8]).unwrap();
        group.dry_send(2, ElementKind::F32, 5).unwrap();
        group.send(2, &[1f64]).unwrap();
        let calls: Vec<_> = log.take().into_iter().map(|(_, call)| call.to_string()).collect();
        assert_eq!(calls, ["recv of 8 u8 from rank 0", "send of 5 f32 to rank 2", "send of 8 u8 to rank 2"]);
        assert_eq!((group.volume().num_calls, group.volume().bytes_sent), (0, 5 * 4 + 8));
    }

    #[test]
    fn a_rule_divides_a_group_of_which_one_rank_exists() {
        let (mut group, log) = group(5, 8);
        let rows = group.split_by(|rank| rank / 4).unwrap();
        let columns = group.split_by(|rank| rank % 4).unwrap();
        assert_eq!((rows.rank(), rows.size(), log.size(1)), (1, 4, 4));
        assert_eq!((columns.rank(), columns.size(), log.size(2)), (1, 2, 2));
        assert_eq!((log.members(1), log.members(2)), (vec![4, 5, 6, 7], vec![1, 5]));
        assert_eq!((log.is_apart(2), log.is_apart(0)), (false, false));
    }
}
