//! One test for each thing a config may get wrong, and that a right one arrives whole.

mod accepted;
mod adapters;
mod judges;
mod online;
mod refused;
mod rewards;

use std::fs;

use tempfile::TempDir;

use super::*;

/// The example of the documentation, which must stay valid for ever.
const EXAMPLE: &str = r#"method = "dpo"                        # sft | dpo | online
model = "models/llama-small"          # an HF folder
output = "runs/first"
seed = 42
[reference]
kind = "model"                        # precompute | base | adapter | model | sync | none
model = "models/llama-small-ref"      # for model, and for precompute from other weights than the policy's
[data]
train = "data/pref_conv.jsonl"        # a path, a list of paths, or tables with path and weight
eval = "data/held_out.jsonl"
max_length = 1024
order = "shuffled"                    # or "sequential"
[objective]
loss = "sigmoid"                      # or a table of loss = weight
beta = 0.1
[train]
batch_size = 8                        # pairs (rows, for SFT) per optimiser step, over all ranks
micro_batch_tokens = 4096             # or micro_batch_size = pairs
steps = 20                            # or epochs
optimizer = "adamw"
learning_rate = 1e-4
schedule = "linear"
warmup_steps = 4
max_grad_norm = 1.0
weight_decay = 0.0
save_every = 10
eval_every = 10
[compute]
devices = "cpu"                       # "auto", "cpu", "cpu:4", "cuda", "cuda:0,1"
dtype = "f32"                         # compute type; masters are f32
threads = 2
"#;

const SMALL_SFT: &str = r#"
method = "sft"
model = "m"
output = "o"
data.train = "t.jsonl"
train = { batch_size = 2, steps = 3, learning_rate = 1 }
"#;

fn load_with(text: &str, overrides: &[&str]) -> (TempDir, Result<Config, ConfigError>) {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("run.toml");
    fs::write(&path, text).expect("written");
    let config = Config::load(&path, overrides);
    (folder, config)
}

fn load(text: &str) -> Config {
    load_with(text, &[]).1.unwrap_or_else(|e| panic!("{e}"))
}

fn set(overrides: &[&str]) -> Config {
    load_with(EXAMPLE, overrides).1.unwrap_or_else(|e| panic!("{e}"))
}

/// The message without the folder's name.
fn refusal(text: &str, overrides: &[&str]) -> String {
    let (folder, config) = load_with(text, overrides);
    let error = config.expect_err("this config must be refused").to_string();
    error.replace(&format!("{}/", folder.path().display()), "")
}

/// `EXAMPLE` with one line's beginning replaced.
fn changed(from: &str, to: &str) -> String {
    assert_eq!(EXAMPLE.matches(from).count(), 1, "{from}");
    EXAMPLE.replace(from, to)
}

/// The reference page and the reader must name the same keys.
#[test]
fn the_documentation_lists_exactly_the_known_keys() {
    let page = include_str!("../../../../docs/config.md");
    let mut checked = 0;
    // A judge's keys depend on its kind; they have a test of their own.
    for section in page.split("\n## ").skip(1).filter(|section| !section.starts_with("`[[judges]]`")) {
        let heading = section.lines().next().expect("a heading");
        // Tables within tables have tests of their own.
        let section = section.split("\n### ").next().expect("a section");
        let table = heading.trim_matches(|c: char| !c.is_ascii_lowercase());
        let prefix = if heading.starts_with("At the top") { String::new() } else { format!("{table}.") };
        let mut documented: Vec<&str> = section
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
            .map(|(key, _)| key)
            .collect();
        if prefix.is_empty() {
            documented.extend([
                "adapter",
                "reference",
                "data",
                "online",
                "objective",
                "train",
                "compute",
                "judges",
            ]);
        }
        let example = match table {
            "online" => {
                documented.push("server");
                online::ONLINE
            }
            _ => EXAMPLE,
        };
        let (_folder, config) = load_with(example, &[&format!("{prefix}qqqqqqqq=1")]);
        let Problem::UnknownKey { mut known, .. } = config.expect_err("an unknown key").problem else {
            panic!("{heading}: another problem came first")
        };
        known.sort_unstable();
        documented.sort_unstable();
        assert_eq!(documented, known, "{heading}");
        checked += 1;
    }
    assert_eq!(checked, 8);
}
