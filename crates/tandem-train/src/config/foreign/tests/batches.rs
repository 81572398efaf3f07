//! Translations of batches, schedules, devices and commands.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::config::Draft;

const TRL: &str = "model_name_or_path: m\ndataset_name: d.jsonl\nlearning_rate: 1e-5\n";
const AXOLOTL: &str =
    "base_model: m\nmicro_batch_size: 2\nlearning_rate: 1e-5\ndatasets:\n  - path: d.jsonl\n";

/// Translates files in one folder; the first is given with `--from`.
fn translated(files: &[(&str, &str)], answers: &Answers) -> Result<Translation> {
    let folder = tempfile::Builder::new().prefix("files").tempdir().unwrap();
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| folder.path().join(name)).collect();
    for (path, (_, text)) in paths.iter().zip(files) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    translate(&paths[..1], None, answers, &Rows(None))
}

fn with_data() -> Answers {
    Answers { model: Some("m".to_owned()), train: vec!["d.jsonl".to_owned()], ..Answers::default() }
}

fn draft(files: &[(&str, &str)]) -> Draft {
    translated(files, &with_data()).unwrap_or_else(|error| panic!("{error}")).draft
}

fn error(files: &[(&str, &str)]) -> String {
    match translated(files, &with_data()) {
        Ok(_) => panic!("no error"),
        Err(error) => error.to_string(),
    }
}

/// A key with its comment.
fn key(draft: &Draft, name: &str) -> String {
    let found = draft.keys.iter().find(|key| key.key == name);
    found.map_or(String::new(), |key| format!("{} # {}", key.value, key.comment))
}

fn missing(draft: &Draft) -> Vec<String> {
    draft.missing.iter().map(|remark| format!("{}: {}", remark.setting, remark.reason)).collect()
}

fn not_needed(draft: &Draft) -> Vec<String> {
    draft.not_needed.iter().map(|remark| format!("{}: {}", remark.setting, remark.reason)).collect()
}

fn has(remarks: &[String], start: &str) -> bool {
    remarks.iter().any(|remark| remark.starts_with(start))
}

#[test]
fn a_command_without_settings_is_an_error() {
    for text in ["python train.py", "trl dpo", "torchrun --standalone train.py"] {
        let error = error(&[("a.sh", text)]);
        assert!(error.contains("the command has no settings"), "{error}");
    }
}

#[test]
fn batches_beyond_all_numbers_are_an_error() {
    let large = "per_device_train_batch_size: 9000000000000\ngradient_accumulation_steps: 9000000000000\n";
    let error = error(&[("sft.yaml", &format!("{TRL}{large}"))]);
    assert!(error.contains("fewer rows of a step than"), "{error}");
    let answers = Answers { ranks: Some(u64::MAX), ..with_data() };
    assert!(translated(&[("sft.yaml", TRL)], &answers).is_err());
    let command = "torchrun --nnodes 9000000000000 --nproc_per_node 9000000000000 sft.py --max_length 8";
    assert!(translated(&[("a.sh", command)], &with_data()).is_err());
}

#[test]
fn the_files_name_says_the_method_before_beta_does() {
    let with = |name: &str, more: &str| translated(&[(name, &format!("{TRL}{more}"))], &with_data());
    for (name, more, method) in [
        ("orpo.yaml", "beta: 0.1\n", "dpo"),
        ("kto.yaml", "beta: 0.1\n", "kto"),
        ("recipes/kto/full.yaml", "beta: 0.1\n", "kto"),
        ("run.yaml", "beta: 0.1\nreward_funcs: [a]\n", "grpo"),
        ("run.yaml", "beta: 0.1\nuse_vllm: true\n", "grpo"),
        ("sft.yaml", "beta: 0.1\n", "dpo"),
        ("sft.yaml", "", "sft"),
    ] {
        let draft = with(name, more).unwrap_or_else(|error| panic!("{name}: {error}")).draft;
        assert_eq!(draft.get("method"), Some(&method.into()), "{name}");
    }
    let orpo = with("orpo/full.yaml", "beta: 0.1\n").unwrap().draft;
    assert_eq!(
        orpo.get("objective.loss").map(ToString::to_string).as_deref(),
        Some("{ orpo = 1.0, sft = 1.0 }")
    );
    let error = with("ppo.yaml", "beta: 0.1\n").err().unwrap().to_string();
    assert!(error.contains("\"ppo\" cannot be had"), "{error}");
    let error = with("simpo.yaml", "beta: 2.5\ngamma_beta_ratio: 0.55\n").err().unwrap().to_string();
    assert!(error.contains("SimPO's own code"), "{error}");
    let assumed = |more: &str| key(&with("run.yaml", more).unwrap().draft, "method");
    assert!(assumed("beta: 0.1\n").contains("assumed"));
    assert!(!assumed("beta: 0.1\nloss_type: sigmoid\n").contains("assumed"));
}

