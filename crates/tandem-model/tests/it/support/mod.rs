//! Goldens of tiny models: what transformers makes of them in f64, and the HF folder with their weights.

#[path = "../../../../../goldens/formula.rs"]
#[allow(dead_code, reason = "other crates make reference models with it")]
pub mod formula;

pub mod adapted;
pub mod packed;
pub mod table;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use safetensors::SafeTensors;
use serde_json::Value;
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind, Prediction, Segment, ops};
use tandem_model::families::{self, HfLayout, HfTensor, family_named, pieces};
use tandem_model::{
    Checkpointing, Config, Decoder, FlatWeights, Gradient, GradientSink, LayerExecutor, LayerId, ModelFolder,
    PolicyAndReferenceScores, ResidentGradients, ResidentWeights, Result, SavedActivations, WeightSource,
};
use tempfile::TempDir;

/// One golden model in a folder of its own.
pub struct Golden {
    pub name: &'static str,
    pub folder: TempDir,
    pub decoder: Decoder,
    pub prompt: Vec<u32>,
    pub chosen: Vec<u32>,
    pub rejected: Vec<u32>,
    /// The objective's weight of each answer token's log-prob, chosen first.
    pub weights: Vec<f32>,
    /// Largest relative errors of torch's bf16 autocast: of log-probs, and of gradients.
    pub autocast: [f64; 2],
    expected: Vec<u8>,
}

/// Largest error of a score in f32, relative to the largest score. The sums on the way from a token to its scores have up to 450
/// terms, one sum after another, and each addition rounds by 2^-24: 512 × 2^-24. Roundings of random sign come to the root of
/// their number, 21 × 2^-24; the rest is room for sums that cancel, in every order that an instruction set adds in.
pub const SCORES: f64 = 1.0 / 32_768.0;

/// Largest error of a gradient in f32, relative to the largest of its tensor: that of the scores, of the way back, of the
/// activations that the way back reads, and of the sum over tokens.
pub const GRADIENTS: f64 = 4.0 * SCORES;

/// Names of all goldens: the JSON files of their folder.
pub fn all() -> &'static [&'static str] {
    static ALL: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
        let files = std::fs::read_dir(goldens()).unwrap().map(|file| file.unwrap().path());
        let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        let mut names: Vec<_> =
            files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        assert!(!names.is_empty(), "there are no goldens");
        names.into_iter().map(|name| &*name.leak()).collect()
    });
    &ALL
}

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/models")
}

/// A CPU device with two threads.
pub fn cpu() -> Device {
    Device::cpu(2, 256 << 20).unwrap()
}

/// HF tensors of a decoder, each with its layer, in the order of the layers.
fn hf_pieces(decoder: &Decoder) -> Vec<(LayerId, HfTensor)> {
    let spec = decoder.spec();
    let family = family_named(spec.family).unwrap();
    let of_layer = |layer| {
        pieces(family, spec, layer, decoder.layout(layer)).into_iter().map(move |piece| (layer, piece))
    };
    decoder.layers().into_iter().flat_map(of_layer).collect()
}

/// Name and shape of every HF tensor of a decoder, in the order of the layers.
pub fn tensor_shapes(decoder: &Decoder) -> Vec<(String, Vec<usize>)> {
    hf_pieces(decoder).into_iter().map(|(_, piece)| (piece.name, piece.shape)).collect()
}

/// Every tensor of weights in the memory of a CPU device, in HF's names and order of elements.
pub fn tensors(decoder: &Decoder, weights: &FlatWeights) -> Vec<(String, Vec<f32>)> {
    tensors_on(&cpu(), decoder, weights)
}

/// [`tensors`] in the memory of any device.
pub fn tensors_on(device: &Device, decoder: &Decoder, weights: &FlatWeights) -> Vec<(String, Vec<f32>)> {
    let heads = decoder.spec().attention.heads;
    let tensor = |(layer, piece): (LayerId, HfTensor)| {
        let flat = weights.layers[decoder.index(layer)].view().col_range(piece.range.clone());
        let ours = ops::read_f32(device, flat).unwrap();
        let (rows, cols) = (piece.rows, piece.cols);
        let theirs = match piece.order {
            HfLayout::Rows => ours,
            HfLayout::Transposed => (0..rows * cols).map(|i| ours[(i % rows) * cols + i / rows]).collect(),
            HfLayout::HeadInterleaved => {
                // Theirs is [head, (q, k, v), …], ours [(q, k, v), head, …].
                let run = ours.len() / (3 * heads);
                let of_run = |i: usize| &ours[(i % 3 * heads + i / 3) * run..][..run];
                (0..3 * heads).flat_map(of_run).copied().collect()
            }
        };
        (piece.name, theirs)
    };
    hf_pieces(decoder).into_iter().map(tensor).collect()
}

