//! The thread pool of kernels: the caller and a fixed number of workers.
//!
//! A job is a number of blocks; a free thread takes the next one. The thread of a block is left to
//! chance, its result is not: kernels cut work by shape alone, so results do not depend on the
//! number of threads.
//!
//! Workers spin for a moment after each job before they sleep, because kernels follow one another
//! within microseconds. The caller does not wait for a worker that is still asleep when the others
//! have finished.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

use self::primitives::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Cell, Condvar, IN_BLOCK, JoinHandle, Mutex, MutexGuard,
    Ordering, hint, thread,
};

/// Threads and what they share: the standard library's, or loom's, which tries every order of their steps.
#[cfg(not(all(test, loom)))]
mod primitives {
    pub(super) use std::cell::Cell;
    pub(super) use std::hint;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use std::thread::{self, JoinHandle};

    std::thread_local! {
        /// True while this thread runs a block; a nested job then runs on this thread alone.
        pub(super) static IN_BLOCK: Cell<bool> = const { Cell::new(false) };
    }
}
#[cfg(all(test, loom))]
mod primitives {
    pub(super) use loom::cell::Cell;
    pub(super) use loom::hint;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use loom::thread::{self, JoinHandle};

    loom::thread_local! {
        pub(super) static IN_BLOCK: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }
}

/// Rounds of spinning before a worker sleeps or a caller yields: 40 to 120 microseconds, by the
/// length of a pause. Each round is a step that loom must order.
const SPINS: u32 = if cfg!(all(test, loom)) { 1 } else { 1 << 11 };

/// Low half of [`Shared::state`]: workers inside the job. Above it are the open bit and the job's
/// number.
const INSIDE: u64 = 0x7fff_ffff;
const OPEN: u64 = 1 << 31;
const NUMBER: u64 = 1 << 32;

type Panic = Box<dyn std::any::Any + Send>;

/// A job as workers see it: the block function with its lifetime erased, and the number of blocks.
#[derive(Clone, Copy)]
struct Job {
    block: *const (dyn Fn(usize) + Sync),
    num_blocks: usize,
}

struct Shared {
    /// Job number, open bit and number of workers inside.
    state: AtomicU64,
    /// Written only while the job is closed and no worker is inside.
    job: Cell<Option<Job>>,
    next_block: AtomicUsize,
    panic: Mutex<Option<Panic>>,
    stop: AtomicBool,
    /// Number of workers asleep; the mutex orders going to sleep against waking.
    asleep: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: the caller writes `job` while the state is closed with no worker inside. Workers read it
// only between joining (an acquiring exchange on `state`) and leaving (a releasing one). The block
// function is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is never used after the call that stored it has returned.
unsafe impl Send for Shared {}

/// The caller and its workers.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a job: callers on different threads take turns.
    turn: Mutex<()>,
}

