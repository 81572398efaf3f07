//! Speed of sums between processes of one machine: medians of all-reduces, of each engine in turn.
//!
//! ```sh
//! cargo run --release -p tandem-comm --example collectives
//! cargo run --release -p tandem-comm --example collectives --features gloo   # with Gloo, and the ratio
//! ```
//!
//! `TANDEM_SHARED_MEMORY=0` measures TCP instead of shared memory.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{Element, ProcessGroup, Reduction, tcp};

const DEADLINE: Duration = Duration::from_secs(120);
/// Variables of a rank's process: engine, rank, number of ranks, port of the store.
const RANK: &str = "TANDEM_EXAMPLE_RANK";
const KIB: usize = 1 << 10;
const SIZES: [usize; 3] = [64 * KIB, 4096 * KIB, 65536 * KIB];
/// Number of turns of the engines, which a change of the machine's load then meets alike.
const TURNS: usize = 5;

fn engines() -> &'static [&'static str] {
    if cfg!(feature = "gloo") { &["tcp", "gloo"] } else { &["tcp"] }
}

fn main() {
    if let Ok(rank) = std::env::var(RANK) {
        let fields: Vec<&str> = rank.split(' ').collect();
        let number = |i: usize| fields[i].parse().expect("a number");
        return run(fields[0], number(1), number(2), number(3) as u16);
    }
    println!("all_reduce(sum), median milliseconds; the ratio is tcp's speed over Gloo's");
    for size in 2..=4 {
        let mut times: Vec<Vec<Vec<f64>>> = vec![Vec::new(); engines().len()];
        for _ in 0..TURNS {
            for (engine, times) in engines().iter().zip(&mut times) {
                times.push(measure(engine, size));
            }
        }
        let names = SIZES.iter().flat_map(|bytes| ["i64", "f32"].map(|kind| (bytes / KIB, kind)));
        for (row, (kib, kind)) in names.enumerate() {
            let medians = times.iter().map(|turns| median(turns.iter().map(|turn| turn[row]).collect()));
            let medians: Vec<f64> = medians.collect();
            let of_engines: Vec<String> =
                engines().iter().zip(&medians).map(|(engine, time)| format!("{engine} {time:9.3}")).collect();
            let ratio =
                medians.get(1).map_or(String::new(), |gloo| format!("   ratio {:.2}", gloo / medians[0]));
            println!("{size} processes, {kib:6} KiB {kind}: {}{ratio}", of_engines.join("  "));
        }
        let barriers: Vec<String> = engines()
            .iter()
            .zip(&times)
            .map(|(engine, turns)| {
                let barriers = turns.iter().map(|turn| *turn.last().expect("a barrier")).collect();
                format!("{engine} {:9.3}", median(barriers))
            })
            .collect();
        println!("{size} processes, barrier        : {}", barriers.join("  "));
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Starts the ranks and returns the first one's medians.
fn measure(engine: &str, size: usize) -> Vec<f64> {
    let server = StoreServer::bind(0).expect("a port");
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env(RANK, format!("{engine} {rank} {size} {}", server.port()));
        command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        command.spawn().expect("a process")
    };
    let ranks: Vec<Child> = (0..size).map(start).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().expect("an end")).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "a rank failed");
    let text = String::from_utf8_lossy(&outputs[0].stdout).into_owned();
    text.split_whitespace().map(|time| time.parse().expect("milliseconds")).collect()
}

fn run(engine: &str, rank: usize, size: usize, port: u16) {
    let store = Store::connect("127.0.0.1", port, DEADLINE).expect("the store");
    let mut group = match engine {
        #[cfg(feature = "gloo")]
        "gloo" => {
            tandem_comm::gloo::group(store, rank, size, DEADLINE, tcp::AbortFlag::default()).expect("a group")
        }
        _ => tcp::group(store, rank, size, DEADLINE, tcp::AbortFlag::default()).expect("a group"),
    };
    let mut report = String::new();
    for bytes in SIZES {
        let repeats = (SIZES[2] / bytes).clamp(7, 200);
        let times =
            [sums::<i64>(&mut group, bytes, repeats, 1), sums::<f32>(&mut group, bytes, repeats, 1.0)];
        times.iter().for_each(|time| report += &format!("{time} "));
    }
    let barriers = (0..500).map(|_| {
        let began = Instant::now();
        group.barrier().expect("a barrier");
        began.elapsed().as_secs_f64() * 1e3
    });
    println!("{report}{}", median(barriers.collect()));
}

/// Milliseconds of an all-reduce, the median of several.
fn sums<T: Element>(group: &mut ProcessGroup, bytes: usize, repeats: usize, one: T) -> f64 {
    let mut data = vec![one; bytes / size_of::<T>()];
    let times = (0..repeats + 2).map(|_| {
        group.barrier().expect("a barrier");
        let began = Instant::now();
        group.all_reduce(&mut data, Reduction::Sum).expect("a sum");
        began.elapsed().as_secs_f64() * 1e3
    });
    median(times.skip(2).collect())
}
