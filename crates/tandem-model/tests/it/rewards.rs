//! Reward models against transformers in f64: scores, and the gradient of a pair's loss by every parameter. The numbers come
//! from `goldens/reward_golden.py`. Then their folders: what is read, begun, written and refused.

use std::path::Path;

use crate::support::{GRADIENTS, SCORES, cpu, formula, relative_error, tensor_shapes, tensors, train};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Forest, MemoryKind, Prediction, Segment};
use tandem_model::{Checkpointing, Decoder, FlatWeights, LayerExecutor, ModelFolder, ResidentWeights, Save};
use tempfile::TempDir;

const ALL: [&str; 6] = ["llama", "gpt2", "gpt-neox", "phi", "qwen3", "gemma"];

/// A golden reward model in a folder of its own.
struct Golden {
    name: &'static str,
    folder: TempDir,
    decoder: Decoder,
    golden: Value,
    expected: Vec<u8>,
}

impl Golden {
    fn new(name: &'static str) -> Self {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/rewards");
        let golden = std::fs::read(goldens.join(format!("{name}.json"))).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.json"), golden["config"].to_string()).unwrap();
        let decoder = decoder(folder.path());
        formula::write_safetensors(folder.path(), &tensor_shapes(&decoder), formula::weight).unwrap();
        let expected = std::fs::read(goldens.join(format!("{name}.safetensors"))).unwrap();
        Self { name, folder, decoder, golden, expected }
    }

