//! `tandem generate`: samples completions of prompts.

use std::io::{BufRead, IsTerminal, stdin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use serde_json::json;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::Flow;

use crate::args::{ComputeArguments, GenerateArguments, SamplingArguments, WeightArguments};
use crate::exit::{Exit, mistake};
use crate::generation::answers::{CompletionText, Watch};
use crate::generation::loaded::{encode_chat, message, tokenizer_of};
use crate::generation::{Wanted, answers};
use crate::hub;
use crate::output::{print_lines, print_texts};
use crate::signals::stop_flag_of_run;

/// Text around a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PromptFormat<'a> {
    /// The model's chat template with this system message, if it has one.
    Chat(Option<&'a str>),
    /// The prompt as it is.
    Raw,
}

pub(crate) fn run(arguments: &GenerateArguments) -> anyhow::Result<Exit> {
    let prompts = if arguments.prompts.is_empty() { read_prompts()? } else { arguments.prompts.clone() };
    let framing =
        if arguments.raw { PromptFormat::Raw } else { PromptFormat::Chat(arguments.system.as_deref()) };
    let texts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let SamplingArguments { max_new_tokens, ref stop, .. } = arguments.sampling;
    let sampling = arguments.sampling.sampling(0.0, arguments.sampling.seed.unwrap_or_default())?;
    let wanted = Wanted { sampling, max_new_tokens, stop, continues: arguments.raw };
    let weights = hub::weights(&arguments.weights)?;
    let has_nothing = Arc::new(AtomicBool::new(true));
    let mut printer = Printer {
        prompts: &prompts,
        json: arguments.json,
        waiting: vec![None; prompts.len()],
        next: 0,
        stop: stop_flag_of_run(&has_nothing).context("cannot handle signals")?,
        has_nothing,
        failure: None,
    };
    let answers = answers_of(&weights, &texts, framing, &wanted, &arguments.compute, &mut printer)?;
    if answers.is_none() {
        // These are finished, and wait for prompts that will never be.
        let waiting = std::mem::take(&mut printer.waiting);
        printer.print(waiting.into_iter().flatten().collect());
    }
    match printer.failure {
        Some(error) => Err(error),
        None => Ok(if answers.is_some() { Exit::Done } else { Exit::Interrupted }),
    }
}

/// Prints completions in the order of their prompts, each as soon as it and those before it are finished.
struct Printer<'a> {
    prompts: &'a [String],
    json: bool,
    /// Finished completions that are not printed.
    waiting: Vec<Option<String>>,
    /// First prompt whose completion is not printed.
    next: usize,
    stop: Arc<AtomicBool>,
    /// Set until a completion is finished: the first signal then ends the process at once, as the model may take
    /// long to load.
    has_nothing: Arc<AtomicBool>,
    failure: Option<anyhow::Error>,
}

impl Printer<'_> {
    fn text(&self, prompt: usize, answer: &CompletionText) -> String {
        let CompletionText { text, tokens, is_ended } = answer;
        let asked = &self.prompts[prompt];
        if self.json {
            return json!({ "prompt": asked, "completion": text, "tokens": tokens, "ended": is_ended })
                .to_string();
        }
        // Several completions are shown under their prompts; a single one alone, ready to pipe.
        if self.prompts.len() == 1 { text.clone() } else { format!("> {asked}\n{text}") }
    }

    fn print(&mut self, lines: Vec<String>) {
        let printed = if self.json { print_lines(&lines) } else { print_texts(&lines) };
        if let Err(error) = printed {
            self.failure.get_or_insert(error);
        }
    }
}

impl Watch for Printer<'_> {
    fn step(&mut self, _: usize) -> Flow {
        let ends = self.failure.is_some() || self.stop.load(Ordering::Relaxed);
        if ends { Flow::End } else { Flow::Continue }
    }

    fn finished(&mut self, prompt: usize, answer: &CompletionText) {
        self.has_nothing.store(false, Ordering::Relaxed);
        self.waiting[prompt] = Some(self.text(prompt, answer));
        let mut lines = Vec::new();
        while let Some(line) = self.waiting.get_mut(self.next).and_then(Option::take) {
            lines.push(line);
            self.next += 1;
        }
        if !lines.is_empty() {
            self.print(lines);
        }
    }
}

fn read_prompts() -> anyhow::Result<Vec<String>> {
    if stdin().is_terminal() {
        eprintln!("prompts, one a line; Ctrl-D ends them");
    }
    let lines =
        stdin().lock().lines().collect::<Result<Vec<_>, _>>().context("cannot read standard input")?;
    let prompts: Vec<_> = lines.into_iter().filter(|line| !line.trim().is_empty()).collect();
    if prompts.is_empty() {
        return Err(mistake("no prompt: give some after the model, or one a line on standard input"));
    }
    Ok(prompts)
}

/// Generates one completion per prompt.
pub(crate) fn answers(
    weights: &WeightArguments,
    prompts: &[&str],
    framing: PromptFormat<'_>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
) -> tandem_train::Result<Vec<CompletionText>> {
    let answers = answers_of(weights, prompts, framing, wanted, compute, &mut |_: usize| Flow::Continue)?;
    Ok(answers.unwrap_or_default())
}

fn answers_of(
    weights: &WeightArguments,
    prompts: &[&str],
    framing: PromptFormat<'_>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
    watch: &mut dyn Watch,
) -> tandem_train::Result<Option<Vec<CompletionText>>> {
    let tokenizer = tokenizer_of(weights)?;
    let prompts =
        prompts.iter().map(|text| encode(&tokenizer, text, framing)).collect::<Result<Vec<_>, _>>()?;
    answers::all(weights, tokenizer, prompts, wanted, compute, watch)
}

fn encode(tokenizer: &Tokenizer, prompt: &str, framing: PromptFormat<'_>) -> tandem_data::Result<Vec<u32>> {
    match framing {
        PromptFormat::Chat(system) if system.is_some() || tokenizer.chat_template().is_ok() => {
            let system = system.map(|text| message("system", text));
            let messages: Vec<_> = system.into_iter().chain([message("user", prompt)]).collect();
            encode_chat(tokenizer, &messages)
        }
        _ => tokenizer.encode(prompt),
    }
}
