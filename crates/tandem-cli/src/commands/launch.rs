//! `tandem launch`: one process for each rank, on this machine.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context;
use tandem_comm::open_files;
use tandem_comm::store::StoreServer;
use tandem_hub::LAUNCHED;
use tandem_train::TrainError;

use crate::args::LaunchArguments;
use crate::exit::{Exit, mistake};
use crate::{hub, signals};

/// Time for the other ranks to end and report after one has failed.
const GRACE: Duration = Duration::from_secs(10);

/// Poll interval.
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) fn run(arguments: &LaunchArguments) -> anyhow::Result<Exit> {
    let LaunchArguments { ranks, nodes, node, address, command } = arguments;
    if *ranks == 0 || *nodes == 0 || node >= nodes {
        return Err(mistake(format!(
            "{ranks} ranks on node {node} of {nodes}: at least one rank, and nodes count from 0"
        )));
    }
    let (host, port) = match (address, nodes) {
        (None, 1) => ("127.0.0.1".to_owned(), 0),
        (None, _) => return Err(mistake("several nodes need --address HOST:PORT, of the first of them")),
        (Some(address), _) => host_and_port(address)?,
    };
    if *node == 0 {
        let num_ranks = nodes * ranks;
        let needed = open_files::needed(num_ranks, false, true);
        if let Some(raised) = open_files::suffice(needed, num_ranks).map_err(TrainError::Comm)? {
            eprintln!("{raised}");
        }
    }
    let is_downloaded = hub::prepare(command)?;
    // The first node's launcher serves the store, so that it outlives every rank.
    let server = if *node == 0 { Some(StoreServer::bind(port)?) } else { None };
    let port = server.as_ref().map_or(port, StoreServer::port);
    let program = std::env::current_exe().context("cannot find this program")?;
    let stop = signals::stop_flag()?;
    let mut running = Vec::with_capacity(*ranks);
    for local in 0..*ranks {
        let child = Command::new(&program)
            .args(command)
            .env("RANK", (node * ranks + local).to_string())
            .env("WORLD_SIZE", (nodes * ranks).to_string())
            .env("LOCAL_RANK", local.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", &host)
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .envs(is_downloaded.then_some((LAUNCHED, "1")))
            .spawn();
        match child {
            Ok(child) => running.push(child),
            Err(error) => {
                end(&mut running);
                return Err(error).with_context(|| format!("cannot start {}", program.display()));
            }
        }
    }
    Ok(wait(running, &stop))
}

/// Waits for all ranks. The first failure decides the outcome of the job.
fn wait(mut running: Vec<Child>, stop: &std::sync::atomic::AtomicBool) -> Exit {
    let (mut outcome, mut kill_at, mut is_told) = (Exit::Done, None, false);
    while !running.is_empty() {
        // Ctrl-C reaches the ranks through the terminal's process group; SIGTERM is passed on.
        if !is_told && stop.load(std::sync::atomic::Ordering::Relaxed) {
            is_told = true;
            running.iter().for_each(signals::terminate);
        }
        running.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                let exit = Exit::from_code(status.code());
                if exit != Exit::Done {
                    // A rank that lost a peer knows less than the peer.
                    if matches!(outcome, Exit::Done | Exit::PeerLost) {
                        outcome = exit;
                    }
                    kill_at.get_or_insert_with(|| Instant::now() + GRACE);
                }
                false
            }
            Err(_) => false,
        });
        if kill_at.is_some_and(|at| Instant::now() >= at) {
            end(&mut running);
        }
        std::thread::sleep(PAUSE);
    }
    outcome
}

fn end(running: &mut Vec<Child>) {
    for mut child in running.drain(..) {
        // A rank that has ended needs no kill.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn host_and_port(address: &str) -> anyhow::Result<(String, u16)> {
    let parsed =
        address.rsplit_once(':').and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
    parsed.ok_or_else(|| mistake(format!("--address {address}: expected HOST:PORT, for example node0:29500")))
}