#[test]
fn ranks_that_share_a_batch_count_once() {
    let accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\n";
    let batch = |more: &str| {
        let run = format!("{TRL}per_device_train_batch_size: 4\n");
        let launcher = format!("{accelerate}{more}");
        let command = "accelerate launch --config_file launcher.yaml sft.py --config run.yaml";
        translated(&[("a.sh", command), ("launcher.yaml", &launcher), ("run.yaml", &run)], &with_data())
    };
    for (more, rows) in [
        ("", 32),
        ("parallelism_config:\n  parallelism_config_tp_size: 4\n", 8),
        ("parallelism_config:\n  parallelism_config_cp_size: 2\n", 16),
        ("parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_sp_size: 4\n", 4),
    ] {
        let draft = batch(more).unwrap().draft;
        assert_eq!(draft.get("train.batch_size"), Some(&rows.into()), "{more}");
        assert_eq!(has(&missing(&draft), "parallelism_config"), more.contains("cp") || more.contains("sp"));
    }
    let error = batch("parallelism_config:\n  parallelism_config_tp_size: 3\n").err().unwrap().to_string();
    assert!(error.contains("a multiple of 3 ranks"), "{error}");
    let axolotl = format!("{AXOLOTL}tensor_parallel_size: 2\ncontext_parallel_size: 2\n");
    let draft = translated(&[("a.yml", &axolotl)], &Answers { ranks: Some(8), ..with_data() }).unwrap().draft;
    assert_eq!(
        key(&draft, "train.batch_size"),
        "4 # micro_batch_size 2 × 1 accumulated × 2 ranks, 8 / 4 of one batch"
    );
    assert!(has(&missing(&draft), "context_parallel_size = 2"));
}

#[test]
fn schedule_and_optimiser_of_deepspeed_win() {
    let json = "{\"zero_optimization\": {\"stage\": 2}, \"optimizer\": {\"type\": \"Lion\"}, \"scheduler\": {\"type\": \"WarmupLR\"}}";
    let run = format!("{TRL}deepspeed: ds.json\nlr_scheduler_type: cosine\noptim: adamw_torch\n");
    let draft = draft(&[("sft.yaml", &run), ("ds.json", json)]);
    assert_eq!(key(&draft, "train.schedule"), "\"constant\" # scheduler.type = WarmupLR");
    assert_eq!(draft.get("train.optimizer"), Some(&"lion".into()));
    let remarks = not_needed(&draft);
    assert!(has(&remarks, "lr_scheduler_type = cosine: `scheduler.type = WarmupLR` wins"), "{remarks:?}");
    assert!(has(&missing(&draft), "scheduler.type = WarmupLR: its warm-up"));
}

#[test]
fn two_settings_with_one_meaning_are_told() {
    let axolotl = draft(&[("a.yml", &format!("{AXOLOTL}float16: true\nfp16: false\nbf16: false\n"))]);
    assert!(has(&missing(&axolotl), "float16 = true: f16 is not supported"), "{:?}", missing(&axolotl));
    assert!(has(&not_needed(&axolotl), "fp16 = false"));
    for text in ["rl_beta: 0.3\norpo_alpha: 0.1\n", "orpo_alpha: 0.1\nrl_beta: 0.3\n"] {
        let draft = draft(&[("a.yml", &format!("{AXOLOTL}rl: orpo\n{text}"))]);
        assert_eq!(draft.get("objective.beta"), Some(&0.3.into()));
        assert!(has(&missing(&draft), "orpo_alpha = 0.1: `rl_beta = 0.3`"), "{:?}", missing(&draft));
    }
    let trl = draft(&[(
        "sft.yaml",
        &format!("{TRL}lr: 2e-5\nmax_length: 8\nmax_seq_length: 9\nnum_epochs: 1\nnum_train_epochs: 1.0\n"),
    )]);
    let remarks = missing(&trl);
    assert!(has(&remarks, "learning_rate = 0.00001: `lr = 0.00002`"), "{remarks:?}");
    assert!(has(&remarks, "max_length = 8"), "{remarks:?}");
    assert!(!has(&remarks, "num_epochs"), "{remarks:?}");
    // The command's settings win over the file's, as there.
    let command = draft(&[("a.sh", "trl sft --config run.yaml --learning_rate 3e-5"), ("run.yaml", TRL)]);
    assert_eq!(command.get("train.learning_rate"), Some(&3e-5.into()));
    let remarks = not_needed(&command);
    assert!(has(&remarks, "learning_rate = 0.00001: `learning_rate = "), "{remarks:?}");
}

