//! Settings of each program as keys of ours, or as remarks.

use std::fs;

use super::*;
use crate::config::Method;

/// The tables whose names begin with `table` of a translated file, as `key = value`, and given settings that
/// cannot be had.
fn translated(program: Program, method: Method, table: &str, settings: &str) -> (Vec<String>, Vec<String>) {
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
        translate(&[path], Some(program), &answers, &Rows(None)).unwrap_or_else(|e| panic!("{e}")).draft;
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
        assert_eq!(translated(program, Method::Sft, "logging.", settings), (keys, Vec::new()), "{settings}");
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
    assert_eq!(distill, words(&["distill.temperature = 2.0", "distill.beta = 1.0", "distill.lmbda = 1.0"]));
    assert_eq!((online, missing), (words(&["online.max_new_tokens = 512"]), vec![]));
}

/// The translation of a file with this text.
fn translation(name: &str, text: &str) -> Result<crate::config::Draft, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    let answers = Answers { ranks: Some(1), train: vec!["d.jsonl".to_owned()], ..Answers::default() };
    let translated = translate(&[path], Some(Program::Trl), &answers, &Rows(None));
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

/// Keys of a translated file whose names begin with `table`, as `key = value`.
fn keys_of(draft: &crate::config::Draft, table: &str) -> Vec<String> {
    let keys = draft.keys.iter().filter(|key| key.key.starts_with(table));
    keys.map(|key| format!("{} = {}", key.key, key.value)).collect()
}

/// The command's program says which trainer it is.
#[test]
fn a_gkd_command_has_the_defaults_of_gkd() {
    let draft =
        of_command("python trl/experimental/gkd/gkd.py --teacher_model_name_or_path t --temperature 0.7");
    assert_eq!(keys_of(&draft.clone().unwrap(), "distill."), ["distill.lmbda = 0.5"]);
    assert_eq!(
        keys_of(&draft.unwrap(), "online."),
        ["online.temperature = 0.7", "online.max_new_tokens = 128"]
    );
    for (command, rate) in [("gkd.py", 2e-5), ("distillation.py", 1e-6)] {
        let text = format!("python {command} --model_name_or_path m --teacher_model_name_or_path t");
        let draft = translation("run.sh", &text).unwrap();
        assert_eq!(draft.get("train.learning_rate"), Some(&rate.into()), "{command}");
    }
}

/// TRL counts micro-batches between two generations, we count steps.
#[test]
fn a_round_of_grpo_counts_whole_steps() {
    let rounds = |settings: &str| {
        let text = format!(
            "model_name_or_path: m\nnum_generations: 4\nper_device_train_batch_size: 4\nloss_type: grpo\n{settings}\n"
        );
        translation("run.yaml", &text)
            .map(|draft| draft.get("online.steps_per_round").and_then(toml::Value::as_integer))
    };
    for (settings, steps) in [
        ("gradient_accumulation_steps: 8\nsteps_per_generation: 8", Some(1)),
        ("gradient_accumulation_steps: 2\nsteps_per_generation: 4", Some(2)),
        ("steps_per_generation: 3", Some(3)),
        ("gradient_accumulation_steps: 8\nsteps_per_generation: 4", None),
        ("gradient_accumulation_steps: 8", None),
        ("gradient_accumulation_steps: 2\ngeneration_batch_size: 24", Some(3)),
        ("gradient_accumulation_steps: 2\nsteps_per_generation: null", None),
    ] {
        assert_eq!(rounds(settings), Ok(steps), "{settings}");
    }
    for (settings, why) in [
        (
            "gradient_accumulation_steps: 2\nsteps_per_generation: 3",
            "3 micro-batches are no whole steps of 2",
        ),
        (
            "gradient_accumulation_steps: 8\nsteps_per_generation: 4\nnum_iterations: 2",
            "4 micro-batches are no whole steps of 8",
        ),
        ("generation_batch_size: 6", "it is no multiple of 4"),
        ("generation_batch_size: 8\nsteps_per_generation: 2", "together with `generation_batch_size`"),
        ("steps_per_generation: 0", "at least 1"),
    ] {
        let error = rounds(settings).unwrap_err();
        assert!(error.contains(why), "{settings}: {error}");
    }
}

