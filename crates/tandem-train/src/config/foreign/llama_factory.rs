//! Settings of LLaMA-Factory that TRL does not have. Those of transformers' names are in TRL's table.

use super::name::{Converted, Name, Part, key, key_but, missing, not_needed, part};
use super::values::{as_flag, count, number, text, texts};

pub(super) const NAMES: &[Name] = &[
    part(&["stage"], Part::Method, "it is `method` here: \"sft\", \"dpo\" or \"reward\""),
    part(
        &["finetuning_type"],
        Part::UseAdapter,
        "a table `[adapter]`, even an empty one, trains an adapter; without it every weight trains",
    ),
    part(
        &["dataset"],
        Part::Dataset,
        "it is `data.train` here: a file, a pattern, a split of the hub as \"hf://owner/name/train\", or a list of them",
    ),
    part(
        &["dataset_dir"],
        Part::DatasetFolder,
        "give files in `data.train`; the cache of tokens is `data.cache`",
    ),
    not_needed(
        &["dataset_info", "data_shared_file_system", "preprocessing_batch_size", "buffer_size"],
        "the rows' own keys say what they are; `data.columns` maps other columns to them (docs/data.md)",
    ),
    not_needed(&["cache_dir", "tokenized_path"], "the cache of tokens is `data.cache`"),
    key_but(
        &["template"],
        "data.chat_template",
        |value| match value.as_str() {
            Some("default" | "empty" | "vanilla") => Converted::Missing(
                "the model's own chat template is used; give another in `data.chat_template`",
            ),
            _ => Converted::Same("the model's own chat template is used; compare with `tandem data`"),
        },
        "a path or a text; without it the model's own template is used",
    ),
    key(&["cutoff_len"], "data.max_length", count),
    part(
        &["train_on_prompt"],
        Part::TrainOnPrompt,
        "it is `data.loss_on` here: \"answer\", the default, or \"all\"",
    ),
    missing(
        &["mask_history", "tool_format", "default_system", "enable_thinking", "preserve_thinking"],
        "every turn of the assistant is scored, in the words of the chat template",
    ),
    part(
        &["max_samples"],
        Part::MaxRows,
        "it is `data.train_rows` here, and `data.eval_rows` for held-out rows",
    ),
    part(
        &["val_size"],
        Part::EvalShare,
        "it cannot be had: rows are not split here; give held-out rows in `data.eval`",
    ),
    not_needed(
        &["neat_packing", "ignore_pad_token_for_loss", "eval_on_each_dataset", "eval_num_beams"],
        "rows of a micro-batch are packed without padding, and never see each other",
    ),
    missing(
        &["mix_strategy", "interleave_probs"],
        "give `data.train` as a list of tables with `path` and `weight`",
    ),
    missing(
        &["media_dir", "image_max_pixels", "video_max_pixels"],
        "rows with images, audio or video are refused",
    ),
    key_but(
        &["disable_shuffling"],
        "data.order",
        |value| match as_flag(value) {
            Some(true) => Converted::Value("sequential".into()),
            _ => Converted::Same("`data.order` is \"shuffled\" already"),
        },
        "\"shuffled\" or \"sequential\"",
    ),
    part(&["lora_rank"], Part::Rank, "it is `adapter.rank` here"),
    part(&["lora_target"], Part::Targets, "it is `adapter.targets` here: \"all-linear\", or a list of names"),
    key(&["additional_target"], "adapter.modules_to_save", texts),
    key_but(
        &["adapter_name_or_path"],
        "adapter.start",
        |value| match value.as_str() {
            Some(folder) if !folder.contains(',') => text(value),
            _ => Converted::Wrong("one folder: merge the others into the model first, with `tandem merge`"),
        },
        "one folder; others are merged first",
    ),
    part(
        &["create_new_adapter"],
        Part::NewAdapter,
        "it is not needed: without `adapter.start` a new adapter trains; `tandem merge` merges an old one first",
    ),
    not_needed(&["adapter_folder"], "`adapter.start` names the folder"),
    missing(
        &["pissa_init", "pissa_iter", "pissa_convert", "use_llama_pro", "freeze_trainable_layers"],
        "adapters here have one rank and one scale for all modules (docs/adapters.md)",
    ),
    missing(
        &[
            "use_galore",
            "use_apollo",
            "use_badam",
            "use_adam_mini",
            "use_muon",
            "mixture_of_depths",
            "shift_attn",
            "use_dft_loss",
            "use_asft_loss",
            "use_eaft_loss",
        ],
        "optimisers are those of `train.optimizer`, with the losses of `objective.loss`",
    ),
    part(
        &["quantization_bit"],
        Part::Bits,
        "write `compute.format = \"nf4\"` or \"int8\", with a table `[adapter]`",
    ),
    part(
        &["quantization_type"],
        Part::QuantType,
        "write `compute.format = \"nf4\"`; \"fp4\" is not supported",
    ),
    not_needed(&["quantization_device_map"], "`compute.format` says all about frozen weights"),
    part(&["pref_loss"], Part::Loss, "it is `objective.loss` here"),
    part(&["dpo_label_smoothing"], Part::LabelSmoothing, "it is `objective.label_smoothing` here"),
    key(&["kto_chosen_weight"], "objective.desirable_weight", number),
    key(&["kto_rejected_weight"], "objective.undesirable_weight", number),
    key(&["pref_beta"], "objective.beta", number),
    part(&["pref_ftx"], Part::SftWeight, "write a table: `objective.loss = { sigmoid = 1, sft = 0.5 }`"),
    missing(
        &["pref_bco_weight", "ppo_epochs", "ppo_target"],
        "the losses are those of docs/config.md, `objective.loss`",
    ),
    key(&["ref_model_adapters", "ref_adapters"], "reference.adapter", text),
    missing(
        &[
            "ref_model_quantization_bit",
            "reward_model_adapters",
            "reward_model_quantization_bit",
            "reward_model_type",
        ],
        "frozen weights have the one `compute.format`",
    ),
    not_needed(
        &[
            "flash_attn",
            "enable_liger_kernel",
            "use_unsloth",
            "use_unsloth_gc",
            "use_reentrant_gc",
            "upcast_layernorm",
            "upcast_lmhead_output",
            "use_v1_kernels",
            "use_kv_cache",
            "print_param_status",
            "use_fast_tokenizer",
        ],
        "there is one implementation of each kernel",
    ),
    key_but(
        &["disable_gradient_checkpointing"],
        "compute.checkpointing",
        |value| match as_flag(value) {
            Some(true) => Converted::Value("none".into()),
            _ => Converted::Same("`compute.checkpointing` says all"),
        },
        "\"none\" is the default",
    ),
    missing(&["rope_scaling"], "set it in the model's config.json"),
    missing(
        &["add_tokens", "add_special_tokens", "new_special_tokens_config", "split_special_tokens"],
        "set the token in the model's folder (tokenizer_config.json)",
    ),
    key_but(
        &["train_from_scratch"],
        "weights",
        |value| match as_flag(value) {
            Some(true) => Converted::Value("random".into()),
            _ => Converted::Same("the model's weights are loaded"),
        },
        "\"random\"",
    ),
    missing(&["moe_aux_loss_coef"], "mixtures of experts do not train"),
    not_needed(
        &[
            "use_swanlab",
            "swanlab_project",
            "swanlab_workspace",
            "swanlab_run_name",
            "swanlab_mode",
            "swanlab_api_key",
            "swanlab_logdir",
        ],
        "`logging.command` feeds such a service, whose own variables set the rest: see docs/trackers.md",
    ),
    not_needed(
        &["plot_loss", "compute_accuracy", "include_effective_tokens_per_second", "ray_run_name"],
        "metrics.jsonl in the run's folder has every step, for any service to read",
    ),
    not_needed(&["infer_backend", "infer_dtype", "offload_folder"], "it is for inference"),
    not_needed(&["hf_hub_token", "ms_hub_token", "om_hub_token"], "HF_TOKEN is read"),
    part(
        &["early_stopping_steps"],
        Part::Patience,
        "it is `train.early_stopping_patience` here, in evaluations, and needs `train.keep_best`",
    ),
    missing(&["predict_with_generate"], "`tandem eval --judge` compares completions"),
];
