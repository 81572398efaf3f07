//! `[adapter]`: trainable parameters beside frozen weights.

use std::path::PathBuf;

use tandem_model::{AdapterConfig, AdapterKind, Targets};
use toml::Value;

use super::error::Result;
use super::form::{AnyPath, Boolean, Form, POSITIVE, choice, custom, integer, number, texts_value};
use super::keys::{Fixed, Keys, keys};
use super::reader::Entry;

/// The adapter of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSection {
    /// Starting point.
    pub start: AdapterStart,
    /// Dropout rate of its inputs in training.
    pub dropout: f64,
}

/// Starting point of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterStart {
    /// A new adapter, whose term is zero.
    New(AdapterConfig),
    /// The folder of a trained adapter, which also fixes rank and target modules.
    Folder(PathBuf),
}

impl AdapterSection {
    /// Folder that the adapter starts from.
    pub fn folder(&self) -> Option<&PathBuf> {
        match &self.start {
            AdapterStart::New(_) => None,
            AdapterStart::Folder(path) => Some(path),
        }
    }

    /// Configuration of a new adapter.
    pub(super) fn new_adapter(&self) -> Option<&AdapterConfig> {
        match &self.start {
            AdapterStart::New(adapter) => Some(adapter),
            AdapterStart::Folder(_) => None,
        }
    }

    pub(super) fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        let dropout = keys.key(
            "dropout",
            "Dropout rate of the terms' inputs in training. The reference, evaluation and generation \
             use no dropout.",
            number(0.0..1.0).or(0.0),
            now.map(|now| &now.dropout),
        )?;
        let folder = keys.key(
            "start",
            "A folder of the `peft` library to start from. It defines the adapter: of the other \
             keys only `dropout` is allowed.",
            AnyPath.optional(),
            now.map(|now| now.folder().cloned()).as_ref(),
        )?;
        let adapter = new(now.and_then(Self::new_adapter), keys, dropout, folder.is_none())?;
        Ok(Self { start: folder.map_or(AdapterStart::New(adapter), AdapterStart::Folder), dropout })
    }
}

const DEFINED: &str = "the adapter in adapter.start defines it; remove this key, or remove adapter.start to \
                       train a new adapter";

keys! {
    fn new(dropout: f64, is_new: bool) -> AdapterConfig {
        /// `"lora"`: a low-rank term beside each matrix. `"dora"`: LoRA with a trained length for
        /// each row of the matrix.
        kind = choice(AdapterKind::NAMES).or(AdapterKind::Lora).only(is_new, DEFINED),
        /// Rank of the terms.
        rank = integer(1..=4096).or(16).only(is_new, DEFINED),
        /// Scale of the terms: `alpha` / `rank`.
        alpha = number(POSITIVE).or(2.0 * rank as f64).shown("2 × `rank`").only(is_new, DEFINED),
        /// Scale by `alpha` / √`rank` instead.
        rank_stabilized = Boolean.or(false).named("rslora").only(is_new, DEFINED),
        dropout = Fixed(dropout),
        /// Modules that get a term. `"all-linear"`: all but the token table and the head. A list:
        /// names or their ends, as `["q_proj", "v_proj"]`. Any other string: a regular expression
        /// for whole names.
        targets = targets().or(Targets::AllLinear).only(is_new, DEFINED),
        /// Modules that train whole beside the adapter, by the ends of their names: norms,
        /// `lm_head`, `embed_tokens`.
        modules_to_save = modules().or(Vec::new()).only(is_new, DEFINED),
    }
}

fn targets() -> impl Form<Value = Targets> {
    let read = |entry: Entry| match entry.string() {
        Ok("all-linear") => Ok(Targets::AllLinear),
        Ok(pattern) => Ok(Targets::Pattern(pattern.to_owned())),
        Err(_) => names(entry).map(Targets::Names),
    };
    custom("string or list", read, |targets: &Targets| match targets {
        Targets::AllLinear => Value::from("all-linear"),
        Targets::Names(names) => texts_value(names),
        Targets::Pattern(pattern) => Value::from(pattern.clone()),
    })
}

fn modules() -> impl Form<Value = Vec<String>> {
    custom("list", names, |names: &Vec<String>| (!names.is_empty()).then(|| texts_value(names)))
}

fn names(entry: Entry) -> Result<Vec<String>> {
    let wrong = entry.wrong("names of modules, for example [\"q_proj\", \"v_proj\"]");
    let names: Result<Vec<_>> = entry.items().iter().map(|item| item.string().map(str::to_owned)).collect();
    names.ok().filter(|names| !names.is_empty()).ok_or(wrong)
}
