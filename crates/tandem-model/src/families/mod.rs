//! The architectures: one file each, one line in [`FAMILIES`].
//!
//! A [`Family`] declares how its `config.json` is read and which HF modules hold our parameters. It
//! contains no mathematics: that follows from the [`DecoderSpec`].

mod arcee;
mod cohere;
mod cohere2;
mod ernie4_5;
mod exaone4;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3_vision;
mod glm4;
mod gpt2;
mod gpt_neox;
mod granite;
mod hunyuan;
mod llama;
mod ministral3;
mod mistral;
mod mistral3;
mod olmo2;
mod olmo3;
mod phi;
mod phi3;
mod qwen2;
mod qwen2_5_vl;
mod qwen3;
mod qwen3_5;
mod qwen3_5_vision;
mod qwen3_vl;
mod seed_oss;
mod smollm3;
mod starcoder2;

use serde_json::Value;
use tandem_kernels::ops::{Activation, HeadShape};

use crate::Result;
use crate::layout::{LayerId, LayerLayout, ParamKind};
use crate::spec::{
    AttentionSpec, Config, DecoderSpec, EmbeddingSpec, HeadKind, HeadSpec, InitSpec, MlpSpec, NormSpec,
    Residual,
};

/// Largest number of parameters that is taken for meant: a few times that of the largest models.
const MOST_PARAMETERS: f64 = 1e13;

/// Every supported architecture.
pub static FAMILIES: [Family; 31] = [
    llama::FAMILY,
    mistral::FAMILY,
    ministral3::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_5::FAMILY,
    gemma::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    phi::FAMILY,
    phi3::FAMILY,
    olmo2::FAMILY,
    olmo3::FAMILY,
    smollm3::FAMILY,
    granite::FAMILY,
    glm4::FAMILY,
    ernie4_5::FAMILY,
    seed_oss::FAMILY,
    exaone4::FAMILY,
    starcoder2::FAMILY,
    arcee::FAMILY,
    cohere::FAMILY,
    cohere2::FAMILY,
    hunyuan::FAMILY,
    gemma3_vision::FAMILY,
    mistral3::FAMILY,
    qwen2_5_vl::FAMILY,
    qwen3_vl::FAMILY,
    qwen3_5_vision::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
];

/// An architecture: its config and its modules.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Class in `architectures`.
    pub architecture: &'static str,
    /// Prefix of tensor names that a folder saved from the bare model, without a head, leaves off.
    pub base_prefix: &'static str,
    /// Reads everything but [`DecoderSpec::family`] from a config.
    read: fn(&Config) -> Result<DecoderSpec>,
    /// HF modules by the weight that they hold, where they are not those of [`MODULES`].
    modules: &'static Modules,
    /// How names begin in the tables of modules, then in files, where that is otherwise.
    prefixes: &'static [(&'static str, &'static str)],
    /// Parts whose elements HF does not order as [`HfLayout::Rows`].
    order: &'static [(ParamKind, HfLayout)],
    /// Modules that `transformers` 5 renames when it loads: how names begin in files, then in memory.
    renamed: &'static [(&'static str, &'static str)],
    /// Stem of the classes beside the language model's, where it is not that of
    /// [`Family::architecture`].
    stem: Option<&'static str>,
    /// True if transformers has a sequence classifier of the family.
    has_scorer: bool,
    /// How the names of a vision–language model's other tensors begin. They do not train, and are
    /// copied into what is saved.
    beside: &'static [&'static str],
    /// Token whose row look-ups do not train.
    padding: Padding,
}

/// Padding token of a class: transformers gives its id to the token table as `padding_idx`.
enum Padding {
    /// `pad_token_id`, if the config names one.
    Named,
    /// The same; where the config lacks the key, this one.
    Default(u32),
    /// The class gives none.
    Unused,
}

