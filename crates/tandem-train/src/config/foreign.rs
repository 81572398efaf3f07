//! Keys of TRL, Axolotl and LLaMA-Factory: each has our key, or a reason why it has none.

use super::Config;
use super::error::{ConfigError, Problem, Result};
use super::keys::Keys;
use super::page::list;
use super::tree::{Node, Value};

/// Refuses a key of another program, and one of ours that stands outside its table.
///
/// It runs before anything is read: a missing `train.learning_rate` is then told by the
/// `learning_rate` at the top that was meant.
pub(super) fn check(tree: &Node) -> Result<()> {
    let own: Vec<(String, Vec<&str>)> = list(|keys: &mut Keys| Config::visit(None, keys).map(drop))
        .into_iter()
        .map(|table| (table.name, table.keys.iter().map(|row| row.name).collect()))
        .collect();
    let Value::Table(entries) = &tree.value else { return Ok(()) };
    walk(entries, "", &own)
}

fn walk(entries: &[(String, Node)], prefix: &str, own: &[(String, Vec<&str>)]) -> Result<()> {
    let full = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    let table = own.iter().find(|(name, _)| name == prefix);
    for (key, node) in entries {
        let is_known = table.is_some_and(|(_, keys)| keys.contains(&key.as_str()));
        let is_table = own.iter().any(|(name, _)| name.split('.').next() == Some(key) && prefix.is_empty());
        if let (Value::Table(inner), true) = (&node.value, is_table || !prefix.is_empty()) {
            walk(inner, &full(key), own)?;
            continue;
        }
        if is_known || is_table || table.is_none() {
            continue;
        }
        let advice = advice(key).map(str::to_owned).or_else(|| elsewhere(key, own));
        if let Some(advice) = advice {
            let problem = Problem::ForeignKey { key: full(key), advice };
            return Err(ConfigError { place: node.place.clone(), problem });
        }
    }
    Ok(())
}

/// Says where a key of ours belongs.
fn elsewhere(key: &str, own: &[(String, Vec<&str>)]) -> Option<String> {
    // Words that every table might have.
    if matches!(key, "model" | "kind" | "start" | "alpha" | "adapter" | "train" | "eval") {
        return None;
    }
    let places: Vec<_> = own
        .iter()
        .filter(|(_, keys)| keys.contains(&key))
        .map(
            |(table, _)| {
                if table.is_empty() { format!("`{key}` at the top") } else { format!("`{table}.{key}`") }
            },
        )
        .collect();
    (!places.is_empty()).then(|| format!("it is {}", places.join(" or ")))
}

/// Returns what to write instead of another program's key.
fn advice(key: &str) -> Option<&'static str> {
    NAMES.iter().find(|(names, _)| names.contains(&key)).map(|(_, advice)| *advice)
}

