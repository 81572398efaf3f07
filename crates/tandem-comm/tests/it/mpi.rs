//! The MPI engine under real launchers: the conformance suite, and ranks that disagree, hang or die.
//!
//! `TANDEM_TEST_MPICH` and `TANDEM_TEST_INTEL_MPI` name a prefix with `bin/mpiexec` and `lib`, such as
//! a virtual environment with PyPI's `mpich` or `impi-rt`. `TANDEM_TEST_OPEN_MPI` names an `mpirun`.
//! Without any, every test reports that it is skipped.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tandem_comm::launch::environment;
use tandem_comm::launch::meeting::Meeting;
use tandem_comm::mpi::{PATH, Session};
use tandem_comm::store::{Store, StoreServer};
use tandem_comm::{AbortFlag, CommError, Environment, ProcessGroup, Reduction, Result};

use crate::conformance;
use crate::disagreement::{
    DIFFERENT_CALLS, LONG_DIFFERENT_CALLS, different_calls, long_difference, long_different_calls,
};

/// Deadline of ranks that succeed; only a bug waits for it.
const DEADLINE: Duration = Duration::from_secs(300);
/// A deadline that is missed on purpose, long enough for the other ranks on a busy machine.
const MISSED: Duration = Duration::from_secs(3);

const ROLE: &str = "TANDEM_TEST_ROLE";
const PORT: &str = "TANDEM_TEST_PORT";
const MILLISECONDS: &str = "TANDEM_TEST_DEADLINE";

/// A launcher with one of its libraries.
#[derive(Clone)]
struct Mpi {
    name: String,
    launcher: String,
    arguments: Vec<&'static str>,
    /// `None`: the engine's own search.
    library: Option<String>,
}

/// Returns the launchers that the environment names; reports if there is none.
fn every_mpi() -> Vec<Mpi> {
    let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut all = Vec::new();
    for (variable, vendor) in [("TANDEM_TEST_MPICH", "MPICH"), ("TANDEM_TEST_INTEL_MPI", "Intel MPI")] {
        let Some(prefix) = given(variable) else { continue };
        for library in ["libmpi_abi.so.1", "libmpi.so.12"] {
            let path = Path::new(&prefix).join("lib").join(library);
            let launcher = Path::new(&prefix).join("bin/mpiexec");
            let text = |path: &Path| path.to_string_lossy().into_owned();
            all.push(Mpi {
                name: format!("{vendor}, {library}"),
                launcher: text(&launcher),
                arguments: Vec::new(),
                // The standard ABI's is the one that is searched for beside the launcher.
                library: (library != "libmpi_abi.so.1").then(|| text(&path)),
            });
        }
    }
    if let Some(launcher) = given("TANDEM_TEST_OPEN_MPI") {
        // Containers run as root, with fewer cores than ranks.
        let arguments = vec!["--allow-run-as-root", "--oversubscribe"];
        all.push(Mpi { name: "Open MPI".to_owned(), launcher, arguments, library: None });
    }
    if all.is_empty() {
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        // Bypasses the capture of test output: a skipped test must not look like a passed one.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {name}: none of TANDEM_TEST_MPICH, TANDEM_TEST_INTEL_MPI, TANDEM_TEST_OPEN_MPI is set"
        );
    }
    all
}

/// A job of one test: its launcher, killed if the test ends before it, and the store of its results.
struct Job {
    launcher: Child,
    store: Store,
    size: usize,
    _server: StoreServer,
}

impl Job {
    fn start(mpi: &Mpi, role: &str, size: usize, deadline: Duration) -> Self {
        let server = StoreServer::bind(0).unwrap();
        let store = Store::connect("127.0.0.1", server.port(), DEADLINE).unwrap();
        let mut command = Command::new(&mpi.launcher);
        command.args(&mpi.arguments).args(["-n", &size.to_string()]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "mpi::child", "--nocapture", "--quiet"]);
        command.env(ROLE, role).env(PORT, server.port().to_string());
        command.env(MILLISECONDS, deadline.as_millis().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        match &mpi.library {
            Some(library) => command.env(PATH, library),
            None => command.env_remove(PATH),
        };
        Self { launcher: command.spawn().unwrap(), store, size, _server: server }
    }

