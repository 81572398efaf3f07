//! Record of a group's first failure in the store, so that all ranks report the same cause.
//!
//! A rank that fails closes its connections, which is all that its peers see. They read the record
//! and return its error; the first of several failing ranks writes it.
//!
//! If nothing moves for a deadline, each rank knows only the rank that it waits for, which may be
//! waiting too. Live ranks report themselves stuck in the store; the others hang.

use std::time::Duration;

use crate::error::CommError;
use crate::store::{Store, StoreError};

/// Key under the group's prefix.
const KEY: &str = "failure";
/// Separator of fields; no error's text contains it.
const SEPARATOR: &str = "\u{1f}";
/// Timeout of requests that need no waiting.
const PATIENCE: Duration = Duration::from_secs(5);

/// Files the error unless another is filed, and returns the filed one. Without a store, returns
/// `error`.
pub(crate) fn report(store: &Store, rank: usize, error: CommError) -> CommError {
    let own = encode(rank, &error);
    match store.compare_set(KEY, b"", own.as_bytes()) {
        // A rank's own error keeps its type; the record has only types that all ranks share.
        Ok(filed) if filed != own.as_bytes() => decode(&filed).unwrap_or(error),
        _ => error,
    }
}

pub(crate) fn filed(store: &Store) -> Result<Option<CommError>, StoreError> {
    if !store.check(&[KEY])? {
        return Ok(None);
    }
    Ok(decode(&store.get(KEY, PATIENCE)?))
}

/// Returns the filed error when there is one.
pub(crate) fn await_filed(store: &Store, patience: Duration) -> Result<Option<CommError>, StoreError> {
    Ok(decode(&store.get(KEY, patience)?))
}

/// Returns the `suspects` that do not report themselves stuck within `patience`.
pub(crate) fn hanging(
    store: &Store,
    rank: usize,
    suspects: &[usize],
    patience: Duration,
) -> Result<Vec<usize>, StoreError> {
    store.set(&stuck(rank), b"")?;
    // A store that is out of reach is found out by one reply that is missing: a wait would miss two.
    store.check(&[&stuck(rank)])?;
    let keys: Vec<_> = suspects.iter().map(|&rank| stuck(rank)).collect();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    match store.wait(&keys, patience) {
        Err(StoreError::Timeout { .. }) => {}
        other => return other.map(|()| Vec::new()),
    }
    let mut hanging = Vec::new();
    for (&rank, key) in suspects.iter().zip(keys) {
        if !store.check(&[key])? {
            hanging.push(rank);
        }
    }
    Ok(hanging)
}

/// Says in the job's store that a rank waits for others. All are ranks of the job.
pub(crate) fn say_waiting(job: &Store, rank: usize, for_ranks: &[usize]) -> Result<(), StoreError> {
    job.set(&waiting(rank), list(for_ranks).as_bytes())
}

/// Takes [`say_waiting`] back.
pub(crate) fn say_moving(job: &Store, rank: usize) -> Result<(), StoreError> {
    job.delete(&waiting(rank)).map(|_| ())
}

/// Replaces `missing` ranks that wait for others, perhaps in another group, by those: of a chain of waits
/// the last rank hangs. If all wait, `missing` are returned. All are ranks of the job.
pub(crate) fn root_causes(job: &Store, rank: usize, missing: &[usize]) -> Result<Vec<usize>, StoreError> {
    let (mut open, mut seen, mut causes) = (missing.to_vec(), vec![rank], Vec::new());
    while let Some(next) = open.pop() {
        if seen.contains(&next) {
            continue;
        }
        seen.push(next);
        let key = waiting(next);
        if !job.check(&[&key])? {
            causes.push(next);
            continue;
        }
        // It may go on meanwhile.
        let awaited = job.get(&key, PATIENCE)?;
        open.extend(std::str::from_utf8(&awaited).ok().and_then(numbers).unwrap_or_default());
    }
    causes.sort_unstable();
    Ok(if causes.is_empty() { missing.to_vec() } else { causes })
}

/// Returns the key of a rank that waits for others.
fn waiting(rank: usize) -> String {
    format!("waiting/{rank}")
}

/// Returns the key of a rank that has waited for a deadline.
pub(crate) fn stuck(rank: usize) -> String {
    format!("stuck/{rank}")
}

/// Converts ranks in an error of a subgroup to those of the group that `members` are ranks of.
pub(crate) fn in_parent(error: CommError, members: &[usize]) -> CommError {
    let there = |rank: usize| members.get(rank).copied().unwrap_or(rank);
    match error {
        CommError::PeerLost { rank } => CommError::PeerLost { rank: there(rank) },
        CommError::Aborted { rank, reason } => CommError::Aborted { rank: there(rank), reason },
        CommError::Deadline { call, missing, deadline } => {
            let missing = missing.into_iter().map(there).collect();
            CommError::Deadline { call, missing, deadline }
        }
        // A mismatch names the group's own calls; silent ranks are ranks of the job already.
        other => other,
    }
}

