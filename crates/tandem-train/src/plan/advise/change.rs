//! Registry of memory-saving changes, used by advice and search.

use crate::config::Config;

/// A change of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Description.
    pub name: &'static str,
    /// The keys that it sets, as `--set` takes them.
    pub overrides: &'static [&'static str],
    /// Side effects; empty if the run computes the same.
    pub effect: &'static str,
}

const fn change(name: &'static str, overrides: &'static [&'static str], effect: &'static str) -> Change {
    Change { name, overrides, effect }
}

/// All changes, cheapest first: little or no time, then communication, then other arithmetic, then
/// other trained parameters. A change to a key that this version lacks is skipped.
pub const CHANGES: &[Change] = &[
    change("keep fewer activations", &["compute.checkpointing=selective"], ""),
    change("keep the blocks' inputs alone", &["compute.checkpointing=block"], ""),
    change("precompute the reference", &["reference.kind=precompute"], ""),
    change("divide optimiser states", &["compute.sharding=zero1"], ""),
    change("divide gradients too", &["compute.sharding=zero2"], ""),
    change("divide weights too", &["compute.sharding=zero3"], ""),
    change("micro-batches of 2048 tokens", &["train.micro_batch_tokens=2048"], ROUNDING),
    change("micro-batches of 1024 tokens", &["train.micro_batch_tokens=1024"], ROUNDING),
    change("micro-batches of one row", &[ONE_ROW], ROUNDING),
    change("micro-batches of one completion", &[ONE_COMPLETION], ROUNDING),
    change("optimiser states in 8 bits", &["train.optimizer_state=8bit"], "moments are rounded"),
    change("keep states and weights in host memory", &["compute.offload=host"], ""),
    change(
        "keep the blocks' inputs in host memory",
        &["compute.checkpointing=block", "compute.offload_activations=true"],
        "",
    ),
    change(
        "keep states and weights on disk",
        &["compute.offload=nvme", "compute.offload_dir=offload"],
        "offload_dir must be a folder on a disk",
    ),
    change("frozen weights in 4 bits", &["compute.format=nf4"], "frozen weights are rounded"),
    change(
        "train an adapter (LoRA)",
        &["adapter.kind=lora", "adapter.rank=16"],
        "an adapter is trained, not the model",
    ),
    change(
        "train an adapter on weights in 4 bits (QLoRA)",
        &["adapter.kind=lora", "adapter.rank=16", "compute.format=nf4"],
        "an adapter is trained, frozen weights are rounded",
    ),
];

/// The smallest micro-batch, and that of a method that divides a prompt's completions: a row is a prompt with all of them.
const ONE_ROW: &str = "train.micro_batch_size=1";
const ONE_COMPLETION: &str = "train.micro_batch_tokens=1";

/// Another cut of a batch is another order of sums.
const ROUNDING: &str = "the last bits of sums";

impl Change {
    /// The keys that it sets.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.overrides.iter().map(|text| key(text))
    }

    /// Returns whether other parameters train than before.
    pub fn alters_what_trains(&self) -> bool {
        self.keys().any(|key| key.starts_with("adapter."))
    }

    /// Returns whether the change applies: its keys exist, its values are valid and new, and
    /// nothing contradicts them. An existing adapter stays as it is.
    pub fn applies(&self, config: &Config) -> bool {
        let is_free = config.adapter.is_none() || !self.alters_what_trains();
        let divides = config.online.as_ref().is_some_and(|online| online.algorithm.divides_prompts());
        let other_row = if divides { ONE_ROW } else { ONE_COMPLETION };
        is_free
            && !self.overrides.contains(&other_row)
            && config.with(self.overrides).is_ok_and(|changed| changed != *config)
    }
}

/// Merges overrides of several changes; later ones win. Each key once, in table order.
pub fn overrides_of(changes: &[&Change]) -> Vec<&'static str> {
    let mut all: Vec<&'static str> = Vec::new();
    for text in changes.iter().flat_map(|change| change.overrides) {
        let is_other = |old: &&'static str| !replaces(key(text), key(old));
        all.retain(is_other);
        all.push(text);
    }
    all.sort_by_key(|text| key(text));
    all
}

/// Returns whether setting the first key later makes the second ineffective.
fn replaces(new: &str, old: &str) -> bool {
    let of_cut = |key: &str| key.starts_with("train.micro_batch_");
    new == old || (of_cut(new) && of_cut(old))
}

/// The key of `key=value`.
fn key(text: &str) -> &str {
    text.split('=').next().unwrap_or(text)
}

/// Overrides as a piece of a configuration file.
pub fn as_toml<S: AsRef<str>>(overrides: &[S]) -> String {
    let mut text = String::new();
    let mut current = "";
    for item in overrides {
        let (key, value) = item.as_ref().split_once('=').unwrap_or((item.as_ref(), ""));
        let (table, key) = key.rsplit_once('.').unwrap_or(("", key));
        if table != current {
            text += &format!("[{table}]\n");
            current = table;
        }
        let is_plain = value.parse::<f64>().is_ok() || ["true", "false"].contains(&value);
        text += &if is_plain { format!("{key} = {value}\n") } else { format!("{key} = {value:?}\n") };
    }
    text
}

/// Overrides as flags of the command.
pub fn as_flags<S: AsRef<str>>(overrides: &[S]) -> String {
    overrides.iter().map(|text| format!("--set {}", text.as_ref())).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_change_of_a_key_wins_and_each_is_written_once() {
        let named = |name: &str| CHANGES.iter().find(|c| c.overrides.contains(&name)).unwrap();
        let all = overrides_of(&[
            named("train.micro_batch_tokens=1024"),
            named("compute.sharding=zero1"),
            named("compute.checkpointing=selective"),
            named("compute.sharding=zero3"),
            named("train.micro_batch_size=1"),
        ]);
        assert_eq!(
            all,
            ["compute.checkpointing=selective", "compute.sharding=zero3", "train.micro_batch_size=1"]
        );
        let toml =
            "[compute]\ncheckpointing = \"selective\"\nsharding = \"zero3\"\n[train]\nmicro_batch_size = 1\n";
        assert_eq!(as_toml(&all), toml);
        assert_eq!(as_flags(&all[1..]), "--set compute.sharding=zero3 --set train.micro_batch_size=1");
    }
}