/// TRL limits completions alone.
#[test]
fn prompts_of_grpo_have_room() {
    for (settings, tokens) in
        [("num_generations: 2", 1024), ("num_generations: 2\nmax_completion_length: 2048", 2560)]
    {
        let (keys, _) = translated(Program::Trl, Method::Grpo, "data.max_length", settings);
        assert_eq!(keys, [format!("data.max_length = {tokens}")]);
    }
}

/// The keys of `[grpo]` are those that the loss takes, with TRL's defaults where they differ.
#[test]
fn losses_of_grpo_keep_the_numbers_that_they_take() {
    for (settings, keys) in [
        ("loss_type: cispo", vec!["grpo.loss = \"cispo\"", "grpo.epsilon_high = 0.2"]),
        ("loss_type: cispo\nepsilon: 0.3", vec!["grpo.loss = \"cispo\"", "grpo.epsilon_high = 0.3"]),
        (
            "loss_type: cispo\nepsilon: 0.3\nepsilon_high: 5.0\ndelta: 9.0",
            vec!["grpo.epsilon_high = 5.0", "grpo.loss = \"cispo\""],
        ),
        (
            "loss_type: sapo\nepsilon: 0.3\nsapo_temperature_pos: 2.0\nvespo_k_pos: 1.0",
            vec!["grpo.sapo_temperature_pos = 2.0", "grpo.loss = \"sapo\""],
        ),
        ("epsilon: 0.3\nepsilon_high: 0.4", vec!["grpo.epsilon = 0.3", "grpo.epsilon_high = 0.4"]),
    ] {
        let (found, missing) =
            translated(Program::Trl, Method::Grpo, "grpo.", &format!("num_generations: 2\n{settings}"));
        assert_eq!((found, missing), (keys.into_iter().map(str::to_owned).collect(), vec![]), "{settings}");
    }
}

#[test]
fn options_of_generation_become_keys() {
    let settings = "num_generations: 2\nvllm_structured_outputs_regex: '[0-9]+'\n\
        generation_kwargs: {top_k: -1, top_p: 0.9, stop_strings: [END, 'a b'], min_new_tokens: 5, do_sample: true}";
    let (online, missing) = translated(Program::Trl, Method::Grpo, "online.", settings);
    for key in ["online.top_k = 0", "online.top_p = 0.9", r#"online.stop = ["END", "a b"]"#] {
        assert!(online.iter().any(|found| found == key), "{key}: {online:?}");
    }
    assert_eq!(missing, ["vllm_structured_outputs_regex = [0-9]+"]);
    let draft = translation(
        "run.sh",
        "trl grpo --model_name_or_path m --num_generations 2 --generation_kwargs '{\"temperature\": 0.5, \"min_new_tokens\": 5, \"stop\": \"a b\"}'",
    );
    let draft = draft.unwrap();
    assert_eq!(draft.get("online.stop"), Some(&vec!["a b".to_owned()].into()));
    let mut missing: Vec<_> = draft.missing.iter().map(|remark| remark.setting.as_str()).collect();
    missing.sort_unstable();
    assert_eq!(missing, ["generation_kwargs.min_new_tokens = 5", "generation_kwargs.temperature = 0.5"]);
    let (distill, _) = translated(
        Program::Trl,
        Method::Distill,
        "distill.t",
        "temperature: 2.0\ngeneration_kwargs: {temperature: 0.5}",
    );
    assert_eq!(distill, ["distill.temperature = 2.0"]);
}

/// TRL's `sigmoid` has no label smoothing, those of CPO and LLaMA-Factory have.
#[test]
fn label_smoothing_is_kept_where_the_loss_has_it() {
    for (program, settings, smoothing) in [
        (Program::Trl, "label_smoothing: 0.3", None),
        (Program::Trl, "label_smoothing: 0.3\nloss_type: [sigmoid, sft]", None),
        (Program::Trl, "label_smoothing: 0.3\nloss_type: hinge", None),
        (Program::Trl, "label_smoothing: 0.3\nloss_type: robust", Some(0.3)),
        (Program::Trl, "label_smoothing: 0.3\nloss_type: [aot, hinge]", Some(0.3)),
        (Program::Trl, "label_smoothing: 0.0\nloss_type: [aot, sigmoid]", Some(0.0)),
        (Program::Trl, "label_smoothing: 0.3\nloss_type: simpo", Some(0.3)),
        (Program::Axolotl, "rl: dpo\ndpo_label_smoothing: 0.3", None),
        (Program::LlamaFactory, "stage: dpo\ndpo_label_smoothing: 0.3", Some(0.3)),
    ] {
        let (keys, missing) = translated(program, Method::Dpo, "objective.label", settings);
        let expected: Vec<_> =
            smoothing.iter().map(|share| format!("objective.label_smoothing = {share:?}")).collect();
        assert_eq!((keys, missing), (expected, vec![]), "{settings}");
    }
    let text = "model_name_or_path: m\nlabel_smoothing: 0.3\nloss_type: [sigmoid, aot]\n";
    let error = translation("run.yaml", text).unwrap_err();
    assert!(
        error.contains("`label_smoothing`") && error.contains("aot takes it and sigmoid ignores it"),
        "{error}"
    );
}

