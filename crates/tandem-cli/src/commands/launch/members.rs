//! Members of a launch: processes of ranks here, and launchers of ranks on hosts.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;
use tandem_comm::launch::LAUNCHER_PROCESS;
use tandem_hub::LAUNCHED;

use super::hosts::Host;
use super::lines::{self, Output};
use crate::args::Part;
use crate::exit::Exit;
use crate::log::{LogArguments, LogFormat};
use crate::signals;

/// Time for the other ranks to end and report after one has failed. A rank that hangs never does.
const GRACE: Duration = Duration::from_secs(5);

/// Poll interval.
const PAUSE: Duration = Duration::from_millis(20);

/// Time for the launcher on a host to end after it was told to kill its ranks.
const HOST_KILL: Duration = Duration::from_secs(3);

/// Exit code of ssh where it did not reach the host or lost it.
const SSH_FAILED: i32 = 255;

/// A rank of this machine.
pub(super) struct Rank {
    pub(super) rank: usize,
    /// Index on this machine.
    pub(super) local: usize,
    /// Ranks on this machine.
    pub(super) ranks: usize,
    /// Ranks of the job.
    pub(super) all: usize,
}

/// Processes of an attempt.
pub(super) struct Members {
    running: Vec<Member>,
    /// Orders of the launcher that started this one; their end is its end.
    orders: Option<Receiver<Order>>,
    log_dir: Option<PathBuf>,
    /// Options about messages, for each process.
    log: LogArguments,
}

struct Member {
    /// `rank 3`, or `host b`.
    name: String,
    /// The host, if this is the launcher there.
    host: Option<Host>,
    child: Child,
    output: Output,
    /// Time at which it was told to kill its ranks.
    killed_at: Option<Instant>,
}

/// Order to a launcher, through its stdin, from the one that started it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Pass(Signal),
    Kill,
}

const ORDERS: [(&str, Order); 5] = [
    ("INT", Order::Pass(Signal::INT)),
    ("TERM", Order::Pass(Signal::TERM)),
    ("HUP", Order::Pass(Signal::HUP)),
    ("USR1", Order::Pass(Signal::USR1)),
    ("KILL", Order::Kill),
];

/// End of an attempt.
pub(super) struct Ended {
    pub(super) outcome: Exit,
    /// True if a signal asked this launcher to end.
    pub(super) was_told: bool,
    /// The signal that was passed on.
    passed: Option<Signal>,
    /// Ranks that failed by themselves.
    pub(super) num_lost: usize,
    /// Hosts that ssh does not reach any longer.
    pub(super) lost_hosts: Vec<String>,
    /// The member that failed first, and its error.
    first: Option<(String, String)>,
    /// True if every failed member lost another one.
    has_only_lost_peers: bool,
}

impl Ended {
    /// Prints what failed first, below what came after it.
    pub(super) fn report(&self) {
        if let Some((name, error)) = &self.first {
            tracing::info!("{name} failed first: {error}");
        }
    }
}

impl Members {
    /// Starts without members. If `is_told`, stdin has the orders of the launcher that started this one.
    pub(super) fn new(is_told: bool, log_dir: Option<&PathBuf>, log: LogArguments) -> anyhow::Result<Self> {
        if let Some(folder) = log_dir {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("--log-dir: cannot make {}", folder.display()))?;
        }
        let orders = if is_told { Some(orders()?) } else { None };
        Ok(Self { running: Vec::new(), orders, log_dir: log_dir.cloned(), log })
    }

    /// Starts the process of a rank, in a group of its own: the terminal's Ctrl-C reaches the launcher
    /// alone, which passes it on once.
    pub(super) fn start_rank(
        &mut self,
        rank: &Rank,
        (host, port): (&str, u16),
        command: &[String],
        is_downloaded: bool,
    ) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut process = Command::new(&program);
        process
            .args(self.log.words())
            .args(command)
            .env("RANK", rank.rank.to_string())
            .env("WORLD_SIZE", rank.all.to_string())
            .env("LOCAL_RANK", rank.local.to_string())
            .env("LOCAL_WORLD_SIZE", rank.ranks.to_string())
            .env("MASTER_ADDR", host)
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env(LAUNCHER_PROCESS, std::process::id().to_string())
            .envs(is_downloaded.then_some((LAUNCHED, "1")))
            .process_group(0)
            .stdin(Stdio::null());
        let log = self.log_dir.as_ref().map(|folder| lines::log_file(folder, rank.rank)).transpose()?;
        let name = format!("rank {}", rank.rank);
        // An object says of which rank it is.
        let prefix = match self.log.log_format {
            LogFormat::Text => format!("[{name}] "),
            LogFormat::Json => String::new(),
        };
        let started = self.start(process, name, &prefix, None, log);
        started.with_context(|| format!("cannot start {}", program.display()))
    }

    /// Starts the launcher on a host.
    pub(super) fn start_host(&mut self, host: &Host, part: Part, mut command: Command) -> anyhow::Result<()> {
        command.process_group(0).stdin(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let last = part.first + host.ranks - 1;
        let name = format!("host {} (ranks {} to {last})", host.name, part.first);
        let started = self.start(command, name, "", Some(host.clone()), None);
        started.with_context(|| format!("cannot start {program} for host {}", host.name))
    }

    fn start(
        &mut self,
        mut command: Command,
        name: String,
        prefix: &str,
        host: Option<Host>,
        log: Option<std::fs::File>,
    ) -> std::io::Result<()> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (out, error) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let output = Output::pass_on(out, error, prefix, log)?;
        self.running.push(Member { name, host, child, output, killed_at: None });
        Ok(())
    }

    /// Waits for all. The first signal is passed on, the second one kills unless it is SIGHUP. The first failure decides the
    /// outcome.
    pub(super) fn wait(mut self, received: &mut signals::Received) -> Ended {
        let mut ended = Ended {
            outcome: Exit::Done,
            was_told: false,
            passed: None,
            num_lost: 0,
            lost_hosts: Vec::new(),
            first: None,
            has_only_lost_peers: false,
        };
        let mut kill_at: Option<Instant> = None;
        while !self.running.is_empty() {
            while let Some(order) = received.next().map(Order::Pass).or_else(|| self.order()) {
                // A wish for a checkpoint, which ends nothing.
                if order == Order::Pass(Signal::USR1) {
                    self.running.iter_mut().for_each(|member| member.tell(order));
                    continue;
                }
                // A terminal that closes may send two of them.
                if ended.was_told && order == Order::Pass(Signal::HUP) {
                    continue;
                }
                match order {
                    Order::Pass(signal) if !ended.was_told => {
                        self.running.iter_mut().for_each(|member| member.tell(Order::Pass(signal)));
                        ended.passed = Some(signal);
                    }
                    _ => kill_at = Some(Instant::now()),
                }
                ended.was_told = true;
            }
            let mut failed = false;
            for index in (0..self.running.len()).rev() {
                let Ok(Some(status)) = self.running[index].child.try_wait() else { continue };
                let member = self.running.swap_remove(index);
                failed |= ended.count(member, status, kill_at.is_some());
            }
            if failed {
                kill_at.get_or_insert_with(|| Instant::now() + GRACE);
            }
            if kill_at.is_some_and(|at| Instant::now() >= at) {
                self.running.iter_mut().for_each(|member| member.tell(Order::Kill));
            }
            std::thread::sleep(PAUSE);
        }
        ended
    }

    fn order(&mut self) -> Option<Order> {
        match self.orders.as_ref()?.try_recv() {
            Ok(order) => Some(order),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.orders = None;
                None
            }
        }
    }
}

