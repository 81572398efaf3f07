//! Inputs of a run: model description, tokenizer and tokens.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tandem_data::DataError;
use tandem_data::columns::Columns;
use tandem_data::order::{self, BatchSampler};
use tandem_data::progress::Progress;
use tandem_data::record::RowKind;
use tandem_data::row::LossMask;
use tandem_data::row::RowOptions;
use tandem_data::source::{self, Source, Sources};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::{Backend, cuda};
use tandem_model::adapter::PeftFolder;
use tandem_model::{Adapter, AdapterConfig, Decoder, DecoderSpec, ModelFolder, ParamKind};

use crate::config::{
    self, AdapterSection, AdapterStart, AttentionKernels, Config, DataConfig, DataSource, Length, MAX_STEPS,
    Method, TemplateSource, Weights,
};
use crate::events::{Event, Observer};
use crate::metrics::Split;
use crate::recipe::{self, MicroBatcher, RowLayout, open_teacher};
use crate::{Result, TrainError, pool};

/// A config with opened and checked inputs.
pub struct RunInputs {
    /// The policy's folder.
    pub folder: ModelFolder,
    /// The model, whole, with the adapter that trains, if one does.
    pub decoder: Arc<Decoder>,
    /// The same with the reference's adapter, if it has its own.
    pub reference_decoder: Option<Arc<Decoder>>,
    /// The teacher of a distillation.
    pub teacher: Option<Arc<Decoder>>,
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Training tokens.
    pub train: TokenCache,
    /// Held-out tokens.
    pub eval: Option<TokenCache>,
    /// Tokens of the longest prompt that the run answers while it trains; 0 if it answers none.
    pub longest_prompt: usize,
}

/// Score module of a reward model, trained fully beside an adapter.
const SCORE: &str = "score";

/// The models of a run, described.
#[derive(Clone)]
pub struct ModelSpecs {
    /// The policy's, with the adapter that trains, if one does.
    pub policy: Arc<Decoder>,
    /// The same with the reference's adapter, if it has its own.
    pub reference: Option<Arc<Decoder>>,
    /// The teacher of a distillation.
    pub teacher: Option<Arc<Decoder>>,
}

/// Refuses heads that a GPU's kernels are not made for.
fn check_heads(config: &Config, whose: &str, spec: &DecoderSpec) -> Result<()> {
    let linear =
        spec.linear_attention.iter().flat_map(|linear| [linear.shape.key_dim, linear.shape.value_dim]);
    let widest = linear.fold(spec.attention.head_dim, usize::max);
    if config.compute.devices.backend() == Backend::Cpu || widest <= cuda::WIDEST_HEAD {
        return Ok(());
    }
    let reason = format!(
        "{whose} has heads of {widest} numbers, and kernels of GPUs are for up to {}; set compute.devices to \"cpu\"",
        cuda::WIDEST_HEAD
    );
    Err(TrainError::Mismatch { reason })
}