#[test]
fn the_likelihood_of_chosen_completions_has_its_weight() {
    for (command, loss) in [
        ("trl cpo --cpo_alpha 0.5", "{ cpo = 1.0, sft = 0.5 }"),
        ("trl cpo --cpo_alpha 0.0 --loss_type simpo", "\"simpo\""),
        ("trl cpo --cpo_alpha 0", "\"cpo\""),
        ("trl cpo --loss_type simpo", "{ sft = 1.0, simpo = 1.0 }"),
        ("trl cpo --loss_type hinge", "{ hinge = 1.0, sft = 1.0 }"),
        ("trl cpo --loss_type ipo --cpo_alpha 0", "\"ipo\""),
    ] {
        let draft = of_command(command).unwrap();
        assert_eq!(keys_of(&draft, "objective.loss"), [format!("objective.loss = {loss}")], "{command}");
        assert!(draft.missing.is_empty(), "{command}: {:?}", draft.missing);
    }
    // A file without a command, and with a method that is our name for it.
    for method in [None, Some(Method::Dpo)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        fs::write(&path, "model_name_or_path: m\nloss_type: simpo\ncpo_alpha: 0.25\nbeta: 2.0\n").unwrap();
        let train = vec!["d.jsonl".to_owned()];
        let answers = Answers { ranks: Some(1), train, method, ..Answers::default() };
        let draft = translate(&[path], Some(Program::Trl), &answers, &Rows(None)).unwrap().draft;
        assert_eq!(keys_of(&draft, "objective.loss"), ["objective.loss = { sft = 0.25, simpo = 1.0 }"]);
    }
    for (settings, loss) in [
        ("stage: dpo\npref_loss: orpo", "{ orpo = 1.0, sft = 1.0 }"),
        ("stage: dpo\npref_loss: orpo\npref_ftx: 0.5", "{ orpo = 1.0, sft = 1.5 }"),
        ("stage: dpo\npref_loss: simpo", "\"simpo\""),
    ] {
        let (keys, _) = translated(Program::LlamaFactory, Method::Dpo, "objective.loss", settings);
        assert_eq!(keys, [format!("objective.loss = {loss}")], "{settings}");
    }
}

/// ORPO of TRL and of Axolotl, which has TRL's trainer, takes the prompt's likelihood.
#[test]
fn orpo_learns_prompts_too() {
    let draft = of_command("trl orpo").unwrap();
    assert_eq!(keys_of(&draft, "data.loss_on"), ["data.loss_on = \"all\""]);
    for (program, settings, keys) in [
        (Program::Axolotl, "rl: orpo", &["data.loss_on = \"all\""][..]),
        (Program::Axolotl, "rl: simpo", &[]),
        (Program::LlamaFactory, "stage: dpo\npref_loss: orpo", &[]),
    ] {
        assert_eq!(translated(program, Method::Dpo, "data.loss_on", settings).0, keys, "{settings}");
    }
}

