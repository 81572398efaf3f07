//! Accepted configs and their values.

use std::path::PathBuf;

use tandem_kernels::{DType, StateForm};

use super::{EXAMPLE, SMALL_SFT, changed, load, load_with, set};
use crate::config::*;

#[test]
fn the_example_arrives_whole() {
    let (folder, config) = load_with(EXAMPLE, &[]);
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    let at = |p: &str| folder.path().join(p);
    let file = |p: &str| DataSource { path: at(p), weight: 1.0 };
    let expected = Config {
        method: Method::Dpo,
        model: at("models/llama-small"),
        weights: Weights::Folder,
        output: at("runs/first"),
        seed: 42,
        reference: ReferenceConfig {
            kind: ReferenceKind::Model,
            model: Some(at("models/llama-small-ref")),
            adapter: None,
            sync: Sync::default(),
        },
        adapter: None,
        data: DataConfig {
            train: vec![file("data/pref_conv.jsonl")],
            eval: vec![file("data/held_out.jsonl")],
            shape: None,
            columns: std::collections::BTreeMap::new(),
            ignore_columns: Vec::new(),
            take: None,
            train_rows: None,
            eval_rows: None,
            max_prompt_length: None,
            max_length: 1024,
            truncation: tandem_data::row::Truncation::KeepStart,
            order: Order::Shuffled,
            cache: None,
            share_prefix: true,
            chat_template: None,
            loss_on: tandem_data::row::LossMask::Answer,
        },
        online: None,
        distill: None,
        objective: ObjectiveConfig {
            grpo: None,
            distill: None,
            terms: vec![crate::objective::Term {
                loss: crate::objective::losses::find("sigmoid").expect("registered"),
                weight: 1.0,
            }],
            beta: 0.1,
            next_betas: Vec::new(),
            beta_every: None,
            label_smoothing: 0.0,
            reference_free: false,
            simpo_gamma: 0.5,
            dpop_lambda: 50.0,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
            ld_alpha: None,
            use_weighting: false,
            discopop_tau: 0.05,
            divergence: crate::objective::Divergence::ReverseKl,
            center_rewards_coefficient: None,
            exploration: 0.0,
        },
        train: TrainConfig {
            batch_size: 8,
            micro_batch: MicroBatchSize::Tokens(4096),
            length: Length::Steps(20),
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
            optimizer_state: StateForm::F32,
            learning_rate: 1e-4,
            schedule: Shape::Linear,
            warmup: Span::Steps(4),
            max_grad_norm: Some(1.0),
            weight_decay: 0.0,
            ema_decay: None,
            neftune_noise_alpha: None,
            groups: Vec::new(),
            save_every: Some(10),
            async_checkpoints: true,
            eval_every: Some(10),
            evaluation: EvaluationConfig {
                eval_first: true,
                samples: SampleCount::Auto,
                sample_tokens: 64,
                keep_best: None,
                early_stopping_patience: None,
                early_stopping_threshold: 0.0,
            },
            keep: Some(2),
            max_skipped: 3,
            record_rows: false,
        },
        compute: ComputeConfig {
            format: None,
            devices: Devices::Cpu(1),
            dtype: Some(DType::F32),
            tf32: false,
            residual: DType::F32,
            attention: AttentionKernels::Mma,
            fp8_matmul: false,
            fp8_backward: false,
            matmul_autotune: true,
            threads: Some(2),
            reduction: SumForm::Exact,
            reduce_dtype: DType::F32,
            sum_blocks: None,
            sharding: Sharding::Ddp,
            replicate: 1,
            tensor: 1,
            pipeline: 1,
            checkpointing: Checkpointing::None,
            memory: None,
            engine: Engine::Auto,
            deadline: 1800,
            meeting_deadline: 600,
            offload: Offload::None,
            offload_dir: None,
            offload_activations: false,
        },
        logging: LoggingConfig {
            run: "first".to_owned(),
            tensorboard: None,
            command: Vec::new(),
            grace_s: 15.0,
            mlflow: None,
        },
        judges: Vec::new(),
    };
    assert_eq!(config, expected);
}

