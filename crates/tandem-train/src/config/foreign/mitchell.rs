//! Settings of the original DPO code, `eric-mitchell/direct-preference-optimization`: hydra's
//! overrides and `config.yaml`.

use super::name::{Converted, Name, Part, WANDB, key, key_but, not_needed, part};
use super::values::{count, flag, name, number, text};

pub(super) const NAMES: &[Name] = &[
    key_but(
        &["model"],
        "model",
        |value| match value.as_str() {
            Some("pythia28") => Converted::Value("EleutherAI/pythia-2.8b".into()),
            Some("pythia69") => Converted::Value("EleutherAI/pythia-6.9b".into()),
            Some("gpt2-large") => Converted::Value("openai-community/gpt2-large".into()),
            Some("gpt2-xl") => Converted::Value("openai-community/gpt2-xl".into()),
            Some("blank_model") => Converted::Same("model.name_or_path names it"),
            _ => Converted::Missing("give the model's folder or its name on the hub with --model"),
        },
        "a folder, a GGUF file or a name of the hub",
    ),
    key(&["model.name_or_path"], "model", text),
    key_but(&["model.archive"], "weights", text, "the path of a policy.pt"),
    not_needed(
        &["model.tokenizer_name_or_path", "model.block_name"],
        "the model's folder has its tokenizer, and `compute.dtype` the type of matmuls",
    ),
    part(
        &["model.policy_dtype", "policy_dtype", "model.fsdp_policy_mp"],
        Part::MixedPrecision,
        "it is `compute.dtype` here: \"bf16\" or \"f32\"",
    ),
    not_needed(
        &["model.reference_dtype", "reference_dtype"],
        "the reference computes in `compute.dtype` too; `compute.format` stores it in fewer bits",
    ),
    part(
        &["loss", "loss.name"],
        Part::Method,
        "`method` is \"sft\" or \"dpo\" here, and `objective.loss` the loss",
    ),
    key(&["loss.beta"], "objective.beta", number),
    part(&["loss.label_smoothing"], Part::LabelSmoothing, "it is `objective.label_smoothing` here"),
    key(&["loss.reference_free"], "objective.reference_free", flag),
    part(&["datasets"], Part::Datasets, "it is `data.train` here: a file, or a split of the hub"),
    key(&["max_length"], "data.max_length", count),
    key_but(
        &["max_prompt_length"],
        "data.max_prompt_length",
        count,
        "rows with a longer prompt are dropped, not cut",
    ),
    key(&["seed"], "seed", count),
    part(&["lr"], Part::LearningRate, "it is `train.learning_rate` here"),
    part(
        &["gradient_accumulation_steps"],
        Part::Accumulation,
        "it is not needed: `train.batch_size` has the rows of a step over all ranks",
    ),
    key(&["n_epochs"], "train.epochs", number),
    part(
        &["n_examples"],
        Part::Examples,
        "it is `train.steps` here: rows of the whole run, divided by `train.batch_size`",
    ),
    part(&["n_eval_examples"], Part::EvalRows, "it is `data.eval_rows` here"),
    part(
        &["eval_every"],
        Part::EvalExamples,
        "it is `train.eval_every` here, in steps: rows divided by `train.batch_size`",
    ),
    part(&["batch_size"], Part::Batch, "it is `train.batch_size` here, the rows of a step over all ranks"),
    not_needed(&["eval_batch_size"], "evaluation has the micro-batches of `train.micro_batch_tokens`"),
    part(&["do_first_eval"], Part::EvalFirst, "it is `train.eval_first` here, true unless given"),
    not_needed(
        &["sample_during_eval"],
        "three prompts are answered at each evaluation; `train.samples` says how many",
    ),
    key(&["n_eval_model_samples"], "train.samples", count),
    key_but(
        &["trainer"],
        "compute.sharding",
        |value| match value.as_str() {
            Some("BasicTrainer") => Converted::Changed("ddp".into(), "layers are not spread over GPUs"),
            Some("FSDPTrainer") => Converted::Value("zero3".into()),
            Some("TensorParallelTrainer") => {
                Converted::Missing("set `compute.tensor` to the number of ranks that share a layer")
            }
            _ => Converted::Wrong("\"BasicTrainer\", \"FSDPTrainer\" or \"TensorParallelTrainer\""),
        },
        "\"zero3\" is FSDPTrainer",
    ),
    key_but(
        &["warmup_steps"],
        "train.warmup_steps",
        count,
        "step i of w has (i + 1) / (w + 1) of the rate there, i / w here",
    ),
    key(&["weight_decay"], "train.weight_decay", number),
    key(&["max_grad_norm"], "train.max_grad_norm", number),
    key_but(
        &["optimizer"],
        "train.optimizer",
        |value| match value.as_str() {
            Some("RMSprop") => Converted::Value("rmsprop".into()),
            Some("AdamW") => Converted::Value("adamw".into()),
            Some("Adam") => Converted::Changed("adamw".into(), "without weight decay the two are the same"),
            _ => Converted::Missing("optimisers are those of `train.optimizer`"),
        },
        "\"adamw\" or \"rmsprop\"",
    ),
    part(
        &["activation_checkpointing"],
        Part::Checkpointing,
        "it is `compute.checkpointing` here: \"none\", \"selective\" or \"block\"",
    ),
    key(&["exp_name"], "logging.run", name),
    part(&["wandb.enabled"], Part::UseWandb, WANDB),
    part(&["wandb.project"], Part::WandbProject, WANDB),
    part(&["wandb.entity"], Part::WandbEntity, WANDB),
    not_needed(
        &["local_dirs", "local_run_dir", "debug", "minimum_log_interval_secs", "fsdp_port", "hydra.run.dir"],
        "the run's folder, `output`, has every step in metrics.jsonl",
    ),
];
