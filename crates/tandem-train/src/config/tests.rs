//! One test for each thing a config may get wrong, and that a right one arrives whole.

use std::fs;
use std::path::{Path, PathBuf};

use tandem_kernels::StateForm;
use tempfile::TempDir;

use super::*;
use crate::schedule::Shape;

/// The example of the documentation, which must stay valid for ever.
const EXAMPLE: &str = r#"method = "dpo"                        # sft | dpo | online
model = "models/llama-small"          # an HF folder
output = "runs/first"
seed = 42
[reference]
kind = "model"                        # precompute | base | adapter | model | sync | none
model = "models/llama-small-ref"      # for model, and for precompute from other weights than the policy's
[data]
train = "data/pref_conv.jsonl"        # a path, a list of paths, or tables with path and weight
eval = "data/held_out.jsonl"
max_length = 1024
order = "shuffled"                    # or "sequential"
[objective]
loss = "sigmoid"                      # or a table of loss = weight
beta = 0.1
[train]
batch_size = 8                        # pairs (rows, for SFT) per optimiser step, over all ranks
micro_batch_tokens = 4096             # or micro_batch_size = pairs
steps = 20                            # or epochs
optimizer = "adamw"
learning_rate = 1e-4
schedule = "linear"
warmup_steps = 4
max_grad_norm = 1.0
weight_decay = 0.0
save_every = 10
eval_every = 10
[compute]
devices = "cpu"                       # "auto", "cpu", "cpu:4", "cuda", "cuda:0,1"
dtype = "f32"                         # compute type; masters are f32
threads = 2
"#;

mod adapters;

const SMALL_SFT: &str = r#"
method = "sft"
model = "m"
output = "o"
data.train = "t.jsonl"
train = { batch_size = 2, steps = 3, learning_rate = 1 }
"#;

fn load_with(text: &str, overrides: &[&str]) -> (TempDir, Result<Config, ConfigError>) {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("run.toml");
    fs::write(&path, text).expect("written");
    let config = Config::load(&path, overrides);
    (folder, config)
}

fn load(text: &str) -> Config {
    load_with(text, &[]).1.unwrap_or_else(|e| panic!("{e}"))
}

fn set(overrides: &[&str]) -> Config {
    load_with(EXAMPLE, overrides).1.unwrap_or_else(|e| panic!("{e}"))
}

/// The message without the folder's name.
fn refusal(text: &str, overrides: &[&str]) -> String {
    let (folder, config) = load_with(text, overrides);
    let error = config.expect_err("this config must be refused").to_string();
    error.replace(&format!("{}/", folder.path().display()), "")
}

