//! Conformance suite of engines: checks that each rank of a group runs.
//!
//! Values are small integers, so sums are exact in every type and order.

use half::bf16;
use tandem_comm::{CommError, Element, ProcessGroup, Reduction};

/// All checks that leave the group usable.
pub fn everything(group: &mut ProcessGroup) {
    group.barrier().unwrap();
    for len in [0, 1, 7, 64, 1000, 4097] {
        all_reduce::<f32>(group, len, f32::from);
        all_reduce::<f64>(group, len, f64::from);
        all_reduce::<bf16>(group, len, |x| bf16::from_f32(f32::from(x)));
        all_reduce::<i64>(group, len, i64::from);
        broadcast(group, len);
    }
    for counts in layouts(group.size()) {
        reduce_scatter::<f32>(group, &counts, f32::from);
        reduce_scatter::<i64>(group, &counts, i64::from);
        reduce_scatter::<bf16>(group, &counts, |x| bf16::from_f32(f32::from(x)));
        all_gather::<f32>(group, &counts, f32::from);
        all_gather::<u8>(group, &counts, |x| x);
        all_gather::<bf16>(group, &counts, |x| bf16::from_f32(f32::from(x)));
    }
    integers_wrap_and_do_not_round(group);
    messages_arrive_in_order(group);
    splits_are_groups(group);
    nonsense_is_refused_before_anything_is_sent(group);
    group.barrier().unwrap();
}

/// Even, uneven, with empty parts, all empty, all in one rank.
fn layouts(size: usize) -> Vec<Vec<usize>> {
    let one_rank = |rank: usize| (0..size).map(|r| if r == rank { 321 } else { 0 }).collect();
    vec![
        vec![16; size],
        (0..size).map(|rank| 5 * rank + 1).collect(),
        (0..size).map(|rank| if rank % 2 == 0 { 0 } else { 33 }).collect(),
        vec![0; size],
        one_rank(0),
        one_rank(size - 1),
    ]
}

/// Returns element `i` of rank `rank`'s contribution.
fn value(rank: usize, i: usize) -> u8 {
    ((rank * 7 + i * 3) % 11) as u8
}

fn sum(size: usize, i: usize) -> u8 {
    (0..size).map(|rank| value(rank, i)).sum()
}

fn largest(size: usize, i: usize) -> u8 {
    (0..size).map(|rank| value(rank, i)).max().unwrap()
}

fn all_reduce<T: Element + PartialEq + std::fmt::Debug>(
    group: &mut ProcessGroup,
    len: usize,
    number: fn(u8) -> T,
) {
    let (rank, size) = (group.rank(), group.size());
    for (reduction, expected) in [(Reduction::Sum, sum as fn(usize, usize) -> u8), (Reduction::Max, largest)]
    {
        let mut data: Vec<T> = (0..len).map(|i| number(value(rank, i))).collect();
        group.all_reduce(&mut data, reduction).unwrap();
        let expected: Vec<T> = (0..len).map(|i| number(expected(size, i))).collect();
        assert_eq!(data, expected, "{reduction} of {len} {} on rank {rank} of {size}", T::KIND);
    }
}

fn reduce_scatter<T: Element + PartialEq + std::fmt::Debug>(
    group: &mut ProcessGroup,
    counts: &[usize],
    number: fn(u8) -> T,
) {
    let (rank, size) = (group.rank(), group.size());
    let mut data: Vec<T> = (0..counts.iter().sum()).map(|i| number(value(rank, i))).collect();
    group.reduce_scatter(&mut data, counts, Reduction::Sum).unwrap();
    let first: usize = counts[..rank].iter().sum();
    let mine = first..first + counts[rank];
    let expected: Vec<T> = mine.clone().map(|i| number(sum(size, i))).collect();
    assert_eq!(data[mine], expected, "{counts:?} {} on rank {rank}", T::KIND);
}

fn all_gather<T: Element + PartialEq + std::fmt::Debug>(
    group: &mut ProcessGroup,
    counts: &[usize],
    number: fn(u8) -> T,
) {
    let owners = counts.iter().enumerate().flat_map(|(rank, &count)| std::iter::repeat_n(rank, count));
    let expected: Vec<T> = owners.clone().zip(0..).map(|(owner, i)| number(value(owner, i))).collect();
    let mine = owners.zip(&expected).map(|(owner, &x)| if owner == group.rank() { x } else { number(99) });
    let mut data: Vec<T> = mine.collect();
    group.all_gather(&mut data, counts).unwrap();
    assert_eq!(data, expected, "{counts:?} {} on rank {}", T::KIND, group.rank());
}