impl Family {
    /// Reads a config.
    pub fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        let mut spec = DecoderSpec { family: self.model_type, ..(self.read)(config)? };
        let named = spec.embedding.padding;
        let padding = match self.padding {
            Padding::Named => named,
            // A `null` is a word of its own: no padding.
            Padding::Default(id) => named.or((!config.as_map().contains_key("pad_token_id")).then_some(id)),
            Padding::Unused => None,
        };
        spec.embedding.padding = padding.filter(|&id| (id as usize) < spec.vocab_size);
        match spec.approximate_parameters() {
            parameters if parameters <= MOST_PARAMETERS => Ok(spec),
            parameters => Err(config.error(format!(
                "its sizes give about {parameters:.1e} parameters, expected at most {MOST_PARAMETERS:.1e}: check the \
                 widths (hidden_size, intermediate_size, num_attention_heads, head_dim), vocab_size and \
                 num_hidden_layers"
            ))),
        }
    }

    /// Returns the HF modules that hold a part, in the order of its rows.
    pub(crate) fn modules(&self, part: ParamKind) -> impl Iterator<Item = String> {
        let weight = part.weight_of_bias().unwrap_or(part);
        let mut known = self.modules.iter().chain(MODULES);
        let names = known.find(|(known, _)| *known == weight).map_or(&[][..], |(_, names)| names);
        names.iter().map(|name| replaced(self.prefixes, name).unwrap_or_else(|| (*name).to_owned()))
    }

    /// Returns the HF tensors that make up a part, in the order of its rows.
    pub(crate) fn names(&self, part: ParamKind) -> impl Iterator<Item = String> {
        let kind = match part {
            // Parameters of a module that has others beside.
            ParamKind::DeltaDecayLog => "A_log",
            ParamKind::DeltaDecayBias => "dt_bias",
            _ if part.weight_of_bias().is_some() => "bias",
            _ => "weight",
        };
        self.modules(part).map(move |module| format!("{module}.{kind}"))
    }

    /// Returns how HF orders the elements of a part's tensors.
    pub(crate) fn order(&self, part: ParamKind) -> HfLayout {
        self.order.iter().find(|(known, _)| *known == part).map_or(HfLayout::Rows, |(_, order)| *order)
    }

    /// Returns the name in memory of a module or tensor that transformers 5 renames, from that in
    /// files.
    pub(crate) fn name_in_memory(&self, name: &str) -> Option<String> {
        replaced(self.renamed, name)
    }

    /// Returns the name in files, from that in memory.
    pub(crate) fn name_in_files(&self, name: &str) -> Option<String> {
        self.renamed.iter().find_map(|(file, memory)| replaced(&[(memory, file)], name))
    }

    /// Returns whether this is the text model of a vision–language model.
    pub fn sees(&self) -> bool {
        !self.beside.is_empty()
    }

    /// Returns whether a tensor belongs to another part than the text model.
    pub(crate) fn is_beside(&self, name: &str) -> bool {
        self.beside.iter().any(|beginning| name.starts_with(beginning))
    }

    /// Returns the prefix of the names of the family's classes.
    fn stem(&self) -> &'static str {
        let own = || self.architecture.trim_end_matches("ForCausalLM").trim_end_matches("LMHeadModel");
        self.stem.unwrap_or_else(own)
    }

    /// Returns the class of the family's models with a score head, if transformers has one.
    pub(crate) fn scorer_class(&self) -> Option<String> {
        self.has_scorer.then(|| format!("{}{SCORER}", self.stem()))
    }

    /// Returns whether `class` is the family's bare model (`LlamaModel`), which older folders name.
    fn is_headless(&self, class: &str) -> bool {
        class.strip_prefix(self.stem()) == Some("Model")
    }
}

/// Replaces the beginning of a dotted name, whole words of it, by what stands beside it in the list.
/// `None` if the list has no beginning of the name.
fn replaced(beginnings: &[(&str, &str)], name: &str) -> Option<String> {
    beginnings.iter().find_map(|(old, new)| {
        let rest = name.strip_prefix(old)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{new}{rest}"))
    })
}

/// HF modules by the weight that they hold, in the order of its rows; `{}` stands for the block's
/// index. A bias is held by the modules of its weight.
type Modules = [(ParamKind, &'static [&'static str])];

/// Llama's modules, which most families kept, and the head of every sequence classifier.
const MODULES: &Modules = &[
    (ParamKind::TokenTable, &["model.embed_tokens"]),
    (ParamKind::Norm1Weight, &["model.layers.{}.input_layernorm"]),
    (
        ParamKind::QkvWeight,
        &[
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ],
    ),
    (ParamKind::OutWeight, &["model.layers.{}.self_attn.o_proj"]),
    (ParamKind::QNormWeight, &["model.layers.{}.self_attn.q_norm"]),
    (ParamKind::KNormWeight, &["model.layers.{}.self_attn.k_norm"]),
    (ParamKind::Norm2Weight, &["model.layers.{}.post_attention_layernorm"]),
    (ParamKind::UpWeight, &["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"]),
    (ParamKind::DownWeight, &["model.layers.{}.mlp.down_proj"]),
    (ParamKind::FinalNormWeight, &["model.norm"]),
    (ParamKind::HeadWeight, &["lm_head"]),
    (ParamKind::ScoreWeight, &["score"]),
];

