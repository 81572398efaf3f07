//! The training method of other programs' files.

use serde_json::Value;

use super::sources::Sources;
use super::{Given, Translator};
use crate::config::Method;
use crate::config::error::{Place, Result};
use crate::config::foreign::Program;
use crate::config::foreign::command_line::method_of;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::is_off;
use crate::objective::PolicyLoss;

/// Every method in quotation marks.
fn methods() -> String {
    Method::all().map(|method| format!("{:?}", method.name())).collect::<Vec<_>>().join(", ")
}

/// The method that the name of the run's file says, or else the nearest folder's.
fn named_method(sources: &Sources) -> Option<Given> {
    let document = sources.documents.last()?;
    let method = document.path.iter().rev().find_map(|part| method_of(part.to_str()?))?;
    Some(Given {
        setting: "method".to_owned(),
        value: method.into(),
        place: Place::File { path: document.path.clone(), line: None },
        program: Program::Trl,
    })
}

impl Translator<'_> {
    pub(super) fn find_method(&mut self, sources: &Sources) -> Result<Method> {
        let said = self.part(Part::Method).filter(|given| !is_off(&given.value));
        let is_reward = self.draft.get("method").is_some();
        let of_steps = sources.given("process_reward_model").filter(|given| !is_off(&given.value));
        if let (None, Some(given)) = (self.answers.method, of_steps) {
            return Err(given
                .conflict(format!("reward models of steps cannot be had; methods here are {}", methods())));
        }
        if let (None, Some(given)) = (self.answers.method, sources.given("gamma_beta_ratio")) {
            return Err(given.conflict(
                "it is a setting of SimPO's own code, which is not read; TRL's are `loss_type: simpo`, `cpo_alpha: 0`, and \
                 `simpo_gamma`, which is gamma_beta_ratio × beta",
            ));
        }
        if let Some(method) = self.answers.method {
            // `dpo` is the method of CPO and ORPO, too: their losses stay.
            if let Some(given) = said.or_else(|| sources.method.clone()).or_else(|| self.cpo(sources)) {
                let (parts, draft) = (self.parts.clone(), self.draft.clone());
                if !self.method_named(&given).is_ok_and(|named| named == method) {
                    (self.parts, self.draft) = (parts, draft);
                }
            }
            return Ok(method);
        }
        if let Some(given) = said {
            return self.method_named(&given);
        }
        if is_reward {
            return Ok(Method::Reward);
        }
        if let Some(given) = sources.method.clone().or_else(|| self.cpo(sources)) {
            return self.method_named(&given);
        }
        match self.program {
            Program::Axolotl | Program::LlamaFactory => Ok(Method::Sft),
            _ => self.guess_method(sources),
        }
    }

    /// TRL's `CPOTrainer`, where a setting is that of `CPOConfig` alone and no command names a trainer.
    fn cpo(&self, sources: &Sources) -> Option<Given> {
        let loss = self.parts.get(&Part::Loss).filter(|given| given.value == "simpo");
        let given = self.parts.get(&Part::CpoAlpha).or(loss)?;
        let is_trl = self.program == Program::Trl && sources.method.is_none();
        is_trl.then(|| Given { setting: "method".to_owned(), value: "cpo".into(), ..given.clone() })
    }

    fn method_named(&mut self, given: &Given) -> Result<Method> {
        let name = given.text()?;
        Ok(match name {
            "sft" => Method::Sft,
            "dpo" => Method::Dpo,
            "rm" | "reward" => Method::Reward,
            "kto" => Method::Kto,
            "ipo" => {
                self.parts.insert(Part::Loss, Given { value: name.into(), ..given.clone() });
                Method::Dpo
            }
            // Their trainers add the likelihood of the chosen completions.
            "orpo" => {
                self.parts.insert(Part::Loss, Given { value: vec![name, "sft"].into(), ..given.clone() });
                self.draft.set("data.loss_on", "all", "TRL's ORPO takes the prompt's likelihood, too");
                Method::Dpo
            }
            "cpo" | "simpo" => {
                let (loss, weight) = (self.part(Part::Loss), self.part(Part::CpoAlpha));
                let ours = match loss.as_ref().map(|loss| (loss, loss.value.as_str())) {
                    _ if name == "simpo" => "simpo",
                    None | Some((_, Some("sigmoid"))) => "cpo",
                    Some((_, Some("simpo"))) => "simpo",
                    Some((_, Some("hinge"))) => "hinge",
                    Some((_, Some("ipo"))) => "ipo",
                    Some((loss, _)) => {
                        return Err(loss.conflict(
                            "it cannot be had with CPO; give \"sigmoid\", \"hinge\", \"ipo\" or \"simpo\", or a loss of \
                             docs/losses.md",
                        ));
                    }
                };
                if matches!(ours, "hinge" | "ipo") {
                    self.draft.set("objective.reference_free", true, "CPO has no reference");
                }
                let losses = match weight {
                    Some(weight) => {
                        self.parts.insert(Part::SftWeight, weight);
                        Value::from(ours)
                    }
                    None => vec![ours, "sft"].into(),
                };
                self.parts.insert(Part::Loss, Given { value: losses, ..given.clone() });
                Method::Dpo
            }
            "bco" => {
                self.parts.insert(Part::Loss, Given { value: "bco".into(), ..given.clone() });
                Method::Kto
            }
            "grpo" if given.program == Program::Trl => Method::Grpo,
            "grpo" => {
                return Err(given.conflict(format!(
                    "{name:?} cannot be had from {}'s settings; give --method grpo, and a judge for each reward function",
                    given.program.title()
                )));
            }
            "xpo" | "nash_md" => {
                self.draft.set("online.algorithm", name, given.shown());
                Method::Online
            }
            "pt" => {
                self.draft.set("data.loss_on", "all", given.shown());
                Method::Sft
            }
            "online_dpo" => Method::Online,
            "gkd" | "distillation" => Method::Distill,
            _ => {
                return Err(given.conflict(format!(
                    "{name:?} cannot be had; methods here are {}, and a loss is `objective.loss` (docs/losses.md)",
                    methods()
                )));
            }
        })
    }

    /// The method of settings that only one of TRL's configs has, of the file's name, or of weaker signs.
    fn guess_method(&mut self, sources: &Sources) -> Result<Method> {
        let has = |names: &[&str]| sources.has(names);
        let loss = self.parts.get(&Part::Loss).and_then(|given| given.value.as_str());
        let of_grpo = [
            "num_generations",
            "num_iterations",
            "scale_rewards",
            "importance_sampling_level",
            "mask_truncated_completions",
        ];
        if has(&["teacher_model_name_or_path", "teacher_model", "lmbda", "seq_kd"]) {
            return Ok(Method::Distill);
        }
        if has(&of_grpo) || loss.is_some_and(|loss| PolicyLoss::NAMES.iter().any(|(name, _)| *name == loss)) {
            return Ok(Method::Grpo);
        }
        if has(&["max_new_tokens", "reward_model_path", "missing_eos_penalty"]) {
            return Ok(Method::Online);
        }
        if has(&["desirable_weight", "undesirable_weight"])
            || matches!(loss, Some("kto" | "apo_zero_unpaired"))
        {
            return Ok(Method::Kto);
        }
        if has(&["center_rewards_coefficient"]) {
            return Ok(Method::Reward);
        }
        if has(&[
            "packing",
            "completion_only_loss",
            "assistant_only_loss",
            "dataset_text_field",
            "eval_packing",
        ]) || matches!(loss, Some("nll" | "chunked_nll" | "dft"))
        {
            return Ok(Method::Sft);
        }
        let is_dpo = loss.is_some() || has(&["f_divergence_type", "label_smoothing", "ld_alpha"]);
        let is_with_reference = is_dpo || has(&["beta", "precompute_ref_log_probs", "sync_ref_model"]);
        // Many methods have `beta`; SFT and reward models have none.
        let named = named_method(sources).filter(|given| {
            !is_with_reference || !matches!(given.value.as_str(), Some("sft" | "reward" | "prm"))
        });
        if let Some(given) = named {
            self.is_gkd |= given.value == "gkd";
            return self.method_named(&given);
        }
        if has(&["reward_funcs", "use_vllm", "vllm_mode"]) {
            return Ok(Method::Grpo);
        }
        if is_with_reference {
            if !is_dpo {
                let assumed = "assumed: KTO, ORPO, CPO and GRPO have `beta` too; --method says another";
                self.draft.set("method", Method::Dpo.name(), assumed);
            }
            return Ok(Method::Dpo);
        }
        if self.is_launcher_alone() {
            return Err(self.lacking(
                "method",
                "the trainer's file with another --from (these settings are a launcher's), or --method, --model and \
                 --data",
            ));
        }
        let give = format!("`--method sft`, or another of {}, which no setting here tells", methods());
        Err(self.lacking("method", &give))
    }

    fn is_launcher_alone(&self) -> bool {
        self.programs.iter().all(|program| matches!(program, Program::Accelerate | Program::DeepSpeed))
    }
}