/// Names, and what to write instead.
const NAMES: &[(&[&str], &str)] = &[
    // Model, data and output.
    (
        &["model_name_or_path", "base_model", "model_name", "model_id", "pretrained_model_name_or_path"],
        "it is `model` here: a folder, a GGUF file or a name of the hub",
    ),
    (&["ref_model", "ref_model_name_or_path", "reference_model"], "it is `reference.model` here"),
    (&["output_dir", "save_dir"], "it is `output` here"),
    (
        &["dataset", "datasets", "dataset_name", "dataset_path", "train_dataset", "train_file", "data_files"],
        "it is `data.train` here: a file, a pattern, a split of the hub, or a list of them",
    ),
    (
        &["test_datasets", "eval_dataset", "validation_file", "val_size", "val_set_size"],
        "it is `data.eval` here, a file of held-out rows",
    ),
    (
        &["dataset_dir", "dataset_prepared_path", "cache_dir"],
        "give files in `data.train`; the cache of tokens is `data.cache`",
    ),
    (
        &["dataset_num_proc", "preprocessing_num_workers", "dataset_processes"],
        "it is not needed: rows are tokenised on all cores, once, and kept in `data.cache`",
    ),
    (
        &["dataset_text_field", "dataset_kwargs", "dataset_info", "remove_unused_columns", "label_names"],
        "the rows' own keys say what they are; `data.columns` maps other columns to them (docs/data.md)",
    ),
    (
        &["chat_template_path", "template", "chat_template_jinja"],
        "it is `data.chat_template` here, a path or a text; without it the model's own template is used",
    ),
    (
        &["sequence_len", "cutoff_len", "max_seq_length", "max_seq_len", "model_max_length"],
        "it is `data.max_length` here",
    ),
    (
        &["max_prompt_length", "max_prompt_len"],
        "it is `data.max_prompt_length` here; rows with a longer prompt are dropped, not cut",
    ),
    (
        &["max_completion_length"],
        "there is one limit, `data.max_length`, for prompt and completion together; online runs have `online.max_new_tokens`",
    ),
    (&["truncation_mode"], "it is `data.truncation` here: \"keep_start\" or \"keep_end\""),
    (
        &[
            "assistant_only_loss",
            "completion_only_loss",
            "train_on_inputs",
            "train_on_prompt",
            "roles_to_train",
        ],
        "it is `data.loss_on` here: \"answer\", the default, or \"all\"",
    ),
    (
        &["mask_history", "train_on_eos"],
        "it has no counterpart: every turn of the assistant is scored, with its end marker",
    ),
    (
        &[
            "shuffle_dataset",
            "shuffle_merged_datasets",
            "dataloader_shuffle",
            "disable_shuffling",
            "train_sampling_strategy",
        ],
        "it is `data.order` here: \"shuffled\" or \"sequential\"",
    ),
    (
        &["dataset_config", "dataset_train_split", "dataset_test_split"],
        "give a split of the hub in `data.train` and `data.eval`, as \"hf://owner/name/config/split\"",
    ),
    (&["ref_adapters"], "it is `reference.adapter` here"),
    (&["data_seed"], "it is `seed` at the top, which the order of the rows follows"),
    (
        &[
            "packing",
            "eval_packing",
            "packing_strategy",
            "neat_packing",
            "sample_packing",
            "eval_sample_packing",
            "pad_to_sequence_len",
            "padding_free",
            "pad_to_multiple_of",
            "group_by_length",
            "length_column_name",
        ],
        "it is not needed: rows of a micro-batch are packed without padding, and never see each other",
    ),
    (
        &["pad_token", "eos_token", "special_tokens", "resize_vocab"],
        "it has no counterpart: set the token in the model's folder (tokenizer_config.json)",
    ),
    (
        &[
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
            "dataloader_in_order",
            "dataloader_multiprocessing_context",
        ],
        "it is not needed: tokens are mapped from a file, and no process loads them",
    ),
    (
        &["dataloader_drop_last"],
        "it has no counterpart: the rows left over at an epoch's end join the next epoch's first batch",
    ),
    (&["max_samples"], "it is `data.train_rows` here, and `data.eval_rows` for held-out rows"),
    (
        &["streaming", "dataset_streaming", "overwrite_cache"],
        "it is not needed: files are read row by row, and a changed file is tokenised again",
    ),
    // Batches and steps.
    (
        &["per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size_per_device"],
        "give `train.batch_size`, the rows of a step over all ranks; micro-batches follow from `train.micro_batch_tokens`",
    ),
    (
        &["gradient_accumulation_steps"],
        "give `train.batch_size`, the rows of a step over all ranks: they are accumulated over as many micro-batches as `train.micro_batch_tokens` makes",
    ),
    (
        &["micro_batch_size"],
        "it is `train.micro_batch_size` here; better leave it out and give `train.batch_size`",
    ),
    (
        &[
            "per_device_eval_batch_size",
            "eval_batch_size",
            "eval_accumulation_steps",
            "precompute_ref_batch_size",
        ],
        "it is not needed: evaluation has the micro-batches of `train.micro_batch_tokens`",
    ),
    (
        &["auto_find_batch_size"],
        "it is not needed: a run whose plan exceeds the memory is refused with what would fit (`tandem plan`)",
    ),
    (
        &["average_tokens_across_devices"],
        "it is not needed: a loss is divided by the tokens of the whole batch, on any number of ranks",
    ),
    (&["num_train_epochs", "num_epochs"], "it is `train.epochs` here"),
    (&["max_steps"], "it is `train.steps` here"),
    // Optimiser.
    (&["lr"], "it is `train.learning_rate` here"),
    (&["lr_scheduler_type", "lr_scheduler", "scheduler"], "it is `train.schedule` here"),
    (
        &["lr_scheduler_kwargs", "cosine_min_lr_ratio"],
        "it has no counterpart: the schedules of `train.schedule` end at 0",
    ),
    (
        &["optim"],
        "it is `train.optimizer` here: \"adamw\" or \"rmsprop\"; for 8-bit states set `train.optimizer_state` to \"8bit\"",
    ),
    (&["optim_args", "optim_target_modules"], "give `train.betas`, `train.eps` and `train.weight_decay`"),
    (&["adam_beta1", "adam_beta2"], "it is one of the two numbers of `train.betas` here"),
    (&["adam_epsilon"], "it is `train.eps` here"),
    (&["gradient_clipping"], "it is `train.max_grad_norm` here"),
    (&["neftune_noise_alpha"], "it is not supported: no noise is added to embeddings"),
    (&["label_smoothing_factor"], "it is `objective.label_smoothing` here, for preference losses"),
    // Saving, evaluation, logs.
    (&["save_steps"], "it is `train.save_every` here"),
    (&["saves_per_epoch", "save_strategy"], "give `train.save_every`, in steps; 0 saves at the end only"),
    (&["save_total_limit"], "it is `train.keep` here"),
    (&["eval_steps"], "it is `train.eval_every` here"),
    (
        &["evals_per_epoch", "eval_strategy", "evaluation_strategy"],
        "give `train.eval_every`, in steps; 0 evaluates at the end only",
    ),
    (
        &["do_train", "do_eval", "do_predict", "stage"],
        "it is not needed: `method` says how to train, and `data.eval` is evaluated if it is given",
    ),
    (&["eval_on_start", "eval_delay"], "it has no counterpart: evaluations follow `train.eval_every`"),
    (
        &["load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience"],
        "it has no counterpart: `train.keep = 0` keeps every checkpoint, and metrics.jsonl has their losses",
    ),
    (
        &["save_only_model", "save_safetensors", "enable_jit_checkpoint", "save_on_each_node"],
        "it is not needed: a checkpoint is whole, and the final model is in safetensors",
    ),
    (
        &[
            "resume_from_checkpoint",
            "auto_resume_from_checkpoints",
            "ignore_data_skip",
            "overwrite_output_dir",
        ],
        "give `--resume` or `--overwrite` on the command line",
    ),
    (
        &[
            "report_to",
            "run_name",
            "use_wandb",
            "wandb_project",
            "wandb_run_name",
            "wandb_entity",
            "wandb_watch",
            "wandb_name",
            "wandb_log_model",
            "project",
            "use_mlflow",
            "mlflow_experiment_name",
            "use_tensorboard",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "swanlab_project",
        ],
        "no service is reported to: metrics.jsonl in the run's folder has every step, for any of them to read",
    ),
    (
        &[
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "logging_dir",
            "logging_nan_inf_filter",
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "disable_tqdm",
            "plot_loss",
            "include_num_input_tokens_seen",
            "skip_memory_metrics",
        ],
        "it is not needed: every step is in metrics.jsonl of the run's folder",
    ),
    (
        &[
            "push_to_hub",
            "hub_model_id",
            "hub_token",
            "hub_strategy",
            "hub_private_repo",
            "hub_always_push",
            "hub_revision",
        ],
        "no model is uploaded: the run's folder has it, for `hf upload`",
    ),
    // Adapters and quantised weights.
    (&["lora_r", "lora_rank"], "it is `adapter.rank` here"),
    (&["lora_alpha"], "it is `adapter.alpha` here"),
    (&["lora_dropout"], "it is `adapter.dropout` here"),
    (
        &["lora_target_modules", "lora_target", "lora_target_linear", "target_modules"],
        "it is `adapter.targets` here",
    ),
    (&["lora_modules_to_save", "additional_target"], "it is `adapter.modules_to_save` here"),
    (&["use_rslora", "peft_use_rslora"], "it is `adapter.rslora` here"),
    (&["use_dora", "peft_use_dora"], "write `adapter.kind = \"dora\"`"),
    (
        &["use_peft", "finetuning_type"],
        "a table `[adapter]`, even an empty one, trains an adapter; without it every weight trains",
    ),
    (&["lora_model_dir", "adapter_name_or_path", "peft_model_id"], "it is `adapter.start` here"),
    (
        &[
            "lora_target_parameters",
            "lora_task_type",
            "peft_layers_to_transform",
            "lora_fan_in_fan_out",
            "loraplus_lr_ratio",
        ],
        "it is not supported by adapters here (docs/adapters.md)",
    ),
    (
        &["load_in_4bit", "quantization_bit", "bnb_4bit_quant_type"],
        "write `compute.format = \"nf4\"`, with a table `[adapter]`",
    ),
    (&["load_in_8bit"], "write `compute.format = \"int8\"`, with a table `[adapter]`"),
    (
        &[
            "bnb_4bit_quant_storage",
            "use_bnb_nested_quant",
            "double_quantization",
            "bnb_4bit_compute_dtype",
            "quantization_method",
        ],
        "it is not needed: `compute.format` says all about frozen weights",
    ),
    // Precision, memory and devices.
    (
        &["bf16", "torch_dtype", "pure_bf16", "bf16_full_eval"],
        "it is `compute.dtype` here: \"bf16\" or \"f32\"",
    ),
    (
        &["fp16", "fp16_full_eval", "fp16_opt_level", "half_precision_backend"],
        "f16 is not supported: write `compute.dtype = \"bf16\"`",
    ),
    (
        &["gradient_checkpointing", "activation_checkpointing"],
        "it is `compute.checkpointing` here: \"none\", \"selective\" or \"block\"",
    ),
    (
        &[
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "use_cache",
            "torch_empty_cache_steps",
        ],
        "it is not needed: `compute.checkpointing` says all",
    ),
    (&["activation_offloading"], "it is `compute.offload_activations` here"),
    (
        &["deepspeed", "ds3_gather_for_generation"],
        "it is not needed: `compute.sharding` (\"zero1\" to \"zero3\") and `compute.offload` do it",
    ),
    (&["fsdp", "fsdp_config", "fsdp_version"], "it is not needed: `compute.sharding = \"zero3\"` does it"),
    (&["tensor_parallel_size"], "it is `compute.tensor` here"),
    (&["pipeline_parallel_size"], "it is `compute.pipeline` here"),
    (
        &[
            "parallelism_config",
            "accelerator_config",
            "context_parallel_size",
            "sequence_parallel_degree",
            "dp_shard_size",
            "dp_replicate_size",
        ],
        "give `compute.sharding`, `compute.tensor` and `compute.pipeline`",
    ),
    (&["use_cpu", "no_cuda", "device_map"], "it is `compute.devices` here"),
    (&["ddp_timeout"], "it is `compute.deadline` here"),
    (&["ddp_backend"], "it is `compute.engine` here"),
    (
        &[
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "local_rank",
        ],
        "it is not needed: ranks and their messages follow from `[compute]`",
    ),
    (&["full_determinism"], "it is not needed: a run has the same bits each time, on any number of ranks"),
    (
        &[
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "use_liger_kernel",
            "liger_kernel_config",
            "use_liger_loss",
            "enable_liger_kernel",
            "use_unsloth",
            "attn_implementation",
            "flash_attention",
            "flash_attn",
            "sdp_attention",
            "xformers_attention",
        ],
        "it is not needed: there is one implementation of each kernel",
    ),
    (
        &["trust_remote_code", "model_type", "tokenizer_type", "model_init_kwargs", "model_revision"],
        "it is not needed: config.json says the kind of the model, and no code of its folder is run",
    ),
    (&["router_aux_loss_coef"], "it is not supported: mixtures of experts do not train"),
    (&["disable_dropout"], "it is not needed: dropout is `adapter.dropout` alone"),
    (&["rope_scaling"], "it has no counterpart: set it in the model's config.json"),
    // Objectives.
    (&["loss_type", "pref_loss", "dpo_loss_type"], "it is `objective.loss` here"),
    (&["loss_weights"], "write a table: `objective.loss = { sigmoid = 1, sft = 0.5 }`"),
    (&["pref_beta", "dpo_beta"], "it is `objective.beta` here"),
    (&["dpo_label_smoothing", "cpo_label_smoothing"], "it is `objective.label_smoothing` here"),
    (&["rl"], "it is `method` here: \"dpo\" or \"online\""),
    (&["precompute_ref_log_probs"], "it is `reference.kind` here; \"precompute\" is the default"),
    (&["sync_ref_model"], "write `reference.kind = \"sync\"`"),
    (&["ref_model_mixup_alpha"], "it is `reference.sync_alpha` here"),
    (&["ref_model_sync_steps"], "it is `reference.sync_steps` here"),
    (
        &["ld_alpha", "use_weighting", "pref_ftx", "rpo_alpha"],
        "it is not supported; the losses are those of docs/config.md, `objective.loss`",
    ),
    // Generation in online runs.
    (&["max_new_tokens", "max_completion_tokens"], "it is `online.max_new_tokens` here"),
    (&["num_generations"], "it is `online.answers` here"),
    (&["missing_eos_penalty"], "write a judge of `kind = \"missing_eos\"`"),
    (
        &["reward_model_path", "reward_model", "reward_weights", "reward_funcs"],
        "write a table `[[judges]]` for each, with its `kind` and `weight`",
    ),
    (
        &[
            "use_vllm",
            "vllm_mode",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
        ],
        "completions are generated by the trainer itself; a server is a table `[online.server]`",
    ),
    (
        &[
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_enable_sleep_mode",
            "vllm_model_impl",
            "vllm_structured_outputs_regex",
            "cache_implementation",
            "generation_kwargs",
        ],
        "it is not needed: completions are generated by the trainer itself; a server of your own has its own options",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_given_twice() {
        let mut names: Vec<_> = NAMES.iter().flat_map(|(names, _)| *names).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// Every key that an advice names exists.
    #[test]
    fn advice_names_keys_of_ours() {
        let tables = list(|keys: &mut Keys| Config::visit(None, keys).map(drop));
        let full =
            |table: &str, key: &str| if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") };
        let known: Vec<String> =
            tables.iter().flat_map(|t| t.keys.iter().map(move |row| full(&t.name, row.name))).collect();
        for (_, advice) in NAMES {
            for quoted in advice.split('`').skip(1).step_by(2) {
                let key = quoted.split([' ', '=']).next().unwrap();
                let is_key = key.contains('.') && !key.starts_with(['[', '-', '<']);
                if is_key {
                    assert!(known.iter().any(|k| k == key), "{key}: {advice}");
                }
            }
        }
    }
}