#[test]
fn options_of_trls_launcher_are_read() {
    for files in [
        &[("a.sh", "trl sft --model_name_or_path m --num_processes 4 --accelerate_config zero2")][..],
        &[("sft.yaml", "model_name_or_path: m\nnum_processes: 4\naccelerate_config: zero2\n")][..],
        &[
            ("a.sh", "trl sft --model_name_or_path m --num_processes 4 --accelerate_config a.yaml"),
            ("a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"),
        ][..],
    ] {
        let draft = draft(files);
        assert!(draft.unknown.is_empty(), "{:?}", draft.unknown);
        assert_eq!(
            key(&draft, "train.batch_size"),
            "32 # 8 per device by TRL's default × 1 accumulated × 4 ranks"
        );
        assert_eq!(draft.get("compute.sharding"), Some(&"zero2".into()));
        assert!(!has(&missing(&draft), "accelerate_config"));
    }
    let ranks = |profile: &str| {
        let text = format!("{TRL}accelerate_config: {profile}\n");
        let read = translated(&[("sft.yaml", &text)], &with_data()).unwrap();
        (read.ranks, read.draft.get("compute.sharding").and_then(toml::Value::as_str).map(str::to_owned))
    };
    assert_eq!(ranks("single_gpu"), (1, None));
    assert_eq!(ranks("multi_gpu"), (8, None));
    assert_eq!(ranks("fsdp2"), (8, Some("zero3".to_owned())));
    let unknown = draft(&[("sft.yaml", &format!("{TRL}accelerate_config: ours\n"))]);
    assert!(has(&missing(&unknown), "accelerate_config = ours: the file is not here"));
}

#[test]
fn ranks_of_other_launchers_are_counted() {
    let llama =
        "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: qwen\ndataset: d.jsonl\n";
    for (command, ranks) in [
        ("deepspeed --include localhost:0,1,2,3 sft.py --config run.yaml", 4),
        ("deepspeed --include a:0,1@b:2 sft.py --config run.yaml", 3),
        ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train llama.yaml", 16),
        ("export NPROC_PER_NODE=4\nllamafactory-cli train llama.yaml", 4),
        ("axolotl train axolotl.yml --launcher torchrun -- --nproc_per_node=2", 2),
        ("axolotl train axolotl.yml --launcher accelerate -- --num_processes=3", 3),
    ] {
        let files = [("a.sh", command), ("run.yaml", TRL), ("llama.yaml", llama), ("axolotl.yml", AXOLOTL)];
        let read = translated(&files, &with_data()).unwrap_or_else(|error| panic!("{command}: {error}"));
        assert_eq!(read.ranks, ranks, "{command}");
        assert!(read.draft.unknown.is_empty(), "{command}: {:?}", read.draft.unknown);
        assert!(!key(&read.draft, "train.batch_size").contains("no file says"), "{command}");
    }
}

/// Held-out rows of another file, and settings that say when to use them.
fn with_eval(more: &str) -> Draft {
    let text = format!("{TRL}eval_dataset: e.jsonl\n{more}");
    translated(&[("sft.yaml", &text)], &Answers { ranks: Some(1), ..with_data() }).unwrap().draft
}

