//! Settings of Accelerate: its configuration file and the options of `accelerate launch`.

use super::name::{Converted, Name, Part, key, key_but, missing, not_needed, part};
use super::values::{as_flag, as_number, count};

pub(super) const NAMES: &[Name] = &[
    part(
        &["num_processes"],
        Part::Processes,
        "it is not needed: `compute.devices` or `tandem launch -n` says it; `train.batch_size` is over all ranks",
    ),
    part(&["num_machines"], Part::Machines, "it is not needed: `tandem launch --nodes` says it"),
    not_needed(
        &[
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "same_network",
            "rdzv_backend",
            "rdzv_conf",
            "main_training_function",
            "deepspeed_config.deepspeed_multinode_launcher",
            "deepspeed_config.deepspeed_hostfile",
        ],
        "`tandem launch` starts ranks with `--nodes`, `--node` and `--address`, or over `--hosts`",
    ),
    part(
        &["distributed_type"],
        Part::Distributed,
        "it is not needed: `compute.sharding` and `compute.devices` say it",
    ),
    not_needed(
        &["multi_gpu", "use_deepspeed", "use_fsdp", "no_python", "quiet", "compute_environment", "debug"],
        "`compute.sharding` and `compute.devices` say it",
    ),
    part(&["mixed_precision"], Part::MixedPrecision, "it is `compute.dtype` here: \"bf16\" or \"f32\""),
    key_but(
        &["gpu_ids"],
        "compute.devices",
        |value| match value.as_str() {
            Some("all") => Converted::Same("all GPUs are taken"),
            Some(ids) if ids.split(',').all(|id| id.trim().parse::<u8>().is_ok()) => {
                Converted::Value(format!("cuda:{}", ids.replace(' ', "")).into())
            }
            _ => match as_number(value) {
                Some(id) => Converted::Value(format!("cuda:{id}").into()),
                None => Converted::Wrong("\"all\", or numbers with commas"),
            },
        },
        "as \"cuda:0,1\"",
    ),
    key_but(
        &["cpu", "use_cpu"],
        "compute.devices",
        |value| match as_flag(value) {
            Some(true) => Converted::Value("cpu".into()),
            _ => Converted::Same("GPUs are taken where there are any"),
        },
        "\"cpu\"",
    ),
    not_needed(
        &["num_cpu_threads_per_process", "enable_cpu_affinity"],
        "`compute.threads` divides the cores",
    ),
    not_needed(
        &["max_restarts", "monitor_interval", "log_dir", "role"],
        "`tandem launch` has `--max-restarts` and `--log-dir`",
    ),
    not_needed(
        &["downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm"],
        "there are no TPUs here",
    ),
    not_needed(
        &["dynamo_config", "dynamo_backend", "dynamo_mode"],
        "there is one implementation of each kernel",
    ),
    part(
        &["deepspeed_config.zero_stage", "zero_stage"],
        Part::ZeroStage,
        "it is `compute.sharding` here: \"zero1\" to \"zero3\"",
    ),
    part(
        &["deepspeed_config.offload_optimizer_device", "offload_optimizer_device"],
        Part::OffloadOptimizer,
        "it is `compute.offload` here: \"host\" or \"nvme\"",
    ),
    part(
        &["deepspeed_config.offload_param_device", "offload_param_device"],
        Part::OffloadWeights,
        "it is `compute.offload` here: \"host\" or \"nvme\"",
    ),
    part(
        &["deepspeed_config.offload_optimizer_nvme_path", "offload_optimizer_nvme_path"],
        Part::OffloadFolder,
        "it is `compute.offload_dir` here",
    ),
    part(
        &["deepspeed_config.offload_param_nvme_path", "offload_param_nvme_path"],
        Part::WeightsFolder,
        "it is `compute.offload_dir` here, for weights and states",
    ),
    part(
        &["deepspeed_config.gradient_accumulation_steps"],
        Part::Accumulation,
        "it is not needed: `train.batch_size` has the rows of a step over all ranks",
    ),
    key_but(
        &["deepspeed_config.gradient_clipping", "gradient_clipping"],
        "train.max_grad_norm",
        super::values::number_or_auto,
        "0 never clips",
    ),
    part(
        &["deepspeed_config.deepspeed_config_file", "deepspeed_config_file"],
        Part::DeepSpeed,
        "it is not needed: `compute.sharding` (\"zero1\" to \"zero3\") and `compute.offload` do it",
    ),
    not_needed(
        &[
            "deepspeed_config",
            "parallelism_config",
            "deepspeed_config.zero3_init_flag",
            "zero3_init_flag",
            "deepspeed_config.zero3_save_16bit_model",
            "zero3_save_16bit_model",
        ],
        "weights are loaded shard by shard, and the final model is whole",
    ),
    missing(&["deepspeed_config.deepspeed_moe_layer_cls_names"], "mixtures of experts do not train"),
    part(
        &["fsdp_config.fsdp_sharding_strategy", "fsdp_sharding_strategy"],
        Part::Fsdp,
        "it is `compute.sharding` here: \"zero3\", or \"zero2\" for SHARD_GRAD_OP",
    ),
    part(
        &[
            "fsdp_config.fsdp_reshard_after_forward",
            "fsdp_config.reshard_after_forward",
            "fsdp_reshard_after_forward",
        ],
        Part::FsdpReshard,
        "it is `compute.sharding` here: \"zero3\" reshards after forward, \"zero2\" does not",
    ),
    part(
        &["fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_offload_params"],
        Part::OffloadWeights,
        "it is `compute.offload` here: \"host\"",
    ),
    part(
        &[
            "fsdp_config.fsdp_activation_checkpointing",
            "fsdp_config.activation_checkpointing",
            "fsdp_activation_checkpointing",
        ],
        Part::Checkpointing,
        "it is `compute.checkpointing` here: \"none\", \"selective\" or \"block\"",
    ),
    not_needed(
        &[
            "fsdp_config",
            "fsdp_config.fsdp_version",
            "fsdp_config.fsdp_auto_wrap_policy",
            "fsdp_config.auto_wrap_policy",
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "fsdp_config.transformer_layer_cls_to_wrap",
            "fsdp_config.fsdp_min_num_params",
            "fsdp_config.fsdp_backward_prefetch",
            "fsdp_config.fsdp_forward_prefetch",
            "fsdp_config.fsdp_use_orig_params",
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "fsdp_config.cpu_ram_efficient_loading",
            "fsdp_config.fsdp_sync_module_states",
            "fsdp_config.fsdp_state_dict_type",
            "fsdp_config.state_dict_type",
            "fsdp_auto_wrap_policy",
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_state_dict_type",
        ],
        "layers are the units of `compute.sharding`, fetched ahead of their use",
    ),
    key(
        &["parallelism_config.parallelism_config_tp_size", "parallelism_config_tp_size"],
        "compute.tensor",
        count,
    ),
    key(
        &["parallelism_config.parallelism_config_dp_replicate_size", "parallelism_config_dp_replicate_size"],
        "compute.replicate",
        count,
    ),
    part(
        &["parallelism_config.parallelism_config_cp_size", "parallelism_config_cp_size"],
        Part::ContextRanks,
        "it cannot be had: a sequence stays on the ranks of `compute.tensor`",
    ),
    part(
        &["parallelism_config.parallelism_config_sp_size", "parallelism_config_sp_size"],
        Part::SequenceRanks,
        "it cannot be had: a sequence stays on the ranks of `compute.tensor`",
    ),
    missing(
        &["fp8_config", "megatron_lm_config", "mpirun_config"],
        "give `compute.sharding`, `compute.tensor` and `compute.pipeline`",
    ),
];
