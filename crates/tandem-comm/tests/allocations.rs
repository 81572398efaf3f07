//! Collectives between processes allocate nothing once their buffers are there.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{ProcessGroup, Reduction, tcp};

const DEADLINE: Duration = Duration::from_secs(120);
/// Variable of a rank's process: rank, number of ranks, port of the store.
const RANK: &str = "TANDEM_ALLOCATIONS_RANK";

/// Allocations of all threads of this process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A step's calls: long and short sums, parts, gathers, a broadcast and a barrier.
fn step(group: &mut ProcessGroup, long: &mut [i64], short: &mut [f32], counts: &[usize]) {
    group.all_reduce(long, Reduction::Sum).unwrap();
    group.all_reduce(short, Reduction::Sum).unwrap();
    group.reduce_scatter(long, counts, Reduction::Sum).unwrap();
    group.all_gather(long, counts).unwrap();
    group.broadcast(short, 1).unwrap();
    group.barrier().unwrap();
}

/// Runs a rank; in the test process this is an empty test.
#[test]
fn child() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let fields: Vec<usize> = rank.split(' ').map(|field| field.parse().unwrap()).collect();
    let (rank, size, port) = (fields[0], fields[1], fields[2]);
    let store = Store::connect("127.0.0.1", port as u16, DEADLINE).unwrap();
    let mut group = tcp::group(store, rank, size, DEADLINE, tcp::AbortFlag::default()).unwrap();
    let counts: Vec<usize> = (0..size).map(|rank| 300_000 + rank).collect();
    let mut long = vec![1i64; counts.iter().sum()];
    let mut short = vec![1f32; 5];
    for _ in 0..3 {
        step(&mut group, &mut long, &mut short, &counts);
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..10 {
        step(&mut group, &mut long, &mut short, &counts);
    }
    let after = ALLOCATIONS.load(Ordering::Relaxed);
    // All have counted before one of them ends.
    group.barrier().unwrap();
    assert_eq!(after - before, 0, "allocations of rank {rank} of {size} in ten steps");
}

fn start(size: usize, shared_memory: &str) {
    let server = StoreServer::bind(0).unwrap();
    let ranks = (0..size).map(|rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact"]).env(RANK, format!("{rank} {size} {}", server.port()));
        command.env("TANDEM_SHARED_MEMORY", shared_memory);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    for rank in ranks.collect::<Vec<_>>() {
        let output = rank.wait_with_output().unwrap();
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }
}

#[test]
fn calls_through_shared_memory_allocate_nothing() {
    for size in [2, 3, 4] {
        start(size, "1");
    }
}

#[test]
fn calls_through_sockets_allocate_nothing() {
    for size in [2, 3, 4] {
        start(size, "0");
    }
}
