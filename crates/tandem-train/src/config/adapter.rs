//! `[adapter]`: what trains beside frozen weights.

use std::path::PathBuf;

use tandem_model::{AdapterConfig, AdapterKind, Targets};

use super::error::ConfigError;
use super::reader::{Entry, Section};

/// The adapter of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSection {
    /// Where it begins.
    pub start: AdapterStart,
    /// Rate at which its inputs are dropped in training.
    pub dropout: f64,
}

/// Where an adapter begins.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterStart {
    /// At the base: its term is zero.
    New(AdapterConfig),
    /// At an adapter that was trained before; which also says of what rank it is, and of which modules.
    Folder(PathBuf),
}

impl AdapterSection {
    /// The folder that it starts from.
    pub fn folder(&self) -> Option<&PathBuf> {
        match &self.start {
            AdapterStart::New(_) => None,
            AdapterStart::Folder(path) => Some(path),
        }
    }
}

/// Keys that an adapter which was trained before has an answer to.
const OWN: [&str; 6] = ["kind", "rank", "alpha", "rslora", "targets", "modules_to_save"];

pub(super) fn parse(mut section: Section) -> Result<AdapterSection, ConfigError> {
    let dropout = section
        .take("dropout")
        .map_or(Ok(0.0), |e| e.number("a number of at least 0 and below 1", |x| (0.0..1.0).contains(&x)))?;
    let start = section.take("start").map(|entry| entry.path()).transpose()?;
    let [kind, rank, alpha, rslora, targets, saved] = OWN.map(|key| section.take(key));
    section.finish()?;
    if let Some(path) = start {
        let given = [kind, rank, alpha, rslora, targets, saved].into_iter().flatten().next();
        return match given {
            Some(entry) => Err(entry.conflict(
                "the adapter that adapter.start names has its own; remove this key, or start a new adapter without adapter.start",
            )),
            None => Ok(AdapterSection { start: AdapterStart::Folder(path), dropout }),
        };
    }
    let rank = rank.map_or(Ok(16), |e| e.integer(1..=4096))? as usize;
    let config = AdapterConfig {
        kind: kind.map_or(Ok(AdapterKind::Lora), |e| e.one_of(&AdapterKind::NAMES))?,
        rank,
        alpha: alpha.map_or(Ok(2.0 * rank as f64), |e| e.number("a positive number", |x| x > 0.0))?,
        rank_stabilized: rslora.map_or(Ok(false), |e| e.boolean())?,
        dropout,
        targets: targets.map_or(Ok(Targets::AllLinear), self::targets)?,
        modules_to_save: saved.map_or(Ok(Vec::new()), names)?,
    };
    Ok(AdapterSection { start: AdapterStart::New(config), dropout })
}

fn targets(entry: Entry) -> Result<Targets, ConfigError> {
    match entry.string() {
        Ok("all-linear") => Ok(Targets::AllLinear),
        Ok(pattern) => Ok(Targets::Pattern(pattern.to_owned())),
        Err(_) => names(entry).map(Targets::Names),
    }
}

fn names(entry: Entry) -> Result<Vec<String>, ConfigError> {
    let wrong = entry.wrong("names of modules, for example [\"q_proj\", \"v_proj\"]");
    let names: Result<Vec<_>, _> =
        entry.items().iter().map(|item| item.string().map(str::to_owned)).collect();
    names.ok().filter(|names| !names.is_empty()).ok_or(wrong)
}