fn encode(rank: usize, error: &CommError) -> String {
    let fields = match error {
        CommError::Mismatch { rank, call, other_rank, other_call } => {
            vec![
                "mismatch".into(),
                rank.to_string(),
                call.clone(),
                other_rank.to_string(),
                other_call.clone(),
            ]
        }
        CommError::PeerLost { rank } => vec!["lost".into(), rank.to_string()],
        CommError::Deadline { call, missing, deadline } => {
            vec!["deadline".into(), call.clone(), list(missing), deadline.as_micros().to_string()]
        }
        CommError::Silent { silent, limit } => {
            vec!["silent".into(), list(silent), limit.as_micros().to_string()]
        }
        CommError::Aborted { rank, reason } => vec!["aborted".into(), rank.to_string(), reason.clone()],
        // Errors of one rank alone: to the others that rank aborted.
        other => vec!["aborted".into(), rank.to_string(), other.to_string()],
    };
    let fields: Vec<_> = fields.iter().map(|field| field.replace(SEPARATOR, " ")).collect();
    fields.join(SEPARATOR)
}

/// Decodes a record; `None` for another version's.
fn decode(record: &[u8]) -> Option<CommError> {
    let record = std::str::from_utf8(record).ok()?;
    let fields: Vec<&str> = record.split(SEPARATOR).collect();
    Some(match fields[..] {
        ["mismatch", rank, call, other_rank, other_call] => CommError::Mismatch {
            rank: rank.parse().ok()?,
            call: call.to_owned(),
            other_rank: other_rank.parse().ok()?,
            other_call: other_call.to_owned(),
        },
        ["lost", rank] => CommError::PeerLost { rank: rank.parse().ok()? },
        ["deadline", call, missing, micros] => CommError::Deadline {
            call: call.to_owned(),
            missing: numbers(missing)?,
            deadline: Duration::from_micros(micros.parse().ok()?),
        },
        ["silent", silent, micros] => {
            CommError::Silent { silent: numbers(silent)?, limit: Duration::from_micros(micros.parse().ok()?) }
        }
        ["aborted", rank, reason] => {
            CommError::Aborted { rank: rank.parse().ok()?, reason: reason.to_owned() }
        }
        _ => return None,
    })
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn numbers(list: &str) -> Option<Vec<usize>> {
    list.split(',').map(str::parse).collect::<Result<_, _>>().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filed_is_read_as_it_was() {
        let errors = [
            CommError::Mismatch {
                rank: 0,
                call: "barrier".into(),
                other_rank: 3,
                other_call: "all_gather of 5 u8 in parts 1f".into(),
            },
            CommError::PeerLost { rank: 7 },
            CommError::Deadline {
                call: "recv of 3 bytes from rank 1".into(),
                missing: vec![1, 12],
                deadline: Duration::from_millis(1500),
            },
            CommError::Silent { silent: vec![0, 3], limit: Duration::from_secs(60) },
            CommError::Aborted { rank: 2, reason: "the disk is full:\n  No space left".into() },
        ];
        for error in errors {
            assert_eq!(decode(encode(9, &error).as_bytes()), Some(error));
        }
    }

    #[test]
    fn a_failure_of_one_rank_alone_is_its_giving_up() {
        let error = CommError::Engine { reason: "no\u{1f}such interface".into() };
        let CommError::Aborted { rank: 9, reason } = decode(encode(9, &error).as_bytes()).unwrap() else {
            panic!("another kind of error");
        };
        assert!(reason.contains("no such interface"));
    }

    #[test]
    fn the_last_of_a_chain_of_waits_is_the_cause() {
        let server = crate::store::StoreServer::bind(0).unwrap();
        let job = Store::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
        // Rank 3 waits for 1, which waits for 0 in another group.
        assert_eq!(root_causes(&job, 3, &[1]), Ok(vec![1]), "nobody is known to wait");
        say_waiting(&job, 3, &[1]).unwrap();
        say_waiting(&job, 1, &[0, 1]).unwrap();
        assert_eq!(root_causes(&job, 3, &[1]), Ok(vec![0]));
        assert_eq!(root_causes(&job, 2, &[1, 3]), Ok(vec![0]));
        // In a ring of waits each keeps what it knows.
        say_waiting(&job, 0, &[3]).unwrap();
        assert_eq!(root_causes(&job, 3, &[1]), Ok(vec![1]));
        say_moving(&job, 0).unwrap();
        assert_eq!(root_causes(&job, 3, &[1]), Ok(vec![0]));
    }

    #[test]
    fn another_versions_record_is_not_guessed_at() {
        for record in [&b"lost"[..], b"lost\x1fseven", b"unheard of", b"", b"\xff"] {
            assert_eq!(decode(record), None);
        }
    }
}
