//! Programs that start ranks, and a job that one of them started.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGINT;

use crate::workshop::{Workshop, skip};

/// Variable that all processes of a job inherit.
const TAG: &str = "TANDEM_TEST_JOB";

/// Only a bug waits so long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Lets programs that this process starts answer SIGINT from their first moment. A shell's background job
/// ignores it, and what it starts inherits that; a handler is not inherited, and leaves them the default.
fn answer_interrupts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
        if ignored >> (SIGINT - 1) & 1 == 1 {
            signal_hook::flag::register(SIGINT, Arc::default()).unwrap();
        }
    });
}

/// Program that starts ranks, and what they communicate through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// `tandem launch`: TCP and shared memory.
    Launch,
    /// `tandem launch`: TCP alone.
    LaunchWithoutSharedMemory,
    /// torchrun of a Python: TCP and shared memory.
    Torchrun(OsString),
    /// MPICH's `mpiexec`: MPI.
    Mpiexec(PathBuf),
}

impl Start {
    /// Returns MPICH's launcher, if `TANDEM_TEST_MPICH` names its prefix.
    pub fn mpiexec() -> Option<Self> {
        let prefix = std::env::var_os("TANDEM_TEST_MPICH").filter(|prefix| !prefix.is_empty());
        if prefix.is_none() {
            skip("TANDEM_TEST_MPICH names no prefix of MPICH: without mpiexec");
        }
        prefix.map(|prefix| Self::Mpiexec(PathBuf::from(prefix).join("bin/mpiexec")))
    }

    pub fn is_mpi(&self) -> bool {
        matches!(self, Self::Mpiexec(_))
    }

    /// Returns the command that runs so many ranks of `tandem` with these arguments.
    pub fn command(&self, shop: &Workshop, ranks: usize, arguments: &[&str]) -> Command {
        let ranks = ranks.to_string();
        let tandem = shop.command(&[]).get_program().to_owned();
        match self {
            Self::Launch => shop.command(&[&["launch", "-n", &ranks], arguments].concat()),
            Self::LaunchWithoutSharedMemory => {
                let mut command = shop.command(&[&["launch", "-n", &ranks], arguments].concat());
                command.env("TANDEM_SHARED_MEMORY", "0");
                command
            }
            Self::Torchrun(python) => {
                let mut command = shop.program(python);
                command.args(["-m", "torch.distributed.run", "--standalone", "--no-python"]);
                command.args(["--nproc-per-node", &ranks]).arg(tandem).args(arguments);
                command
            }
            Self::Mpiexec(program) => {
                let mut command = shop.program(program);
                command.args(["-n", &ranks]).arg(tandem).args(arguments);
                command
            }
        }
    }
}

/// A launcher and every process below it, which have a variable of their own.
pub struct Job {
    pub launcher: Child,
    tag: String,
}

impl Job {
    /// Starts a launcher, its output in the shop's `stderr.txt`.
    pub fn start(shop: &Workshop, mut command: Command) -> Self {
        let log = std::fs::File::create(shop.path("stderr.txt")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        Self::spawn(command)
    }

    /// Starts a launcher whose output is somewhere.
    pub fn spawn(mut command: Command) -> Self {
        answer_interrupts();
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let tag = format!("{TAG}={}-{}", std::process::id(), CALLS.fetch_add(1, Ordering::Relaxed));
        let (name, value) = tag.split_once('=').unwrap();
        Self { launcher: command.env(name, value).spawn().unwrap(), tag }
    }

    /// Returns the ids of all processes of the job that have not ended, with their command lines.
    pub fn processes(&self) -> Vec<(String, String)> {
        let ids = std::fs::read_dir("/proc").unwrap().flatten();
        let ids = ids.filter_map(|entry| entry.file_name().into_string().ok());
        let mut found = Vec::new();
        for id in ids.filter(|name| name.parse::<u32>().is_ok()) {
            if variables(&id).contains(&self.tag) {
                let words = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
                found.push((id, String::from_utf8_lossy(&words).replace('\0', " ")));
            }
        }
        found
    }

    /// Returns the process of a rank, once it has started.
    pub fn rank(&self, rank: usize) -> Option<String> {
        let names = [format!("RANK={rank}"), format!("PMI_RANK={rank}")];
        let is_rank = |id: &str| variables(id).iter().any(|variable| names.contains(variable));
        let trains = |words: &str| words.split(' ').nth(1) == Some("train");
        self.processes().into_iter().find(|(id, words)| trains(words) && is_rank(id)).map(|(id, _)| id)
    }

    /// Waits for the process of a rank.
    pub fn await_rank(&mut self, shop: &Workshop, rank: usize) -> String {
        let began = Instant::now();
        loop {
            if let Some(process) = self.rank(rank) {
                return process;
            }
            assert!(began.elapsed() < PATIENCE, "rank {rank} does not start: {}", shop.read("stderr.txt"));
            let ended = self.launcher.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?} before rank {rank}: {}", shop.read("stderr.txt"));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the end of the launcher and of every other process. Returns the launcher's status.
    pub fn await_end(&mut self, log: impl Fn() -> String) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                self.await_processes(|| format!("{status}, {}", log()));
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "it hangs: {:?}\n{}", self.processes(), log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end of every process, without asking for the launcher's status.
    pub fn await_processes(&self, log: impl Fn() -> String) {
        let began = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "left behind: {left:?}\n{}", log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns the exit code as a shell has it.
pub fn code_of(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|number| 128 + number)).expect("it ended")
}

impl Drop for Job {
    /// Kills what a failed test leaves.
    fn drop(&mut self) {
        for (id, _) in self.processes() {
            // It may end by itself meanwhile.
            let _ = Command::new("kill").args(["-KILL", &id]).stderr(Stdio::null()).status();
        }
        // It may have been waited for.
        let _ = self.launcher.wait();
    }
}

/// Environment with which a process started; empty if it has ended.
fn variables(process: &str) -> Vec<String> {
    let text = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    text.split(|byte| *byte == 0).map(|variable| String::from_utf8_lossy(variable).into_owned()).collect()
}
