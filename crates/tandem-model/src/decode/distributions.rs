//! Whole distributions of generation beside those of a training pass over the same texts, bit by bit.
//!
//! The texts are given, so that every distribution is compared, and not a drawn token's probability alone.

#[path = "../../tests/it/support/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "the integration tests use the rest")]
mod support;

use std::ops::Range;

use tandem_kernels::cpu::Isa;
use tandem_kernels::{DType, Device, Forest, Format, MemoryKind, Segment, ops};

use super::batch::{NewPrompt, NextTokens, Prompts};
use super::cache::CacheSize;
use super::model::{Model, PassRoom};
use crate::decoder::Decoder;
use crate::layers::{Checkpointing, LayerExecutor};
use crate::lora::{Adapter, AdapterKind, Targets};
use crate::weights::{ResidentWeights, WeightSource};
use support::adapted::{Adapted, adapter_weights, config};
use support::packed::Packed;
use support::{Golden, all};

/// A CPU device with two threads at every level of vector instructions. AMX is emulated on a processor that
/// has its vectors but no tiles.
fn levels() -> Vec<(Isa, Device)> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if Isa::highest() == Isa::Avx512Bf16 {
        tandem_amx_emulator::install();
        Isa::emulate_tiles();
    }
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.map(|isa| (isa, Device::cpu_with_isa(2, 512 << 20, isa).unwrap())).collect()
}

/// A prompt with its answers.
struct Text {
    prompt: Vec<u32>,
    answers: Vec<Vec<u32>>,
}

impl Text {
    /// Makes tokens of a vocabulary of 64.
    fn new(number: usize, prompt: usize, answers: &[usize]) -> Self {
        let tokens = |salt: usize, count: usize| {
            (0..count).map(|i| ((i * i + 7 * i + 11 * salt + 5 * number) % 61) as u32).collect()
        };
        let answers = answers.iter().enumerate().map(|(index, &count)| tokens(index + 1, count)).collect();
        Self { prompt: tokens(0, prompt), answers }
    }

    /// Tokens of the prompt and the longest answer.
    fn length(&self) -> u32 {
        (self.prompt.len() + self.answers.iter().map(Vec::len).max().unwrap_or(0)) as u32
    }
}

/// Longest text.
const LONGEST: usize = 340;

/// A text whose prompt and answer are longer than a block of queries of two heads.
fn long() -> Vec<Text> {
    vec![Text::new(0, 220, &[110, 1, 40])]
}

/// Three texts of several lengths, and seventeen short ones.
fn short() -> [Vec<Text>; 2] {
    let many = |number| Text::new(number, 1 + 3 * number % 13, &[1 + number % 3, 2]);
    let three = vec![Text::new(1, 1, &[5, 3]), Text::new(2, 7, &[1, 8, 4]), Text::new(3, 60, &[6])];
    [three, (4..21).map(many).collect()]
}

/// Rows of a text in a forest: the prompt's, and each answer's.
type Places = (Range<u32>, Vec<Range<u32>>);

/// Packs texts, and returns the places of each.
fn forest(texts: &[Text]) -> (Forest, Vec<Places>) {
    let (mut tokens, mut segments, mut lengths, mut places) =
        (Vec::new(), Vec::<Segment>::new(), Vec::new(), Vec::new());
    for text in texts {
        let mut place = |own: &[u32]| {
            let start = tokens.len() as u32;
            tokens.extend_from_slice(own);
            start..tokens.len() as u32
        };
        let parent = segments.len() as u32;
        let prompt = place(&text.prompt);
        let answers: Vec<_> = text.answers.iter().map(|answer| place(answer)).collect();
        let first_position = prompt.len() as u32;
        segments.push(Segment { range: prompt.clone(), parent: None, first_position: 0 });
        segments.extend(answers.iter().cloned().map(|range| Segment {
            range,
            parent: Some(parent),
            first_position,
        }));
        lengths.resize(tokens.len(), text.length());
        places.push((prompt, answers));
    }
    let forest = Forest::new(tokens, segments, Vec::new(), 0).unwrap().with_lengths(lengths).unwrap();
    (forest, places)
}

