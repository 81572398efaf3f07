//! Run folder: lock, layout and deletion.
//!
//! ```text
//! runs/first/
//!   config.toml      resolved
//!   plan.json        what was planned
//!   provenance.json  program, arithmetic, config and inputs by hash
//!   metrics.jsonl    one line per step and per evaluation
//!   log.txt          the lines that the run has shown
//!   trackers.json    with `[logging]`: names of the run at its trackers
//!   tracker.log      with `logging.command`: the beginning of its output
//!   tensorboard/     with `logging.tensorboard = true`: event files
//!   rows.jsonl       with `train.record_rows`: the rows of each step
//!   checkpoints/     see `checkpoint`
//!   states.jsonl     the hash of all state at each checkpoint
//!   samples.jsonl    answers of the model while it trained
//!   final/           the trained model, an ordinary HF folder, with a README.md about it
//!   finished.json    the run's last step when it wrote final/
//!   .lock            held while a run is going; empty or stale ones mean nothing
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tandem_files::FURTHER_TEMPLATES;
use tandem_model::io::{is_model_file, recover_folder};

use crate::checkpoint::{Checkpoints, STATES};
use crate::config::Config;
use crate::disk::{remove_if_empty, replace};
use crate::error::{Result, TrainError};
use crate::metrics::is_at;
use crate::run::provenance::PROVENANCE;
use crate::run::{agreement, model_card};
use crate::{profile, trackers};

/// First line of every `config.toml` written here: tells it from one that a person put into the
/// folder.
const CONFIG_HEADER: &str = crate::config::RESOLVED_HEADER;

/// File that is there while an earlier run is deleted.
const OVERWRITING: &str = ".overwriting";

/// File about a trained model, in its folder.
const MODEL_CARD: &str = "README.md";

/// File of the lines that a run has shown; its observer writes it.
pub const LOG: &str = "log.txt";

/// Files of a run beside those in folders.
const FILES: [&str; 11] = [
    CONFIG,
    PLAN,
    PROVENANCE,
    METRICS,
    STATES,
    LOG,
    ROWS,
    SAMPLES,
    FINISHED,
    trackers::STATE,
    trackers::OUTPUT,
];

const CONFIG: &str = "config.toml";
const LOCK: &str = ".lock";
const PLAN: &str = "plan.json";
pub(super) const METRICS: &str = "metrics.jsonl";
const ROWS: &str = "rows.jsonl";
const SAMPLES: &str = "samples.jsonl";
const FINISHED: &str = "finished.json";

/// Time for which a run that resumes waits for the lock. A killed process frees its memory before its
/// locks, and whoever killed it may start the run again at once.
const DYING: Duration = Duration::from_secs(3);

/// Interval of trying to lock.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns whether a path is that of a file that a run with this output folder writes.
pub(crate) fn is_file_of(output: &Path, path: &Path) -> bool {
    FILES.iter().any(|name| output.join(name) == path)
}

/// Policy for a folder that already holds a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunDirPolicy {
    /// Refuse it.
    Fresh,
    /// Continue the run.
    Resume,
    /// Delete the earlier run's files, and nothing else.
    Overwrite,
}

/// A run folder, locked against other processes for as long as this value lives (also against being
/// killed: the system drops the lock with the process).
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    start: RunDirPolicy,
    lock: Lock,
}

/// Lock of a run folder.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a process that another thread is starting has a copy of the file
        // until it runs its program, and the lock would stay with the copy. Without an unlock the
        // system drops the lock with the last copy.
        let _ = self.0.unlock();
    }
}

/// Path of the resolved config.
pub(crate) fn config_path(output: &Path) -> PathBuf {
    output.join(CONFIG)
}

/// Path of the trained model.
pub fn final_path(output: &Path) -> PathBuf {
    output.join("final")
}

/// Contents of [`FINISHED`].
#[derive(Serialize, Deserialize)]
struct Finished {
    step: u64,
}

