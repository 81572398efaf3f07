//! Loss and reference.

use serde_json::Value;
use toml::Value as Toml;

use super::{Given, Translator};
use crate::config::Method;
use crate::config::draft::{DraftKey, Remark};
use crate::config::error::Result;
use crate::config::foreign::Program;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_number, as_texts, is_off};
use crate::objective::PolicyLoss;
use crate::objective::losses::{LOSSES, Smoothing, find};

impl Translator<'_> {
    pub(super) fn objective(&mut self) -> Result<()> {
        let (loss, weights) = (self.part(Part::Loss), self.part(Part::LossWeights));
        let sft = self.part(Part::SftWeight).filter(|given| !is_off(&given.value));
        if !self.method.compares_pairs()
            && let Some(given) = self.part(Part::LabelSmoothing)
        {
            self.not_needed(&given, "the method's loss has no smoothing");
        }
        if self.method == Method::Distill {
            // Its temperature is another than the sampling's.
            self.distillation([loss, weights, sft])?;
            return self.generation_options();
        }
        self.exploration()?;
        self.generation_options()?;
        if !self.method.has_reference() {
            return self.plain_loss(loss, [weights, sft]);
        }
        if self.method == Method::Grpo {
            return self.policy_loss(loss, [weights, sft]);
        }
        let mut names = match &loss {
            Some(given) => {
                as_texts(&given.value).ok_or_else(|| given.wrong("a loss, or a list of losses"))?
            }
            None => vec![self.method.default_loss().unwrap_or("sigmoid").to_owned()],
        };
        if self.program == Program::Mitchell {
            // His code does not divide by lengths.
            names.iter_mut().filter(|name| *name == "ipo").for_each(|name| "ipo_sum".clone_into(name));
        }
        for name in &names {
            if find(name).is_none() {
                let given = loss.as_ref().expect("the default is known");
                let known: Vec<_> = LOSSES.iter().map(|loss| loss.name).collect();
                return Err(
                    given.conflict(format!("{name:?} cannot be had; losses here are {}", known.join(", ")))
                );
            }
        }
        let numbers: Vec<f64> = match &weights {
            Some(given) => match &given.value {
                Value::Array(items) => items.iter().filter_map(as_number).collect(),
                other => {
                    as_texts(other).unwrap_or_default().iter().filter_map(|text| text.parse().ok()).collect()
                }
            },
            None => vec![1.0; names.len()],
        };
        if numbers.len() != names.len() {
            return Err(weights.expect("the default fits").wrong("as many numbers as losses"));
        }
        let mut terms: Vec<(String, f64)> = Vec::new();
        let mut add = |name: String, weight: f64| match terms.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += weight,
            None => terms.push((name, weight)),
        };
        let mut comment: Vec<_> = [&loss, &weights, &sft].into_iter().flatten().map(Given::shown).collect();
        for (name, weight) in names.into_iter().zip(numbers).filter(|(_, weight)| *weight != 0.0) {
            if name == "orpo" && self.program == Program::LlamaFactory {
                add("sft".to_owned(), weight);
                comment
                    .push("its odds_ratio_loss has the likelihood, too, a mean over rows there".to_owned());
            }
            add(name, weight);
        }
        if let Some(given) = &sft {
            add("sft".to_owned(), given.number()?);
            if self.program == Program::LlamaFactory {
                comment.push("a mean over pairs of means over tokens there, here over all tokens".to_owned());
            }
        }
        if let Some(given) = self.part(Part::LabelSmoothing) {
            self.label_smoothing(&given, &terms)?;
        }
        match &terms[..] {
            [(only, weight)] if *weight == 1.0 => {
                if loss.is_some() {
                    self.draft.set("objective.loss", only.clone(), comment.join(", "));
                }
            }
            terms => {
                let table: toml::Table =
                    terms.iter().map(|(name, weight)| (name.clone(), (*weight).into())).collect();
                self.draft.set("objective.loss", Toml::Table(table), comment.join(", "));
            }
        }
        if self.draft.get("objective.beta").is_none() {
            self.draft.set("objective.beta", 0.1, self.default_of());
        }
        self.judges();
        Ok(())
    }

    /// `alpha`, which `XPOConfig` and `CPOConfig` have, of different meanings.
    fn exploration(&mut self) -> Result<()> {
        let Some(mut given) = self.part(Part::Exploration) else { return Ok(()) };
        if let Some([only]) = given.value.as_array().map(Vec::as_slice) {
            given.value = only.clone();
        }
        if self.draft.get("online.algorithm").and_then(Toml::as_str) == Some("xpo") {
            self.draft.set("online.alpha", given.number()?, given.shown());
        } else if is_off(&given.value) {
            self.not_needed(&given, "it is off here too");
        } else {
            self.missing(&given, "rewards are log-probabilities, and AlphaPO's are another function of them");
        }
        Ok(())
    }

    /// Label smoothing of the losses that have it there.
    fn label_smoothing(&mut self, given: &Given, terms: &[(String, f64)]) -> Result<()> {
        let share = given.number()?;
        // TRL 1 took it out of these two.
        let is_trls = !matches!(self.program, Program::LlamaFactory | Program::Mitchell);
        let ignores = |name: &str| is_trls && matches!(name, "sigmoid" | "sigmoid_norm");
        let has = |name: &str| find(name).is_some_and(|loss| loss.smoothing != Smoothing::Unused);
        let names = terms.iter().map(|(name, _)| name.as_str());
        let smooth: Vec<&str> = names.clone().filter(|name| has(name) && !ignores(name)).collect();
        let other: Vec<&str> = names.filter(|name| ignores(name)).collect();
        if smooth.is_empty() {
            let names: Vec<&str> = terms.iter().map(|(name, _)| name.as_str()).collect();
            let reason = format!("the loss {} ignores it there", names.join(", "));
            self.not_needed(given, reason);
        } else if !other.is_empty() && share > 0.0 {
            return Err(given.conflict(format!(
                "it cannot be had: {} takes it and {} ignores it there, and here both take it",
                smooth.join(", "),
                other.join(", ")
            )));
        } else {
            let comment = if given.setting == "label_smoothing" { String::new() } else { given.shown() };
            self.draft.set("objective.label_smoothing", share, comment);
        }
        Ok(())
    }

    /// The loss of policy gradients, and the numbers that it takes.
    fn policy_loss(&mut self, given: Option<Given>, others: [Option<Given>; 2]) -> Result<()> {
        let mut loss = PolicyLoss::Dapo;
        if let Some(given) = given {
            let name = given.value.as_str().unwrap_or_default();
            match PolicyLoss::NAMES.iter().find(|(known, _)| *known == name) {
                Some((name, found)) => {
                    loss = *found;
                    self.draft.set("grpo.loss", *name, given.shown());
                }
                None => {
                    let known = PolicyLoss::NAMES.map(|(name, _)| name).join(", ");
                    return Err(given.conflict(format!("it cannot be had; losses here are {known}")));
                }
            }
        }
        if loss == PolicyLoss::Cispo && self.draft.get("grpo.epsilon_high").is_none() {
            let epsilon = self.draft.get("grpo.epsilon").and_then(Toml::as_float);
            let comment = match epsilon {
                Some(epsilon) => {
                    format!("epsilon = {epsilon}, which TRL takes where epsilon_high is not given")
                }
                None => self.default_of(),
            };
            self.draft.set("grpo.epsilon_high", epsilon.unwrap_or(0.2), comment);
        }
        let takes = |key: &str| match key {
            "grpo.epsilon" | "grpo.delta" => loss.clips(),
            "grpo.epsilon_high" => loss.clips() || loss == PolicyLoss::Cispo,
            _ if key.starts_with("grpo.sapo_") => loss == PolicyLoss::Sapo,
            _ if key.starts_with("grpo.vespo_") => loss == PolicyLoss::Vespo,
            _ => true,
        };
        for DraftKey { key, value, .. } in self.draft.keys.extract_if(.., |key| !takes(&key.key)) {
            let setting = format!("{} = {value}", key.trim_start_matches("grpo."));
            let reason = format!("the loss {} does not take it", loss.name());
            self.draft.not_needed.push(Remark { setting, reason });
        }
        for given in others.into_iter().flatten() {
            self.not_needed(&given, "policy gradients have one loss");
        }
        self.judges();
        Ok(())
    }

    /// `generation_kwargs`, which win over the settings of the same names.
    fn generation_options(&mut self) -> Result<()> {
        let Some(given) = self.part(Part::GenerationOptions).filter(|given| !is_off(&given.value)) else {
            return Ok(());
        };
        if !self.method.generates() && self.method != Method::Distill {
            let reason = format!("method = \"{}\" generates nothing", self.method);
            self.not_needed(&given, reason);
            return Ok(());
        }
        for (name, option) in given.members()? {
            let (key, value) = match name.as_str() {
                "temperature" if self.method == Method::Grpo => {
                    self.missing(
                        &option,
                        "the loss has the temperature of the sampling: `online.temperature`",
                    );
                    continue;
                }
                "do_sample" if option.flag()? => {
                    self.not_needed(&option, "tokens are sampled where `online.temperature` is above 0");
                    continue;
                }
                "temperature" | "top_p" | "min_p" | "repetition_penalty" => {
                    (name.as_str(), option.number()?.into())
                }
                // All tokens are 0 here, and -1 in vLLM.
                "top_k" => (name.as_str(), Toml::from(option.number()?.max(0.0) as i64)),
                "max_new_tokens" | "max_tokens" => ("max_new_tokens", Toml::from(option.count()? as i64)),
                "stop_strings" | "stop" => {
                    let one = option.value.as_str().map(|text| vec![text.to_owned()]);
                    let texts = one.or_else(|| as_texts(&option.value));
                    ("stop", texts.ok_or_else(|| option.wrong("a text, or a list of texts"))?.into())
                }
                _ => {
                    self.missing(&option, "generation has the keys of `[online]` alone");
                    continue;
                }
            };
            self.draft.set(&format!("online.{key}"), value, option.shown());
        }
        Ok(())
    }

    /// The divergence of a distillation, and who writes its completions.
    fn distillation(&mut self, others: [Option<Given>; 3]) -> Result<()> {
        let (own, of_teacher) = (self.part(Part::OwnAnswers), self.part(Part::TeachersAnswers));
        // GKDTrainer samples at its temperature; its loss has none.
        let is_gkd = self.is_gkd;
        let lmbda = match &own {
            Some(given) => {
                let share = Some(given.number()?).filter(|share| (0.0..=1.0).contains(share));
                share.ok_or_else(|| given.conflict("expected a number from 0 to 1"))?
            }
            None if is_gkd => 0.5,
            None => 1.0,
        };
        if let Some(given) = of_teacher {
            if is_off(&given.value) || lmbda == 1.0 {
                self.not_needed(&given, "the teacher writes no completions here either");
            } else {
                self.missing(&given, "let the teacher write completions first, with `tandem generate`");
            }
        }
        for key in &mut self.draft.keys {
            match key.key.as_str() {
                "objective.beta" => key.key = "distill.beta".to_owned(),
                "online.temperature" if !is_gkd => key.key = "distill.temperature".to_owned(),
                _ => {}
            }
        }
        if !is_gkd && self.draft.get("distill.beta").is_none() {
            self.draft.set("distill.beta", 1.0, "DistillationConfig's default");
        }
        if lmbda > 0.0 {
            let comment = match (&own, is_gkd) {
                (Some(_), _) => "lmbda",
                (None, true) => "GKDConfig's default",
                (None, false) => "DistillationTrainer trains on the student's answers",
            };
            self.draft.set("distill.lmbda", lmbda, comment);
            if self.draft.get("online.max_new_tokens").is_none() {
                let (tokens, whose) = if is_gkd { (128, "GKDConfig") } else { (512, "DistillationConfig") };
                self.draft.set("online.max_new_tokens", tokens, format!("{whose}'s default"));
            }
            if is_gkd && self.draft.get("online.temperature").is_none() {
                self.draft.set("online.temperature", 0.9, "GKDConfig's default");
            }
        }
        if is_gkd && lmbda == 0.0 && self.draft.get("data.truncation").is_none() {
            self.draft.set("data.truncation", "keep_end", "GKDTrainer cuts the beginning");
        }
        if is_gkd && lmbda < 1.0 {
            let reason = "GKDTrainer trains on the last turn alone, this run on every turn of the assistant: give the others as \
                          `prompt` and the last as `completion`, if the rows have several";
            self.draft.missing.push(Remark { setting: "GKDTrainer".to_owned(), reason: reason.to_owned() });
        }
        for given in others.into_iter().flatten() {
            self.not_needed(&given, "a distillation has one loss");
        }
        Ok(())
    }

    /// The loss of a method that has one alone.
    fn plain_loss(&mut self, loss: Option<Given>, others: [Option<Given>; 2]) -> Result<()> {
        if let Some(given) = loss {
            match given.value.as_str() {
                Some("nll" | "chunked_nll" | "sft" | "sigmoid") => {
                    self.not_needed(&given, "the method has this one loss");
                }
                _ => {
                    return Err(given
                        .conflict(format!("it cannot be had; method = \"{}\" has one loss", self.method)));
                }
            }
        }
        for given in others.into_iter().flatten() {
            self.not_needed(&given, "the method has one loss");
        }
        Ok(())
    }

    /// The reward model of an online run.
    fn judges(&mut self) {
        if !self.method.generates() {
            return;
        }
        let names = ["reward_model_path", "reward_model_name_or_path", "reward_model"];
        let named = |remark: &Remark| {
            let (setting, path) = remark.setting.split_once(" = ")?;
            names.contains(&setting).then(|| (setting.to_owned(), path.to_owned()))
        };
        let found =
            self.draft.missing.iter().enumerate().find_map(|(index, remark)| Some((index, named(remark)?)));
        let Some((index, (setting, path))) = found else { return };
        self.draft.missing.remove(index);
        let key = |key: &str, value: String, comment: &str| DraftKey {
            key: key.to_owned(),
            value: value.into(),
            comment: comment.to_owned(),
        };
        let path = self.facts.path(&path);
        self.draft.judges.push(vec![key("kind", "reward".into(), ""), key("model", path, &setting)]);
    }

    pub(super) fn reference(&mut self) -> Result<()> {
        let (model, sync) = (self.part(Part::RefModel), self.part(Part::Sync));
        if let Some(given) = model.filter(|given| given.value.is_string()) {
            let path = self.facts.path(given.text()?);
            self.draft.set("reference.model", path, given.shown());
        }
        let is_sync = sync.as_ref().map_or(Ok(false), Given::flag)?;
        if let Some(given) = sync {
            if is_sync {
                self.draft.set("reference.kind", "sync", given.shown());
            } else {
                self.not_needed(
                    &given,
                    "the reference stays as it is unless `reference.kind` says otherwise",
                );
            }
        }
        if !is_sync {
            let is_sync = |key: &DraftKey| key.key.starts_with("reference.sync_");
            for key in self.draft.keys.extract_if(.., |key| is_sync(key)) {
                let setting = if key.comment.is_empty() { key.key } else { key.comment };
                let reason = "the reference stays as it is without sync_ref_model".to_owned();
                self.draft.not_needed.push(Remark { setting, reason });
            }
        }
        Ok(())
    }
}