/// Compares the distribution after every token of the answers, and before them.
fn check(
    decoder: &Decoder,
    device: &Device,
    dtype: DType,
    source: &mut dyn WeightSource,
    batches: impl IntoIterator<Item = Vec<Text>>,
    what: &str,
) {
    let walk = LayerExecutor::new(decoder, device, dtype, Checkpointing::None);
    let vocabulary = decoder.spec().vocab_size;
    for texts in batches {
        let (forest, places) = forest(&texts);
        let rows: Vec<u32> = (0..forest.num_tokens() as u32).collect();
        let trained = walk.logits(source, &forest, &rows).unwrap();
        let trained = ops::read_f32(device, trained.view()).unwrap();
        let first = trained[0].to_bits();
        assert!(trained.iter().any(|x| x.to_bits() != first) && trained.iter().all(|x| x.is_finite()));
        let same = |found: &[f32], rows: &[u32]| {
            for (found, &row) in found.chunks_exact(vocabulary).zip(rows) {
                let expected = &trained[row as usize * vocabulary..][..vocabulary];
                let differing = (0..vocabulary).filter(|&i| found[i].to_bits() != expected[i].to_bits());
                let count = differing.clone().count();
                let most = differing.map(|i| (found[i] - expected[i]).abs()).fold(0.0, f32::max);
                let number = texts.len();
                assert!(
                    count == 0,
                    "{what}, {number} texts, row {row}: {count} logits differ, by up to {most}"
                );
            }
        };
        // Cache rows are the places in the forest; slots are numbered in its order of segments.
        let mut model = Model::new(
            walk,
            CacheSize { rows: rows.len(), slots: forest.segments.len() },
            PassRoom::default(),
        )
        .unwrap();
        let has_slots = decoder.spec().linear_attention.is_some();
        let slot = |row: u32| {
            let segment = forest.segments.iter().position(|segment| segment.range.start == row).unwrap();
            has_slots.then_some(segment as u32)
        };
        let prompts = Prompts::new(texts.iter().zip(&places).map(|(text, (prompt, _))| NewPrompt {
            prompt: &text.prompt,
            length: text.length(),
            row: prompt.start,
            keep: slot(prompt.start),
        }));
        let logits = model.prefill(source, &prompts.unwrap()).unwrap().expect("the only stage");
        let last: Vec<u32> = places.iter().map(|(prompt, _)| prompt.end - 1).collect();
        same(&model.read(&logits).unwrap(), &last);
        drop(logits);
        for token in 0..texts.iter().flat_map(|text| &text.answers).map(Vec::len).max().unwrap() {
            let (mut next, mut rows) = (NextTokens::new(), Vec::new());
            for (text, (prompt, answers)) in texts.iter().zip(&places) {
                for (answer, place) in text.answers.iter().zip(answers).filter(|(_, p)| token < p.len()) {
                    let row = place.start + token as u32;
                    let before = if token == 0 { slot(prompt.start) } else { slot(place.start) };
                    let (limit, slots) =
                        (text.length() as usize - prompt.len(), before.zip(slot(place.start)));
                    next.push(answer[token], prompt, place.start..row + 1, limit, slots);
                    rows.push(row);
                }
            }
            let logits = model.step(source, &next).unwrap().expect("the only stage");
            same(&model.read(&logits).unwrap(), &rows);
        }
    }
}

/// Compares a model whose weights are kept in the compute type.
fn check_plain(
    golden: &Golden,
    device: &Device,
    dtype: DType,
    batches: impl IntoIterator<Item = Vec<Text>>,
    what: &str,
) {
    let weights = golden.load(device);
    let copy = (dtype != DType::F32)
        .then(|| weights.compute_copy(&golden.decoder, device, MemoryKind::Weights, dtype).unwrap());
    let mut source = ResidentWeights::new(&golden.decoder, &weights, copy.as_ref());
    check(&golden.decoder, device, dtype, &mut source, batches, what);
}

