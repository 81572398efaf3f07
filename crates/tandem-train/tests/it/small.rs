//! A small run: config file, watcher, and what it left behind.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tandem_train::metrics::Split;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Event, Observer, Outcome, Result};
use tempfile::TempDir;

use crate::teacher::write_teacher;

/// A temporary folder with runs in it. Caches are shared between the runs of one folder.
pub struct Small {
    folder: TempDir,
    method: &'static str,
}

/// Events of a run, and its outcome.
#[derive(Debug, Default)]
pub struct Heard {
    /// The training records as JSON, without what depends on the clock or the process.
    pub steps: Vec<String>,
    /// Training losses.
    pub losses: Vec<f64>,
    /// Evaluation losses.
    pub eval_losses: Vec<f64>,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Rows of skipped steps.
    pub skipped: Vec<String>,
    /// Whether the reference was computed rather than read.
    pub computed_reference: bool,
    /// Rows that the reference has scored.
    pub scored_rows: u64,
}

struct Watcher<'a> {
    heard: Heard,
    stop: &'a AtomicBool,
    stop_after: Option<u64>,
}

impl Observer for Watcher<'_> {
    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Record(record) if record.split() == Split::Train => {
                let volatile =
                    ["tokens_per_second", "time", "memory", "arena", "time_generate", "time_judge"];
                let mut value: serde_json::Value =
                    serde_json::from_str(&record.to_json()).expect("a record is JSON");
                value.as_object_mut().expect("an object").retain(|key, _| !volatile.contains(&key.as_str()));
                self.heard.steps.push(value.to_string());
                self.heard.losses.push(record.get("loss").unwrap_or(f64::NAN));
                if self.stop_after == Some(record.step()) {
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
            Event::Record(record) => self.heard.eval_losses.push(record.get("loss").unwrap_or(f64::NAN)),
            Event::Warning(text) => self.heard.warnings.push((*text).to_owned()),
            Event::Skipped { rows, .. } => self.heard.skipped.push((*rows).to_owned()),
            Event::Reference { total, .. } => {
                self.heard.computed_reference = true;
                self.heard.scored_rows = *total;
            }
            _ => {}
        }
    }
}

impl Small {
    pub fn new(method: &'static str) -> Self {
        Self { folder: TempDir::new().expect("a temporary folder"), method }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn config(&self, name: &str, overrides: &[&str]) -> Config {
        Config::load(&self.file(name), overrides).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The config file of a run.
    pub fn file(&self, name: &str) -> PathBuf {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
        let data = match self.method {
            "sft" | "distill" => "sft_completion.jsonl",
            "kto" => "unpaired.jsonl",
            "online" => "../online/prompts_conv.jsonl",
            _ => "pref_conv.jsonl",
        };
        // Of answers of an untrained model: longer is better, and so is an end.
        let judges = match self.method {
            "online" => {
                "[online]\nmax_new_tokens = 12\ntemperature = 1.0\n[[judges]]\nkind = \"length\"\nunit = \"characters\"\n\
                 per_unit = 0.5\n[[judges]]\nkind = \"missing_eos\"\npenalty = 2\n"
            }
            "distill" => {
                write_teacher(&self.path("teacher"));
                "[reference]\nmodel = \"teacher\"\n"
            }
            _ => "",
        };
        let text = format!(
            "method = \"{}\"\nmodel = {:?}\nweights = \"random\"\noutput = {:?}\n[data]\ntrain = {:?}\n\
             cache = {:?}\nmax_length = 96\n[train]\nbatch_size = 8\nmicro_batch_tokens = 300\nsteps = 6\n\
             learning_rate = 1e-2\nwarmup_steps = 2\nsave_every = 2\n[compute]\ndtype = \"f32\"\nthreads = 2\n{judges}",
            self.method,
            goldens.join("model"),
            self.path(name),
            goldens.join(data),
            self.path("cache"),
        );
        let path = self.path(&format!("{name}.toml"));
        std::fs::write(&path, text).expect("the temporary folder is writable");
        path
    }

    /// Runs to the end, or until `stop_after` steps are done.
    pub fn run(
        &self,
        name: &str,
        start: RunDirPolicy,
        stop_after: Option<u64>,
        overrides: &[&str],
    ) -> (Heard, Result<Outcome>) {
        let stop = AtomicBool::new(false);
        let mut watcher = Watcher { heard: Heard::default(), stop: &stop, stop_after };
        let outcome = spawn::train(&self.config(name, overrides), start, &mut watcher, &stop);
        (watcher.heard, outcome)
    }

    /// Runs to the end, which must be reached.
    pub fn finish(&self, name: &str, start: RunDirPolicy, overrides: &[&str]) -> Heard {
        let (heard, outcome) = self.run(name, start, None, overrides);
        assert_eq!(
            outcome.unwrap_or_else(|e| panic!("{e}")),
            Outcome::Finished(self.path(name).join("final"))
        );
        heard
    }

    /// The bytes of the final weights, or adapter.
    pub fn weights(&self, name: &str) -> Vec<u8> {
        let [model, adapter] =
            ["model", "adapter_model"].map(|file| self.path(name).join(format!("final/{file}.safetensors")));
        std::fs::read(if adapter.exists() { adapter } else { model }).expect("the run finished")
    }
}