/// Returns whether the run in a folder has written its model at this step or a later one. A run that is resumed for more
/// steps keeps the model that it had until it ends.
pub fn has_model_of(output: &Path, step: u64) -> bool {
    // Earlier versions kept no step.
    final_path(output).is_dir() && model_step(output).is_none_or(|of_model| of_model >= step)
}

/// Returns the last step of a run when it wrote its model, if it has kept that.
pub fn model_step(output: &Path) -> Option<u64> {
    let text = tandem_files::read(&output.join(FINISHED), tandem_files::MAX_CONFIG).ok()?;
    serde_json::from_slice::<Finished>(&text).ok().map(|finished| finished.step)
}

impl RunDir {
    /// Creates or takes over the folder and locks it. Nothing of an earlier run is touched before
    /// [`RunDir::begin`].
    ///
    /// # Errors
    /// The folder holds a run and `start` is [`RunDirPolicy::Fresh`], another process holds its lock, its
    /// `config.toml` is not ours, or a file operation fails.
    pub fn open(path: &Path, start: RunDirPolicy) -> Result<Self> {
        fs::create_dir_all(path).map_err(TrainError::io("create", path))?;
        let lock = lock(path, if start == RunDirPolicy::Resume { DYING } else { Duration::ZERO })?;
        let dir = Self { path: path.to_path_buf(), start, lock };
        dir.refuse_foreign_config()?;
        dir.refuse_foreign_model()?;
        if start == RunDirPolicy::Resume && dir.path.join(OVERWRITING).exists() {
            // Its checkpoints are another run's than the one that is to go on.
            dir.clear()?;
        }
        let found = dir.leftovers();
        if start == RunDirPolicy::Fresh && !found.is_empty() {
            return Err(TrainError::UsedRunDir { path: dir.path, found });
        }
        dir.refuse_foreign_files(&found)?;
        if start == RunDirPolicy::Resume {
            dir.refuse_special_files()?;
        }
        Ok(dir)
    }

    /// Starts the run after all inputs are checked: finishes what a killed process has left undone,
    /// deletes an overwritten run and writes the resolved config and the plan.
    pub fn begin(&self, config: &Config, plan: &str) -> Result<()> {
        recover_folder(&self.final_path())?;
        // What cannot be removed is told when old checkpoints are deleted.
        let _ = self.checkpoints().sweep();
        remove_files(&self.path, agreement::is_mark)?;
        let overwriting = self.path.join(OVERWRITING);
        if self.start == RunDirPolicy::Overwrite {
            fs::write(&overwriting, "").map_err(TrainError::io("write", &overwriting))?;
            self.clear()?;
        }
        replace(&self.config_path(), format!("{CONFIG_HEADER}{}", config.to_toml()).as_bytes())?;
        remove_file(&overwriting)?;
        replace(&self.plan_path(), plan.as_bytes())
    }

