//! Faults at random: a process that is killed, stopped or told to end, at any moment, under any launcher, engine and mesh. The
//! run goes on with other ranks each time, and ends as one that was never disturbed.

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::job::{await_checkpoint, newest_step, signal};
use super::meshes::{self, Mesh};
use super::random::{Random, rounds};
use super::starts::{Job, Start, code_of};
use super::{configure_divisible, same_runs};
use crate::workshop::Workshop;
use Fault::{KillLauncher, KillRank, StopRank, TermLauncher, TermRank};

/// More steps than a run takes before the last fault.
const ENDLESS: u64 = 1_000_000;

/// A learning rate that does not change with the number of steps, which does.
const SETTINGS: [&str; 4] = ["--set", "train.record_rows=true", "--set", "train.schedule=constant"];

/// Seconds after which a rank that is stopped is given up.
const DEADLINE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillRank,
    StopRank,
    TermRank,
    KillLauncher,
    TermLauncher,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// After the start of the process, which has perhaps not met the others.
    Start(Duration),
    /// After a checkpoint of this attempt.
    Saved(Duration),
}

struct Round {
    start: Start,
    mesh: Mesh,
    fault: Fault,
    moment: Moment,
    victim: usize,
}

impl Round {
    fn draw(random: &mut Random, starts: &[Start], faults: &[Fault], earlier: Option<Mesh>) -> Self {
        let meshes = meshes::all().into_iter();
        let meshes: Vec<Mesh> = meshes.filter(|mesh| mesh.ranks <= 4 && Some(*mesh) != earlier).collect();
        let mesh = random.choose(&meshes);
        let moment = match random.below(3) {
            0 => Moment::Start(Duration::from_millis(random.below(400))),
            _ => Moment::Saved(Duration::from_millis(random.below(60))),
        };
        let start = random.choose(starts);
        Self {
            start,
            mesh,
            fault: random.choose(faults),
            moment,
            victim: random.below(mesh.ranks as u64) as usize,
        }
    }

    /// Runs until the fault has ended the run. Returns the time that this took.
    fn run(&self, shop: &Workshop, config: &str) -> Duration {
        let settings = self.mesh.settings();
        let deadline = if self.fault == StopRank { DEADLINE } else { 60 };
        let deadlines =
            [format!("compute.deadline={deadline}"), format!("compute.meeting_deadline={deadline}")];
        let settings = settings.iter().chain(&deadlines).flat_map(|setting| ["--set", setting.as_str()]);
        let train = ["train", config, "--resume"].into_iter().chain(SETTINGS);
        let arguments: Vec<&str> = train.chain(settings).collect();
        let before = newest_step(shop, "run");
        let mut job = Job::start(shop, self.start.command(shop, self.mesh.ranks, &arguments));
        let is_rank = matches!(self.fault, KillRank | StopRank | TermRank);
        let after = match self.moment {
            Moment::Saved(after) => {
                await_checkpoint(shop, &mut job.launcher, before);
                after
            }
            Moment::Start(after) => after,
        };
        let process = if is_rank { job.await_rank(shop, self.victim) } else { job.launcher.id().to_string() };
        std::thread::sleep(after);
        let name = match self.fault {
            KillRank | KillLauncher => "-KILL",
            StopRank => "-STOP",
            TermRank | TermLauncher => "-TERM",
        };
        signal(&process, name);
        let began = Instant::now();
        let log = || format!("{self}, process {process}\n{}", shop.read("stderr.txt"));
        let status = job.await_end(log);
        let took = began.elapsed();
        if let Err(wrong) = self.check(status, &shop.read("stderr.txt"), &process) {
            panic!("{wrong}: {status}, {}", log());
        }
        let is_told = matches!(self.fault, TermRank | TermLauncher);
        if is_told && matches!(self.moment, Moment::Saved(_)) {
            let last = shop.metrics("run").last().unwrap()["step"].as_u64();
            assert_eq!(Some(newest_step(shop, "run")), last, "the last step was not saved: {}", log());
        }
        took
    }

    /// Compares the end of a launcher, and the words of its ranks, with what the pages promise.
    fn check(&self, status: ExitStatus, log: &str, process: &str) -> Result<(), String> {
        let (code, codes) = (code_of(status), self.codes());
        if !codes.is_empty() && !codes.contains(&code) || code == 0 {
            return Err(format!("code {code}, and {codes:?} was expected"));
        }
        if !matches!(self.fault, KillRank | StopRank) {
            return Ok(());
        }
        // Without the rank that a line is of.
        let said: Vec<&str> =
            log.lines().map(|line| line.split_once("] ").map_or(line, |(_, said)| said)).collect();
        self.check_names(&said.join("\n"), process)
    }

