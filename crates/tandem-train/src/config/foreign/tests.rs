//! Every known setting has a meaning, and no advice leads astray.

use super::*;

/// Fields of TRL 1.16's configs, `ModelConfig` and `ScriptArguments`, transformers 5.24's
/// `TrainingArguments`, PEFT 0.21's `LoraConfig` and bitsandbytes' settings, one per line after
/// a line `# Class`.
const FIELDS: &str = include_str!("fields.txt");

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

mod command_lines {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::config::Method;
    use crate::config::foreign::Program;
    use crate::config::foreign::command_line::CommandLine;

    fn read(text: &str) -> CommandLine {
        CommandLine::parse(Path::new("run.sh"), text, None)
            .unwrap()
            .unwrap_or_else(|| panic!("no command: {text}"))
    }

    /// Settings of one program in a command.
    fn settings(command: &CommandLine, program: Program) -> Value {
        let document = command.documents.iter().find(|document| document.program == program);
        document.map_or(Value::Null, |document| document.settings.clone().into())
    }

    #[test]
    fn options_have_values_lists_and_switches() {
        let command = read(
            "python dpo.py --learning_rate 1e-6 --beta=0.2 --use_peft --no_remove_unused_columns \\\n  \
             --lora_target_modules q_proj v_proj --top-k -1 --output_dir 'a b' # note",
        );
        assert_eq!(command.method, Some(Method::Dpo));
        assert_eq!(
            settings(&command, Program::Trl),
            json!({
                "learning_rate": "1e-6", "beta": "0.2", "use_peft": true, "remove_unused_columns": false,
                "lora_target_modules": ["q_proj", "v_proj"], "top_k": "-1", "output_dir": "a b",
            })
        );
    }

    #[test]
    fn launchers_say_how_many_ranks_there_are() {
        for (launcher, ranks) in [
            ("accelerate launch --num_processes 4", json!("4")),
            ("accelerate launch --num_processes=4 --mixed_precision bf16", json!("4")),
            ("torchrun --nproc_per_node 8 --nnodes=2", json!(16)),
            ("torchrun --nproc-per-node=2", json!(2)),
            ("python -m torch.distributed.run --nproc_per_node=2", json!(2)),
            ("deepspeed --num_gpus 3", json!(3)),
            ("/opt/venv/bin/torchrun --nproc_per_node 2", json!(2)),
            ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2", json!(2)),
        ] {
            let command = read(&format!("{launcher} scripts/sft.py --max_length 64"));
            assert_eq!(settings(&command, Program::Accelerate)["num_processes"], ranks, "{launcher}");
            assert_eq!(settings(&command, Program::Trl), json!({ "max_length": "64" }), "{launcher}");
            assert_eq!(command.method, Some(Method::Sft), "{launcher}");
        }
        let alone = read("python scripts/sft.py --max_length 64");
        assert_eq!(settings(&alone, Program::Accelerate), Value::Null);
    }

    #[test]
    fn commands_name_their_files() {
        let files =
            |text: &str| -> Vec<String> { read(text).files.into_iter().map(|(file, _)| file).collect() };
        assert_eq!(files("trl dpo --config dpo.yaml --beta 0.3"), ["dpo.yaml"]);
        assert_eq!(
            files("accelerate launch --config_file a.yaml dpo.py --config b.yaml"),
            ["a.yaml", "b.yaml"]
        );
        assert_eq!(files("axolotl train x.yml"), ["x.yml"]);
        assert_eq!(files("accelerate launch -m axolotl.cli.train x.yml"), ["x.yml"]);
        assert_eq!(files("llamafactory-cli train lora/x.yaml"), ["lora/x.yaml"]);
    }

    #[test]
    fn hydras_overrides_are_mitchells() {
        let command =
            read("python -u train.py model=pythia28 datasets=[hh,shp] loss=dpo loss.beta=0.1 lr=5e-7");
        let expected = json!({ "model": "pythia28", "datasets": ["hh", "shp"], "loss": "dpo", "loss.beta": "0.1", "lr": "5e-7" });
        assert_eq!(settings(&command, Program::Mitchell), expected);
        assert_eq!(settings(&read("model=pythia28 loss=sft\n"), Program::Mitchell)["loss"], "sft");
    }

    #[test]
    fn lines_that_do_not_train_are_passed_over() {
        let text = "#!/bin/sh\nexport A=1\ncd work\npip install trl\nmkdir -p out && true\ntrl sft --packing true\necho done\n";
        assert_eq!(settings(&read(text), Program::Trl), json!({ "packing": "true" }));
        assert!(CommandLine::parse(Path::new("x"), "ls -l\n", None).unwrap().is_none());
    }
}

mod translations {
    use std::fs;

    use super::*;
    use crate::config::{Answers, Facts, Method, translate};

    /// Facts where there are no files.
    struct Nothing;

    impl Facts for Nothing {
        fn path(&self, given: &str) -> String {
            given.to_owned()
        }
        fn local(&self, given: &str) -> String {
            given.to_owned()
        }
        fn exists(&self, _: &str) -> bool {
            false
        }
        fn model_type(&self, _: &str) -> Option<String> {
            None
        }
        fn columns(&self, _: &str) -> Option<Vec<String>> {
            None
        }
        fn num_rows(&self, _: &[String]) -> Option<u64> {
            Some(100)
        }
    }

