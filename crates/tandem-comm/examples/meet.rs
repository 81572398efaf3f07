//! Meeting of many ranks: processes that join a job, exchange a hash and leave, on this machine.
//!
//! ```sh
//! cargo run --release -p tandem-comm --example meet            # 1000 processes
//! cargo run --release -p tandem-comm --example meet -- 64
//! ```
//!
//! As under `tandem launch`, this process serves the store. Each rank joins as a training run does,
//! with its heartbeat, and gathers a hash of 32 bytes from every rank.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tandem_comm::Launch;
use tandem_comm::launch::meeting::Meeting;
use tandem_comm::open_files;
use tandem_comm::processes::{ProcessEngine, join};
use tandem_comm::store::StoreServer;

/// Also for starting all processes, of which the first wait for the last.
const DEADLINE: Duration = Duration::from_secs(300);
const RANK: &str = "RANK";
const HASH: usize = 32;

fn main() {
    if std::env::var_os(RANK).is_some() {
        return meet();
    }
    let size: usize = std::env::args().nth(1).map_or(1000, |size| size.parse().expect("a number of ranks"));
    if let Some(raised) =
        open_files::suffice(open_files::needed(size, false, true), size).expect("open files")
    {
        println!("{raised}");
    }
    let server = StoreServer::bind(0).expect("a port");
    let began = Instant::now();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env(RANK, rank.to_string()).env("WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", server.port().to_string());
        command.env("TORCHELASTIC_RUN_ID", "meet").env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.spawn().expect("a process")
    };
    let ranks: Vec<Child> = (0..size).map(start).collect();
    let started = began.elapsed();
    let num_failed =
        ranks.into_iter().filter_map(|mut rank| rank.wait().ok()).filter(|s| !s.success()).count();
    assert_eq!(num_failed, 0, "ranks failed");
    println!(
        "{size} processes: started after {:.2} s, all ended after {:.2} s",
        started.as_secs_f64(),
        began.elapsed().as_secs_f64()
    );
}

fn meet() {
    let launch = Launch::detect().expect("the variables");
    let mut meeting = Meeting::silent(DEADLINE);
    let mut joined = join(&launch, ProcessEngine::Tcp, DEADLINE, &mut meeting).expect("a group");
    let group = &mut joined.group;
    let own = [group.rank() as u8; HASH];
    let all = group.gather(&own, &vec![HASH; group.size()]).expect("the hashes");
    assert!(all.chunks_exact(HASH).enumerate().all(|(rank, hash)| hash == [rank as u8; HASH]));
}
