//! Exchange between the ranks of a split decoder, which are threads.

use std::sync::{Arc, Barrier, Mutex};

use tandem_kernels::{Device, MemoryKind, Tensor};
use tandem_model::{Decoder, FlatWeights, Result, TensorParallelOps, TensorParallelShard};

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

impl TensorParallelOps for Rank<'_> {
    fn sum(&self, _: &Device, x: &mut Tensor) -> Result<()> {
        let x = x.view_mut().into_slice::<f32>();
        self.table.sums.lock().unwrap()[self.index] = x.to_vec();
        self.table.barrier.wait();
        x.fill(0.0);
        for terms in &*self.table.sums.lock().unwrap() {
            assert_eq!(x.len(), terms.len(), "ranks sum the same");
            x.iter_mut().zip(terms).for_each(|(x, term)| *x += term);
        }
        self.table.barrier.wait();
        Ok(())
    }

    fn gather_rows(&self, _: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()> {
        self.table.bytes.lock().unwrap()[self.index] = x.view().as_bytes().to_vec();
        self.table.barrier.wait();
        let (mut all, width) = (Vec::new(), x.cols() * x.dtype().size());
        for (rank, theirs) in self.table.bytes.lock().unwrap().iter().enumerate() {
            assert_eq!(theirs.len(), counts.iter().sum::<usize>() * width, "ranks gather the same");
            all.extend_from_slice(&theirs[all.len()..][..counts[rank] * width]);
        }
        x.view_mut().copy_from_bytes(&all);
        self.table.barrier.wait();
        Ok(())
    }

    fn sum_rows(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()> {
        self.sum(device, x)?;
        let start: usize = counts[..self.index].iter().sum();
        let own = start * x.cols()..(start + counts[self.index]) * x.cols();
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
