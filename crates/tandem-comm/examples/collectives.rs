//! Speed of sums between processes of one machine over the engine `tcp`: medians of all-reduces.
//!
//! ```sh
//! cargo run --release -p tandem-comm --example collectives
//! ```
//!
//! `TANDEM_SHARED_MEMORY=0` measures TCP instead of shared memory. The example `mpi_speed` compares
//! with an MPI.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{Element, ProcessGroup, Reduction, tcp};

const DEADLINE: Duration = Duration::from_secs(120);
/// Variable of a rank's process: rank, number of ranks, port of the store.
const RANK: &str = "TANDEM_EXAMPLE_RANK";
const KIB: usize = 1 << 10;
const SIZES: [usize; 3] = [64 * KIB, 4096 * KIB, 65536 * KIB];
fn main() {
    if let Ok(rank) = std::env::var(RANK) {
        let fields: Vec<&str> = rank.split(' ').collect();
        let number = |i: usize| fields[i].parse().expect("a number");
        return run(number(0), number(1), number(2) as u16);
    }
    println!("all_reduce(sum), median milliseconds");
    for size in 2..=4 {
        let times = measure(size);
        let names = SIZES.iter().flat_map(|bytes| ["i64", "f32"].map(|kind| (bytes / KIB, kind)));
        for ((kib, kind), time) in names.zip(&times) {
            println!("{size} processes, {kib:6} KiB {kind}: {time:9.3}");
        }
        println!("{size} processes, barrier        : {:9.3}", times.last().expect("a barrier"));
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Starts the ranks and returns the first one's medians.
fn measure(size: usize) -> Vec<f64> {
    let server = StoreServer::bind(0).expect("a port");
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env(RANK, format!("{rank} {size} {}", server.port()));
        command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        command.spawn().expect("a process")
    };
    let ranks: Vec<Child> = (0..size).map(start).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().expect("an end")).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "a rank failed");
    let text = String::from_utf8_lossy(&outputs[0].stdout).into_owned();
    text.split_whitespace().map(|time| time.parse().expect("milliseconds")).collect()
}

fn run(rank: usize, size: usize, port: u16) {
    let store = Store::connect("127.0.0.1", port, DEADLINE).expect("the store");
    let mut group = tcp::group(store, rank, size, DEADLINE, tcp::AbortFlag::default()).expect("a group");
    let mut report = String::new();
    for bytes in SIZES {
        let repeats = (SIZES[2] / bytes).clamp(7, 200);
        let times = [
            sums(&mut group, bytes, repeats, 1i64, size as i64),
            sums(&mut group, bytes, repeats, 1f32, size as f32),
        ];
        times.iter().for_each(|time| report += &format!("{time} "));
    }
    let barriers = (0..500).map(|_| {
        let began = Instant::now();
        group.barrier().expect("a barrier");
        began.elapsed().as_secs_f64() * 1e3
    });
    println!("{report}{}", median(barriers.collect()));
}

/// Milliseconds of an all-reduce of ones, the median of several.
fn sums<T: Element + PartialEq>(
    group: &mut ProcessGroup,
    bytes: usize,
    repeats: usize,
    one: T,
    sum: T,
) -> f64 {
    let mut data = vec![one; bytes / size_of::<T>()];
    let times = (0..repeats + 2).map(|_| {
        data.fill(one);
        group.barrier().expect("a barrier");
        let began = Instant::now();
        group.all_reduce(&mut data, Reduction::Sum).expect("a sum");
        let time = began.elapsed().as_secs_f64() * 1e3;
        assert!(data.iter().all(|x| *x == sum), "another sum");
        time
    });
    median(times.skip(2).collect())
}