/// Scores the forest's predictions, and keeps for backward what it needs. The decoder is one stage.
pub fn forward_keep(
    walk: &LayerExecutor,
    weights: &mut dyn WeightSource,
    forest: &Forest,
    scores: &mut HeadScores,
) -> Result<SavedActivations> {
    Ok(walk.stage_forward(weights, forest, None, PolicyAndReferenceScores::one(scores), true)?.1)
}

/// Adds the gradient of `Σ_i d_log_prob[i] · log_prob[i]` into the sink. The decoder is one stage.
pub fn backward(
    walk: &LayerExecutor,
    weights: &mut dyn WeightSource,
    gradients: &mut dyn GradientSink,
    forest: &Forest,
    saved: SavedActivations,
    scores: &HeadScores,
    d_log_prob: &[f32],
) -> Result<()> {
    let end = Gradient::OfScores { scores, d_log_prob };
    walk.stage_backward(weights, gradients, forest, saved, end).map(drop)
}

/// Scores and gradients of one step. Also returns the memory in use between forward and backward.
pub fn step(
    walk: &LayerExecutor,
    weights: &mut dyn WeightSource,
    gradients: &mut dyn GradientSink,
    forest: &Forest,
    d_log_prob: &[f32],
) -> (HeadScores, [usize; MemoryKind::ALL.len()]) {
    let mut scores = HeadScores::default();
    let saved = forward_keep(walk, weights, forest, &mut scores).unwrap();
    let kept = walk.device.memory().current;
    backward(walk, weights, gradients, forest, saved, &scores, d_log_prob).unwrap();
    (scores, kept)
}

/// Bits of all elements.
pub fn bits(weights: &FlatWeights) -> Vec<u32> {
    weights.layers.iter().flat_map(|l| l.view().as_slice::<f32>().iter().map(|v| v.to_bits())).collect()
}

impl Golden {
    pub fn new(name: &'static str) -> Self {
        Self::changed(name, 32, |_| ())
    }

    /// A golden model with other sizes, for texts up to so many tokens; what transformers computed is not
    /// of it.
    pub fn changed(name: &'static str, positions: usize, change: impl FnOnce(&mut Value)) -> Self {
        let mut golden: Value =
            serde_json::from_slice(&std::fs::read(goldens().join(format!("{name}.json"))).unwrap()).unwrap();
        change(&mut golden["config"]);
        let folder = TempDir::new().unwrap();
        let config_path = folder.path().join("config.json");
        std::fs::write(&config_path, golden["config"].to_string()).unwrap();
        let config = Config::read(&config_path).unwrap();
        let spec = families::family_of(&config).unwrap().spec(&config).unwrap();
        let decoder = Decoder::new(spec, positions).unwrap();
        formula::write_safetensors(folder.path(), &tensor_shapes(&decoder), formula::weight).unwrap();
        let list = |key: &str| golden[key].as_array().unwrap().clone();
        let ids = |key: &str| list(key).iter().map(|v| v.as_u64().unwrap() as u32).collect();
        Self {
            name,
            prompt: ids("prompt"),
            chosen: ids("chosen"),
            rejected: ids("rejected"),
            weights: list("weights").iter().map(|v| v.as_f64().unwrap() as f32).collect(),
            autocast: ["log_prob", "gradient"].map(|key| golden["autocast"][key].as_f64().unwrap()),
            expected: std::fs::read(goldens().join(format!("{name}.safetensors"))).unwrap(),
            decoder,
            folder,
        }
    }

    /// A golden model, a device and the model's weights on it.
    pub fn loaded(name: &'static str) -> (Self, Device, FlatWeights) {
        let (golden, device) = (Self::new(name), cpu());
        let weights = golden.load(&device);
        (golden, device, weights)
    }

    pub fn open(&self) -> ModelFolder {
        ModelFolder::open(self.folder.path()).unwrap()
    }

    pub fn load(&self, device: &Device) -> FlatWeights {
        self.open().weights(&self.decoder).unwrap().load(&self.decoder, device, MemoryKind::Master).unwrap()
    }