/// `EXAMPLE` with one line's beginning replaced.
fn changed(from: &str, to: &str) -> String {
    assert_eq!(EXAMPLE.matches(from).count(), 1, "{from}");
    EXAMPLE.replace(from, to)
}

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
            max_length: 1024,
            truncation: tandem_data::row::Truncation::KeepStart,
            order: Order::Shuffled,
            cache: None,
            share_prefix: true,
            loss_on: tandem_data::row::LossOn::Answer,
        },
        objective: ObjectiveConfig {
            terms: vec![crate::objective::Term {
                loss: crate::objective::registry::find("sigmoid").expect("registered"),
                weight: 1.0,
            }],
            beta: 0.1,
            label_smoothing: 0.0,
            reference_free: false,
            discopop_tau: 0.05,
            divergence: crate::objective::Divergence::ReverseKl,
        },
        train: TrainConfig {
            batch_size: 8,
            micro_batch: MicroBatch::Tokens(4096),
            length: Length::Steps(20),
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
            optimizer_state: StateForm::F32,
            learning_rate: 1e-4,
            schedule: Shape::Linear,
            warmup: Warmup::Steps(4),
            max_grad_norm: Some(1.0),
            weight_decay: 0.0,
            save_every: Some(10),
            async_checkpoints: true,
            eval_every: Some(10),
            keep: Some(2),
            max_skipped: 3,
            record_rows: false,
        },
        compute: ComputeConfig {
            format: None,
            devices: Devices::Cpu(1),
            dtype: Some(tandem_kernels::DType::F32),
            threads: Some(2),
            reduction: crate::store::SumForm::Exact,
            sharding: crate::store::Sharding::Ddp,
            replicate: 1,
            tensor: 1,
            pipeline: 1,
            checkpointing: Checkpointing::None,
            memory: None,
            engine: Engine::Auto,
            deadline: 1800,
            offload: crate::homes::Offload::None,
            offload_dir: None,
            offload_activations: false,
        },
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
        set(&["data.train=['a', {path = 'b'}]", "data.order=sequential", "data.share_prefix=false"]),
        set(&[
            "train.max_grad_norm=0",
            "train.keep=0",
            "train.save_every=0",
            "train.async_checkpoints=false",
            "compute.checkpointing=selective",
        ]),
        set(&["compute.devices=cpu:4", "compute.reduction=fast", "compute.sharding=zero1"]),
        set(&["compute.deadline=60", "compute.tensor=4", "compute.replicate=2", "compute.pipeline=3"]),
        set(&["compute.deadline=60", "compute.engine=nccl", "compute.memory=1.5GiB"]),
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
        set(&["train.optimizer=rmsprop", "train.optimizer_state=8bit"]),
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
    assert_eq!((changed.train.micro_batch, changed.compute.memory), (MicroBatch::Tokens(99), Some(2 << 30)));
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
    assert_eq!((config.train.micro_batch, config.train.warmup), (MicroBatch::Tokens(4096), Warmup::Steps(0)));
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
    assert_eq!(config.train.micro_batch, MicroBatch::Rows(2));
    assert_eq!(config.train.warmup, Warmup::Ratio(0.25));
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
fn a_missing_file_is_named() {
    let error = Config::load::<&str>(Path::new("no/such/run.toml"), &[]).expect_err("no file").to_string();
    assert!(error.starts_with("no/such/run.toml: cannot read the config file"), "{error}");
}

#[test]
fn broken_toml_names_file_and_line() {
    let text = refusal(&changed("seed = 42", "seed = 4 2"), &[]);
    assert!(text.starts_with("run.toml:4: not valid TOML"), "{text}");
}

#[test]
fn a_key_given_twice_is_refused() {
    let text = refusal(&changed("seed = 42", "seed = 42\nseed = 43"), &[]);
    assert!(text.starts_with("run.toml:5: not valid TOML"), "{text}");
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    assert_eq!(
        refusal(&changed("seed = 42", "sed = 42"), &[]),
        "run.toml:4: unknown key `sed`; did you mean `seed`?"
    );
    assert_eq!(
        refusal(&changed("eval_every = 10", "evaluate_every = 10"), &[]),
        "run.toml:27: unknown key `train.evaluate_every`; did you mean `train.eval_every`?"
    );
    assert_eq!(
        refusal(EXAMPLE, &["train.lr=1e-3"]),
        "--set train.lr=1e-3: unknown key `train.lr`; known here: batch_size, micro_batch_tokens, micro_batch_size, \
         steps, epochs, optimizer, betas, alpha, eps, optimizer_state, learning_rate, schedule, warmup_steps, warmup_ratio, \
         max_grad_norm, weight_decay, save_every, async_checkpoints, eval_every, keep, max_skipped, record_rows"
    );
}

#[test]
fn a_key_that_has_moved_is_refused_with_its_new_name() {
    assert_eq!(
        refusal(EXAMPLE, &["train.checkpointing=none"]),
        "--set train.checkpointing=none: `train.checkpointing`: it is `compute.checkpointing` now; write it there"
    );
}

