//! The configuration that answers make.

use std::path::Path;

use tandem_model::ModelFolder;
use tandem_train::config::{Draft, Facts, Method};
use toml::Value;

use super::facts::LocalFacts;
use super::questions::Told;
use super::{judges, set_devices};
use crate::args::{InitArguments, InitMethod, Trained};

/// Rows of a step, small enough for a first run and large enough to learn from.
const BATCH: i64 = 16;

/// Tokens of prompt and completion, if the model is made for as many.
const MAX_LENGTH: usize = 1024;

/// Tokens of a completion, if prompts have as much room.
const MAX_NEW_TOKENS: usize = 256;

/// Writes the answers into a draft.
///
/// # Errors
/// A file of judges that cannot be read or is wrong.
pub(super) fn draft(told: &Told, arguments: &InitArguments) -> anyhow::Result<Draft> {
    let mut draft = Draft::default();
    let facts = LocalFacts::new(&arguments.file, false);
    let method = Method::from(told.method);
    let output = arguments.output.clone().unwrap_or_else(|| format!("runs/{method}"));
    draft.header = vec![
        "Written by `tandem init`. `tandem config KEY` explains a key, `tandem plan` says what it needs."
            .to_owned(),
    ];
    draft.set("method", method.name(), "sft, dpo, kto, reward, online, grpo or distill");
    draft.set("model", facts.path(&told.model), "a folder, or a name of the hub");
    draft.set("output", facts.local(&output), "the run's folder");
    let rows = |paths: &[String]| {
        let paths: Vec<String> = paths.iter().map(|path| facts.path(path)).collect();
        if paths.len() == 1 { Value::from(paths[0].clone()) } else { paths.into() }
    };
    draft.set("data.train", rows(&told.data), "`tandem data` shows them as the model sees them");
    if !told.eval.is_empty() {
        draft.set("data.eval", rows(&told.eval), "held-out rows");
    }
    let longer = match method {
        Method::Reward => "longer pairs are dropped",
        _ if method.generates() => "longer prompts are dropped",
        _ => "the rest is cut",
    };
    let context =
        ModelFolder::open(Path::new(&told.model)).map_or(MAX_LENGTH, |folder| folder.spec().context());
    let length = MAX_LENGTH.min(context);
    draft.set("data.max_length", length as i64, format!("tokens of prompt and completion; {longer}"));
    set_trained(&mut draft, told.train);
    if matches!(told.method, InitMethod::Dpo | InitMethod::Kto | InitMethod::Online) {
        draft.set("objective.beta", 0.1, "larger keeps the policy closer to the reference");
    }
    if method.generates() {
        draft.set("online.answers", answers(told.method), "completions of a prompt");
        draft.set(
            "online.max_new_tokens",
            MAX_NEW_TOKENS.min(length / 2) as i64,
            "most tokens of a completion",
        );
        draft.judges = judges::keys(&told.judges, &facts)?;
    }
    if let Some(teacher) = &told.teacher {
        draft.set("reference.model", facts.path(teacher), "the teacher");
        draft.set("distill.beta", 0.5, "0 is the forward KL, 1 the reverse KL");
    }
    draft.set("train.batch_size", BATCH, format!("{} of a step, over all ranks", counted(told.method)));
    draft.set("train.epochs", 1.0, "passes over the data; or steps = …");
    draft.set("train.learning_rate", learning_rate(told.method, told.train), "the peak");
    draft.set("train.schedule", "linear", "linear, cosine or constant");
    draft.set("train.warmup_ratio", 0.1, "share of the steps in which the rate rises");
    set_devices(&mut draft, told.devices.as_deref(), told.memory.as_deref());
    Ok(draft)
}

/// TRL's defaults of `num_generations`, and the pair of online DPO.
fn answers(method: InitMethod) -> i64 {
    if method == InitMethod::Grpo { 8 } else { 2 }
}

/// Name of the rows that a batch counts.
fn counted(method: InitMethod) -> &'static str {
    match method {
        InitMethod::Sft | InitMethod::Distill => "rows",
        InitMethod::Dpo | InitMethod::Reward => "pairs",
        InitMethod::Kto => "completions",
        InitMethod::Online | InitMethod::Grpo => "prompts",
    }
}

/// A run of which a model's config is known and no rows are.
pub(in crate::commands) fn outline(model: &str, method: Option<InitMethod>, train: Option<Trained>) -> Draft {
    let (method, train) = (method.unwrap_or(InitMethod::Dpo), train.unwrap_or(Trained::Full));
    let mut draft = Draft::default();
    draft.set("method", Method::from(method).name(), "");
    draft.set("model", model, "");
    draft.set("output", "runs/planned", "");
    draft.set("data.train", "rows.jsonl", "");
    if Method::from(method).generates() {
        // A judge that takes no memory.
        draft.judges = vec![vec![judges::key("kind", "missing_eos")]];
    }
    if method == InitMethod::Distill {
        draft.set("reference.model", model, "");
    }
    set_trained(&mut draft, train);
    draft.set("train.batch_size", BATCH, "");
    draft.set("train.epochs", 1.0, "");
    draft.set("train.learning_rate", learning_rate(method, train), "");
    draft
}

fn set_trained(draft: &mut Draft, train: Trained) {
    if train != Trained::Full {
        draft.set("adapter.rank", 16, "rank of the low-rank terms");
        draft.set("adapter.alpha", 32.0, "their scale is alpha / rank");
        draft.set("adapter.targets", "all-linear", "or a list, as [\"q_proj\", \"v_proj\"]");
    }
    if train == Trained::Qlora {
        draft.set("compute.format", "nf4", "frozen weights in 4 bits");
    }
}

/// TRL's defaults; an adapter has ten times the rate, as TRL's documentation advises.
fn learning_rate(method: InitMethod, train: Trained) -> f64 {
    match (method, train) {
        (InitMethod::Sft | InitMethod::Distill, Trained::Full) => 2e-5,
        (InitMethod::Sft | InitMethod::Distill, _) => 2e-4,
        (InitMethod::Dpo | InitMethod::Kto | InitMethod::Grpo, Trained::Full) => 1e-6,
        (InitMethod::Dpo | InitMethod::Kto | InitMethod::Grpo, _) => 1e-5,
        (InitMethod::Reward, Trained::Full) => 1e-5,
        (InitMethod::Reward, _) => 1e-4,
        (InitMethod::Online, Trained::Full) => 5e-7,
        (InitMethod::Online, _) => 5e-6,
    }
}
