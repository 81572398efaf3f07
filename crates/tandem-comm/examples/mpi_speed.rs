//! Speed of sums between processes: the engines `tcp` and `mpi` beside `MPI_Allreduce` itself, in one run.
//!
//! ```text
//! cargo build --release -p tandem-comm --example mpi_speed
//! mpiexec -n 2 target/release/examples/mpi_speed
//! ```
//!
//! All reduce in turns, so that noise of the machine meets each; medians are printed with their
//! ratios to MPI's own, above 1 where the engine is faster. The engines compare the calls of all ranks
//! and add floats in a fixed order, which MPI does not.

use std::time::{Duration, Instant};

use tandem_comm::launch::environment;
use tandem_comm::launch::meeting::Meeting;
use tandem_comm::mpi::{Direct, Session};
use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{AbortFlag, CommError, Element, ProcessGroup, Reduction, tcp};

const DEADLINE: Duration = Duration::from_secs(120);

fn main() -> Result<(), CommError> {
    let mut session = Session::open(&environment(), &mut Meeting::silent(DEADLINE))?;
    let (rank, size) = (session.rank(), session.size());
    let server = if rank == 0 { Some(StoreServer::bind(0)?) } else { None };
    let port = server.as_ref().map(|server| server.port().to_string()).unwrap_or_default();
    let port = session.broadcast(port.as_bytes(), 8, &mut Meeting::silent(DEADLINE))?;
    let port = String::from_utf8_lossy(&port).parse().expect("rank 0 sends a port");
    let store = Store::connect("127.0.0.1", port, DEADLINE)?;
    let direct = session.direct();
    let tcp = tcp::group(store.prefixed("tcp/"), rank, size, DEADLINE, AbortFlag::default())?;
    let mpi = session.group(store.prefixed("mpi/"), DEADLINE, AbortFlag::default())?;
    let mut ways = Ways { tcp, mpi, direct };
    if rank == 0 {
        println!("{}, {size} ranks; median microseconds, and ratios to MPI's own", session.library().version);
        println!(
            "{:>8} {:>4} {:>10} {:>10} {:>10} {:>8} {:>8}",
            "bytes", "type", "tcp", "mpi", "MPI", "tcp", "mpi"
        );
    }
    for (bytes, rounds) in [(64 << 10, 400), (4 << 20, 60), (64 << 20, 11)] {
        measure::<i64>(&mut ways, bytes, rounds, |x| x as i64)?;
        measure::<f32>(&mut ways, bytes, rounds, |x| x as f32)?;
    }
    Ok(())
}

/// Ways to sum that are compared.
struct Ways {
    tcp: ProcessGroup,
    mpi: ProcessGroup,
    direct: Direct,
}

fn measure<T: Element + PartialEq>(
    ways: &mut Ways,
    bytes: usize,
    rounds: usize,
    number: fn(usize) -> T,
) -> Result<(), CommError> {
    let Ways { tcp, mpi, direct } = ways;
    let (rank, size) = (tcp.rank(), tcp.size());
    let fresh: Vec<T> = (0..bytes / size_of::<T>()).map(|i| number(i % 7 + rank)).collect();
    let (mut times, mut data) = ([const { Vec::new() }; 3], fresh.clone());
    for round in 0..3 * rounds {
        data.copy_from_slice(&fresh);
        tcp.barrier()?;
        let began = Instant::now();
        match round % 3 {
            0 => tcp.all_reduce(&mut data, Reduction::Sum)?,
            1 => mpi.all_reduce(&mut data, Reduction::Sum)?,
            _ => direct.all_reduce(&mut data)?,
        }
        times[round % 3].push(began.elapsed().as_secs_f64() * 1e6);
        assert!(data[5] == number((0..size).map(|rank| 5 + rank).sum()), "another sum");
    }
    let [tcp, mpi, own] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    if rank == 0 {
        println!(
            "{bytes:>8} {:>4} {tcp:>10.0} {mpi:>10.0} {own:>10.0} {:>8.2} {:>8.2}",
            T::KIND.to_string(),
            own / tcp,
            own / mpi
        );
    }
    Ok(())
}