#[test]
fn offloading_says_where_to_and_what_it_goes_with() {
    assert_eq!(
        refusal(EXAMPLE, &["compute.offload=nvme"]),
        "run.toml:28: `compute.offload_dir` is missing: give a folder on the disk that weights and states are offloaded to"
    );
    assert_eq!(
        refusal(EXAMPLE, &["compute.offload=host", "compute.offload_dir=/scratch"]),
        "--set compute.offload_dir=/scratch: `compute.offload_dir`: it is for what is offloaded to a disk; set \
         compute.offload to \"nvme\", or leave it out"
    );
    for checkpointing in ["none", "selective"] {
        let checkpointing = format!("compute.checkpointing={checkpointing}");
        let text = refusal(EXAMPLE, &["compute.offload_activations=true", &checkpointing]);
        assert!(text.contains("set compute.checkpointing to \"block\""), "{text}");
    }
}

#[test]
fn an_unknown_table_is_refused() {
    let text = refusal(&changed("[compute]", "[computer]"), &[]);
    assert_eq!(text, "run.toml:28: unknown key `computer`; did you mean `compute`?");
}

#[test]
fn an_unknown_key_in_a_nested_table_is_refused() {
    let text = refusal(EXAMPLE, &["data.train=[{path='a', wieght=2}]"]);
    assert!(
        text.ends_with("unknown key `data.train[0].wieght`; did you mean `data.train[0].weight`?"),
        "{text}"
    );
}

#[test]
fn a_wrong_type_is_refused_with_key_expected_and_found() {
    assert_eq!(
        refusal(&changed("batch_size = 8 ", "batch_size = \"8\" "), &[]),
        "run.toml:17: `train.batch_size`: expected an integer from 1 to 16777216, found the string \"8\""
    );
    assert_eq!(
        refusal(&changed("[compute]\n", "[[compute]]\n"), &[]),
        "run.toml:28: `compute`: expected a table, found a list"
    );
    assert_eq!(
        refusal(EXAMPLE, &["model=3"]),
        "--set model=3: `model`: expected a string, found the integer 3"
    );
    let date = refusal(EXAMPLE, &["seed=2026-01-01"]);
    assert_eq!(
        date,
        "--set seed=2026-01-01: `seed`: expected an integer of at least 0, found the date 2026-01-01"
    );
}

#[test]
fn values_out_of_range_are_refused() {
    let cases = [
        ("train.batch_size=0", "an integer from 1 to 16777216, found the integer 0"),
        ("train.steps=-1", "an integer of at least 1, found the integer -1"),
        ("train.epochs=0.0", "a positive number, found the number 0.0"),
        ("train.learning_rate=nan", "a number of at least 0, found the number NaN"),
        ("train.learning_rate=inf", "a number of at least 0, found the number inf"),
        ("train.weight_decay=-0.1", "a number of at least 0, found the number -0.1"),
        ("train.warmup_ratio=1.5", "a number from 0 to 1, found the number 1.5"),
        ("train.betas=[0.9]", "two numbers in [0, 1), for example [0.9, 0.999], found a list"),
        ("train.betas=[0.9, 1.0]", "a number in [0, 1), found the number 1.0"),
        ("objective.beta=0", "a positive number, found the integer 0"),
        ("objective.label_smoothing=2", "a number from 0 to 1, found the integer 2"),
        ("data.max_length=1", "an integer from 2 to 16777216, found the integer 1"),
        ("seed=-3", "an integer of at least 0, found the integer -3"),
        ("compute.threads=-1", "an integer from 0 to 4096, found the integer -1"),
        (
            "data.train=[]",
            "a path, a list of paths, or a list of tables with `path` and `weight`, found a list",
        ),
        (
            "data.train=3",
            "a path, a list of paths, or a list of tables with `path` and `weight`, found the integer 3",
        ),
        ("model=''", "a path, found the string \"\""),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(&format!("expected {expected}")), "{set}: {text}");
    }
}

#[test]
fn an_integer_too_large_is_refused_and_not_wrapped() {
    let text = refusal(EXAMPLE, &["seed=99999999999999999999"]);
    assert!(text.contains("99999999999999999999"), "{text}");
}