/// Which trainers set dropout to 0 unless told otherwise.
#[test]
fn dropout_of_an_adapter_is_that_of_the_trainer() {
    for (command, dropout) in [
        ("trl sft --use_peft", "0.05"),
        ("trl grpo --num_generations 2 --use_peft --lora_dropout 0.1", "0.1"),
        ("trl grpo --num_generations 2 --use_peft", "0.05"),
        ("trl grpo --num_generations 2 --use_peft --lora_dropout 0.1 --disable_dropout true", "0.0"),
        ("trl distillation --teacher_model_name_or_path t --use_peft", "0.05"),
        ("trl gkd --teacher_model_name_or_path t --use_peft --lora_dropout 0.1", "0.0"),
        ("trl dpo --use_peft --lora_dropout 0.1", "0.0"),
        ("trl dpo --use_peft --lora_dropout 0.1 --disable_dropout false", "0.1"),
        ("trl kto --use_peft --lora_dropout 0.1", "0.0"),
        ("trl reward --use_peft --lora_dropout 0.1", "0.0"),
    ] {
        let draft = of_command(command).unwrap();
        assert_eq!(keys_of(&draft, "adapter.dropout"), [format!("adapter.dropout = {dropout}")], "{command}");
    }
    let of_reward = translated(
        Program::LlamaFactory,
        Method::Reward,
        "adapter.dropout",
        "stage: rm\nfinetuning_type: lora\nlora_dropout: 0.1",
    );
    assert_eq!(of_reward.0, ["adapter.dropout = 0.1"]);
}

/// TRL ignores constants of other optimisers and losses; a run refuses them.
#[test]
fn constants_of_other_optimisers_and_losses_are_left_out() {
    for (settings, table, keys) in [
        ("optim: rmsprop\nadam_epsilon: 1e-3", "train.eps", vec![]),
        ("optim: sgd\nadam_epsilon: 1e-3", "train.eps", vec![]),
        ("optim: lion_32bit\nadam_epsilon: 1e-3", "train.eps", vec![]),
        ("adam_epsilon: 1e-3", "train.eps", vec!["train.eps = 0.001"]),
        ("optim: adafactor\nadam_beta1: 0.8", "train.betas", vec![]),
        ("f_divergence_type: js_divergence\nf_alpha_divergence_coef: 0.3", "objective.f_alpha", vec![]),
        (
            "f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.3",
            "objective.f_alpha",
            vec!["objective.f_alpha_divergence_coef = 0.3"],
        ),
        ("discopop_tau: 0.1", "objective.discopop", vec![]),
        (
            "loss_type: [discopop, sft]\nloss_weights: [1.0, 0.5]\ndiscopop_tau: 0.1",
            "objective.discopop",
            vec!["objective.discopop_tau = 0.1"],
        ),
    ] {
        assert_eq!(translated(Program::Trl, Method::Dpo, table, settings).0, keys, "{settings}");
    }
    for (method, settings, table) in [
        (Method::Reward, "center_rewards_coefficient: 0.0", "objective.center"),
        (
            Method::Grpo,
            "num_generations: 2\nscale_rewards: group\nmulti_objective_aggregation: normalize_then_sum",
            "grpo.scale_rewards",
        ),
        (Method::Grpo, "num_generations: 2\nuse_bias_correction_kl: false\nbeta: 0.0", "grpo.use_bias"),
        (Method::Grpo, "num_generations: 2\nuse_bias_correction_kl: false", "grpo.use_bias"),
    ] {
        assert!(translated(Program::Trl, method, table, settings).0.is_empty(), "{settings}");
    }
    let kept = translated(
        Program::Trl,
        Method::Grpo,
        "grpo.use_bias",
        "num_generations: 2\nuse_bias_correction_kl: false\nbeta: 0.1",
    );
    assert_eq!(kept.0, ["grpo.use_bias_correction_kl = false"]);
}

#[test]
fn grpo_alone_takes_the_order_of_rows_from_shuffle_dataset() {
    for (method, value, keys) in [
        (Method::Grpo, "false", vec!["data.order = \"sequential\""]),
        (Method::Grpo, "true", vec![]),
        (Method::Sft, "false", vec![]),
    ] {
        let settings = format!("num_generations: 2\nshuffle_dataset: {value}");
        assert_eq!(translated(Program::Trl, method, "data.order", &settings).0, keys, "{method} {value}");
    }
}

/// transformers gives Lion the betas of AdamW.
#[test]
fn optimisers_have_the_numbers_of_their_program() {
    for (settings, betas) in [
        ("optim: lion_32bit", "train.betas = [0.9, 0.999]"),
        ("optim: paged_lion_8bit\nadam_beta2: 0.99", "train.betas = [0.9, 0.99]"),
    ] {
        assert_eq!(translated(Program::Trl, Method::Sft, "train.betas", settings).0, [betas], "{settings}");
    }
    assert!(translated(Program::Trl, Method::Sft, "train.betas", "optim: adamw_torch").0.is_empty());
    let draft = of_command("trl sft --optim schedule_free_adamw").unwrap();
    assert!(draft.missing.iter().any(|remark| remark.setting == "linear by TRL's default"));
}

