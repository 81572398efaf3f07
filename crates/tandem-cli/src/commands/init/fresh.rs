//! The configuration that answers make.

use tandem_train::config::{Draft, Facts, Method};
use toml::Value;

use super::facts::LocalFacts;
use super::questions::Told;
use super::set_devices;
use crate::args::{InitArguments, InitMethod, Trained};

/// Rows of a step, small enough for a first run and large enough to learn from.
const BATCH: i64 = 16;

pub(super) fn draft(told: &Told, arguments: &InitArguments) -> Draft {
    let mut draft = Draft::default();
    let facts = LocalFacts::new(&arguments.file, false);
    let method = Method::from(told.method);
    let output = arguments.output.clone().unwrap_or_else(|| format!("runs/{method}"));
    draft.header = vec![
        "Written by `tandem init`. `tandem config KEY` explains a key, `tandem plan` says what it needs."
            .to_owned(),
    ];
    draft.set("method", method.name(), "");
    draft.set("model", facts.path(&told.model), "");
    draft.set("output", facts.local(&output), "");
    let rows = |paths: &[String]| {
        let paths: Vec<String> = paths.iter().map(|path| facts.path(path)).collect();
        if paths.len() == 1 { Value::from(paths[0].clone()) } else { paths.into() }
    };
    draft.set("data.train", rows(&told.data), "");
    if !told.eval.is_empty() {
        draft.set("data.eval", rows(&told.eval), "");
    }
    draft.set("data.max_length", 1024, "");
    if told.train != Trained::Full {
        draft.set("adapter.rank", 16, "");
        draft.set("adapter.alpha", 32.0, "");
        draft.set("adapter.targets", "all-linear", "");
    }
    if told.train == Trained::Qlora {
        draft.set("compute.format", "nf4", "");
    }
    if told.method == InitMethod::Dpo {
        draft.set("objective.beta", 0.1, "");
    }
    draft.set("train.batch_size", BATCH, "");
    draft.set("train.epochs", 1.0, "");
    draft.set("train.learning_rate", learning_rate(told), "");
    draft.set("train.schedule", "linear", "");
    draft.set("train.warmup_ratio", 0.1, "");
    set_devices(&mut draft, told.devices.as_deref(), told.memory.as_deref());
    draft.explain();
    draft
}

/// TRL's defaults; an adapter has ten times the rate, as TRL's documentation advises.
fn learning_rate(told: &Told) -> f64 {
    let full = match told.method {
        InitMethod::Sft => 2e-5,
        InitMethod::Dpo => 1e-6,
        InitMethod::Reward => 1e-5,
    };
    if told.train == Trained::Full { full } else { 10.0 * full }
}
