//! Chain of a rank's calls: each call's hash continues the hash of all calls before.
//!
//! Messages carry their sender's chain, so ranks compare all of their calls on messages that they
//! send anyway. The last calls are kept to name the first that differs.

use crate::collective::call::{Call, Operation, fnv1a};
use crate::collective::element::{ElementKind, Reduction};

/// Number of calls that are kept.
const KEPT: usize = 64;
/// Number of calls after which ranks compare their chains, where no message does so earlier. Fewer than
/// are kept, so that the first difference can be named.
pub(crate) const COMPARED_CALLS: u64 = KEPT as u64 / 2;
/// Text of the last call: the rank drops its group.
pub(crate) const END: &str = "the end of its group";

/// Relation of another rank's call to this rank's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// The same call.
    Same,
    /// A call that this rank has made before, and the same.
    Earlier,
    /// A call that this rank has not made yet.
    Later,
    /// Another call, or another one before it.
    Different,
}

/// A call's place in a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    /// Number of the call, from 1.
    pub(crate) number: u64,
    /// Hash of all calls before it.
    pub(crate) before: u64,
    /// Hash of this call.
    pub(crate) hash: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    /// `None` at the end.
    call: Option<Call>,
    before: u64,
    hash: u64,
}

pub(crate) struct CallChain {
    /// Number of calls so far.
    number: u64,
    /// Hash of all calls.
    after: u64,
    /// Call `number` is at `number % KEPT`.
    last: [Option<Entry>; KEPT],
}

impl CallChain {
    pub(crate) fn new() -> Self {
        Self { number: 0, after: 0, last: [None; KEPT] }
    }

    /// Begins a call. `detail` are arguments that the call does not have.
    pub(crate) fn push(&mut self, call: Call, detail: u64) {
        self.append(Some(call), hash(&call, detail));
    }

    /// Ends the chain.
    pub(crate) fn end(&mut self) {
        self.append(None, fnv1a(END.bytes().map(u64::from)));
    }

    fn append(&mut self, call: Option<Call>, hash: u64) {
        let before = self.after;
        self.number += 1;
        self.after = fnv1a([before, hash].into_iter());
        self.last[self.number as usize % KEPT] = Some(Entry { call, before, hash });
    }

    /// Returns the hash of all calls.
    pub(crate) fn hash(&self) -> u64 {
        self.after
    }

    /// Returns the number of the current call.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn entry(&self, number: u64) -> Option<&Entry> {
        let is_kept = number <= self.number && number + KEPT as u64 > self.number;
        self.last[number as usize % KEPT].as_ref().filter(|_| is_kept)
    }

    /// Returns the place of the current call.
    pub(crate) fn position(&self) -> Position {
        let (before, hash) = self.entry(self.number).map_or((0, 0), |entry| (entry.before, entry.hash));
        Position { number: self.number, before, hash }
    }

    /// Compares another rank's call with this rank's.
    pub(crate) fn compare(&self, position: &Position) -> Comparison {
        let Position { number, before, hash } = *position;
        if number > self.number {
            let follows = number > self.number + 1 || before == self.after;
            return if follows { Comparison::Later } else { Comparison::Different };
        }
        match self.entry(number) {
            Some(own) if (own.before, own.hash) != (before, hash) => Comparison::Different,
            _ if number == self.number => Comparison::Same,
            _ => Comparison::Earlier,
        }
    }

    /// Returns the last calls as text, one a line: number, hash, call.
    pub(crate) fn report(&self) -> String {
        let first = self.number.saturating_sub(KEPT as u64 - 1);
        let line = |number| {
            let Entry { call, hash, .. } = self.entry(number)?;
            let call = call.map_or_else(|| END.to_owned(), |call| call.to_string());
            Some(format!("{number}\t{hash:x}\t{call}\n"))
        };
        (first..=self.number).filter_map(line).collect()
    }
}

/// First call that differs between two ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) rank: usize,
    pub(crate) call: String,
    pub(crate) other_rank: usize,
    pub(crate) other_call: String,
}

