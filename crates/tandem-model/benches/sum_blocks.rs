//! Cost of sums in blocks on one device: `cargo bench -p tandem-model --bench sum_blocks -- MODEL [--repeats 9]
//! [--tokens 2048] [--sequences 8] [--rank 0] [--dora]`
//!
//! Forward and backward passes over random tokens, half of which are scored, with and without blocks in
//! turns, on one thread. A line of JSON for each type: seconds of this thread on its processor, the median
//! of each and of the ratios. MODEL is a folder with a `config.json`; weights are drawn at random.

use std::path::PathBuf;

use serde_json::json;
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind, Prediction, Segment};
use tandem_model::{
    Adapter, AdapterConfig, AdapterKind, AdapterWeights, Checkpointing, Decoder, FlatLayer, FlatWeights,
    Gradient, LayerExecutor, LayerId, LayerWeights, ModelFolder, PolicyAndReferenceScores, ResidentGradients,
    ResidentWeights, Result, Targets, WeightSource, init,
};

struct Arguments {
    model: PathBuf,
    repeats: usize,
    tokens: usize,
    sequences: usize,
    /// Rank of an adapter of all linear layers; full training if 0.
    rank: usize,
    kind: AdapterKind,
}

/// A base, with an adapter beside it if one trains.
struct Weights<'a> {
    base: ResidentWeights<'a>,
    decoder: &'a Decoder,
    adapter: &'a FlatWeights,
    copy: Option<&'a FlatWeights>,
}

impl WeightSource for Weights<'_> {
    fn prefetch(&mut self, _: LayerId) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        let index = self.decoder.index(layer);
        let own = self.decoder.adapter().map(|adapter| {
            let copy = self.copy.map(|copy| copy.layers[index].view());
            let (layout, flat) = (self.decoder.trained(layer), self.adapter.layers[index].view());
            AdapterWeights { adapter, layer, weights: FlatLayer::new(layout, flat, copy) }
        });
        Ok(self.base.fetch(layer)?.with_adapter(own))
    }

    fn release(&mut self, _: LayerId) {}
}

fn main() -> Result<()> {
    let Some(arguments) = Arguments::read(std::env::args().skip(1)) else {
        println!("sum_blocks: give a model's folder after --");
        return Ok(());
    };
    for dtype in [DType::F32, DType::Bf16] {
        run(&arguments, dtype)?;
    }
    Ok(())
}

impl Arguments {
    /// Nothing if there is no model, as where all benches are run.
    fn read(all: impl Iterator<Item = String>) -> Option<Self> {
        let mut found = Self {
            model: PathBuf::new(),
            repeats: 9,
            tokens: 2048,
            sequences: 8,
            rank: 0,
            kind: AdapterKind::Lora,
        };
        let mut all = all.filter(|argument| argument != "--bench");
        while let Some(argument) = all.next() {
            let place = match &argument[..] {
                "--repeats" => &mut found.repeats,
                "--tokens" => &mut found.tokens,
                "--sequences" => &mut found.sequences,
                "--rank" => &mut found.rank,
                "--dora" => {
                    found.kind = AdapterKind::Dora;
                    continue;
                }
                _ => {
                    found.model = argument.into();
                    continue;
                }
            };
            *place = all.next().expect("a number").parse().expect("a number");
        }
        (!found.model.as_os_str().is_empty()).then_some(found)
    }
}

/// Seconds that this thread has had of its processor.
fn thread_seconds() -> f64 {
    let text =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells the time of a thread");
    text.split(' ').next().expect("a number").parse::<f64>().expect("nanoseconds") / 1e9
}

