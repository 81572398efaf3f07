//! `config.json` from metadata.

use serde_json::{Map, Value as Json, json};

use crate::quants::Quant;
use crate::{Gguf, Result};

/// Architecture of llama.cpp, and the HF class that it stands for.
pub(crate) struct Architecture {
    name: &'static str,
    class: &'static str,
    activation: &'static str,
    /// Whether llama.cpp's converter permutes the rows of queries and keys.
    pub(crate) permutes: bool,
    /// Whether llama.cpp's converter adds one to the norms' weights.
    pub(crate) norms_from_one: bool,
}

const ARCHITECTURES: [Architecture; 4] = [
    Architecture {
        name: "llama",
        class: "LlamaForCausalLM",
        activation: "silu",
        permutes: true,
        norms_from_one: false,
    },
    Architecture {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        activation: "silu",
        permutes: false,
        norms_from_one: false,
    },
    Architecture {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        activation: "silu",
        permutes: false,
        norms_from_one: false,
    },
    Architecture {
        name: "gemma",
        class: "GemmaForCausalLM",
        activation: "gelu_pytorch_tanh",
        permutes: false,
        norms_from_one: true,
    },
];

/// Keys of an architecture that describe models which are not supported, and their harmless value.
const REFUSED: [(&str, u64); 4] = [
    ("expert_count", 0),
    ("attention.sliding_window", 0),
    ("attention.key_length_mla", 0),
    ("nextn_predict_layers", 0),
];