impl ModelSpecs {
    /// Decoders of a config.
    ///
    /// # Errors
    /// The folder of an adapter or a teacher cannot be read, or an adapter does not fit the model.
    pub fn from_config(config: &Config, plain: &Decoder) -> Result<Self> {
        let plain = &match config.compute.sums_in_blocks() {
            true => plain.clone(),
            false => plain.clone().without_sum_blocks(),
        };
        let fp8 = config.compute.fp8_products();
        let plain = &plain.clone().with_residual(config.compute.residual).with_fp8_matmul(fp8);
        let head_dim = plain.spec().attention.head_dim;
        if config.compute.attention == AttentionKernels::Wgmma && !cuda::has_wgmma(head_dim) {
            let reason = format!(
                "compute.attention = \"wgmma\": the model's heads have {head_dim} numbers, and kernels that multiply by \
                 warpgroups are for 33 to 64 and 97 to 128; leave it out"
            );
            return Err(TrainError::Mismatch { reason });
        }
        check_heads(config, "the model", plain.spec())?;
        let adapted = |adapter: AdapterConfig| -> Result<_> {
            Ok(Arc::new(plain.clone().with_adapter(Adapter::new(adapter, plain.spec())?)))
        };
        let open = |path| -> Result<_> {
            let folder = PeftFolder::open(path)?;
            if config.weights != Weights::Random {
                folder.check_kept_base()?;
            }
            Ok(folder.config().clone())
        };
        let reference = match &config.reference.adapter {
            Some(path) => Some(adapted(open(path)?)?),
            None => None,
        };
        let policy = match &config.adapter {
            None => Arc::new(plain.clone()),
            Some(AdapterSection { start: AdapterStart::New(adapter), .. }) => {
                let mut adapter = adapter.clone();
                // As in peft: the score head trains too.
                if plain.spec().head.is_score() && !adapter.modules_to_save.iter().any(|name| name == SCORE) {
                    adapter.modules_to_save.push(SCORE.to_owned());
                }
                adapted(adapter)?
            }
            Some(AdapterSection { start: AdapterStart::Folder(path), dropout }) => {
                let adapter = open(path)?;
                adapted(AdapterConfig { dropout: dropout.unwrap_or(adapter.dropout), ..adapter })?
            }
        };
        let trains_head = |adapter: &Adapter| adapter.saved().contains(&ParamKind::ScoreWeight);
        if plain.spec().head.is_score() && policy.adapter().is_some_and(|adapter| !trains_head(adapter)) {
            let reason = "the adapter that adapter.start names is not a reward model's: it has no head that scores texts; leave \
                          adapter.start out to begin another";
            return Err(TrainError::Mismatch { reason: reason.to_owned() });
        }
        let served = policy.adapter().map(Adapter::config).zip(config.server());
        if let Some(reason) = served.and_then(|(own, server)| config::unservable(own, server.kind)) {
            return Err(TrainError::Mismatch { reason });
        }
        let teacher = match config.distill {
            Some(_) => {
                let teacher = Decoder::new(open_teacher(config)?.spec().clone(), plain.positions())?;
                check_heads(config, "the teacher", teacher.spec())?;
                // It is never cut, so its sums need no blocks.
                Some(Arc::new(teacher.without_sum_blocks().with_fp8_matmul(fp8)))
            }
            None => None,
        };
        Ok(Self { policy, reference, teacher })
    }
}

/// Says that the dropout of a model's config is not applied, where TRL would apply it.
fn warn_of_dropout(config: &Config, folder: &ModelFolder, observer: &mut dyn Observer) {
    let mut keys = folder.config().dropout();
    // The others' `disable_dropout` is on by default. It reaches modules, which these two are not.
    if !matches!(config.method, Method::Sft | Method::Grpo | Method::Distill) {
        keys.retain(|(key, _)| matches!(*key, "attention_dropout" | "residual_dropout"));
    }
    if keys.is_empty() {
        return;
    }
    let keys: Vec<_> = keys.iter().map(|(key, rate)| format!("{key} {rate}")).collect();
    observer.event(&Event::Warning(&format!(
        "{} asks for dropout ({}), which TRL applies; here the base trains without. adapter.dropout drops inputs of an \
         adapter",
        folder.config().path().display(),
        keys.join(", "),
    )));
}

/// Returns the positions of texts of so many tokens and of the answers that are sampled after their prompts, within
/// the model's context.
pub(crate) fn with_samples(config: &Config, spec: &DecoderSpec, longest: usize) -> usize {
    match config.num_samples() {
        0 => longest,
        _ => longest.max(spec.context().min(longest + config.train.evaluation.sample_tokens)),
    }
}

/// Warns of texts that are longer than those that the model was trained for: their positions are new to it.
fn warn_of_length(folder: &ModelFolder, longest: usize, observer: &mut dyn Observer) {
    let context = folder.spec().context();
    if longest > context {
        observer.event(&Event::Warning(&format!(
            "the longest text has {longest} tokens, and {} says that the model is made for {context}: it has seen no later \
             positions; lower data.max_length to {context}, or take a model with scaled positions",
            folder.config().path().display(),
        )));
    }
}

