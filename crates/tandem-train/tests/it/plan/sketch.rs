//! A model and a run without weights, data or tokenizer.

use std::fs;
use std::path::Path;

use serde_json::json;
use tandem_train::Config;
use tandem_train::plan::estimate::device::{DeviceKind, DeviceTable};
use tandem_train::plan::{PlanInputs, RunPlan, SyntheticBatch};

/// A folder with `config.json` of a Llama and `run.toml`.
pub struct Sketch {
    folder: tempfile::TempDir,
    assumed: SyntheticBatch,
}

impl Sketch {
    /// A small one: hidden 64, 4 blocks, 1000 tokens; micro-batches of 384 tokens.
    pub fn small() -> Self {
        Self::new([64, 160, 4, 4, 2, 1000], 128, 384)
    }

    /// `sizes` are hidden, intermediate, blocks, heads, key/value heads, vocabulary.
    pub fn new(sizes: [usize; 6], max_length: usize, tokens: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [hidden, intermediate, blocks, heads, kv_heads, vocab] = sizes;
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
        });
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let toml = format!(
            "method = \"dpo\"\nmodel = \".\"\noutput = \"run\"\n[reference]\nkind = \"model\"\n\
             [data]\ntrain = \"nowhere.jsonl\"\nmax_length = {max_length}\n\
             [train]\nbatch_size = 16\nsteps = 10\nlearning_rate = 1e-5\nsave_every = 5\n\
             [compute]\ndtype = \"f32\"\nthreads = 1\n"
        );
        fs::write(folder.path().join("run.toml"), toml).unwrap();
        Self { folder, assumed: SyntheticBatch { tokens, scored: None } }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn config(&self, overrides: &[&str]) -> Config {
        Config::load(&self.path().join("run.toml"), overrides).unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn outline(&self, config: &Config) -> PlanInputs<'static> {
        PlanInputs::assume(config, self.assumed).unwrap()
    }

    pub fn plan(&self, overrides: &[&str], ranks: usize, device: &DeviceKind) -> RunPlan {
        let config = self.config(overrides);
        RunPlan::make(&config, &self.outline(&config), ranks, device).unwrap()
    }
}

/// A row of the built-in table.
pub fn device(name: &str) -> DeviceKind {
    DeviceTable::built_in().find(name).unwrap().clone()
}