#[test]
fn evaluations_and_checkpoints_without_a_number_have_that_of_transformers() {
    let draft = with_eval("eval_strategy: steps\nlogging_steps: 25\nsave_strategy: steps\n");
    assert_eq!(key(&draft, "train.eval_every"), "25 # eval_strategy = steps, without a number of steps");
    assert_eq!(draft.get("train.save_every"), Some(&500.into()));
    let best = "load_best_model_at_end: true\nmetric_for_best_model: eval_loss\nsave_strategy: best\n";
    let draft = with_eval(&format!("eval_strategy: steps\n{best}"));
    assert_eq!(draft.get("train.eval_every"), Some(&10.into()));
    assert_eq!(draft.get("train.keep_best"), Some(&"eval/loss".into()));
    assert_eq!(draft.get("train.save_every"), None);
    assert!(has(&not_needed(&draft), "save_strategy = best: `train.keep_best`"));
    let draft = with_eval(best);
    assert!(
        has(&missing(&draft), "load_best_model_at_end = true: only the last step"),
        "{:?}",
        missing(&draft)
    );
    assert!(has(&missing(&draft), "save_strategy = best: "));
    let draft = with_eval("eval_strategy: steps\nlogging_steps: 0.1\n");
    assert!(has(&missing(&draft), "eval_strategy = steps: `train.eval_every` is a number of steps"));
}

#[test]
fn as_many_checkpoints_are_kept_as_there() {
    for (text, kept) in [
        ("save_steps: 2\n", Some("0 # all, TRL's default")),
        ("save_steps: 2\nsave_total_limit: 3\n", Some("3 # save_total_limit = 3")),
        ("save_strategy: no\n", None),
    ] {
        let draft = draft(&[("sft.yaml", &format!("{TRL}{text}"))]);
        assert_eq!(key(&draft, "train.keep"), kept.unwrap_or_default(), "{text}");
    }
    let axolotl = draft(&[("a.yml", &format!("{AXOLOTL}save_steps: 2\n"))]);
    assert_eq!(key(&axolotl, "train.keep"), "4 # Axolotl's default");
}

#[test]
fn kto_and_bco_have_their_own_defaults() {
    let of = |command: &str| draft(&[("a.sh", &format!("{command} --model_name_or_path m"))]);
    let bco = of("trl bco");
    assert_eq!(bco.get("train.learning_rate"), Some(&5e-7.into()));
    assert_eq!(bco.get("data.order"), None);
    let kto = of("trl kto");
    assert_eq!(kto.get("train.learning_rate"), Some(&1e-6.into()));
    assert_eq!(key(&kto, "data.order"), "\"sequential\" # TRL's default: its KL is of neighbours");
    let shuffled = of("trl kto --train_sampling_strategy random");
    assert_eq!(shuffled.get("data.order"), None);
}

#[test]
fn reward_models_of_steps_are_refused() {
    let error = error(&[("a.yml", &format!("{AXOLOTL}process_reward_model: true\n"))]);
    assert!(error.contains("reward models of steps cannot be had"), "{error}");
}

#[test]
fn slices_of_splits_are_told() {
    let answers = Answers { train: vec!["hf://a/b/train[:20%]".to_owned()], ..with_data() };
    let draft = translated(&[("sft.yaml", TRL)], &answers).unwrap().draft;
    assert!(has(&missing(&draft), "hf://a/b/train[:20%]: only whole splits are read"));
}

#[test]
fn fsdps_table_is_read() {
    let of = |name: &str, text: &str| draft(&[(name, text)]);
    let table = "fsdp_config:\n  offload_params: true\n  activation_checkpointing: true\n";
    let axolotl = of("a.yml", &format!("{AXOLOTL}fsdp_version: 2\n{table}  reshard_after_forward: true\n"));
    assert_eq!(axolotl.get("compute.sharding"), Some(&"zero3".into()));
    assert_eq!(axolotl.get("compute.offload"), Some(&"host".into()));
    assert_eq!(axolotl.get("compute.checkpointing"), Some(&"block".into()));
    let with = "fsdp: full_shard\n";
    let trl = of("sft.yaml", &format!("{TRL}{with}{table}  sharding_strategy: SHARD_GRAD_OP\n"));
    assert_eq!(key(&trl, "compute.sharding"), "\"zero2\" # fsdp_config.sharding_strategy = SHARD_GRAD_OP");
    assert_eq!(trl.get("compute.offload"), Some(&"host".into()));
    assert_eq!(trl.get("compute.checkpointing"), Some(&"block".into()));
    let off = of("sft.yaml", &format!("{TRL}{table}"));
    assert_eq!((off.get("compute.sharding"), off.get("compute.offload")), (None, None));
    assert!(has(&not_needed(&off), "fsdp_config.offload_params = true: `fsdp` is off"));
    let file = of("sft.yaml", &format!("{TRL}{with}fsdp_config: fsdp.json\n"));
    assert!(has(&missing(&file), "fsdp_config = fsdp.json: the file is not read"));
}