/// Opens the policy's folder and its tokenizer, with the chat template of the config. The tokenizer's files in
/// the folder of `adapter.start` come before the model's.
pub(crate) fn open_policy(config: &Config, observer: &mut dyn Observer) -> Result<(ModelFolder, Tokenizer)> {
    let recipe = recipe::for_method(config.method);
    let mut folder = recipe.open_folder(config, &config.model)?;
    match &config.weights {
        Weights::Folder => {}
        Weights::File(path) => folder = folder.with_weights(path),
        Weights::Random => folder = folder.with_random_weights(),
    }
    if let (Some(format), None, false) =
        (folder.quantisation(), &config.adapter, config.weights == Weights::Random)
    {
        observer.event(&Event::Warning(&format!(
                "{} holds {format} weights, and every weight trains: training starts from what they stand for, and the model \
                 that it writes is not quantised",
                config.model.display(),
            )));
    }
    let start = config.adapter.as_ref().and_then(AdapterSection::folder);
    let mut tokenizer = Tokenizer::from_model(&config.model, start.map(PathBuf::as_path))?;
    if let Some(start) = start {
        folder = folder.with_tokenizer_of(start)?;
    }
    if let Some(source) = &config.data.chat_template {
        let (text, place) = match source {
            TemplateSource::Path(path) => {
                let text = tandem_files::read_text(path, tandem_files::MAX_CONFIG);
                (text.map_err(TrainError::io("read", path))?, path.display().to_string())
            }
            TemplateSource::Text(text) => (text.clone(), "data.chat_template".into()),
        };
        tokenizer = tokenizer.with_chat_template(&text).map_err(|error| match error {
            DataError::Template { reason } => DataError::Template { reason: format!("{place}: {reason}") },
            other => other,
        })?;
        folder = folder.with_chat_template(text);
    }
    folder = recipe.with_tokenizer(folder.with_eos(tokenizer.eos_id()), &tokenizer);
    Ok((folder, tokenizer))
}

impl RunInputs {
    /// Opens the model folder, checks the reference's against it, and tokenises uncached data.
    pub fn open(config: &Config, observer: &mut dyn Observer) -> Result<Self> {
        pool::start()?;
        let recipe = recipe::for_method(config.method);
        let (folder, tokenizer) = open_policy(config, observer)?;
        if folder.begins_score_head() && config.weights != Weights::Random {
            observer.event(&Event::Warning(&format!(
                "{} is a language model: the head that scores texts starts at random, drawn from the seed {}",
                config.model.display(),
                config.seed,
            )));
        }
        if config.adapter.is_some() && config.weights == Weights::Random {
            observer.event(&Event::Warning(
                "the adapter trains on random weights (weights = \"random\"), which are not kept: only runs with the same ones can \
                 use it",
            ));
        }
        warn_of_dropout(config, &folder, observer);
        let spec = folder.spec().clone();
        if let Some(path) = &config.reference.model {
            match config.distill {
                Some(_) => check_teacher(config, (&folder, &tokenizer), &ModelFolder::open(path)?)?,
                None => {
                    let reference = recipe.open_folder(config, path)?;
                    check_reference(config, (&folder, &tokenizer), &reference, observer)?;
                }
            }
        }
        // An adapter that does not fit is found before any row is read.
        ModelSpecs::from_config(config, &Decoder::new(spec.clone(), 1)?)?;
        check_listed(config)?;
        let train = tokens(config, &tokenizer, &config.data.train, Split::Train, observer)?;
        let eval = match config.data.eval.as_slice() {
            [] => None,
            sources => Some(tokens(config, &tokenizer, sources, Split::Eval, observer)?),
        };
        let columns = eval.iter().chain([&train]).flat_map(|cache| cache.report().columns.iter().cloned());
        check_ignored(config, &columns.collect())?;
        check_length(config, train.num_rows())?;
        recipe.check_rows(config, &train)?;
        if let Some(eval) = eval.as_ref().filter(|_| config.method.generates()) {
            recipe.check_rows(config, eval)?;
        }
        for cache in eval.iter().chain([&train]) {
            check_vocabulary(config, cache, spec.vocab_size)?;
        }
        let answer = config.online.as_ref().map_or(0, |online| online.max_new_tokens);
        let longest_prompt = if config.online.is_some() {
            // A distillation answers its training rows alone.
            let answered = eval.iter().filter(|eval| eval.kind() == RowKind::Prompt).chain([&train]);
            answered.map(longest_prompt).fold(0, usize::max)
        } else {
            0
        };
        let longest = eval.iter().chain([&train]).map(|cache| cache.report().longest as usize);
        let longest = longest.fold(longest_prompt + answer, usize::max);
        let has_environment = config.online.as_ref().is_some_and(|online| online.environment.is_some());
        let whole = if has_environment { config.data.max_length } else { 0 };
        let longest = eval
            .iter()
            .chain([&train])
            .map(|cache| longest_mismatched(config, cache))
            .fold(longest, usize::max);
        warn_of_length(&folder, longest, observer);
        let positions = with_samples(config, &spec, longest.max(whole).max(1));
        let decoder = Decoder::new(spec, positions)?;
        if has_environment && decoder.rotates_by_length() {
            let reason = format!(
                "the positions of {} depend on the length of a text beyond its first training, and the turns of a conversation \
                 with an environment have lengths of their own; lower data.max_length = {whole} to the model's original length, or \
                 remove [online.environment]",
                config.model.display()
            );
            return Err(TrainError::Mismatch { reason });
        }
        let ModelSpecs { policy: decoder, reference: reference_decoder, teacher } =
            ModelSpecs::from_config(config, &decoder)?;
        Ok(Self { folder, decoder, reference_decoder, teacher, tokenizer, train, eval, longest_prompt })
    }

