//! `[adapter]`: trainable parameters beside frozen weights.

use std::path::PathBuf;

use tandem_model::{AdapterConfig, AdapterKind, Targets};
use toml::Value;

use super::error::Result;
use super::form::{Form, POSITIVE, boolean, choice, custom, integer, number, path_or_name, texts_value};
use super::hub::HubPart;
use super::keys::{Keys, keys};
use super::reader::Entry;

/// The adapter of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSection {
    /// Starting point.
    pub start: AdapterStart,
    /// Dropout rate of its inputs in training; `None` for that of the folder that it starts from.
    pub dropout: Option<f64>,
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

    pub(super) fn new_adapter(&self) -> Option<&AdapterConfig> {
        match &self.start {
            AdapterStart::New(adapter) => Some(adapter),
            AdapterStart::Folder(_) => None,
        }
    }

    pub(super) fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        keys! { let keys, now;
            /// A folder of the `peft` library to start from, or its [name of the hub](hub.md). It defines the adapter: of the other
            /// keys only `dropout` is allowed.
            start = path_or_name(HubPart::Adapter).optional(), now.folder().cloned();
            /// Dropout rate of the terms' inputs in training. The reference, evaluation and
            /// generation use no dropout. What is dropped depends on the cut into micro-batches, not on ranks.
            dropout = number(0.0..1.0).maybe().or(start.is_none().then_some(0.0)).shown("0, or `lora_dropout` of `start`"),
                now.dropout;
            /// `"lora"`: a low-rank term beside each matrix. `"dora"`: LoRA with a trained length
            /// for each row of the matrix.
            kind = choice(AdapterKind::NAMES).or(AdapterKind::Lora).only(start.is_none(), DEFINED),
                now.new_adapter()?.kind;
            /// Rank of the terms.
            rank = integer(1..=4096).or(16).only(start.is_none(), DEFINED), now.new_adapter()?.rank;
            /// Scale of the terms: `alpha` / `rank`.
            alpha = number(POSITIVE).or(2.0 * rank as f64).shown("2 × `rank`").only(start.is_none(), DEFINED),
                now.new_adapter()?.alpha;
            /// Scale by `alpha` / √`rank` instead.
            rslora = boolean().or(false).only(start.is_none(), DEFINED), now.new_adapter()?.rank_stabilized;
            /// Modules that get a term. `"all-linear"`: all but the token table and the head. A
            /// list: names or their ends, as `["q_proj", "v_proj"]`. Any other string: a regular
            /// expression for whole names.
            targets = targets().or(Targets::AllLinear).only(start.is_none(), DEFINED),
                now.new_adapter()?.targets.clone();
            /// Modules that train whole beside the adapter, by the ends of their names: norms,
            /// `lm_head`, `embed_tokens`.
            modules_to_save = modules().or(Vec::new()).only(start.is_none(), DEFINED),
                now.new_adapter()?.modules_to_save.clone();
        }
        let rank_stabilized = rslora;
        let new = AdapterConfig {
            kind,
            rank,
            alpha,
            rank_stabilized,
            dropout: dropout.unwrap_or(0.0),
            targets,
            modules_to_save,
            file: None,
        };
        Ok(Self { start: start.map_or(AdapterStart::New(new), AdapterStart::Folder), dropout })
    }
}

const DEFINED: &str = "the adapter in adapter.start defines it; remove this key, or remove adapter.start to \
                       train a new adapter";

fn targets<'a>() -> Form<'a, Targets> {
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

fn modules<'a>() -> Form<'a, Vec<String>> {
    custom("list", names, |names: &Vec<String>| (!names.is_empty()).then(|| texts_value(names)))
}

fn names(entry: Entry) -> Result<Vec<String>> {
    let wrong = entry.wrong("names of modules, for example [\"q_proj\", \"v_proj\"]");
    let names: Result<Vec<_>> = entry.items().iter().map(|item| item.string().map(str::to_owned)).collect();
    names.ok().filter(|names| !names.is_empty()).ok_or(wrong)
}
