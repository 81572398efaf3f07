//! Settings of other programs: each has our key, or a reason why it has none.
//!
//! One table per program, in its file, has two readers. [`check`] refuses another program's name in
//! a configuration of ours, with its translation. [`translate`] turns a whole file of theirs into a
//! configuration of ours.

mod accelerate;
mod axolotl;
mod command_line;
mod deepspeed;
mod document;
mod llama_factory;
mod mitchell;
mod name;
mod page;
mod shell;
mod translate;
mod trl;
mod values;

use super::Config;
use super::error::{ConfigError, Problem, Result};
use super::keys::Keys;
use super::page::list;
use super::tree::{Node, Value};
use name::{Meaning, Name};
pub use page::coming_from_page;
pub use translate::{Answers, Facts, PerEpoch, Translation, translate};

/// A program whose settings are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// TRL with transformers and PEFT.
    Trl,
    /// Axolotl, which hands many settings to TRL.
    Axolotl,
    /// LLaMA-Factory, which hands many settings to transformers.
    LlamaFactory,
    /// Accelerate's configuration or launcher.
    Accelerate,
    /// A DeepSpeed configuration.
    DeepSpeed,
    /// The original DPO code.
    Mitchell,
}

impl Program {
    /// Every program with its name on the command line.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("trl", Self::Trl),
        ("axolotl", Self::Axolotl),
        ("llama-factory", Self::LlamaFactory),
        ("accelerate", Self::Accelerate),
        ("deepspeed", Self::DeepSpeed),
        ("mitchell", Self::Mitchell),
    ];

    /// Name in messages.
    pub fn title(self) -> &'static str {
        match self {
            Self::Trl => "TRL",
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Accelerate => "Accelerate",
            Self::DeepSpeed => "DeepSpeed",
            Self::Mitchell => "Mitchell's DPO code",
        }
    }

    fn own(self) -> &'static [Name] {
        match self {
            Self::Trl => trl::NAMES,
            Self::Axolotl => axolotl::NAMES,
            Self::LlamaFactory => llama_factory::NAMES,
            Self::Accelerate => accelerate::NAMES,
            Self::DeepSpeed => deepspeed::NAMES,
            Self::Mitchell => mitchell::NAMES,
        }
    }

    /// Settings of its own and those that it passes on to transformers, as two programs do.
    fn known(self) -> impl Iterator<Item = &'static Name> {
        let passes_on = matches!(self, Self::Axolotl | Self::LlamaFactory);
        let inherited = if passes_on { trl::NAMES } else { &[] };
        self.own().iter().chain(inherited)
    }

    /// Returns the meaning of a setting.
    fn find(self, setting: &str) -> Option<&'static Name> {
        let found = self.known().find(|name| name.names.contains(&setting));
        // Axolotl has settings of GRPO in a table.
        let inner = || setting.strip_prefix("trl.").filter(|_| self == Self::Axolotl);
        found.or_else(|| {
            trl::NAMES.iter().find(|name| inner().is_some_and(|inner| name.names.contains(&inner)))
        })
    }
}

/// Refuses a key of another program, and one of ours that stands outside its table.
///
/// It runs before anything is read: a missing `train.learning_rate` is then told by the
/// `learning_rate` at the top that was meant.
pub(super) fn check(tree: &Node) -> Result<()> {
    let Value::Table(entries) = &tree.value else { return Ok(()) };
    walk(entries, "", &own_keys())
}

/// Our tables with their keys.
fn own_keys() -> Vec<(String, Vec<&'static str>)> {
    list(|keys: &mut Keys| Config::visit(None, keys).map(drop))
        .into_iter()
        .map(|table| (table.name, table.keys.iter().map(|row| row.name).collect()))
        .collect()
}

fn walk(entries: &[(String, Node)], prefix: &str, own: &[(String, Vec<&str>)]) -> Result<()> {
    let full = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    let table = own.iter().find(|(name, _)| name == prefix);
    for (key, node) in entries {
        let is_known = table.is_some_and(|(_, keys)| keys.contains(&key.as_str()));
        let is_table = own.iter().any(|(name, _)| name.split('.').next() == Some(key) && prefix.is_empty());
        if let (Value::Table(inner), true) = (&node.value, is_table || !prefix.is_empty()) {
            walk(inner, &full(key), own)?;
            continue;
        }
        if is_known || is_table || table.is_none() {
            continue;
        }
        if let Some((key, advice)) = advice(key, node, own) {
            let problem = Problem::ForeignKey { key: full(&key), advice };
            return Err(ConfigError { place: node.place.clone(), problem });
        }
    }
    Ok(())
}

/// Returns the whole name of another program's setting, and what to write instead.
fn advice(key: &str, node: &Node, own: &[(String, Vec<&str>)]) -> Option<(String, String)> {
    if let Value::Table(entries) = &node.value {
        let inner = entries.iter().find_map(|(name, node)| advice(&format!("{key}.{name}"), node, own));
        if inner.is_some() {
            return inner;
        }
    }
    let found = Program::NAMES
        .iter()
        .find_map(|(_, program)| program.own().iter().find(|name| name.names.contains(&key)));
    let advice = match found {
        // A name that is ours too may belong in another table.
        Some(Name { meaning: Meaning::Key { key: ours, remark: "", .. }, .. })
            if ours.rsplit('.').next() == Some(key) =>
        {
            elsewhere(key, own)
        }
        _ => None,
    };
    let advice = advice.or_else(|| found.map(Name::advice)).or_else(|| elsewhere(key, own))?;
    Some((key.to_owned(), advice))
}

/// Says where a key of ours belongs.
fn elsewhere(key: &str, own: &[(String, Vec<&str>)]) -> Option<String> {
    // Words that every table might have.
    if matches!(key, "model" | "kind" | "start" | "alpha" | "adapter" | "train" | "eval") {
        return None;
    }
    let places: Vec<_> = own
        .iter()
        .filter(|(_, keys)| keys.contains(&key))
        .map(
            |(table, _)| {
                if table.is_empty() { format!("`{key}` at the top") } else { format!("`{table}.{key}`") }
            },
        )
        .collect();
    (!places.is_empty()).then(|| format!("it is {}", places.join(" or ")))
}

#[cfg(test)]
mod tests;
