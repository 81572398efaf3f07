//! `compute.memory`: refused before anything is loaded, or kept.

#[path = "../run/small.rs"]
#[allow(dead_code, reason = "the runs of other tests need more of it")]
pub mod small;

use std::sync::atomic::AtomicBool;

use small::Small;
use tandem_train::events::Silent;
use tandem_train::plan::Plan;
use tandem_train::prepare::Prepared;
use tandem_train::run_dir::Start;
use tandem_train::{Fault, TrainError, Trainer, ranks};

const SETTINGS: [&str; 4] =
    ["reference.kind=model", "train.micro_batch_size=3", "train.steps=6", "train.learning_rate=1e-3"];

fn arena_bytes(small: &Small, settings: &[&str], ranks: usize) -> usize {
    let config = small.config("run", settings);
    let prepared = Prepared::open(&config, &mut Silent).unwrap();
    (0..ranks).map(|rank| Plan::make(&config, &prepared, rank, ranks).unwrap().arena_bytes()).max().unwrap()
}

#[test]
fn a_run_whose_plan_exceeds_the_cap_is_refused_with_the_picture_and_nothing_is_written() {
    let small = Small::new("dpo");
    for (devices, count) in [("compute.devices=cpu", 1), ("compute.devices=cpu:2", 2)] {
        let settings = [&SETTINGS[..], &[devices]].concat();
        let cap = format!("compute.memory={}B", arena_bytes(&small, &settings, count) - 1);
        let config = small.config("refused", &[&settings[..], &[&cap]].concat());
        let error = ranks::train(&config, Start::Fresh, &mut Silent, &AtomicBool::new(false)).unwrap_err();
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
        let mut trainer = Trainer::new(config, Start::Fresh, &mut Silent).unwrap();
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
        ranks::train(&config, Start::Overwrite, &mut Silent, &AtomicBool::new(false))
            .unwrap_or_else(|error: TrainError| panic!("{sharding}: {error}"));
    }
}