    fn ids(&self, key: &str) -> Vec<u32> {
        self.golden[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    fn expected(&self, key: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(key).unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name));
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn num_gradients(&self) -> usize {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        file.names().iter().filter(|name| name.starts_with("gradient/")).count()
    }

    /// Both answers on the prompt, each with its end: the last token that is not padding.
    fn forest(&self) -> Forest {
        let [prompt, chosen, rejected] = ["prompt", "chosen", "rejected"].map(|key| self.ids(key));
        let pad = self.golden["config"]["pad_token_id"].as_u64().unwrap() as u32;
        let (p, c, r) = (prompt.len() as u32, chosen.len() as u32, rejected.len() as u32);
        let segment = |range, parent, first_position| Segment { range, parent, first_position };
        let segments = vec![
            segment(0..p, None, 0),
            segment(p..p + c, Some(0), p),
            segment(p + c..p + c + r, Some(0), p),
        ];
        let end = |start: u32, answer: &[u32], sequence| {
            let last = answer.iter().rposition(|&token| token != pad).unwrap() as u32;
            Prediction { hidden_row: start + last, target: 0, sequence }
        };
        let ends = vec![end(p, &chosen, 0), end(p + c, &rejected, 1)];
        Forest::new([prompt, chosen, rejected].concat(), segments, ends, 2).unwrap()
    }

    fn load(&self) -> FlatWeights {
        let folder = ModelFolder::open_reward(self.folder.path(), 0).unwrap();
        folder.weights(&self.decoder).unwrap().load(&self.decoder, &cpu(), MemoryKind::Master).unwrap()
    }
}

fn decoder(folder: &Path) -> Decoder {
    Decoder::new(ModelFolder::open_reward(folder, 0).unwrap().spec().clone(), 32).unwrap()
}

/// Derivatives of the golden's loss, `−ln σ(c − r − 0.25) + 0.125 (c + r)²`, by the two scores.
fn derivatives(scores: &[f32]) -> [f32; 2] {
    let [c, r] = [scores[0], scores[1]].map(f64::from);
    let (slope, pull) = (-1.0 / (1.0 + (c - r - 0.25).exp()), 0.25 * (c + r));
    [slope + pull, pull - slope].map(|d| d as f32)
}

/// Scores and gradients of the tree with a shared prompt, against transformers.
fn compare(dtype: DType, of_scores: f64, of_gradients: f64) {
    for name in ALL {
        let golden = Golden::new(name);
        let (weights, forest, device) = (golden.load(), golden.forest(), cpu());
        let expected = golden.expected("scores");
        for checkpointing in [Checkpointing::None, Checkpointing::Block] {
            let (scores, sums) = train(
                &device,
                &golden.decoder,
                &weights,
                dtype,
                checkpointing,
                &forest,
                &derivatives(&expected),
            );
            let error = relative_error(&scores.log_prob, &expected);
            assert!(error <= of_scores, "{name}: scores {:?} of {expected:?}, {error:.1e}", scores.log_prob);
            let found = tensors(&golden.decoder, &sums);
            assert_eq!(found.len(), golden.num_gradients(), "{name}");
            assert!(found.iter().any(|(tensor, _)| tensor == "score.weight"));
            for (tensor, gradient) in &found {
                let error = relative_error(gradient, &golden.expected(&format!("gradient/{tensor}")));
                assert!(error <= of_gradients, "{name}: gradient of {tensor}: {error:.1e}");
            }
        }
    }
}

#[test]
fn scores_and_gradients_in_f32() {
    compare(DType::F32, SCORES, GRADIENTS);
}

/// The tolerances of language models in bf16; a score is a sum of both signs, and loses digits against its terms.
#[test]
fn scores_and_gradients_in_bf16() {
    compare(DType::Bf16, 6e-2, 6e-2);
}

/// The language model that a golden's folder would be.
fn language_model(golden: &Golden) -> TempDir {
    let folder = TempDir::new().unwrap();
    let mut config = golden.golden["config"].clone();
    config["architectures"] = json!(["LlamaForCausalLM"]);
    config["eos_token_id"] = json!(2);
    for key in ["id2label", "label2id", "pad_token_id"] {
        config.as_object_mut().unwrap().remove(key);
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let spec = ModelFolder::open(folder.path()).unwrap().spec().clone();
    let shapes = tensor_shapes(&Decoder::new(spec, 32).unwrap());
    assert!(shapes.iter().any(|(name, _)| name == "lm_head.weight"));
    formula::write_safetensors(folder.path(), &shapes, formula::weight).unwrap();
    folder
}

fn score(decoder: &Decoder, weights: &FlatWeights, forest: &Forest) -> Vec<f32> {
    let device = cpu();
    let mut scores = HeadScores::default();
    let walk = LayerExecutor::new(decoder, &device, DType::F32, Checkpointing::None);
    walk.forward(&mut ResidentWeights::new(decoder, weights, None), forest, &mut scores).unwrap();
    scores.log_prob
}

#[test]
fn a_language_model_begins_a_score_head_and_is_written_as_a_classifier() {
    let golden = Golden::new("llama");
    let (base, device) = (language_model(&golden), cpu());
    let begin = |seed| {
        let folder = ModelFolder::open_reward(base.path(), seed).unwrap().with_pad(63);
        assert!(folder.begins_score_head());
        let decoder = Decoder::new(folder.spec().clone(), 32).unwrap();
        let weights = folder.weights(&decoder).unwrap().load(&decoder, &device, MemoryKind::Master).unwrap();
        (folder, decoder, weights)
    };
    let (folder, decoder, weights) = begin(1);
    let begun = tensors(&decoder, &weights);
    for (name, values) in &begun {
        if name != "score.weight" {
            assert_eq!(*values, formula::weight(name, values.len()), "{name} is the base's");
        }
    }
    let head = |tensors: &[(String, Vec<f32>)]| {
        tensors.iter().find(|(name, _)| name == "score.weight").unwrap().1.clone()
    };
    assert_eq!(head(&begun).len(), 16);
    // Sixteen numbers of deviation 0.02: none is beyond six of them, and not all are small.
    assert!(head(&begun).iter().all(|w| w.abs() < 0.12) && head(&begun).iter().any(|w| w.abs() > 0.005));
    let (_, other, of_other) = begin(2);
    assert_ne!(head(&tensors(&other, &of_other)), head(&begun), "another seed draws another head");

    let saved = TempDir::new().unwrap();
    let destination = saved.path().join("reward");
    let save = Save { template: &folder, decoder: &decoder, dtype: DType::F32, shard_bytes: 1 << 30 };
    save.write_resident(&destination, &device, &weights).unwrap();
    let config: Value =
        serde_json::from_slice(&std::fs::read(destination.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!((&config["id2label"], &config["pad_token_id"]), (&json!({"0": "LABEL_0"}), &json!(63)));
    let again = ModelFolder::open_reward(&destination, 7).unwrap();
    assert!(!again.begins_score_head());
    // The padding token is in the config now.
    let mut expected = folder.spec().clone();
    expected.embedding.padding = Some(63);
    assert_eq!(*again.spec(), expected);
    let read = again.weights(&decoder).unwrap().load(&decoder, &device, MemoryKind::Master).unwrap();
    let forest = golden.forest();
    assert_eq!(score(&decoder, &read, &forest), score(&decoder, &weights, &forest), "the same bits");
}

#[test]
fn what_is_no_reward_model_is_refused() {
    let golden = Golden::new("llama");
    let path = golden.folder.path();
    let error = |found: tandem_model::Result<ModelFolder>| found.err().unwrap().to_string();
    let text = error(ModelFolder::open(path));
    assert!(text.contains("this is a reward model, which scores texts"), "{text}");

    let mut config = golden.golden["config"].clone();
    config["id2label"] = json!({"0": "bad", "1": "good"});
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let text = error(ModelFolder::open_reward(path, 0));
    assert!(text.contains("a classifier of 2 labels is no reward model"), "{text}");

    config["architectures"] = json!(["BertForSequenceClassification"]);
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let text = error(ModelFolder::open_reward(path, 0));
    assert!(text.contains("known: LlamaForSequenceClassification, MistralFor"), "{text}");
}

/// The head of a classifier is not drawn: what lacks it is no reward model.
#[test]
fn a_classifier_without_its_head_is_refused() {
    let golden = Golden::new("llama");
    let mut shapes = tensor_shapes(&golden.decoder);
    shapes.retain(|(name, _)| name != "score.weight");
    formula::write_safetensors(golden.folder.path(), &shapes, formula::weight).unwrap();
    let folder = ModelFolder::open_reward(golden.folder.path(), 3).unwrap();
    let error = folder.weights(&golden.decoder).err().unwrap().to_string();
    assert!(error.contains("missing: score.weight [1, 16]"), "{error}");
}