/// Sizes of a decoder.
struct Sizes {
    hidden: usize,
    num_layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    mlp: usize,
    positions: usize,
}

impl Sizes {
    /// Reads the keys that all families but GPT-2 use.
    fn read(config: &Config, default_head_dim: Option<usize>) -> Result<Self> {
        let (heads, kv_heads, head_dim) = config.heads(default_head_dim)?;
        Ok(Self {
            hidden: config.count("hidden_size")?,
            num_layers: config.num_layers("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            mlp: config.count("intermediate_size")?,
            positions: config.count_if("max_position_embeddings")?.unwrap_or(2048),
        })
    }
}

/// Makes a decoder with the options that most families share: sequential residual, no biases, full
/// attention without rotary embedding, plain feed-forward, untied head. A family changes the rest.
fn decoder(config: &Config, sizes: Sizes, norm: NormSpec, activation: Activation) -> Result<DecoderSpec> {
    let Sizes { hidden, num_layers, heads, kv_heads, head_dim, mlp, positions } = sizes;
    let std = config.not_negative("initializer_range", 0.02)? as f32;
    Ok(DecoderSpec {
        family: "",
        vocab_size: config.count("vocab_size")?,
        hidden_size: hidden,
        num_layers,
        max_positions: positions,
        norm,
        residual: Residual::PRE_NORM,
        attention: AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            qkv_bias: false,
            out_bias: false,
            gated: false,
            qk_norm: None,
            windows: vec![None; num_layers],
            softcap: None,
        },
        linear_attention: None,
        rotary: vec![None; num_layers],
        mlp: MlpSpec { width: mlp, gated: false, activation, up_bias: false, down_bias: false },
        embedding: EmbeddingSpec { scale: 1.0, learned_positions: None, padding: config.padding_row()? },
        head: HeadSpec {
            kind: HeadKind::Language,
            tied: config.flag("tie_word_embeddings", false)?,
            bias: false,
            shape: HeadShape::default(),
        },
        init: InitSpec { std, residual_std: std },
        eos_token_ids: config.eos_token_ids()?,
    })
}

/// Reads `attention_bias`: whether all projections of attention have a bias.
fn attention_bias(config: &Config, spec: &mut DecoderSpec) -> Result<()> {
    let bias = config.flag("attention_bias", false)?;
    (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
    Ok(())
}

/// Reads `mlp_bias`: whether all projections of the feed-forward have a bias.
fn mlp_bias(config: &Config, spec: &mut DecoderSpec) -> Result<()> {
    let bias = config.flag("mlp_bias", false)?;
    (spec.mlp.up_bias, spec.mlp.down_bias) = (bias, bias);
    Ok(())
}

/// Order of a tensor's elements in HF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HfLayout {
    /// `[out, in]`, as ours.
    Rows,
    /// `[in, out]` (GPT-2's `Conv1D`).
    Transposed,
    /// Rows `[head, (q, k, v), d]`; ours are `[(q, k, v), head, d]` (GPT-NeoX).
    HeadInterleaved,
}

/// One HF tensor and the place of its elements in a layer's flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// HF name.
    pub name: String,
    /// HF shape.
    pub shape: Vec<usize>,
    /// Parameter that it belongs to.
    pub part: ParamKind,
    /// Elements in the layer's flat buffer.
    pub range: std::ops::Range<usize>,
    /// Rows in our layout.
    pub rows: usize,
    /// Columns in our layout.
    pub cols: usize,
    /// Order of the elements in HF files.
    pub order: HfLayout,
}

/// Suffix of HF's classes with a score head.
const SCORER: &str = "ForSequenceClassification";

/// Returns the first class in `architectures`, if the config has one.
fn class_of(config: &Config) -> Result<Option<&str>> {
    let classes = match config.as_map().get("architectures") {
        None | Some(Value::Null) => return Ok(None),
        Some(classes) => classes,
    };
    let wrong = || config.error(format!("architectures is {classes}, expected a list of class names"));
    match classes.as_array().ok_or_else(wrong)?.first() {
        None => Ok(None),
        Some(class) => class.as_str().map(Some).ok_or_else(wrong),
    }
}

