//! Configs: of a model, and of a run.

use tandem_train::Config;
use tandem_train::plan::{Plan, PlanInputs, SyntheticBatch};

use crate::scratch;

/// Run of random weights, which trusts nothing but the model's config.
const RUN: &str = "method = \"dpo\"\nmodel = \"model\"\nweights = \"random\"\noutput = \"run\"\n\
                   [data]\ntrain = \"rows.jsonl\"\nmax_length = 64\n[train]\nsteps = 2\nbatch_size = 4\nlearning_rate = 1e-5\n";

/// Reads a model's `config.json`, and plans a run of it.
pub(crate) fn model_config(bytes: &[u8]) {
    scratch::with_file("plan/model", "config.json", bytes);
    let folder = scratch::with_file("plan", "run.toml", RUN.as_bytes());
    let config = Config::load::<&str>(&folder.join("run.toml"), &[]).expect("the run's config");
    let assumed = SyntheticBatch { tokens: 64, scored: None };
    if let Ok(inputs) = PlanInputs::assume(&config, assumed) {
        let _ = Plan::new(&config, &inputs, 0, 1);
    }
}

/// Reads a run's config, and writes it with every default.
pub(crate) fn run_toml(bytes: &[u8]) {
    let folder = scratch::with_file("run_toml", "run.toml", bytes);
    if let Ok(config) = Config::load::<&str>(&folder.join("run.toml"), &[]) {
        let _ = config.to_toml();
    }
}
