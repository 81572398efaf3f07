//! Rotary embeddings that depend on the length of a text, against transformers in f64: several pairs in one forest, of which
//! transformers had one at a time. The numbers come from `goldens/rotary_golden.py`.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;
use tandem_kernels::{DType, Device, Forest, MemoryKind, Prediction, Segment};
use tandem_model::{Checkpointing, Config, Decoder, FlatWeights, ModelFolder, families};
use tempfile::TempDir;

use crate::support::{GRADIENTS, SCORES, cpu, formula, relative_error, tensor_shapes, tensors_on, train};

/// Prompt, chosen and rejected.
type Pair = [Vec<u32>; 3];

struct Rotating {
    decoder: Decoder,
    folder: TempDir,
    pairs: Vec<Pair>,
    /// The objective's weight of each answer token's log-prob, pair after pair, chosen first.
    weights: Vec<f32>,
    expected: Vec<u8>,
}

impl Rotating {
    fn new(name: &str) -> Self {
        let file = |extension| goldens().join(format!("{name}.{extension}"));
        let golden: Value = serde_json::from_slice(&std::fs::read(file("json")).unwrap()).unwrap();
        let folder = TempDir::new().unwrap();
        let config_path = folder.path().join("config.json");
        std::fs::write(&config_path, golden["config"].to_string()).unwrap();
        let config = Config::read(&config_path).unwrap();
        let spec = families::family_of(&config).unwrap().spec(&config).unwrap();
        let decoder = Decoder::new(spec, 32).unwrap();
        formula::write_safetensors(folder.path(), &tensor_shapes(&decoder), formula::weight).unwrap();
        Self {
            decoder,
            folder,
            pairs: serde_json::from_value(golden["pairs"].clone()).unwrap(),
            weights: serde_json::from_value(golden["weights"].clone()).unwrap(),
            expected: std::fs::read(file("safetensors")).unwrap(),
        }
    }

    fn load(&self, device: &Device) -> FlatWeights {
        let folder = ModelFolder::open(self.folder.path()).unwrap();
        folder.weights(&self.decoder).unwrap().load(&self.decoder, device, MemoryKind::Master).unwrap()
    }

    fn expected(&self, key: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(key).unwrap_or_else(|e| panic!("{key}: {e}"));
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Log-probs of some pairs in one forest, in the order of the golden, and the gradients of the weighted sum.
    fn train(&self, device: &Device, pairs: &[usize], share: bool) -> (Vec<f32>, FlatWeights) {
        let (forest, order) = self.forest(pairs, share);
        let answers = |pair: &Pair| pair[1].len() + pair[2].len();
        let starts = |pair: usize| self.pairs[..pair].iter().map(answers).sum::<usize>();
        let weights: Vec<f32> = pairs
            .iter()
            .flat_map(|&pair| &self.weights[starts(pair)..][..answers(&self.pairs[pair])])
            .copied()
            .collect();
        let d_log_prob: Vec<f32> = order.iter().map(|&index| weights[index]).collect();
        let loaded = self.load(device);
        let (decoder, kept) = (&self.decoder, Checkpointing::Block);
        let (scores, sums) = train(device, decoder, &loaded, DType::F32, kept, &forest, &d_log_prob);
        let mut log_probs = vec![f32::NAN; order.len()];
        order.iter().zip(&scores.log_prob).for_each(|(&index, &log_prob)| log_probs[index] = log_prob);
        (log_probs, sums)
    }

    /// Pairs as trees, which share prompts or are two for each pair, and for each prediction the index of its log-prob.
    fn forest(&self, pairs: &[usize], share: bool) -> (Forest, Vec<usize>) {
        let (mut tokens, mut segments, mut lengths) = (Vec::new(), Vec::<Segment>::new(), Vec::new());
        let mut predictions: Vec<(Prediction, usize)> = Vec::new();
        let mut add = |tokens: &mut Vec<u32>, text: &[u32], parent: Option<u32>, first_position: u32| {
            let start = tokens.len() as u32;
            tokens.extend(text);
            segments.push(Segment { range: start..tokens.len() as u32, parent, first_position });
            (segments.len() as u32 - 1, start)
        };
        for [prompt, chosen, rejected] in pairs.iter().map(|&pair| &self.pairs[pair]) {
            let first_position = prompt.len() as u32;
            let mut root = None;
            for answer in [chosen, rejected] {
                let sequence = 0;
                let (parent, first) = match root {
                    Some(root) if share => root,
                    _ => add(&mut tokens, prompt, None, 0),
                };
                root = Some((parent, first));
                let (_, start) = add(&mut tokens, answer, Some(parent), first_position);
                for (row, &target) in (start..).zip(answer) {
                    let hidden_row = if row == start { first + first_position - 1 } else { row - 1 };
                    predictions.push((Prediction { hidden_row, target, sequence }, predictions.len()));
                }
            }
            let longest = prompt.len() + chosen.len().max(rejected.len());
            lengths.resize(tokens.len(), longest as u32);
        }
        predictions.sort_by_key(|(prediction, index)| (prediction.hidden_row, *index));
        let (predictions, order) = predictions.into_iter().unzip();
        let forest = Forest::new(tokens, segments, predictions, 1).unwrap();
        if share {
            assert_eq!(forest.lengths, lengths, "a tree is as long as its longest path");
            return (forest, order);
        }
        (forest.with_lengths(lengths).unwrap(), order)
    }
}

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/rotary")
}

const NAMES: [&str; 2] = ["llama-dynamic", "phi3-longrope"];

fn check(name: &str, device: &Device, share: bool) {
    let golden = Rotating::new(name);
    let all: Vec<usize> = (0..golden.pairs.len()).collect();
    let (log_probs, sums) = golden.train(device, &all, share);
    let error = relative_error(&log_probs, &golden.expected("log_prob"));
    assert!(error <= SCORES, "{name}, share {share}: log-probs: {error:.2e}");
    for (tensor, gradient) in tensors_on(device, &golden.decoder, &sums) {
        let error = relative_error(&gradient, &golden.expected(&format!("gradient/{tensor}")));
        assert!(error <= GRADIENTS, "{name}, share {share}: gradient of {tensor}: {error:.2e}");
    }
}

#[test]
fn pairs_of_several_lengths_in_one_forest_equal_transformers_of_one_pair_at_a_time() {
    for name in NAMES {
        for share in [true, false] {
            check(name, &cpu(), share);
        }
    }
}

#[test]
fn an_emulated_gpu_rotates_by_length_too() {
    for name in NAMES {
        check(name, &tandem_cuda_emulator::device(1 << 28).unwrap(), true);
    }
}

#[test]
fn the_bits_of_a_pair_do_not_depend_on_other_pairs() {
    for name in NAMES {
        let golden = Rotating::new(name);
        let of = |pairs: &[usize]| golden.train(&cpu(), pairs, true).0;
        let alone: Vec<Vec<f32>> = (0..4).map(|pair| of(&[pair])).collect();
        for pairs in [&[0, 1, 2, 3][..], &[3, 1], &[2, 0, 3]] {
            let expected: Vec<f32> = pairs.iter().flat_map(|&pair| alone[pair].clone()).collect();
            assert_eq!(of(pairs), expected, "{name}: {pairs:?}");
        }
    }
}
