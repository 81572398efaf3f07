//! Exchange between the ranks of a split decoder, which are threads.

use std::sync::{Arc, Barrier, Mutex};

use tandem_kernels::{Device, MemoryKind, Tensor};
use tandem_model::{Decoder, FlatWeights, RankOrder, Result, TensorParallelOps, TensorParallelShard};

use super::Golden;

/// Ranks as threads that put what they have on one table.
pub struct Table {
    sums: Mutex<Vec<Vec<f32>>>,
    bytes: Mutex<Vec<Vec<u8>>>,
    numbers: Mutex<Vec<Vec<f64>>>,
    barrier: Barrier,
}

impl Table {
    pub fn new(ranks: usize) -> Self {
        Self {
            sums: Mutex::new(vec![Vec::new(); ranks]),
            bytes: Mutex::new(vec![Vec::new(); ranks]),
            numbers: Mutex::new(vec![Vec::new(); ranks]),
            barrier: Barrier::new(ranks),
        }
    }
}

/// Runs each rank on a thread of its own, and returns their results in order.
pub fn on_ranks<S: Send, R: Send>(
    shares: impl IntoIterator<Item = S>,
    rank: impl Fn(S) -> R + Sync,
) -> Vec<R> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = shares.into_iter().map(|share| scope.spawn(move || rank(share))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Reads a rank's shard from the golden's files.
pub fn read_shard(
    golden: &Golden,
    whole: &Arc<Decoder>,
    shard: TensorParallelShard,
) -> (Device, Arc<Decoder>, FlatWeights) {
    let device = Device::cpu(1, 64 << 20).unwrap();
    let decoder = Decoder::sliced(whole, shard).unwrap();
    let weights = golden.open().weights(&decoder).unwrap();
    let weights = weights.load(&decoder, &device, MemoryKind::Master).unwrap();
    (device, decoder, weights)
}

/// A rank at the table.
pub struct Rank<'a> {
    pub index: usize,
    pub table: &'a Table,
}

impl Rank<'_> {
    /// Everyone's numbers, by rank.
    fn exchange(&self, x: &[f32]) -> Vec<Vec<f32>> {
        self.table.sums.lock().unwrap()[self.index] = x.to_vec();
        self.table.barrier.wait();
        let all = self.table.sums.lock().unwrap().clone();
        self.table.barrier.wait();
        all
    }

    fn part(&self, index: usize) -> usize {
        let count = self.table.sums.lock().unwrap().len();
        TensorParallelShard { index, count }.token_part()
    }

    /// Gathers rows, of which `counts[owner(rank)]` are of a rank, in the order of owners.
    fn gather_by(&self, x: &mut Tensor, counts: &[usize], owner: impl Fn(usize) -> usize) {
        self.table.bytes.lock().unwrap()[self.index] = x.view().as_bytes().to_vec();
        self.table.barrier.wait();
        let (mut all, width) = (x.view().as_bytes().to_vec(), x.cols() * x.dtype().size());
        for (rank, theirs) in self.table.bytes.lock().unwrap().iter().enumerate() {
            assert_eq!(theirs.len(), counts.iter().sum::<usize>() * width, "ranks gather the same");
            let start = counts[..owner(rank)].iter().sum::<usize>() * width;
            let own = start..start + counts[owner(rank)] * width;
            all[own.clone()].copy_from_slice(&theirs[own]);
        }
        x.view_mut().copy_from_bytes(&all);
        self.table.barrier.wait();
    }
}

/// Adds by pairs, neighbours first, if there are as many as a power of two; else in order.
fn add_up(mut terms: Vec<Vec<f32>>) -> Vec<f32> {
    let add = |mut left: Vec<f32>, right: &Vec<f32>| {
        assert_eq!(left.len(), right.len(), "ranks sum the same");
        left.iter_mut().zip(right).for_each(|(x, y)| *x += y);
        left
    };
    while terms.len() > 1 && terms.len().is_power_of_two() {
        terms = terms.chunks(2).map(|pair| add(pair[0].clone(), &pair[1])).collect();
    }
    let first = terms[0].clone();
    terms[1..].iter().fold(first, add)
}

impl TensorParallelOps for Rank<'_> {
    fn sum(&self, _: &Device, x: &mut Tensor, order: RankOrder) -> Result<()> {
        let x = x.view_mut().into_slice::<f32>();
        let mut terms = self.exchange(x);
        if order == RankOrder::TokenParts {
            let by_rank = terms.clone();
            by_rank.into_iter().enumerate().for_each(|(rank, term)| terms[self.part(rank)] = term);
        }
        x.copy_from_slice(&add_up(terms));
        Ok(())
    }

    fn gather_rows(&self, _: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()> {
        self.gather_by(x, counts, |rank| rank);
        Ok(())
    }

    fn gather_tokens(&self, _: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()> {
        self.gather_by(x, counts, |rank| self.part(rank));
        Ok(())
    }

    fn sum_tokens(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()> {
        self.sum(device, x, RankOrder::Ranks)?;
        let part = self.part(self.index);
        let start: usize = counts[..part].iter().sum();
        let own = start * x.cols()..(start + counts[part]) * x.cols();
        let x = x.view_mut().into_slice::<f32>();
        assert_eq!(x.len() % counts.iter().sum::<usize>(), 0);
        // What is unspecified must not be read.
        x[..own.start].fill(f32::NAN);
        x[own.end..].fill(f32::NAN);
        Ok(())
    }

    fn gather(&self, numbers: &mut [f64]) -> Result<()> {
        self.table.numbers.lock().unwrap()[self.index] = numbers.to_vec();
        self.table.barrier.wait();
        let each = numbers.len() / self.table.numbers.lock().unwrap().len();
        for (rank, theirs) in self.table.numbers.lock().unwrap().iter().enumerate() {
            let part = rank * each..(rank + 1) * each;
            numbers[part.clone()].copy_from_slice(&theirs[part]);
        }
        self.table.barrier.wait();
        Ok(())
    }
}
