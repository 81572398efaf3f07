//! Every known setting has a meaning, and no advice leads astray.

mod batches;
mod command_lines;
mod sets;
mod translations;

use super::*;

/// Facts of rows in files that have these columns; without the list there are no files.
struct Rows(Option<&'static [&'static str]>);

impl Facts for Rows {
    fn path(&self, given: &str) -> String {
        given.to_owned()
    }
    fn local(&self, given: &str) -> String {
        given.to_owned()
    }
    fn exists(&self, given: &str) -> bool {
        self.0.is_some() && given.ends_with(".jsonl")
    }
    fn model_type(&self, _: &str) -> Option<String> {
        None
    }
    fn columns(&self, _: &str) -> Option<Vec<String>> {
        let columns = self.0.filter(|columns| !columns.is_empty())?;
        Some(columns.iter().map(|&name| name.to_owned()).collect())
    }
    fn num_rows(&self, _: &[String]) -> Option<u64> {
        Some(100)
    }
}

/// Fields of TRL 1.16's configs, `ModelConfig` and `ScriptArguments`, transformers 5.24's
/// `TrainingArguments`, PEFT 0.21's `LoraConfig` and bitsandbytes' settings, one per line after
/// a line `# Class`.
const FIELDS: &str = include_str!("../fields.txt");

fn full_keys() -> Vec<String> {
    let full =
        |table: &str, key: &str| if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") };
    own_keys().iter().flat_map(|(table, keys)| keys.iter().map(move |key| full(table, key))).collect()
}