    /// The models, described.
    pub fn decoders(&self) -> ModelSpecs {
        let (policy, reference) = (self.decoder.clone(), self.reference_decoder.clone());
        ModelSpecs { policy, reference, teacher: self.teacher.clone() }
    }

    /// Creates the batcher of this run.
    pub fn batcher(&self, config: &Config) -> MicroBatcher {
        let in_rounds = config.compute.sharded().meets_in_walk();
        let layout = RowLayout {
            share_prefix: config.data.share_prefix,
            pad: self.decoder.spec().head.pad(),
            max_length: config.data.max_length,
            scores_prompts: config.method == Method::Dpo && config.data.loss_on == LossMask::All,
            has_mismatched: config.objective.needs_mismatched(),
        };
        let recipe = recipe::for_method(config.method);
        MicroBatcher::new(recipe, config.train.micro_batch, layout, in_rounds)
            .with_max_new_tokens(config.online.as_ref().map_or(0, |online| online.max_new_tokens))
            .with_ld_alpha(config.objective.ld_alpha)
    }

    /// The rows of this run's steps.
    pub fn batches(&self, config: &Config) -> BatchSampler {
        let order = match config.data.order {
            config::Order::Shuffled => order::Order::Shuffled,
            config::Order::Sequential => order::Order::Sequential,
        };
        BatchSampler::new(self.train.num_rows(), config.train.batch_size, order, config.seed)
    }

    /// Returns the training rows that the run's steps read, in order: all of them, unless the run is shorter than an
    /// epoch.
    pub fn training_rows(&self, config: &Config) -> Vec<u32> {
        let num_rows = self.train.num_rows();
        let (mut batches, steps) = (self.batches(config), config.total_steps(num_rows));
        // Rows that are mixed belong to batches, not to themselves.
        if steps >= batches.steps_per_epoch() || self.batcher(config).mixes_rows() {
            return (0..num_rows as u32).collect();
        }
        let mut rows: Vec<u32> = (0..steps).flat_map(|step| batches.rows(step).to_vec()).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// The tokens of a split that the run has.
    pub fn tokens(&self, split: Split) -> Option<&TokenCache> {
        match split {
            Split::Train => Some(&self.train),
            Split::Eval => self.eval.as_ref(),
        }
    }
}

/// Checks `data.ignore_columns` before any row is read, if all files list their columns.
fn check_listed(config: &Config) -> Result<()> {
    if config.data.ignore_columns.is_empty() {
        return Ok(());
    }
    let all = named(config.data.train.iter().chain(&config.data.eval));
    match source::listed_columns(&all)? {
        Some(columns) => check_ignored(config, &columns),
        None => Ok(()),
    }
}

/// Checks that each column of `data.ignore_columns` is among those of the rows.
fn check_ignored(config: &Config, columns: &BTreeSet<String>) -> Result<()> {
    let Some(name) = config.data.ignore_columns.iter().find(|name| !columns.contains(*name)) else {
        return Ok(());
    };
    let columns: Vec<_> = columns.iter().map(|column| format!("`{column}`")).collect();
    Err(TrainError::Mismatch {
        reason: format!(
            "data.ignore_columns names `{name}`, and no row has that column; the rows have {}",
            columns.join(", ")
        ),
    })
}

/// Refuses a run of more steps than one may have.
fn check_length(config: &Config, num_rows: usize) -> Result<()> {
    // `train.steps` has its range.
    let Length::Epochs(epochs) = config.train.length else { return Ok(()) };
    let steps = config.total_steps(num_rows);
    if steps <= MAX_STEPS {
        return Ok(());
    }
    Err(TrainError::Mismatch {
        reason: format!(
            "train.epochs = {epochs:e} of {num_rows} rows is {steps} steps; a run has at most {MAX_STEPS}: lower it, or raise \
             train.batch_size = {}",
            config.train.batch_size
        ),
    })
}

/// The rows that a split consists of: those of the method, but held-out completions are given ones.
fn rows_of(config: &Config, split: Split) -> RowKind {
    match config.distill {
        Some(distill) if split == Split::Train && distill.reads_prompts() => RowKind::Prompt,
        _ => config.method.rows(),
    }
}

/// Tokens of the longest prompt of some rows that answers follow.
fn longest_prompt(cache: &TokenCache) -> usize {
    match cache.kind() {
        RowKind::Prompt => cache.report().longest as usize,
        RowKind::Supervised => {
            (0..cache.num_rows()).map(|row| cache.prompt_tokens(row).len()).max().unwrap_or(0)
        }
        RowKind::Preference | RowKind::Reward | RowKind::Unpaired => 0,
    }
}

fn named<'a>(sources: impl IntoIterator<Item = &'a DataSource>) -> Sources {
    Sources(sources.into_iter().map(|s| Source { path: s.path.clone(), weight: s.weight }).collect())
}

