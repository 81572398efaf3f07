//! Logits and log-probabilities of every model folder, in f32 and in bf16.

use std::path::Path;

use anyhow::{Context, Result};
use safetensors::SafeTensors;
use serde_json::Value;
use tandem_data::forest::{ForestBuilder, PairTokens};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, MemoryKind, ops};
use tandem_model::{Checkpointing, Decoder, FlatWeights, LayerExecutor, ModelFolder, ResidentWeights};

use crate::numbers::{f32s, floats, ids, read_json};
use crate::qwen2;
use crate::report::{Report, largest_error, length};
use crate::runner::Runner;

/// Tolerances of a compute type.
#[derive(Clone, Copy)]
struct Allowed {
    dtype: DType,
    /// Logit or token log-probability, relative to the largest logit.
    element: f64,
    /// All logits: norm of the difference, relative to the norm of the logits.
    whole: f64,
    /// Summed log-probability, relative.
    sum: f64,
}

/// Correct f32 implementations differ by 2e-5. In bf16, torch's autocast is up to 1.7e-2 of the
/// largest logit away from its own f32 on these models (1.4e-2 as a whole), and weights held in
/// bf16 up to 2.4e-2; over a sum the roundings average out.
const ALLOWED: [Allowed; 2] = [
    Allowed { dtype: DType::F32, element: 2e-5, whole: 2e-5, sum: 2e-5 },
    Allowed { dtype: DType::Bf16, element: 2e-2, whole: 1.4e-2, sum: 1e-2 },
];

struct Model {
    decoder: Decoder,
    weights: FlatWeights,
}

impl Model {
    fn load(device: &Device, folder: &Path) -> Result<Self> {
        let folder = ModelFolder::open(folder)?;
        let spec = folder.spec().clone();
        let positions = spec.embedding.learned_positions.unwrap_or(1024);
        let decoder = Decoder::new(spec, positions)?;
        let weights = folder.weights(&decoder)?.load(&decoder, device, MemoryKind::Master)?;
        Ok(Self { decoder, weights })
    }
}

/// One model on one kind of data.
struct Case<'a> {
    name: String,
    rows: &'a [Value],
    expected: &'a Value,
    logits: Vec<f64>,
}

/// Checks everything in `forward.json` and `logits.safetensors`.
pub(crate) fn check(folder: &Path, device: &Device, runner: &Runner, report: &mut Report) -> Result<()> {
    let expected = read_json(&folder.join("forward.json"))?;
    let tokens = read_json(&folder.join("tokens.json"))?;
    let bytes = std::fs::read(folder.join("logits.safetensors"))?;
    let logits = SafeTensors::deserialize(&bytes).context("logits.safetensors")?;
    for (model, by_data) in expected.as_object().context("forward.json holds no object")? {
        for (side, suffix) in [("policy", ""), ("ref", "-ref")] {
            let path = folder.join("models").join(format!("{model}{suffix}"));
            let loaded = match Model::load(device, &path) {
                Ok(loaded) => loaded,
                Err(error) if error.to_string().contains("architecture") => {
                    report.not_implemented(format!("forward {model} {side}"), error);
                    continue;
                }
                Err(error) => {
                    report.broken(format!("forward {model} {side}"), format!("{error:#}"));
                    continue;
                }
            };
            for (data, by_side) in by_data.as_object().into_iter().flatten() {
                let key = format!("{model}/{data}/{side}/logits_row0_pos0..7");
                let tensor = logits.tensor(&key).with_context(|| key)?;
                let rows = qwen2::rows(folder, model, data, &tokens[data], runner)?;
                let case = Case {
                    name: format!("{model} {data} {side}"),
                    rows: &rows,
                    expected: &by_side[side],
                    logits: f32s(tensor.data()),
                };
                for allowed in ALLOWED {
                    if let Err(error) = case.check(device, &loaded, allowed, report) {
                        report
                            .broken(format!("forward {} {}", case.name, allowed.dtype), format!("{error:#}"));
                    }
                }
            }
        }
    }
    Ok(())
}

