//! The architectures: one file each, one line here.
//!
//! A [`Family`] knows how to read its `config.json` and what HF calls each of our parameters. It contains no
//! mathematics: that follows from the [`DecoderSpec`].

mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod phi;
mod qwen2;
mod qwen3;

use serde_json::Value;

use crate::Result;
use crate::layout::{LayerId, LayerLayout, Part};
use crate::spec::Config;
use crate::spec::DecoderSpec;

/// Every architecture that is supported.
pub static FAMILIES: &[&dyn Family] =
    &[&llama::Llama, &phi::Phi, &gpt2::Gpt2, &gpt_neox::GptNeoX, &qwen2::Qwen2, &qwen3::Qwen3, &gemma::Gemma];

/// An architecture: its config and its tensor names.
pub trait Family: Sync {
    /// `model_type` in `config.json`.
    fn model_type(&self) -> &'static str;

    /// The class in `architectures`.
    fn architecture(&self) -> &'static str;

    /// What a folder saved from the bare model, without a head, leaves off its tensor names.
    fn base_prefix(&self) -> &'static str;

    /// Reads a config.
    ///
    /// # Errors
    /// If a key is missing, or asks for something that is not supported.
    fn spec(&self, config: &Config) -> Result<DecoderSpec>;

    /// The HF tensors that make up a part, in the order of its rows; `{}` stands for the block's index.
    fn names(&self, part: Part) -> &'static [&'static str];

    /// A module that `transformers` 5 has under another name in memory than in its files: the name in files, then the other.
    fn renamed(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// How HF orders the elements of a part's tensors.
    fn order(&self, _: Part) -> Order {
        Order::Rows
    }
}

/// How HF orders the elements of a tensor, against ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As we do: `[out, in]`.
    Rows,
    /// `[in, out]` (GPT-2's `Conv1D`).
    Transposed,
    /// Rows `[head, (q, k, v), d]`, ours are `[(q, k, v), head, d]` (GPT-NeoX).
    HeadInterleaved,
}

/// One HF tensor and where its elements lie in a layer's flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// HF name.
    pub name: String,
    /// HF shape.
    pub shape: Vec<usize>,
    /// The parameter it belongs to.
    pub part: Part,
    /// Elements in the layer's flat buffer.
    pub range: std::ops::Range<usize>,
    /// Rows in our layout.
    pub rows: usize,
    /// Columns in our layout.
    pub cols: usize,
    /// How HF orders the elements.
    pub order: Order,
}

/// The family of a config.
///
/// # Errors
/// If the architecture is not one of [`FAMILIES`]: the message lists them.
pub fn family_of(config: &Config) -> Result<&'static dyn Family> {
    let model_type = config.word("model_type", "")?;
    let architectures = config.as_map().get("architectures").and_then(Value::as_array);
    let class = architectures.and_then(|l| l.first()).and_then(Value::as_str);
    let found = FAMILIES.iter().find(|f| match class {
        // A classifier or a sequence-to-sequence head has the same model_type but is another model.
        Some(class) => f.architecture() == class || (f.model_type() == model_type && is_headless(f, class)),
        None => f.model_type() == model_type,
    });
    found.copied().ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.architecture()).collect();
        let class =
            class.map_or_else(|| format!("model_type \"{model_type}\""), |c| format!("architecture {c}"));
        config.error(format!("{class} is not supported; known: {}", known.join(", ")))
    })
}

/// The family of a config that is a sequence classifier's with one label: a reward model. `None` if it is another model.
///
/// # Errors
/// If it has more labels, or its architecture is none of [`FAMILIES`].
pub fn scorer_family_of(config: &Config) -> Result<Option<&'static dyn Family>> {
    let architectures = config.as_map().get("architectures").and_then(Value::as_array);
    let class = architectures.and_then(|l| l.first()).and_then(Value::as_str);
    let Some(class) = class.filter(|class| class.ends_with(SCORER)) else { return Ok(None) };
    let found = FAMILIES.iter().find(|f| scorer_class(**f) == class).copied().ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| scorer_class(*f)).collect();
        config.error(format!("architecture {class} is not supported; known: {}", known.join(", ")))
    })?;
    // transformers writes the labels alone, and takes two where there are none.
    let labels = config.as_map().get("id2label").and_then(Value::as_object).map(serde_json::Map::len);
    let num_labels = config.count_if("num_labels")?.or(labels).unwrap_or(2);
    if num_labels != 1 {
        return Err(config.error(format!(
            "a classifier of {num_labels} labels is no reward model: that has one (num_labels 1)"
        )));
    }
    Ok(Some(found))
}

/// The end of the names of HF's classes with a score head.
const SCORER: &str = "ForSequenceClassification";

/// The class of a family's models with a score head.
pub fn scorer_class(family: &dyn Family) -> String {
    format!("{}{SCORER}", stem(family))
}

/// What the names of a family's classes begin with.
fn stem(family: &dyn Family) -> &'static str {
    family.architecture().trim_end_matches("ForCausalLM").trim_end_matches("LMHeadModel")
}

/// The HF tensors of a part; the score head is called the same everywhere.
pub(crate) fn names(family: &dyn Family, part: Part) -> &'static [&'static str] {
    match part {
        Part::ScoreWeight => &["score.weight"],
        part => family.names(part),
    }
}

/// Whether `class` is the family's bare model (`LlamaModel`), which older folders name.
fn is_headless(family: &&'static dyn Family, class: &str) -> bool {
    class.strip_prefix(stem(*family)) == Some("Model")
}

/// The family that wrote a spec.
pub fn family_named(model_type: &str) -> Option<&'static dyn Family> {
    FAMILIES.iter().find(|f| f.model_type() == model_type).copied()
}

/// Every HF tensor of a layer, by its place in the layer's flat buffer.
pub fn pieces(family: &dyn Family, spec: &DecoderSpec, layer: LayerId, layout: &LayerLayout) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for param in &layout.params {
        let names = names(family, param.part);
        let mut start = param.offset;
        for (rows, name) in
            split(spec, param.part, param.rows, param.cols, names.len()).into_iter().zip(names)
        {
            let (rows, cols) = rows;
            let order = family.order(param.part);
            let shape = match order {
                _ if is_vector(param.part) => vec![rows * cols],
                Order::Transposed => vec![cols, rows],
                _ => vec![rows, cols],
            };
            let name = match layer {
                LayerId::Block(index) => name.replace("{}", &index.to_string()),
                _ => (*name).to_owned(),
            };
            let range = start..start + rows * cols;
            start = range.end;
            pieces.push(Piece { name, shape, part: param.part, range, rows, cols, order });
        }
    }
    pieces
}

fn is_vector(part: Part) -> bool {
    !part.is_matrix() && !matches!(part, Part::PositionTable | Part::ScoreWeight)
}

/// Sizes `(rows, cols)` of the tensors that a part of `rows × cols` is made of.
fn split(spec: &DecoderSpec, part: Part, rows: usize, cols: usize, tensors: usize) -> Vec<(usize, usize)> {
    let attention = &spec.attention;
    let outputs = match (part, tensors) {
        (_, 1) => return vec![(rows, cols)],
        (Part::QkvWeight | Part::QkvBias, 3) => {
            vec![attention.query_width(), attention.kv_width(), attention.kv_width()]
        }
        (Part::UpWeight | Part::UpBias, 2) => vec![spec.mlp.width; 2],
        _ => unreachable!("no family splits {part:?} into {tensors} tensors"),
    };
    outputs.into_iter().map(|n| if is_vector(part) { (1, n) } else { (n, cols) }).collect()
}
