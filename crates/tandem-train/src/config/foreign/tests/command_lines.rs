//! Command lines of training scripts.

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
    let files = |text: &str| -> Vec<String> { read(text).files.into_iter().map(|(file, _)| file).collect() };
    assert_eq!(files("trl dpo --config dpo.yaml --beta 0.3"), ["dpo.yaml"]);
    assert_eq!(files("accelerate launch --config_file a.yaml dpo.py --config b.yaml"), ["a.yaml", "b.yaml"]);
    assert_eq!(files("axolotl train x.yml"), ["x.yml"]);
    assert_eq!(files("accelerate launch -m axolotl.cli.train x.yml"), ["x.yml"]);
    assert_eq!(files("llamafactory-cli train lora/x.yaml"), ["lora/x.yaml"]);
}

#[test]
fn hydras_overrides_are_mitchells() {
    let command = read("python -u train.py model=pythia28 datasets=[hh,shp] loss=dpo loss.beta=0.1 lr=5e-7");
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
    let command = read("trl dpo --max_steps 10 > log --output_dir 'a|b' --run_name \"c;d\" --project e\\&f");
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