    /// Numbers that transformers computed.
    pub fn expected(&self, key: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(key).unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name));
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// HF names of the parameters that have a gradient.
    pub fn parameters(&self) -> Vec<String> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let names = file.names().into_iter().filter_map(|n| n.strip_prefix("gradient/").map(str::to_owned));
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Both answers on one shared prompt: a tree of three segments.
    pub fn forest(&self) -> Forest {
        let (p, c, r) = (self.prompt.len() as u32, self.chosen.len() as u32, self.rejected.len() as u32);
        let tokens = [&self.prompt[..], &self.chosen, &self.rejected].concat();
        let segment = |range, parent, first_position| Segment { range, parent, first_position };
        let segments = vec![
            segment(0..p, None, 0),
            segment(p..p + c, Some(0), p),
            segment(p + c..p + c + r, Some(0), p),
        ];
        let mut predictions: Vec<Prediction> = Vec::new();
        for (sequence, start, answer) in [(0, p, &self.chosen), (1, p + c, &self.rejected)] {
            for (i, &target) in answer.iter().enumerate() {
                let hidden_row = if i == 0 { p - 1 } else { start + i as u32 - 1 };
                predictions.push(Prediction { hidden_row, target, sequence });
            }
        }
        predictions.sort_by_key(|p| (p.hidden_row, p.sequence));
        Forest::new(tokens, segments, predictions, 2).unwrap()
    }

    /// The weight of each prediction of [`Golden::forest`], in its order.
    pub fn forest_weights(&self, forest: &Forest) -> Vec<f32> {
        let mut chosen = self.weights[..self.chosen.len()].iter();
        let mut rejected = self.weights[self.chosen.len()..].iter();
        let next = |p: &Prediction| if p.sequence == 0 { chosen.next() } else { rejected.next() };
        forest.predictions.iter().map(next).map(|w| *w.unwrap()).collect()
    }

    /// Numbers of ranks that its heads can be divided among.
    pub fn counts(&self) -> Vec<usize> {
        let kv_heads = self.decoder.spec().attention.kv_heads;
        (2..=kv_heads).filter(|&count| kv_heads.is_multiple_of(count)).collect()
    }

    /// One answer after the prompt as a plain sequence, its tokens predicted. It is as long as the pair,
    /// whose log-probs and logits transformers computed.
    pub fn sequence(&self, answer: &[u32]) -> Forest {
        let tokens = [&self.prompt[..], answer].concat();
        let longest = answer.len().max(self.chosen.len()).max(self.rejected.len());
        let lengths = vec![(self.prompt.len() + longest) as u32; tokens.len()];
        let mut forest = Forest::sequence(tokens).and_then(|forest| forest.with_lengths(lengths)).unwrap();
        let first = self.prompt.len() as u32 - 1;
        forest.predictions.retain(|p| p.hidden_row >= first);
        forest
    }
}

/// Log-probs in the order chosen then rejected, from those of [`Golden::forest`].
pub fn by_sequence(forest: &Forest, log_prob: &[f32]) -> Vec<f32> {
    let of = |s: u32| {
        forest.predictions.iter().zip(log_prob).filter(move |(p, _)| p.sequence == s).map(|(_, l)| *l)
    };
    of(0).chain(of(1)).collect()
}

/// Scores and gradients of one forest.
pub fn train(
    device: &Device,
    decoder: &Decoder,
    weights: &FlatWeights,
    dtype: DType,
    checkpointing: Checkpointing,
    forest: &Forest,
    d_log_prob: &[f32],
) -> (HeadScores, FlatWeights) {
    let copy = (dtype != DType::F32)
        .then(|| weights.compute_copy(decoder, device, MemoryKind::Weights, dtype).unwrap());
    let mut source = ResidentWeights::new(decoder, weights, copy.as_ref());
    let mut sink = ResidentGradients::zeros(decoder, device).unwrap();
    let walk = LayerExecutor::new(decoder, device, dtype, checkpointing);
    let (scores, _) = step(&walk, &mut source, &mut sink, forest, d_log_prob);
    (scores, sink.sums)
}

/// Largest difference, over the largest expected magnitude.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |m, &x| m.max(f64::from(x).abs()));
    let worst = found.iter().zip(expected).fold(0f64, |m, (&a, &b)| {
        let difference = f64::from(a) - f64::from(b);
        if difference.is_nan() { f64::INFINITY } else { m.max(difference.abs()) }
    });
    worst / largest.max(f64::MIN_POSITIVE)
}