/// Every enumerated choice once, every optional key given: what is written out must read back as the same value.
#[test]
fn the_resolved_config_reads_back_as_the_same_value() {
    let configs = [
        set(&[]),
        load(SMALL_SFT),
        set(&[
            "weights=random",
            "train.epochs=2.5",
            "train.micro_batch_size=3",
            "train.warmup_ratio=0.1",
            "data.cache=c",
        ]),
        set(&["weights=policy.pt", "train.optimizer=rmsprop", "train.alpha=0.95", "train.schedule=cosine"]),
        set(&[
            "objective.loss={ discopop = 1, robust = 0.25 }",
            "objective.label_smoothing=0.1",
            "objective.discopop_tau=0.2",
        ]),
        set(&["objective.f_divergence_type=js_divergence", "data.truncation=keep_end"]),
        set(&["objective.f_divergence_type=alpha_divergence", "objective.f_alpha_divergence_coef=0.3"]),
        set(&["data.train=['a', {path = 'b', weight = 0.5}]", "data.eval={path = 'c', weight = 2}"]),
        set(&["data.train=['a', {path = 'b'}]", "data.order=sequential", "data.share_prefix=false"]),
        set(&[
            "train.max_grad_norm=0",
            "train.keep=0",
            "train.save_every=0",
            "train.async_checkpoints=false",
            "compute.checkpointing=selective",
        ]),
        set(&["compute.devices=cpu:4", "compute.reduction=fast", "compute.sharding=zero1"]),
        set(&["data.chat_template=chat.jinja"]),
        set(&["data.chat_template={{ messages }}"]),
        set(&["data.chat_template={%- for m in messages -%}{{ m.content }}{%- endfor -%}"]),
        set(&["data.chat_template='''{% for m in messages %}\n{{ m.content }}{% endfor %}'''"]),
        set(&["compute.deadline=60", "compute.tensor=4", "compute.replicate=2", "compute.pipeline=3"]),
        set(&["compute.deadline=60", "compute.engine=nccl", "compute.memory=1.5GiB"]),
        set(&["compute.devices=cuda", "compute.tf32=true"]),
        set(&["adapter.rank=4", "compute.devices=cuda", "compute.format=fp8", "compute.fp8_matmul=true"]),
        set(&[
            "adapter.rank=4",
            "compute.devices=cuda",
            "compute.format=fp8",
            "compute.fp8_matmul=true",
            "compute.fp8_backward=true",
        ]),
        set(&["compute.offload=host", "compute.offload_activations=true", "compute.checkpointing=block"]),
        set(&["compute.offload=nvme", "compute.offload_dir=scratch"]),
        set(&["compute.devices=auto", "compute.dtype=auto", "compute.threads=0", "train.schedule=constant"]),
        set(&[
            "reference.kind=precompute",
            "train.betas=[0.8, 0.95]",
            "train.eps=1e-6",
            "compute.checkpointing=block",
        ]),
        set(&["train.optimizer_state=bf16"]),
        set(&[
            "data.shape=orca",
            "data.columns={ question = 'q', chosen = 'good' }",
            "data.ignore_columns=['a', 'b']",
        ]),
        set(&["data.train_rows=5", "data.eval=e", "data.eval_rows=3", "data.max_prompt_length=256"]),
        load_with(SMALL_SFT, &["data.take=chosen", "data.shape=hh"]).1.expect("valid"),
        set(&["train.optimizer=rmsprop", "train.optimizer_state=8bit"]),
        set(&["train.optimizer=lion", "train.betas=[0.8, 0.95]"]),
        set(&["train.optimizer=lion"]),
        set(&["train.ema_decay=0.999"]),
        set(&["train.neftune_noise_alpha=5"]),
        set(&["train.optimizer=muon"]),
        set(&["train.optimizer=adafactor"]),
        set(&[
            "train.optimizer=muon",
            "train.momentum=0.9",
            "train.nesterov=false",
            "train.adjust_lr_fn=original",
        ]),
        set(&["train.optimizer=schedule_free_adamw", "train.schedule=constant", "train.betas=[0.95, 0.99]"]),
        set(&["train.optimizer=sgd"]),
        set(&["train.optimizer=sgd", "train.momentum=0.9", "train.nesterov=true"]),
        set(&["train.optimizer=sgd", "train.momentum=0.9", "train.dampening=0.1", "train.nesterov=false"]),
        set(&["train.groups=[{ parameters = 'norm|bias', learning_rate_factor = 2, weight_decay = 0.1 }]"]),
        set(&["train.groups=[{ parameters = 'embed', frozen = true }, { parameters = '.' }]"]),
        set(&["train.schedule=cosine_with_min_lr", "train.min_lr_rate=0.2"]),
        set(&["train.schedule=cosine_with_restarts", "train.num_cycles=3"]),
        set(&["train.schedule=polynomial", "train.lr_end=1e-9", "train.power=2"]),
        set(&["train.schedule=inverse_sqrt", "train.timescale=30"]),
        set(&["train.schedule=inverse_sqrt"]),
        set(&["train.schedule=warmup_stable_decay", "train.decay_steps=3", "train.decay_type=1-sqrt"]),
        set(&["train.schedule=warmup_stable_decay", "train.decay_ratio=0.2", "train.min_lr_rate=0.2"]),
    ];
    for config in configs {
        let text = config.to_toml();
        assert_eq!(load(&text), config, "{text}");
    }
}

