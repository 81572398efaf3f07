//! `[data]`: which rows, in which order.

use std::path::PathBuf;

use tandem_data::row::{LossOn, Truncation};

use super::Method;
use super::error::ConfigError;
use super::reader::{Entry, Section};

/// Where rows come from and how they are cut.
#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// Training rows, file after file.
    pub train: Vec<DataSource>,
    /// Held-out rows; empty for none.
    pub eval: Vec<DataSource>,
    /// Longest sequence, prompt and answer together, in tokens.
    pub max_length: usize,
    /// Which end of a longer one is kept.
    pub truncation: Truncation,
    /// Order of the rows within an epoch.
    pub order: Order,
    /// Folder of the token cache; `None` for the user's cache folder.
    pub cache: Option<PathBuf>,
    /// Compute what the two answers of a pair have in common once.
    pub share_prefix: bool,
    /// Which tokens an SFT row is trained on.
    pub loss_on: LossOn,
}

/// A file of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSource {
    /// A JSONL or JSON file.
    pub path: PathBuf,
    /// How many times its rows stand in an epoch: 2 gives every row twice, 0.5 every second one.
    pub weight: f64,
}

/// Order of the rows within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A new permutation each epoch, from `seed + epoch`.
    Shuffled,
    /// As the files have them.
    Sequential,
}

impl Order {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shuffled => "shuffled",
            Self::Sequential => "sequential",
        }
    }
}

const SOURCES: &str = "a path, a list of paths, or a list of tables with `path` and `weight`";

pub(super) fn parse(mut section: Section, method: Method) -> Result<DataConfig, ConfigError> {
    let train = sources(section.required("train", SOURCES)?)?;
    let config = DataConfig {
        train,
        eval: section.take("eval").map_or(Ok(Vec::new()), |entry| match method {
            Method::Online => Err(entry.conflict(
                "an online run has no answers to evaluate on; remove it, and compare models with `tandem eval --judge`",
            )),
            _ => sources(entry),
        })?,
        max_length: section.take("max_length").map_or(Ok(1024), |e| e.integer(2..=1 << 24))? as usize,
        truncation: section.take("truncation").map_or(Ok(Truncation::KeepStart), |e| {
            let whole = match method {
                Method::Sft | Method::Dpo => None,
                Method::Reward => Some("a reward model sees whole texts, and rows with longer ones are dropped"),
                Method::Online => Some("a prompt is answered whole, and rows with longer ones are dropped"),
            };
            if let Some(reason) = whole {
                return Err(e.conflict(format!("{reason}; remove it")));
            }
            e.one_of(&[("keep_start", Truncation::KeepStart), ("keep_end", Truncation::KeepEnd)])
        })?,
        order: section.take("order").map_or(Ok(Order::Shuffled), |e| {
            e.one_of(&[("shuffled", Order::Shuffled), ("sequential", Order::Sequential)])
        })?,
        cache: section.take("cache").map(|e| e.path()).transpose()?,
        share_prefix: section.take("share_prefix").map_or(Ok(true), |e| e.boolean())?,
        loss_on: match section.take("loss_on") {
            None => LossOn::Answer,
            Some(entry) if method == Method::Sft => {
                entry.one_of(&[("answer", LossOn::Answer), ("all", LossOn::All)])?
            }
            Some(entry) => {
                return Err(entry.conflict("a preference loss is always on the answers; remove `loss_on`"));
            }
        },
    };
    section.finish()?;
    Ok(config)
}

fn sources(entry: Entry) -> Result<Vec<DataSource>, ConfigError> {
    let empty = entry.wrong(SOURCES);
    let sources = entry.items().into_iter().map(source).collect::<Result<Vec<_>, _>>()?;
    if sources.is_empty() { Err(empty) } else { Ok(sources) }
}

fn source(entry: Entry) -> Result<DataSource, ConfigError> {
    if entry.string().is_ok() {
        return Ok(DataSource { path: entry.path()?, weight: 1.0 });
    }
    let wrong = entry.wrong(SOURCES);
    let mut table = entry.section().map_err(|_| wrong)?;
    let path = table.required("path", "a JSONL or JSON file")?.path()?;
    let weight = match table.take("weight") {
        None => 1.0,
        Some(entry) => entry.number("a positive number", |w| w > 0.0)?,
    };
    table.finish()?;
    Ok(DataSource { path, weight })
}
