//! The `adapter_config.json` of the `peft` library.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::Result;
use crate::families::family_named;
use crate::lora::{Adapter, AdapterConfig, AdapterKind, Targets, peft_names};
use crate::spec::Config;
use crate::spec::DecoderSpec;

/// Options that are read.
const READ: [&str; 12] = [
    BASE_WEIGHTS,
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "target_modules",
    "modules_to_save",
    "init_lora_weights",
];

/// Options that do not change the result. `peft` itself derives `fan_in_fan_out` from the kind of
/// each module; tied weights show in the tensors.
const HARMLESS: [&str; 14] = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
];

/// `task_type` of language models, and of reward models.
const LANGUAGE: &str = "CAUSAL_LM";
const SCORE: &str = "SEQ_CLS";

/// Our own key, which `peft` ignores: the base's weights, if no folder has them.
const BASE_WEIGHTS: &str = "base_weights";
const RANDOM: &str = "random";

/// Initialisations that leave the base unchanged.
const PLAIN_BEGINNINGS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Parsed `adapter_config.json`.
pub(super) struct PeftConfig {
    pub(super) adapter: AdapterConfig,
    /// Name or path of the base model.
    pub(super) base: Option<String>,
    /// True for a reward model.
    pub(super) scores: bool,
    /// True if the base had random weights.
    pub(super) has_random_base: bool,
}

impl PeftConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// If a value has another type, or an option changes the result in an unsupported way.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let config = Config::read(path)?;
        let kind = config.word("peft_type", "LORA")?;
        if kind != "LORA" {
            return Err(config.error(format!("peft_type is {kind:?}; only \"LORA\" is supported")));
        }
        let task = config.word("task_type", "CAUSAL_LM")?;
        let scores = task == SCORE;
        if !scores && task != LANGUAGE {
            return Err(config.error(format!(
                "task_type is {task:?}; only \"CAUSAL_LM\" and, for reward models, \"SEQ_CLS\" are supported"
            )));
        }
        refuse_unknown(&config)?;
        refuse_changed_base(&config)?;
        let dropout = config.number("lora_dropout", 0.0)?;
        if !(0.0..1.0).contains(&dropout) {
            return Err(
                config.error(format!("lora_dropout is {dropout}, expected a number from 0 to below 1"))
            );
        }
        let mut saved = names(&config, "modules_to_save")?.unwrap_or_default();
        // peft names the heads of classifiers of any model; ours is called `score`.
        saved.retain(|name| !scores || name != "classifier");
        let adapter = AdapterConfig {
            kind: if config.flag("use_dora", false)? { AdapterKind::Dora } else { AdapterKind::Lora },
            rank: config.count("r")?,
            alpha: config.positive("lora_alpha", 8.0)?,
            rank_stabilized: config.flag("use_rslora", false)?,
            dropout,
            targets: read_targets(&config)?,
            modules_to_save: saved,
            file: Some(path.to_owned()),
        };
        let base = config.word("base_model_name_or_path", "")?;
        let weights = config.word(BASE_WEIGHTS, "")?;
        let has_random_base = weights == RANDOM;
        if !has_random_base && !weights.is_empty() {
            return Err(config.error(format!("{BASE_WEIGHTS} is {weights:?}; only {RANDOM:?} is known")));
        }
        Ok(Self { adapter, base: (!base.is_empty()).then(|| base.to_owned()), scores, has_random_base })
    }
}

/// Refuses unknown options that are set: each may change the result.
fn refuse_unknown(config: &Config) -> Result<()> {
    for (key, value) in config.as_map() {
        let is_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(word) => word.is_empty() || key == "bias" && word == "none",
            _ => false,
        };
        if !is_off && !READ.contains(&key.as_str()) && !HARMLESS.contains(&key.as_str()) {
            return Err(config.error(format!("{key} is {value}, which is not supported")));
        }
    }
    Ok(())
}

/// Refuses adapters of a changed base, which `peft` recreates when it loads them.
fn refuse_changed_base(config: &Config) -> Result<()> {
    let beginning = match config.as_map().get("init_lora_weights") {
        Some(Value::String(word)) => word,
        _ => return Ok(()),
    };
    if PLAIN_BEGINNINGS.contains(&beginning.as_str()) {
        return Ok(());
    }
    Err(config.error(format!(
        "init_lora_weights is {beginning:?}: such an adapter belongs to a base whose weights were changed when it was made; \
         save it in peft with path_initial_model_for_weight_conversion, which makes it an ordinary one"
    )))
}

fn read_targets(config: &Config) -> Result<Targets> {
    match config.as_map().get("target_modules") {
        Some(Value::String(word)) if word.eq_ignore_ascii_case("all-linear") => Ok(Targets::AllLinear),
        Some(Value::String(pattern)) => Ok(Targets::Pattern(pattern.clone())),
        _ => {
            let names = names(config, "target_modules")?;
            let names = names.ok_or_else(|| config.error("target_modules is missing"))?;
            Ok(Targets::Names(names))
        }
    }
}

/// Returns a list of names, if the key is present.
fn names(config: &Config, key: &str) -> Result<Option<Vec<String>>> {
    let Some(value) = config.as_map().get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let words = value.as_array().map(|list| list.iter().map(|v| v.as_str().map(str::to_owned)).collect());
    match words {
        Some(Some(words)) => Ok(Some(words)),
        _ => Err(config.error(format!("{key} is {value}, expected a list of names"))),
    }
}

/// Makes an `adapter_config.json` that `peft` reads as this adapter. Options that older versions do
/// not know are left out: they have their defaults.
/// Without a `base`, it says that the base's weights were random.
pub(super) fn to_json(adapter: &Adapter, spec: &DecoderSpec, base: Option<&str>) -> Value {
    let AdapterConfig { kind, rank, alpha, rank_stabilized, dropout, .. } = *adapter.config();
    let family = family_named(spec.family).expect("specs come from families");
    let (targets, saved) = peft_names(adapter, spec);
    let targets: Value = match targets {
        Targets::Names(names) => names.into(),
        Targets::Pattern(pattern) => pattern.into(),
        Targets::AllLinear => "all-linear".into(),
    };
    let transposed = adapter
        .matrices()
        .iter()
        .any(|adapted| family.order(adapted.part) == crate::families::HfLayout::Transposed);
    // peft holds it as an integer, and takes others.
    let alpha = if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let entries = [
        ("alpha_pattern", json!({})),
        ("auto_mapping", Value::Null),
        ("base_model_name_or_path", base.into()),
        ("bias", "none".into()),
        ("fan_in_fan_out", transposed.into()),
        ("inference_mode", true.into()),
        ("init_lora_weights", true.into()),
        ("layers_pattern", Value::Null),
        ("layers_to_transform", Value::Null),
        ("lora_alpha", alpha),
        ("lora_dropout", dropout.into()),
        ("modules_to_save", if saved.is_empty() { Value::Null } else { saved.into() }),
        ("peft_type", "LORA".into()),
        ("r", rank.into()),
        ("rank_pattern", json!({})),
        ("revision", Value::Null),
        ("target_modules", targets),
        ("task_type", if spec.head.is_score() { SCORE } else { LANGUAGE }.into()),
        ("use_dora", (kind == AdapterKind::Dora).into()),
        ("use_rslora", rank_stabilized.into()),
    ];
    let random = base.is_none().then(|| (BASE_WEIGHTS, RANDOM.into()));
    let entries = entries.into_iter().chain(random);
    Value::Object(entries.map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
}