#[test]
fn llama_factorys_command_needs_no_file() {
    let command = "llamafactory-cli train --stage sft --do_train --model_name_or_path m --dataset d.jsonl \
                   --template qwen --finetuning_type full --output_dir o --learning_rate 1e-4";
    let read = translated(&[("a.sh", command)], &with_data()).unwrap();
    assert_eq!(read.programs, [Program::LlamaFactory]);
    assert_eq!(read.draft.get("train.learning_rate"), Some(&1e-4.into()));
}

#[test]
fn a_variable_that_a_branch_assigns_is_unknown() {
    let command = "trl sft --model_name_or_path m --max_length $N";
    for before in [
        "N=8\nif [ \"$1\" = big ]; then\n  N=9\nfi\n",
        "N=8\nif [ \"$1\" = big ]; then N=9; fi\n",
        "N=8\ncase $1 in\n  big) N=9 ;;\nesac\n",
        "N=8\nfor N in 1 2; do N=9; done\n",
        "N=8\n[ -n \"$1\" ] && N=9\n",
        "N=8\nls || N=9\n",
    ] {
        let error = error(&[("a.sh", &format!("{before}{command}\n"))]);
        assert!(error.contains("no line before it assigns `$N`"), "{before}: {error}");
    }
    for before in ["N=9\n", "N=8\nN=9\n", "if true; then\nN=8\nfi\nN=9\n", "cd x && N=9\n", "ls | cat; N=9\n"]
    {
        let draft = draft(&[("a.sh", &format!("{before}{command}\n"))]);
        assert_eq!(draft.get("data.max_length"), Some(&9.into()), "{before}");
    }
}

#[test]
fn nvme_of_weights_has_a_folder_of_its_own() {
    let json = |path: &str| {
        format!(
            "{{\"zero_optimization\": {{\"stage\": 3, \"offload_param\": {{\"device\": \"nvme\"{path}}}}}}}"
        )
    };
    let run = format!("{TRL}deepspeed: ds.json\n");
    let draft = draft(&[("sft.yaml", &run), ("ds.json", &json(", \"nvme_path\": \"/nv\""))]);
    assert_eq!(draft.get("compute.offload"), Some(&"nvme".into()));
    assert_eq!(draft.get("compute.offload_dir"), Some(&"/nv".into()));
    let error = error(&[("sft.yaml", &run), ("ds.json", &json(""))]);
    assert!(error.contains("it needs a folder"), "{error}");
}

#[test]
fn tf32_is_for_f32() {
    let of = |more: &str| draft(&[("sft.yaml", &format!("{TRL}tf32: true\n{more}"))]);
    assert_eq!(of("bf16: false\n").get("compute.tf32"), Some(&true.into()));
    let bf16 = of("");
    assert_eq!(bf16.get("compute.tf32"), None);
    assert!(has(&missing(&bf16), "tf32 = true: it is for f32 matmuls"));
}

#[test]
fn options_of_an_unknown_schedule_name_it() {
    let text = format!("{TRL}lr_scheduler_type: odd\nlr_scheduler_kwargs:\n  power: 2\n");
    let remarks = missing(&draft(&[("sft.yaml", &text)]));
    assert!(has(&remarks, "lr_scheduler_kwargs.power = 2: the schedule \"odd\" has no"), "{remarks:?}");
}

#[test]
fn machines_and_short_options_of_a_command_are_told() {
    let command = "torchrun --nnodes 2 --nproc_per_node 4 sft.py --model_name_or_path m -b 4 foo";
    let read = translated(&[("a.sh", command)], &with_data()).unwrap();
    assert_eq!((read.ranks, read.machines), (8, 2));
    assert_eq!(
        read.draft.unknown.first().map(|remark| remark.setting.as_str()),
        Some("-b = [\"4\",\"foo\"]")
    );
}
