//! Answers of a server of the user's, which is given the adapter of each round.
//!
//! Rank 0 writes the adapter into a shared folder, loads it under a name made of its content,
//! requests all completions and unloads it. A server that may have answered with another model ends
//! the run. All ranks get the same completions. `protocol` holds the differences between servers.

mod client;
mod completion;
mod protocol;
mod sglang;
mod vllm;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use tandem_comm::{Phase, ProcessGroup, Progress};

use super::Answer;
use super::generate::{Asked, GenerationRequest, from_first};
use super::keepalive::KeepAlive;
use crate::checkpoint::snapshot;
use crate::config::{Config, OnlineConfig};
use crate::inputs::RunInputs;
use crate::parallel::DeviceMesh;
use crate::step::TrainStep;
use crate::{Result, TrainError};
use client::Client;
use completion::CompletionRequest;

/// Generation backend over a server.
pub struct Server {
    options: OnlineConfig,
    seed: u64,
    /// On the first rank, which alone asks.
    first: Option<First>,
}

/// The first rank's.
struct First {
    client: Client,
    adapters: PathBuf,
    /// The folder of the adapter that is to answer next.
    published: Option<PathBuf>,
    /// The folder of the round before.
    before: Option<PathBuf>,
}

impl Server {
    /// Creates it from the config; rank 0 reads the key. Sends nothing yet.
    ///
    /// # Errors
    /// The key's variable is not set.
    ///
    /// # Panics
    /// The config has no server.
    pub fn from_config(config: &Config, is_first: bool) -> Result<Self> {
        let server = config.server().expect("a server");
        let first = || -> Result<_> {
            let (adapters, published, before) = (server.adapters.clone(), None, None);
            Ok(First { client: Client::new(server)?, adapters, published, before })
        };
        Ok(Self {
            options: config.online.clone().expect("an online run"),
            seed: config.seed,
            first: is_first.then(first).transpose()?,
        })
    }

    /// Writes the adapter, which has taken `after` steps, where the server reads it. Every rank
    /// calls this.
    pub fn publish(
        &mut self,
        after: u64,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        prepared: &RunInputs,
    ) -> Result<()> {
        let TrainStep { policy, decoder: part, .. } = scorer;
        let Some(First { adapters, published, before, .. }) = &mut self.first else {
            return snapshot::participate_in_gathers(mesh, part, policy);
        };
        if published.is_none() && before.is_none() {
            sweep(adapters);
        }
        let folder = adapters.join(format!("step-{after:06}"));
        let io = |source| TrainError::Io { action: "create", path: adapters.clone(), source };
        fs::create_dir_all(&*adapters).map_err(io)?;
        snapshot::write_adapter(&folder, prepared, mesh, part, policy)?;
        *published = Some(folder);
        Ok(())
    }

    /// The answers to all prompts of a round, by the adapter that was published last, `None` if any
    /// rank was stopped. Every rank calls this, and gets the same.
    ///
    /// # Errors
    /// The server cannot be used.
    ///
    /// # Panics
    /// No adapter was published.
    pub fn answer(
        &mut self,
        asked: &Asked,
        prepared: &RunInputs,
        group: &mut ProcessGroup,
        progress: &Progress,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let Self { options, seed, first } = self;
        let mut company = KeepAlive::new(group, stop);
        let mut answers = None;
        if let Some(first) = first {
            let asking = |stop: &AtomicBool| first.answer(asked, prepared, options, *seed, progress, stop);
            answers = company.working(asking)??;
        }
        if !company.end()? {
            return Ok(None);
        }
        from_first(answers.unwrap_or_default(), asked.requests.len(), asked.num_answers, group).map(Some)
    }
}

