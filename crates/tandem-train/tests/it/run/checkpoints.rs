//! A checkpoint's content does not depend on its writer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tandem_train::checkpoint::Checkpoint;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

/// (ranks, sharding)
const PLACES: [(usize, &str); 9] = [
    (1, "ddp"),
    (2, "ddp"),
    (4, "ddp"),
    (2, "zero1"),
    (3, "zero1"),
    (3, "zero2"),
    (2, "zero3"),
    (4, "zero3"),
    (8, "zero3"),
];

fn settings((ranks, sharding): (usize, &str)) -> [String; 4] {
    [
        format!("compute.devices=cpu:{ranks}"),
        format!("compute.sharding={sharding}"),
        "compute.threads=1".to_owned(),
        "reference.kind=model".to_owned(),
    ]
}

fn with<'a>(settings: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    settings.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

/// Every logical tensor of a checkpoint, bit by bit.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u32>)> {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"));
    let read = |spec: &tandem_train::checkpoint::TensorSpec| {
        let mut values = vec![0.0f32; spec.len()];
        checkpoint.read(&spec.name, 0, &mut values).expect("a stored tensor");
        (spec.name.clone(), (spec.shape.clone(), values.into_iter().map(f32::to_bits).collect()))
    };
    checkpoint.tensors().map(read).collect()
}

/// The ranks' files, by name.
fn parts(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(path).expect("a checkpoint").map(|entry| entry.expect("readable"));
    let named = files.map(|file| (file.file_name().into_string().expect("UTF-8"), file.path()));
    let parts = named.filter(|(name, _)| name.ends_with(".safetensors"));
    parts.map(|(name, path)| (name, fs::read(path).expect("readable"))).collect()
}

#[test]
fn every_number_of_ranks_and_sharding_saves_the_same_tensors_and_each_rank_its_share() {
    let small = Small::new("dpo");
    let (mut first, mut by_ranks) = (None, BTreeMap::new());
    for place in PLACES {
        let name = format!("{}{}", place.0, place.1);
        small.finish(&name, RunDirPolicy::Fresh, &with(&settings(place), &[]));
        let path = small.path(&name).join("checkpoints/step-000006");
        let found = tensors(&path);
        assert!(found.len() > 20 && found.keys().any(|name| name.starts_with("second_moment/")));
        assert!(*first.get_or_insert_with(|| found.clone()) == found, "{place:?}");
        let parts = parts(&path);
        assert_eq!(parts.len(), place.0);
        // Parts are cut at blocks, of which this model's layers have few; so only some balance can be asked for.
        let largest = parts.values().map(Vec::len).max().expect("a part");
        let total: usize = parts.values().map(Vec::len).sum();
        assert!(place.0 > 2 || largest * place.0 < total * 3 / 2, "{place:?}: {largest} of {total} bytes");
        // Where weights are in parts, layers are cut one by one.
        let same = by_ranks.entry((place.0, place.1 == "zero3")).or_insert_with(|| parts.clone());
        assert!(*same == parts, "{place:?}: other files than without sharding");
    }
}

#[test]
fn a_checkpoint_is_resumed_by_any_number_of_ranks_under_any_sharding() {
    let small = Small::new("dpo");
    small.finish("whole", RunDirPolicy::Fresh, &with(&settings((1, "ddp")), &[]));
    let whole = (small.weights("whole"), tensors(&small.path("whole/checkpoints/step-000006")));
    for (before, after) in [
        ((1, "ddp"), (4, "zero3")),
        ((4, "zero3"), (2, "ddp")),
        ((2, "zero1"), (3, "zero2")),
        ((3, "zero2"), (1, "ddp")),
        ((8, "zero3"), (3, "zero3")),
        ((3, "ddp"), (8, "zero1")),
    ] {
        let name = format!("{}{}to{}{}", before.0, before.1, after.0, after.1);
        // Half of them are written where they lie.
        let writing = format!("train.async_checkpoints={}", before.0 % 2 == 0);
        let (_, outcome) =
            small.run(&name, RunDirPolicy::Fresh, Some(3), &with(&settings(before), &[&writing]));
        outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
        small.finish(&name, RunDirPolicy::Resume, &with(&settings(after), &[]));
        let found = (small.weights(&name), tensors(&small.path(&name).join("checkpoints/step-000006")));
        assert!(found == whole, "{name}");
    }
}

#[test]
fn a_hash_that_a_kill_has_prevented_is_written_by_the_run_that_goes_on() {
    let small = Small::new("dpo");
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, Some(3), &["train.keep=1"]);
    outcome.unwrap_or_else(|e| panic!("{e}"));
    let states = small.path("run/states.jsonl");
    let before = fs::read_to_string(&states).expect("hashes");
    let (first, last) = before.trim_end().rsplit_once('\n').expect("two hashes");
    assert!(last.contains("\"step\":3,"), "{last}");
    fs::write(&states, format!("{first}\n")).expect("written");
    small.finish("run", RunDirPolicy::Resume, &["train.keep=1"]);
    let after = fs::read_to_string(&states).expect("hashes");
    assert!(after.starts_with(&before) && after.len() > before.len(), "{before}{after}");
}

#[test]
fn writing_beside_training_changes_no_number_and_no_file() {
    let small = Small::new("dpo");
    for place in [(1, "ddp"), (3, "zero2"), (2, "zero3")] {
        let [beside, between] = ["true", "false"].map(|value| {
            let name = format!("{}{}{value}", place.0, place.1);
            let writing = format!("train.async_checkpoints={value}");
            let settings = settings(place);
            let heard =
                small.finish(&name, RunDirPolicy::Fresh, &with(&settings, &[&writing, "train.keep=0"]));
            let saved =
                [2, 4, 6].map(|step| parts(&small.path(&name).join(format!("checkpoints/step-00000{step}"))));
            (heard.steps, small.weights(&name), saved)
        });
        assert!(beside == between, "{place:?}");
    }
}

/// Masters and two moments, in f32, divided by the ranks; nothing where no copy is needed.
#[test]
fn the_plan_counts_the_copy_that_checkpoints_are_written_from() {
    let small = Small::new("dpo");
    let planned = |place: (usize, &str), more: &[&str]| {
        let settings = settings(place);
        let config = small.config("run", &with(&settings, more));
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let bytes = (0..place.0).map(|rank| {
            let plan = Plan::make(&config, &prepared, rank, place.0).unwrap().to_json();
            let phases = plan["phases"].as_array().unwrap();
            let train = phases.iter().find(|phase| phase["name"] == "train").unwrap();
            train["bytes_at_peak"]["checkpoint copy"].as_u64().unwrap()
        });
        let decoder = &prepared.decoder;
        let elements: usize = decoder.layers().into_iter().map(|layer| decoder.layout(layer).len).sum();
        (bytes.sum::<u64>(), elements as u64)
    };
    for place in PLACES {
        let (bytes, elements) = planned(place, &[]);
        // The arena rounds each of three parts of four layers up to 64 bytes, on every rank.
        let rounding = 3 * 4 * 64 * place.0 as u64;
        assert!(
            (12 * elements..12 * elements + rounding).contains(&bytes),
            "{place:?}: {bytes} for {elements}"
        );
        let (bytes, _) = planned(place, &["train.optimizer=rmsprop"]);
        assert!(
            (8 * elements..8 * elements + rounding).contains(&bytes),
            "{place:?}: {bytes} for {elements}"
        );
    }
    for more in ["train.async_checkpoints=false", "train.save_every=0"] {
        assert_eq!(planned((2, "zero1"), &[more]).0, 0, "{more}");
    }
}
