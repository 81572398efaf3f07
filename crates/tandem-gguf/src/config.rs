//! `config.json` from metadata.

use serde_json::{Map, Value as Json, json};

use crate::quants::Quant;
use crate::{Gguf, Result};

/// Architecture of llama.cpp, and the HF class that it stands for.
pub(crate) struct Architecture {
    /// Name in `general.architecture`, and beginning of the keys.
    name: &'static str,
    model_type: &'static str,
    class: &'static str,
    /// Activation, which llama.cpp fixes, and its key in `config.json`.
    activation: (&'static str, &'static str),
    /// Key of the norms' epsilon in the file, and in `config.json`.
    epsilon: (&'static str, &'static str),
    /// Whether llama.cpp's converter permutes the rows of queries and keys.
    pub(crate) permutes: bool,
    /// Whether llama.cpp's converter adds one to the norms' weights.
    pub(crate) norms_from_one: bool,
    /// Whether a part of a head may rotate.
    partial: bool,
    /// Whether layers may have a sliding window.
    windows: bool,
    /// Modules that are called otherwise than in Llama, by GGUF's name and HF's: of a block without
    /// its index.
    pub(crate) modules: &'static [(&'static str, &'static str)],
    /// Adds the keys that other architectures have not.
    describe: fn(&Reader, &mut Map<String, Json>) -> Result<()>,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    class: "LlamaForCausalLM",
    activation: ("hidden_act", "silu"),
    epsilon: RMS,
    permutes: true,
    norms_from_one: false,
    partial: false,
    windows: false,
    modules: &[],
    describe: |file, config| {
        config.insert("mlp_bias".into(), file.has("blk.0.ffn_up.bias"));
        file.attention_bias(config)
    },
};

const RMS: (&str, &str) = ("attention.layer_norm_rms_epsilon", "rms_norm_eps");

/// Description shared by Llama's relatives whose rows are not permuted and that have no further keys.
const PLAIN: Architecture = Architecture { permutes: false, describe: |_, _| Ok(()), ..LLAMA };

/// Names of OLMo 2's norms, which stand after the halves.
const NORMS_AFTER: &[(&str, &str)] =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