    /// The tables whose names begin with `table` of a translated file, as `key = value`, and given settings that
    /// cannot be had.
    fn translated(
        program: Program,
        method: Method,
        table: &str,
        settings: &str,
    ) -> (Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        let rest = match program {
            Program::Axolotl => {
                "base_model: m\nmicro_batch_size: 2\nnum_epochs: 1\n\
                                 learning_rate: 1e-5\n"
            }
            _ => {
                "model_name_or_path: m\nper_device_train_batch_size: 2\n\
                  num_train_epochs: 1\nlearning_rate: 1e-5\n"
            }
        };
        fs::write(&path, format!("{rest}{settings}\n")).unwrap();
        let answers = Answers {
            method: Some(method),
            ranks: Some(1),
            train: vec!["d.jsonl".to_owned()],
            ..Answers::default()
        };
        let draft =
            translate(&[path], Some(program), &answers, &Nothing).unwrap_or_else(|e| panic!("{e}")).draft;
        let keys = draft.keys.iter().filter(|key| key.key.starts_with(table));
        let keys = keys.map(|key| format!("{} = {}", key.key, key.value)).collect();
        let is_given = |setting: &String| settings.contains(setting.split(' ').next().unwrap());
        (keys, draft.missing.into_iter().map(|remark| remark.setting).filter(is_given).collect())
    }

    #[test]
    fn trackers_of_trl_and_axolotl_become_keys() {
        let script = |name: &str| format!("logging.command = [\"python3\", \"tools/trackers/{name}.py\"]");
        for (program, settings, keys) in [
            (Program::Trl, "report_to: [tensorboard]", vec!["logging.tensorboard = true".to_owned()]),
            (
                Program::Trl,
                "report_to: tensorboard\nlogging_dir: events\nrun_name: first",
                vec!["logging.run = \"first\"".to_owned(), "logging.tensorboard = \"events\"".to_owned()],
            ),
            (Program::Trl, "report_to: trackio", vec![script("trackio")]),
            (Program::Trl, "report_to: [comet_ml]", vec![script("comet")]),
            (Program::Trl, "report_to: none\nlogging_dir: events", vec![]),
            (Program::LlamaFactory, "report_to: wandb", vec![script("wandb")]),
            (
                Program::Axolotl,
                "wandb_project: p\nwandb_entity: e\nuse_tensorboard: true",
                vec![
                    "logging.tensorboard = true".to_owned(),
                    "logging.command = [\"env\", \"WANDB_PROJECT=p\", \"WANDB_ENTITY=e\", \"python3\", \
                     \"tools/trackers/wandb.py\"]"
                        .to_owned(),
                ],
            ),
            (Program::Axolotl, "wandb_project: p\nuse_wandb: false", vec![]),
            (
                Program::Axolotl,
                "use_mlflow: true\nmlflow_tracking_uri: http://m:5000\nmlflow_experiment_name: e",
                vec![
                    "logging.mlflow.uri = \"http://m:5000\"".to_owned(),
                    "logging.mlflow.experiment = \"e\"".to_owned(),
                ],
            ),
        ] {
            assert_eq!(
                translated(program, Method::Sft, "logging.", settings),
                (keys, Vec::new()),
                "{settings}"
            );
        }
    }

    #[test]
    fn trackers_that_need_more_are_told() {
        for (program, settings, setting) in [
            (Program::Trl, "report_to: mlflow", "report_to = mlflow"),
            (Program::Trl, "report_to: [wandb, trackio]", "report_to = [\"wandb\",\"trackio\"]"),
            (Program::Trl, "report_to: azure_ml", "report_to = azure_ml"),
            (Program::Axolotl, "mlflow_experiment_name: e", "mlflow_experiment_name = e"),
        ] {
            assert_eq!(translated(program, Method::Sft, "logging.", settings).1, [setting], "{settings}");
        }
    }

    /// TRL's two trainers differ in who writes completions, and in their defaults.
    #[test]
    fn both_distillations_say_who_writes_completions() {
        let keys = |settings: &str| {
            let table = |table| translated(Program::Trl, Method::Distill, table, settings);
            let [(distill, missing), (online, _)] = ["distill.", "online."].map(table);
            (distill, online, missing)
        };
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            keys("teacher_model: t\nlmbda: 0.0\nbeta: 0.1"),
            (words(&["distill.beta = 0.1"]), vec![], vec![])
        );
        let (distill, online, missing) = keys("teacher_model: t\nseq_kd: true\nmax_new_tokens: 32");
        assert_eq!(distill, words(&["distill.lmbda = 0.5"]));
        assert_eq!(online, words(&["online.max_new_tokens = 32", "online.temperature = 0.9"]));
        assert_eq!(missing.len(), 1, "{missing:?}");
        let (distill, online, missing) = keys("teacher_model: t\ntemperature: 2.0");
        assert_eq!(
            distill,
            words(&["distill.temperature = 2.0", "distill.beta = 1.0", "distill.lmbda = 1.0"])
        );
        assert_eq!((online, missing), (words(&["online.max_new_tokens = 512"]), vec![]));
    }
}
