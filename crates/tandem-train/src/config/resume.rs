//! What changed between a saved run's config and the one it is resumed with.

use std::collections::BTreeMap;

use super::{Config, judges};

/// A key whose value differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The full key.
    pub key: String,
    /// The value of the saved run; `None` if it had none.
    pub saved: Option<String>,
    /// The value now; `None` if there is none.
    pub now: Option<String>,
    /// Whether the continued run differs from one that was never stopped.
    pub alters_run: bool,
}

/// Keys that decide where things are kept or how fast and how often, never what is computed for training.
const FREE: [&str; 29] = [
    "output",
    "data.cache",
    "data.eval",
    "train.save_every",
    "train.async_checkpoints",
    "train.eval_every",
    "train.keep",
    "train.max_skipped",
    "train.record_rows",
    "online.max_batch",
    "online.samples_every",
    "online.server.address",
    "online.server.key_variable",
    "online.server.seconds",
    "online.server.retries",
    "online.server.concurrency",
    "online.server.adapters",
    "compute.devices",
    "compute.threads",
    "compute.sharding",
    "compute.replicate",
    "compute.pipeline",
    "compute.checkpointing",
    "compute.memory",
    "compute.engine",
    "compute.deadline",
    "compute.offload",
    "compute.offload_dir",
    "compute.offload_activations",
];

/// The same of a judge: how it is reached, how long it is waited for, and what may be spent on it.
const FREE_FOR_JUDGES: [&str; 13] = [
    "seconds",
    "start_seconds",
    "in_flight",
    "restarts",
    "grace_s",
    "api_key_env",
    "timeout_s",
    "retries",
    "first_pause_s",
    "longest_pause_s",
    "concurrency",
    "cache",
    "budget",
];

fn is_free_for_judges(key: &str) -> bool {
    let own = key.strip_prefix("judges[").and_then(|rest| rest.split_once("]."));
    own.is_some_and(|(_, key)| FREE_FOR_JUDGES.contains(&key))
}

impl Config {
    /// Every difference from the config of a saved run, by key.
    pub fn changes_since(&self, saved: &Self) -> Vec<Change> {
        let (old, new) = (saved.flat(), self.flat());
        let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
        keys.sort();
        keys.dedup();
        keys.into_iter()
            .filter(|key| old.get(*key) != new.get(*key))
            .map(|key| Change {
                key: key.clone(),
                saved: old.get(key).cloned(),
                now: new.get(key).cloned(),
                alters_run: !FREE.contains(&key.as_str()) && !is_free_for_judges(key),
            })
            .collect()
    }

    fn flat(&self) -> BTreeMap<String, String> {
        let mut out = BTreeMap::new();
        let tables = self.tables().into_iter().map(|(table, entries)| (table.to_owned(), entries));
        let judges = self.judges.iter().enumerate();
        let judges = judges.map(|(index, judge)| (format!("judges[{index}]"), judges::entries(judge)));
        for (table, entries) in tables.chain(judges) {
            for (key, value) in entries {
                let full = if table.is_empty() { key.to_string() } else { format!("{table}.{key}") };
                out.insert(full, value.to_string());
            }
        }
        out
    }
}