impl ThreadPool {
    /// Starts a pool of `threads` threads, the caller included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: Cell::new(None),
            next_block: AtomicUsize::new(0),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            asleep: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut team = Self { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&team.shared);
            let worker =
                thread::Builder::new().name(format!("tandem-cpu-{index}")).spawn(move || shared.work())?;
            team.workers.push(worker);
        }
        Ok(team)
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `block(0) … block(num_blocks - 1)`, each once, and returns when all have finished.
    ///
    /// # Panics
    /// With the payload of the first block that panicked.
    pub(crate) fn run(&self, num_blocks: usize, block: &(dyn Fn(usize) + Sync)) {
        if num_blocks <= 1 || self.workers.is_empty() || IN_BLOCK.with(std::cell::Cell::get) {
            (0..num_blocks).for_each(block);
            return;
        }
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Only workers inside the job use the pointer, and this
        // function closes the job and waits for them before it returns.
        let block = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(block)
        };
        let job = Job { block, num_blocks };
        shared.job.set(Some(job));
        shared.next_block.store(0, Ordering::Relaxed);
        // Sequentially consistent against the check in `wait_for_job`, so that no worker falls
        // asleep past this job.
        shared.state.fetch_add(NUMBER | OPEN, Ordering::SeqCst);
        if *lock(&shared.asleep) > 0 {
            shared.wake.notify_all();
        }
        shared.take_blocks(job);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            pause(&mut spins);
        }
        shared.job.set(None);
        if let Some(payload) = lock(&shared.panic).take() {
            resume_unwind(payload);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.asleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of blocks; nothing else can fail.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        while let Some(state) = self.wait_for_job(seen) {
            let joined = self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
            if joined.is_err() {
                continue;
            }
            seen = state / NUMBER;
            if let Some(job) = self.job.get() {
                self.take_blocks(job);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an open job other than number `seen` and returns its state, or `None` when the
    /// pool is dropped.
    fn wait_for_job(&self, seen: u64) -> Option<u64> {
        let fresh = |state: u64| state & OPEN != 0 && state / NUMBER != seen;
        for _ in 0..SPINS {
            let state = self.state.load(Ordering::Acquire);
            if fresh(state) {
                return Some(state);
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            hint::spin_loop();
        }
        let mut asleep = lock(&self.asleep);
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if fresh(state) {
                return Some(state);
            }
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            *asleep += 1;
            asleep = self.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
            *asleep -= 1;
        }
    }

    fn take_blocks(&self, job: Job) {
        // SAFETY: the caller of `run` keeps the function alive until the job is closed and all
        // workers have left.
        let block = unsafe { &*job.block };
        IN_BLOCK.with(|is_in_block| is_in_block.set(true));
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let index = self.next_block.fetch_add(1, Ordering::Relaxed);
                if index >= job.num_blocks {
                    break;
                }
                block(index);
            }
        }));
        IN_BLOCK.with(|is_in_block| is_in_block.set(false));
        if let Err(payload) = result {
            // A panic makes the other blocks pointless.
            self.next_block.store(job.num_blocks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spins at first, then yields to the scheduler: threads may outnumber cores.
fn pause(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Every order of the threads' steps up to a number of preemptions, by loom:
/// `RUSTFLAGS="--cfg loom" cargo test --release -p tandem-kernels --lib thread_pool`.
#[cfg(all(test, loom))]
mod orders {
    use super::*;

    fn every_order(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(model);
    }

    /// Cells that blocks write and the caller reads. Loom reports an access that nothing orders.
    struct Results(Vec<Cell<usize>>);

    // SAFETY: each block writes its own cell, and the caller reads after `run`. That this is ordered is
    // what the models check.
    unsafe impl Sync for Results {}

    fn run_and_check(pool: &ThreadPool, num_blocks: usize) {
        let results = Results((0..num_blocks).map(|_| Cell::new(0)).collect());
        let results = &results;
        pool.run(num_blocks, &move |block| results.0[block].set(results.0[block].get() + block + 1));
        for (block, result) in results.0.iter().enumerate() {
            assert_eq!(result.get(), block + 1, "block {block} runs once");
        }
    }

    #[test]
    fn a_job_is_complete_when_run_returns() {
        every_order(3, || run_and_check(&ThreadPool::new(2).unwrap(), 2));
    }

    #[test]
    fn a_late_worker_joins_no_job_that_is_over() {
        every_order(2, || {
            let pool = ThreadPool::new(2).unwrap();
            run_and_check(&pool, 2);
            run_and_check(&pool, 3);
        });
    }

    #[test]
    fn two_workers_share_a_job() {
        every_order(2, || run_and_check(&ThreadPool::new(3).unwrap(), 2));
    }

    #[test]
    fn two_callers_take_turns() {
        every_order(1, || {
            let pool = Arc::new(ThreadPool::new(2).unwrap());
            let other = Arc::clone(&pool);
            let caller = thread::spawn(move || run_and_check(&other, 2));
            run_and_check(&pool, 2);
            caller.join().unwrap();
        });
    }

    #[test]
    fn a_pool_that_never_ran_ends() {
        every_order(3, || drop(ThreadPool::new(2).unwrap()));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_block_runs_exactly_once() {
        for threads in [1, 2, 3, 5] {
            let team = ThreadPool::new(threads).unwrap();
            for num_blocks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..num_blocks).map(|_| AtomicUsize::new(0)).collect();
                team.run(num_blocks, &|b| {
                    counts[b].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {num_blocks}"
                );
            }
        }
    }

    #[test]
    fn sleeping_workers_take_part_again() {
        let team = ThreadPool::new(2).unwrap();
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            // Two blocks that wait for one another: only two threads can finish them.
            let arrived = AtomicUsize::new(0);
            team.run(2, &|_| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn nested_jobs_run_on_the_calling_thread() {
        let team = ThreadPool::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        team.run(4, &|outer| {
            let here = std::thread::current().id();
            team.run(4, &|inner| {
                assert_eq!(std::thread::current().id(), here);
                sum.fetch_add(outer * 4 + inner, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 120);
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let team = ThreadPool::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(5, &|b| {
                            sum.fetch_add(b, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let team = ThreadPool::new(3).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| team.run(8, &|b| assert!(b != 5, "block five"))));
        let payload = caught.unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>().copied(), Some("block five"));
        let count = AtomicUsize::new(0);
        team.run(8, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 8);
    }
}
