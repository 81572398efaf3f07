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
        assert_eq!(command.method, Some("dpo"));
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
            assert_eq!(command.method, Some("sft"), "{launcher}");
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

    #[test]
    fn a_command_ends_at_the_shells_operators() {
        let expected = json!({ "max_steps": "10" });
        for rest in [
            "2>&1 | tee log",
            "> log",
            ">log",
            ">> log 2>&1",
            "&> log",
            "< /dev/null",
            "<<< yes",
            "> >(tee log) 2>&1",
            "&",
            "; echo done",
            "&& echo done",
            "|| exit 1",
            "|tee log",
            "# note",
        ] {
            let command = read(&format!("trl dpo --max_steps 10 {rest}\n"));
            assert_eq!(settings(&command, Program::Trl), expected, "{rest}");
        }
        for rest in ["|tee log", ";echo done", "&&echo done", "&"] {
            let command = read(&format!("trl dpo --max_steps 10{rest}\n"));
            assert_eq!(settings(&command, Program::Trl), expected, "{rest}");
        }
        // An option after a redirection is the command's, and an operator in quotation marks is text.
        let command =
            read("trl dpo --max_steps 10 > log --output_dir 'a|b' --run_name \"c;d\" --project e\\&f");
        let expected = json!({ "max_steps": "10", "output_dir": "a|b", "run_name": "c;d", "project": "e&f" });
        assert_eq!(settings(&command, Program::Trl), expected);
    }

    #[test]
    fn the_scripts_own_variables_are_put_in() {
        let command = read(
            "MODEL=M\nexport OUT='my runs' FLAGS=\"--beta 0.2 --use_peft\"\nOUT=\"$OUT/${MODEL}-dpo\"\n\
             python dpo.py --model_name_or_path $MODEL --output_dir \"$OUT\" ${FLAGS} --run_name '$MODEL'\n",
        );
        let expected = json!({
            "model_name_or_path": "M", "output_dir": "my runs/M-dpo", "beta": "0.2", "use_peft": true, "run_name": "$MODEL",
        });
        assert_eq!(settings(&command, Program::Trl), expected);
        assert!(command.left_out.is_empty());
    }

    #[test]
    fn a_variable_that_no_line_assigns_is_named() {
        for (text, named) in [
            ("trl dpo --max_steps $STEPS", "`--max_steps $STEPS`: no line before it assigns `$STEPS`"),
            ("trl dpo --max_steps=$STEPS", "`--max_steps=$STEPS`: no line before it assigns `$STEPS`"),
            (
                "trl dpo --output_dir out/${NAME}",
                "`--output_dir out/${NAME}`: no line before it assigns `${NAME}`",
            ),
            ("N=$(nproc)\ntrl dpo --seed $N", "`--seed $N`: no line before it assigns `$N`"),
            ("trl dpo --seed $(date +%s)", "`--seed $(date +%s)`: no line before it assigns `$(date +%s)`"),
            ("trl dpo --beta 0.1 \"${ARGS[@]}\"", "`${ARGS[@]}`: no line before it assigns `${ARGS[@]}`"),
        ] {
            let error = CommandLine::parse(Path::new("run.sh"), text, None).err().expect(text).to_string();
            assert!(error.contains(named), "{error}");
            assert!(error.ends_with("assign it in a line of its own above"), "{error}");
        }
        for rest in ["\"$@\"", "$*", "$EXTRA", "${@:2}", "\"$1\""] {
            let command = read(&format!("trl dpo --learning_rate 5e-6 {rest} --beta 0.2"));
            let expected = json!({ "learning_rate": "5e-6", "beta": "0.2" });
            assert_eq!(settings(&command, Program::Trl), expected, "{rest}");
            assert_eq!(command.left_out, [rest.trim_matches('"')]);
        }
    }

    #[test]
    fn launchers_stand_behind_other_commands() {
        for (command, ranks) in [
            ("nohup python dpo.py", Value::Null),
            ("time accelerate launch --num_processes 2 dpo.py", json!("2")),
            ("srun --ntasks 1 --gpus 2 torchrun --nproc_per_node 2 dpo.py", json!(2)),
            ("docker run --gpus all -v $PWD:/w huggingface/trl trl dpo", Value::Null),
            ("docker run --rm image python /w/dpo.py", Value::Null),
            ("cd work && python dpo.py", Value::Null),
            ("CUDA_VISIBLE_DEVICES=$GPU nohup python -u dpo.py", Value::Null),
            ("if ! python dpo.py", Value::Null),
            ("uv run trl dpo", Value::Null),
            ("uv run dpo.py", Value::Null),
        ] {
            let found = read(&format!("{command} --max_length 64 2>&1 | tee log\n"));
            assert_eq!(settings(&found, Program::Trl), json!({ "max_length": "64" }), "{command}");
            assert_eq!(settings(&found, Program::Accelerate)["num_processes"], ranks, "{command}");
            assert_eq!(found.method, Some("dpo"), "{command}");
        }
        for other in ["pip install trl", "echo python dpo.py", "docker build -t trl .", "git add dpo.py"] {
            assert!(CommandLine::parse(Path::new("x"), other, None).unwrap().is_none(), "{other}");
        }
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

    /// The translation of a file with this text.
    fn translation(name: &str, text: &str) -> Result<crate::config::Draft, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let answers = Answers { ranks: Some(1), train: vec!["d.jsonl".to_owned()], ..Answers::default() };
        let translated = translate(&[path], Some(Program::Trl), &answers, &Nothing);
        translated.map(|translation| translation.draft).map_err(|error| error.to_string())
    }

    fn of_command(command: &str) -> Result<crate::config::Draft, String> {
        translation("run.sh", &format!("{command} --model_name_or_path m --learning_rate 1e-5\n"))
    }

    #[test]
    fn steps_that_are_no_number_are_an_error() {
        for (value, found) in [("abc", "abc"), ("[10]", "[10]"), ("true", "true")] {
            let text = format!("model_name_or_path: m\nbeta: 0.1\nmax_steps: {value}\n");
            let error = translation("run.yaml", &text).unwrap_err();
            assert!(error.contains("`max_steps`") && error.contains(&format!("found {found}")), "{error}");
        }
        let error = of_command("trl dpo --max_steps 10 20").unwrap_err();
        assert!(error.contains("`max_steps`") && error.contains(r#"found ["10","20"]"#), "{error}");
        let draft = of_command("trl dpo --max_steps 10 2>&1 | tee log").unwrap_err();
        assert!(draft.contains("model"), "the options after the pipe are not its own: {draft}");
        let draft = of_command("trl dpo --max_steps 10 2> log").unwrap();
        assert_eq!(draft.get("train.steps"), Some(&10.into()));
        let draft = of_command("trl dpo --max_steps -1 --num_train_epochs 2").unwrap();
        assert_eq!(draft.get("train.epochs"), Some(&2.0.into()));
    }

    #[test]
    fn trls_other_methods_are_translated_or_refused() {
        for (method, keys) in [
            ("trl orpo", vec![r#"method = "dpo""#, "objective.loss = { orpo = 1.0, sft = 1.0 }"]),
            ("trl cpo", vec![r#"method = "dpo""#, "objective.loss = { cpo = 1.0, sft = 1.0 }"]),
            ("python cpo.py --loss_type simpo", vec!["objective.loss = { sft = 1.0, simpo = 1.0 }"]),
            ("trl bco", vec![r#"method = "kto""#, r#"objective.loss = "bco""#]),
            ("trl kto", vec![r#"method = "kto""#]),
            ("trl xpo", vec![r#"method = "online""#, r#"online.algorithm = "xpo""#]),
            ("python nash_md.py", vec![r#"method = "online""#, r#"online.algorithm = "nash_md""#]),
            ("trl grpo", vec![r#"method = "grpo""#]),
        ] {
            let draft = of_command(method).unwrap_or_else(|error| panic!("{method}: {error}"));
            let found: Vec<_> = draft.keys.iter().map(|key| format!("{} = {}", key.key, key.value)).collect();
            for key in keys {
                assert!(found.iter().any(|found| found == key), "{method}: {key}: {found:?}");
            }
        }
        for method in ["ppo", "rloo", "prm"] {
            let error = of_command(&format!("trl {method}")).unwrap_err();
            assert!(error.contains(&format!("run.sh:1: `method`: {method:?} cannot be had")), "{error}");
            let all: Vec<_> = Method::all().map(|method| format!("{:?}", method.name())).collect();
            assert!(error.contains(&all.join(", ")), "{error}");
        }
    }

    #[test]
    fn every_setting_is_in_the_list_or_in_a_key() {
        let text = "model_name_or_path: m\nbeta: 0.1\neval_strategy: steps\neval_steps: 50\n\
            ref_model_mixup_alpha: 0.6\ndisable_dropout: false\nsync_ref_model: false\npacking: false\n\
            use_peft: false\nload_in_4bit: false\nfp16: false\nwarmup_ratio: 0.0\n";
        let draft = translation("run.yaml", text).unwrap();
        let listed: Vec<_> = draft.not_needed.iter().map(|remark| remark.setting.as_str()).collect();
        for setting in text.lines().skip(2) {
            let setting = setting.trim().replace(": ", " = ");
            assert!(listed.contains(&setting.as_str()), "{setting}: {listed:?}");
        }
    }

    #[test]
    fn words_for_further_arguments_are_listed() {
        let draft = of_command("python dpo.py --beta 0.1 $EXTRA").unwrap();
        let remark = draft.missing.iter().find(|remark| remark.setting == "$EXTRA").expect("listed");
        assert_eq!(remark.reason, "it stands for arguments which no file tells; set what they set");
    }
}