#[test]
fn an_unknown_choice_lists_the_known_ones() {
    assert_eq!(
        refusal(EXAMPLE, &["train.schedule=linaer"]),
        "--set train.schedule=linaer: `train.schedule`: expected one of \"linear\", \"cosine\", \"constant\" (did you \
         mean \"linear\"?), found the string \"linaer\""
    );
    assert_eq!(
        refusal(EXAMPLE, &["train.optimizer_state=int8"]),
        "--set train.optimizer_state=int8: `train.optimizer_state`: expected one of \"f32\", \"bf16\", \"8bit\", found the \
         string \"int8\""
    );
    let loss = refusal(EXAMPLE, &["objective.loss={sigmod=1}"]);
    assert!(loss.contains("`objective.loss.sigmod`") && loss.contains("did you mean \"sigmoid\"?"), "{loss}");
}

#[test]
fn missing_keys_say_what_to_give() {
    let cases = [
        ("method = \"dpo\"", "`method` is missing: give how to train"),
        ("model = \"models/llama-small\" ", "`model` is missing: give an HF model folder"),
        ("output = \"runs/first\"", "`output` is missing"),
        ("train = \"data/pref_conv.jsonl\"", "`data.train` is missing: give a path, a list of paths"),
        ("batch_size = 8 ", "`train.batch_size` is missing"),
        ("learning_rate = 1e-4", "`train.learning_rate` is missing"),
        ("steps = 20 ", "`train.steps` is missing: give `steps` or `epochs`"),
    ];
    for (line, expected) in cases {
        let text = refusal(&changed(line, "#"), &[]);
        assert!(text.starts_with("run.toml") && text.contains(expected), "{line}: {text}");
    }
}

#[test]
fn what_is_not_there_yet_is_refused_and_never_ignored() {
    let cases = [
        ("method=online", "`method = \"online\"`: Online DPO is not there yet"),
        ("compute.devices=cuda", "GPUs are not there yet"),
        ("compute.devices=cuda:0,1", "GPUs are not there yet"),
        ("objective.loss=aot", "is not there yet"),
        ("objective.loss={sigmoid = 1, aot_unpaired = 1}", "is not there yet"),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.contains(expected), "{set}: {text}");
    }
    assert_eq!(set(&["compute.devices=cpu:1"]).compute.devices, Devices::Cpu(1));
    for nonsense in ["cuda:x", "cpu:0", "cpu:1000", "cpu:1,2"] {
        let text = refusal(EXAMPLE, &[&format!("compute.devices={nonsense}")]);
        assert!(text.contains("expected \"auto\", \"cpu\""), "{text}");
    }
}

#[test]
fn contradictions_are_refused() {
    let both = refusal(&changed("steps = 20 ", "epochs = 1\nsteps = 20 "), &[]);
    assert_eq!(both, "run.toml:19: `train.epochs`: `train.steps` is given too; remove one of the two");
    let cases: [(&[&str], &str); 14] = [
        (
            &["compute.devices=cpu:4", "compute.engine=nccl"],
            "devices = \"cpu:4\" are threads, and NCCL is for ranks that are processes",
        ),
        (&["compute.devices=cpu:2", "compute.engine=gloo"], "Gloo is for ranks that are processes"),
        (&["train.epochs=1", "train.steps=2"], "`train.steps` is given too"),
        (&["method=sft"], "under method = \"sft\" the only loss is \"sft\""),
        (&["method=sft", "objective.loss=sft"], "no meaning under method = \"sft\""),
        (&["objective.reference_free=true"], "leaves the reference unused"),
        (&["reference.kind=none"], "needs objective.reference_free = true"),
        (&["objective.loss=hinge", "objective.label_smoothing=0.1"], "hinge does not use it"),
        (&["objective.discopop_tau=0.1"], "only the loss \"discopop\" has it"),
        (&["objective.f_alpha_divergence_coef=0.3"], "only f_divergence_type = \"alpha_divergence\" has it"),
        (
            &["objective.loss=bco_pair", "objective.f_divergence_type=forward_kl"],
            "\"bco_pair\" is derived for",
        ),
        (&["method=sft", "objective.loss=sft", "objective.f_divergence_type=forward_kl"], "no meaning under"),
        (&["train.alpha=0.9"], "`alpha` belongs to \"rmsprop\""),
        (&["train.optimizer=rmsprop", "train.betas=[0.9, 0.99]"], "`betas` belong to \"adamw\""),
    ];
    for (overrides, expected) in cases {
        let text = refusal(EXAMPLE, overrides);
        assert!(text.contains(expected), "{overrides:?}: {text}");
    }
    let sft = refusal(&format!("{SMALL_SFT}\n[reference]\nkind = \"precompute\""), &[]);
    assert!(sft.contains("method = \"sft\" has no reference"), "{sft}");
    let unused = refusal(EXAMPLE, &["reference.kind=none", "objective.reference_free=true"]);
    assert!(unused.contains("a reference model is given, but there is no reference"), "{unused}");
}

