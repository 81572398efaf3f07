//! `compute.memory`: refused before anything is loaded, or kept.

use std::sync::atomic::AtomicBool;

use crate::small::Small;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::{Plan, evaluation};
use tandem_train::run::evaluation::evaluate;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Fault, TrainError, Trainer};

const SETTINGS: [&str; 4] =
    ["reference.kind=model", "train.micro_batch_size=3", "train.steps=6", "train.learning_rate=1e-3"];

fn arena_bytes(small: &Small, settings: &[&str], ranks: usize) -> usize {
    let config = small.config("run", settings);
    let prepared = RunInputs::open(&config, &mut Silent).unwrap();
    (0..ranks).map(|rank| Plan::make(&config, &prepared, rank, ranks).unwrap().arena_bytes()).max().unwrap()
}

#[test]
fn a_run_whose_plan_exceeds_the_cap_is_refused_with_the_picture_and_nothing_is_written() {
    let small = Small::new("dpo");
    for (devices, count) in [("compute.devices=cpu", 1), ("compute.devices=cpu:2", 2)] {
        let settings = [&SETTINGS[..], &[devices]].concat();
        let cap = format!("compute.memory={}B", arena_bytes(&small, &settings, count) - 1);
        let config = small.config("refused", &[&settings[..], &[&cap]].concat());
        let error =
            spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.fault(), Fault::User);
        let text = error.to_string();
        for part in [
            "nothing was loaded",
            "│",
            "it does not fit",
            "the cheapest change with which it fits",
            "[compute]",
        ] {
            assert!(text.contains(part), "no {part:?} in:\n{text}");
        }
        for name in ["config.toml", "plan.json", "metrics.jsonl", "checkpoints", "final"] {
            assert!(!config.output.join(name).exists(), "{name}");
        }
    }
}

/// The cap is what the plan needs, to the byte: the arena can hold no more.
#[test]
fn a_run_that_its_plan_says_fits_ends_under_the_cap() {
    let small = Small::new("dpo");
    for (name, more) in [
        ("plain", &[][..]),
        ("block", &["compute.checkpointing=block"]),
        ("bf16", &["compute.dtype=bf16", "reference.kind=precompute"]),
        ("copy", &["train.save_every=2"]),
    ] {
        let settings = [&SETTINGS[..], more].concat();
        let cap = arena_bytes(&small, &settings, 1);
        let text = format!("compute.memory={cap}B");
        let config = small.config(name, &[&settings[..], &[&text]].concat());
        let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut Silent).unwrap();
        trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
        assert_eq!(trainer.device().high_water(), cap, "{name}");
    }
}

#[test]
fn ranks_train_under_the_cap_of_what_they_need() {
    let small = Small::new("dpo");
    for sharding in ["ddp", "zero3"] {
        let sharding = format!("compute.sharding={sharding}");
        let settings = [&SETTINGS[..], &["compute.devices=cpu:2", &sharding]].concat();
        let cap = format!("compute.memory={}B", arena_bytes(&small, &settings, 2));
        let config = small.config("capped", &[&settings[..], &[&cap]].concat());
        spawn::train(&config, RunDirPolicy::Overwrite, &mut Silent, &AtomicBool::new(false))
            .unwrap_or_else(|error: TrainError| panic!("{sharding}: {error}"));
    }
}

/// An evaluation takes what its own dry run says, to the byte, and no more than the cap.
#[test]
fn an_evaluation_is_planned_and_capped_too() {
    let small = Small::new("dpo");
    small.finish("base", RunDirPolicy::Fresh, &["train.steps=2"]);
    let other = format!("reference.model={:?}", small.path("base/final").to_str().unwrap());
    let eval = format!("data.eval={}", small.config("any", &[]).data.train[0].path.display());
    let folder = format!("compute.offload_dir={}", small.path("").display());
    let checkpoint = small.path("base/checkpoints/step-000002");
    for (name, checkpoint, settings) in [
        ("plain", None, &["reference.kind=model"][..]),
        ("bf16", None, &["reference.kind=precompute", "compute.dtype=bf16"]),
        ("other", None, &["reference.kind=precompute", &other]),
        ("trained", Some(&checkpoint), &["reference.kind=model"]),
        ("lora", None, &["reference.kind=base", "adapter.rank=4", "compute.format=nf4"]),
        ("sync", None, &["reference.kind=sync", "adapter.rank=4"]),
        ("host", None, &["reference.kind=model", "compute.offload=host"]),
        ("file", None, &["reference.kind=precompute", "compute.offload=nvme", &folder]),
    ] {
        let cache = format!("data.cache={}", small.path(&format!("cache-{name}")).display());
        let settings = [&["train.micro_batch_size=3", &eval, &cache], settings].concat();
        let config = small.config("evaluated", &settings);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let needs = evaluation::needs(&config, &prepared).unwrap();
        let training = Plan::make(&config, &prepared, 0, 1).unwrap().ram_bytes();
        assert!(needs.ram() * 10 < training * 9, "{name}: {needs:?}, to train {training}");
        let run = |cap: Option<usize>| {
            let cap = cap.map(|bytes| format!("compute.memory={bytes}B"));
            let settings: Vec<&str> = settings.iter().copied().chain(cap.as_deref()).collect();
            let checkpoint = checkpoint.map(std::path::PathBuf::as_path);
            evaluate(&small.config("evaluated", &settings), checkpoint, &mut Silent)
        };
        let error = run(Some(needs.ram() - 1)).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{name}: {error}");
        for part in ["the evaluation needs", "compute.memory allows", "nothing was loaded"] {
            assert!(error.to_string().contains(part), "{name}: {error}");
        }
        // The first of these computes a reference that is computed beforehand, the second finds it.
        let capped = run(Some(needs.ram())).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(capped.get("arena"), Some(needs.arena as f64), "{name}");
        let free = run(None).unwrap();
        assert_eq!(free.get("loss"), capped.get("loss"), "{name}");
    }
}