impl Case<'_> {
    fn check(&self, device: &Device, model: &Model, allowed: Allowed, report: &mut Report) -> Result<()> {
        let dtype = allowed.dtype;
        let decoder = &model.decoder;
        let copy = match dtype {
            DType::F32 => None,
            _ => Some(model.weights.compute_copy(decoder, device, MemoryKind::Weights, dtype)?),
        };
        let mut source = ResidentWeights::new(decoder, &model.weights, copy.as_ref());
        let walk = LayerExecutor::new(decoder, device, dtype, Checkpointing::None);
        let name = format!("{} {dtype}", self.name);

        let mut first = ids(&self.rows[0]["prompt_ids"]);
        first.extend(ids(&self.rows[0]["chosen_ids"]));
        let argmax = ids(&self.expected["argmax_row0_pos0..15"]);
        let rows: Vec<u32> = (0..argmax.len() as u32).collect();
        let tensor = walk.logits(&mut source, &Forest::sequence(first)?, &rows)?;
        let vocabulary = tensor.cols();
        let ours: Vec<f64> = ops::read_f32(device, tensor.view())?.into_iter().map(f64::from).collect();
        let largest = self.logits.iter().fold(0.0f64, |m, l| m.max(l.abs()));
        let kept = &ours[..self.logits.len().min(ours.len())];
        let error = largest_error(kept, &self.logits, largest);
        report.within(format!("logits {name}"), error, allowed.element);
        let distance = length(kept.iter().zip(&self.logits).map(|(a, b)| a - b));
        let error = distance / length(self.logits.iter().copied());
        report.within(format!("logits as a whole {name}"), error, allowed.whole);
        if dtype == DType::F32 {
            report.same(format!("argmax {name}"), same_argmax(&ours, vocabulary, &argmax));
        }

        let forest = self.forest()?;
        let mut scores = HeadScores::default();
        walk.forward(&mut source, &forest, &mut scores)?;
        let mut by_sequence = vec![Vec::new(); forest.num_sequences as usize];
        for (prediction, &log_prob) in forest.predictions.iter().zip(&scores.log_prob) {
            by_sequence[prediction.sequence as usize].push(f64::from(log_prob));
        }
        for (side, answer) in ["chosen", "rejected"].into_iter().enumerate() {
            let expected = floats(&self.expected[format!("per_token_logps_pair0_{answer}")]);
            let error = largest_error(&by_sequence[side], &expected, largest);
            report.within(format!("token log-probs {answer} {name}"), error, allowed.element);
            let expected = floats(&self.expected[format!("sum_logps_{answer}")]);
            let sums = by_sequence.iter().skip(side).step_by(2).map(|tokens| tokens.iter().sum::<f64>());
            let error = sums.zip(&expected).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
            let check = format!("summed log-probs {answer} {name}");
            report.within(check, error, allowed.sum);
        }
        Ok(())
    }

    /// All eight pairs in one batch, each prompt computed once.
    fn forest(&self) -> Result<Forest> {
        let mut builder = ForestBuilder::default();
        for row in self.rows {
            let (prompt, chosen, rejected) =
                (ids(&row["prompt_ids"]), ids(&row["chosen_ids"]), ids(&row["rejected_ids"]));
            builder.push_pair(&PairTokens {
                prompt: &prompt,
                unseen: [0, 0],
                chosen: &chosen,
                rejected: &rejected,
            });
        }
        Ok(builder.finish()?)
    }
}

fn same_argmax(logits: &[f64], vocabulary: usize, expected: &[u32]) -> Result<(), String> {
    for (position, (row, &expected)) in logits.chunks_exact(vocabulary).zip(expected).enumerate() {
        let best = (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        if best != expected as usize {
            return Err(format!("position {position}: token {best}, expected {expected}"));
        }
    }
    Ok(())
}