/// Every token must have a row in the model's table. (A tokenizer may know more tokens than the
/// data uses.)
fn check_vocabulary(config: &Config, cache: &TokenCache, vocab_size: usize) -> Result<()> {
    let largest = cache.report().largest_id;
    if (largest as usize) < vocab_size {
        return Ok(());
    }
    Err(TrainError::Mismatch {
        reason: format!(
            "the data holds token {largest}, but {} has vocab_size {vocab_size} in its config.json; the folder's \
             tokenizer belongs to another model",
            config.model.display(),
        ),
    })
}

/// Tokens of the longest prompt with the longest completion of another row, which KTO may score.
fn longest_mismatched(config: &Config, cache: &TokenCache) -> usize {
    if !config.objective.needs_mismatched() {
        return 0;
    }
    let rows = (0..cache.num_rows()).map(|row| cache.unpaired(row));
    let [prompt, completion] = rows.fold([0; 2], |[prompt, completion], row| {
        [prompt.max(row.prompt.len()), completion.max(row.completion.len())]
    });
    (prompt + completion).min(config.data.max_length)
}

/// Policy and reference must mean the same tokens.
fn check_reference(
    config: &Config,
    (policy, tokenizer): (&ModelFolder, &Tokenizer),
    reference: &ModelFolder,
    observer: &mut dyn Observer,
) -> Result<()> {
    let differs = |what: &str, ours: String, theirs: String| TrainError::Mismatch {
        reason: format!(
            "the reference {} has {what} {theirs}, the policy {} has {ours}; a reference must be the same kind of model",
            config.reference.model.as_ref().unwrap_or(&config.model).display(),
            config.model.display(),
        ),
    };
    let (a, b) = (policy.spec(), reference.spec());
    if a.vocab_size != b.vocab_size {
        return Err(differs("vocab_size", a.vocab_size.to_string(), b.vocab_size.to_string()));
    }
    if let Some([ours, theirs]) = first_difference(a, b) {
        return Err(differs("another shape or kind:", ours, theirs));
    }
    // A reference reads the policy's tokens. A token may have another name where its place was free.
    if let Ok(theirs) = Tokenizer::from_folder(reference.path())
        && let Some((id, [own_token, other_token])) = first_other_token(tokenizer, &theirs)
    {
        observer.event(&Event::Warning(&format!(
            "token {id} is {other_token} for the reference {}, and {own_token} for the policy {}: the reference reads the policy's \
             tokens, which mean something else to it if it was trained with others",
            reference.path().display(),
            config.model.display(),
        )));
    }
    Ok(())
}

/// Returns the first fields that differ between two descriptions, with their values.
fn first_difference(a: &DecoderSpec, b: &DecoderSpec) -> Option<[String; 2]> {
    let [a, b] = [a, b].map(|spec| format!("{spec:#?}"));
    let (ours, theirs) = a.lines().zip(b.lines()).find(|(ours, theirs)| ours != theirs)?;
    Some([ours, theirs].map(|field| field.trim().trim_end_matches(',').to_owned()))
}