#[test]
fn chunked_nll_is_the_one_loss_of_sft() {
    let text = "model_name_or_path: m\nloss_type: chunked_nll\n";
    assert_eq!(translation("run.yaml", text).unwrap().get("method"), Some(&"sft".into()));
}

/// The column of texts, where TRL reads it.
#[test]
fn a_column_of_texts_is_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sft.yaml");
    fs::write(&path, "model_name_or_path: m\ndataset_name: d.jsonl\ndataset_text_field: story\n").unwrap();
    for (columns, keys) in [
        (&["story"][..], &["data.columns = { text = \"story\" }"][..]),
        (&["text", "story"], &["data.columns = { text = \"story\" }", "data.ignore_columns = [\"text\"]"]),
        (&["messages", "story"], &[]),
        (&["prompt", "completion"], &[]),
    ] {
        let paths = std::slice::from_ref(&path);
        let answers = Answers { ranks: Some(1), ..Answers::default() };
        let draft = translate(paths, Some(Program::Trl), &answers, &Rows(Some(columns))).unwrap().draft;
        let found: Vec<_> = [keys_of(&draft, "data.columns"), keys_of(&draft, "data.ignore")].concat();
        assert_eq!(found, keys, "{columns:?}");
    }
}

#[test]
fn options_that_change_a_model_are_told() {
    let missing = |options: &str| {
        translated(Program::Trl, Method::Sft, "model", &format!("model_init_kwargs: {options}")).1
    };
    assert!(missing("{dtype: bfloat16, attn_implementation: sdpa}").is_empty());
    assert_eq!(missing("{rope_scaling: {rope_type: linear, factor: 2.0}}").len(), 1);
}

/// The translation of Mitchell's code's command with these overrides.
fn of_mitchell(overrides: &str) -> crate::config::Draft {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    fs::write(&path, format!("python -u train.py model=gpt2-xl {overrides}\n")).unwrap();
    let answers = Answers { ranks: Some(1), ..Answers::default() };
    translate(&[path], None, &answers, &Rows(None)).unwrap_or_else(|e| panic!("{e}")).draft
}

#[test]
fn mitchells_losses_are_his() {
    let draft = of_mitchell("datasets=[hh] loss=ipo loss.beta=0.1");
    assert_eq!(keys_of(&draft, "objective.loss"), ["objective.loss = \"ipo_sum\""]);
    let draft = of_mitchell("datasets=[hh] loss=sft");
    assert_eq!(keys_of(&draft, "data.take"), ["data.take = \"chosen\""]);
    assert!(draft.missing.iter().any(|remark| remark.setting == "loss = sft"));
    let (ipo, _) = translated(Program::Axolotl, Method::Dpo, "objective.loss", "rl: ipo");
    assert_eq!(ipo, ["objective.loss = \"ipo\""]);
}

/// The command's words win over the file's.
#[test]
fn overrides_of_llama_factory_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = folder.path().join("lf.yaml");
    let text =
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\nlearning_rate: 1e-5\n";
    fs::write(&yaml, text).unwrap();
    let script = folder.path().join("run.sh");
    let command = format!("llamafactory-cli train {} learning_rate=1e-3 lora_rank=64\n", yaml.display());
    fs::write(&script, command).unwrap();
    let train = vec!["d.jsonl".to_owned()];
    let answers = Answers { ranks: Some(1), train, ..Answers::default() };
    let draft = translate(&[script], None, &answers, &Rows(None)).unwrap_or_else(|e| panic!("{e}")).draft;
    assert_eq!(draft.get("train.learning_rate"), Some(&1e-3.into()));
    assert_eq!(draft.get("adapter.rank"), Some(&64.into()));
}

