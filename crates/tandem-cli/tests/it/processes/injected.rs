//! Faults below the program: calls of the operating system that fail, one after the other.
//!
//! `injected.c` is a library that the loader puts before the C library. A run whose n-th write, sync, rename,
//! creation or read fails ends with exit code 1 and names the file, or goes on where the file is no part of the
//! result; what it saved resumes to the bits of a run that was never disturbed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::configure_divisible;
use crate::workshop::{Outcome, Workshop};

const ENOSPC: i64 = 28;
const EIO: i64 = 5;

/// Meshes of two ranks.
const MESHES: [&str; 6] = [
    "compute.sharding=ddp",
    "compute.sharding=zero1",
    "compute.sharding=zero2",
    "compute.sharding=zero3",
    "compute.pipeline=2",
    "compute.tensor=2",
];

/// Calls of an operation that fail.
#[derive(Clone, Copy, Debug)]
struct Fault {
    call: &'static str,
    /// First one, from 1.
    at: usize,
    /// How many from there on.
    count: usize,
    /// Error number, or the seconds of a clock's jump.
    error: i64,
}

/// A shop with the library and a run that was not disturbed.
struct Lab {
    shop: Workshop,
    config: String,
    library: PathBuf,
    weights: Vec<u8>,
}

/// Compiles the library.
pub fn library(shop: &Workshop) -> PathBuf {
    let library = shop.path("injected.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/processes/injected.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compile = Command::new(compiler);
    compile.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library).args([source, "-ldl"]);
    assert!(compile.status().expect("a C compiler").success());
    library
}

impl Lab {
    fn new() -> Self {
        Self::of(|_| "dpo.toml".to_owned())
    }

    /// A lab for the config that `write` names.
    fn of(write: impl FnOnce(&Workshop) -> String) -> Self {
        let shop = Workshop::new();
        let config = write(&shop);
        let library = library(&shop);
        shop.run(&["train", &config, "--set", "output=whole"]).expect(0);
        let weights = shop.bytes("whole/final/model.safetensors");
        Self { shop, config, library, weights }
    }