/// A golden model for long texts, with other sizes.
fn golden(name: &'static str, sizes: &[(&str, usize)]) -> Golden {
    Golden::changed(name, LONGEST, |config| {
        if config.get("n_positions").is_some() {
            config["n_positions"] = LONGEST.into();
        }
        sizes.iter().for_each(|&(key, value)| config[key] = value.into());
    })
}

/// Types to compare at a level: emulated tiles take long over f32, which is cut into three parts.
fn types(isa: Isa) -> &'static [DType] {
    if isa == Isa::Amx { &[DType::Bf16] } else { &[DType::F32, DType::Bf16] }
}

#[test]
fn every_family_generates_from_the_distributions_that_train() {
    for (isa, device) in levels() {
        for &name in all() {
            let golden = golden(name, &[]);
            for &dtype in types(isa) {
                let batches = std::iter::once(long()).chain(short());
                check_plain(&golden, &device, dtype, batches, &format!("{name} {dtype} {}", isa.name()));
            }
        }
    }
}

/// Sums of several blocks, and columns and elements that fill no register: products of few rows have kernels
/// of their own, which small models do not reach.
#[test]
fn wide_models_generate_from_the_distributions_that_train() {
    let models: [(_, &[_]); 4] = [
        (
            "llama",
            &[
                ("hidden_size", 1104),
                ("intermediate_size", 2100),
                ("num_attention_heads", 12),
                ("vocab_size", 1100),
            ],
        ),
        (
            "gemma2",
            &[("hidden_size", 1034), ("intermediate_size", 530), ("head_dim", 72), ("vocab_size", 1031)],
        ),
        ("gpt2", &[("n_embd", 540), ("n_head", 9), ("vocab_size", 301)]),
        ("qwen3-5", &[("hidden_size", 288), ("linear_value_head_dim", 68), ("linear_key_head_dim", 40)]),
    ];
    for (name, sizes) in models {
        let golden = golden(name, sizes);
        // Too slow for the lowest level's registers.
        for (isa, device) in levels().into_iter().filter(|(isa, _)| *isa != Isa::Portable) {
            check_plain(&golden, &device, DType::Bf16, short(), &format!("wide {name} {}", isa.name()));
        }
    }
}

/// Adapters beside a base in bf16, 8 and 4 bits.
#[test]
fn adapted_models_generate_from_the_distributions_that_train() {
    for (isa, device) in levels() {
        for name in ["llama", "gpt2", "gemma2", "qwen3", "qwen3-5"] {
            let golden = golden(name, &[]);
            let base = golden.load(&device);
            for (kind, format) in [
                (AdapterKind::Dora, Format::Bf16),
                (AdapterKind::Lora, Format::Int8),
                (AdapterKind::Lora, Format::Fp8),
                (AdapterKind::Lora, Format::Nf4),
            ] {
                let adapter =
                    Adapter::new(config(kind, Targets::AllLinear, &[]), golden.decoder.spec()).unwrap();
                let decoder = golden.decoder.clone().with_adapter(adapter);
                let weights = adapter_weights(&decoder, &device, &base);
                for &dtype in types(isa) {
                    let copy = (dtype != DType::F32).then(|| {
                        weights.compute_copy(&decoder, &device, MemoryKind::Weights, dtype).unwrap()
                    });
                    let mut policy = Adapted {
                        decoder: &decoder,
                        base: Packed::new(&decoder, &device, &base, format, dtype),
                        weights: &weights,
                        copy: copy.as_ref(),
                        fetched: Vec::new(),
                    };
                    let what = format!("{name} {kind:?} {format:?} {dtype} {}", isa.name());
                    check(&decoder, &device, dtype, &mut policy, short(), &what);
                }
            }
        }
    }
}