/// Returns the first token that differs between two tokenizers, and how each names it.
fn first_other_token(ours: &Tokenizer, theirs: &Tokenizer) -> Option<(u32, [String; 2])> {
    let tokens = ours.vocab_size().max(theirs.vocab_size()) as u32;
    let named = |token: Option<String>| token.map_or("no token".to_owned(), |token| format!("{token:?}"));
    let both = |id| [ours, theirs].map(|tokenizer| tokenizer.token(id));
    let (id, tokens) = (0..tokens).map(|id| (id, both(id))).find(|(_, [ours, theirs])| ours != theirs)?;
    Some((id, tokens.map(named)))
}

/// Policy and teacher must have the same tokens, and logits of the same tokens. As in TRL, logits of a
/// padded vocabulary belong to it.
fn check_teacher(
    config: &Config,
    (policy, tokenizer): (&ModelFolder, &Tokenizer),
    teacher: &ModelFolder,
) -> Result<()> {
    let (own, other) = (config.model.display(), teacher.path().display());
    let refused = |reason: String| Err(TrainError::Mismatch { reason });
    let [of_policy, of_teacher] = [policy, teacher].map(|folder| folder.spec().vocab_size);
    if of_policy != of_teacher {
        return refused(format!(
            "the teacher {other} has vocab_size {of_teacher}, the policy {own} has {of_policy}; distillation compares \
             whole distributions, so take a teacher with the policy's vocabulary"
        ));
    }
    let theirs = Tokenizer::from_folder(teacher.path())?;
    let Some((id, [own_token, other_token])) = first_other_token(tokenizer, &theirs) else { return Ok(()) };
    refused(format!(
        "token {id} is {other_token} for the teacher {other}, and {own_token} for the policy {own}; distillation compares \
         distributions token by token, so take a teacher with the policy's tokenizer"
    ))
}

fn tokens(
    config: &Config,
    tokenizer: &Tokenizer,
    sources: &[DataSource],
    split: Split,
    observer: &mut dyn Observer,
) -> Result<TokenCache> {
    let sources = named(sources);
    let kind = rows_of(config, split);
    let DataConfig { max_length, truncation, loss_on, max_prompt_length, .. } = config.data;
    let columns = Columns {
        shape: config.data.shape,
        names: config.data.columns.clone(),
        ignored: config.data.ignore_columns.clone(),
        take_chosen: config.data.take == Some(config::Side::Chosen),
    };
    let max_rows = match split {
        Split::Train => config.data.train_rows,
        Split::Eval => config.data.eval_rows,
    };
    // Prompt tokens that leave room for the completion.
    let answer = config.online.as_ref().filter(|_| kind == RowKind::Prompt);
    let max_length = max_length - answer.map_or(0, |online| online.max_new_tokens);
    let options = RowOptions {
        kind,
        max_length: Some(max_length),
        truncation,
        loss_on,
        max_prompt_length,
        max_rows,
        columns,
    };
    let relay =
        Relay { split, state: Mutex::new(RelayState { observer: &mut *observer, done: 0, total: 0 }) };
    let cache = tandem_data::prepare::prepare(&sources, tokenizer, &options, &config.cache_folder(), &relay)?;
    tracing::debug!(
        "{} tokens {}: {} rows, {}",
        split.name(),
        if cache.was_built() { "made" } else { "found" },
        cache.num_rows(),
        cache.path().display()
    );
    observer.event(&Event::Data { split, cache: &cache });
    Ok(cache)
}

/// Passes the progress of tokenisation on to an observer.
struct Relay<'a> {
    split: Split,
    state: Mutex<RelayState<'a>>,
}

struct RelayState<'a> {
    observer: &'a mut dyn Observer,
    done: u64,
    total: u64,
}

impl Progress for Relay<'_> {
    fn start(&self, _what: &str, total: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.done, state.total) = (0, total);
    }

    fn advance(&self, bytes: u64, _rows: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += bytes;
        let RelayState { observer, done, total } = &mut *state;
        observer.event(&Event::Tokenizing { split: self.split, done: *done, total: *total });
    }

    fn note(&self, message: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.observer.event(&Event::Warning(message));
    }
}
