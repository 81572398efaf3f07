//! How long answers take: `cargo bench -p tandem-model --bench generate -- MODEL PROMPTS.json [--answers 4] [--tokens 128] [--dtype f32]
//! [--threads 2] [--repeats 3] [--format nf4 [--in-place no]] [--rank 16]`
//!
//! PROMPTS.json is a list of lists of token ids. Answers are drawn from the model's own distribution and never stop early. A line of
//! JSON tells the seconds of each repeat, the first of which warms up, the seconds of a token step after the first, and the bytes that
//! were taken. With a format the matrices of blocks are packed in it, and multiplied by as they are, or unpacked at every step with
//! `--in-place no`. With a rank every matrix has a LoRA adapter beside it, as a policy that trains one. `bench/generate` runs it in turns with transformers, `bench/real` also with llama.cpp.

#[path = "../tests/it/support/adapted.rs"]
mod adapted;
#[path = "../tests/it/support/packed.rs"]
mod packed;

use std::path::PathBuf;
use std::time::Instant;

use adapted::Adapted;
use packed::Packed;
use serde_json::json;
use tandem_kernels::{DType, Device, Format, MemoryKind};
use tandem_model::decode::Flow;
use tandem_model::{
    Adapter, AdapterConfig, AdapterKind, Decoder, FlatWeights, Generator, GeneratorOptions, LayerId,
    LayerWeights, ModelFolder, Request, ResidentWeights, Result, Sampling, Targets, WeightSource,
};

struct Arguments {
    model: PathBuf,
    prompts: Vec<Vec<u32>>,
    answers: usize,
    tokens: usize,
    dtype: DType,
    threads: usize,
    repeats: usize,
    format: Option<Format>,
    in_place: bool,
    rank: usize,
}

fn main() -> Result<()> {
    let Some(arguments) = Arguments::read(std::env::args().skip(1)) else {
        println!("generate: give a model's folder and a file of prompts after --");
        return Ok(());
    };
    run(&arguments)
}

impl Arguments {
    /// Nothing if there is no model, as where all benches are run.
    fn read(all: impl Iterator<Item = String>) -> Option<Self> {
        let (mut places, mut options) = (Vec::new(), std::collections::BTreeMap::new());
        let mut all = all.filter(|argument| argument != "--bench");
        while let Some(argument) = all.next() {
            match argument.strip_prefix("--") {
                Some(name) => drop(options.insert(name.to_owned(), all.next().expect("a value"))),
                None => places.push(argument),
            }
        }
        let [model, prompts] = <[String; 2]>::try_from(places).ok()?;
        let text = std::fs::read_to_string(&prompts).expect("a file of prompts");
        let number = |name: &str, default: usize| {
            options.get(name).map_or(default, |value| value.parse().expect("a number"))
        };
        Some(Self {
            model: model.into(),
            prompts: serde_json::from_str(&text).expect("lists of token ids"),
            answers: number("answers", 4),
            tokens: number("tokens", 128),
            dtype: match options.get("dtype").map(String::as_str) {
                Some("bf16") => DType::Bf16,
                _ => DType::F32,
            },
            threads: number("threads", 2),
            repeats: number("repeats", 3),
            format: options.get("format").map(|name| Format::from_name(name).expect("a format")),
            in_place: options.get("in-place").is_none_or(|word| word != "no"),
            rank: number("rank", 0),
        })
    }
}

/// Packed weights of which every matrix is unpacked when its layer is fetched.
struct Unpacked<'a>(Packed<'a>);

impl WeightSource for Unpacked<'_> {
    fn prefetch(&mut self, layer: LayerId) -> Result<()> {
        self.0.prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.0.fetch(layer)
    }

    fn release(&mut self, layer: LayerId) {
        self.0.release(layer);
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { prompts, tokens, dtype, .. } = arguments;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default() + tokens;
    let model = ModelFolder::open(&arguments.model)?;
    let decoder = Decoder::new(model.spec().clone(), longest)?;
    let device = &Device::cpu(arguments.threads, 1 << 40)?;
    let masters = model.weights(&decoder)?.load(&decoder, device, MemoryKind::Master)?;
    let copy = match dtype {
        DType::F32 => None,
        DType::Bf16 => Some(masters.compute_copy(&decoder, device, MemoryKind::Weights, DType::Bf16)?),
    };
    let Some(format) = arguments.format else {
        let base = ResidentWeights::new(&decoder, &masters, copy.as_ref());
        return adapt(arguments, &decoder, device, &masters, base);
    };
    let packed = Packed::new(&decoder, device, &masters, format, *dtype);
    match arguments.in_place {
        true => adapt(arguments, &decoder, device, &masters, packed),
        false => adapt(arguments, &decoder, device, &masters, Unpacked(packed)),
    }
}

/// Times generation from a base, beside an adapter if there is to be one.
fn adapt(
    arguments: &Arguments,
    decoder: &Decoder,
    device: &Device,
    masters: &FlatWeights,
    mut base: impl WeightSource,
) -> Result<()> {
    if arguments.rank == 0 {
        return generate(arguments, decoder, device, &mut base);
    }
    let plain = adapted::config(AdapterKind::Lora, Targets::AllLinear, &[]);
    let config = AdapterConfig { rank: arguments.rank, ..plain };
    let decoder = &decoder.clone().with_adapter(Adapter::new(config, decoder.spec())?);
    let weights = &adapted::adapter_weights(decoder, device, masters);
    let copy = match arguments.dtype {
        DType::F32 => None,
        DType::Bf16 => Some(weights.compute_copy(decoder, device, MemoryKind::Weights, DType::Bf16)?),
    };
    let copy = copy.as_ref();
    generate(arguments, decoder, device, &mut Adapted { decoder, base, weights, copy, fetched: Vec::new() })
}

fn generate(
    arguments: &Arguments,
    decoder: &Decoder,
    device: &Device,
    source: &mut dyn WeightSource,
) -> Result<()> {
    let Arguments { prompts, answers, tokens, dtype, .. } = arguments;
    let options = GeneratorOptions {
        max_batch: prompts.len() * answers,
        cache_tokens: prompts.iter().map(|prompt| prompt.len() + answers * tokens).sum(),
        prefill_tokens: 1 << 14,
        log_probs: true,
        planned_prefill: None,
    };
    let mut generator = Generator::new(decoder, device, *dtype, options)?;
    let (mut seconds, mut step_seconds) = (Vec::new(), Vec::new());
    for repeat in 0..=arguments.repeats as u64 {
        let request = |(number, prompt): (u64, &Vec<u32>)| Request {
            prompt: prompt.clone(),
            number,
            num_answers: *answers,
            sampling: Sampling { seed: repeat, ..Sampling::default() },
            max_new_tokens: *tokens,
            stop: Vec::new(),
        };
        let requests = (0..).zip(prompts).map(request).collect();
        let began = Instant::now();
        let mut first = began;
        let found = generator.generate(source, requests, &mut |token| {
            if token.index == 0 {
                first = Instant::now();
            }
            Flow::Continue
        })?;
        seconds.push(began.elapsed().as_secs_f64());
        step_seconds.push(first.elapsed().as_secs_f64() / (tokens - 1).max(1) as f64);
        assert!(found.iter().all(|answer| answer.tokens.len() == *tokens), "every answer is whole");
    }
    println!("{}", json!({ "seconds": seconds, "step_seconds": step_seconds, "bytes": device.high_water() }));
    Ok(())
}
