//! Saving while training goes on, on disks that are slow or full.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tandem_comm::threads;
use tempfile::TempDir;

use super::*;
use crate::checkpoint::{Checkpoint, Checkpoints};
use crate::disk::failing::Failing;
use crate::disk::{Disk, DiskFile, RealDisk};
use crate::events::Silent;
use crate::run::run_dir::RunDirPolicy;
use crate::{Fault, Observer};

/// Longer than anything here takes: a test that hangs fails instead.
const PATIENCE: Duration = Duration::from_secs(600);

/// An SFT run of twelve steps of a tiny model.
fn config(folder: &Path, output: &str, overrides: &[&str]) -> Config {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
    let text = format!(
        "method = \"sft\"\nmodel = {:?}\nweights = \"random\"\noutput = {output:?}\n[data]\ntrain = {:?}\n\
         cache = \"cache\"\nmax_length = 96\n[train]\nbatch_size = 8\nmicro_batch_size = 2\nsteps = 12\n\
         learning_rate = 1e-2\nsave_every = 4\n[compute]\ndtype = \"f32\"\nthreads = 1\n",
        goldens.join("model"),
        goldens.join("sft_completion.jsonl"),
    );
    let path = folder.join(format!("{output}.toml"));
    fs::write(&path, text).expect("the temporary folder is writable");
    Config::load(&path, overrides).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs on several ranks, each with a disk of its own, and returns what each came to.
fn run(
    config: &Config,
    disks: Vec<Arc<dyn Disk>>,
    observer: &mut (dyn Observer + Send),
) -> Vec<Result<Outcome>> {
    let stop = AtomicBool::new(false);
    let mut observer = Some(observer);
    std::thread::scope(|scope| {
        let groups = threads::groups(disks.len(), PATIENCE);
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(disks)
            .map(|(group, disk)| {
                let (observer, stop) = (observer.take(), &stop);
                scope.spawn(move || {
                    let observer: &mut dyn Observer = match observer {
                        Some(observer) => observer,
                        None => &mut Silent,
                    };
                    let mut trainer = Trainer::on_rank(config.clone(), RunDirPolicy::Fresh, group, observer)?;
                    trainer.saver.write_on(disk);
                    trainer.run(observer, stop)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn real(num_ranks: usize) -> Vec<Arc<dyn Disk>> {
    (0..num_ranks).map(|_| Arc::new(RealDisk) as Arc<dyn Disk>).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

/// Events of a run in order; opens a gate at a chosen event.
struct Log<'a> {
    lines: Vec<String>,
    gate: &'a Gate,
    opens: &'a str,
}

impl Observer for Log<'_> {
    fn event(&mut self, event: &Event<'_>) {
        let line = match event {
            Event::Record(record) => format!("step {}", record.step()),
            Event::Saved(path) => format!("saved {}", path.file_name().expect("a name").display()),
            Event::Skipped { in_a_row, .. } => format!("skipped {in_a_row}"),
            _ => return,
        };
        if line == self.opens {
            self.gate.open();
        }
        self.lines.push(line);
    }
}

/// A disk on which no file is durable before the gate is opened.
#[derive(Debug, Default)]
struct Gate {
    is_open: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    fn open(&self) {
        *self.is_open.0.lock().expect("nobody panics with it") = true;
        self.is_open.1.notify_all();
    }
}

impl Disk for Gate {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_dir(path)
    }
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(Gated { file: File::create_new(path)?, is_open: self.is_open.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove_dir(path)
    }
}

struct Gated {
    file: File,
    is_open: Arc<(Mutex<bool>, Condvar)>,
}

impl Write for Gated {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.file.write(buffer)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl DiskFile for Gated {
    fn sync(&mut self) -> io::Result<()> {
        let (is_open, changed) = &*self.is_open;
        let guard = is_open.lock().expect("nobody panics with it");
        let (is_open, _) = changed.wait_timeout_while(guard, PATIENCE, |open| !*open).expect("as above");
        if !*is_open {
            return Err(io::Error::other("nobody went on while this was written"));
        }
        self.file.sync_all()
    }
}

/// The checkpoint of step 4 cannot become complete before step 7 is over.
#[test]
fn training_goes_on_while_a_checkpoint_is_written() {
    let folder = TempDir::new().expect("a temporary folder");
    for (num_ranks, sharding) in [(1, "ddp"), (3, "ddp"), (3, "zero3")] {
        let sharding = format!("compute.sharding={sharding}");
        let config = config(folder.path(), &format!("on{num_ranks}{sharding}"), &[&sharding]);
        // The last rank's disk is the slow one.
        let gate = Arc::new(Gate::default());
        let mut disks = real(num_ranks);
        disks[num_ranks - 1] = gate.clone();
        let mut log = Log { lines: Vec::new(), gate: &gate, opens: "step 7" };
        for outcome in run(&config, disks, &mut log) {
            outcome.unwrap_or_else(|e| panic!("{e}"));
        }
        let place = |line: &str| log.lines.iter().position(|l| l == line).expect(line);
        assert!(place("step 7") < place("saved step-000004"), "{:?}", log.lines);
        assert!(place("saved step-000004") < place("saved step-000008"), "{:?}", log.lines);
        assert!(place("step 12") < place("saved step-000012"), "{:?}", log.lines);
        let checkpoints = folder.path().join(config.output).join("checkpoints");
        assert_eq!(names(&checkpoints), ["step-000008", "step-000012"]);
    }
}

/// All ranks stop alike, so what they had begun can be completed: here, the checkpoint from before
/// the first bad step.
#[test]
fn a_run_that_ends_with_an_error_completes_its_checkpoint() {
    let folder = TempDir::new().expect("a temporary folder");
    for num_ranks in [1, 2] {
        let overrides = ["train.learning_rate=1e30", "train.max_skipped=2"];
        let config = config(folder.path(), &format!("on{num_ranks}"), &overrides);
        let gate = Arc::new(Gate::default());
        let mut disks = real(num_ranks);
        disks[num_ranks - 1] = gate.clone();
        // The weights are lost in step 1, so steps 2, 3 and 4 are left out, and with the last of
        // them the run ends.
        let config =
            Config { train: crate::config::TrainConfig { save_every: Some(3), ..config.train }, ..config };
        let mut log = Log { lines: Vec::new(), gate: &gate, opens: "skipped 3" };
        for outcome in run(&config, disks, &mut log) {
            assert!(matches!(outcome, Err(TrainError::NotFinite { step: 4, .. })), "{outcome:?}");
        }
        assert_eq!(log.lines.last().map(String::as_str), Some("saved step-000003"), "{:?}", log.lines);
        assert_eq!(names(&folder.path().join(config.output).join("checkpoints")), ["step-000003"]);
    }
}

/// Whichever rank's disk is full, and wherever in its file: that rank says so, the others name it,
/// the older checkpoint stays and nothing else.
#[test]
fn a_full_disk_of_one_rank_ends_all_and_leaves_the_checkpoint_before() {
    let folder = TempDir::new().expect("a temporary folder");
    let whole = config(folder.path(), "whole", &["compute.sharding=zero1"]);
    for outcome in run(&whole, real(3), &mut Silent) {
        outcome.unwrap_or_else(|e| panic!("{e}"));
    }
    let size = |name: &str| {
        fs::metadata(whole.output.join("checkpoints/step-000012").join(name)).expect("a file").len()
    };
    for writing in ["train.async_checkpoints=true", "train.async_checkpoints=false"] {
        for victim in 0..3 {
            let part = size(&format!("state-0000{}-of-00003.safetensors", victim + 1));
            // Half of the second part; on the first rank also all of it, but no manifest.
            let manifest = if victim == 0 { size("cursor.json") + size("manifest.json") } else { 0 };
            for room in [manifest + part * 3 / 2, manifest + 2 * part + manifest / 2] {
                if victim > 0 && room >= 2 * part {
                    continue;
                }
                let name = format!("{}{victim}{room}", writing.len());
                let config = config(folder.path(), &name, &["compute.sharding=zero1", writing]);
                let mut disks = real(3);
                disks[victim] = Failing::new(room, u64::MAX, false);
                for (rank, outcome) in run(&config, disks, &mut Silent).into_iter().enumerate() {
                    let error = outcome.expect_err("a full disk");
                    if rank == victim {
                        assert!(
                            matches!(&error, TrainError::Io { action: "write", source, .. }
                                if source.kind() == io::ErrorKind::StorageFull),
                            "{error}"
                        );
                    } else {
                        assert_eq!(error.fault(), Fault::PeerLost, "rank {rank}: {error}");
                    }
                }
                let checkpoints = config.output.join("checkpoints");
                assert_eq!(complete(&checkpoints), ["step-000004"], "{writing} rank {victim}, {room} bytes");
                assert!(!config.output.join("final").exists());
            }
        }
    }
}

/// Checkpoints that can be read. Of an unfinished one an empty folder may be left.
fn complete(checkpoints: &Path) -> Vec<String> {
    let (unfinished, complete): (Vec<_>, Vec<_>) =
        names(checkpoints).into_iter().partition(|name| name.starts_with('.'));
    for name in &unfinished {
        assert_eq!(names(&checkpoints.join(name)), [""; 0], "{name}");
    }
    for name in &complete {
        Checkpoint::open(&checkpoints.join(name)).unwrap_or_else(|e| panic!("{e}"));
    }
    complete
}

/// A disk that deletes no folder, as where another user's file lies in it.
#[derive(Debug)]
struct Stubborn;

impl Disk for Stubborn {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_dir(path)
    }
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        RealDisk.create(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)
    }
    fn remove_dir(&self, _path: &Path) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::PermissionDenied))
    }
}

/// Warnings of a run.
#[derive(Default)]
struct Warnings(Vec<String>);

impl Observer for Warnings {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Warning(text) = event {
            self.0.push((*text).to_owned());
        }
    }
}

#[test]
fn an_old_checkpoint_that_cannot_be_deleted_is_told_once_and_stays() {
    let folder = TempDir::new().expect("a temporary folder");
    let config = config(folder.path(), "run", &["train.save_every=1", "train.keep=1"]);
    let mut warnings = Warnings::default();
    let outcomes = run(&config, vec![Arc::new(Stubborn)], &mut warnings);
    assert!(matches!(outcomes[..], [Ok(Outcome::Finished(_))]), "{outcomes:?}");
    let [warning] = &warnings.0[..] else { panic!("{:?}", warnings.0) };
    assert!(
        warning.starts_with("an old checkpoint stays, for it cannot be deleted: cannot remove "),
        "{warning}"
    );
    assert!(warning.contains(".step-000001.old"), "{warning}");
    let left = names(&folder.path().join("run/checkpoints"));
    assert!(left.contains(&".step-000001.old".to_owned()) && left.len() > 2, "{left:?}");
    // Where they can be deleted again, they are.
    Checkpoints::for_run(&config.output).sweep().expect("a real disk");
    let left = names(&folder.path().join("run/checkpoints"));
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
}
