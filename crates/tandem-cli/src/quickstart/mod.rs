//! `tandem quickstart`: from nothing to a judged model, with a user's files and code.
//!
//! Sentences state a person's name, age and city. SFT teaches a tiny model to write them as JSON or
//! as a note, as the prompt asks; prompts that do not ask have both half the time. DPO then prefers
//! JSON for those prompts. The judge is a program: it parses the completion and compares the facts,
//! on combinations of name and city held out of training.

mod configs;
mod corpus;
mod curve;
mod person;
mod samples;
mod tokenizer;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;
use std::{fs, io};

use anyhow::{Context, ensure};
use serde_json::Value;
use tandem_model::Sampling;
use tandem_train::Config;
use tandem_train::run::run_dir::RunDirPolicy;

use self::corpus::Corpus;
use self::samples::{Sample, side_by_side};
use crate::args::{ComputeArguments, ComputeType, Place, QuickstartArguments, WeightArguments};
use crate::commands::generate::{self, PromptFormat};
use crate::commands::train;
use crate::exit::{Exit, mistake};
use crate::generation::Wanted;
use crate::signals;
use crate::step_line::in_words;
use crate::watcher::Watcher;

const NUM_DEMONSTRATIONS: usize = 20_000;
const NUM_PREFERENCES: usize = 2_000;
const NUM_HELD_OUT: usize = 200;

pub(crate) fn run(arguments: &QuickstartArguments) -> anyhow::Result<Exit> {
    let (folder, start) = (arguments.output.as_path(), Instant::now());
    check_folder(folder)?;
    let corpus = prepare(folder, arguments.threads)?;
    if arguments.prepare_only {
        return Ok(Exit::Done);
    }
    let stop = signals::stop_flag()?;
    let mut answers = Vec::new();
    for (method, about) in
        [("sft", "demonstrations, half of them JSON, half notes"), ("dpo", "preferences for JSON")]
    {
        say(&format!(
            "{} on {about}: tandem train {}",
            method.to_uppercase(),
            folder.join(method).with_extension("toml").display()
        ));
        let config = Config::load::<&str>(&folder.join(method).with_extension("toml"), &[])?;
        let exit =
            train::train(&config, RunDirPolicy::Overwrite, &mut Watcher::every(20).kept_for(&config), &stop)?;
        if exit != Exit::Done || stop.load(Ordering::Relaxed) {
            return Ok(Exit::Interrupted);
        }
        answers.push(answer(&folder.join(method).join("final"), &corpus, arguments.threads)?);
    }
    let [before, after] = &answers[..] else { unreachable!("there are two runs") };
    let won = report(folder, &corpus, before, after)?;
    say(&format!("Done in {}. Everything is in {}.", in_words(start.elapsed()), folder.display()));
    ensure!(won > 0.9, "DPO should have moved the win rate above 90 %, and did not: please report this");
    Ok(Exit::Done)
}

fn say(line: &str) {
    println!("\n{line}");
}

/// Refuses a folder in which something lies that is not an earlier quickstart's.
fn check_folder(folder: &Path) -> anyhow::Result<()> {
    let is_empty = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        entries => entries.with_context(|| format!("cannot list {}", folder.display()))?.next().is_none(),
    };
    if is_empty || configs::are_in(folder) {
        return Ok(());
    }
    Err(mistake(format!(
        "{} is not empty, and its sft.toml and dpo.toml are not the quickstart's: nothing there was changed; choose another folder \
         with --output",
        folder.display()
    )))
}

/// Creates the data, the tokenizer and the configurations.
fn prepare(folder: &Path, threads: usize) -> anyhow::Result<Corpus> {
    for name in ["data", "model"] {
        let path = folder.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    let corpus = Corpus::draw(7, NUM_DEMONSTRATIONS, NUM_PREFERENCES, NUM_HELD_OUT);
    corpus.check_disjoint()?;
    // First, for by them a later quickstart knows its folder.
    configs::write(folder, tokenizer::VOCABULARY, threads)?;
    corpus.write(&folder.join("data"))?;
    tokenizer::train(corpus.texts(), &folder.join("model"))?;
    say(&format!(
        "In {}: {NUM_DEMONSTRATIONS} demonstrations, {NUM_PREFERENCES} preferences, {NUM_HELD_OUT} held-out prompts, a tokenizer, two configurations.",
        folder.display()
    ));
    Ok(corpus)
}

/// Samples completions of the held-out prompts.
fn answer(model: &Path, corpus: &Corpus, threads: usize) -> anyhow::Result<Vec<String>> {
    let sampling = Sampling { seed: 11, ..Sampling::default() };
    let wanted = Wanted { sampling, max_new_tokens: 48, stop: &[], continues: false };
    let prompts: Vec<&str> = corpus.held_out.iter().map(|(prompt, _)| prompt.as_str()).collect();
    let answers = generate::answers(
        &WeightArguments { model: model.to_owned(), adapter: None },
        &prompts,
        PromptFormat::Chat(None),
        &wanted,
        &ComputeArguments { device: Place::Cpu, threads: Some(threads), dtype: ComputeType::F32 },
    )?;
    Ok(answers.into_iter().map(|answer| answer.text).collect())
}

/// Prints the judge's table and returns the share of held-out prompts answered as preferred.
fn report(folder: &Path, corpus: &Corpus, before: &[String], after: &[String]) -> anyhow::Result<f64> {
    let share = |answers: &[String], told: &dyn Fn(&person::Person, &str) -> bool| {
        let right = corpus.held_out.iter().zip(answers).filter(|((_, person), answer)| told(person, answer));
        right.count() as f64 / corpus.held_out.len() as f64
    };
    let json = |person: &person::Person, answer: &str| person.is_told_by(answer);
    let note = |person: &person::Person, answer: &str| person.is_noted_by(answer);

    say("Margin of the preferred answer over the other (rewards/margins), by step of DPO");
    print!("{}", curve::draw(&margins(&folder.join("dpo/metrics.jsonl"))?, 60, 9));
    say(&format!("{NUM_HELD_OUT} held-out prompts  | JSON with the right facts | note with the right facts"));
    for (name, answers) in [("after SFT", before), ("after DPO", after)] {
        println!(
            "{name:22} | {:23.1} % | {:23.1} %",
            100.0 * share(answers, &json),
            100.0 * share(answers, &note)
        );
    }
    // The first three samples that DPO changed, else the first three.
    let changed = |i: &usize| before[*i] != after[*i];
    let indices = 0..corpus.held_out.len();
    let mut shown: Vec<usize> = indices.clone().filter(changed).chain(indices).take(3).collect();
    shown.sort_unstable();
    let samples: Vec<_> = shown
        .into_iter()
        .map(|i| Sample { prompt: &corpus.held_out[i].0, before: &before[i], after: &after[i] })
        .collect();
    say("The first three that DPO changed");
    print!("{}", side_by_side(&samples, 46));
    let (from, to) = (share(before, &json), share(after, &json));
    say(&format!("Win rate: {:.1} % before DPO, {:.1} % after.", 100.0 * from, 100.0 * to));
    Ok(to)
}

/// `rewards/margins` of every training step in a `metrics.jsonl`.
fn margins(path: &Path) -> anyhow::Result<Vec<f64>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
    let steps = lines.iter().filter(|line| line["split"] == "train");
    Ok(steps.filter_map(|line| line["rewards/margins"].as_f64()).collect())
}
