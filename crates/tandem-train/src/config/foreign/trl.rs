//! Settings of TRL: its configs, the `TrainingArguments` of transformers, `ModelConfig`, PEFT's
//! `LoraConfig` and `BitsAndBytesConfig`.

use serde_json::{Map, Value, json};

use super::name::{Converted, Name, Part, key, key_but, missing, not_needed, part};
use super::values::{as_count, as_flag, as_number, as_table, count, flag, is_off, name, number, text, texts};

pub(super) const NAMES: &[Name] = &[
    // Model, data and output.
    key_but(
        &["model_name_or_path", "model", "model_name", "model_id", "pretrained_model_name_or_path"],
        "model",
        text,
        "a folder, a GGUF file or a name of the hub",
    ),
    key(&["ref_model_name_or_path", "reference_model"], "reference.model", text),
    key(&["output_dir", "save_dir"], "output", text),
    part(
        &["dataset_name", "train_dataset", "dataset_path", "train_file", "data_files"],
        Part::Dataset,
        "it is `data.train` here: a file, a pattern, a split of the hub as \"hf://owner/name/train\", or a list of them",
    ),
    part(
        &["dataset_config"],
        Part::DatasetConfig,
        "give a split of the hub in `data.train` and `data.eval`, as \"hf://owner/name/config/split\"",
    ),
    part(
        &["dataset_train_split"],
        Part::TrainSplit,
        "give a split of the hub in `data.train`, as \"hf://owner/name/split\"",
    ),
    part(
        &["dataset_test_split"],
        Part::TestSplit,
        "give a split of the hub in `data.eval`, as \"hf://owner/name/split\"",
    ),
    part(
        &["datasets", "dataset_mixture.datasets"],
        Part::Datasets,
        "it is `data.train` here: a list of files or splits, or of tables with `path` and `weight`",
    ),
    part(
        &["eval_dataset", "validation_file"],
        Part::EvalDataset,
        "it is `data.eval` here, a file of held-out rows",
    ),
    part(
        &["test_split_size", "dataset_mixture.test_split_size"],
        Part::EvalShare,
        "it cannot be had: rows are not split here; give held-out rows in `data.eval`",
    ),
    not_needed(
        &["dataset_streaming", "streaming", "overwrite_cache", "dataset_mixture.seed"],
        "files are read row by row, and a changed file is tokenised again",
    ),
    not_needed(
        &["dataset_num_proc", "preprocessing_num_workers", "dataset_processes"],
        "rows are tokenised on all cores, once, and kept in `data.cache`",
    ),
    not_needed(
        &["dataset_kwargs", "remove_unused_columns", "label_names"],
        "the rows' own keys say what they are; `data.columns` maps other columns to them (docs/data.md)",
    ),
    part(
        &["dataset_text_field", "dataset_text_column"],
        Part::TextColumn,
        "it is `data.columns` here: `{ text = \"story\" }` takes the column `story` for `text`",
    ),
    not_needed(&["ignore_bias_buffers", "debug", "prediction_loss_only"], "it mends troubles of torch alone"),
    key_but(
        &["chat_template_path", "chat_template_jinja", "chat_template"],
        "data.chat_template",
        text,
        "a path or a text; without it the model's own template is used",
    ),
    key(&["max_length", "max_seq_length", "max_seq_len", "model_max_length"], "data.max_length", length),
    key_but(
        &["max_prompt_length", "max_prompt_len"],
        "data.max_prompt_length",
        count,
        "rows with a longer prompt are dropped, not cut",
    ),
    key_but(
        &["max_completion_length", "max_target_length"],
        "online.max_new_tokens",
        count,
        "for runs that generate; others have one limit, `data.max_length`, for prompt and completion together",
    ),
    key_but(
        &["truncation_mode"],
        "data.truncation",
        |value| match value.as_str() {
            Some("keep_start") => Converted::Value("keep_start".into()),
            Some("keep_end") => Converted::Value("keep_end".into()),
            _ => Converted::Wrong("\"keep_start\" or \"keep_end\""),
        },
        "\"keep_start\" or \"keep_end\"",
    ),
    part(
        &["completion_only_loss"],
        Part::CompletionOnly,
        "it is `data.loss_on` here: \"answer\", the default, or \"all\"",
    ),
    part(
        &["assistant_only_loss"],
        Part::AssistantOnly,
        "it is `data.loss_on` here: \"answer\", the default, or \"all\"",
    ),
    part(
        &["shuffle_dataset", "dataloader_shuffle"],
        Part::Shuffle,
        "it is `data.order` here: \"shuffled\" or \"sequential\"",
    ),
    key_but(
        &["train_sampling_strategy"],
        "data.order",
        |value| match value.as_str() {
            Some("random") => Converted::Same("`data.order` is \"shuffled\" already"),
            Some("sequential") => Converted::Value("sequential".into()),
            Some("group_by_length") => Converted::Changed(
                "shuffled".into(),
                "rows are not grouped by length: micro-batches have no padding to spare",
            ),
            _ => Converted::Wrong("\"random\", \"sequential\" or \"group_by_length\""),
        },
        "\"shuffled\" or \"sequential\"",
    ),
    part(
        &["packing"],
        Part::Packing,
        "it is not needed: rows of a micro-batch are packed without padding, and never see each other",
    ),
    not_needed(
        &[
            "eval_packing",
            "packing_strategy",
            "padding_free",
            "pad_to_multiple_of",
            "group_by_length",
            "length_column_name",
        ],
        "rows of a micro-batch are packed without padding, and never see each other",
    ),
    missing(
        &["pad_token", "eos_token", "special_tokens", "resize_vocab"],
        "set the token in the model's folder (tokenizer_config.json)",
    ),
    not_needed(
        &[
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
            "dataloader_in_order",
            "dataloader_multiprocessing_context",
        ],
        "tokens are mapped from a file, and no process loads them",
    ),
    missing(
        &["dataloader_drop_last"],
        "the rows left over at an epoch's end are a short batch of their own, as without it",
    ),
    key(&["seed"], "seed", count),
    key_but(
        &["data_seed"],
        "seed",
        |_| Converted::Missing("the order of the rows follows `seed` at the top"),
        "the order of the rows follows it too",
    ),
    // Batches and steps.
    part(
        &["per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size_per_device"],
        Part::DeviceBatch,
        "it is `train.micro_batch_size` here, which may be left out; `train.batch_size` has the rows of a step over \
         all ranks",
    ),
    part(
        &["gradient_accumulation_steps"],
        Part::Accumulation,
        "it is not needed: `train.batch_size` has the rows of a step over all ranks, and they are accumulated over \
         as many micro-batches as `train.micro_batch_tokens` makes",
    ),
    not_needed(
        &[
            "per_device_eval_batch_size",
            "per_gpu_eval_batch_size",
            "eval_accumulation_steps",
            "precompute_ref_batch_size",
        ],
        "evaluation has the micro-batches of `train.micro_batch_tokens`",
    ),
    not_needed(
        &["auto_find_batch_size"],
        "a run whose plan exceeds the memory is refused with what would fit (`tandem plan`)",
    ),
    not_needed(
        &["average_tokens_across_devices"],
        "a loss is divided by the tokens of the whole batch, on any number of ranks",
    ),
    part(&["num_train_epochs", "num_epochs"], Part::Epochs, "it is `train.epochs` here"),
    part(&["max_steps"], Part::MaxSteps, "it is `train.steps` here"),
    // Optimiser.
    part(&["learning_rate", "lr"], Part::LearningRate, "it is `train.learning_rate` here"),
    part(
        &["lr_scheduler_type", "lr_scheduler", "scheduler"],
        Part::Schedule,
        "it is `train.schedule` here, by the same names; the warm-up is `train.warmup_steps`",
    ),
    part(
        &["lr_scheduler_kwargs"],
        Part::ScheduleOptions,
        "they are keys here: `train.min_lr_rate`, `train.num_cycles`, `train.lr_end`, `train.power`, \
         `train.timescale`, `train.decay_steps` and `train.decay_type`",
    ),
    part(
        &["warmup_steps"],
        Part::WarmupSteps,
        "it is `train.warmup_steps` here, or `train.warmup_ratio` for a share of all steps",
    ),
    part(&["warmup_ratio"], Part::WarmupRatio, "it is `train.warmup_ratio` here"),
    part(
        &["optim"],
        Part::Optimizer,
        "it is `train.optimizer` here: \"adamw\", \"rmsprop\", \"lion\", \"sgd\" and others; for 8-bit states set `train.optimizer_state` to \
         \"8bit\"",
    ),
    missing(
        &["optim_args", "optim_target_modules"],
        "give those of `train.betas`, `train.alpha`, `train.momentum`, `train.eps` and `train.weight_decay` that the \
         optimiser has",
    ),
    part(&["adam_beta1"], Part::Beta1, "it is the first of the two numbers of `train.betas` here"),
    part(&["adam_beta2"], Part::Beta2, "it is the second of the two numbers of `train.betas` here"),
    key(&["adam_epsilon"], "train.eps", number),
    key(&["weight_decay"], "train.weight_decay", number),
    key(&["max_grad_norm"], "train.max_grad_norm", number),
    key(&["neftune_noise_alpha"], "train.neftune_noise_alpha", number),
    missing(
        &["label_smoothing_factor"],
        "the cross-entropy is not smoothed; `objective.label_smoothing` is for preference losses",
    ),
    // Saving and evaluation.
    part(&["save_steps"], Part::SaveSteps, "it is `train.save_every` here"),
    part(
        &["save_strategy"],
        Part::SaveStrategy,
        "give `train.save_every`, in steps; 0 saves at the end only",
    ),
    key(&["save_total_limit"], "train.keep", count),
    part(&["eval_steps"], Part::EvalSteps, "it is `train.eval_every` here"),
    part(
        &["eval_strategy", "evaluation_strategy"],
        Part::EvalStrategy,
        "give `train.eval_every`, in steps; 0 evaluates at the end only",
    ),
    not_needed(
        &["do_train", "do_eval", "do_predict"],
        "`method` says how to train, and `data.eval` is evaluated if it is given",
    ),
    part(&["eval_on_start"], Part::EvalFirst, "it is `train.eval_first` here, true unless given"),
    missing(&["eval_delay"], "evaluations follow `train.eval_every`"),
    not_needed(
        &["eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "include_for_metrics"],
        "metrics are sums over all held-out rows, whatever the batches",
    ),
    part(
        &["load_best_model_at_end"],
        Part::KeepsBest,
        "give `train.keep_best`, for example \"eval/loss\"; `final/` then has the best step's weights",
    ),
    part(
        &["metric_for_best_model"],
        Part::BestMetric,
        "it is `train.keep_best` here, for example \"eval/loss\" or \"eval/rewards/accuracies\"",
    ),
    not_needed(
        &["greater_is_better"],
        "`train.keep_best` knows: `eval/loss` is best where it is lowest, the others where they are highest",
    ),
    part(
        &["early_stopping_patience"],
        Part::Patience,
        "it is `train.early_stopping_patience` here, in evaluations, and needs `train.keep_best`",
    ),
    part(
        &["early_stopping_threshold"],
        Part::PatienceThreshold,
        "it is `train.early_stopping_threshold` here, and needs `train.keep_best`",
    ),
    not_needed(
        &[
            "save_only_model",
            "save_safetensors",
            "enable_jit_checkpoint",
            "save_on_each_node",
            "restore_callback_states_from_checkpoint",
        ],
        "a checkpoint is whole, and the final model is in safetensors",
    ),
    not_needed(
        &[
            "resume_from_checkpoint",
            "auto_resume_from_checkpoints",
            "ignore_data_skip",
            "overwrite_output_dir",
        ],
        "give `--resume` or `--overwrite` on the command line",
    ),
    // Logs and services.
    part(
        &["report_to"],
        Part::ReportTo,
        "it is `[logging]` here: `logging.tensorboard`, `logging.mlflow.uri`, or `logging.command` for all others",
    ),
    key(&["run_name"], "logging.run", name),
    part(&["logging_dir"], Part::EventFolder, "it is `logging.tensorboard` here: `true`, or a folder"),
    not_needed(
        &[
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "use_swanlab",
            "swanlab_project",
            "swanlab_mode",
            "swanlab_experiment_name",
            "swanlab_description",
        ],
        "`logging.command` feeds such a service, whose own variables set the rest: see docs/trackers.md",
    ),
    not_needed(
        &[
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "logging_nan_inf_filter",
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "disable_tqdm",
            "include_num_input_tokens_seen",
            "skip_memory_metrics",
            "log_completions",
            "num_completions_to_print",
        ],
        "every step is in metrics.jsonl of the run's folder",
    ),
    not_needed(
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
    // Adapters.
    part(
        &["use_peft", "peft_config"],
        Part::UseAdapter,
        "a table `[adapter]`, even an empty one, trains an adapter; without it every weight trains",
    ),
    part(&["lora_r", "r"], Part::Rank, "it is `adapter.rank` here"),
    part(&["lora_alpha"], Part::Alpha, "it is `adapter.alpha` here"),
    part(
        &["lora_dropout"],
        Part::Dropout,
        "it is `adapter.dropout` here; TRL's trainers set it to 0, but for SFT, GRPO and `DistillationTrainer`",
    ),
    part(
        &["lora_target_modules", "target_modules"],
        Part::Targets,
        "it is `adapter.targets` here: \"all-linear\", or a list of names",
    ),
    key(&["lora_modules_to_save", "modules_to_save"], "adapter.modules_to_save", texts),
    key(&["use_rslora"], "adapter.rslora", flag),
    part(&["use_dora"], Part::Dora, "write `adapter.kind = \"dora\"`"),
    key(&["peft_model_id"], "adapter.start", text),
    not_needed(
        &["lora_task_type", "task_type", "peft_type", "inference_mode", "runtime_config"],
        "`method` says the task, and `adapter.kind` the adapter",
    ),
    key_but(
        &["bias"],
        "adapter.modules_to_save",
        |value| match value.as_str() {
            Some("none") => Converted::Same("biases stay as they are"),
            _ => Converted::Missing("biases do not train beside an adapter"),
        },
        "biases alone do not train",
    ),
    key_but(
        &["init_lora_weights"],
        "adapter.kind",
        |value| match as_flag(value) {
            Some(true) => Converted::Same("A is random and B is zero"),
            _ => Converted::Missing("an adapter starts with A random and B zero"),
        },
        "it starts with A random and B zero",
    ),
    missing(
        &[
            "lora_target_parameters",
            "target_parameters",
            "exclude_modules",
            "fan_in_fan_out",
            "layers_to_transform",
            "layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "megatron_config",
            "megatron_core",
            "trainable_token_indices",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "velora_config",
            "alora_invocation_tokens",
            "use_qalora",
            "qalora_group_size",
            "monteclora_config",
            "layer_replication",
            "lora_bias",
            "use_bdlora",
            "arrow_config",
            "kasa_config",
            "ensure_weight_tying",
        ],
        "adapters here have one rank and one scale for all modules (docs/adapters.md)",
    ),
    missing(
        &["loraplus_lr_ratio", "loraplus_lr_embedding"],
        "give them as `train.groups`, with a `learning_rate_factor` for the parameters \"lora_B\" or \"lora_embedding\"",
    ),
    // Quantised weights.
    part(&["load_in_4bit"], Part::Load4Bit, "write `compute.format = \"nf4\"`, with a table `[adapter]`"),
    part(&["load_in_8bit"], Part::Load8Bit, "write `compute.format = \"int8\"`, with a table `[adapter]`"),
    part(
        &["bnb_4bit_quant_type"],
        Part::QuantType,
        "write `compute.format = \"nf4\"`; \"fp4\" is not supported",
    ),
    not_needed(
        &[
            "bnb_4bit_quant_storage",
            "bnb_4bit_compute_dtype",
            "quantization_config",
            "quantization_method",
            "llm_int8_has_fp16_weight",
        ],
        "`compute.format` says all about frozen weights",
    ),
    missing(
        &["use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization"],
        "scales of nf4 are f32, which costs 0.37 bits a weight more; the weights are the same but for the rounding \
         of their scales",
    ),
    missing(
        &["llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"],
        "int8 weights are unpacked to the compute type, outliers included",
    ),
    // Precision, memory and devices.
    part(&["bf16"], Part::Bf16, "it is `compute.dtype` here: \"bf16\" or \"f32\""),
    part(&["fp16"], Part::Fp16, "f16 is not supported: write `compute.dtype = \"bf16\"`"),
    not_needed(
        &["bf16_full_eval", "fp16_full_eval", "fp16_opt_level", "half_precision_backend"],
        "evaluation computes in `compute.dtype` too",
    ),
    not_needed(
        &["dtype", "torch_dtype"],
        "master weights are f32, and matmuls compute in `compute.dtype`, whatever type the files have",
    ),
    part(&["tf32"], Part::Tf32, "it is `compute.tf32` here, only with `compute.dtype = \"f32\"` on GPUs"),
    part(
        &["gradient_checkpointing", "activation_checkpointing"],
        Part::Checkpointing,
        "it is `compute.checkpointing` here: \"none\", \"selective\" or \"block\"",
    ),
    not_needed(
        &[
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "use_cache",
            "torch_empty_cache_steps",
        ],
        "`compute.checkpointing` says all, and memory is reserved once",
    ),
    key_but(
        &["activation_offloading"],
        "compute.offload_activations",
        // Axolotl has other words for kinds of it.
        |value| Converted::Value(as_flag(value).unwrap_or(!is_off(value)).into()),
        "with `compute.checkpointing = \"block\"`",
    ),
    missing(
        &["accelerate_config"],
        "the file is not here; give Accelerate's file to `tandem init` with another --from",
    ),
    part(
        &["deepspeed"],
        Part::DeepSpeed,
        "it is not needed: `compute.sharding` (\"zero1\" to \"zero3\") and `compute.offload` do it",
    ),
    part(&["fsdp"], Part::Fsdp, "it is not needed: `compute.sharding = \"zero3\"` does it"),
    part(
        &["fsdp_config"],
        Part::FsdpFile,
        "it is not needed: `compute.sharding`, `compute.offload` and `compute.checkpointing` do it",
    ),
    part(
        &["fsdp_config.sharding_strategy", "fsdp_config.fsdp_sharding_strategy"],
        Part::FsdpStrategy,
        "it is `compute.sharding` here: \"zero3\", or \"zero2\" for SHARD_GRAD_OP",
    ),
    part(
        &["fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"],
        Part::FsdpReshard,
        "it is `compute.sharding` here: \"zero3\" reshards after forward, \"zero2\" does not",
    ),
    part(
        &["fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"],
        Part::OffloadWeights,
        "it is `compute.offload` here: \"host\"",
    ),
    part(
        &["fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"],
        Part::Checkpointing,
        "it is `compute.checkpointing` here: \"none\", \"selective\" or \"block\"",
    ),
    not_needed(
        &[
            "fsdp_config.version",
            "fsdp_config.fsdp_version",
            "fsdp_config.auto_wrap_policy",
            "fsdp_config.fsdp_auto_wrap_policy",
            "fsdp_config.transformer_layer_cls_to_wrap",
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "fsdp_config.min_num_params",
            "fsdp_config.fsdp_min_num_params",
            "fsdp_config.backward_prefetch",
            "fsdp_config.fsdp_backward_prefetch",
            "fsdp_config.forward_prefetch",
            "fsdp_config.fsdp_forward_prefetch",
            "fsdp_config.limit_all_gathers",
            "fsdp_config.fsdp_limit_all_gathers",
            "fsdp_config.use_orig_params",
            "fsdp_config.fsdp_use_orig_params",
            "fsdp_config.cpu_ram_efficient_loading",
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "fsdp_config.sync_module_states",
            "fsdp_config.fsdp_sync_module_states",
            "fsdp_config.state_dict_type",
            "fsdp_config.fsdp_state_dict_type",
            "fsdp_config.final_state_dict_type",
            "fsdp_config.fsdp_final_state_dict_type",
        ],
        "layers are the units of `compute.sharding`, fetched ahead of their use",
    ),
    not_needed(&["ds3_gather_for_generation"], "`compute.sharding` does it"),
    key(&["tensor_parallel_size"], "compute.tensor", count),
    key(&["pipeline_parallel_size"], "compute.pipeline", count),
    missing(
        &["parallelism_config", "accelerator_config"],
        "give `compute.sharding`, `compute.tensor` and `compute.pipeline`",
    ),
    key_but(
        &["use_cpu", "no_cuda"],
        "compute.devices",
        |value| match as_flag(value) {
            Some(true) => Converted::Value("cpu".into()),
            _ => Converted::Same("GPUs are taken where there are any"),
        },
        "\"auto\", \"cpu\" or \"cuda\"",
    ),
    not_needed(&["device_map", "local_rank"], "`compute.devices` and the launcher say where ranks run"),
    key_but(
        &["ddp_timeout"],
        "compute.deadline",
        |value| match as_count(value) {
            Some(seconds) if seconds > 1 << 24 => {
                Converted::Changed((1i64 << 24).into(), "194 days are the longest")
            }
            _ => count(value),
        },
        "in seconds",
    ),
    missing(&["ddp_backend"], "`compute.engine` chooses among our own engines; \"auto\" is right"),
    not_needed(
        &["ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"],
        "ranks and their messages follow from `[compute]`",
    ),
    not_needed(&["full_determinism"], "a run has the same bits each time, on any number of ranks"),
    not_needed(
        &[
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "use_liger_kernel",
            "liger_kernel_config",
            "use_liger_loss",
            "attn_implementation",
        ],
        "there is one implementation of each kernel",
    ),
    key_but(
        &["model_revision"],
        "model",
        |value| match value.as_str() {
            Some("main") => Converted::Same("the hub's main revision is taken"),
            _ => Converted::Missing("write the revision into `model`, as \"owner/name@revision\""),
        },
        "as \"owner/name@revision\"",
    ),
    not_needed(
        &["trust_remote_code"],
        "config.json says the kind of the model, and no code of its folder is run",
    ),
    key_but(
        &["model_init_kwargs"],
        "model",
        |value| match as_table(value) {
            Some(options) if options.keys().all(|option| HARMLESS.contains(&option.as_str())) => {
                Converted::Same("they say how torch loads and computes, and not what")
            }
            _ => Converted::Missing("set what they change in the model's config.json"),
        },
        "whose config.json has what they change",
    ),
    missing(&["router_aux_loss_coef"], "mixtures of experts do not train"),
    part(
        &["disable_dropout"],
        Part::DisableDropout,
        "it is not needed: the only dropout is `adapter.dropout`, which is 0, or the `lora_dropout` of `adapter.start`, unless given",
    ),
    // Objectives.
    part(
        &["loss_type"],
        Part::Loss,
        "it is `objective.loss` here: a name, or a table as `{ sigmoid = 1, sft = 0.5 }`",
    ),
    part(
        &["loss_weights"],
        Part::LossWeights,
        "write a table: `objective.loss = { sigmoid = 1, sft = 0.5 }`",
    ),
    part(&["rpo_alpha"], Part::SftWeight, "write a table: `objective.loss = { sigmoid = 1, sft = 0.5 }`"),
    key(&["beta"], "objective.beta", numbers),
    part(
        &["label_smoothing"],
        Part::LabelSmoothing,
        "it is `objective.label_smoothing` here; TRL's `DPOTrainer` ignores it for \"sigmoid\" and \"sigmoid_norm\"",
    ),
    key(&["reference_free"], "objective.reference_free", flag),
    key(&["f_divergence_type"], "objective.f_divergence_type", |value| match value.as_str() {
        Some(name @ ("reverse_kl" | "forward_kl" | "js_divergence" | "alpha_divergence")) => {
            Converted::Value(name.into())
        }
        _ => Converted::Wrong("\"reverse_kl\", \"forward_kl\", \"js_divergence\" or \"alpha_divergence\""),
    }),
    key(&["f_alpha_divergence_coef"], "objective.f_alpha_divergence_coef", number),
    key(&["discopop_tau"], "objective.discopop_tau", number),
    key(&["simpo_gamma"], "objective.simpo_gamma", number),
    part(
        &["cpo_alpha"],
        Part::CpoAlpha,
        "it is the weight of `sft` here: `objective.loss = { cpo = 1, sft = 1 }`, or `{ simpo = 1, sft = 1 }`",
    ),
    key(&["center_rewards_coefficient"], "objective.center_rewards_coefficient", number),
    key(&["desirable_weight"], "objective.desirable_weight", number),
    key(&["undesirable_weight"], "objective.undesirable_weight", number),
    key(&["ld_alpha"], "objective.ld_alpha", number),
    key(&["use_weighting"], "objective.use_weighting", flag),
    key_but(
        &["precompute_ref_log_probs"],
        "reference.kind",
        |_| Converted::Same("the reference is computed once unless `reference.kind` says otherwise"),
        "\"precompute\" is the default, with the same numbers",
    ),
    part(&["sync_ref_model"], Part::Sync, "write `reference.kind = \"sync\"`"),
    key(&["ref_model_mixup_alpha"], "reference.sync_alpha", number),
    key(&["ref_model_sync_steps"], "reference.sync_steps", count),
    part(&["ref_model"], Part::RefModel, "it is `reference.model` here"),
    // Distillation.
    key(&["teacher_model_name_or_path", "teacher_model"], "reference.model", text),
    part(
        &["lmbda"],
        Part::OwnAnswers,
        "it is `distill.lmbda`; the choice is made for each row, in TRL for each micro-batch",
    ),
    part(
        &["seq_kd"],
        Part::TeachersAnswers,
        "answers of the teacher cannot be had while the policy trains; let it write them first, with `tandem generate`",
    ),
    // XPO and Nash-MD.
    part(&["alpha"], Part::Exploration, "it is `adapter.alpha` here, or `online.alpha` for XPO"),
    key(&["mixture_coef"], "online.mixture", one_number),
    missing(
        &["teacher_model_revision"],
        "write it behind the name: `reference.model = \"owner/name@revision\"`",
    ),
    missing(&["teacher_model_init_kwargs"], "`compute.format` quantises a teacher"),
    // Generation in online runs.
    key(&["max_new_tokens", "max_completion_tokens"], "online.max_new_tokens", count),
    key(&["temperature"], "online.temperature", number),
    key(&["top_p"], "online.top_p", number),
    key(&["top_k"], "online.top_k", |value| match as_number(value) {
        Some(k) if k < 0.0 => Converted::Same("0 takes all tokens, and is the default"),
        _ => count(value),
    }),
    key(&["min_p"], "online.min_p", number),
    key(&["repetition_penalty"], "online.repetition_penalty", number),
    key(&["num_generations"], "online.answers", count),
    part(
        &["steps_per_generation"],
        Part::StepsPerGeneration,
        "divided by `gradient_accumulation_steps` it is `online.steps_per_round` here: TRL counts micro-batches. A step \
         has whole groups; TRL shuffles answers between the steps",
    ),
    part(
        &["generation_batch_size"],
        Part::GenerationBatch,
        "a round is `train.batch_size` × `online.steps_per_round` prompts, with `online.answers` answers to each",
    ),
    // Policy gradients.
    key(&["num_iterations"], "grpo.num_iterations", count),
    key(&["epsilon"], "grpo.epsilon", number),
    key(&["epsilon_high"], "grpo.epsilon_high", number),
    key(&["delta"], "grpo.delta", number),
    key(&["sapo_temperature_pos"], "grpo.sapo_temperature_pos", number),
    key(&["sapo_temperature_neg"], "grpo.sapo_temperature_neg", number),
    key(&["vespo_k_pos"], "grpo.vespo_k_pos", number),
    key(&["vespo_lambda_pos"], "grpo.vespo_lambda_pos", number),
    key(&["vespo_k_neg"], "grpo.vespo_k_neg", number),
    key(&["vespo_lambda_neg"], "grpo.vespo_lambda_neg", number),
    key(&["importance_sampling_level"], "grpo.importance_sampling_level", |value| match value.as_str() {
        Some(level @ ("token" | "sequence")) => Converted::Value(level.into()),
        _ => Converted::Wrong("\"token\" or \"sequence\""),
    }),
    key(&["scale_rewards"], "grpo.scale_rewards", |value| match (value.as_str(), value.as_bool()) {
        (Some(scale @ ("group" | "batch" | "none")), _) => Converted::Value(scale.into()),
        (_, Some(true)) => Converted::Value("group".into()),
        (_, Some(false)) => Converted::Value("none".into()),
        _ => Converted::Wrong("\"group\", \"batch\" or \"none\""),
    }),
    key(&["mask_truncated_completions"], "grpo.mask_truncated", flag),
    key(&["use_bias_correction_kl"], "grpo.use_bias_correction_kl", flag),
    key(&["off_policy_mask_threshold"], "grpo.off_policy_mask_threshold", number),
    key(&["top_entropy_quantile"], "grpo.top_entropy_quantile", number),
    missing(
        &[
            "entropy_coef",
            "use_adaptive_entropy",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
        ],
        "rewards of entropy are not here yet",
    ),
    key(&["multi_objective_aggregation"], "grpo.aggregation", |value| match value.as_str() {
        Some(order @ ("sum_then_normalize" | "normalize_then_sum")) => Converted::Value(order.into()),
        _ => Converted::Wrong("\"sum_then_normalize\" or \"normalize_then_sum\""),
    }),
    missing(
        &["max_tool_calling_iterations"],
        "tools belong to a program here: [online.environment], whose max_turns limits a conversation",
    ),
    missing(
        &["num_generations_eval"],
        "held-out prompts have `online.eval_answers` answers, and `tandem eval --judge` compares models",
    ),
    not_needed(
        &[
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
            "cast_lm_head_to_fp32",
            "vllm_max_model_length",
        ],
        "completions are generated by the trainer itself",
    ),
    not_needed(
        &[
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ],
        "the generator is the trainer's own forward pass: its log-probabilities need no correction. With \
         `[online.server]` it is `importance_sampling` there, with TRL's default",
    ),
    not_needed(
        &["log_multimodal", "log_unique_prompts", "log_completions_hub_repo"],
        "samples.jsonl has the completions of the steps that `online.samples_every` selects",
    ),
    part(
        &["generation_kwargs"],
        Part::GenerationOptions,
        "its `top_k`, `top_p`, `min_p`, `temperature`, `repetition_penalty`, `max_new_tokens` and `stop_strings` are keys \
         of `[online]` here; others cannot be had",
    ),
    missing(&["vllm_structured_outputs_regex"], "no grammar constrains what is sampled"),
    missing(&["chat_template_kwargs"], "`data.chat_template` takes a template of your own"),
    missing(&["missing_eos_penalty"], "write a judge of `kind = \"missing_eos\"`"),
    missing(
        &["reward_model_path", "reward_model_name_or_path", "reward_model", "reward_weights", "reward_funcs"],
        "write a table `[[judges]]` for each, with its `kind` and `weight`",
    ),
    missing(
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
    not_needed(
        &[
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_enable_sleep_mode",
            "vllm_model_impl",
            "cache_implementation",
        ],
        "completions are generated by the trainer itself; a server of your own has its own options",
    ),
];

/// Settings of a file that TRL has under this name for `accelerate_config`.
pub(super) fn profile(name: &str) -> Option<Map<String, Value>> {
    let settings = match name {
        "single_gpu" => return Some(Map::from_iter([("num_processes".to_owned(), 1.into())])),
        "multi_gpu" => json!({ "distributed_type": "MULTI_GPU" }),
        "zero1" | "zero2" | "zero3" => {
            json!({ "distributed_type": "DEEPSPEED", "deepspeed_config": { "zero_stage": &name["zero".len()..] } })
        }
        "fsdp1" | "fsdp2" => json!({
            "distributed_type": "FSDP", "fsdp_config": { "fsdp_reshard_after_forward": true },
        }),
        _ => return None,
    };
    let Value::Object(mut settings) = settings else { return None };
    settings.insert("num_processes".to_owned(), 8.into());
    settings.insert("mixed_precision".to_owned(), "bf16".into());
    Some(settings)
}

/// Members of `model_init_kwargs` that leave the model's function as it is.
const HARMLESS: [&str; 8] = [
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "low_cpu_mem_usage",
    "torch_dtype",
    "trust_remote_code",
    "use_cache",
];

/// A number, or a list with one.
fn one_number(value: &serde_json::Value) -> Converted {
    match value.as_array().map(Vec::as_slice) {
        Some([only]) => number(only),
        Some(_) => Converted::Missing("it is one number for the whole run"),
        None => number(value),
    }
}

/// A number, or a list of them, one an epoch.
fn numbers(value: &serde_json::Value) -> Converted {
    match value.as_array().map(|items| items.iter().map(as_number).collect::<Option<Vec<f64>>>()) {
        Some(Some(list)) if list.len() > 1 => Converted::Value(list.into()),
        Some(Some(list)) if list.len() == 1 => Converted::Value(list[0].into()),
        Some(_) => Converted::Wrong("a number, or a list of them"),
        None => number(value),
    }
}

/// A limit of tokens; TRL's `None` is none.
fn length(value: &serde_json::Value) -> Converted {
    match as_count(value) {
        Some(tokens) if tokens >= 2 => Converted::Value((tokens as i64).into()),
        _ => Converted::Wrong("a number of tokens"),
    }
}
