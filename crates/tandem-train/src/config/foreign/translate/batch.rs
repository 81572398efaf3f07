//! Batches, length of the run, optimiser, schedule, checkpoints and evaluations.

use super::{Given, PerEpoch, Translator};
use crate::config::draft::Remark;
use crate::config::error::Result;
use crate::config::foreign::Program;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_number, is_off};
use crate::config::{BestMetric, Method, Optimizer, Shape};

/// Names of optimisers that are ours.
const OPTIMIZERS: [(&[&str], &str, Option<&str>); 9] = [
    (
        &[
            "adamw",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "adamw_torch_xla",
            "adamw_torch_npu_fused",
            "paged_adamw_32bit",
            "paged_adamw",
            "AdamW",
            "Adam",
            "adam",
        ],
        "adamw",
        None,
    ),
    (
        &["adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "ao_adamw_8bit"],
        "adamw",
        Some("8bit"),
    ),
    (&["rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "RMSprop"], "rmsprop", None),
    (&["rmsprop_bnb_8bit"], "rmsprop", Some("8bit")),
    (&["lion", "lion_32bit", "paged_lion_32bit", "Lion"], "lion", None),
    (&["lion_8bit", "paged_lion_8bit"], "lion", Some("8bit")),
    (&["sgd", "SGD"], "sgd", None),
    (&["schedule_free_adamw"], "schedule_free_adamw", None),
    (&["adafactor", "Adafactor"], "adafactor", None),
];

/// Most rows of a step: TOML's whole numbers have a sign.
const MOST_ROWS: u64 = i64::MAX as u64;

impl Translator<'_> {
    /// Rows of a step over all ranks, and of a micro-batch.
    pub(super) fn batch(&mut self) -> Result<()> {
        let machines = self.part(Part::Machines);
        self.machines = machines.as_ref().map_or(Ok(1), Given::count)?.max(1);
        let processes = self.part(Part::Processes).map(|given| given.count()).transpose()?;
        let (ranks, origin) = match (self.answers.ranks, processes) {
            (Some(ranks), _) => (ranks, ""),
            (None, Some(ranks)) => (ranks, ""),
            (None, None) if self.answers.assumed_ranks.is_some() => {
                (self.answers.assumed_ranks.unwrap_or(1), "")
            }
            (None, None) => (1, " (no file says how many: give --ranks)"),
        };
        self.ranks = ranks.max(1);
        let is_told = self.answers.ranks.is_some() || processes.is_some();
        let replicas = self.data_ranks(is_told)?;
        let mut total = self.part(Part::Batch);
        let (device, accumulated) = (self.part(Part::DeviceBatch), self.part(Part::Accumulation));
        let mut accumulation = match accumulated.as_ref().filter(|given| given.value != "auto") {
            Some(given) => given.count()?.max(1),
            None => 1,
        };
        if let (Program::Axolotl, Some(given)) = (self.program, &total) {
            // Axolotl's own batch_size is that of a device, and says the accumulation where it is left out.
            if accumulated.is_none() {
                let each = device.as_ref().map_or(Ok(1), Given::count)?.max(1);
                accumulation = (given.count()? / each).max(1);
            }
            total = None;
        }
        if self.program == Program::Mitchell {
            return self.mitchells_batch(total, accumulated, accumulation);
        }
        let default = if self.program == Program::Axolotl { 1 } else { 8 };
        let each = device.as_ref().map_or(Ok(default), Given::count)?;
        if each == 0 {
            return Err(device.expect("it is not the default").wrong("at least 1"));
        }
        let too_many = || {
            let words = format!("{each} × {accumulation} accumulated × {replicas} ranks");
            self.lacking("train.batch_size", &format!("fewer rows of a step than {words}"))
        };
        let completions = each.checked_mul(replicas).ok_or_else(too_many)?;
        let batch = completions.checked_mul(accumulation).filter(|&batch| batch <= MOST_ROWS);
        let batch = batch.ok_or_else(too_many)?;
        self.steps_per_round(completions, accumulation)?;
        if self.method == Method::Grpo && self.program != Program::LlamaFactory {
            return self.grpos_batch(batch, total);
        }
        let each_words = match &device {
            Some(given) => format!("{} {each}", given.setting),
            None => format!("{each} per device by {}", self.default_of()),
        };
        let sharing = match self.ranks / replicas {
            1 => String::new(),
            sharing => format!(", {} / {sharing} of one batch", self.ranks),
        };
        let words = format!("{each_words} × {accumulation} accumulated × {replicas} ranks{origin}{sharing}");
        match total {
            Some(given) if given.count()? != batch && device.is_some() => {
                return Err(given.conflict(format!(
                    "it is not {batch}, which is {words}; say how many ranks there were with --ranks"
                )));
            }
            Some(given) => self.draft.set("train.batch_size", given.count()? as i64, given.shown()),
            None => self.draft.set("train.batch_size", batch as i64, words),
        }
        if let Some(given) = device {
            self.micro_batch(&given, each, accumulation);
        }
        Ok(())
    }

    /// Ranks with rows of their own: those of `compute.tensor`, and those that share a sequence there, have the same.
    fn data_ranks(&mut self, is_told: bool) -> Result<u64> {
        let tensor = self.draft.get("compute.tensor").and_then(toml::Value::as_integer).unwrap_or(1);
        let mut sharing = tensor.max(1) as u64;
        for part in [Part::ContextRanks, Part::SequenceRanks] {
            let Some(given) = self.part(part) else { continue };
            let count = given.count()?.max(1);
            match count {
                1 => self.not_needed(&given, "each rank has whole sequences, or shares of `compute.tensor`"),
                _ => self.missing(&given, "a sequence stays on the ranks of `compute.tensor`"),
            }
            sharing = sharing.saturating_mul(count);
        }
        if is_told && !self.ranks.is_multiple_of(sharing) {
            let words =
                format!("a multiple of {sharing} ranks, which share a batch; there are {}", self.ranks);
            return Err(self.lacking("train.batch_size", &words));
        }
        Ok((self.ranks / sharing).max(1))
    }

    /// Micro-batches of `each` rows. Those that one rank accumulates may as well be larger where rows are short: the cut
    /// changes nothing but the rounding of sums, and each takes a pass over all weights and gradients.
    fn micro_batch(&mut self, given: &Given, each: u64, accumulation: u64) {
        let length = self.draft.get("data.max_length").map_or(Some(1024), toml::Value::as_integer);
        let sequences = if matches!(self.method, Method::Dpo | Method::Reward) { 2 } else { 1 };
        let tokens = length.and_then(|length| length.checked_mul(sequences)?.checked_mul(each as i64));
        match tokens.filter(|&tokens| self.ranks == 1 && accumulation > 1 && (1..=1 << 31).contains(&tokens))
        {
            Some(tokens) => {
                let comment = format!("{}, of whole length; `tandem plan` says what fits", given.shown());
                self.draft.set("train.micro_batch_tokens", tokens, comment);
            }
            None => {
                let comment = format!("{}; `tandem plan` says what fits", given.shown());
                self.draft.set("train.micro_batch_size", each as i64, comment);
            }
        }
    }

    /// TRL counts micro-batches of all ranks, here `completions` each, and we count steps of `accumulation`
    /// micro-batches.
    fn steps_per_round(&mut self, completions: u64, accumulation: u64) -> Result<()> {
        let (steps, batch) = (self.part(Part::StepsPerGeneration), self.part(Part::GenerationBatch));
        if !self.method.generates() {
            for given in [steps, batch].into_iter().flatten() {
                let reason = format!("method = \"{}\" generates nothing", self.method);
                self.not_needed(&given, reason);
            }
            return Ok(());
        }
        let (micro_batches, given) = match (steps, batch) {
            (Some(steps), Some(_)) => {
                return Err(steps.conflict("TRL does not take it together with `generation_batch_size`"));
            }
            (Some(steps), None) => (steps.count()?, steps),
            (None, Some(batch)) => {
                let count = batch.count()?;
                if !count.is_multiple_of(completions) {
                    return Err(batch.conflict(format!(
                        "it is no multiple of {completions}, the completions of a micro-batch on {} ranks; say how many \
                         ranks there were with --ranks",
                        self.ranks
                    )));
                }
                (count / completions, batch)
            }
            (None, None) => return Ok(()),
        };
        let updates = self.draft.get("grpo.num_iterations").and_then(toml::Value::as_integer).unwrap_or(1);
        if micro_batches == 0 {
            return Err(given.wrong("at least 1"));
        }
        if micro_batches.is_multiple_of(accumulation) {
            let comment = format!("{} / {accumulation} accumulated", given.shown());
            self.draft.set("online.steps_per_round", (micro_batches / accumulation) as i64, comment);
        } else if accumulation.is_multiple_of(micro_batches) && updates == 1 {
            self.not_needed(&given, "every step has new answers, as it is");
        } else {
            return Err(given.conflict(format!(
                "{micro_batches} micro-batches are no whole steps of {accumulation}, so some answers would train before others \
                 of their step are generated; make it a multiple of gradient_accumulation_steps"
            )));
        }
        Ok(())
    }

    /// TRL's counts completions there, and prompts here.
    fn grpos_batch(&mut self, completions: u64, total: Option<Given>) -> Result<()> {
        let group =
            self.draft.get("online.answers").and_then(toml::Value::as_integer).unwrap_or(8).max(1) as u64;
        let completions = total.as_ref().map_or(Ok(completions), Given::count)?;
        if !completions.is_multiple_of(group) {
            return Err(self.lacking(
                "train.batch_size",
                &format!("whole groups: {completions} completions of a step are no multiple of {group}"),
            ));
        }
        let words = format!("{completions} completions of a step / {group} of a prompt");
        self.draft.set("train.batch_size", (completions / group) as i64, words);
        Ok(())
    }

    /// The batch is over all GPUs there, and accumulation cuts it.
    fn mitchells_batch(
        &mut self,
        total: Option<Given>,
        accumulated: Option<Given>,
        parts: u64,
    ) -> Result<()> {
        let batch = total.as_ref().map_or(Ok(4), Given::count)?;
        let comment = total.map_or_else(|| self.default_of(), |given| given.shown());
        self.draft.set("train.batch_size", batch as i64, format!("{comment}, over all GPUs"));
        if let Some(given) = accumulated {
            let each = (batch / parts / self.ranks).max(1);
            self.draft.set(
                "train.micro_batch_size",
                each as i64,
                format!("{}, {} ranks", given.shown(), self.ranks),
            );
        }
        Ok(())
    }

    fn is_bco(&self) -> bool {
        self.draft.get("objective.loss").and_then(toml::Value::as_str) == Some("bco")
    }

    /// The order of the rows of TRL's `KTOTrainer`, where no setting says it.
    pub(super) fn kto_order(&mut self) {
        let is_given = self.sampling.is_some() || self.draft.get("data.order").is_some();
        if self.program == Program::Trl && self.method == Method::Kto && !self.is_bco() && !is_given {
            let comment = format!("{}: its KL is of neighbours", self.default_of());
            self.draft.set("data.order", "sequential", comment);
        }
    }

    /// Steps or epochs.
    pub(super) fn length(&mut self) -> Result<()> {
        let (steps, epochs) = (self.part(Part::MaxSteps), self.part(Part::Epochs));
        let examples = self.part(Part::Examples).filter(|given| !is_off(&given.value));
        if let Some(given) = examples {
            for other in [steps, epochs].into_iter().flatten() {
                self.not_needed(&other, "the number of examples is given");
            }
            let batch = self.batch_size();
            self.draft.remove("train.epochs");
            self.draft.set(
                "train.steps",
                given.count()?.div_ceil(batch).max(1) as i64,
                format!("{} in batches of {batch}", given.shown()),
            );
            return Ok(());
        }
        if let Some(given) = steps {
            if given.number()? > 0.0 {
                self.draft.set("train.steps", given.count()? as i64, given.shown());
                if let Some(epochs) = epochs {
                    self.not_needed(&epochs, "the number of steps is given");
                }
                return Ok(());
            }
            self.not_needed(&given, "a number that is not positive leaves it to the epochs");
        }
        if self.draft.get("train.epochs").is_some() {
            return Ok(());
        }
        let default = if matches!(self.program, Program::Axolotl | Program::Mitchell) { 1.0 } else { 3.0 };
        match epochs {
            Some(given) => self.draft.set("train.epochs", given.number()?, given.shown()),
            None => self.draft.set("train.epochs", default, self.default_of()),
        }
        Ok(())
    }

    fn batch_size(&self) -> u64 {
        self.draft.get("train.batch_size").and_then(toml::Value::as_integer).unwrap_or(1).max(1) as u64
    }

    /// Steps of an epoch, if the rows can be counted.
    fn steps_per_epoch(&self) -> Option<u64> {
        if self.has_weights() {
            return None;
        }
        let files = self.train_files();
        let mut rows = self.facts.num_rows(&files)?;
        if self.method == Method::Kto && self.has_pairs(&files) {
            rows = rows.saturating_mul(2);
        }
        let limit =
            self.draft.get("data.train_rows").and_then(toml::Value::as_integer).map(|rows| rows as u64);
        Some(limit.map_or(rows, |limit| rows.min(limit)).div_ceil(self.batch_size()))
    }

    /// Returns whether the rows are pairs, each of which is two labelled completions for KTO.
    fn has_pairs(&self, files: &[String]) -> bool {
        let Some(columns) = files.first().and_then(|file| self.facts.columns(file)) else { return false };
        let mapped = self.draft.get("data.columns").and_then(toml::Value::as_table);
        let has = |key: &str| {
            let column = mapped.and_then(|mapped| mapped.get(key)?.as_str()).unwrap_or(key);
            columns.iter().any(|found| found == column)
        };
        has("chosen") && has("rejected") && !has("completion")
    }

    /// Learning rate and optimiser.
    pub(super) fn optimizer(&mut self) -> Result<()> {
        match self.part(Part::LearningRate) {
            Some(given) => {
                let comment = if given.setting == "learning_rate" { String::new() } else { given.shown() };
                self.draft.set("train.learning_rate", given.number()?, comment);
            }
            None => {
                let rate = match (self.program, self.method) {
                    (Program::Mitchell, _) => 5e-7,
                    (Program::LlamaFactory, _) => 5e-5,
                    (Program::Axolotl, _) => {
                        return Err(self.lacking("learning_rate", "it, which Axolotl needs too"));
                    }
                    (_, Method::Sft) => 2e-5,
                    (_, Method::Distill) if self.is_gkd => 2e-5,
                    // `BCOConfig`'s.
                    (_, Method::Kto) if self.is_bco() => 5e-7,
                    (_, Method::Dpo | Method::Kto | Method::Grpo | Method::Distill) => 1e-6,
                    (_, Method::Reward) => 1e-4,
                    (_, Method::Online) => 5e-7,
                };
                self.draft.set("train.learning_rate", rate, self.default_of());
            }
        }
        let given = self.part(Part::Optimizer);
        if let Some(given) = given {
            let name = given.text()?;
            match OPTIMIZERS.iter().find(|(names, ..)| names.contains(&name)) {
                Some((_, ours, state)) => {
                    if *ours != "adamw" || state.is_some() {
                        self.draft.set("train.optimizer", *ours, given.shown());
                    } else {
                        self.not_needed(&given, "\"adamw\" is the default");
                    }
                    if let Some(state) = state {
                        self.draft.set("train.optimizer_state", *state, given.shown());
                    }
                    // DeepSpeed's own Lion has our default.
                    if *ours == "lion" && given.program != Program::DeepSpeed {
                        let betas = vec![0.9, 0.999];
                        self.draft.set("train.betas", betas, "defaults of adam_beta1 and adam_beta2 there");
                    }
                }
                None => self.missing(
                    &given,
                    format!(
                        "optimisers are {}; this run has adamw, so compare its rate",
                        Optimizer::NAMES.map(|name| format!("{name:?}")).join(", ")
                    ),
                ),
            }
        } else if self.program == Program::Mitchell && self.draft.get("train.optimizer").is_none() {
            self.draft.set("train.optimizer", "rmsprop", self.default_of());
        }
        if let Some(given) = self.part(Part::Betas) {
            let betas: Option<Vec<f64>> =
                given.value.as_array().map(|betas| betas.iter().filter_map(as_number).collect());
            match betas.filter(|betas| betas.len() == 2) {
                Some(betas) => self.draft.set("train.betas", betas, given.shown()),
                None => return Err(given.wrong("two numbers")),
            }
        }
        let betas = (self.part(Part::Beta1), self.part(Part::Beta2));
        if betas.0.is_some() || betas.1.is_some() {
            let number = |given: &Option<Given>, default| given.as_ref().map_or(Ok(default), Given::number);
            let pair = vec![number(&betas.0, 0.9)?, number(&betas.1, 0.999)?];
            let names: Vec<_> = [&betas.0, &betas.1].into_iter().flatten().map(Given::shown).collect();
            self.draft.set("train.betas", pair, names.join(", "));
        }
        if self.draft.get("train.max_grad_norm").is_none() && self.program == Program::Mitchell {
            self.draft.set("train.max_grad_norm", 10.0, self.default_of());
        }
        if self.program == Program::Mitchell && self.method == Method::Sft {
            self.draft.missing.push(Remark {
                setting: "loss = sft".to_owned(),
                reason: "there it is a sum over a row's tokens, here a mean over the batch's: gradients are smaller, and \
                         `train.max_grad_norm` clips less"
                    .to_owned(),
            });
        }
        Ok(())
    }

    /// Schedule and warm-up.
    pub(super) fn schedule(&mut self) -> Result<()> {
        let given = self.part(Part::Schedule);
        let default = match self.program {
            Program::Axolotl => "cosine",
            Program::Mitchell => "constant_with_warmup",
            _ => "linear",
        };
        let name = given.as_ref().map_or(Ok(default), |given| given.text())?.to_owned();
        let ours = match name.as_str() {
            "WarmupDecayLR" => "linear",
            "WarmupCosineLR" => "cosine",
            "constant_with_warmup" | "WarmupLR" => "constant",
            name => Shape::NAMES.into_iter().find(|ours| *ours == name).unwrap_or_default(),
        };
        let optimizer = self.draft.get("train.optimizer").and_then(toml::Value::as_str);
        if optimizer == Some("schedule_free_adamw") {
            match &given {
                Some(given) if ours == "constant" => {
                    self.not_needed(given, "its optimiser needs no schedule");
                }
                Some(given) => self
                    .missing(given, "schedule-free AdamW keeps its rate: its average does a schedule's work"),
                None => self.draft.missing.push(Remark {
                    setting: format!("{name} by {}", self.default_of()),
                    reason: "it lowers the rate of schedule-free AdamW, too; here the rate stays".to_owned(),
                }),
            }
            return self.warmup("constant_with_warmup");
        }
        let warmup = self.part(Part::WarmupType);
        if let Some(given) = given.as_ref().filter(|_| name.starts_with("Warmup")) {
            match &warmup {
                Some(warmup) if warmup.value == "linear" => {
                    self.not_needed(warmup, "warm-up is a straight line here, too");
                }
                _ => self.missing(
                    warmup.as_ref().unwrap_or(given),
                    "its warm-up goes with the logarithm of the step unless warmup_type is \"linear\"; here it is a \
                     straight line",
                ),
            }
        }
        match (&given, ours) {
            (Some(given), "") => {
                self.missing(
                    given,
                    format!(
                        "schedules are {}; this run has \"cosine\"",
                        Shape::NAMES.map(|name| format!("{name:?}")).join(", ")
                    ),
                );
                self.draft.set("train.schedule", "cosine", format!("not {}", given.shown()));
            }
            (Some(given), ours) if given.setting != "schedule" => {
                self.draft.set("train.schedule", ours, given.shown());
            }
            (_, ours) => self.draft.set("train.schedule", ours, self.default_of()),
        }
        self.schedule_options(ours, &name)?;
        self.warmup(&name)
    }

    /// Constants of a schedule: `lr_scheduler_kwargs` of transformers.
    fn schedule_options(&mut self, schedule: &str, written: &str) -> Result<()> {
        let given = self.part(Part::ScheduleOptions);
        let Some(given) = given else { return Ok(()) };
        for (name, option) in given.members()? {
            let key = match (schedule, name.as_str()) {
                ("cosine_with_min_lr", "min_lr_rate") | ("warmup_stable_decay", "min_lr_ratio") => {
                    "train.min_lr_rate"
                }
                ("cosine_with_min_lr", "min_lr") => {
                    let peak = self.draft.get("train.learning_rate").and_then(toml::Value::as_float);
                    let share = option.number()? / peak.unwrap_or(1.0);
                    self.draft.set("train.min_lr_rate", share, format!("{} of the peak", option.shown()));
                    continue;
                }
                ("polynomial", "lr_end") => "train.lr_end",
                ("polynomial", "power") => "train.power",
                ("cosine_with_restarts", "num_cycles") => "train.num_cycles",
                ("inverse_sqrt", "timescale") => "train.timescale",
                ("warmup_stable_decay", "num_decay_steps") => "train.decay_steps",
                ("warmup_stable_decay", "decay_type") => {
                    self.draft.set("train.decay_type", option.text()?, option.shown());
                    continue;
                }
                ("warmup_stable_decay", "warmup_type") if option.value == "linear" => {
                    self.not_needed(&option, "the warm-up is a straight line here too");
                    continue;
                }
                _ => {
                    let reason = format!("the schedule {written:?} has no such option here");
                    self.missing(&option, reason);
                    continue;
                }
            };
            match key {
                "train.num_cycles" | "train.timescale" | "train.decay_steps" => {
                    self.draft.set(key, option.count()? as i64, option.shown());
                }
                _ => self.draft.set(key, option.number()?, option.shown()),
            }
        }
        Ok(())
    }

    fn warmup(&mut self, schedule: &str) -> Result<()> {
        let (steps, ratio) = (self.part(Part::WarmupSteps), self.part(Part::WarmupRatio));
        if schedule == "constant" {
            for given in [steps, ratio].into_iter().flatten().filter(|given| !is_off(&given.value)) {
                self.not_needed(&given, "the schedule \"constant\" of transformers has no warm-up");
            }
            return Ok(());
        }
        let is_set = |given: &Given| !is_off(&given.value);
        if let Some(given) = steps.filter(is_set) {
            let number = given.number()?;
            // transformers 5 takes a number below 1 as a share.
            if number < 1.0 {
                self.draft.set(
                    "train.warmup_ratio",
                    number,
                    format!("{}, a share of all steps", given.shown()),
                );
            } else {
                let comment = if given.setting == "warmup_steps" { String::new() } else { given.shown() };
                self.draft.set("train.warmup_steps", given.number()? as i64, comment);
            }
            if let Some(ratio) = ratio {
                self.not_needed(&ratio, "the number of steps wins");
            }
            return Ok(());
        }
        match (ratio, self.program) {
            (Some(given), _) if is_set(&given) => self.draft.set("train.warmup_ratio", given.number()?, ""),
            (Some(_), _) => {}
            (None, Program::Axolotl) if self.parts_are_without_warmup() => {
                self.draft.set(
                    "train.warmup_ratio",
                    0.03,
                    format!("{}, at most 100 steps there", self.default_of()),
                );
            }
            (None, Program::Mitchell) if self.draft.get("train.warmup_steps").is_none() => {
                self.draft.set(
                    "train.warmup_steps",
                    150,
                    format!("{}: step i has (i + 1) / 151 of the rate there", self.default_of()),
                );
            }
            _ => {}
        }
        Ok(())
    }

    fn parts_are_without_warmup(&self) -> bool {
        self.draft.get("train.warmup_steps").is_none()
    }

    /// Checkpoints and evaluations.
    pub(super) fn saves(&mut self) -> Result<()> {
        let (strategy, steps, per_epoch) =
            (self.part(Part::SaveStrategy), self.part(Part::SaveSteps), self.part(Part::SavesPerEpoch));
        let saves_best = strategy.clone().filter(|given| given.value == "best");
        if saves_best.is_none() {
            self.every("train.save_every", strategy, steps, per_epoch, 500.0)?;
        } else {
            for given in [steps, per_epoch].into_iter().flatten() {
                self.not_needed(&given, "`save_strategy` is \"best\", which counts no steps");
            }
        }
        self.keep();
        let (strategy, steps, per_epoch) =
            (self.part(Part::EvalStrategy), self.part(Part::EvalSteps), self.part(Part::EvalsPerEpoch));
        let has_eval = self.draft.get("data.eval").is_some();
        if has_eval {
            let every = self.logging_steps()?;
            self.every("train.eval_every", strategy, steps, per_epoch, every)?;
        } else {
            for given in [strategy, steps, per_epoch].into_iter().flatten() {
                self.not_needed(&given, "there are no held-out rows; give `data.eval`");
            }
        }
        if let Some(given) = self.part(Part::EvalExamples) {
            let batch = self.batch_size();
            let steps = (given.count()? / batch).max(1);
            match has_eval {
                true => self.draft.set(
                    "train.eval_every",
                    steps as i64,
                    format!("{} in batches of {batch}", given.shown()),
                ),
                false => self.not_needed(&given, "there are no held-out rows; give `data.eval`"),
            }
        }
        self.evaluations(has_eval)?;
        if let Some(given) = saves_best {
            match self.draft.get("train.keep_best").is_some() {
                true => self.not_needed(&given, "`train.keep_best` keeps the best step's checkpoint"),
                false => self.missing(
                    &given,
                    "the best step's checkpoint is kept by `train.keep_best`, which needs `train.eval_every`",
                ),
            }
        }
        if let Some(given) = self.part(Part::EvalRows) {
            match has_eval {
                true => self.draft.set("data.eval_rows", given.count()? as i64, given.shown()),
                false => self.not_needed(&given, "there are no held-out rows; give `data.eval`"),
            }
        }
        Ok(())
    }

    /// Steps between evaluations where `eval_steps` is missing there.
    fn logging_steps(&self) -> Result<f64> {
        let default = if self.program == Program::Trl { 10.0 } else { 500.0 };
        self.logging_steps.as_ref().map_or(Ok(default), Given::number)
    }

    /// Checkpoints that the other program would have kept, where there are any and no setting says it.
    fn keep(&mut self) {
        if self.draft.get("train.save_every").is_none() || self.draft.get("train.keep").is_some() {
            return;
        }
        match self.program {
            Program::Trl | Program::LlamaFactory => {
                self.draft.set("train.keep", 0, format!("all, {}", self.default_of()));
            }
            Program::Axolotl => self.draft.set("train.keep", 4, self.default_of()),
            _ => {}
        }
    }

    /// Evaluation before the first step, the best checkpoint, and an early end.
    fn evaluations(&mut self, has_eval: bool) -> Result<()> {
        const NO_ROWS: &str = "there are no held-out rows; give `data.eval`";
        if let Some(given) = self.part(Part::EvalFirst) {
            match has_eval {
                true => self.draft.set("train.eval_first", given.flag()?, given.shown()),
                false => self.not_needed(&given, NO_ROWS),
            }
        }
        let (keeps, metric) = (self.part(Part::KeepsBest), self.part(Part::BestMetric));
        let (patience, threshold) = (self.part(Part::Patience), self.part(Part::PatienceThreshold));
        let is_on = match &keeps {
            Some(given) => given.flag()?,
            None => metric.is_some() || patience.is_some(),
        };
        let all = [keeps.clone(), metric.clone(), patience.clone(), threshold.clone()];
        let all = all.into_iter().flatten();
        if !is_on {
            let reason = "no checkpoint is kept for its metric unless asked for";
            all.for_each(|given| self.not_needed(&given, reason));
            return Ok(());
        }
        if !has_eval {
            all.for_each(|given| self.not_needed(&given, NO_ROWS));
            return Ok(());
        }
        if self.draft.get("train.eval_every").is_none() {
            let reason = "only the last step is evaluated; give `train.eval_every` and `train.keep_best`";
            all.for_each(|given| self.missing(&given, reason));
            return Ok(());
        }
        let named = metric.as_ref().map_or(Ok("loss"), Given::text)?;
        let named = named.trim_start_matches("eval_").trim_start_matches("eval/");
        let key = format!("eval/{named}");
        if !BestMetric::is_of(&key, self.method) {
            let reason = format!("method = \"{}\" has no metric `{key}`; see `train.keep_best`", self.method);
            all.for_each(|given| self.missing(&given, reason.clone()));
            return Ok(());
        }
        let shown: Vec<_> = keeps.iter().chain(&metric).map(Given::shown).collect();
        self.draft.set("train.keep_best", key, shown.join(", "));
        if self.draft.get("train.eval_first").is_none() {
            self.draft.set(
                "train.eval_first",
                false,
                "eval_on_start is off there: the untrained model is no candidate",
            );
        }
        if let Some(given) = patience {
            self.draft.set("train.early_stopping_patience", given.count()? as i64, given.shown());
            if let Some(given) = threshold {
                self.draft.set("train.early_stopping_threshold", given.number()?, given.shown());
            }
        } else if let Some(given) = threshold {
            self.not_needed(&given, "it belongs to `train.early_stopping_patience`, which is not given");
        }
        Ok(())
    }

    fn every(
        &mut self,
        key: &str,
        strategy: Option<Given>,
        steps: Option<Given>,
        per_epoch: Option<Given>,
        default: f64,
    ) -> Result<()> {
        let word = strategy.as_ref().and_then(|given| given.value.as_str()).unwrap_or("steps").to_owned();
        match (strategy, steps, per_epoch) {
            (Some(strategy), steps, per_epoch) if is_off(&strategy.value) => {
                for given in [Some(strategy), steps, per_epoch].into_iter().flatten() {
                    self.not_needed(&given, format!("`{key}` is 0 unless given: at the end only"));
                }
            }
            (Some(strategy), steps, per_epoch) if word == "epoch" => {
                self.times_per_epoch(key, &strategy, 1)?;
                for given in [steps, per_epoch].into_iter().flatten() {
                    self.not_needed(&given, format!("`{key}` is once an epoch: {}", strategy.shown()));
                }
            }
            (None, None, Some(times)) if !is_off(&times.value) => {
                let count = times.count()?;
                self.times_per_epoch(key, &times, count)?;
            }
            (strategy, Some(steps), per_epoch) => {
                let number = steps.number()?;
                if number >= 1.0 || number == 0.0 {
                    self.draft.set(key, number as i64, steps.shown());
                } else {
                    self.missing(&steps, format!("`{key}` is a number of steps, not a share of them"));
                }
                for given in [strategy, per_epoch].into_iter().flatten() {
                    self.not_needed(&given, format!("`{key}` counts steps"));
                }
            }
            // transformers evaluates with the logs then, and saves each 500 steps.
            (Some(strategy), None, per_epoch) => {
                if default >= 1.0 {
                    let comment = format!("{}, without a number of steps", strategy.shown());
                    self.draft.set(key, default as i64, comment);
                } else {
                    self.missing(&strategy, format!("`{key}` is a number of steps, not a share of them"));
                }
                if let Some(given) = per_epoch {
                    self.not_needed(&given, format!("`{key}` counts steps"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn times_per_epoch(&mut self, key: &str, given: &Given, times: u64) -> Result<()> {
        match self.steps_per_epoch() {
            Some(steps) => {
                let due = PerEpoch { key: key.to_owned(), times, setting: given.shown() };
                due.set(&mut self.draft, steps);
                self.per_epoch.push(due);
            }
            None => self.missing(
                given,
                format!("`{key}` counts steps, and the rows of an epoch are not known yet; set it"),
            ),
        }
        Ok(())
    }
}