#[test]
fn a_config_takes_overrides_after_it_was_read() {
    let config = set(&["train.micro_batch_size=4"]);
    assert_eq!(config.with::<&str>(&[]).expect("valid"), config);
    let changed = config.with(&["train.micro_batch_tokens=99", "compute.memory=2GiB"]).expect("valid");
    assert_eq!(
        (changed.train.micro_batch, changed.compute.memory),
        (MicroBatchSize::Tokens(99), Some(2 << 30))
    );
    assert!(matches!(
        config.with(&["compute.nothing=1"]).expect_err("unknown").problem,
        Problem::UnknownKey { .. }
    ));
}

#[test]
fn defaults_are_those_of_the_documentation() {
    let config = load(SMALL_SFT);
    assert_eq!((config.seed, config.method), (42, Method::Sft));
    assert_eq!(config.objective.terms[0].loss.name, "sft");
    assert_eq!((config.reference.kind, &config.reference.model), (ReferenceKind::None, &None));
    assert_eq!((config.data.max_length, config.data.order), (1024, Order::Shuffled));
    assert_eq!(
        (config.train.micro_batch, config.train.warmup),
        (MicroBatchSize::Tokens(4096), Span::Steps(0))
    );
    assert_eq!((config.train.max_grad_norm, config.train.save_every), (Some(1.0), None));
    assert_eq!(
        (config.compute.devices, config.compute.dtype, config.compute.threads),
        (Devices::Auto, None, None)
    );
    let dpo = load(&changed("[reference]\nkind = \"model\" ", "[reference]\nkind = \"precompute\" "));
    assert_eq!(dpo.reference.kind, ReferenceKind::Precompute);
}

#[test]
fn paths_are_relative_to_the_file_and_overridden_ones_to_the_current_directory() {
    let (folder, config) =
        load_with(&changed("models/llama-small\" ", "../m/./x\" "), &["data.eval=held.jsonl"]);
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.model, folder.path().parent().expect("a parent").join("m/x"));
    assert_eq!(config.data.eval[0].path, std::env::current_dir().expect("a directory").join("held.jsonl"));
    let absolute = set(&["model=/abs/model"]);
    assert_eq!(absolute.model, PathBuf::from("/abs/model"));
}

#[test]
fn overrides_take_toml_and_bare_words_and_the_last_one_wins() {
    let config = set(&["train.learning_rate=1e-3", "objective.loss=ipo", "seed = 1", "seed=2"]);
    assert_eq!((config.train.learning_rate, config.seed), (1e-3, 2));
    assert_eq!(config.objective.terms[0].loss.name, "ipo");
    let quoted = set(&["objective.loss=\"hinge\"", "train.max_skipped=0"]);
    assert_eq!((quoted.objective.terms[0].loss.name, quoted.train.max_skipped), ("hinge", 0));
}

#[test]
fn an_override_replaces_the_alternative_that_the_file_chose() {
    let config = set(&["train.epochs=3", "train.micro_batch_size=2", "train.warmup_ratio=0.25"]);
    assert_eq!(config.train.length, Length::Epochs(3.0));
    assert_eq!(config.train.micro_batch, MicroBatchSize::Rows(2));
    assert_eq!(config.train.warmup, Span::Ratio(0.25));
}

#[test]
fn epochs_count_a_short_last_batch_and_ratios_round_up() {
    assert_eq!(Length::Epochs(1.0).total_steps(17, 8), 3);
    assert_eq!(Length::Epochs(2.5).total_steps(16, 8), 5);
    assert_eq!(Length::Epochs(0.1).total_steps(16, 8), 1);
    assert_eq!(Length::Steps(7).total_steps(16, 8), 7);
    assert_eq!(set(&["train.warmup_ratio=0.11"]).train.schedule(20).warmup_steps, 3);
}

#[test]
fn changes_since_a_saved_run_are_listed_by_key() {
    let (folder, saved) = load_with(EXAMPLE, &[]);
    let saved = saved.unwrap_or_else(|e| panic!("{e}"));
    let path = folder.path().join("run.toml");
    let changed =
        ["train.learning_rate=2e-4", "compute.threads=1", "train.epochs=1", "train.optimizer_state=8bit"];
    let now = Config::load(&path, &changed).expect("valid");
    assert_eq!(saved.changes_since(&saved), []);
    let changes = now.changes_since(&saved);
    let found: Vec<_> =
        changes.iter().map(|c| (&c.key[..], c.saved.as_deref(), c.now.as_deref(), c.alters_run)).collect();
    assert_eq!(
        found,
        [
            ("compute.threads", Some("2"), Some("1"), false),
            ("train.epochs", None, Some("1.0"), true),
            ("train.learning_rate", Some("0.0001"), Some("0.0002"), true),
            ("train.optimizer_state", Some("\"f32\""), Some("\"8bit\""), true),
            ("train.steps", Some("20"), None, true),
        ]
    );
}