    /// Waits for the results of `ranks`.
    fn results_of(&self, ranks: impl Iterator<Item = usize>) -> Vec<String> {
        let result = |rank| self.store.get(&format!("result/{rank}"), DEADLINE).unwrap();
        ranks.map(result).map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    /// Waits for all results and the launcher's end; returns whether it reports success, too.
    fn results(mut self) -> (Vec<String>, bool) {
        let results = self.results_of(0..self.size);
        (results, self.end())
    }

    /// Waits for the launcher's end; returns whether it reports success.
    fn end(&mut self) -> bool {
        let until = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < until, "the launcher hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until `count` ranks are ready.
    fn ready(&self, count: i64) {
        let until = Instant::now() + DEADLINE;
        while self.store.add("ready", 0).unwrap() < count {
            assert!(Instant::now() < until, "ranks do not get ready");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a signal to a rank.
    fn signal(&self, rank: usize, signal: &str) {
        let process = self.store.get(&format!("process/{rank}"), DEADLINE).unwrap();
        let process = String::from_utf8(process).unwrap();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Most have ended.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// Runs a role under a launcher and returns the ranks' results; a job that is well ends well.
fn well(mpi: &Mpi, role: &str, size: usize) -> Vec<String> {
    let (results, is_success) = Job::start(mpi, role, size, DEADLINE).results();
    assert!(is_success, "{}: {role} on {size} ranks: {results:?}", mpi.name);
    results
}

/// Runs a rank in its role; in the test process this is an empty test.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let store = Store::connect("127.0.0.1", number(PORT) as u16, DEADLINE).unwrap();
    let deadline = Duration::from_millis(number(MILLISECONDS));
    let mut session = Session::open(&environment(), &mut Meeting::silent(DEADLINE)).unwrap();
    let rank = session.rank();
    store.set(&format!("process/{rank}"), std::process::id().to_string().as_bytes()).unwrap();
    let of_group = store.reconnect().unwrap().prefixed("group/");
    let result = match session.group(of_group, deadline, AbortFlag::default()) {
        Err(error) => error.to_string(),
        Ok(mut group) => act(&role, &mut group, &store),
    };
    store.set(&format!("result/{rank}"), result.as_bytes()).unwrap();
    // The reply shows that the server has received everything sent before.
    assert!(store.check(&[&format!("result/{rank}")]).unwrap());
}

fn outcome(result: Result<()>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".to_owned())
}

fn act(role: &str, group: &mut ProcessGroup, store: &Store) -> String {
    match role {
        "conformance" => conformance::everything(group),
        "hundred megabytes" => conformance::hundred_megabytes(group),
        "floats" => return floats(group),
        "threads" => groups_in_threads(group),
        "large messages" => large_messages(group),
        "in a loop" => loop {
            let mut data = vec![1i64; 1 << 18];
            let mut floats = vec![1f32; 1 << 19];
            let summed = group.all_reduce(&mut data, Reduction::Sum);
            if let Err(error) = summed.and_then(|()| group.all_reduce(&mut floats, Reduction::Sum)) {
                return error.to_string();
            }
            store.add("ready", 1).unwrap();
        },
        "second is late" => {
            if group.rank() == 1 {
                store.wait(&["result/0", "result/2"], DEADLINE).unwrap();
            }
            return outcome(group.barrier());
        }
        "abort" => {
            if group.rank() == 2 {
                group.abort("the disk is full");
            }
            let first = group.barrier();
            assert_eq!(group.all_gather(&mut [0u8; 3], &[1; 3]), first, "a group that failed stays so");
            return outcome(first);
        }
        "ends early" if group.rank() == 2 => {}
        "ends early" => return outcome(group.barrier()),
        "first ends early" if group.rank() == 0 => {}
        "first ends early" => return outcome(group.barrier()),
        "ends late" => {
            if group.rank() == 1 {
                // Longer than the others' farewell.
                std::thread::sleep(Duration::from_millis(1500));
            }
        }
        "message of another length" if group.rank() == 0 => return outcome(group.send(1, &[1u8; 3])),
        "message of another length" => return outcome(group.recv(0, &mut [0u8; 4])),
        case => {
            return match case.strip_prefix("long ") {
                Some(case) => long_different_calls(case.parse().unwrap(), group),
                None => different_calls(case.parse().unwrap(), group),
            };
        }
    }
    "ok".to_owned()
}

#[test]
fn the_conformance_suite_passes_on_1_to_4_ranks() {
    for mpi in every_mpi() {
        for size in [1, 2, 3, 4] {
            assert_eq!(well(&mpi, "conformance", size), vec!["ok"; size], "{}", mpi.name);
        }
    }
}

#[test]
fn a_hundred_megabytes_are_reduced() {
    for mpi in every_mpi() {
        assert_eq!(well(&mpi, "hundred megabytes", 3), ["ok"; 3], "{}", mpi.name);
    }
}

/// Element `i` of rank `rank`, of a size that makes the order of sums visible.
fn float(rank: usize, i: usize) -> f32 {
    ((i as f32 + rank as f32) * 0.37).sin() * (rank as f32 + 1.0).exp()
}

/// Sums of small and large buffers, compared with sums in the documented order.
fn floats(group: &mut ProcessGroup) -> String {
    let (rank, size) = (group.rank(), group.size());
    for len in [1, 1000, 1_000_003] {
        let mut data: Vec<f32> = (0..len).map(|i| float(rank, i)).collect();
        group.all_reduce(&mut data, Reduction::Sum).unwrap();
        let end = |part: usize| len * part / size;
        for part in 0..size {
            for i in end(part)..end(part + 1) {
                let sum = (part + 2..=part + size)
                    .fold(float((part + 1) % size, i), |sum, rank| sum + float(rank % size, i));
                assert_eq!(data[i].to_bits(), sum.to_bits(), "element {i} of {len}, in part {part}");
            }
        }
    }
    "ok".to_owned()
}

#[test]
fn sums_of_floats_have_the_documented_order() {
    for mpi in every_mpi() {
        for size in [2, 4] {
            assert_eq!(well(&mpi, "floats", size), vec!["ok"; size], "{}", mpi.name);
        }
    }
}

/// Calls of different groups, from different threads, in an order of their own.
fn groups_in_threads(group: &mut ProcessGroup) {
    let mut groups: Vec<_> = (0..3).map(|_| group.split(0).unwrap()).collect();
    let rank = group.rank();
    std::thread::scope(|scope| {
        for (index, group) in groups.iter_mut().enumerate() {
            scope.spawn(move || {
                for round in 0..30 {
                    let mut sums = vec![(rank + round + index) as i64; 10_000 * (index + 1)];
                    group.all_reduce(&mut sums, Reduction::Sum).unwrap();
                    let expected: usize = (0..group.size()).map(|rank| rank + round + index).sum();
                    assert!(sums.iter().all(|&sum| sum == expected as i64));
                    let mut floats = vec![1f32; 100_000];
                    group.all_reduce(&mut floats, Reduction::Sum).unwrap();
                    assert!(floats.iter().all(|&sum| sum == group.size() as f32));
                }
            });
        }
    });
}

#[test]
fn groups_are_used_from_different_threads() {
    for mpi in every_mpi() {
        assert_eq!(well(&mpi, "threads", 2), ["ok"; 2], "{}", mpi.name);
    }
}

/// More messages than may be in flight, larger than a segment, each way at once.
fn large_messages(group: &mut ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    for round in 0..5 {
        group.send(next, &vec![(rank + round) as i64; 3_000_000]).unwrap();
        let mut data = vec![0i64; 3_000_000];
        group.recv(before, &mut data).unwrap();
        assert!(data.iter().all(|&x| x == (before + round) as i64));
    }
    // A receiver gets a large message while its sender is busy elsewhere.
    if rank == 0 {
        group.send(1, &vec![7u8; 40 << 20]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    } else if rank == 1 {
        let mut data = vec![0u8; 40 << 20];
        group.recv(0, &mut data).unwrap();
        assert!(data.iter().all(|&x| x == 7));
    }
    group.barrier().unwrap();
}

#[test]
fn large_messages_arrive() {
    for mpi in every_mpi() {
        assert_eq!(well(&mpi, "large messages", 3), ["ok"; 3], "{}", mpi.name);
        let (results, _) = Job::start(&mpi, "message of another length", 2, DEADLINE).results();
        let [recv, send] = ["recv of 4 bytes from rank 0", "send of 3 bytes"];
        assert!(results[1].contains(recv) && results[1].contains(send), "{}: {results:?}", mpi.name);
    }
}

#[test]
fn different_calls_are_named_on_every_rank_and_nobody_hangs() {
    for mpi in every_mpi() {
        for (case, other) in DIFFERENT_CALLS.iter().enumerate() {
            let expected = format!("all_reduce(sum) of 4 f32 / {other}");
            let (results, _) = Job::start(&mpi, &case.to_string(), 3, DEADLINE).results();
            assert_eq!(results, vec![expected; 3], "{}", mpi.name);
        }
        let (parts, _) = Job::start(&mpi, "5", 3, DEADLINE).results();
        assert!(parts.iter().all(|result| *result == parts[0] && result.contains("in parts")), "{parts:?}");
    }
}

#[test]
fn different_long_calls_are_named_on_every_rank_and_nobody_hangs() {
    for mpi in every_mpi() {
        for case in 0..LONG_DIFFERENT_CALLS {
            let (results, _) = Job::start(&mpi, &format!("long {case}"), 3, DEADLINE).results();
            assert_eq!(results, vec![long_difference(case); 3], "{}, case {case}", mpi.name);
        }
    }
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    let aborted = CommError::Aborted { rank: 2, reason: "the disk is full".to_owned() }.to_string();
    for mpi in every_mpi() {
        assert_eq!(
            Job::start(&mpi, "abort", 3, DEADLINE).results().0,
            vec![aborted.clone(); 3],
            "{}",
            mpi.name
        );
    }
}

#[test]
fn a_rank_that_ends_early_is_named_and_one_that_ends_late_is_waited_for() {
    let lost = |rank| CommError::PeerLost { rank }.to_string();
    for mpi in every_mpi() {
        let results = Job::start(&mpi, "ends early", 3, DEADLINE).results().0;
        assert_eq!(results, [lost(2), lost(2), "ok".to_owned()], "{}", mpi.name);
        let results = Job::start(&mpi, "first ends early", 3, DEADLINE).results().0;
        assert_eq!(results, ["ok".to_owned(), lost(0), lost(0)], "{}", mpi.name);
        assert_eq!(well(&mpi, "ends late", 3), ["ok"; 3], "{}", mpi.name);
    }
}

#[test]
fn a_rank_that_comes_too_late_is_named_at_the_deadline() {
    let late = CommError::Deadline { call: "barrier".to_owned(), missing: vec![1], deadline: MISSED };
    for mpi in every_mpi() {
        let results = Job::start(&mpi, "second is late", 3, MISSED).results().0;
        assert_eq!(results, vec![late.to_string(); 3], "{}: also on the one that came too late", mpi.name);
    }
}

/// In the middle of a transfer or between two. The job ends, though the stopped rank never does.
#[test]
fn a_rank_that_hangs_is_named_at_the_deadline_and_its_job_ends() {
    for mpi in every_mpi() {
        for rank in [1, 0] {
            let mut job = Job::start(&mpi, "in a loop", 3, MISSED);
            job.ready(9);
            job.signal(rank, "-STOP");
            let others = job.results_of((0..3).filter(|&other| other != rank));
            for result in others {
                let text = format!("no response from rank {rank} within 3 s");
                assert!(result.contains(&text), "{}: {result}", mpi.name);
            }
            assert!(!job.end(), "{}", mpi.name);
        }
    }
}

#[test]
fn a_killed_rank_ends_the_job() {
    for mpi in every_mpi() {
        let mut job = Job::start(&mpi, "in a loop", 3, DEADLINE);
        job.ready(9);
        job.signal(1, "-KILL");
        assert!(!job.end(), "{}", mpi.name);
    }
}

#[test]
fn without_an_mpi_launcher_mpi_is_refused() {
    let error = Session::open(&Environment::new(), &mut Meeting::silent(DEADLINE)).err().unwrap().to_string();
    assert!(error.contains("no MPI launcher started this process"), "{error}");
    let torchrun = [("TORCHELASTIC_RUN_ID", "none"), ("PMI_RANK", "0")];
    let torchrun = torchrun.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let error = Session::open(&torchrun, &mut Meeting::silent(DEADLINE)).err().unwrap().to_string();
    assert!(error.contains("torchrun") && error.contains("world of one"), "{error}");
}
