//! Pool of message buffers: a stream of messages allocates no memory.

#[derive(Default)]
pub(crate) struct BufferPool(Vec<Vec<u8>>);

impl BufferPool {
    /// Takes the smallest buffer with room for `len` bytes, else the largest, emptied.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let badness = |&index: &usize| match self.0[index].capacity() {
            capacity if capacity >= len => (false, capacity),
            capacity => (true, usize::MAX - capacity),
        };
        let best = (0..self.0.len()).min_by_key(badness);
        let mut buffer = best.map_or_else(Vec::new, |index| self.0.swap_remove(index));
        buffer.clear();
        buffer
    }

    pub(crate) fn put(&mut self, buffer: Vec<u8>) {
        self.0.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_that_fits_best_is_taken() {
        let mut spare = BufferPool::default();
        assert_eq!(spare.take(5).capacity(), 0, "there is none");
        [10, 1000, 100].into_iter().for_each(|len| spare.put(Vec::with_capacity(len)));
        let capacities = [50, 50, 50, 0].map(|len| spare.take(len).capacity());
        assert_eq!(capacities, [100, 1000, 10, 0]);
    }
}
