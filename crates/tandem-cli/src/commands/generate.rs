//! `tandem generate`: samples completions of prompts.

use std::io::{BufRead, IsTerminal, stdin};

use anyhow::Context;
use serde_json::json;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::Flow;

use crate::args::{ComputeArguments, GenerateArguments, SamplingArguments, WeightArguments};
use crate::exit::{Exit, mistake};
use crate::generation::answers::CompletionText;
use crate::generation::loaded::{encode_chat, message, tokenizer_of};
use crate::generation::{Wanted, answers};
use crate::hub;
use crate::output::{print_lines, print_texts};

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
    let wanted = Wanted { sampling, max_new_tokens, stop };
    let answers = answers(&hub::weights(&arguments.weights)?, &texts, framing, &wanted, &arguments.compute)?;
    if arguments.json {
        let line = |(prompt, answer): (&String, &CompletionText)| {
            let CompletionText { text, tokens, is_ended } = answer;
            json!({ "prompt": prompt, "completion": text, "tokens": tokens, "ended": is_ended }).to_string()
        };
        print_lines(&prompts.iter().zip(&answers).map(line).collect::<Vec<_>>())?;
        return Ok(Exit::Done);
    }
    // Several completions are shown under their prompts; a single one alone, ready to pipe.
    let lines: Vec<String> = match &answers[..] {
        [answer] => vec![answer.text.clone()],
        answers => prompts
            .iter()
            .zip(answers)
            .map(|(prompt, answer)| format!("> {prompt}\n{}", answer.text))
            .collect(),
    };
    print_texts(&lines)?;
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

/// Generates one completion per prompt.
pub(crate) fn answers(
    weights: &WeightArguments,
    prompts: &[&str],
    framing: PromptFormat<'_>,
    wanted: &Wanted<'_>,
    compute: &ComputeArguments,
) -> tandem_train::Result<Vec<CompletionText>> {
    let tokenizer = tokenizer_of(weights)?;
    let prompts =
        prompts.iter().map(|text| encode(&tokenizer, text, framing)).collect::<Result<Vec<_>, _>>()?;
    let answers = answers::all(weights, tokenizer, prompts, wanted, compute, &mut |_| Flow::Continue)?;
    Ok(answers.unwrap_or_default())
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
