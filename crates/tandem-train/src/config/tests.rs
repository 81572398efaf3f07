//! Configs that are accepted and refused, and the reference page.

mod accepted;
mod adapters;
mod distill;
mod judges;
mod kto;
mod logging;
mod notes;
mod online;
mod refused;
mod rewards;

use std::fs;

use tempfile::TempDir;

use super::*;

/// An example with most keys, which must stay valid.
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

/// `docs/config.md` is what [`reference_page`] writes; `TANDEM_BLESS=1` writes it.
#[test]
fn config_page() {
    hold("docs/config.md", &reference_page(), "config_page");
}

/// `docs/coming-from.md` is what [`coming_from_page`] writes.
#[test]
fn coming_from_page_is_committed() {
    hold("docs/coming-from.md", &coming_from_page(), "coming_from_page");
}

fn hold(name: &str, page: &str, test: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    if std::env::var_os("TANDEM_BLESS").is_some() {
        fs::write(&path, page).expect("written");
        return;
    }
    let bless = format!("TANDEM_BLESS=1 cargo test -p tandem-train {test} writes the page");
    let committed = fs::read_to_string(&path).expect("readable");
    if let Some((index, (now, old))) =
        page.lines().zip(committed.lines()).enumerate().find(|(_, (now, old))| now != old)
    {
        panic!("{name}:{}: should be\n{now}\nbut is\n{old}\n{bless}", index + 1);
    }
    assert_eq!(page, committed, "{bless}");
}