#[test]
fn chat_templates_are_files_or_texts() {
    let template = |program, settings: &str| {
        let (keys, missing) = translated(program, Method::Sft, "data.chat_template", settings);
        (keys, missing.len())
    };
    let none = |missing| (Vec::new(), missing);
    assert_eq!(template(Program::Axolotl, "chat_template: tokenizer_default"), none(0));
    assert_eq!(template(Program::Axolotl, "chat_template: chatml"), none(1));
    assert_eq!(
        template(Program::Axolotl, "chat_template: jinja\nchat_template_jinja: '{{ messages }}'"),
        (vec!["data.chat_template = \"{{ messages }}\"".to_owned()], 0)
    );
    let folder = tempfile::tempdir().unwrap();
    let setting = format!("chat_template_path: {}", folder.path().display());
    assert_eq!(template(Program::Trl, &setting), none(1));
    let file = folder.path().join("chat_template.jinja");
    fs::write(&file, "{{ messages }}").unwrap();
    assert_eq!(
        template(Program::Trl, &setting),
        (vec![format!("data.chat_template = \"{}\"", file.display())], 0)
    );
    assert_eq!(template(Program::Trl, "chat_template_path: owner/name"), none(1));
}

/// Kinds of rows to which Axolotl gives a text of its own.
#[test]
fn rows_that_axolotl_writes_are_told() {
    let missing = |kind: &str| {
        let text =
            format!("base_model: m\nlearning_rate: 1e-5\ndatasets:\n  - path: d.jsonl\n    type: {kind}\n");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        fs::write(&path, text).unwrap();
        let answers = Answers { ranks: Some(1), ..Answers::default() };
        let draft = translate(&[path], Some(Program::Axolotl), &answers, &Rows(None)).unwrap().draft;
        draft.missing.into_iter().map(|remark| remark.setting).collect::<Vec<_>>()
    };
    for kind in ["chat_template", "chat_template.default", "completion", "sharegpt"] {
        assert!(missing(kind).is_empty(), "{kind}: {:?}", missing(kind));
    }
    for kind in ["alpaca", "context_qa.load_v2", "input_output"] {
        assert_eq!(missing(kind), [format!("datasets: type = {kind}")]);
    }
    assert_eq!(missing("{field_system: s, format: '{x}'}"), ["datasets: type.format = {x}"]);
}

/// Numbers of a command line, and those that may be lists.
#[test]
fn numbers_of_online_methods_are_read() {
    for (command, keys) in [
        ("trl gkd --teacher_model_name_or_path t --lmbda 0.0", vec!["data.truncation = \"keep_end\""]),
        ("trl gkd --teacher_model_name_or_path t --lmbda 0.25", vec!["distill.lmbda = 0.25"]),
        ("trl xpo --alpha 1e-4", vec!["online.alpha = 0.0001"]),
        ("trl nash_md --mixture_coef 0.25", vec!["online.mixture = 0.25"]),
        ("python online_dpo.py --beta 0.1 0.05", vec!["objective.beta = [0.1, 0.05]"]),
    ] {
        let draft = of_command(command).unwrap_or_else(|e| panic!("{command}: {e}"));
        let found: Vec<_> = draft.keys.iter().map(|key| format!("{} = {}", key.key, key.value)).collect();
        for key in keys {
            assert!(found.iter().any(|found| found == key), "{command}: {key}: {found:?}");
        }
        assert!(draft.unknown.is_empty(), "{command}: {:?}", draft.unknown);
    }
    let (beta, _) = translated(Program::Trl, Method::Online, "objective.beta", "beta: [0.2]");
    assert_eq!(beta, ["objective.beta = 0.2"]);
}

/// Axolotl has TRL's names of GRPO in a table, and its batch counts completions as TRL's does.
#[test]
fn grpo_of_axolotl_has_the_keys_of_its_table() {
    let settings = "rl: grpo\ngradient_accumulation_steps: 4\ntrl:\n  num_generations: 4\n  max_completion_length: 64\n  \
                    loss_type: grpo";
    let (online, missing) = translated(Program::Axolotl, Method::Grpo, "online.", settings);
    assert_eq!(
        (online, missing),
        (vec!["online.answers = 4".to_owned(), "online.max_new_tokens = 64".to_owned()], vec![])
    );
    let (batch, _) = translated(Program::Axolotl, Method::Grpo, "train.batch_size", settings);
    assert_eq!(batch, ["train.batch_size = 2"]);
    let (loss, _) = translated(Program::Axolotl, Method::Grpo, "grpo.", settings);
    assert_eq!(loss, ["grpo.loss = \"grpo\""]);
}

