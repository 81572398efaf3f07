//! A job under way: its launcher, its ranks, and how it ends.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::workshop::{Workshop, entries};

/// The processes that a launcher started.
pub fn ranks_of(launcher: &Child) -> Vec<String> {
    let id = launcher.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

pub fn newest_step(shop: &Workshop, run: &str) -> u64 {
    let names = entries(&shop.path(run).join("checkpoints"));
    let steps = names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}

/// Output of the first of several processes that fail at once, and the exit status of its launcher.
pub struct Ended {
    pub code: Option<i32>,
    pub stderr: String,
}

/// Starts a launcher whose ranks' stderr goes into a file of the shop's.
pub fn start(shop: &Workshop, arguments: &[&str]) -> Child {
    let log = std::fs::File::create(shop.path("stderr.txt")).unwrap();
    shop.command(arguments).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

pub fn end_of(shop: &Workshop, mut launcher: Child) -> Ended {
    let code = launcher.wait().unwrap().code();
    Ended { code, stderr: shop.read("stderr.txt") }
}

impl Ended {
    #[track_caller]
    pub fn expect(&self, code: i32, texts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        for text in texts {
            assert!(self.stderr.contains(text), "no {text:?} in:\n{}", self.stderr);
        }
    }
}

/// Waits until the ranks have told each other that they take steps: they do so once a second.
pub fn await_beats() {
    std::thread::sleep(Duration::from_millis(2500));
}

/// Waits until there is a newer checkpoint than that of `step`.
pub fn await_checkpoint(shop: &Workshop, launcher: &mut Child, step: u64) {
    let began = Instant::now();
    while newest_step(shop, "run") <= step {
        assert!(launcher.try_wait().unwrap().is_none(), "it ended by itself: {}", shop.read("stderr.txt"));
        assert!(began.elapsed() < Duration::from_secs(600), "no checkpoint in ten minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn signal(process: &str, signal: &str) {
    assert!(process.parse::<u32>().is_ok_and(|id| id > 1), "{process} is no process");
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}