/// Returns the first call that differs, given the reports of the ranks that wrote one.
pub(crate) fn first_difference(reports: &[(usize, String)]) -> Option<Difference> {
    let lines = |text: &str| -> Vec<(u64, String, String)> {
        let fields = |line: &str| {
            let mut fields = line.splitn(3, '\t');
            let number = fields.next()?.parse().ok()?;
            Some((number, fields.next()?.to_owned(), fields.next()?.to_owned()))
        };
        text.lines().filter_map(fields).collect()
    };
    let reports: Vec<_> = reports.iter().map(|(rank, text)| (*rank, lines(text))).collect();
    let mut numbers: Vec<u64> =
        reports.iter().flat_map(|(_, lines)| lines.iter().map(|line| line.0)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().find_map(|number| {
        let mut calls = reports.iter().filter_map(|(rank, lines)| {
            lines.iter().find(|line| line.0 == number).map(|(_, hash, call)| (*rank, hash, call))
        });
        let (rank, hash, call) = calls.next()?;
        let (other_rank, _, other_call) = calls.find(|(_, other, _)| *other != hash)?;
        let (call, other_call) = (call.clone(), other_call.clone());
        Some(Difference { rank, call, other_rank, other_call })
    })
}

fn hash(call: &Call, detail: u64) -> u64 {
    let reduction = |reduction| match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 1,
    };
    let (operation, argument) = match call.operation {
        Operation::AllReduce(how) => (1, reduction(how)),
        Operation::ReduceScatter(how) => (2, reduction(how)),
        Operation::AllGather => (3, 0),
        Operation::Broadcast { root } => (4, root as u64),
        Operation::Barrier => (5, 0),
        Operation::Split => (6, 0),
        Operation::Send { to } => (7, to as u64),
        Operation::Recv { from } => (8, from as u64),
    };
    let kind = match call.kind {
        ElementKind::U8 => 0,
        ElementKind::I64 => 1,
        ElementKind::F64 => 2,
        ElementKind::F32 => 3,
        ElementKind::Bf16 => 4,
    };
    fnv1a([operation, argument, kind, call.len as u64, call.parts, detail].into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barrier() -> Call {
        Call::whole(Operation::Barrier, ElementKind::U8, 0)
    }

    fn gather(counts: &[usize]) -> Call {
        Call::parted(Operation::AllGather, ElementKind::F32, counts)
    }

    fn chain(calls: &[Call]) -> CallChain {
        let mut chain = CallChain::new();
        calls.iter().for_each(|call| chain.push(*call, 0));
        chain
    }

    #[test]
    fn equal_chains_agree_and_a_difference_is_seen_in_every_later_call() {
        let own = chain(&[barrier(), gather(&[1, 2])]);
        let ask = |calls: &[Call]| own.compare(&chain(calls).position());
        assert_eq!(ask(&[barrier(), gather(&[1, 2])]), Comparison::Same);
        assert_eq!(ask(&[barrier()]), Comparison::Earlier);
        assert_eq!(ask(&[barrier(), gather(&[1, 2]), barrier()]), Comparison::Later);
        for different in [
            vec![barrier(), gather(&[2, 1])],
            vec![gather(&[1, 2])],
            vec![gather(&[1, 2]), gather(&[1, 2])],
            vec![barrier(), gather(&[2, 1]), barrier()],
        ] {
            assert_eq!(ask(&different), Comparison::Different, "{different:?}");
        }
    }

    #[test]
    fn the_first_difference_is_found_in_the_reports_that_are_there() {
        let many: Vec<Call> = (1..100).map(|i| gather(&[i])).collect();
        let mut other = many.clone();
        other[80] = barrier();
        other[81] = barrier();
        let reports = [(0, chain(&many).report()), (2, chain(&other).report())];
        let found = first_difference(&reports).unwrap();
        assert_eq!((found.rank, found.other_rank, found.other_call.as_str()), (0, 2, "barrier"));
        assert_eq!(found.call, gather(&[81]).to_string());
        let short = [(0, chain(&many[..50]).report()), (1, chain(&many[..60]).report())];
        assert_eq!(first_difference(&short), None, "one is only ahead");
    }
}
