//! Ranks that are processes: the test binary starts itself once per rank, and serves their store.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tandem_comm::store::{Store, StoreServer};
use tandem_comm::tcp::{self, AbortFlag};
use tandem_comm::{ProcessGroup, Result};

/// Deadline of ranks that succeed; only a bug waits for it.
pub const DEADLINE: Duration = Duration::from_secs(300);
/// Time after which a process counts as hung.
const PATIENCE: Duration = Duration::from_secs(900);

const ROLE: &str = "TANDEM_TEST_ROLE";
const RANK: &str = "TANDEM_TEST_RANK";
const SIZE: &str = "TANDEM_TEST_SIZE";
const STARTED: &str = "TANDEM_TEST_STARTED";
const PORT: &str = "TANDEM_TEST_PORT";
const MILLISECONDS: &str = "TANDEM_TEST_DEADLINE";

/// Role and rank of a process.
pub struct Role {
    pub name: String,
    pub rank: usize,
    pub size: usize,
    pub deadline: Duration,
    pub store: Store,
    num_started: i64,
}

impl Role {
    /// `None` in the process that runs the tests.
    pub fn of_this_process() -> Option<Self> {
        let name = std::env::var(ROLE).ok()?;
        let number = |name: &str| std::env::var(name).unwrap().parse().unwrap();
        let store = Store::connect("127.0.0.1", number(PORT) as u16, DEADLINE).unwrap();
        let deadline = Duration::from_millis(number(MILLISECONDS) as u64);
        let num_started = number(STARTED) as i64;
        Some(Self { name, rank: number(RANK), size: number(SIZE), deadline, store, num_started })
    }

    #[allow(dead_code, reason = "the watch's tests have abort flags")]
    pub fn meet(&self) -> Result<ProcessGroup> {
        self.meet_with(AbortFlag::default())
    }

    /// The deadline counts from when all processes are there, however long the machine takes to start them.
    pub fn meet_with(&self, abort_flag: AbortFlag) -> Result<ProcessGroup> {
        self.store.add("started", 1).unwrap();
        while self.store.add("started", 0).unwrap() < self.num_started {
            std::thread::sleep(Duration::from_millis(1));
        }
        tcp::group(self.job_store(), self.rank, self.size, self.deadline, abort_flag)
    }

    /// Returns a store with the group's prefix and a connection of its own.
    pub fn job_store(&self) -> Store {
        self.store.reconnect().unwrap().prefixed("group/")
    }

    /// Reports this rank's result to the parent.
    pub fn report(&self, result: &str) {
        self.store.set(&format!("result/{}", self.rank), result.as_bytes()).unwrap();
        // The reply shows that the server has received everything sent before.
        assert!(self.store.check(&[&format!("result/{}", self.rank)]).unwrap());
    }
}

/// The processes of one test, killed if the test ends before them.
pub struct Ranks {
    children: BTreeMap<usize, Child>,
    pub store: Store,
    _server: StoreServer,
}

impl Ranks {
    /// Starts `ranks` of a group of `size` in a role of the module that `child`, a test of this binary, is in.
    pub fn start(
        child: &str,
        role: &str,
        size: usize,
        ranks: impl Iterator<Item = usize>,
        deadline: Duration,
    ) -> Self {
        let server = StoreServer::bind(0).unwrap();
        let store = Store::connect("127.0.0.1", server.port(), DEADLINE).unwrap();
        let ranks: Vec<usize> = ranks.collect();
        let num_started = ranks.len().to_string();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", child, "--nocapture", "--quiet"]);
            command.env(ROLE, role).env(RANK, rank.to_string()).env(SIZE, size.to_string());
            command.env(STARTED, &num_started).env(PORT, server.port().to_string());
            command.env(MILLISECONDS, deadline.as_millis().to_string());
            // A stopped process goes on when the shell that started the tests ends, unless it has a group of
            // its own.
            command.process_group(0).stdout(std::process::Stdio::null());
            (rank, command.spawn().unwrap())
        };
        let children = ranks.into_iter().map(start).collect();
        Self { children, store, _server: server }
    }

    /// SIGKILL.
    pub fn kill(&mut self, rank: usize) {
        let mut child = self.children.remove(&rank).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGSTOP: the process hangs, its connections stay.
    #[allow(dead_code, reason = "NCCL's tests stop nobody")]
    pub fn stop(&self, rank: usize) {
        self.signal(rank, "-STOP");
    }

    /// SIGCONT.
    #[allow(dead_code, reason = "only the watch's tests wake ranks up")]
    pub fn go_on(&self, rank: usize) {
        self.signal(rank, "-CONT");
    }

    fn signal(&self, rank: usize, signal: &str) {
        let process = self.children[&rank].id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }

    /// Waits until all have ended successfully, and returns their reports.
    pub fn results(mut self) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        for (rank, child) in &mut self.children {
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < until, "rank {rank} hangs");
                std::thread::sleep(Duration::from_millis(5));
            };
            assert!(status.success(), "rank {rank} ended with {status}");
        }
        let result = |rank: &usize| self.store.get(&format!("result/{rank}"), DEADLINE).unwrap();
        self.children.keys().map(result).map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            // Most have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