/// Finds the family of a language model's config.
pub fn family_of(config: &Config) -> Result<&'static Family> {
    let model_type = config.word("model_type", "")?;
    let class = class_of(config)?;
    let found = FAMILIES.iter().find(|f| match class {
        // A classifier or a sequence-to-sequence head has the same model_type but is another model.
        Some(class) => f.architecture == class || (f.model_type == model_type && f.is_headless(class)),
        None => f.model_type == model_type,
    });
    found.ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.architecture).collect();
        let class =
            class.map_or_else(|| format!("model_type \"{model_type}\""), |c| format!("architecture {c}"));
        config.error(format!("{class} is not supported; known: {}", known.join(", ")))
    })
}

/// Finds the family of a reward model's config, a sequence classifier with one label. `None` for
/// another model.
///
/// # Errors
/// If the classifier has more labels, or its architecture is none of [`FAMILIES`].
pub(crate) fn scorer_family_of(config: &Config) -> Result<Option<&'static Family>> {
    let Some(class) = class_of(config)?.filter(|class| class.ends_with(SCORER)) else { return Ok(None) };
    let is_class = |f: &&Family| f.scorer_class().as_deref() == Some(class);
    let found = FAMILIES.iter().find(is_class).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().filter_map(Family::scorer_class).collect();
        config.error(format!("architecture {class} is not supported; known: {}", known.join(", ")))
    })?;
    // transformers writes the labels alone, and takes two where there are none.
    let labels = config.as_map().get("id2label").and_then(Value::as_object).map(serde_json::Map::len);
    let num_labels = config.count_if("num_labels")?.or(labels).unwrap_or(2);
    if num_labels != 1 {
        return Err(config.error(format!(
            "a classifier of {num_labels} labels is no reward model; it needs num_labels 1"
        )));
    }
    Ok(Some(found))
}

/// Finds the family with this `model_type`.
pub fn family_named(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_type == model_type)
}

/// Lists every HF tensor of a layer, by its place in the layer's flat buffer.
pub fn pieces(family: &Family, spec: &DecoderSpec, layer: LayerId, layout: &LayerLayout) -> Vec<HfTensor> {
    let mut pieces = Vec::new();
    for param in &layout.params {
        let num_tensors = family.modules(param.part).count();
        let sizes = split(spec, param.part, param.rows, param.cols, num_tensors);
        let order = family.order(param.part);
        let mut start = param.offset;
        for ((rows, cols), name) in sizes.into_iter().zip(family.names(param.part)) {
            let shape = match order {
                _ if is_vector(param.part) => vec![rows * cols],
                // Of a convolution: each channel reads one channel.
                _ if param.part == ParamKind::DeltaConvWeight => vec![rows, 1, cols],
                HfLayout::Transposed => vec![cols, rows],
                _ => vec![rows, cols],
            };
            let name = match layer {
                LayerId::Block(index) => name.replace("{}", &index.to_string()),
                _ => name,
            };
            let range = start..start + rows * cols;
            start = range.end;
            pieces.push(HfTensor { name, shape, part: param.part, range, rows, cols, order });
        }
    }
    pieces
}

fn is_vector(part: ParamKind) -> bool {
    !part.is_matrix()
        && !matches!(part, ParamKind::PositionTable | ParamKind::ScoreWeight | ParamKind::DeltaConvWeight)
}

/// Returns the sizes `(rows, cols)` of the tensors that make up a part of `rows × cols`.
fn split(
    spec: &DecoderSpec,
    part: ParamKind,
    rows: usize,
    cols: usize,
    tensors: usize,
) -> Vec<(usize, usize)> {
    let attention = &spec.attention;
    let outputs = match (part, tensors) {
        (_, 1) => return vec![(rows, cols)],
        (ParamKind::QkvWeight | ParamKind::QkvBias, 3) => {
            vec![attention.projected_query_width(), attention.kv_width(), attention.kv_width()]
        }
        (ParamKind::DeltaInWeight, 4) => {
            let linear = spec.linear_attention.as_ref().expect("a part of linear attention");
            linear.projected_widths().to_vec()
        }
        (ParamKind::UpWeight | ParamKind::UpBias, 2) => vec![spec.mlp.width; 2],
        _ => unreachable!("no family splits {part:?} into {tensors} tensors"),
    };
    outputs.into_iter().map(|n| if is_vector(part) { (1, n) } else { (n, cols) }).collect()
}