    /// [`Lab::each`] of these operations, under every mesh of two ranks.
    fn each_on_meshes(&self, calls: &[&'static str]) {
        for mesh in MESHES {
            for call in calls {
                self.each(call, &["--set", "compute.devices=cpu:2", "--set", mesh]);
            }
        }
    }

    /// Runs a command in which a call under `folder` fails; returns also how many failed.
    fn run(&self, arguments: &[&str], folder: &str, fault: Fault) -> (Outcome, usize) {
        let Fault { call, at, count, error } = fault;
        let seen = self.shop.path("seen");
        let _ = fs::remove_file(&seen);
        let mut command = self.shop.command(arguments);
        command.env("LD_PRELOAD", &self.library).env("FAULT_CALL", call).env("FAULT_AT", at.to_string());
        command.env("FAULT_COUNT", count.to_string()).env("FAULT_ERRNO", error.to_string());
        command.env("FAULT_UNDER", self.shop.path(folder)).env("FAULT_SEEN", &seen);
        let output = command.output().unwrap();
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let failed = fs::read(&seen).map_or(0, |bytes| bytes.len());
        (Outcome { code: output.status.code(), stdout, stderr }, failed)
    }

    /// Has each call of an operation fail in a run of its own, until there is none left. All must end well or with
    /// a message of the machine, and go on to the same bits. A disk that is full at a write stays full.
    fn each(&self, call: &'static str, more: &[&str]) {
        let (count, error) = match call {
            "write" => (1_000_000, ENOSPC),
            "open" | "mkdir" => (1, ENOSPC),
            _ => (1, EIO),
        };
        let (says, mut num_failed) = (format!("os error {error}"), 0);
        for at in 1.. {
            let fault = Fault { call, at, count, error };
            let _ = fs::remove_dir_all(self.shop.path("run"));
            let train = [&["train", &self.config][..], more].concat();
            let (outcome, failed) = self.run(&train, "run", fault);
            let said = &outcome.stderr;
            assert!(!said.contains("panicked"), "{fault:?}: {said}");
            if failed == 0 {
                assert_eq!(outcome.code, Some(0), "{fault:?}: {said}");
                break;
            }
            match outcome.code {
                // No part of the result, or tried again.
                Some(0) => {}
                Some(1) => {
                    num_failed += 1;
                    assert!(said.contains(&says) && said.contains("run"), "{fault:?}: no {says:?} in {said}");
                    let has_state = self.shop.path("run/checkpoints").exists();
                    let resume = [&train[..], &[if has_state { "--resume" } else { "--overwrite" }]].concat();
                    let again = self.shop.run(&resume);
                    assert_eq!(again.code, Some(0), "after {fault:?}: {again:?}");
                }
                code => panic!("{fault:?}: {code:?}: {said}"),
            }
            let is_same = self.shop.bytes("run/final/model.safetensors") == self.weights;
            assert!(is_same, "{fault:?}: other bits");
            let metrics = self.shop.metrics("run");
            assert!(metrics == self.shop.metrics("whole"), "{fault:?}: {metrics:?}");
        }
        assert!(num_failed > 0, "no {call} ended a run");
    }
}

#[test]
fn a_run_survives_each_rename_that_fails() {
    let lab = Lab::new();
    lab.each("rename", &[]);
}

#[test]
fn a_run_survives_each_folder_and_file_that_cannot_be_made() {
    let lab = Lab::new();
    lab.each("mkdir", &[]);
    lab.each("open", &[]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_survives_each_sync_that_fails() {
    let lab = Lab::new();
    lab.each("fsync", &[]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_survives_a_disk_that_is_full_at_each_write() {
    let lab = Lab::new();
    lab.each("write", &[]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn ranks_survive_a_disk_that_is_full_at_each_write() {
    let lab = Lab::of(|shop| configure_divisible(shop, "run", 6));
    lab.each_on_meshes(&["write"]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn ranks_survive_each_file_and_name_that_fails() {
    let lab = Lab::of(|shop| configure_divisible(shop, "run", 6));
    lab.each_on_meshes(&["open", "rename", "fsync"]);
}

/// While it generates, judges and writes samples.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn an_online_run_survives_each_write_name_and_sync_that_fails() {
    let lab = Lab::of(|shop| {
        shop.write_online("run");
        "online.toml".to_owned()
    });
    for call in ["write", "open", "rename", "fsync"] {
        lab.each(call, &[]);
    }
}

/// A read that fails is no excuse for other data.
#[test]
fn files_that_cannot_be_read_are_named() {
    let lab = Lab::new();
    for (folder, calls) in [("model", &["read", "map"][..]), ("preferences.jsonl", &["read"])] {
        for call in calls {
            for at in 1.. {
                let fault = Fault { call, at, count: 1, error: EIO };
                let train = ["train", "dpo.toml", "--overwrite", "--set", "data.cache=fresh"];
                let _ = fs::remove_dir_all(lab.shop.path("fresh"));
                let (outcome, failed) = lab.run(&train, folder, fault);
                if failed == 0 {
                    outcome.expect(0);
                    assert!(at > 1, "{folder} is not read by {call}");
                    break;
                }
                let said = &outcome.stderr;
                assert!(said.contains(folder) && said.contains("os error 5"), "{fault:?}: {said}");
                // The record of what went into a run is no part of the result: its lack is told.
                let is_record = said.contains("warning: provenance.json lacks the hashes");
                assert_eq!(outcome.code, Some(if is_record { 0 } else { 1 }), "{fault:?}: {said}");
            }
        }
    }
}

/// Neither the bits nor the deadlines follow the time of day.
#[test]
fn a_clock_that_jumps_changes_nothing() {
    let lab = Lab::new();
    for (seconds, ranks) in
        [(86_400 * 365, "cpu:1"), (-86_400 * 365, "cpu:1"), (-7200, "cpu:2"), (7200, "cpu:2")]
    {
        let devices = format!("compute.devices={ranks}");
        for at in [1, 3] {
            let fault = Fault { call: "clock", at, count: 1_000_000, error: seconds };
            let (outcome, jumps) =
                lab.run(&["train", "dpo.toml", "--overwrite", "--set", &devices], "run", fault);
            outcome.expect(0);
            assert!(jumps > 0, "{fault:?}");
            assert!(lab.shop.bytes("run/final/model.safetensors") == lab.weights, "{fault:?}");
        }
    }
}

/// Under any limit of its address space a run ends with a message, or trains as always.
#[test]
fn memory_that_is_refused_ends_a_run_with_a_message() {
    let lab = Lab::new();
    let tandem = env!("CARGO_BIN_EXE_tandem");
    let (mut refused, mut done) = (0, 0);
    for mib in (40..=400).step_by(10).chain([1_000, 5_000, 20_000]) {
        let limited = format!("ulimit -v {}; exec {tandem} train dpo.toml --overwrite", mib * 1024);
        let output = lab.shop.program("sh").args(["-c", &limited]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => {
                done += 1;
                assert!(lab.shop.bytes("run/final/model.safetensors") == lab.weights, "{mib} MiB");
            }
            // The loader needs some for the program itself.
            None | Some(127) if mib < 100 => {}
            Some(1 | 2) => {
                refused += 1;
                assert!(said.contains("error: ") && !said.contains("panicked"), "{mib} MiB: {said}");
            }
            code => panic!("{mib} MiB: {code:?}: {said}"),
        }
    }
    assert!(refused > 0 && done > 0, "{refused} {done}");
}
