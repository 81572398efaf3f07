//! Settings of a DeepSpeed configuration. `"auto"` leaves a value to the trainer's own setting.

use super::name::{Name, Part, WANDB, key, key_but, missing, not_needed, part};
use super::values::number_or_auto;

pub(super) const NAMES: &[Name] = &[
    part(
        &["train_batch_size"],
        Part::Batch,
        "it is `train.batch_size` here, the rows of a step over all ranks",
    ),
    part(
        &["train_micro_batch_size_per_gpu"],
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
    key_but(&["gradient_clipping"], "train.max_grad_norm", number_or_auto, "0 never clips"),
    part(
        &["zero_optimization.stage"],
        Part::ZeroStage,
        "it is `compute.sharding` here: \"zero1\" to \"zero3\"",
    ),
    part(
        &["zero_optimization.offload_optimizer.device"],
        Part::OffloadOptimizer,
        "it is `compute.offload` here: \"host\" or \"nvme\"",
    ),
    part(
        &["zero_optimization.offload_param.device"],
        Part::OffloadWeights,
        "it is `compute.offload` here: \"host\" or \"nvme\"",
    ),
    part(
        &["zero_optimization.offload_optimizer.nvme_path"],
        Part::OffloadFolder,
        "it is `compute.offload_dir` here",
    ),
    part(
        &["zero_optimization.offload_param.nvme_path"],
        Part::WeightsFolder,
        "it is `compute.offload_dir` here, for weights and states",
    ),
    not_needed(
        &[
            "zero_optimization",
            "zero_optimization.offload_optimizer",
            "zero_optimization.offload_param",
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.overlap_comm",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.reduce_scatter",
            "zero_optimization.allgather_partitions",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.sub_group_size",
            "zero_optimization.round_robin_gradients",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients",
        ],
        "`compute.sharding` and `compute.offload` say all: buckets, overlap and prefetch follow from the layers",
    ),
    part(&["bf16.enabled"], Part::Bf16, "it is `compute.dtype` here: \"bf16\" or \"f32\""),
    part(&["fp16.enabled"], Part::Fp16, "f16 is not supported: write `compute.dtype = \"bf16\"`"),
    not_needed(
        &[
            "fp16.loss_scale",
            "fp16.loss_scale_window",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "fp16.auto_cast",
        ],
        "bf16 has the range of f32, so no loss is scaled",
    ),
    part(
        &["optimizer.type"],
        Part::Optimizer,
        "it is `train.optimizer` here: \"adamw\", \"rmsprop\", \"lion\", \"sgd\" and others",
    ),
    part(&["optimizer.params.lr"], Part::LearningRate, "it is `train.learning_rate` here"),
    part(&["optimizer.params.betas"], Part::Betas, "it is `train.betas` here"),
    key(&["optimizer.params.eps"], "train.eps", number_or_auto),
    key(&["optimizer.params.weight_decay"], "train.weight_decay", number_or_auto),
    not_needed(
        &["optimizer.params.torch_adam", "optimizer.params.adam_w_mode"],
        "`train.optimizer` says all",
    ),
    part(
        &["scheduler.type"],
        Part::Schedule,
        "it is `train.schedule` here: \"linear\" for WarmupDecayLR, \"cosine\" for WarmupCosineLR, \"constant\" for WarmupLR",
    ),
    part(&["scheduler.params.warmup_num_steps"], Part::WarmupSteps, "it is `train.warmup_steps` here"),
    part(&["scheduler.params.warmup_max_lr"], Part::LearningRate, "it is `train.learning_rate` here"),
    not_needed(
        &["scheduler.params.total_num_steps"],
        "`train.steps` or `train.epochs` says where the schedule ends",
    ),
    missing(
        &["scheduler.params.warmup_min_lr", "scheduler.params.cos_min_ratio"],
        "warm-up is a straight line from 0",
    ),
    part(
        &["scheduler.params.warmup_type"],
        Part::WarmupType,
        "it cannot be had: warm-up is a straight line from 0, as with \"linear\"",
    ),
    part(
        &["tensorboard.enabled"],
        Part::UseTensorboard,
        "it is `logging.tensorboard` here: `true`, or a folder",
    ),
    part(&["tensorboard.output_path"], Part::EventFolder, "it is `logging.tensorboard` here"),
    part(&["wandb.enabled"], Part::UseWandb, WANDB),
    part(&["wandb.project"], Part::WandbProject, WANDB),
    part(&["wandb.team"], Part::WandbEntity, WANDB),
    not_needed(
        &[
            "tensorboard.job_name",
            "wandb.group",
            "steps_per_print",
            "wall_clock_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "dump_state",
            "flops_profiler.enabled",
            "communication_data_type",
            "aio.block_size",
            "aio.queue_depth",
            "aio.thread_count",
            "aio.single_submit",
            "aio.overlap_events",
        ],
        "every step is in metrics.jsonl of the run's folder, and `--profile` measures",
    ),
    not_needed(
        &[
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.synchronize_checkpoint_boundary",
            "activation_checkpointing.profile",
        ],
        "`compute.checkpointing` says all",
    ),
    part(
        &["activation_checkpointing.cpu_checkpointing"],
        Part::OffloadActivations,
        "it is `compute.offload_activations` here, with `compute.checkpointing = \"block\"`",
    ),
];