fn forest(tokens: usize, sequences: usize, vocabulary: usize) -> Forest {
    let len = (tokens / sequences) as u32;
    let segment = |i: u32| Segment { range: len * i..len * (i + 1), parent: None, first_position: 0 };
    let token = |i: u32| i.wrapping_mul(2_654_435_761) % vocabulary as u32;
    let scored = (0..len * sequences as u32).filter(|row| row % len >= len / 2 && row % len + 1 < len);
    let prediction = |row: u32| Prediction { hidden_row: row, target: token(row + 1), sequence: row / len };
    let segments = (0..sequences as u32).map(segment).collect();
    let tokens = (0..len * sequences as u32).map(token).collect();
    Forest::new(tokens, segments, scored.map(prediction).collect(), sequences as u32).expect("a forest")
}

fn run(arguments: &Arguments, dtype: DType) -> Result<()> {
    let spec = ModelFolder::open(&arguments.model)?.spec().clone();
    let device = Device::cpu(1, 1 << 40)?;
    let decoder = |decoder: Decoder| -> Result<Decoder> {
        if arguments.rank == 0 {
            return Ok(decoder);
        }
        let config = AdapterConfig {
            kind: arguments.kind,
            rank: arguments.rank,
            alpha: 1.0,
            rank_stabilized: false,
            dropout: 0.0,
            targets: Targets::AllLinear,
            modules_to_save: Vec::new(),
            file: None,
        };
        let adapter = Adapter::new(config, decoder.spec())?;
        Ok(decoder.with_adapter(adapter))
    };
    let blocks = decoder(Decoder::new(spec.clone(), arguments.tokens)?)?;
    let one = decoder(Decoder::new(spec, arguments.tokens)?.without_sum_blocks())?;
    let forest = forest(arguments.tokens, arguments.sequences, one.spec().vocab_size);
    let weights = init::init(&one, &device, MemoryKind::Master, 1)?;
    let base = one.without_adapter();
    let adapter = match one.adapter() {
        Some(_) => FlatWeights::zeros(&one, &device, MemoryKind::Master)?,
        None => FlatWeights::default(),
    };
    let copy_of = |weights: &FlatWeights, decoder: &Decoder| match dtype {
        DType::F32 => Ok(None),
        DType::Bf16 => weights.compute_copy(decoder, &device, MemoryKind::Weights, dtype).map(Some),
    };
    let (copy, copy_of_adapter) = (copy_of(&weights, &base)?, copy_of(&adapter, &one)?);
    let d_log_prob = vec![1e-3; forest.predictions.len()];
    let mut sink = ResidentGradients::zeros(&one, &device)?;
    let mut seconds = [Vec::new(), Vec::new()];
    for repeat in 0..=arguments.repeats {
        for (decoder, seconds) in [&one, &blocks].into_iter().zip(&mut seconds) {
            let walk = LayerExecutor::new(decoder, &device, dtype, Checkpointing::None);
            let base = ResidentWeights::new(decoder, &weights, copy.as_ref());
            let copy = copy_of_adapter.as_ref();
            let mut source = Weights { base, decoder, adapter: &adapter, copy };
            let began = thread_seconds();
            let mut scores = HeadScores::default();
            let of_scores = PolicyAndReferenceScores::one(&mut scores);
            let (_, saved) = walk.stage_forward(&mut source, &forest, None, of_scores, true)?;
            let end = Gradient::OfScores { scores: &scores, d_log_prob: &d_log_prob };
            walk.stage_backward(&mut source, &mut sink, &forest, saved, end)?;
            // The first warms up.
            if repeat > 0 {
                seconds.push(thread_seconds() - began);
            }
        }
    }
    let mut ratios: Vec<f64> = seconds[1].iter().zip(&seconds[0]).map(|(blocks, one)| blocks / one).collect();
    let median = |numbers: &mut Vec<f64>| {
        numbers.sort_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    };
    let [one_block, in_blocks] = seconds.map(|mut seconds| median(&mut seconds));
    let (least, most) = ratios.iter().fold((f64::MAX, 0f64), |(a, b), x| (a.min(*x), b.max(*x)));
    let line = json!({
        "dtype": dtype.to_string(), "without": one_block, "with": in_blocks, "ratio": median(&mut ratios),
        "ratios": [least, most],
    });
    println!("{line}");
    Ok(())
}