/// DeepSpeed's warm-up is a straight line only if the file says so.
#[test]
fn warm_up_of_deepspeed_is_told() {
    let missing = |more: &str| {
        let folder = tempfile::tempdir().unwrap();
        let [json, yaml] = ["ds.json", "dpo.yaml"].map(|name| folder.path().join(name));
        let text = format!(
            "{{\"zero_optimization\": {{\"stage\": 2}}, \"scheduler\": {{\"type\": \"WarmupDecayLR\", \"params\": {{{more}\"warmup_num_steps\": 20}}}}}}"
        );
        fs::write(&json, text).unwrap();
        fs::write(&yaml, "model_name_or_path: m\nbeta: 0.1\ndeepspeed: ds.json\n").unwrap();
        let train = vec!["d.jsonl".to_owned()];
        let answers = Answers { ranks: Some(1), train, ..Answers::default() };
        let draft = translate(&[yaml], Some(Program::Trl), &answers, &Rows(None)).unwrap().draft;
        assert_eq!(draft.get("train.warmup_steps"), Some(&20.into()));
        draft.missing.into_iter().map(|remark| remark.setting).collect::<Vec<_>>()
    };
    assert_eq!(missing(""), ["scheduler.type = WarmupDecayLR"]);
    assert_eq!(missing("\"warmup_type\": \"log\", "), ["scheduler.params.warmup_type = log"]);
    assert!(missing("\"warmup_type\": \"linear\", ").is_empty());
}

/// The untrained model is no candidate for the best one there.
#[test]
fn the_best_checkpoint_is_a_trained_one() {
    let settings = "eval_dataset: e.jsonl\neval_strategy: steps\neval_steps: 5\nload_best_model_at_end: true";
    for (more, first) in [("", Some(false)), ("\neval_on_start: true", Some(true))] {
        let (keys, _) =
            translated(Program::Trl, Method::Dpo, "train.eval_first", &format!("{settings}{more}"));
        let expected: Vec<_> = first.iter().map(|first| format!("train.eval_first = {first}")).collect();
        assert_eq!(keys, expected);
    }
    let without = settings.replace("load_best_model_at_end: true", "");
    assert!(translated(Program::Trl, Method::Dpo, "train.eval_first", &without).0.is_empty());
}

#[test]
fn reward_models_become_judges() {
    for (command, name) in [
        ("trl grpo --num_generations 2 --reward_model_name_or_path rm", "reward_model_name_or_path"),
        ("python online_dpo.py --reward_model_path rm", "reward_model_path"),
    ] {
        let draft = of_command(command).unwrap();
        let [judge] = &draft.judges[..] else { panic!("{command}: {:?}", draft.judges) };
        assert_eq!((judge[1].value.as_str(), judge[1].comment.as_str()), (Some("rm"), name));
        assert!(draft.unknown.is_empty() && draft.missing.is_empty(), "{command}");
    }
}

/// LLaMA-Factory's pretraining learns the texts of the prompts' column.
#[test]
fn pretraining_of_llama_factory_reads_a_column_of_texts() {
    let folder = tempfile::tempdir().unwrap();
    let info = r#"{"a": {"file_name": "a.json", "columns": {"prompt": "story"}}, "b": {"file_name": "b.json", "columns": {"prompt": "text"}}}"#;
    fs::write(folder.path().join("dataset_info.json"), info).unwrap();
    for (set, keys) in [("a", &["data.columns = { text = \"story\" }"][..]), ("b", &[])] {
        let path = folder.path().join("lf.yaml");
        let text = format!(
            "model_name_or_path: m\nstage: pt\nfinetuning_type: full\ndataset: {set}\ndataset_dir: {}\n",
            folder.path().display()
        );
        fs::write(&path, text).unwrap();
        let answers = Answers { ranks: Some(1), ..Answers::default() };
        let draft = translate(&[path], Some(Program::LlamaFactory), &answers, &Rows(None)).unwrap().draft;
        assert_eq!(keys_of(&draft, "data.columns"), keys);
        assert!(draft.get("data.shape").is_none() && draft.get("data.loss_on").is_some());
    }
}

#[test]
fn words_for_further_arguments_are_listed() {
    let draft = of_command("python dpo.py --beta 0.1 $EXTRA").unwrap();
    let remark = draft.missing.iter().find(|remark| remark.setting == "$EXTRA").expect("listed");
    assert_eq!(remark.reason, "it stands for arguments which no file tells; set what they set");
}
