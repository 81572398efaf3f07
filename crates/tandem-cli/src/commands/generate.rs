//! `tandem generate`: continues prompts with a model.

use std::io::{BufRead, IsTerminal, stdin};

use anyhow::Context;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::Flow;
use tandem_model::{Request, Sampling};

use crate::args::{ComputeArguments, GenerateArguments, SamplingArguments, WeightArguments};
use crate::exit::{Exit, mistake};
use crate::generation::loaded::{encode_chat, message};
use crate::generation::{Loaded, Room, Text};
use crate::output::print_lines;

/// Answers under way at once, at most; it bounds the memory of the cache.
const MAX_BATCH: usize = 64;

/// What stands around a prompt.
#[derive(Clone, Copy, Debug)]
pub enum Framing<'a> {
    /// The chat template where the model has one, with this system message; else nothing.
    Chat(Option<&'a str>),
    /// Nothing.
    Raw,
}

/// What is wanted of answers.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// Strings that end one.
    pub stop: &'a [String],
}

pub fn run(arguments: &GenerateArguments) -> anyhow::Result<Exit> {
    let prompts = if arguments.prompts.is_empty() { read_prompts()? } else { arguments.prompts.clone() };
    let framing = if arguments.raw { Framing::Raw } else { Framing::Chat(arguments.system.as_deref()) };
    let texts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let SamplingArguments { max_new_tokens, ref stop, .. } = arguments.sampling;
    let sampling = arguments.sampling.sampling(0.0, arguments.sampling.seed.unwrap_or_default());
    let wanted = Wanted { sampling, max_new_tokens, stop };
    let answers = answers(&arguments.weights, &texts, framing, &wanted, &arguments.compute)?;
    // Several answers are told apart by their prompts; a single one stands alone, ready to be piped.
    let lines: Vec<String> = match &answers[..] {
        [answer] => vec![answer.clone()],
        answers => {
            prompts.iter().zip(answers).map(|(prompt, answer)| format!("> {prompt}\n{answer}")).collect()
        }
    };
    print_lines(&lines)?;
    Ok(Exit::Done)
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

/// The text that the model answers to each prompt.
///
/// # Errors
/// If the model, its adapter or its tokenizer cannot be read, a prompt does not fit, or the device is not there or too small.
pub fn answers(
    weights: &WeightArguments,
    prompts: &[&str],
    framing: Framing<'_>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
) -> tandem_train::Result<Vec<String>> {
    let tokenizer = Tokenizer::from_folder(&weights.model)?;
    let prompts =
        prompts.iter().map(|text| encode(&tokenizer, text, framing)).collect::<Result<Vec<_>, _>>()?;
    let positions = prompts.iter().map(Vec::len).max().unwrap_or_default() + wanted.max_new_tokens;
    let cache_tokens = positions * prompts.len().clamp(1, MAX_BATCH);
    let room = Room { positions, cache_tokens, max_batch: MAX_BATCH, log_probs: false };
    let model = Loaded::open(weights, tokenizer, room, compute)?;
    let (tokenizer, mut generator) = (model.tokenizer(), model.generator()?);
    let requests = (0..).zip(prompts).map(|(number, prompt)| Request {
        prompt,
        number,
        num_answers: 1,
        sampling: wanted.sampling,
        max_new_tokens: wanted.max_new_tokens,
        stop: tokenizer.eos_ids().to_vec(),
    });
    let requests: Vec<Request> = requests.collect();
    let mut texts: Vec<_> =
        requests.iter().map(|_| (Text::new(tokenizer, wanted.stop), String::new())).collect();
    let mut failure = None;
    generator.generate(&mut model.source(), requests, &mut |new| {
        let (text, shown) = &mut texts[new.request];
        match text.push(new.token) {
            Ok(piece) => *shown += &piece,
            Err(error) => failure = Some(error),
        }
        if text.is_ended() || failure.is_some() { Flow::End } else { Flow::Continue }
    })?;
    if let Some(error) = failure {
        return Err(error.into());
    }
    let whole = |(mut text, shown): (Text, String)| Ok(shown + &text.finish()?);
    texts.into_iter().map(whole).collect()
}

fn encode(tokenizer: &Tokenizer, prompt: &str, framing: Framing<'_>) -> tandem_data::Result<Vec<u32>> {
    match framing {
        Framing::Chat(system) if system.is_some() || tokenizer.chat_template().is_ok() => {
            let system = system.map(|text| message("system", text));
            let messages: Vec<_> = system.into_iter().chain([message("user", prompt)]).collect();
            encode_chat(tokenizer, &messages)
        }
        _ => tokenizer.encode(prompt),
    }
}
