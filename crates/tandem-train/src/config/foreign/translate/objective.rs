//! Loss and reference.

use serde_json::Value;
use toml::Value as Toml;

use super::{Given, Translator};
use crate::config::Method;
use crate::config::draft::{DraftKey, Remark};
use crate::config::error::Result;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_number, as_texts, is_off};
use crate::objective::PolicyLoss;
use crate::objective::losses::{LOSSES, find};

impl Translator<'_> {
    pub(super) fn objective(&mut self) -> Result<()> {
        let (loss, weights) = (self.part(Part::Loss), self.part(Part::LossWeights));
        let sft = self.part(Part::SftWeight).filter(|given| !is_off(&given.value));
        if !self.method.has_reference() {
            return self.plain_loss(loss, [weights, sft]);
        }
        if self.method == Method::Grpo {
            return self.policy_loss(loss, [weights, sft]);
        }
        if self.method == Method::Distill {
            return self.distillation([loss, weights, sft]);
        }
        let names = match &loss {
            Some(given) => {
                as_texts(&given.value).ok_or_else(|| given.wrong("a loss, or a list of losses"))?
            }
            None => vec![self.method.default_loss().unwrap_or("sigmoid").to_owned()],
        };
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
        let mut terms: Vec<(String, f64)> =
            names.into_iter().zip(numbers).filter(|(_, weight)| *weight != 0.0).collect();
        if let Some(given) = &sft {
            terms.push(("sft".to_owned(), given.number()?));
        }
        let comment: Vec<_> = [&loss, &weights, &sft].into_iter().flatten().map(Given::shown).collect();
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

    /// The loss of policy gradients.
    fn policy_loss(&mut self, loss: Option<Given>, others: [Option<Given>; 2]) -> Result<()> {
        if let Some(given) = loss {
            let known = PolicyLoss::NAMES.map(|(name, _)| name);
            match given.value.as_str().filter(|name| known.contains(name)) {
                Some(name) => self.draft.set("grpo.loss", name, given.shown()),
                None => {
                    return Err(
                        given.conflict(format!("it cannot be had; losses here are {}", known.join(", ")))
                    );
                }
            }
        }
        for given in others.into_iter().flatten() {
            self.not_needed(&given, "policy gradients have one loss");
        }
        self.judges();
        Ok(())
    }

    /// The divergence of a distillation, and who writes its completions.
    fn distillation(&mut self, others: [Option<Given>; 3]) -> Result<()> {
        let (own, of_teacher) = (self.part(Part::OwnAnswers), self.part(Part::TeachersAnswers));
        // GKDTrainer samples at its temperature; its loss has none.
        let is_gkd = own.is_some() || of_teacher.is_some();
        let lmbda = match &own {
            Some(given) => {
                let share = given.value.as_f64().filter(|share| (0.0..=1.0).contains(share));
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
        for given in others.into_iter().flatten() {
            self.not_needed(&given, "a distillation has one loss");
        }
        Ok(())
    }

    /// The loss of a method that has one alone.
    fn plain_loss(&mut self, loss: Option<Given>, others: [Option<Given>; 2]) -> Result<()> {
        if let Some(given) = loss {
            match given.value.as_str() {
                Some("nll" | "sft" | "sigmoid") => self.not_needed(&given, "the method has this one loss"),
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
        let names = ["reward_model_path", "reward_model"];
        let index = self
            .draft
            .missing
            .iter()
            .position(|remark| names.iter().any(|name| remark.setting.starts_with(name)));
        let Some(index) = index else { return };
        let remark = self.draft.missing.remove(index);
        let path = remark.setting.split_once(" = ").map_or("", |(_, path)| path).to_owned();
        let key = |key: &str, value: String, comment: &str| DraftKey {
            key: key.to_owned(),
            value: value.into(),
            comment: comment.to_owned(),
        };
        let path = self.facts.path(&path);
        self.draft
            .judges
            .push(vec![key("kind", "reward".into(), ""), key("model", path, "reward_model_path")]);
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