/// Removes the adapters of an earlier process of the run, which may have been killed. What cannot be removed stays.
fn sweep(adapters: &Path) {
    for entry in fs::read_dir(adapters).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let is_left = match name.to_str().and_then(round_of) {
            // Other folders may have such a name.
            Some("") => path.join("adapter_config.json").exists(),
            Some(unfinished) => unfinished.starts_with(".writing-") || unfinished.starts_with(".old-"),
            None => false,
        };
        if is_left {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Returns what follows `step-000123` in the name of a round's folder.
fn round_of(name: &str) -> Option<&str> {
    let numbered = name.strip_prefix('.').unwrap_or(name).strip_prefix("step-")?;
    let rest = numbered.trim_start_matches(|c: char| c.is_ascii_digit());
    (numbered.len() >= rest.len() + 6).then_some(rest)
}

impl First {
    /// The server's answers, `None` if they were stopped.
    fn answer(
        &mut self,
        asked: &Asked,
        prepared: &RunInputs,
        options: &OnlineConfig,
        seed: u64,
        progress: &Progress,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let Self { client, published, before, .. } = self;
        let folder = published.take().expect("an adapter is published before it answers");
        let name = name_of(&folder)?;
        let Asked { split, num_answers, ref requests } = *asked;
        let form = CompletionRequest { name: &name, options, seed, prepared, split, num_answers };
        let round = || -> Result<_> {
            client.load(&name, &folder, stop)?;
            let answers = ask(client, &form, requests, progress, stop)?;
            client.unload(&name, stop)?;
            Ok(answers)
        };
        let answers = round();
        if stop.load(Ordering::Relaxed) {
            client.leave(&name);
            return Ok(None);
        }
        let answers = answers?;
        let before = before.replace(folder.clone()).filter(|before| *before != folder);
        if let Some(before) = before.filter(|before| before.exists()) {
            let io = |source| TrainError::Io { action: "remove", path: before.clone(), source };
            fs::remove_dir_all(&before).map_err(io)?;
        }
        Ok(Some(answers))
    }
}

/// The name of an adapter in a folder: other content, other name.
fn name_of(folder: &Path) -> Result<String> {
    let mut hash = blake3::Hasher::new();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        let path = folder.join(file);
        let bytes = fs::read(&path).map_err(|source| TrainError::Io {
            action: "read",
            path: path.clone(),
            source,
        })?;
        hash.update(&bytes);
    }
    Ok(format!("tandem-{}", &hash.finalize().to_hex()[..16]))
}

/// Requests completions of all prompts concurrently, in order. The first error ends it once running requests have
/// ended; a stop ends those, and is an error that nobody reads.
fn ask(
    client: &Client,
    form: &CompletionRequest<'_>,
    asked: &[GenerationRequest],
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Vec<Vec<Answer>>> {
    let next = AtomicUsize::new(0);
    let (send, received) = mpsc::channel();
    let mut answers = vec![Vec::new(); asked.len()];
    let work = |send: mpsc::Sender<_>| {
        while let Some((index, asked)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, asked.get(i)?)))
        {
            let answers =
                client.complete(&form.body(asked), stop).and_then(|reply| form.answers(asked, &reply));
            let answers = answers.map_err(|reason| client.error(reason));
            if answers.is_err() {
                next.store(usize::MAX / 2, Ordering::Relaxed);
            }
            // After a failure nothing receives.
            let _ = send.send((index, answers));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..client.concurrency().min(asked.len()) {
            let (send, work) = (send.clone(), &work);
            scope.spawn(move || work(send));
        }
        drop(send);
        for (index, found) in received {
            progress.begin_phase(Phase::Generate);
            answers[index] = found?;
        }
        Ok(answers)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_without_the_adapters_of_an_earlier_process() {
        let folder = tempfile::tempdir().unwrap();
        let mine = ["step-000007", "step-7", "notes", ".step-000007", "step-000007.bak"];
        let left = ["step-000001", "step-1234567", ".step-000002.writing-77", ".step-000002.old-77"];
        for name in mine.iter().chain(&left) {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        for name in ["step-000001", "step-1234567"] {
            fs::write(folder.path().join(name).join("adapter_config.json"), "{}").unwrap();
        }
        sweep(folder.path());
        assert!(mine.iter().all(|name| folder.path().join(name).exists()));
        assert!(left.iter().all(|name| !folder.path().join(name).exists()));
        sweep(&folder.path().join("none"));
    }
}