    /// Checks that the folder is still this run's.
    ///
    /// # Errors
    /// The folder or its lock was removed or replaced: another run may have begun there.
    pub(crate) fn check_lock(&self) -> Result<()> {
        if is_at(&self.lock.0, &self.path.join(LOCK)) {
            return Ok(());
        }
        let path = self.path.display();
        Err(TrainError::Mismatch {
            reason: format!(
                "{path}: the folder of this run, or {LOCK} in it, was removed or replaced while the run wrote to it. Nothing more \
                 is written there, for another run may have begun in it; what was written since the last checkpoint is lost"
            ),
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.toml`.
    pub fn config_path(&self) -> PathBuf {
        config_path(&self.path)
    }

    /// `plan.json`.
    pub fn plan_path(&self) -> PathBuf {
        self.path.join(PLAN)
    }

    /// `metrics.jsonl`.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join(METRICS)
    }

    /// `rows.jsonl`.
    pub fn rows_path(&self) -> PathBuf {
        self.path.join(ROWS)
    }

    /// `samples.jsonl`.
    pub fn samples_path(&self) -> PathBuf {
        self.path.join(SAMPLES)
    }

    /// `states.jsonl`.
    pub(crate) fn states_path(&self) -> PathBuf {
        self.path.join(STATES)
    }

    /// `final/`.
    pub fn final_path(&self) -> PathBuf {
        final_path(&self.path)
    }

    /// Writes the model card into the folder of the trained model, unless the user has written one there.
    pub(crate) fn write_model_card(&self, text: &str) -> Result<()> {
        let path = self.final_path().join(MODEL_CARD);
        match fs::read_to_string(&path) {
            Ok(other) if !model_card::is_ours(&other) => Ok(()),
            _ => replace(&path, text.as_bytes()),
        }
    }

    /// Notes the last step of the run, whose model is in `final/` now.
    pub(crate) fn finish(&self, step: u64) -> Result<()> {
        let text = serde_json::to_string(&Finished { step }).expect("a number");
        replace(&self.path.join(FINISHED), format!("{text}\n").as_bytes())
    }

    /// `checkpoints/`.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::for_run(&self.path)
    }

    fn leftovers(&self) -> Vec<&'static str> {
        let folders = ["checkpoints", "final", trackers::EVENTS];
        // An empty folder, to which a link may lead, waits for a run.
        let is_empty = |path: &Path| fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        let is_there = |name: &&str| {
            let path = self.path.join(name);
            path.exists() && !is_empty(&path)
        };
        FILES.into_iter().chain(folders).filter(is_there).collect()
    }

    /// Deletes a run's files. Other files and their folders stay.
    fn clear(&self) -> Result<()> {
        // The config is replaced at the end: until then it shows whose files these are.
        for name in FILES.into_iter().filter(|name| *name != CONFIG) {
            remove_file(&self.path.join(name))?;
        }
        clear_folder(&self.path.join(trackers::EVENTS), trackers::is_event_file)?;
        self.checkpoints().clear()?;
        clear_folder(&profile::folder_of(&self.path), is_profile)?;
        let card = self.final_path().join(MODEL_CARD);
        if fs::read_to_string(&card).is_ok_and(|text| model_card::is_ours(&text)) {
            remove_file(&card)?;
        }
        clear_folder(&self.final_path().join(FURTHER_TEMPLATES), |name| name.ends_with(".jinja"))?;
        clear_folder(&self.final_path(), is_model_file)
    }

    /// Files that have a run's names, and may be a person's, would be deleted or written over.
    fn refuse_foreign_files(&self, found: &[&str]) -> Result<()> {
        let keeps_them = match self.start {
            RunDirPolicy::Fresh => true,
            RunDirPolicy::Resume => !self.checkpoints().steps()?.is_empty(),
            RunDirPolicy::Overwrite => false,
        };
        if keeps_them || found.is_empty() || self.config_path().exists() {
            return Ok(());
        }
        let reason = format!(
            "{}: {} there, but no {CONFIG} of a run, so what would be replaced may be somebody's own: move it away or choose \
             another `output`",
            self.path.display(),
            match found {
                [one] => format!("{one} is"),
                several => format!("{} are", several.join(", ")),
            }
        );
        Err(TrainError::Mismatch { reason })
    }

    /// Refuses what is no file and is read or written again: a named pipe would be waited for.
    fn refuse_special_files(&self) -> Result<()> {
        let is_special = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| !found.is_file());
        match FILES.into_iter().map(|name| self.path.join(name)).find(is_special) {
            None => Ok(()),
            Some(path) => {
                let reason = format!(
                    "{}: it is no regular file, and a run that resumes reads it or adds to it: move it away",
                    path.display()
                );
                Err(TrainError::Mismatch { reason })
            }
        }
    }

    /// A model could not be written there, which would show after the last step.
    fn refuse_foreign_model(&self) -> Result<()> {
        let path = self.final_path();
        // A link may lead nowhere.
        if path.is_dir() || !(path.exists() || path.is_symlink()) {
            return Ok(());
        }
        let reason = format!(
            "{}: it is no folder, and the trained model is written to a folder of that name: move it away or choose another \
             `output`",
            path.display()
        );
        Err(TrainError::Mismatch { reason })
    }

    fn refuse_foreign_config(&self) -> Result<()> {
        let path = self.config_path();
        match tandem_files::read_text(&path, tandem_files::MAX_CONFIG) {
            Ok(text) if !text.starts_with(CONFIG_HEADER) => Err(TrainError::ForeignFile { path }),
            Err(e) if e.kind() != ErrorKind::NotFound => Err(TrainError::io("read", &path)(e)),
            _ => Ok(()),
        }
    }
}

/// Deletes files accepted by `is_ours`, and the folder if it is then empty. A link to a folder stays.
fn clear_folder(folder: &Path, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    remove_files(folder, is_ours)?;
    remove_if_empty(folder)
}

/// Deletes files accepted by `is_ours`.
fn remove_files(folder: &Path, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    let listing = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        other => other.map_err(TrainError::io("list", folder))?,
    };
    for entry in listing {
        let entry = entry.map_err(TrainError::io("list", folder))?;
        if entry.file_name().to_str().is_some_and(&is_ours) {
            remove_file(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether the name is that of a rank's profile.
fn is_profile(name: &str) -> bool {
    let rest = name.strip_prefix("rank-").map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    rest.is_some_and(|rest| [".txt", ".json", ".trace.json"].contains(&rest))
}

/// Locks a run folder that another process may hold for at most `patience` longer.
fn lock(folder: &Path, patience: Duration) -> Result<Lock> {
    let path = folder.join(LOCK);
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(TrainError::io("create", &path))?;
    let began = Instant::now();
    let mut tried = file.try_lock();
    while matches!(tried, Err(TryLockError::WouldBlock)) && began.elapsed() < patience {
        sleep(PAUSE);
        tried = file.try_lock();
    }
    match tried {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // The holder's note is optional information in the refusal.
            let _ = file.read_to_string(&mut holder);
            let holder = if holder.is_empty() { "unknown process".into() } else { holder.trim().to_string() };
            return Err(TrainError::LockedRunDir { path: folder.to_path_buf(), holder });
        }
        Err(TryLockError::Error(e)) => return Err(TrainError::io("lock", &path)(e)),
    }
    let name = format!("process {}\n", std::process::id());
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(name.as_bytes()))
        .map_err(TrainError::io("write", &path))?;
    Ok(Lock(file))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(TrainError::io("remove", path)(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "method = 'sft'\nmodel = 'm'\noutput = 'o'\ndata.train = 't.jsonl'\n\
                          train = { batch_size = 2, steps = 3, learning_rate = 1 }\n";

    fn config(folder: &Path) -> Config {
        let path = folder.join("run.toml");
        fs::write(&path, CONFIG).expect("written");
        Config::load::<&str>(&path, &[]).expect("valid")
    }

    /// A folder in which a run went to its end, between files that are none of its business.
    fn used(folder: &Path) -> PathBuf {
        let config = config(folder);
        let path = folder.join("runs/first");
        let run = RunDir::open(&path, RunDirPolicy::Fresh).expect("a new folder");
        run.begin(&config, "{}").expect("begun");
        fs::write(run.metrics_path(), "{}\n").expect("written");
        fs::write(run.rows_path(), "{}\n").expect("written");
        for folder in [run.final_path(), run.checkpoints().root().join("step-000001")] {
            fs::create_dir_all(folder).expect("created");
        }
        for name in ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "README.md"] {
            fs::write(run.final_path().join(name), "x").expect("written");
        }
        let templates = run.final_path().join(FURTHER_TEMPLATES);
        fs::create_dir(&templates).expect("created");
        fs::write(templates.join("tool_use.jinja"), "x").expect("written");
        fs::write(path.join("notes.txt"), "mine").expect("written");
        for name in [trackers::STATE, trackers::OUTPUT, "tensorboard/events.out.tfevents.0000000001.tandem.1"]
        {
            fs::create_dir_all(path.join(trackers::EVENTS)).expect("created");
            fs::write(path.join(name), "x").expect("written");
        }
        fs::create_dir(profile::folder_of(&path)).expect("created");
        for name in ["rank-0.txt", "rank-0.json", "rank-12.trace.json"] {
            fs::write(profile::folder_of(&path).join(name), "x").expect("written");
        }
        path
    }

    fn files(folder: &Path) -> Vec<String> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).expect("a folder") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("UTF-8");
            if entry.path().is_dir() {
                names.extend(files(&entry.path()).into_iter().map(|inner| format!("{name}/{inner}")));
                names.push(format!("{name}/"));
            } else {
                names.push(name);
            }
        }
        names.sort();
        names
    }

    #[test]
    fn a_used_folder_is_refused_with_both_ways_out_and_left_alone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        let before = files(&path);
        let error = RunDir::open(&path, RunDirPolicy::Fresh).expect_err("a used folder");
        let text = error.to_string();
        assert!(
            text.contains("--resume") && text.contains("--overwrite") && text.contains("runs/first"),
            "{text}"
        );
        assert_eq!((error.exit_code(), files(&path)), (2, before));
    }

    #[test]
    fn every_file_of_a_run_makes_a_folder_used() {
        let ours = [
            "plan.json",
            PROVENANCE,
            STATES,
            "metrics.jsonl",
            LOG,
            "rows.jsonl",
            "samples.jsonl",
            FINISHED,
            "checkpoints",
            "final",
        ];
        for name in ours.into_iter().chain([trackers::STATE, trackers::OUTPUT, trackers::EVENTS]) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let path = folder.path().join(name);
            if name == "final" { fs::create_dir_all(path.join("x")) } else { fs::write(path, "") }
                .expect("written");
            let error =
                RunDir::open(folder.path(), RunDirPolicy::Fresh).expect_err("a used folder").to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_folder_with_foreign_files_only_is_not_used() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("notes.txt"), "mine").expect("written");
        RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("a folder without a run");
    }

    #[test]
    fn overwrite_deletes_what_the_run_wrote_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        let before = files(&path);
        let run = RunDir::open(&path, RunDirPolicy::Overwrite).expect("taken over");
        assert_eq!(files(&path), before, "nothing may be deleted before the input is known to be good");
        run.begin(&config(folder.path()), "{}").expect("begun");
        let left = [".lock", "config.toml", "final/", "final/README.md", "notes.txt", "plan.json"];
        assert_eq!(files(&path), left);
    }

    /// Leftovers of the old run are not what the new one goes on from.
    #[test]
    fn a_run_that_was_killed_while_it_replaced_another_begins_anew() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        fs::create_dir_all(path.join("checkpoints/step-000001")).expect("created");
        fs::write(path.join(OVERWRITING), "").expect("written");
        fs::remove_file(path.join(METRICS)).expect("removed");
        let run = RunDir::open(&path, RunDirPolicy::Resume).expect("taken over");
        assert!(run.checkpoints().steps().expect("a folder").is_empty());
        assert!(!path.join("final/config.json").exists());
        run.begin(&config(folder.path()), "{}").expect("begun");
        assert!(!path.join(OVERWRITING).exists());
    }

    #[test]
    fn links_to_other_disks_stay() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (path, disk) = (folder.path().join("run"), folder.path().join("disk"));
        for name in ["checkpoints", "final"] {
            fs::create_dir_all(disk.join(name)).expect("created");
            fs::create_dir_all(&path).expect("created");
            std::os::unix::fs::symlink(disk.join(name), path.join(name)).expect("linked");
        }
        drop(RunDir::open(&path, RunDirPolicy::Fresh).expect("links to empty folders"));
        fs::create_dir(disk.join("checkpoints/step-000001")).expect("created");
        fs::write(disk.join("final/config.json"), "{}").expect("written");
        fs::write(config_path(&path), CONFIG_HEADER).expect("written");
        let run = RunDir::open(&path, RunDirPolicy::Overwrite).expect("taken over");
        run.begin(&config(folder.path()), "{}").expect("begun");
        for name in ["checkpoints", "final"] {
            assert!(path.join(name).is_symlink() && files(&disk.join(name)).is_empty(), "{name}");
        }
    }

    #[test]
    fn files_with_a_runs_names_but_no_config_of_one_are_not_replaced() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path();
        for name in [LOG, SAMPLES] {
            fs::write(path.join(name), "mine").expect("written");
        }
        for start in [RunDirPolicy::Overwrite, RunDirPolicy::Resume] {
            let error = RunDir::open(path, start).expect_err("somebody's files").to_string();
            assert!(error.contains("log.txt, samples.jsonl are there, but no config.toml"), "{error}");
        }
        // A run whose config was lost goes on from its checkpoint.
        fs::create_dir_all(path.join("checkpoints/step-000001")).expect("created");
        RunDir::open(path, RunDirPolicy::Resume).expect("taken over");
    }

    #[test]
    fn a_run_that_resumes_waits_for_no_pipe() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        let pipe = path.join(ROWS);
        fs::remove_file(&pipe).expect("of the run");
        let made =
            std::process::Command::new("mkfifo").arg(&pipe).status().expect("a program of every system");
        assert!(made.success());
        let error = RunDir::open(&path, RunDirPolicy::Resume).expect_err("a pipe").to_string();
        assert!(error.starts_with(&format!("{}: it is no regular file", pipe.display())), "{error}");
        fs::remove_file(pipe).expect("removed");
        RunDir::open(&path, RunDirPolicy::Resume).expect("files alone");
    }

    #[test]
    fn a_model_is_of_the_step_that_was_noted_or_of_any() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("a new folder");
        assert!(!has_model_of(run.path(), 0));
        fs::create_dir(run.final_path()).expect("created");
        assert!(has_model_of(run.path(), 7), "no step was kept");
        run.finish(6).expect("noted");
        assert_eq!(model_step(run.path()), Some(6));
        assert!(has_model_of(run.path(), 6) && !has_model_of(run.path(), 7));
    }

    #[test]
    fn a_card_of_the_users_own_stays() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = RunDir::open(&used(folder.path()), RunDirPolicy::Resume).expect("taken over");
        let card = run.final_path().join(MODEL_CARD);
        fs::write(&card, "mine").expect("written");
        run.write_model_card("ours").expect("kept");
        assert_eq!(fs::read_to_string(&card).expect("a card"), "mine");
        fs::remove_file(&card).expect("removed");
        run.write_model_card("ours").expect("written");
        assert_eq!(fs::read_to_string(&card).expect("a card"), "ours");
    }

    #[test]
    fn resume_deletes_nothing() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        let before = files(&path);
        let run = RunDir::open(&path, RunDirPolicy::Resume).expect("taken over");
        run.begin(&config(folder.path()), "{}").expect("begun");
        assert_eq!(files(&path), before);
    }

    /// Leaves what a process leaves that is killed between the renames of `final/`, and while it deletes a
    /// checkpoint.
    fn killed_while_it_replaced(path: &Path) {
        fs::write(path.join("final/notes.txt"), "mine").expect("written");
        fs::rename(path.join("final"), path.join(".final.old-99999")).expect("renamed");
        for name in [".final.writing-99998", "checkpoints/.step-000001.old", "checkpoints/.step-000002.tmp"] {
            fs::create_dir(path.join(name)).expect("created");
            fs::write(path.join(name).join("model.safetensors"), "x").expect("written");
        }
        fs::write(path.join(".final.writing-notes"), "mine").expect("written");
        fs::write(path.join(".seen-18b2f0"), "").expect("written");
        fs::write(path.join(".seen-notes"), "mine").expect("written");
    }

    #[test]
    fn what_a_killed_process_left_is_swept_and_a_users_files_come_back() {
        for start in [RunDirPolicy::Resume, RunDirPolicy::Overwrite] {
            for is_replaced in [false, true] {
                let folder = tempfile::tempdir().expect("a temporary folder");
                let path = used(folder.path());
                killed_while_it_replaced(&path);
                if is_replaced {
                    fs::create_dir(path.join("final")).expect("created");
                    fs::write(path.join("final/tokenizer.json"), "new").expect("written");
                }
                let run = RunDir::open(&path, start).expect("taken over");
                run.begin(&config(folder.path()), "{}").expect("begun");
                let found = files(&path);
                let hidden = |name: &&String| {
                    [".final", ".seen"].iter().any(|own| name.starts_with(own)) || name.contains("/.step")
                };
                let left = [".final.writing-notes", ".seen-notes"];
                assert_eq!(found.iter().filter(hidden).collect::<Vec<_>>(), left);
                assert_eq!(fs::read_to_string(path.join("final/notes.txt")).expect("a file"), "mine");
                let has_model = path.join("final/config.json").exists();
                assert_eq!(has_model, start == RunDirPolicy::Resume && !is_replaced, "{found:?}");
            }
        }
    }

    #[test]
    fn a_file_in_the_place_of_the_model_is_refused_before_anything_is_computed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("final"), "mine").expect("written");
        for start in [RunDirPolicy::Fresh, RunDirPolicy::Resume, RunDirPolicy::Overwrite] {
            let error = RunDir::open(folder.path(), start).expect_err("a file").to_string();
            assert!(error.contains("/final: it is no folder"), "{error}");
        }
        fs::remove_file(folder.path().join("final")).expect("removed");
        std::os::unix::fs::symlink("nowhere", folder.path().join("final")).expect("a link");
        let error = RunDir::open(folder.path(), RunDirPolicy::Fresh).expect_err("a link").to_string();
        assert!(error.contains("/final: it is no folder"), "{error}");
    }

    #[test]
    fn a_folder_that_was_removed_or_taken_over_is_no_longer_the_runs() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("run");
        let first = RunDir::open(&path, RunDirPolicy::Fresh).expect("a new folder");
        first.check_lock().expect("its own");
        fs::remove_dir_all(&path).expect("removed");
        let error = first.check_lock().expect_err("removed").to_string();
        assert!(error.contains("removed or replaced"), "{error}");
        let second = RunDir::open(&path, RunDirPolicy::Fresh).expect("a new folder");
        first.check_lock().expect_err("another run's");
        second.check_lock().expect("its own");
    }

    #[test]
    fn a_second_run_in_the_folder_is_refused_while_the_first_goes_on() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let first = RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("a new folder");
        for start in [RunDirPolicy::Fresh, RunDirPolicy::Resume, RunDirPolicy::Overwrite] {
            let error = RunDir::open(folder.path(), start).expect_err("a locked folder").to_string();
            assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        }
        drop(first);
        RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("the lock went with its holder");
    }

    #[test]
    fn a_run_that_resumes_waits_for_a_holder_that_is_dying() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let holder = RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("a new folder");
        let dying = std::thread::spawn(move || {
            sleep(10 * PAUSE);
            drop(holder);
        });
        RunDir::open(folder.path(), RunDirPolicy::Resume).expect("the lock went meanwhile");
        dying.join().expect("it ended");
    }

    #[test]
    fn a_copy_of_the_lock_in_a_starting_process_does_not_hold_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let first = RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("a new folder");
        let _copy = first.lock.0.try_clone().expect("a copy");
        drop(first);
        RunDir::open(folder.path(), RunDirPolicy::Fresh).expect("the lock went with its holder");
    }

    #[test]
    fn a_config_that_a_person_wrote_is_never_replaced() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("config.toml"), CONFIG).expect("written");
        for start in [RunDirPolicy::Fresh, RunDirPolicy::Resume, RunDirPolicy::Overwrite] {
            let error = RunDir::open(folder.path(), start).expect_err("a foreign file");
            assert!(matches!(error, TrainError::ForeignFile { .. }), "{error}");
        }
    }

    #[test]
    fn the_resolved_config_of_the_folder_loads_as_the_same_config() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = used(folder.path());
        let saved = Config::load::<&str>(&path.join("config.toml"), &[]).expect("valid");
        assert_eq!(saved, config(folder.path()));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("file");
        fs::write(&file, "").expect("written");
        let error = RunDir::open(&file.join("run"), RunDirPolicy::Fresh).expect_err("below a file");
        assert!(error.to_string().contains("file/run") && error.exit_code() == 2, "{error}");
    }
}
