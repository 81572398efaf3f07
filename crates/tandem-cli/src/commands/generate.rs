//! `tandem generate`: continues prompts with a model.

use std::io::{BufRead, IsTerminal, stdin};
use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value};
use tandem_data::chat_template::RenderOptions;
use tandem_data::decode_stream::DecodeStream;
use tandem_data::stop_strings::StopStrings;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::{DType, Device, KernelError, Kind, cuda};
use tandem_model::decode::Flow;
use tandem_model::{
    Decoder, Generator, GeneratorOptions, Merged, ModelFolder, PeftFolder, Request, ResidentWeights, Sampling,
};

use crate::args::{GenerateArguments, Place, SamplingArguments};
use crate::exit::{Exit, mistake};
use crate::output::print_lines;

/// Answers under way at once, at most; it bounds the memory of the cache.
const MAX_BATCH: usize = 64;

/// Tokens of prompts that are computed at once, at most.
const PREFILL_TOKENS: usize = 4096;

/// What generates.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// The model.
    pub folder: &'a Path,
    /// An adapter of it, to be merged into it.
    pub adapter: Option<&'a Path>,
}

/// What stands around a prompt.
#[derive(Clone, Copy, Debug)]
pub enum Framing<'a> {
    /// The chat template where the model has one, with this system message; else nothing.
    Chat(Option<&'a str>),
    /// Nothing.
    Raw,
}

pub fn run(arguments: &GenerateArguments) -> anyhow::Result<Exit> {
    let prompts = if arguments.prompts.is_empty() { read_prompts()? } else { arguments.prompts.clone() };
    let framing = if arguments.raw { Framing::Raw } else { Framing::Chat(arguments.system.as_deref()) };
    let texts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let weights = Weights { folder: &arguments.model, adapter: arguments.adapter.as_deref() };
    let (place, threads) = (arguments.device, arguments.threads);
    let SamplingArguments { max_new_tokens, ref stop, .. } = arguments.sampling;
    let wanted = Wanted { sampling: arguments.sampling.sampling(), max_new_tokens, stop };
    let answers = answers(weights, &texts, framing, &wanted, place, threads)?;
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

/// The text that the model answers to each prompt, computed in f32.
///
/// # Errors
/// If the model, its adapter or its tokenizer cannot be read, a prompt does not fit, or the device is not there or too small.
pub fn answers(
    Weights { folder, adapter }: Weights<'_>,
    prompts: &[&str],
    framing: Framing<'_>,
    wanted: &Wanted<'_>,
    place: Place,
    threads: Option<usize>,
) -> tandem_train::Result<Vec<String>> {
    let model = ModelFolder::open(folder)?;
    let tokenizer = Tokenizer::from_folder(folder)?;
    let prompts =
        prompts.iter().map(|text| encode(&tokenizer, text, framing)).collect::<Result<Vec<_>, _>>()?;

    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default() + wanted.max_new_tokens;
    let options = GeneratorOptions {
        max_batch: MAX_BATCH,
        cache_tokens: longest * prompts.len().clamp(1, MAX_BATCH),
        prefill_tokens: PREFILL_TOKENS,
        log_probs: false,
    };
    let adapter = adapter.map(PeftFolder::open).transpose()?;
    let merged = adapter.map(|adapter| Merged::open(&model, &adapter, longest)).transpose()?;
    let decoder = match &merged {
        Some(merged) => merged.decoder().clone(),
        None => Decoder::new(model.spec().clone(), longest)?,
    };
    let device = open(place, threads, address_space(&decoder, options.cache_tokens))?;
    let weights = match &merged {
        Some(merged) => merged.load(&device, Kind::Master)?,
        None => model.weights(&decoder)?.load(&decoder, &device, Kind::Master)?,
    };
    let mut source = ResidentWeights::new(&decoder, &weights, None);
    // Of few texts at a time: nothing compares their bits with those of other batches.
    let device = device.for_few_rows();
    let mut generator = Generator::new(&decoder, &device, DType::F32, options)?;
    let mut texts: Vec<Text> = prompts.iter().map(|_| Text::new(&tokenizer, wanted.stop)).collect();
    let mut failure = None;
    let requests = (0..).zip(prompts).map(|(number, prompt)| Request {
        prompt,
        number,
        num_answers: 1,
        sampling: wanted.sampling,
        max_new_tokens: wanted.max_new_tokens,
        stop: tokenizer.eos_ids().to_vec(),
    });
    generator.generate(&mut source, requests.collect(), &mut |new| {
        texts[new.request].push(new.token).unwrap_or_else(|error| {
            failure = Some(error);
            Flow::End
        })
    })?;
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(texts.into_iter().map(Text::finish).collect::<Result<_, _>>()?),
    }
}

/// An answer as it comes.
struct Text<'a> {
    decode: DecodeStream<'a>,
    stop: StopStrings,
    text: String,
    is_ended: bool,
}

impl<'a> Text<'a> {
    fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Self {
        let stop = StopStrings::new(stop.iter().cloned());
        Self { decode: tokenizer.decode_stream(true), stop, text: String::new(), is_ended: false }
    }

    fn push(&mut self, token: u32) -> tandem_data::Result<Flow> {
        let (shown, is_ended) = self.stop.push(&self.decode.push(token)?);
        self.text += &shown;
        self.is_ended = is_ended;
        Ok(if is_ended { Flow::End } else { Flow::Continue })
    }

    fn finish(mut self) -> tandem_data::Result<String> {
        if !self.is_ended {
            let rest = self.decode.finish()?;
            let (shown, is_ended) = self.stop.push(&rest);
            self.text += &shown;
            if !is_ended {
                self.text += &self.stop.finish();
            }
        }
        Ok(self.text)
    }
}

/// The device, with an address space of `capacity` bytes.
fn open(place: Place, threads: Option<usize>, capacity: usize) -> Result<Device, KernelError> {
    let gpu = match place {
        Place::Cpu => None,
        Place::Auto => cuda::list().is_ok_and(|gpus| !gpus.is_empty()).then_some(0),
        Place::Cuda(ordinal) => Some(ordinal),
    };
    let threads = || threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    match gpu {
        Some(ordinal) => Device::open_cuda(ordinal, capacity, cuda::Options::default()),
        None => Device::cpu(threads(), capacity),
    }
}

fn encode(tokenizer: &Tokenizer, prompt: &str, framing: Framing<'_>) -> tandem_data::Result<Vec<u32>> {
    let message = |role: &str, content: &str| -> Map<String, Value> {
        [("role", role), ("content", content)]
            .map(|(key, value)| (key.to_owned(), value.into()))
            .into_iter()
            .collect()
    };
    match framing {
        Framing::Chat(system) if system.is_some() || tokenizer.chat_template().is_ok() => {
            let system = system.map(|text| message("system", text));
            let messages: Vec<_> = system.into_iter().chain([message("user", prompt)]).collect();
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            tokenizer.encode_chat(&messages, options)
        }
        _ => tokenizer.encode(prompt),
    }
}

/// Bytes of address space for weights, cache and activations. It costs nothing until it is touched.
fn address_space(decoder: &Decoder, cache_tokens: usize) -> usize {
    let spec = decoder.spec();
    let per_token = 16 * spec.hidden_size * (decoder.layers().len() + 8) + 8 * spec.vocab_size;
    8 * decoder.num_parameters() + cache_tokens * per_token + (4 << 30)
}
