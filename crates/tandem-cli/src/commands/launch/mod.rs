//! `tandem launch`: one process for each rank, on this machine or on several, started again where that
//! helps.

mod hosts;
mod lines;
mod members;

use std::process::Command;

use clap::Parser;
use tandem_comm::open_files;
use tandem_comm::store::StoreServer;
use tandem_hub::ModelFiles;
use tandem_train::TrainError;

use self::hosts::Host;
use self::members::{Ended, Members};
use crate::args::{Arguments, Command as Subcommand, LaunchArguments, Part, TrainArguments};
use crate::exit::{Exit, mistake};
use crate::log::LogArguments;
use crate::{hub, signals};

/// Port of the store where ranks run on several hosts and no address is given.
const PORT: u16 = 29500;

pub(crate) fn run(arguments: &LaunchArguments, log: LogArguments) -> anyhow::Result<Exit> {
    let job = Job::new(arguments, log)?;
    // Each host has a cache of its own.
    let is_downloaded = matches!(job.place, Place::Here { .. }) && hub::prepare(&job.train)?;
    let mut signals = signals::Received::begin()?;
    let (mut place, mut command) = (job.place.clone(), job.command.clone());
    for restarts_left in (0..=job.max_restarts).rev() {
        let (members, _server) = job.start(&place, &command, is_downloaded)?;
        let ended = members.wait(&mut signals);
        let may_help = matches!(ended.outcome, Exit::OwnFault | Exit::PeerLost) && !ended.was_told;
        // Else the other launcher shows the last error of this one.
        if arguments.part.is_none() {
            ended.report();
        }
        if !may_help || restarts_left == 0 {
            return Ok(ended.outcome);
        }
        let Some(next) = job.next_place(&place, &ended) else { return Ok(ended.outcome) };
        tracing::info!(
            "starting again with --resume, on {} of {} ranks; {} more times at most",
            next.num_ranks(),
            job.place.num_ranks(),
            restarts_left - 1
        );
        place = next;
        resume(&mut command);
    }
    unreachable!("the last attempt returns")
}

/// Ranks of an attempt.
#[derive(Clone)]
enum Place {
    /// On this machine, of a job that may have more on others.
    Here { part: Part, ranks: usize, serves: bool },
    /// On machines that ssh reaches.
    Hosts(Vec<Host>),
}

impl Place {
    /// Returns the number of ranks that this launcher starts.
    fn num_ranks(&self) -> usize {
        match self {
            Self::Here { ranks, .. } => *ranks,
            Self::Hosts(hosts) => hosts.iter().map(|host| host.ranks).sum(),
        }
    }
}

/// Command with its ranks and the address of its store.
struct Job<'a> {
    arguments: &'a LaunchArguments,
    place: Place,
    /// Host name and port of the store; port 0 is any free one.
    address: (String, u16),
    command: Vec<String>,
    /// The command's arguments.
    train: TrainArguments,
    max_restarts: usize,
    log: LogArguments,
}

impl<'a> Job<'a> {
    fn new(arguments: &'a LaunchArguments, log: LogArguments) -> anyhow::Result<Self> {
        let LaunchArguments { nodes, node, address, part, max_restarts, min_ranks, command, .. } = arguments;
        let train = train_arguments(command)?;
        let hosts = hosts::read(arguments)?;
        let address = address.as_deref().map(host_and_port).transpose()?;
        let (place, address) = if hosts.is_empty() {
            let ranks = arguments.ranks.unwrap_or_default();
            if ranks == 0 || *nodes == 0 || node >= nodes {
                return Err(mistake(format!(
                    "{ranks} ranks on node {node} of {nodes}: at least one rank, and nodes count from 0"
                )));
            }
            if *nodes > 1 && address.is_none() {
                return Err(mistake("several nodes need --address HOST:PORT, of the first of them"));
            }
            if *nodes > 1 && *max_restarts > 0 {
                return Err(mistake(
                    "--max-restarts needs one launcher for all ranks: give --hosts in place of --nodes and --node",
                ));
            }
            let part = part.unwrap_or(Part { first: node * ranks, all: nodes * ranks });
            let serves = part.first == 0;
            (Place::Here { part, ranks, serves }, address.unwrap_or_else(|| ("127.0.0.1".to_owned(), 0)))
        } else {
            let address = address.unwrap_or_else(|| (hosts[0].address().to_owned(), PORT));
            (Place::Hosts(hosts), address)
        };
        let num_ranks = place.num_ranks();
        if let Some(min) = min_ranks.filter(|&min| min == 0 || min > num_ranks) {
            return Err(mistake(format!(
                "--min-ranks {min}: expected 1 to {num_ranks}, the ranks of the job"
            )));
        }
        let (command, max_restarts) = (command.clone(), *max_restarts);
        Ok(Self { arguments, place, address, command, train, max_restarts, log })
    }

