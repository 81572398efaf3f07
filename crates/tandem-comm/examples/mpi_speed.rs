//! Speed of sums over MPI: this crate's engine beside `MPI_Allreduce` itself, in one run.
//!
//! ```text
//! cargo build --release -p tandem-comm --example mpi_speed
//! mpiexec -n 2 target/release/examples/mpi_speed
//! ```
//!
//! Both reduce in turns, so that noise of the machine meets both; the fastest and the median of each
//! are printed with the ratio of the medians, above 1 where the engine is faster. The engine compares
//! the calls of all ranks and adds floats in a fixed order, which MPI does not.

use std::time::{Duration, Instant};

use tandem_comm::launch::environment;
use tandem_comm::mpi::{Direct, Session};
use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{AbortFlag, CommError, Element, ProcessGroup, Reduction};

const DEADLINE: Duration = Duration::from_secs(120);

fn main() -> Result<(), CommError> {
    let mut session = Session::open(&environment(), DEADLINE)?;
    let (rank, size) = (session.rank(), session.size());
    let server = if rank == 0 { Some(StoreServer::bind(0)?) } else { None };
    let port = server.as_ref().map(|server| server.port().to_string()).unwrap_or_default();
    let port = session.broadcast(port.as_bytes(), 8, DEADLINE)?;
    let port = String::from_utf8_lossy(&port).parse().expect("rank 0 sends a port");
    let store = Store::connect("127.0.0.1", port, DEADLINE)?;
    let direct = session.direct();
    let mut group = session.group(store, DEADLINE, AbortFlag::default())?;
    if rank == 0 {
        println!("{}, {size} ranks", session.library().version);
        println!(
            "{:>8} {:>4} {:>24} {:>24} {:>6}",
            "bytes", "type", "engine: best, median us", "MPI: best, median us", "ratio"
        );
    }
    for (bytes, rounds) in [(64 << 10, 400), (4 << 20, 60), (64 << 20, 11)] {
        measure::<i64>(&mut group, &direct, bytes, rounds, |x| x as i64)?;
        measure::<f32>(&mut group, &direct, bytes, rounds, |x| x as f32)?;
    }
    Ok(())
}

fn measure<T: Element + PartialEq>(
    group: &mut ProcessGroup,
    direct: &Direct,
    bytes: usize,
    rounds: usize,
    number: fn(usize) -> T,
) -> Result<(), CommError> {
    let fresh: Vec<T> = (0..bytes / size_of::<T>()).map(|i| number(i % 7 + group.rank())).collect();
    let (mut own, mut theirs, mut data) = (Vec::new(), Vec::new(), fresh.clone());
    for round in 0..2 * rounds {
        data.copy_from_slice(&fresh);
        group.barrier()?;
        let began = Instant::now();
        let times = if round % 2 == 0 {
            group.all_reduce(&mut data, Reduction::Sum)?;
            &mut own
        } else {
            direct.all_reduce(&mut data)?;
            &mut theirs
        };
        times.push(began.elapsed().as_secs_f64() * 1e6);
        let ranks = 0..group.size();
        assert!(data[5] == number(ranks.map(|rank| 5 + rank).sum()), "another sum");
    }
    own.sort_by(f64::total_cmp);
    theirs.sort_by(f64::total_cmp);
    let median = |times: &[f64]| times[times.len() / 2];
    if group.rank() == 0 {
        println!(
            "{bytes:>8} {:>4} {:>12.0} {:>11.0} {:>12.0} {:>11.0} {:>6.2}",
            T::KIND.to_string(),
            own[0],
            median(&own),
            theirs[0],
            median(&theirs),
            median(&theirs) / median(&own)
        );
    }
    Ok(())
}
