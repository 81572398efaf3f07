//! Training as one rank of several processes that a launcher started.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tandem_comm::Launch;
use tandem_comm::launch::environment;
use tandem_comm::launch::meeting::Meeting;
use tandem_comm::mpi::Session;
use tandem_comm::nccl::Libraries;
use tandem_comm::processes::{JoinedGroup, ProcessEngine, join};
use tandem_comm::watchdog::Watchdog;
use tandem_train::config::{Devices, Engine};
use tandem_train::events::{Event, Observer};
use tandem_train::run::{Outcome, spawn};
use tandem_train::{Config, Fault, Options, TrainError};

use crate::exit::{mistake, tell};
use crate::watcher::Watcher;

/// Trains as the rank that the launcher assigned. Rank 0 shows the progress.
pub(crate) fn train(
    launch: &Launch,
    mut config: Config,
    options: Options,
    watcher: &mut Watcher,
    stop: &AtomicBool,
) -> anyhow::Result<Outcome> {
    let Launch { launcher, process, num_processes, local_process, .. } = launch;
    tandem_train::placement::gpus::resolve_one(&mut config.compute, local_process.unwrap_or(*process))?;
    if config.compute.devices.num_ranks() > 1 {
        return Err(mistake(format!(
            "{launcher} started {num_processes} processes, each of which is a rank; compute.devices = {:?} asks for more \
             in each: set it to \"cpu\"",
            config.compute.devices.name()
        )));
    }
    if config.compute.engine == Engine::Threads {
        return Err(mistake(format!(
            "{launcher} started {num_processes} processes, and compute.engine = \"threads\" is for ranks that are threads of one: \
             leave it out"
        )));
    }
    tandem_train::parallel::mesh::check(&config, *num_processes)?;
    if let Some(warning) = tandem_train::placement::check(&config.compute)? {
        watcher.event(&Event::Warning(&warning));
    }
    // By default the ranks of one machine share its cores.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    config.compute.threads.get_or_insert((cores / ranks_on_this_machine()).max(1));
    join_and_train(launch, *process, &config, options, watcher, stop)
}

/// Returns the engine between the processes of a launch.
fn engine(launch: &Launch, engine: Engine) -> anyhow::Result<ProcessEngine> {
    let refused = |why: String| {
        let Launch { launcher, process, num_processes, .. } = launch;
        mistake(format!("{launcher} started this process as {process} of {num_processes}, but {why}"))
    };
    match engine {
        Engine::Mpi => match Session::find(&environment()) {
            Ok(_) => Ok(ProcessEngine::Mpi),
            Err(why) => Err(refused(format!("compute.engine = \"mpi\": {why}"))),
        },
        Engine::Tcp => Ok(ProcessEngine::Tcp),
        // Control needs no cluster's fabric.
        Engine::Nccl if launch.meeting_point.is_some() => Ok(ProcessEngine::Tcp),
        _ => Ok(ProcessEngine::choose(&environment())),
    }
}

fn join_and_train(
    launch: &Launch,
    process: usize,
    config: &Config,
    options: Options,
    watcher: &mut Watcher,
    stop: &AtomicBool,
) -> anyhow::Result<Outcome> {
    let deadline = Duration::from_secs(config.compute.deadline);
    // Report a missing engine before other ranks wait for this one.
    let nccl = match config.compute.engine {
        Engine::Nccl => Some(Libraries::open().map_err(|why| {
            mistake(format!("compute.engine = \"nccl\": {why}. compute.engine = \"auto\" needs no GPU"))
        })?),
        _ => None,
    };
    let engine = engine(launch, config.compute.engine)?;
    let mut report = |line: &str| tracing::info!("rank {process}: {line}");
    let meeting_deadline = Duration::from_secs(config.compute.meeting_deadline);
    let mut meeting = Meeting::begin(meeting_deadline, stop, &mut report);
    // The store ends last if this process serves it.
    let JoinedGroup { server: _server, group, session, mut watchdog, raised } =
        join(launch, engine, deadline, &mut meeting).map_err(TrainError::Comm)?;
    if let Some(raised) = raised {
        tracing::info!("rank {process}: {raised}");
    }
    if process == 0 {
        tracing::info!("{}", introduction(launch, engine, session.as_ref(), nccl.is_some()));
    }
    let (save, at_once) = (watcher.save_flag(), watcher.at_once_flag());
    // A signal that came while they met was seen by the meeting, or is by the first step.
    at_once.store(!stop.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut others = Requests { save, at_once };
    let observer: &mut dyn Observer = if process == 0 { &mut *watcher } else { &mut others };
    let group = match nccl {
        Some(nccl) => nccl.group(group, gpu(config), deadline),
        None => Ok(group),
    };
    let outcome = group
        .map_err(TrainError::Comm)
        .and_then(|group| spawn::train_as(config, options, group, observer, stop));
    watcher.finish();
    let outcome = outcome.map_err(|error| match &mut watchdog {
        Some(watchdog) => with_story(watchdog, error),
        None => error.into(),
    });
    // Without MPI's end the launcher kills all ranks, and what they have not printed by then is lost.
    let outcome = if session.is_some() { outcome.map_err(tell) } else { outcome };
    // MPI ends when all ranks have, while the watchdog still tells of those that fail.
    drop(session);
    outcome
}

/// Observer of a rank whose events nobody shows: it passes on the wish for a checkpoint.
struct Requests {
    save: Arc<AtomicBool>,
    at_once: Arc<AtomicBool>,
}

impl Observer for Requests {
    fn event(&mut self, event: &Event<'_>) {
        if matches!(event, Event::Started { .. }) {
            self.at_once.store(false, Ordering::Relaxed);
        }
    }

    fn is_to_save(&mut self) -> bool {
        self.save.swap(false, Ordering::Relaxed)
    }
}

/// Names the launcher of a job and what its ranks communicate through.
fn introduction(launch: &Launch, engine: ProcessEngine, session: Option<&Session>, nccl: bool) -> String {
    let Launch { launcher, num_processes, .. } = launch;
    let control = match (engine, session.map(Session::library)) {
        (ProcessEngine::Mpi, Some(found)) => format!("mpi ({}: {})", found.file.display(), found.version),
        (ProcessEngine::Mpi, None) => "mpi".to_owned(),
        (ProcessEngine::Tcp, _) => "tcp".to_owned(),
    };
    let data = if nccl { "nccl for the data, beside " } else { "" };
    format!("{num_processes} processes, started by {launcher}; engine: {data}{control}")
}

/// Adds this rank to an error; a lost peer is reported alike on all ranks.
fn with_story(watchdog: &mut Watchdog, error: TrainError) -> anyhow::Error {
    match error.comm() {
        Some(lost) if error.fault() == Fault::PeerLost => {
            let (verdict, story) = watchdog.story(lost);
            anyhow::Error::new(TrainError::Comm(verdict)).context(story)
        }
        _ => {
            watchdog.last_words(&tandem_train::chain(&error));
            let place = watchdog.own_place();
            anyhow::Error::new(error).context(place)
        }
    }
}

/// Returns this rank's GPU, if it has one.
fn gpu(config: &Config) -> Option<usize> {
    let Devices::Cuda(gpus) = config.compute.devices else { return None };
    gpus.ordinals()?.first().copied()
}

/// As the launcher reports it.
fn ranks_on_this_machine() -> usize {
    let names = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];
    let count = names.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    count.unwrap_or(1).max(1)
}