fn broadcast(group: &mut ProcessGroup, len: usize) {
    for root in 0..group.size() {
        let mut data: Vec<f32> = (0..len).map(|i| f32::from(value(group.rank(), i))).collect();
        group.broadcast(&mut data, root).unwrap();
        let expected: Vec<f32> = (0..len).map(|i| f32::from(value(root, i))).collect();
        assert_eq!(data, expected, "from {root} on rank {}", group.rank());
    }
}

fn integers_wrap_and_do_not_round(group: &mut ProcessGroup) {
    let big = i64::MAX - 3;
    let mut data = [if group.rank() == 0 { big } else { 5 }, (1 << 53) + 1];
    let others = group.size() as i64 - 1;
    group.all_reduce(&mut data, Reduction::Sum).unwrap();
    let expected = [big.wrapping_add(5 * others), ((1 << 53) + 1) * (others + 1)];
    assert_eq!(data, expected);
}

fn messages_arrive_in_order(group: &mut ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    if size == 1 {
        return;
    }
    // Around the ring: every rank sends to the next several messages of different lengths, one
    // empty.
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    for len in [3usize, 0, 200] {
        let data: Vec<i64> = (0..len).map(|i| (rank * 1000 + i) as i64).collect();
        group.send(next, &data).unwrap();
    }
    for len in [3usize, 0, 200] {
        let mut data = vec![0i64; len];
        group.recv(before, &mut data).unwrap();
        let expected: Vec<i64> = (0..len).map(|i| (before * 1000 + i) as i64).collect();
        assert_eq!(data, expected);
    }
}

fn splits_are_groups(group: &mut ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let mut half = group.split(rank % 2).unwrap();
    assert_eq!((half.rank(), half.size()), (rank / 2, (size + 1 - rank % 2) / 2));
    let mut data = [rank as i64];
    half.all_reduce(&mut data, Reduction::Sum).unwrap();
    assert_eq!(data[0], (0..size).filter(|r| r % 2 == rank % 2).sum::<usize>() as i64);
    // The parent continues to work, beside its children.
    let mut data = [1i64];
    group.all_reduce(&mut data, Reduction::Sum).unwrap();
    assert_eq!(data[0], size as i64);
    half.barrier().unwrap();
    // A rank alone has everything, of any length.
    let mut alone = group.split(rank).unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    for len in [3, 100_000] {
        let whole: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let mut data = whole.clone();
        alone.all_gather(&mut data, &[len]).unwrap();
        alone.reduce_scatter(&mut data, &[len], Reduction::Sum).unwrap();
        alone.all_reduce(&mut data, Reduction::Sum).unwrap();
        alone.broadcast(&mut data, 0).unwrap();
        assert_eq!(data, whole);
    }
}

fn nonsense_is_refused_before_anything_is_sent(group: &mut ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let invalid = |result: tandem_comm::Result<()>, word: &str| match result {
        Err(CommError::Invalid { reason, .. }) if reason.contains(word) => {}
        other => panic!("expected a refusal with {word:?}, found {other:?}"),
    };
    invalid(group.broadcast(&mut [0u8], size), "no rank");
    invalid(group.send(rank, &[0u8]), "own peer");
    invalid(group.send(size, &[0u8]), "no rank");
    invalid(group.all_gather(&mut vec![0u8; size + 1], &vec![1; size + 1]), "parts for");
    invalid(group.all_gather(&mut vec![0u8; size + 1], &vec![1; size]), "in a buffer of");
    invalid(group.reduce_scatter(&mut [0f32; 0], &vec![1; size], Reduction::Sum), "in a buffer of 0");
}

/// A large buffer, which engines move in pieces.
pub fn hundred_megabytes(group: &mut ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let len = 25_000_000;
    let mut data: Vec<f32> = (0..len).map(|i| f32::from(value(rank, i))).collect();
    group.all_reduce(&mut data, Reduction::Sum).unwrap();
    assert!(data.iter().enumerate().all(|(i, &x)| x == f32::from(sum(size, i))));
}