impl Drop for Members {
    /// Kills what was started where a later start failed.
    fn drop(&mut self) {
        for member in &mut self.running {
            member.kill();
        }
    }
}

impl Member {
    fn tell(&mut self, order: Order) {
        let is_host = self.host.is_some();
        match order {
            Order::Pass(signal) if !is_host => signals::send(self.child.id(), signal),
            Order::Kill if !is_host => self.kill(),
            _ => {
                let name = ORDERS.iter().find(|(_, other)| *other == order).map_or("KILL", |(name, _)| name);
                if let Some(stdin) = &mut self.child.stdin {
                    // A launcher that has ended needs no order.
                    let _ = writeln!(stdin, "{name}");
                }
            }
        }
        // ssh itself is killed where the other side does not end.
        if order == Order::Kill && is_host {
            let told = *self.killed_at.get_or_insert_with(Instant::now);
            self.child.stdin = None;
            if told.elapsed() > HOST_KILL {
                self.kill();
            }
        }
    }

    fn kill(&mut self) {
        signals::kill_group(self.child.id());
        // It may have ended already.
        let _ = self.child.kill();
    }
}

/// Begins to read orders from stdin, one per line.
fn orders() -> std::io::Result<Receiver<Order>> {
    let (sender, receiver) = channel();
    let read = move || {
        for line in BufReader::new(std::io::stdin()).lines().map_while(Result::ok) {
            let order = ORDERS.iter().find(|(name, _)| *name == line.trim());
            let Some(&(_, order)) = order else { continue };
            if sender.send(order).is_err() {
                return;
            }
        }
        // The other launcher, or the connection to it, is gone. Nobody may be left to receive this.
        let _ = sender.send(Order::Kill);
    };
    std::thread::Builder::new().name("orders".to_owned()).spawn(read)?;
    Ok(receiver)
}

impl Ended {
    /// Takes a member's end into account; returns whether it failed. `was_killed`: by this launcher.
    fn count(&mut self, member: Member, status: ExitStatus, was_killed: bool) -> bool {
        let Member { name, host, output, .. } = member;
        let error = output.end();
        // A rank that has just started does not answer signals yet.
        let was_passed = self.passed.is_some_and(|signal| status.signal() == Some(signal.as_raw()));
        let exit = if was_passed { Exit::Interrupted } else { Exit::from_code(status.code()) };
        if exit == Exit::Done {
            return false;
        }
        let is_lost_host = host.is_some() && status.code() == Some(SSH_FAILED);
        // A rank that lost a peer knows less than the peer.
        let is_own = is_lost_host || status.code() != Some(i32::from(crate::exit::PEER_LOST));
        if is_own && !was_killed {
            self.num_lost += host.as_ref().filter(|_| is_lost_host).map_or(1, |host| host.ranks);
            self.lost_hosts.extend(host.filter(|_| is_lost_host).map(|host| host.name));
        }
        if self.outcome == Exit::Done || (self.has_only_lost_peers && is_own) {
            self.has_only_lost_peers = !is_own;
            self.outcome = if is_lost_host { Exit::PeerLost } else { exit };
            let error = error.unwrap_or_else(|| status.to_string());
            self.first = (exit != Exit::Interrupted).then_some((name, error));
        }
        true
    }
}
