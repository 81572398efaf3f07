//! `tandem report`: the page of `tandem watch` as one file.

use std::fs;

use anyhow::Context;

use crate::args::ReportArguments;
use crate::exit::{Exit, mistake};
use crate::output::{print_lines, refuse_other_file};
use crate::page::{self, MOST_RUNS, RunHistory};
use crate::run_folder;

pub(crate) fn run(arguments: &ReportArguments) -> anyhow::Result<Exit> {
    let out = &arguments.out;
    if out.is_dir() {
        return Err(mistake(format!("--out {}: it is a folder; a report is a file", out.display())));
    }
    refuse_other_file("--out", out)?;
    let folders = run_folder::find(&arguments.runs, run_folder::is_run)?;
    if folders.is_empty() {
        return Err(run_folder::none_found(&arguments.runs));
    }
    if folders.len() > MOST_RUNS {
        return Err(mistake(format!(
            "{} runs are there, and a report has room for {MOST_RUNS}: name those that you want",
            folders.len()
        )));
    }
    let mut runs = Vec::with_capacity(folders.len());
    for folder in &folders {
        let mut run = RunHistory::new(folder);
        // Files are read in parts.
        while run.update().with_context(|| format!("cannot read the run in {}", folder.display()))? {}
        runs.push(run);
    }
    let text = page::report(&page::panels(&runs, None));
    tandem_train::replace_file(out, text.as_bytes())?;
    let size = fs::metadata(out).map_or(text.len() as u64, |facts| facts.len());
    print_lines(&[format!("{}: {}", out.display(), tandem_train::size::in_words(size))])?;
    Ok(Exit::Done)
}
