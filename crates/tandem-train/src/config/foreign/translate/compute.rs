//! Precision, checkpointing, sharding and offload.

use super::{Given, Translator};
use crate::config::error::Result;
use crate::config::foreign::Program;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_flag, is_off};

impl Translator<'_> {
    pub(super) fn compute(&mut self) -> Result<()> {
        self.precision()?;
        self.fsdp_table();
        self.checkpointing()?;
        self.sharding()?;
        self.offload()
    }

    fn precision(&mut self) -> Result<()> {
        let (bf16, fp16, mixed) =
            (self.part(Part::Bf16), self.part(Part::Fp16), self.part(Part::MixedPrecision));
        let fp16 = fp16.filter(|given| !is_off(&given.value));
        let bf16_is = match &bf16 {
            Some(given) if given.value == "auto" => Some(true),
            Some(given) => Some(given.flag()?),
            None => None,
        };
        // TRL, Axolotl and accelerate's "bf16" compute in bf16 unless told otherwise.
        let default = matches!(self.program, Program::Trl | Program::Axolotl);
        if let Some(given) = fp16 {
            self.missing(&given, "f16 is not supported; bf16 has its range without a scale of losses");
            self.draft.set("compute.dtype", "bf16", format!("not {}", given.shown()));
        } else if let (Some(is_bf16), Some(given)) = (bf16_is, &bf16) {
            self.draft.set("compute.dtype", if is_bf16 { "bf16" } else { "f32" }, given.shown());
            if let Some(mixed) = mixed {
                self.not_needed(&mixed, "the trainer's own setting wins");
            }
        } else if let Some(given) = mixed {
            let dtype = match given.value.as_str() {
                Some("bf16" | "bfloat16") => "bf16",
                Some("fp16" | "float16" | "fp8") => {
                    self.missing(&given, "matmuls are in bf16 or f32");
                    "bf16"
                }
                _ if default => "bf16",
                _ => "f32",
            };
            self.draft.set("compute.dtype", dtype, given.shown());
        } else {
            self.draft.set("compute.dtype", if default { "bf16" } else { "f32" }, self.default_of());
        }
        if let Some(given) = self.part(Part::Tf32) {
            self.tf32(&given);
        }
        Ok(())
    }

    fn tf32(&mut self, given: &Given) {
        let text = |key: &str| self.draft.get(key).and_then(toml::Value::as_str);
        let is_f32 = text("compute.dtype") == Some("f32");
        match as_flag(&given.value) {
            Some(true) if is_f32 && text("compute.devices") == Some("cpu") => {
                self.not_needed(given, "CPUs have no such matmuls");
            }
            Some(true) if is_f32 => self.draft.set("compute.tf32", true, given.shown()),
            Some(true) => self
                .missing(given, "it is for f32 matmuls; set `compute.tf32` with `compute.dtype = \"f32\"`"),
            _ => self.not_needed(given, "f32 matmuls are not rounded unless `compute.tf32` says so"),
        }
    }

    fn checkpointing(&mut self) -> Result<()> {
        if let Some(given) = self.part(Part::Checkpointing) {
            // Unsloth's and Axolotl's words for it are on too.
            let is_on = as_flag(&given.value).unwrap_or(!is_off(&given.value));
            if self.draft.get("compute.checkpointing").is_none() {
                let value = if is_on { "block" } else { "none" };
                self.draft.set("compute.checkpointing", value, given.shown());
            }
        }
        if let Some(given) = self.part(Part::OffloadActivations).filter(|given| !is_off(&given.value)) {
            self.draft.set("compute.offload_activations", true, given.shown());
        }
        match self.draft.get("compute.offload_activations").and_then(toml::Value::as_bool) {
            Some(true) => self.draft.set("compute.checkpointing", "block", "activation offloading needs it"),
            Some(false) => self.draft.remove("compute.offload_activations"),
            None => {}
        }
        Ok(())
    }

    /// `fsdp_config` of transformers, which counts with `fsdp` alone; Axolotl's turns FSDP on.
    fn fsdp_table(&mut self) {
        if let Some(given) = self.part(Part::FsdpFile).filter(|given| !is_off(&given.value)) {
            self.missing(&given, "the file is not read; write its settings as a table in its place");
        }
        let is_on = self.parts.get(&Part::Fsdp).is_some_and(|given| !is_off(&given.value));
        if is_on || self.fsdp_config.is_some() {
            return;
        }
        for part in [Part::FsdpReshard, Part::FsdpStrategy, Part::OffloadWeights, Part::Checkpointing] {
            let is_idle = |given: &Given| {
                given.program != Program::Accelerate && given.setting.starts_with("fsdp_config.")
            };
            if self.parts.get(&part).is_some_and(is_idle)
                && let Some(given) = self.part(part)
            {
                self.not_needed(&given, "`fsdp` is off");
            }
        }
    }

    fn sharding(&mut self) -> Result<()> {
        let distributed = self.part(Part::Distributed);
        let (stage, fsdp, reshard) =
            (self.part(Part::ZeroStage), self.part(Part::Fsdp), self.part(Part::FsdpReshard));
        if let Some(given) = self.part(Part::DeepSpeed).filter(|given| given.value.is_string()) {
            match self.programs.contains(&Program::DeepSpeed) {
                true => self.not_needed(&given, "its settings are here"),
                false => self.missing(&given, "the file is not here; give it with another --from"),
            }
        }
        if let Some(given) = stage {
            let names = ["ddp", "zero1", "zero2", "zero3"];
            let stage = given.count()? as usize;
            let name = names.get(stage).ok_or_else(|| given.wrong("a stage from 0 to 3"))?;
            self.draft.set("compute.sharding", *name, given.shown());
        } else if let Some(given) = fsdp.filter(|given| !is_off(&given.value)) {
            self.fsdp(&given)?;
        } else if self.fsdp_config.is_some() {
            self.draft.set("compute.sharding", "zero3", "fsdp_config, which turns FSDP on");
        } else if let Some(given) = &distributed
            && given.value == "FSDP"
        {
            self.draft.set("compute.sharding", "zero3", given.shown());
        }
        if let Some(given) = self.part(Part::FsdpStrategy).filter(|given| !is_off(&given.value)) {
            self.fsdp(&given)?;
        }
        if let Some(given) = reshard {
            match as_flag(&given.value) {
                Some(true) => self.draft.set("compute.sharding", "zero3", given.shown()),
                Some(false) => self.draft.set("compute.sharding", "zero2", given.shown()),
                None => self.fsdp(&given)?,
            }
        }
        if let Some(given) = distributed {
            self.not_needed(&given, "`compute.sharding` and the launcher say it");
        }
        Ok(())
    }

    fn fsdp(&mut self, given: &Given) -> Result<()> {
        let words = match &given.value {
            serde_json::Value::String(text) => text.to_ascii_lowercase(),
            serde_json::Value::Array(items) => items
                .iter()
                .filter_map(|item| item.as_str())
                .collect::<Vec<_>>()
                .join(" ")
                .to_ascii_lowercase(),
            other => other.to_string(),
        };
        let has = |name: &str| words.split([' ', ',']).any(|word| word == name);
        let name = match () {
            () if has("shard_grad_op") || words == "2" => "zero2",
            () if has("no_shard") || words == "3" => "ddp",
            () => "zero3",
        };
        self.draft.set("compute.sharding", name, given.shown());
        if has("hybrid_shard") && self.machines > 1 {
            self.draft.set(
                "compute.replicate",
                self.machines as i64,
                format!("{}, a copy on each machine", given.shown()),
            );
        }
        if has("offload") {
            self.draft.set("compute.offload", "host", given.shown());
        }
        Ok(())
    }

    fn offload(&mut self) -> Result<()> {
        let given = [self.part(Part::OffloadOptimizer), self.part(Part::OffloadWeights)];
        let folders = [self.part(Part::OffloadFolder), self.part(Part::WeightsFolder)];
        // One folder holds weights and states: that of the states, if there are two.
        let folder = folders.iter().flatten().find(|folder| !is_off(&folder.value));
        for given in given.into_iter().flatten().filter(|given| !is_off(&given.value)) {
            match given.value.as_str() {
                Some("nvme") => {
                    let Some(folder) = folder else {
                        return Err(given.conflict("it needs a folder: nvme_path"));
                    };
                    self.draft.set("compute.offload", "nvme", given.shown());
                    let path = self.facts.local(folder.text()?);
                    self.draft.set("compute.offload_dir", path, folder.shown());
                }
                _ if self.draft.get("compute.offload").is_none() => {
                    self.draft.set("compute.offload", "host", given.shown());
                }
                _ => self.not_needed(&given, "`compute.offload` is for weights and states together"),
            }
        }
        let is_used = self.draft.get("compute.offload_dir").is_some();
        for other in folders.iter().flatten().filter(|other| !is_off(&other.value)) {
            if !is_used || folder.is_none_or(|folder| folder.setting != other.setting) {
                self.not_needed(other, "`compute.offload_dir` holds weights and states of \"nvme\"");
            }
        }
        Ok(())
    }
}