    /// Starts the ranks, and the store that outlives every rank.
    fn start(
        &self,
        place: &Place,
        command: &[String],
        is_downloaded: bool,
    ) -> anyhow::Result<(Members, Option<StoreServer>)> {
        let (host, port) = &self.address;
        let log_dir = self.arguments.log_dir.as_ref();
        match place {
            Place::Here { part, ranks, serves } => {
                let server = if *serves {
                    let needed = open_files::needed(part.all, false, true);
                    if let Some(raised) = open_files::suffice(needed, part.all).map_err(TrainError::Comm)? {
                        tracing::info!("{raised}");
                    }
                    Some(StoreServer::bind(*port)?)
                } else {
                    None
                };
                let port = server.as_ref().map_or(*port, StoreServer::port);
                let mut members = Members::new(self.arguments.part.is_some(), log_dir, self.log)?;
                for local in 0..*ranks {
                    let rank =
                        members::Rank { rank: part.first + local, local, ranks: *ranks, all: part.all };
                    members.start_rank(&rank, (host, port), command, is_downloaded)?;
                }
                Ok((members, server))
            }
            Place::Hosts(hosts) => {
                let mut members = Members::new(false, None, self.log)?;
                let (mut first, all) = (0, place.num_ranks());
                for host in hosts {
                    let part = Part { first, all };
                    members.start_host(host, part, self.host_command(host, part, command)?)?;
                    first += host.ranks;
                }
                Ok((members, None))
            }
        }
    }

    /// Returns the command that starts the ranks of a host, over ssh.
    fn host_command(&self, host: &Host, part: Part, command: &[String]) -> anyhow::Result<Command> {
        let (store, port) = &self.address;
        let address =
            if store.contains(':') { format!("[{store}]:{port}") } else { format!("{store}:{port}") };
        let (ranks, part) = (host.ranks.to_string(), format!("{}:{}", part.first, part.all));
        let mut words = self.log.words();
        words.extend(["launch", "-n", &ranks, "--part", &part, "--address", &address].map(str::to_owned));
        if let Some(folder) = &self.arguments.log_dir {
            words.extend(["--log-dir".to_owned(), folder.display().to_string()]);
        }
        words.push("--".to_owned());
        words.extend_from_slice(command);
        host.command(&self.arguments.ssh, &words)
    }

    /// Returns the ranks of the next attempt; `None`, after a line that says why, if there is none.
    fn next_place(&self, place: &Place, ended: &Ended) -> Option<Place> {
        let Some(min) = self.arguments.min_ranks else { return Some(place.clone()) };
        let left = place.num_ranks().saturating_sub(ended.num_lost);
        let Some(ranks) = (min..=left).rev().find(|&ranks| self.is_possible(ranks)) else {
            tracing::info!(
                "{left} ranks are left, and the mesh of the configuration can be had with none of {min} to {left}: not \
                 starting again"
            );
            return None;
        };
        Some(match place {
            Place::Here { serves, .. } => {
                Place::Here { part: Part { first: 0, all: ranks }, ranks, serves: *serves }
            }
            Place::Hosts(hosts) => Place::Hosts(hosts::with_ranks(hosts, &ended.lost_hosts, ranks)?),
        })
    }

    /// Returns whether the run can have so many ranks, as far as its configuration tells.
    fn is_possible(&self, ranks: usize) -> bool {
        let overrides = self.train.overrides();
        overrides
            .and_then(|overrides| hub::config(&self.train.run.config, &overrides, ModelFiles::Whole))
            .map_or(true, |config| tandem_train::parallel::mesh::check(&config, ranks).is_ok())
    }
}

/// Parses the command of the ranks; one that is no command ends the process with clap's message.
///
/// # Errors
/// The command is not `train`.
fn train_arguments(command: &[String]) -> anyhow::Result<TrainArguments> {
    let words = std::iter::once("tandem").chain(command.iter().map(String::as_str));
    match Arguments::try_parse_from(words).unwrap_or_else(|error| error.exit()).command {
        Subcommand::Train(arguments) => Ok(arguments),
        _ => Err(mistake(format!(
            "launch is for `train`; {:?} runs in one process: start it without the launcher",
            command.join(" ")
        ))),
    }
}

/// Makes a command resume.
fn resume(command: &mut Vec<String>) {
    command.retain(|word| word != "--overwrite");
    if !command.iter().any(|word| word == "--resume") {
        command.push("--resume".to_owned());
    }
}

/// Splits an address; the host of an IPv6 address is in brackets, and comes without.
fn host_and_port(address: &str) -> anyhow::Result<(String, u16)> {
    let parsed = address.rsplit_once(':').and_then(|(host, port)| {
        let inner = host.strip_prefix('[').map_or(Some(host), |rest| rest.strip_suffix(']'))?;
        // Of a bare IPv6 address nobody knows where the port begins.
        let is_clear = !inner.is_empty() && (inner.len() < host.len() || !inner.contains(':'));
        is_clear.then_some((inner.to_owned(), port.parse().ok()?))
    });
    parsed.ok_or_else(|| {
        mistake(format!(
            "--address {address}: expected HOST:PORT, for example node0:29500 or [fd00::1]:29500"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_a_host_and_a_port() {
        let read = |text| host_and_port(text).map_err(|error| error.to_string());
        assert_eq!(read("node0:29500"), Ok(("node0".to_owned(), 29500)));
        assert_eq!(read("[fd77::1]:29601"), Ok(("fd77::1".to_owned(), 29601)));
        for bad in ["here", "node0:", ":1", "[]:1", "fd77::1:29601", "node0:70000", "[fd77::1:29601"] {
            assert!(read(bad).unwrap_err().contains(bad), "{bad}");
        }
    }

    #[test]
    fn a_restarted_command_resumes() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut command = words("train run.toml --overwrite --set a=b");
        resume(&mut command);
        assert_eq!(command, words("train run.toml --set a=b --resume"));
        resume(&mut command);
        assert_eq!(command, words("train run.toml --set a=b --resume"));
    }
}
