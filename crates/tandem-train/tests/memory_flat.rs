//! Memory is flat: what the first steps and the first checkpoint needed is all that a thousand steps need.
//!
//! A binary of its own with one test: it reads the peak of its process's memory.

#[path = "../../../goldens/formula.rs"]
#[expect(dead_code, reason = "this test has one model, the formula makes two")]
mod formula;

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Event, Observer, Trainer};

/// Growth that comes late by chance, once: the system adds up resident pages in batches, a thread touches its stack or its heap for the
/// first time, a checkpoint is written at the widest moment of a step. One MiB was seen. A leak goes on: over the steps here, 2 KiB
/// a step or 21 KiB a checkpoint are found.
const SLACK: u64 = 2 << 20;
const STEPS: usize = 1000;
/// Steps between checkpoints, which are written beside training.
const SAVE_EVERY: usize = 10;
/// By then a checkpoint is complete and the next one begun.
const SETTLED: usize = 2 * SAVE_EVERY + 1;

/// Peaks of the process by step, as the run reports them.
#[derive(Default)]
struct Peaks(Vec<u64>);

impl Observer for Peaks {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Record(record) = event {
            self.0.push(record.get("memory").expect("every step reports memory") as u64);
        }
    }
}

#[test]
fn a_thousand_steps_and_their_checkpoints_need_what_the_first_needed() {
    // One thread of each kind: with more, chance decides which of them first touches its stack and its scratch after the first
    // steps, and a machine of 64 processors has 64.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(small.join("model")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let golden: Value = serde_json::from_str(&fs::read_to_string(small.join("train.json")).unwrap()).unwrap();
    let tensors = golden["runs"]["full_8x1"]["final"].as_object().unwrap().iter().map(|(name, v)| {
        let shape = v["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        (name.clone(), shape)
    });
    formula::write_safetensors(&model, &tensors.collect::<Vec<_>>(), formula::weight).unwrap();
    let run = |name: &str, steps: usize| {
        let config = folder.path().join(format!("{name}.toml"));
        // Eight batches of different lengths come by again and again; bf16 and two micro-batches use every buffer.
        let toml = format!(
            "method = \"dpo\"\nmodel = \"model\"\noutput = {name:?}\n[reference]\nkind = \"model\"\n\
             [data]\ntrain = {:?}\ncache = \"cache\"\norder = \"sequential\"\n\
             [train]\nbatch_size = 8\nmicro_batch_size = 4\nsteps = {steps}\nlearning_rate = 1e-4\n\
             save_every = {SAVE_EVERY}\n\
             [compute]\ndtype = \"bf16\"\nthreads = 1\n",
            small.join("pref_conv.jsonl")
        );
        fs::write(&config, toml).unwrap();
        let mut peaks = Peaks::default();
        let config = Config::load::<&str>(&config, &[]).unwrap();
        let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut peaks).unwrap();
        trainer.run(&mut peaks, &AtomicBool::new(false)).unwrap();
        (trainer.device().high_water(), peaks.0)
    };
    // The long run comes first: a process's peak never falls again.
    let (long, peaks) = run("long", STEPS);
    let (short, _) = run("short", 2);
    assert_eq!(long, short, "the arena's high-water mark in bytes after {STEPS} steps and after 2");
    assert_eq!(peaks.len(), STEPS);
    let grown = peaks[STEPS - 1] - peaks[SETTLED - 1];
    assert!(
        grown <= SLACK,
        "the process's peak grew by {grown} bytes between step {SETTLED} and step {STEPS}"
    );
}