/// Names of Gemma 2's norms, which stand before and after the halves.
const NORMS_AROUND: &[(&str, &str)] = &[
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const ARCHITECTURES: [Architecture; 20] = [
    LLAMA,
    Architecture { name: "qwen2", model_type: "qwen2", class: "Qwen2ForCausalLM", ..PLAIN },
    Architecture { name: "qwen3", model_type: "qwen3", class: "Qwen3ForCausalLM", ..PLAIN },
    Architecture {
        name: "mistral3",
        model_type: "ministral3",
        class: "Ministral3ForCausalLM",
        describe: |_, _| Ok(()),
        ..LLAMA
    },
    Architecture {
        name: "gemma",
        model_type: "gemma",
        class: "GemmaForCausalLM",
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        norms_from_one: true,
        describe: |_, config| {
            config.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
            Ok(())
        },
        ..PLAIN
    },
    Architecture {
        name: "gemma2",
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        norms_from_one: true,
        windows: true,
        modules: NORMS_AROUND,
        describe: |file, config| {
            // llama.cpp knows the largest model by its number of layers.
            file.scale_of_queries(config, 46);
            file.copy_window(config)?;
            file.copy_numbers(
                config,
                &[
                    ("attn_logit_softcapping", "attn_logit_softcapping"),
                    ("final_logit_softcapping", "final_logit_softcapping"),
                ],
            )
        },
        ..PLAIN
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        norms_from_one: true,
        windows: true,
        modules: NORMS_AROUND,
        describe: |file, config| {
            file.scale_of_queries(config, 62);
            file.copy_window(config)?;
            file.layer_types(config)?;
            let numbers = [
                ("final_logit_softcapping", "final_logit_softcapping"),
                ("rope.freq_base_swa", "rope_local_base_freq"),
            ];
            file.copy_numbers(config, &numbers)
        },
        ..PLAIN
    },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        partial: true,
        windows: true,
        modules: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        describe: |file, config| {
            file.copy_window(config)?;
            file.longrope(config)
        },
        ..PLAIN
    },
    Architecture {
        name: "phi2",
        model_type: "phi",
        class: "PhiForCausalLM",
        activation: ("hidden_act", "gelu_new"),
        epsilon: ("attention.layer_norm_epsilon", "layer_norm_eps"),
        partial: true,
        modules: &[
            ("attn_output", "self_attn.dense"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
            ("output_norm", "model.final_layernorm"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "olmo2",
        model_type: "olmo2",
        class: "Olmo2ForCausalLM",
        windows: true,
        modules: NORMS_AFTER,
        describe: |file, config| {
            file.attention_bias(config)?;
            // OLMo 3 has the same name, and windows.
            if file.copy_window(config)? {
                config.insert("model_type".into(), "olmo3".into());
                config.insert("architectures".into(), json!(["Olmo3ForCausalLM"]));
                file.layer_types(config)?;
                file.rope_by_type(config)?;
            }
            Ok(())
        },
        ..PLAIN
    },
    Architecture {
        name: "smollm3",
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        // llama.cpp rotates in three of four layers, as SmolLM3 does where the config says nothing.
        ..LLAMA
    },
    Architecture {
        name: "granite",
        model_type: "granite",
        class: "GraniteForCausalLM",
        describe: |file, config| {
            (LLAMA.describe)(file, config)?;
            file.copy_numbers(
                config,
                &[
                    ("attention.scale", "attention_multiplier"),
                    ("embedding_scale", "embedding_multiplier"),
                    ("residual_scale", "residual_multiplier"),
                    ("logit_scale", "logits_scaling"),
                ],
            )
        },
        ..LLAMA
    },
    Architecture {
        name: "glm4",
        model_type: "glm4",
        class: "Glm4ForCausalLM",
        partial: true,
        modules: &[
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
        ],
        describe: |file, config| file.attention_bias(config),
        ..PLAIN
    },
    Architecture {
        name: "ernie4_5",
        model_type: "ernie4_5",
        class: "Ernie4_5ForCausalLM",
        describe: |file, config| file.use_bias(config),
        ..PLAIN
    },
    Architecture {
        name: "seed_oss",
        model_type: "seed_oss",
        class: "SeedOssForCausalLM",
        modules: &[("post_attention_norm", "post_attention_layernorm")],
        describe: |file, config| {
            (LLAMA.describe)(file, config)?;
            config.insert("attention_out_bias".into(), file.has("blk.0.attn_output.bias"));
            Ok(())
        },
        ..PLAIN
    },
    Architecture {
        name: "exaone4",
        model_type: "exaone4",
        class: "Exaone4ForCausalLM",
        windows: true,
        modules: NORMS_AFTER,
        describe: |file, config| {
            if file.copy_window(config)? {
                return file.layer_types(config);
            }
            config.insert("sliding_window".into(), Json::Null);
            Ok(())
        },
        ..PLAIN
    },
    Architecture {
        name: "starcoder2",
        model_type: "starcoder2",
        class: "Starcoder2ForCausalLM",
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        epsilon: ("attention.layer_norm_epsilon", "norm_epsilon"),
        modules: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        describe: |file, config| file.use_bias(config),
        ..PLAIN
    },
    Architecture {
        name: "arcee",
        model_type: "arcee",
        class: "ArceeForCausalLM",
        activation: ("hidden_act", "relu2"),
        ..LLAMA
    },
    Architecture {
        name: "cohere2",
        model_type: "cohere2",
        class: "Cohere2ForCausalLM",
        epsilon: ("attention.layer_norm_epsilon", "layer_norm_eps"),
        windows: true,
        describe: |file, config| {
            file.attention_bias(config)?;
            file.copy_window(config)?;
            file.layer_types(config)?;
            file.copy_numbers(config, &[("logit_scale", "logit_scale")])
        },
        ..PLAIN
    },
    Architecture {
        name: "hunyuan-dense",
        model_type: "hunyuan_v1_dense",
        class: "HunYuanDenseV1ForCausalLM",
        modules: &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")],
        describe: |file, config| file.attention_bias(config),
        ..PLAIN
    },
];

/// Keys of an architecture that describe models which are not supported, and their harmless value.
const REFUSED: [(&str, u64); 3] =
    [("expert_count", 0), ("attention.key_length_mla", 0), ("nextn_predict_layers", 0)];

/// Tensors that hold rotary factors, which belong into the config.
pub(crate) const ROTARY_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// A file's metadata, as a description of its architecture reads them.
struct Reader<'a> {
    file: &'a Gguf,
    architecture: &'a Architecture,
    layers: usize,
    hidden: usize,
    heads: usize,
    head_dim: usize,
}

impl Reader<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    fn has(&self, tensor: &str) -> Json {
        self.file.tensor(tensor).is_some().into()
    }

    /// Says whether projections of attention have a bias.
    fn attention_bias(&self, config: &mut Map<String, Json>) -> Result<()> {
        config.insert("attention_bias".into(), self.has("blk.0.attn_q.bias"));
        Ok(())
    }

    /// Says whether all projections have a bias.
    fn use_bias(&self, config: &mut Map<String, Json>) -> Result<()> {
        config.insert("use_bias".into(), self.has("blk.0.attn_q.bias"));
        Ok(())
    }

    /// Copies numbers that are present; others become `null`, which HF's classes take for their
    /// absence.
    fn copy_numbers(&self, config: &mut Map<String, Json>, keys: &[(&str, &str)]) -> Result<()> {
        for (theirs, ours) in keys {
            if let Some(number) = self.file.number(&self.key(theirs))? {
                config.insert((*ours).into(), number.into());
            }
        }
        Ok(())
    }

    /// Copies the sliding window, if there is one; returns whether there is.
    fn copy_window(&self, config: &mut Map<String, Json>) -> Result<bool> {
        let window = self.file.int(&self.key("attention.sliding_window"))?.filter(|&window| window != 0);
        if let Some(window) = window {
            config.insert("sliding_window".into(), window.into());
        }
        Ok(window.is_some())
    }

    /// Copies which layers have a window, where the file says so.
    fn layer_types(&self, config: &mut Map<String, Json>) -> Result<()> {
        let key = self.key("attention.sliding_window_pattern");
        let Some(slides) = self.file.ints(&key)? else { return Ok(()) };
        if slides.len() != self.layers {
            return Err(self.file.error(format!("{key} lists {} of {} layers", slides.len(), self.layers)));
        }
        let kind = |&slides: &i64| if slides != 0 { "sliding_attention" } else { "full_attention" };
        config.insert("layer_types".into(), slides.iter().map(kind).collect());
        Ok(())
    }

    /// Sets the scale of Gemma's queries, which is another in the model of `largest` layers.
    fn scale_of_queries(&self, config: &mut Map<String, Json>, largest: usize) {
        let width = if self.layers == largest { self.hidden / self.heads } else { self.head_dim };
        config.insert("query_pre_attn_scalar".into(), width.into());
    }

    /// Moves the rotary parameters to full attention; sliding attention has its base alone.
    fn rope_by_type(&self, config: &mut Map<String, Json>) -> Result<()> {
        let theta = config.remove("rope_theta").unwrap_or_default();
        let local = self.file.number(&self.key("rope.freq_base_swa"))?.map_or(theta.clone(), Json::from);
        let mut full = match config.remove("rope_scaling") {
            Some(Json::Object(scaling)) => scaling,
            _ => Map::from_iter([("rope_type".to_owned(), "default".into())]),
        };
        full.insert("rope_theta".into(), theta);
        let sliding = json!({"rope_type": "default", "rope_theta": local});
        let tables = json!({"full_attention": full, "sliding_attention": sliding});
        config.insert("rope_parameters".into(), tables);
        Ok(())
    }

    /// Copies the divisors of longrope, if the file has them.
    fn longrope(&self, config: &mut Map<String, Json>) -> Result<()> {
        let read = |name: &str| -> Result<Option<Vec<f64>>> {
            let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
            if tensor.quant != Quant::F32 {
                return Err(self.file.error(format!("tensor {name} is {}, expected f32", tensor.quant)));
            }
            Ok(Some(self.file.read_f32(tensor)?.into_iter().map(shortest).collect()))
        };
        let original = self.file.int(&self.key("rope.scaling.original_context_length"))?;
        if let Some(original) = original {
            config.insert("original_max_position_embeddings".into(), original.into());
        }
        match (read("rope_factors_short.weight")?, read("rope_factors_long.weight")?) {
            (None, None) => Ok(()),
            (Some(short), Some(long)) => {
                let scaling = json!({"rope_type": "longrope", "short_factor": short, "long_factor": long});
                config.insert("rope_scaling".into(), scaling);
                Ok(())
            }
            _ => {
                Err(self.file.error("has only one of rope_factors_short.weight and rope_factors_long.weight"))
            }
        }
    }
}

/// Returns the number with the fewest digits that f32 rounds to `x`: the one that was written.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

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
        let sections = format!("{name}.rope.dimension_sections");
        if self.value(&sections).is_some() {
            return Err(self.error(format!(
                "{sections} is present: this is the text model of a vision–language model, which is not supported; \
                 use the model's HF folder"
            )));
        }
        let window = (!architecture.windows).then_some(("attention.sliding_window", 0));
        for (key, harmless) in REFUSED.into_iter().chain(window) {
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
        let rotary = self.count_if(architecture, "rope.dimension_count")?.filter(|_| architecture.partial);
        let whole = if architecture.partial { None } else { Some("rope.dimension_count") };
        for key in std::iter::once("attention.value_length").chain(whole) {
            if let Some(width) = self.count_if(architecture, key)?.filter(|&width| width != head_dim) {
                return Err(self.error(format!(
                    "{name}.{key} is {width}, but heads are {head_dim} wide, which is not supported"
                )));
            }
        }
        let (their_eps, eps_key) = architecture.epsilon;
        let eps = self.number(&format!("{name}.{their_eps}"))?;
        let eps = eps.ok_or_else(|| self.error(format!("{name}.{their_eps} is missing")))?;
        let theta = self.number(&format!("{name}.rope.freq_base"))?.unwrap_or(10_000.0);
        let positions = self.count(architecture, "context_length")?;
        let layers = self.count(architecture, "block_count")?;
        let mut config = json!({
            "architectures": [architecture.class],
            "model_type": architecture.model_type,
            "dtype": self.dtype(),
            "vocab_size": table.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.count(architecture, "feed_forward_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": positions,
            "rope_theta": theta,
            "tie_word_embeddings": self.tensor("output.weight").is_none(),
        });
        let map = config.as_object_mut().expect("made above");
        map.insert(eps_key.into(), eps.into());
        map.insert(architecture.activation.0.into(), architecture.activation.1.into());
        if let Some(scaling) = self.rope_scaling(name, head_dim, theta, positions)? {
            map.insert("rope_scaling".into(), scaling);
        }
        if let Some(dims) = rotary {
            map.insert("partial_rotary_factor".into(), (dims as f64 / head_dim as f64).into());
        }
        let reader = Reader { file: self, architecture, layers, hidden, heads, head_dim };
        (architecture.describe)(&reader, map)?;
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
        // Older files have the factor of linear scaling under another key. A missing type is linear, as in llama.cpp.
        let factor = match self.number(&key("factor"))? {
            None => self.number(&format!("{name}.rope.scale_linear"))?,
            factor => factor,
        };
        let is_scaled = factor.is_some_and(|factor| factor != 0.0 && factor != 1.0);
        let kind = self.text(&key("type"))?.unwrap_or(if is_scaled { "linear" } else { "none" });
        if let Some(ext) = self.number(&key("yarn_ext_factor"))?.filter(|&ext| kind == "yarn" && ext != 1.0) {
            return Err(self.error(format!("{} is {ext}; only 1 is supported", key("yarn_ext_factor"))));
        }
        let factor = || {
            factor.ok_or_else(|| {
                self.error(format!("{} is missing, which {kind} scaling needs", key("factor")))
            })
        };
        let mut scaling = Map::new();
        match kind {
            "none" => return Ok(None),
            "linear" if !is_scaled => return Ok(None),
            "linear" => {}
            "yarn" => {
                let original = original.ok_or_else(|| {
                    self.error(format!("{} is missing, which yarn needs", key("original_context_length")))
                })?;
                scaling.insert("original_max_position_embeddings".into(), original.into());
                let optional = [
                    ("attn_factor", "attention_factor"),
                    ("yarn_attn_factor", "attention_factor"),
                    ("yarn_log_multiplier", "mscale"),
                    ("yarn_log_multiplier", "mscale_all_dim"),
                    ("yarn_beta_fast", "beta_fast"),
                    ("yarn_beta_slow", "beta_slow"),
                ];
                for (theirs, ours) in optional {
                    if let Some(number) = self.number(&key(theirs))? {
                        scaling.insert(ours.into(), number.into());
                    }
                }
                if let Some(beta) = self.number(&format!("{name}.attention.temperature_scale"))? {
                    scaling.insert("llama_4_scaling_beta".into(), beta.into());
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
