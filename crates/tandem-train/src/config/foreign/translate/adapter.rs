//! Adapter and format of frozen weights.

use super::{Given, Translator};
use crate::config::Method;
use crate::config::error::Result;
use crate::config::foreign::Program;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_texts, is_off};
use crate::objective::losses::{Reward, find};

/// Modules that PEFT gives a term where none are named, by `model_type`.
const PEFT_TARGETS: [(&[&str], &[&str]); 6] = [
    (
        &["llama", "mistral", "stablelm", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"],
        &["q_proj", "v_proj"],
    ),
    (&["phi"], &["q_proj", "v_proj", "fc1", "fc2"]),
    (&["gpt2", "gpt_bigcode"], &["c_attn"]),
    (&["gpt_neox", "falcon", "bloom"], &["query_key_value"]),
    (&["gptj", "opt", "gpt_neo"], &["q_proj", "v_proj"]),
    (&["codegen"], &["qkv_proj"]),
];

impl Translator<'_> {
    /// The adapter with its program's defaults, and the format of the frozen weights.
    pub(super) fn adapter(&mut self) -> Result<()> {
        let wanted = self.part(Part::UseAdapter);
        let is_qlora = wanted.as_ref().is_some_and(|given| given.value == "qlora");
        let has_adapter = self.has_adapter(wanted.as_ref())?;
        let format = self.format(is_qlora)?;
        if !has_adapter {
            let unused =
                [Part::Rank, Part::Alpha, Part::Dropout, Part::Targets, Part::TargetLinear, Part::Dora];
            for part in unused {
                if let Some(given) = self.part(part).filter(|given| !is_off(&given.value)) {
                    self.not_needed(&given, "no adapter trains: every weight does");
                }
            }
            self.draft.keys.retain(|key| !key.key.starts_with("adapter."));
            if let Some((_, given)) = format {
                self.missing(&given, "full training changes every weight; frozen formats need an adapter");
            }
            if let Some(given) = self.part(Part::DisableDropout) {
                self.not_needed(&given, "no adapter trains, and nothing else has a dropout");
            }
            return Ok(());
        }
        if let Some(given) = wanted {
            self.not_needed(&given, "the table [adapter] says it");
        }
        self.new_adapter()?;
        self.rank()?;
        self.dropout()?;
        self.targets()?;
        if let Some(given) = self.part(Part::Dora)
            && given.flag()?
        {
            self.draft.set("adapter.kind", "dora", given.shown());
        }
        if let Some((format, given)) = format {
            self.draft.set("compute.format", format, given.shown());
        }
        self.reference_of_adapter();
        Ok(())
    }

    /// A new adapter beside the one that is named, which LLaMA-Factory merges into the model.
    fn new_adapter(&mut self) -> Result<()> {
        let Some(given) = self.part(Part::NewAdapter) else { return Ok(()) };
        let start = self.draft.get("adapter.start").and_then(toml::Value::as_str).map(str::to_owned);
        match start {
            Some(start) if given.flag()? => {
                self.draft.remove("adapter.start");
                let reason = format!(
                    "merge {start} (adapter_name_or_path) into the model first, with `tandem merge`, and give the \
                     result as `model`: a new adapter trains on it"
                );
                self.missing(&given, reason);
            }
            Some(_) => self.not_needed(&given, "the adapter in `adapter.start` trains on"),
            None => self.not_needed(&given, "without `adapter.start` a new adapter trains"),
        }
        Ok(())
    }

    /// The reference of a run that goes on with an adapter, which LLaMA-Factory switches off for it.
    fn reference_of_adapter(&mut self) {
        let has = |key: &str| self.draft.get(key).is_some();
        let is_named = ["reference.kind", "reference.model", "reference.adapter"].into_iter().any(has);
        if self.program != Program::LlamaFactory
            || !matches!(self.method, Method::Dpo | Method::Kto)
            || !has("adapter.start")
            || is_named
        {
            return;
        }
        let of_reference = |name: &str| {
            find(name).is_some_and(|loss| loss.reward == Reward::LogRatio && !loss.of_likelihood)
        };
        let compares = match self.draft.get("objective.loss") {
            Some(toml::Value::Table(terms)) => terms.keys().any(|name| of_reference(name)),
            Some(toml::Value::String(name)) => of_reference(name),
            _ => true,
        };
        if compares {
            self.draft.set("reference.kind", "base", "LLaMA-Factory's reference has no adapter");
        }
    }

    fn has_adapter(&mut self, wanted: Option<&Given>) -> Result<bool> {
        let lora = self.parts.contains_key(&Part::Rank) || self.parts.contains_key(&Part::Targets);
        let Some(given) = wanted else {
            return Ok(match self.program {
                // ModelConfig has ranks that `use_peft` alone turns on; a bare LoraConfig is an adapter.
                Program::Trl => self.parts.get(&Part::Rank).is_some_and(|given| given.setting == "r"),
                Program::LlamaFactory => true,
                _ => false,
            });
        };
        let has = match (self.program, given.value.as_str()) {
            (Program::Axolotl, Some("lora" | "qlora")) => true,
            (Program::LlamaFactory, Some("lora")) => true,
            (Program::LlamaFactory, Some("full")) => false,
            (Program::LlamaFactory, Some(kind)) => {
                return Err(given.conflict(format!("{kind:?} cannot be had; here are \"lora\" and \"full\"")));
            }
            (Program::Axolotl, Some(kind)) if !is_off(&given.value) => {
                return Err(
                    given.conflict(format!("{kind:?} cannot be had; here are \"lora\" and \"qlora\""))
                );
            }
            _ if given.value.is_object() => lora,
            _ => given.flag()?,
        };
        Ok(has)
    }

    fn format(&mut self, is_qlora: bool) -> Result<Option<(&'static str, Given)>> {
        let (four, eight) = (self.part(Part::Load4Bit), self.part(Part::Load8Bit));
        let bits = self.part(Part::Bits).filter(|given| !is_off(&given.value));
        let quant = self.part(Part::QuantType);
        let mut format = None;
        if let Some(given) = four.filter(|given| !is_off(&given.value)) {
            format = given.flag()?.then_some(("nf4", given));
        }
        if let Some(given) = eight.filter(|given| !is_off(&given.value)) {
            format = format.or(given.flag()?.then_some(("int8", given)));
        }
        if let Some(given) = bits {
            format = match given.count()? {
                4 => Some(("nf4", given)),
                8 => Some(("int8", given)),
                _ => {
                    return Err(
                        given.conflict("formats of frozen weights have 4 bits (\"nf4\") or 8 (\"int8\")")
                    );
                }
            };
        }
        if let Some(given) = quant {
            match (given.value.as_str(), &format) {
                (Some("nf4"), _) | (_, None) => {
                    self.not_needed(&given, "it is the type of `compute.format = \"nf4\"`");
                }
                _ => self.missing(&given, "the format of 4 bits is \"nf4\""),
            }
        }
        if format.is_none() && is_qlora {
            let value = serde_json::Value::from("qlora");
            let given =
                Given { setting: "adapter".into(), value, place: self.file.clone(), program: self.program };
            format = Some(("nf4", given));
        }
        Ok(format)
    }

    fn rank(&mut self) -> Result<()> {
        let (rank, alpha) = (self.part(Part::Rank), self.part(Part::Alpha));
        if self.draft.get("adapter.start").is_some() {
            for given in [rank, alpha].into_iter().flatten() {
                self.not_needed(&given, "the adapter in `adapter.start` defines it");
            }
            return Ok(());
        }
        let is_bare = rank.as_ref().is_some_and(|given| given.setting == "r");
        let (rank_default, alpha_default) = match self.program {
            Program::Trl if is_bare => (8, Some(8.0)),
            Program::Trl => (16, Some(32.0)),
            _ => (8, None),
        };
        let number = match &rank {
            Some(given) => given.count()?,
            None => rank_default,
        };
        let comment = rank.map_or_else(|| self.default_of(), |given| given.shown());
        self.draft.set("adapter.rank", number as i64, comment);
        let (alpha, comment) = match (alpha, alpha_default) {
            (Some(given), _) => (given.number()?, given.shown()),
            (None, Some(default)) => (default, self.default_of()),
            (None, None) if self.program == Program::LlamaFactory => {
                (2.0 * number as f64, format!("{}, twice the rank", self.default_of()))
            }
            // PEFT's own.
            (None, None) => (8.0, "PEFT's default".to_owned()),
        };
        self.draft.set("adapter.alpha", alpha, comment);
        Ok(())
    }

    /// Most of TRL's trainers set every dropout to 0, that of the adapter too.
    fn dropout(&mut self) -> Result<()> {
        let (given, disable) = (self.part(Part::Dropout), self.part(Part::DisableDropout));
        let is_disabled = match &disable {
            Some(given) => given.flag()?,
            None => match self.method {
                Method::Sft | Method::Grpo => false,
                Method::Distill => self.is_gkd,
                Method::Reward => self.program != Program::LlamaFactory,
                Method::Dpo | Method::Kto | Method::Online => true,
            },
        };
        if let (None, Some(disable)) = (&given, &disable) {
            self.not_needed(disable, "the only dropout is `adapter.dropout`");
        }
        let default = match self.program {
            Program::Trl if self.draft.get("adapter.rank").is_some() => 0.05,
            _ => 0.0,
        };
        match given {
            Some(given) if is_disabled && !is_off(&given.value) => {
                self.draft.set(
                    "adapter.dropout",
                    0.0,
                    format!("not {}: disable_dropout sets it to 0", given.shown()),
                );
            }
            Some(given) => self.draft.set("adapter.dropout", given.number()?, given.shown()),
            None if !is_disabled && default > 0.0 => {
                self.draft.set("adapter.dropout", default, self.default_of());
            }
            None => {}
        }
        Ok(())
    }

    fn targets(&mut self) -> Result<()> {
        let (given, linear) = (self.part(Part::Targets), self.part(Part::TargetLinear));
        if self.draft.get("adapter.start").is_some() {
            return Ok(());
        }
        if let Some(linear) = linear.filter(|given| !is_off(&given.value)) {
            if let Some(given) = given {
                self.not_needed(&given, "lora_target_linear takes every linear layer");
            }
            self.draft.set("adapter.targets", "all-linear", linear.shown());
            return Ok(());
        }
        let Some(given) = given else { return self.default_targets() };
        match given.value.as_str() {
            Some("all-linear" | "all") => self.draft.set("adapter.targets", "all-linear", given.shown()),
            // PEFT reads a text alone as a regular expression.
            Some(text) if text.contains(['*', '(', '\\', '|', '$', '^']) => {
                self.draft.set("adapter.targets", text.to_owned(), given.shown());
            }
            _ => match as_texts(&given.value).filter(|names| !names.is_empty()) {
                Some(names) if names == ["all-linear"] => {
                    self.draft.set("adapter.targets", "all-linear", given.shown());
                }
                Some(names) => self.draft.set("adapter.targets", names, given.setting.clone()),
                None => return Err(given.wrong("names of modules, or \"all-linear\"")),
            },
        }
        Ok(())
    }

    fn default_targets(&mut self) -> Result<()> {
        if self.program == Program::LlamaFactory {
            self.draft.set("adapter.targets", "all-linear", self.default_of());
            return Ok(());
        }
        let model = self.draft.get("model").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let kind = self.facts.model_type(&model);
        let known =
            kind.as_deref().and_then(|kind| PEFT_TARGETS.iter().find(|(kinds, _)| kinds.contains(&kind)));
        let (names, comment) = match (known, kind) {
            (Some((_, names)), Some(kind)) => (*names, format!("PEFT's default for {kind}")),
            (None, Some(kind)) => {
                return Err(self.lacking(
                    "lora_target_modules",
                    &format!("the modules of the adapter: PEFT has no default for model_type {kind:?}"),
                ));
            }
            (_, None) => (
                &["q_proj", "v_proj"][..],
                "PEFT's default for most models; the model is not here to ask".to_owned(),
            ),
        };
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        self.draft.set("adapter.targets", names, comment);
        Ok(())
    }
}