#[test]
fn a_model_inside_the_runs_own_output_is_refused() {
    for (key, value) in
        [("model", "r/final"), ("reference.model", "r/final/"), ("weights", "r/checkpoints/policy.pt")]
    {
        let text = refusal(EXAMPLE, &["output=r", &format!("{key}={value}")]);
        assert!(text.starts_with(&format!("run.toml: `{key}`: it lies in what this run writes")), "{text}");
    }
    // A sibling run's result is the ordinary case.
    assert!(set(&["output=r", "model=r2/final"]).model.ends_with("r2/final"));
}

#[test]
fn label_smoothing_is_held_to_what_each_loss_can_take() {
    let half = refusal(EXAMPLE, &["objective.loss=robust", "objective.label_smoothing=0.5"]);
    assert!(half.contains("[0, 0.5)"), "{half}");
    let missing = refusal(EXAMPLE, &["objective.loss=exo_pair"]);
    assert!(missing.contains("`objective.label_smoothing` is missing"), "{missing}");
    let zero = refusal(EXAMPLE, &["objective.loss=exo_pair", "objective.label_smoothing=0"]);
    assert!(zero.contains("(0, 1)"), "{zero}");
    assert_eq!(set(&["objective.label_smoothing=0.5"]).objective.label_smoothing, 0.5);
}

#[test]
fn an_override_that_is_not_key_value_is_refused() {
    let cases = [
        ("train", "expected key=value"),
        ("=3", "is not a dotted key"),
        ("train..steps=3", "is not a dotted key"),
        ("seed.x=1", "is a value, not a table"),
        ("train.betas=[0.9", "not valid TOML"),
    ];
    for (set, expected) in cases {
        let text = refusal(EXAMPLE, &[set]);
        assert!(text.starts_with(&format!("--set {set}: ")) && text.contains(expected), "{set}: {text}");
    }
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

/// The reference page and the reader must name the same keys.
#[test]
fn the_documentation_lists_exactly_the_known_keys() {
    let page = include_str!("../../../../docs/config.md");
    let mut checked = 0;
    for section in page.split("\n## ").skip(1) {
        let heading = section.lines().next().expect("a heading");
        let table = heading.trim_matches(|c: char| !c.is_ascii_lowercase());
        let prefix = if heading.starts_with("At the top") { String::new() } else { format!("{table}.") };
        let mut documented: Vec<&str> = section
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
            .map(|(key, _)| key)
            .collect();
        if prefix.is_empty() {
            documented.extend(["adapter", "reference", "data", "objective", "train", "compute"]);
        }
        let (_folder, config) = load_with(EXAMPLE, &[&format!("{prefix}qqqqqqqq=1")]);
        let Problem::UnknownKey { mut known, .. } = config.expect_err("an unknown key").problem else {
            panic!("{heading}: another problem came first")
        };
        known.sort_unstable();
        documented.sort_unstable();
        assert_eq!(documented, known, "{heading}");
        checked += 1;
    }
    assert_eq!(checked, 7);
}
