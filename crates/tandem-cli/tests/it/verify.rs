//! `tandem verify`: what it prints, and its exit codes.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tandem_kernels::cpu::Isa;

use crate::workshop::{Outcome, Workshop, skip};

fn trained() -> Workshop {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--set", "train.keep=0"]).expect(0);
    shop
}

/// Hash of every file below a folder, with the names.
fn hash(folder: &Path) -> blake3::Hash {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut hasher = blake3::Hasher::new();
    for path in paths {
        hasher.update(path.as_os_str().as_encoded_bytes()).update(b"\0");
        let inner = if path.is_dir() { hash(&path) } else { blake3::hash(&fs::read(&path).unwrap()) };
        hasher.update(inner.as_bytes());
    }
    hasher.finalize()
}

#[test]
fn the_same_bits_exit_with_0_and_other_bits_with_1() {
    let shop = trained();
    let before = hash(&shop.path("run"));
    let verified =
        shop.run(&["verify", "run", "--devices", "cpu:2", "--sharding", "zero3", "--threads", "1"]);
    let printed = verified.expect(0).stdout;
    for part in [
        "run, steps 0 to 6",
        "1 then, 2 now",
        "model.safetensors",
        "data.train",
        "checkpoint of step 4",
        "the same bits",
    ] {
        assert!(printed.contains(part), "no {part:?} in:\n{printed}");
    }
    // The hash of each state is printed as the run has recorded it.
    for line in shop.read("run/states.jsonl").lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(printed.matches(line["blake3"].as_str().unwrap()).count(), 2, "{printed}");
    }
    assert_eq!(hash(&shop.path("run")), before, "the run's folder was changed");

    let part = shop.path("run/checkpoints/step-000004/state-00001-of-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&42f32.to_le_bytes());
    fs::write(&part, bytes).unwrap();
    let verified = shop.run(&["verify", "run", "--steps", "2..6", "--out", "again"]).expect(1);
    for part in ["other bits: checkpoint of step 4: tensor ", "was 42 (0x42280000) in the run", "checksum"] {
        assert!(verified.stdout.contains(part), "no {part:?} in:\n{}", verified.stdout);
    }
    assert!(!verified.stdout.contains("the same bits"), "{}", verified.stdout);
    assert!(shop.path("again/checkpoints/step-000004").is_dir(), "--out keeps the recomputed run");
}

#[test]
fn a_run_of_several_processes_is_computed_again_in_one() {
    let shop = Workshop::new();
    let train = ["launch", "-n", "2", "train", "dpo.toml", "--set", "compute.sharding=zero3", "--set"];
    shop.run(&[&train[..], &["compute.replicate=2"]].concat()).expect(0);
    for (devices, ranks) in [(&[][..], "2 then, 2 now"), (&["--devices", "cpu:3"], "2 then, 3 now")] {
        let verified = shop.run(&[&["verify", "run", "--steps", "..2"][..], devices].concat()).expect(0);
        for part in [ranks, "the same bits"] {
            assert!(verified.stdout.contains(part), "no {part:?} in:\n{}", verified.stdout);
        }
    }
}

/// Another level of instructions gives other bits, of which the first is named.
#[test]
fn another_instruction_level_is_refused_and_may_be_forced() {
    // The run's level, which the tests' own variable may choose.
    let level = std::env::var("TANDEM_ISA").unwrap_or_else(|_| Isa::best().name().to_owned());
    if level == Isa::Portable.name() {
        return skip("there is no other instruction level");
    }
    let shop = trained();
    let portable = |arguments: &[&str]| {
        let mut command = shop.command(arguments);
        let output = command.env("TANDEM_ISA", "portable").output().unwrap();
        let [stdout, stderr] = [output.stdout, output.stderr].map(|out| String::from_utf8(out).unwrap());
        Outcome { code: output.status.code(), stdout, stderr }
    };
    let same = format!("TANDEM_ISA={level} gives the same");
    let refused = portable(&["verify", "run", "--steps", "2..4"]).expect(2);
    let refused = refused.says(&["other bits are expected", "this machine has portable", &same, "--force"]);
    assert!(!refused.stderr.contains("step 3/6"), "it computed: {}", refused.stderr);
    let forced = portable(&["verify", "run", "--steps", "2..4", "--force"]).expect(1).stdout;
    for part in ["the first difference is in step 3: loss was ", "other bits: checkpoint of step 4: tensor "]
    {
        assert!(forced.contains(part), "no {part:?} in:\n{forced}");
    }
}

#[test]
fn what_cannot_be_compared_exits_with_2() {
    let shop = trained();
    shop.run(&["verify", "model"]).expect(2).says(&["no run in model"]);
    shop.run(&["verify", "run", "--steps", "4"]).expect(2).says(&["expected A..B"]);
    shop.run(&["verify", "run", "--steps", "3..6"]).expect(2).says(&["no checkpoint of step 3", "2, 4, 6"]);
    shop.run(&["verify", "run", "--steps", "2..9"]).expect(2).says(&["neither a checkpoint of step 9"]);
    shop.run(&["verify", "run", "--steps", "4..", "--set", "seed=1"])
        .expect(2)
        .says(&["seed: the run had 42"]);
    shop.run(&["verify", "run", "--devices", "cpu:2", "--set", "compute.devices=cpu:4"])
        .expect(2)
        .says(&["--devices cpu:2 and --set compute.devices=cpu:4 give `compute.devices` two values"]);
    shop.run(&["verify", "run", "--out", "model"]).expect(2).says(&["--out: model already exists"]);
    // Other weights in the same place, and the same weights in another.
    shop.run(&["init-weights", "source", "other", "--seed", "4"]).expect(0);
    fs::rename(shop.path("model"), shop.path("moved")).unwrap();
    shop.run(&["verify", "run", "--steps", "4.."]).expect(2).says(&["model: ", "--set model=PATH"]);
    let other = shop.run(&["verify", "run", "--steps", "4..", "--set", "model=other"]).expect(2);
    other.says(&["model: model.safetensors (", "BLAKE3 ", " in the record, "]);
    let moved = shop.run(&["verify", "run", "--steps", "4..", "--set", "model=moved"]).expect(0);
    assert!(moved.stdout.contains("the same bits"), "{}", moved.stdout);
}