    /// Returns the exit codes of the launcher that are right; none means all but 0.
    fn codes(&self) -> &'static [i32] {
        let is_under_way = matches!(self.moment, Moment::Saved(_));
        match (self.fault, is_under_way) {
            (KillLauncher, _) => &[137],
            (TermRank | TermLauncher, true) => &[143],
            // MPI's launcher ends all, with a code of its own.
            _ if self.start.is_mpi() => &[],
            (TermLauncher, false) => &[143],
            // A rank that cannot answer yet is killed by the signal.
            (TermRank, false) => &[143, 75],
            // Those that wait for a rank that never came may have made a mistake.
            (StopRank, false) => &[75, 2],
            (KillRank, _) | (StopRank, true) => &[75],
        }
    }

    /// Fails unless the ranks that are left name the lost one, and no other.
    fn check_names(&self, said: &str, process: &str) -> Result<(), String> {
        let (is_mpi, victim) = (self.start.is_mpi(), format!("rank {}", self.victim));
        match self.moment {
            // The launcher ends them before they can speak.
            _ if is_mpi && self.fault == KillRank => return Ok(()),
            // They have not met, and know no more than who is missing.
            Moment::Start(_) if is_mpi || said.contains(&victim) => return Ok(()),
            Moment::Start(_) => return Err(format!("no {victim:?}")),
            Moment::Saved(_) => {}
        }
        // Of the rank that serves MPI's store, nobody knows more then.
        let place = if is_mpi && self.victim == 0 { String::new() } else { format!("(process {process})") };
        let parts = said.split("peer lost: ").skip(1);
        let named: Vec<&str> = parts.filter_map(|part| Some(part.split_once(". This is ")?.0)).collect();
        let is_right = |named: &&str| {
            let is_victim = *named == victim || named.starts_with(&format!("{victim} on "));
            is_victim && named.contains(&place) && !named.contains("; ")
        };
        if named.is_empty() || !named.iter().all(is_right) {
            return Err(format!("{named:?} named, not {victim} {place}"));
        }
        Ok(())
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, mesh, fault, moment, victim } = self;
        write!(f, "{fault:?} {moment:?} of rank {victim}, {} on {mesh:?}", name(start))
    }
}

fn name(start: &Start) -> &'static str {
    match start {
        Start::Launch => "tcp and shared memory",
        Start::LaunchWithoutSharedMemory => "tcp",
        Start::Torchrun(_) => "torchrun",
        Start::Mpiexec(_) => "mpi",
    }
}

/// So many faults of one run, which is then compared with one that was never disturbed.
fn faults_change_no_bit_and_no_row(seed: u64, num_rounds: u64, starts: &[Start], faults: &[Fault]) {
    let shop = Workshop::new();
    let config = configure_divisible(&shop, "run", ENDLESS);
    let mut random = Random::from_environment(seed);
    let mut tally: BTreeMap<(&str, Fault), (u64, Duration)> = BTreeMap::new();
    let mut earlier = None;
    for number in 0..num_rounds {
        let round = Round::draw(&mut random, starts, faults, earlier);
        let took = round.run(&shop, &config);
        println!("{number}: {round}: {:.1} s, step {}", took.as_secs_f64(), newest_step(&shop, "run"));
        let (count, longest) = tally.entry((name(&round.start), round.fault)).or_default();
        *count += 1;
        *longest = took.max(*longest);
        earlier = Some(round.mesh);
    }
    for ((start, fault), (count, longest)) in tally {
        println!("tally: {start}, {fault:?}: {count}, {:.1} s at most", longest.as_secs_f64());
    }
    // How far it came depends on the machine; the rest is run on one rank, and all of it once more without harm.
    let steps = format!("train.steps={}", newest_step(&shop, "run") + 10);
    let settings = [&SETTINGS[..], &["--set", &steps]].concat();
    shop.run(&[&["train", &config, "--resume"][..], &settings].concat()).expect(0);
    let whole = configure_divisible(&shop, "whole", ENDLESS);
    shop.run(&[&["train", &whole][..], &settings].concat()).expect(0);
    same_runs(&shop, "run", "whole");
    let rows = |run: &str| shop.read(&format!("{run}/rows.jsonl"));
    assert_eq!(rows("run"), rows("whole"), "a row was lost or came twice");
}

/// The others end the job, and what they have not said by then is lost.
#[test]
fn a_rank_that_is_stopped_under_mpi_is_named() {
    let Some(start) = Start::mpiexec() else { return };
    let (shop, moment) = (Workshop::new(), Moment::Saved(Duration::ZERO));
    let config = configure_divisible(&shop, "run", ENDLESS);
    let round = Round { start, mesh: Mesh::data(3, "zero1", 1), fault: StopRank, moment, victim: 1 };
    round.run(&shop, &config);
}

#[test]
fn a_few_faults_at_random_change_no_bit_and_no_row() {
    // Stopped ranks take long, and have tests of their own.
    let faults = [KillRank, KillRank, TermRank, KillLauncher, TermLauncher];
    let starts = [Start::Launch, Start::LaunchWithoutSharedMemory];
    faults_change_no_bit_and_no_row(7, rounds(10), &starts, &faults);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn faults_at_random_change_no_bit_and_no_row() {
    let faults = [KillRank, KillRank, KillRank, StopRank, TermRank, KillLauncher, TermLauncher];
    let mut starts = vec![Start::Launch, Start::LaunchWithoutSharedMemory];
    starts.extend(Start::mpiexec());
    faults_change_no_bit_and_no_row(26, rounds(24), &starts, &faults);
}
