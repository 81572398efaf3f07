//! Signals at any moment, from before the ranks meet until after the last step: typed at a terminal, or sent to a launcher or a
//! rank. What was saved loads, nobody is left behind, and the rest of the run gives the bits of the whole one.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::job::{newest_step, signal};
use super::pty::Terminal;
use super::random::{Random, rounds};
use super::starts::{Job, code_of};
use super::{configure_divisible, same_runs};
use crate::workshop::Workshop;

const STEPS: u64 = 60;

/// Milliseconds in which ranks start and meet.
const STARTUP: u64 = 80;

/// Where a signal comes from and whom it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    CtrlCAtLauncher,
    CtrlCAtThreads,
    ToLauncher(&'static str),
    ToRank(&'static str),
}

const EVENTS: [Event; 6] = [
    Event::CtrlCAtLauncher,
    Event::CtrlCAtThreads,
    Event::ToLauncher("-TERM"),
    Event::ToLauncher("-KILL"),
    Event::ToRank("-TERM"),
    Event::ToRank("-KILL"),
];

impl Event {
    /// Returns the exit codes that the pages give it, beside 0 for a signal that came too late.
    fn codes(self) -> &'static [i32] {
        match self {
            Self::CtrlCAtLauncher | Self::CtrlCAtThreads => &[130],
            Self::ToLauncher("-TERM") => &[143],
            Self::ToLauncher(_) => &[137],
            // A rank that does not answer signals yet is killed by the first one.
            Self::ToRank("-TERM") => &[143, 75],
            Self::ToRank(_) => &[75],
        }
    }

    fn arguments(self, config: &str) -> Vec<&str> {
        match self {
            Self::CtrlCAtThreads => vec!["train", config, "--set", "compute.devices=cpu:4"],
            _ => vec!["launch", "-n", "3", "train", config],
        }
    }

    fn happen(self, terminal: &mut Terminal, job: &Job, rank: usize) {
        let target = match self {
            Self::CtrlCAtLauncher | Self::CtrlCAtThreads => return terminal.press_ctrl_c(),
            Self::ToLauncher(_) => Some(job.launcher.id().to_string()),
            Self::ToRank(_) => job.rank(rank),
        };
        let (Self::ToLauncher(name) | Self::ToRank(name)) = self else { unreachable!("typed above") };
        // It may have ended already, and a launcher that was not waited for is there still.
        if let Some(target) = target {
            let kill = Command::new("kill").args([name, &target]).output().unwrap();
            assert!(kill.status.success() || job.rank(rank).is_none(), "{kill:?}");
        }
    }
}

/// A run that an event ends, perhaps, after a while.
fn end_by(shop: &Workshop, event: Event, after: Duration, run: &str, rank: usize) {
    let config = configure_divisible(shop, run, STEPS);
    let (mut terminal, mut job) = Terminal::start(&shop.command(&event.arguments(&config)));
    if matches!(event, Event::ToRank(_)) {
        while job.rank(rank).is_none() && job.launcher.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    std::thread::sleep(after);
    event.happen(&mut terminal, &job, rank);
    let status = job.await_end(|| format!("{event:?} after {after:?}\n{}", terminal.shown()));
    let code = code_of(status);
    let (is_done, reached) = (shop.path(run).join("final").exists(), newest_step(shop, run));
    println!("{event:?} after {after:?}: code {code}, step {reached}, done: {is_done}");
    let is_late = code == 0 && is_done;
    let story = || format!("{event:?} after {after:?}: {status}\n{}", terminal.shown());
    assert!(is_late || event.codes().contains(&code), "{}", story());
    let has_answered =
        matches!(status.code(), Some(130 | 143)) && shop.path(run).join("metrics.jsonl").exists();
    if has_answered && let Some(last) = shop.metrics(run).last() {
        assert_eq!(last["step"].as_u64(), Some(reached), "the last step was not saved: {}", story());
    }
}

fn signals_at_random(seed: u64, num_rounds: u64) {
    let shop = Workshop::new();
    let whole = configure_divisible(&shop, "whole", STEPS);
    let began = Instant::now();
    shop.run(&["launch", "-n", "3", "train", &whole]).expect(0);
    let longest = began.elapsed().as_millis() as u64 * 5 / 4;
    let mut random = Random::from_environment(seed);
    for number in 0..num_rounds {
        let event = EVENTS[number as usize % EVENTS.len()];
        let run = format!("run{number}");
        // Before ranks meet, as often as at all other moments.
        let span = if random.below(2) == 0 { STARTUP } else { longest };
        let after = Duration::from_micros(random.below(1000 * span));
        end_by(&shop, event, after, &run, random.below(3) as usize);
        let devices = format!("compute.devices=cpu:{}", 1 + random.below(3));
        let rest = ["train", &format!("{run}.toml"), "--resume", "--set", &devices];
        shop.run(&rest).expect(0);
        same_runs(&shop, &run, "whole");
        std::fs::remove_dir_all(shop.path(&run)).unwrap();
    }
}

/// Starts a launch and waits for one of thirty moments of the first ones, in which its ranks start.
fn starting(shop: &Workshop, moment: u32) -> Job {
    let config = configure_divisible(shop, &format!("run{moment}"), STEPS);
    let mut command = shop.command(&["launch", "-n", "3", "train", &config]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let job = Job::spawn(command);
    std::thread::sleep(moment * Duration::from_micros(500));
    job
}

/// Its parent has not asked for its status yet, so that it seems to be there.
#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_is_killed_while_its_ranks_start_leaves_none_behind() {
    let shop = Workshop::new();
    for moment in 0..30 {
        let mut job = starting(&shop, moment);
        job.launcher.kill().unwrap();
        job.await_processes(|| format!("killed at moment {moment}"));
    }
}

#[test]
fn a_signal_while_ranks_start_gives_its_code() {
    let shop = Workshop::new();
    for moment in 0..30 {
        let (name, code) = [("-INT", 130), ("-TERM", 143)][moment as usize % 2];
        let mut job = starting(&shop, moment);
        signal(&job.launcher.id().to_string(), name);
        let status = job.await_end(|| format!("{name} at moment {moment}"));
        assert_eq!(code_of(status), code, "{name} at moment {moment}: {status}");
    }
}

#[test]
fn a_few_signals_at_random_leave_what_was_saved_and_nobody_behind() {
    signals_at_random(3, rounds(EVENTS.len() as u64));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn signals_at_random_leave_what_was_saved_and_nobody_behind() {
    signals_at_random(4, rounds(60));
}