impl Gguf {
    pub(crate) fn architecture(&self) -> Result<&'static Architecture> {
        let name = self.text("general.architecture")?;
        let name = name.ok_or_else(|| self.error("general.architecture is missing"))?;
        ARCHITECTURES.iter().find(|known| known.name == name).ok_or_else(|| {
            let known: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
            self.error(format!(
                "general.architecture is \"{name}\", which is not supported; known: {}. \
                 Use the model's HF folder",
                known.join(", ")
            ))
        })
    }

    /// Returns query heads and key/value heads.
    pub(crate) fn heads(&self, architecture: &Architecture) -> Result<[usize; 2]> {
        let heads = self.count(architecture, "attention.head_count")?;
        let kv_heads = self.count_if(architecture, "attention.head_count_kv")?.unwrap_or(heads);
        Ok([heads, kv_heads])
    }

    fn count_if(&self, architecture: &Architecture, key: &str) -> Result<Option<usize>> {
        let key = format!("{}.{key}", architecture.name);
        let Some(count) = self.int(&key)? else { return Ok(None) };
        if count == 0 || count > 1 << 31 {
            return Err(self.error(format!("{key} is {count}, expected 1 to 2147483648")));
        }
        Ok(Some(count as usize))
    }

    fn count(&self, architecture: &Architecture, key: &str) -> Result<usize> {
        let count = self.count_if(architecture, key)?;
        count.ok_or_else(|| self.error(format!("{}.{key} is missing", architecture.name)))
    }

    /// Returns the `config.json` that the metadata stand for.
    ///
    /// # Errors
    /// If a key is missing or has the wrong type, or describes something unsupported.
    pub fn config(&self) -> Result<Json> {
        let architecture = self.architecture()?;
        let name = architecture.name;
        for (key, harmless) in REFUSED {
            let key = format!("{name}.{key}");
            if let Some(found) = self.int(&key)?.filter(|&found| found != harmless) {
                return Err(self.error(format!("{key} is {found}, which is not supported")));
            }
        }
        let table = self.tensor("token_embd.weight");
        let table = table.ok_or_else(|| self.error("tensor token_embd.weight is missing"))?;
        let hidden = self.count(architecture, "embedding_length")?;
        let [heads, kv_heads] = self.heads(architecture)?;
        let head_dim = match self.count_if(architecture, "attention.key_length")? {
            Some(width) => width,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(self
                    .error(format!("{name}.embedding_length {hidden} is not a multiple of {heads} heads")));
            }
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(width) = self.count_if(architecture, key)?.filter(|&width| width != head_dim) {
                return Err(self.error(format!(
                    "{name}.{key} is {width}, but heads are {head_dim} wide, which is not supported"
                )));
            }
        }
        let eps = self.number(&format!("{name}.attention.layer_norm_rms_epsilon"))?;
        let eps =
            eps.ok_or_else(|| self.error(format!("{name}.attention.layer_norm_rms_epsilon is missing")))?;
        let theta = self.number(&format!("{name}.rope.freq_base"))?.unwrap_or(10_000.0);
        let positions = self.count(architecture, "context_length")?;
        let mut config = json!({
            "architectures": [architecture.class],
            "model_type": name,
            "dtype": self.dtype(),
            "vocab_size": table.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.count(architecture, "feed_forward_length")?,
            "num_hidden_layers": self.count(architecture, "block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": architecture.activation,
            "max_position_embeddings": positions,
            "rms_norm_eps": eps,
            "rope_theta": theta,
            "tie_word_embeddings": self.tensor("output.weight").is_none(),
        });
        let map = config.as_object_mut().expect("made above");
        if let Some(scaling) = self.rope_scaling(name, head_dim, theta, positions)? {
            map.insert("rope_scaling".into(), scaling);
        }
        if name == "llama" {
            map.insert("attention_bias".into(), self.tensor("blk.0.attn_q.bias").is_some().into());
            map.insert("mlp_bias".into(), self.tensor("blk.0.ffn_up.bias").is_some().into());
        }
        if name == "gemma" {
            map.insert("hidden_activation".into(), architecture.activation.into());
        }
        for (key, id) in self.token_ids()? {
            map.insert(key.into(), id.into());
        }
        Ok(config)
    }

    /// Returns bf16 if every matrix is stored so, else f32: quantised values need it.
    fn dtype(&self) -> &'static str {
        let mut matrices = self.tensors().iter().filter(|tensor| tensor.shape.len() > 1);
        if matrices.all(|tensor| tensor.quant == Quant::Bf16) { "bfloat16" } else { "float32" }
    }

    /// Returns `rope_scaling`, from the keys `rope.scaling.*` or the tensor of rotary factors.
    fn rope_scaling(
        &self,
        name: &str,
        head_dim: usize,
        theta: f64,
        positions: usize,
    ) -> Result<Option<Json>> {
        let key = |key: &str| format!("{name}.rope.scaling.{key}");
        let original = self.int(&key("original_context_length"))?;
        if let Some(factors) = self.tensor("rope_freqs.weight") {
            if factors.quant != Quant::F32 || factors.shape != [head_dim / 2] {
                let (quant, shape) = (factors.quant, &factors.shape);
                return Err(self.error(format!(
                    "tensor rope_freqs.weight is {shape:?} of {quant}, expected [{}] of f32",
                    head_dim / 2
                )));
            }
            let stored = self.read_f32(factors)?;
            let originals = [original, Some(8192), Some(positions as u64)];
            let found = originals.into_iter().flatten().find_map(|original| llama3(&stored, theta, original));
            return found.map(Some).ok_or_else(|| {
                self.error("tensor rope_freqs.weight holds other factors than Llama 3's rotary scaling, which is not supported")
            });
        }
        let factor = self.number(&key("factor"))?;
        // Older files have the factor of linear scaling alone.
        let linear = self.number(&format!("{name}.rope.scale_linear"))?.filter(|&factor| factor != 1.0);
        let kind = self.text(&key("type"))?.unwrap_or(if linear.is_some() { "linear" } else { "none" });
        let factor = || {
            let factor = factor.or(linear);
            factor.ok_or_else(|| {
                self.error(format!("{} is missing, which {kind} scaling needs", key("factor")))
            })
        };
        let mut scaling = Map::new();
        match kind {
            "none" => return Ok(None),
            "linear" => {}
            "yarn" => {
                let original = original.ok_or_else(|| {
                    self.error(format!("{} is missing, which yarn needs", key("original_context_length")))
                })?;
                scaling.insert("original_max_position_embeddings".into(), original.into());
                let optional = [
                    ("attn_factor", "attention_factor"),
                    ("yarn_beta_fast", "beta_fast"),
                    ("yarn_beta_slow", "beta_slow"),
                ];
                for (theirs, ours) in optional {
                    if let Some(number) = self.number(&key(theirs))? {
                        scaling.insert(ours.into(), number.into());
                    }
                }
            }
            other => {
                return Err(self.error(format!(
                    "{} is \"{other}\", which is not supported; known: none, linear, yarn",
                    key("type")
                )));
            }
        }
        scaling.insert("rope_type".into(), kind.into());
        scaling.insert("factor".into(), factor()?.into());
        Ok(Some(Json::Object(scaling)))
    }
}

/// Returns Llama 3's scaling if it gives these factors with that original context length.
fn llama3(stored: &[f32], theta: f64, original: u64) -> Option<Json> {
    let factor = f64::from(stored.iter().copied().fold(1.0, f32::max));
    let (low, high, original) = (1.0, 4.0, original as f64);
    let expected = (0..stored.len()).map(|i| {
        let frequency = theta.powf(-(i as f64) / stored.len() as f64);
        let turns = original * frequency / std::f64::consts::TAU;
        let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    });
    // llama.cpp's converter computes in f32.
    let is_near = |(stored, expected): (&f32, f64)| (f64::from(*stored) / expected - 1.0).abs() < 1e-4;
    (factor > 1.0 && stored.iter().zip(expected).all(is_near)).then(|| {
        json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        })
    })
}
