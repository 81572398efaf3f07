//! Runs all ranks of this process.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tandem_comm::{ProcessGroup, threads};

use crate::config::Config;
use crate::events::{Event, Observer, Silent};
use crate::parallel::mesh;
use crate::placement::{self, gpus};
use crate::run::{Options, Outcome, Trainer};
use crate::{Fault, Result, TrainError, chain, trackers};

/// How long a rank waits for another. Threads of one process cannot vanish, and one of them may
/// tokenise a large data set while the others wait: this is a last resort.
const DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// Trains on the ranks of `compute.devices`, each a thread with its own device. The observer sees
/// rank 0.
///
/// # Errors
/// The error of the first failed rank; or, before any starts, an invalid division of ranks or
/// offload folder.
pub fn train(
    config: &Config,
    options: impl Into<Options>,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Outcome> {
    let (options, mut config) = (options.into(), config.clone());
    gpus::resolve(&mut config.compute)?;
    let config = &config;
    let num_ranks = config.compute.devices.num_ranks();
    mesh::check(config, num_ranks)?;
    trackers::check(config)?;
    if let Some(warning) = placement::check(&config.compute)? {
        observer.event(&Event::Warning(&warning));
    }
    let mut groups = threads::groups(num_ranks, DEADLINE).into_iter();
    let first = groups.next().expect("there is a rank at least");
    if groups.len() == 0 {
        return train_as(config, options, first, observer, stop);
    }
    let on_thread = |group: ProcessGroup, observer: &mut dyn Observer| {
        let (rank, progress) = (group.rank(), group.progress().clone());
        let place = |error| TrainError::OnRank { rank, place: progress.place(), error: Box::new(error) };
        let carried = gpus::carried(&config.compute, group, DEADLINE);
        let trained = carried.and_then(|group| train_as(config, options.clone(), group, observer, stop));
        trained.map_err(place)
    };
    std::thread::scope(|scope| {
        let start = |group: ProcessGroup| {
            // The name is in the message of a panic.
            let thread = std::thread::Builder::new().name(format!("rank {}", group.rank()));
            let started = thread.spawn_scoped(scope, move || on_thread(group, &mut Silent));
            started.map_err(TrainError::thread)
        };
        // Ranks that have started learn that the others are gone.
        let others = groups.map(start).collect::<Result<Vec<_>>>()?;
        let mut outcome = on_thread(first, observer);
        for other in others {
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // A rank that lost its peer knows less than the peer.
            if outcome.as_ref().is_err_and(|error| error.fault() == Fault::PeerLost) && other.is_err() {
                outcome = other;
            }
        }
        outcome
    })
}

/// One rank, from its start to its end. When it ends early the others learn why, or at least that
/// it is gone.
pub fn train_as(
    config: &Config,
    options: impl Into<Options>,
    group: ProcessGroup,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Outcome> {
    let mut trainer = Trainer::on_rank(config.clone(), options, group, observer)?;
    let outcome = trainer.run(observer, stop);
    if let Err(error) = &outcome
        && error.comm().is_none()
    {
        trainer.abort(&chain(error));
    }
    outcome
}
