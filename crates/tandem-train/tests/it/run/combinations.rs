//! Format × what trains × reference × placement × ranks: every combination runs and gives the bits of one rank that holds
//! everything, or is refused with one sentence.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use tandem_train::Config;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

const FORMATS: [&str; 5] = ["f32", "bf16", "int8", "nf4", "fp8"];
const TRAINED: [&str; 3] = ["full", "lora", "dora"];
const REFERENCES: [&str; 6] = ["precompute", "base", "adapter", "model", "sync", "none"];
const PLACEMENTS: [&str; 5] = ["replicated", "zero2", "zero3", "host", "nvme"];
const RANKS: [usize; 3] = [1, 2, 4];

/// Three steps of eight rows, in micro-batches of two.
const BATCH: [&str; 7] = [
    "train.batch_size=8",
    "train.micro_batch_size=2",
    "train.steps=3",
    "train.learning_rate=1e-3",
    "train.save_every=0",
    "train.async_checkpoints=false",
    "compute.threads=1",
];

/// A run's overrides.
fn settings(format: &str, trained: &str, reference: &str, start: Option<&PathBuf>) -> Vec<String> {
    let mut settings = vec![format!("compute.format={format}"), format!("reference.kind={reference}")];
    match (trained, start) {
        ("full", _) => {}
        (_, Some(start)) => settings.push(format!("adapter.start={}", start.display())),
        (kind, None) => settings.extend([format!("adapter.kind={kind}"), "adapter.rank=4".to_owned()]),
    }
    match reference {
        "none" => settings.push("objective.reference_free=true".to_owned()),
        "sync" => settings.push("reference.sync_steps=2".to_owned()),
        _ => {}
    }
    settings
}

/// Why a combination cannot be.
fn refusal(format: &str, trained: &str, reference: &str) -> Option<&'static str> {
    match (format, trained, reference) {
        (_, "full", "base" | "adapter") => {
            Some("full training changes the weights that the reference would share")
        }
        ("int8" | "fp8" | "nf4", "full", _) => Some("full training changes every weight"),
        _ => None,
    }
}

fn place(small: &Small, placement: &str, ranks: usize) -> Vec<String> {
    let mut place = vec![format!("compute.devices=cpu:{ranks}")];
    match placement {
        "replicated" => {}
        "host" => place.push("compute.offload=host".to_owned()),
        "nvme" => {
            let folder = small.path("offloaded");
            std::fs::create_dir_all(&folder).unwrap();
            place.extend([
                "compute.offload=nvme".to_owned(),
                format!("compute.offload_dir={}", folder.display()),
            ]);
        }
        sharding => place.push(format!("compute.sharding={sharding}")),
    }
    place
}

/// An adapter that was trained before, of each kind.
fn trained_before(small: &Small, kind: &str) -> PathBuf {
    let name = format!("start-{kind}");
    let kind = format!("adapter.kind={kind}");
    let own = ["reference.kind=base", "adapter.rank=4", "train.learning_rate=1e-2", &kind];
    small.finish(&name, RunDirPolicy::Overwrite, &[&BATCH[..], &own].concat());
    small.path(&name).join("final")
}

type Run = (Vec<String>, Vec<u8>);

fn run(small: &Small, settings: &[String]) -> Run {
    let settings: Vec<&str> = BATCH.into_iter().chain(settings.iter().map(String::as_str)).collect();
    let heard = small.finish("run", RunDirPolicy::Overwrite, &settings);
    (heard.steps, small.weights("run"))
}

/// One column of the table: everything of one format.
fn every_combination(format: &str) {
    let small = Small::new("dpo");
    let starts: [OnceLock<PathBuf>; 2] = Default::default();
    let mut table = String::new();
    for trained in TRAINED {
        for reference in REFERENCES {
            let start = (reference == "adapter" && trained != "full").then(|| {
                let index = usize::from(trained == "dora");
                starts[index].get_or_init(|| trained_before(&small, trained))
            });
            let own = settings(format, trained, reference, start);
            if let Some(reason) = refusal(format, trained, reference) {
                let overrides: Vec<&str> = own.iter().map(String::as_str).collect();
                let error = Config::load(&small.file("refused"), &overrides).unwrap_err().to_string();
                assert!(error.contains(reason), "{format} {trained} {reference}: {error}");
                let _ = writeln!(table, "{format} {trained} {reference}: refused");
                continue;
            }
            let mut expected: Option<Run> = None;
            for placement in PLACEMENTS {
                for ranks in RANKS {
                    let found = run(&small, &[own.clone(), place(&small, placement, ranks)].concat());
                    assert_eq!(found.0.len(), 3);
                    let what = format!("{format} {trained} {reference} {placement} on {ranks}");
                    match &expected {
                        None => expected = Some(found),
                        Some(expected) => {
                            assert_eq!(found.0, expected.0, "{what}: the log");
                            assert!(found.1 == expected.1, "{what}: the final weights");
                        }
                    }
                }
            }
            let _ = writeln!(table, "{format} {trained} {reference}: the same bits");
        }
    }
    print!("{table}");
}

/// Every pair of a reference and a placement, with formats, what trains and ranks in turn.
#[test]
fn each_reference_in_each_placement() {
    let small = Small::new("dpo");
    let start = OnceLock::new();
    for (r, reference) in REFERENCES.into_iter().enumerate() {
        // An adapter allows every reference and every format.
        let (format, trained) = (FORMATS[r % FORMATS.len()], if r < 3 { "lora" } else { "dora" });
        let start = (reference == "adapter").then(|| start.get_or_init(|| trained_before(&small, trained)));
        let own = settings(format, trained, reference, start);
        let expected = run(&small, &[own.clone(), place(&small, "replicated", 1)].concat());
        for (p, placement) in PLACEMENTS.into_iter().enumerate() {
            let ranks = RANKS[1 + (r + p) % 2];
            let found = run(&small, &[own.clone(), place(&small, placement, ranks)].concat());
            assert!(found == expected, "{format} {trained} {reference} {placement} on {ranks}");
        }
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn of_f32_weights() {
    every_combination(FORMATS[0]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn of_bf16_weights() {
    every_combination(FORMATS[1]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn of_int8_weights() {
    every_combination(FORMATS[2]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn of_nf4_weights() {
    every_combination(FORMATS[3]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn of_fp8_weights() {
    every_combination(FORMATS[4]);
}
