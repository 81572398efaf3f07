//! The resolved config: every key that applies with its value, and its difference from that of a
//! saved run.

use std::collections::BTreeMap;
use std::fmt::Write;

use tandem_kernels::StateForm;
use tandem_model::TensorParallelShard;

use super::keys::{Keys, Resume, Table, Written};
use super::{Config, SumForm};

/// First line of the `config.toml` of a run. Only a file with this line may use former names of keys,
/// so that a run of an older version can be resumed.
pub const RESOLVED_HEADER: &str =
    "# The resolved config of this run, written by tandem. Paths are absolute, defaults written out.\n";

/// Tables in the order in which they are written; judges follow.
pub(super) const TABLES: [&str; 14] = [
    "",
    "adapter",
    "reference",
    "data",
    "online",
    "online.server",
    "online.environment",
    "grpo",
    "distill",
    "objective",
    "train",
    "compute",
    "logging",
    "logging.mlflow",
];

/// Sorts tables into the order in which they are written.
pub(super) fn sorted<T>(mut tables: Vec<Table<T>>) -> Vec<Table<T>> {
    tables.sort_by_key(|table| TABLES.iter().position(|name| *name == table.name).unwrap_or(TABLES.len()));
    tables
}

/// A key whose value differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Full key.
    pub key: String,
    /// Value of the saved run; `None` if it had none.
    pub saved: Option<String>,
    /// Value now; `None` if there is none.
    pub now: Option<String>,
    /// Whether the resumed run differs from one that never stopped.
    pub alters_run: bool,
}

impl Config {
    /// Returns the config file that yields exactly this config from any folder: paths are absolute
    /// and defaults are written out.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for table in self.tables() {
            match table.name.split_once('[') {
                _ if table.keys.is_empty() || table.name.is_empty() => {}
                Some((array, _)) => text += &format!("\n[[{array}]]\n"),
                None => text += &format!("\n[{}]\n", table.name),
            }
            for Written { key, value, .. } in table.keys {
                let _ = writeln!(text, "{key} = {value}");
            }
        }
        text
    }

    /// Returns every key that applies with its value as a config file has it, in the order of keys.
    pub(crate) fn entries(&self) -> Vec<(String, String)> {
        self.flat().into_iter().map(|(key, written)| (key, written.value.to_string())).collect()
    }

    /// Returns the keys that the numbers of a run depend on, with their values, by key.
    pub(crate) fn altering_entries(&self) -> Vec<(String, String)> {
        let alters = |(_, written): &(String, Written)| written.resume == Resume::Alters;
        let entries = self.flat().into_iter().filter(alters);
        entries.map(|(key, written)| (key, written.value.to_string())).collect()
    }

    /// Returns every difference from the config of a saved run, by key.
    pub fn changes_since(&self, saved: &Self) -> Vec<Change> {
        let (old, new) = (saved.flat(), self.flat());
        let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
        keys.sort();
        keys.dedup();
        let value = |config: &BTreeMap<String, Written>, key: &String| {
            config.get(key).map(|written| written.value.to_string())
        };
        let slices_keep_bits = [self, saved].iter().all(|config| config.slices_keep_bits());
        let change = |key: &String| Change {
            key: key.clone(),
            saved: value(&old, key),
            now: value(&new, key),
            alters_run: [&old, &new]
                .iter()
                .filter_map(|config| config.get(key))
                .all(|w| w.resume == Resume::Alters)
                && !(key == "compute.tensor" && slices_keep_bits),
        };
        keys.into_iter().map(change).filter(|change| change.saved != change.now).collect()
    }

    /// Returns whether the bits of the run are those of one tensor-parallel rank.
    fn slices_keep_bits(&self) -> bool {
        let shard = TensorParallelShard { index: 0, count: self.compute.tensor };
        shard.keeps_bits()
            && self.compute.reduction == SumForm::Exact
            && self.compute.sums_in_blocks()
            && self.train.optimizer_state != StateForm::EightBit
    }

    fn flat(&self) -> BTreeMap<String, Written> {
        let full =
            |table: &str, key| if table.is_empty() { String::from(key) } else { format!("{table}.{key}") };
        self.tables()
            .into_iter()
            .flat_map(|Table { name, keys }| {
                keys.into_iter().map(move |written| (full(&name, written.key), written))
            })
            .collect()
    }

    fn tables(&self) -> Vec<Table<Written>> {
        let mut keys = Keys::write();
        Self::visit(Some(self), &mut keys).expect("only reading fails");
        let Keys::Write(tables) = keys else { unreachable!("as created") };
        sorted(tables)
    }
}