#[test]
fn every_field_of_trl_has_a_meaning() {
    let fields: Vec<_> = FIELDS.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    assert!(fields.len() > 250, "{}", fields.len());
    let unknown: Vec<_> = fields.iter().filter(|field| Program::Trl.find(field).is_none()).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn no_name_is_given_twice_in_a_table() {
    for (program, table) in Program::NAMES {
        let mut names: Vec<_> = table.own().iter().flat_map(|name| name.names).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{program}");
    }
}

/// Every key that an advice names exists, and a renamed setting names its key.
#[test]
fn advice_names_keys_of_ours() {
    let known = full_keys();
    for name in Program::NAMES.iter().flat_map(|(_, program)| program.own()) {
        if let Meaning::Key { key, .. } = name.meaning {
            assert!(known.iter().any(|k| k == key), "{key}");
        }
        let advice = name.advice();
        for quoted in advice.split('`').skip(1).step_by(2) {
            let key = quoted.split([' ', '=']).next().unwrap();
            if key.contains('.') && !key.starts_with(['[', '-', '<']) {
                assert!(known.iter().any(|k| k == key), "{key}: {advice}");
            }
        }
    }
}

/// Names that were tried with `--set`, and a part of the right answer.
const TRIED: &[(&str, &str)] = &[
    ("model_name_or_path", "`model`"),
    ("base_model", "`model`"),
    ("output_dir", "`output`"),
    ("dataset_name", "`data.train`"),
    ("datasets", "`data.train`"),
    ("dataset_num_proc", "not needed"),
    ("chat_template_path", "`data.chat_template`"),
    ("max_seq_length", "`data.max_length`"),
    ("sequence_len", "`data.max_length`"),
    ("cutoff_len", "`data.max_length`"),
    ("max_completion_length", "`data.max_length`"),
    ("truncation_mode", "`data.truncation`"),
    ("assistant_only_loss", "`data.loss_on`"),
    ("completion_only_loss", "`data.loss_on`"),
    ("train_on_inputs", "`data.loss_on`"),
    ("packing", "not needed"),
    ("sample_packing", "not needed"),
    ("padding_free", "not needed"),
    ("pad_to_sequence_len", "not needed"),
    ("val_set_size", "`data.eval`"),
    ("per_device_train_batch_size", "`train.micro_batch_size`"),
    ("per_device_train_batch_size", "`train.batch_size`"),
    ("per_device_eval_batch_size", "not needed"),
    ("gradient_accumulation_steps", "not needed: `train.batch_size`"),
    ("auto_find_batch_size", "not needed"),
    ("num_train_epochs", "`train.epochs`"),
    ("num_epochs", "`train.epochs`"),
    ("max_steps", "`train.steps`"),
    ("lr", "`train.learning_rate`"),
    ("lr_scheduler_type", "`train.schedule`"),
    ("lr_scheduler", "`train.schedule`"),
    ("lr_scheduler_kwargs", "`train.min_lr_rate`"),
    ("optim", "`train.optimizer`"),
    ("optim_args", "`train.betas`"),
    ("adam_beta1", "`train.betas`"),
    ("adam_epsilon", "`train.eps`"),
    ("gradient_clipping", "`train.max_grad_norm`"),
    ("logging_steps", "metrics.jsonl"),
    ("report_to", "`logging.tensorboard`"),
    ("wandb_project", "`logging.command`"),
    ("run_name", "`logging.run`"),
    ("save_steps", "`train.save_every`"),
    ("saves_per_epoch", "`train.save_every`"),
    ("save_total_limit", "`train.keep`"),
    ("eval_steps", "`train.eval_every`"),
    ("eval_strategy", "`train.eval_every`"),
    ("load_best_model_at_end", "`train.keep_best`"),
    ("eval_on_start", "`train.eval_first`"),
    ("resume_from_checkpoint", "`--resume`"),
    ("push_to_hub", "not needed"),
    ("use_peft", "`[adapter]`"),
    ("lora_r", "`adapter.rank`"),
    ("lora_rank", "`adapter.rank`"),
    ("r", "`adapter.rank`"),
    ("lora_alpha", "`adapter.alpha`"),
    ("lora_dropout", "`adapter.dropout`"),
    ("lora_target_modules", "`adapter.targets`"),
    ("target_modules", "`adapter.targets`"),
    ("lora_target_linear", "`adapter.targets`"),
    ("use_dora", "`adapter.kind = \"dora\"`"),
    ("use_rslora", "`adapter.rslora`"),
    ("load_in_4bit", "`compute.format = \"nf4\"`"),
    ("load_in_8bit", "`compute.format = \"int8\"`"),
    ("bnb_4bit_quant_type", "nf4"),
    ("bnb_4bit_compute_dtype", "not needed"),
    ("bf16", "`compute.dtype`"),
    ("fp16", "`compute.dtype = \"bf16\"`"),
    ("gradient_checkpointing", "`compute.checkpointing`"),
    ("gradient_checkpointing_kwargs", "`compute.checkpointing`"),
    ("deepspeed", "`compute.sharding`"),
    ("fsdp", "`compute.sharding"),
    ("use_liger_kernel", "not needed"),
    ("attn_implementation", "not needed"),
    ("flash_attention", "not needed"),
    ("dataloader_num_workers", "not needed"),
    ("remove_unused_columns", "not needed"),
    ("loss_type", "`objective.loss`"),
    ("pref_beta", "`objective.beta`"),
    ("rl", "`method`"),
    ("ref_model", "`reference.model`"),
    ("precompute_ref_log_probs", "`reference.kind`"),
    ("sync_ref_model", "`reference.kind = \"sync\"`"),
    ("zero_optimization.stage", "`compute.sharding`"),
    ("deepspeed_config.zero_stage", "`compute.sharding`"),
    ("loss.beta", "`objective.beta`"),
];

/// A name stands at the top or in the table of its translation: both times the answer is its own.
#[test]
fn tried_names_get_their_translation_and_no_other_hint() {
    for (name, answer) in TRIED {
        for table in ["", "train.", "compute.", "adapter."] {
            let mut tree = Node::parse("", std::path::Path::new("run.toml")).expect("empty");
            tree.set(&format!("{table}{name}=x")).expect("set");
            let error = check(&tree).map_err(|error| error.to_string());
            if table.is_empty() || !name.contains('.') {
                let text = error.expect_err(name);
                assert!(text.contains(answer), "{text}");
                assert!(!text.contains("did you mean"), "{text}");
            }
        }
    }
}
