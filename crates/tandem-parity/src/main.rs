//! Compares Tandem with everything in a folder of goldens: what TRL, transformers and the original
//! DPO code computed.
//!
//! `cargo run --release -p tandem-parity -- [--device cpu|cuda|emulated] FOLDER
//! [tokens|forward|losses|training|evaluation …]`
//!
//! `cuda` is this machine's first GPU; `emulated` is the CUDA emulator and slow.
//!
//! Prints a line per check with the measured error, then the totals; exits 1 if a check failed, 2
//! if the folder cannot be read.

#![warn(unreachable_pub)]

mod evaluation;
mod forward;
mod losses;
mod numbers;
mod place;
mod qwen2;
mod report;
mod runner;
mod settings;
mod tokens;
mod training;
mod weights;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use place::Place;
use report::Report;
use runner::Runner;

const PARTS: [&str; 5] = ["tokens", "forward", "losses", "training", "evaluation"];

fn main() -> ExitCode {
    match compare() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("tandem-parity: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn compare() -> Result<bool> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut place = "cpu".to_owned();
    if arguments.first().is_some_and(|first| first == "--device") && arguments.len() > 1 {
        place = arguments.drain(..2).nth(1).expect("there are two");
    }
    let place = Place::named(&place)?;
    let mut arguments = arguments.into_iter();
    let usage = "usage: tandem-parity [--device cpu|cuda|emulated] FOLDER [PART …]";
    let folder = PathBuf::from(arguments.next().context(usage)?);
    let parts: Vec<String> = arguments.collect();
    if let Some(unknown) = parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        bail!("unknown part {unknown:?}; the parts are {}", PARTS.join(", "));
    }
    let chosen = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    let mut report = Report::default();
    let mut runner = Runner::new(place)?;
    for part in PARTS.into_iter().filter(|part| chosen(part)) {
        check(part, &folder, &mut runner, &mut report).with_context(|| format!("checking {part}"))?;
    }
    if parts.is_empty() {
        println!(
            "note  online_dpo.json: not compared: TRL drew the answers, and the file does not have them (golden_online of \
             tandem-train trains on given ones)"
        );
    }
    Ok(report.finish())
}

fn check(part: &str, folder: &Path, runner: &mut Runner, report: &mut Report) -> Result<()> {
    match part {
        "tokens" => tokens::check(folder, report),
        "forward" => forward::check(folder, &runner.place().device()?, runner, report),
        "losses" => losses::check(folder, runner, report),
        "training" => training::check(folder, runner, report),
        "evaluation" => evaluation::check(folder, runner, report),
        _ => unreachable!("checked by the caller"),
    }
}
