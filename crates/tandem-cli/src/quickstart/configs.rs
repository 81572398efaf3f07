//! Configuration files of the quickstart's two runs, as a user would write them.

use std::path::Path;

use anyhow::Context;
use serde_json::json;

/// First lines of the configurations.
const SFT: &str = "# First, show the model what answers look like: JSON or a note, as the prompt asks, or either where it does not ask.";
const DPO: &str = "# Then, show it pairs of answers of which the JSON one is preferred.";

/// Returns whether a folder has configurations that [`write`] wrote.
pub(crate) fn are_in(folder: &Path) -> bool {
    let begins = |(name, line): &(&str, &str)| {
        std::fs::read_to_string(folder.join(name)).is_ok_and(|text| text.lines().next() == Some(line))
    };
    [("sft.toml", SFT), ("dpo.toml", DPO)].iter().all(begins)
}

/// Writes `model/config.json`, `sft.toml` and `dpo.toml` into `folder`.
pub(crate) fn write(folder: &Path, vocab_size: usize, threads: usize) -> anyhow::Result<()> {
    let model = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": true,
        "bos_token_id": 1,
        "eos_token_id": 2,
    });
    let sft = format!(
        r#"{SFT}
method = "sft"
model = "model"
weights = "random"
output = "sft"
seed = 1

[data]
train = "data/sft.jsonl"
max_length = 128
cache = "cache"

[train]
batch_size = 32
steps = 1000
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = 20

[compute]
devices = "cpu"
dtype = "f32"
threads = {threads}
"#
    );
    let dpo = format!(
        r#"{DPO}
method = "dpo"
model = "sft/final"
output = "dpo"
seed = 1

[reference]
kind = "precompute"

[data]
train = "data/preferences.jsonl"
eval = "data/held_out.jsonl"
max_length = 128
cache = "cache"

[objective]
# DPO's loss, and the likelihood of the preferred answer beside it, which keeps a model this small from forgetting
# how to write while it learns what not to write.
loss = {{ sigmoid = 1.0, sft = 3.0 }}
beta = 1.0

[train]
batch_size = 16
steps = 100
learning_rate = 5e-5
warmup_steps = 4

[compute]
devices = "cpu"
dtype = "f32"
threads = {threads}
"#
    );
    for (name, text) in
        [("model/config.json", serde_json::to_string_pretty(&model)?), ("sft.toml", sft), ("dpo.toml", dpo)]
    {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
