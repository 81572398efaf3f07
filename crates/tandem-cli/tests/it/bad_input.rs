//! A user's mistakes: the exit code is 2 and the message names the place.

use std::fs;

use crate::workshop::Workshop;
use serde_json::json;

#[test]
fn a_configuration_that_is_not_there() {
    Workshop::new().run(&["train", "none.toml"]).expect(2).says(&["none.toml"]);
}

#[test]
fn an_unknown_key_suggests_the_nearest_one() {
    let shop = Workshop::new();
    shop.write("dpo.toml", &shop.dpo_toml("run").replace("learning_rate", "learning_rat"));
    shop.run(&["train", "dpo.toml"]).expect(2).says(&[
        "dpo.toml:11",
        "train.learning_rat",
        "did you mean `train.learning_rate`",
    ]);
}

#[test]
fn an_unknown_key_on_the_command_line() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--set", "train.step=3"])
        .expect(2)
        .says(&["--set train.step=3", "did you mean `train.steps`"]);
}

const WEIGHTS: &str = "model/model.safetensors";

#[test]
fn weights_that_are_not_finite() {
    let shop = Workshop::new();
    shop.fill_tensor(WEIGHTS, "model.layers.1.mlp.up_proj.weight", f32::NAN);
    let told = ["model.layers.1.mlp.up_proj.weight holds NaN", "expected finite weights"];
    for command in [
        &["train", "dpo.toml"][..],
        &["train", "dpo.toml", "--set", "compute.devices=cpu:2"],
        &["generate", "model", "the quick"],
        &["export", "model", "--to", "policy.pt"],
    ] {
        shop.run(command).expect(2).says(&told);
    }
    assert!(!shop.path("run/final").exists());
}

/// They are numbers, and what they are multiplied to is none.
#[test]
fn weights_that_are_too_large() {
    let shop = Workshop::new();
    shop.fill_tensor(WEIGHTS, "model.norm.weight", 3e38);
    let told = ["the logits of token 0 of a completion are not finite"];
    for sampling in [&["--temperature", "0"][..], &["--temperature", "1"]] {
        let command = [&["generate", "model", "the quick", "--max-new-tokens", "4"], sampling];
        shop.run(&command.concat()).expect(2).says(&told);
    }
}

#[test]
fn an_unknown_option_and_no_command_at_all() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--frobnicate"]).expect(2).says(&["--frobnicate"]);
    shop.run(&[]).expect(2).says(&["Usage"]);
}

#[test]
fn a_missing_data_file() {
    let shop = Workshop::new();
    fs::remove_file(shop.path("preferences.jsonl")).unwrap();
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["preferences.jsonl"]);
}

#[test]
fn a_broken_line_is_named_by_file_and_number() {
    let shop = Workshop::new();
    let good = shop.read("preferences.jsonl");
    let mut lines: Vec<&str> = good.lines().collect();
    lines[6] = r#"{"prompt": "cut off"#;
    shop.write("preferences.jsonl", &lines.join("\n"));
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["preferences.jsonl:7"]);
}

#[test]
fn a_missing_column_is_named() {
    let shop = Workshop::new();
    shop.write_rows("preferences.jsonl", 8, |i| json!({"prompt": format!("{i}"), "chosen": " yes"}));
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["preferences.jsonl:1", "rejected"]);
}

#[test]
fn an_empty_data_set() {
    let shop = Workshop::new();
    shop.write("preferences.jsonl", "\n\n");
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["preferences.jsonl"]);
}

#[test]
fn prompts_that_all_fill_max_length_leave_nothing_to_train_on() {
    let shop = Workshop::new();
    let set = ["train", "dpo.toml", "--set", "data.max_length=4"];
    shop.run(&set).expect(2).says(&["preferences.jsonl", "max_length"]);
}

#[test]
fn one_prompt_longer_than_max_length_is_dropped_and_counted() {
    let shop = Workshop::new();
    let rows = shop.read("preferences.jsonl");
    let long = json!({"prompt": "many words ".repeat(100), "chosen": " a", "rejected": " b"});
    shop.write("preferences.jsonl", &format!("{rows}{long}\n"));
    shop.run(&["train", "dpo.toml", "--set", "train.steps=1"])
        .expect(0)
        .says(&["dropped", "preferences.jsonl:25"]);
}

#[test]
fn a_model_folder_that_is_not_there() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--set", "model=nowhere"]).expect(2).says(&["nowhere"]);
}

#[test]
fn an_unknown_architecture_says_which_are_known() {
    let shop = Workshop::new();
    shop.write("model/config.json", &shop.read("model/config.json").replace("LlamaForCausalLM", "BertModel"));
    let known = ["LlamaForCausalLM", "PhiForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"];
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["config.json", "BertModel"]).says(&known);
}

#[test]
fn truncated_weights_are_named() {
    let shop = Workshop::new();
    let bytes = shop.bytes("model/model.safetensors");
    fs::write(shop.path("model/model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    let outcome = shop.run(&["train", "dpo.toml"]).expect(2).says(&["`model` = ", "model.safetensors"]);
    assert!(!outcome.stderr.contains("tokenise"), "{}", outcome.stderr);
    for command in ["train", "plan"] {
        let given = [command, "dpo.toml", "--set", "weights=nope.pt"];
        shop.run(&given).expect(2).says(&["`weights` = ", "nope.pt"]);
    }
}

#[test]
fn a_checkpoint_of_another_model_is_told_by_the_key_that_has_changed() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--set", "train.steps=2"]).expect(0);
    let resumed = |more: &[&str]| shop.run(&[&["train", "dpo.toml", "--resume"], more].concat()).expect(2);
    resumed(&["--set", "adapter.rank=4"]).says(&["`adapter` was absent and is now set", "--overwrite"]);
    let adapter = ["--set", "adapter.rank=4"];
    shop.run(&[&["train", "dpo.toml", "--overwrite", "--set", "train.steps=2"][..], &adapter].concat())
        .expect(0);
    resumed(&["--set", "adapter.rank=8"]).says(&["`adapter.rank` was 4 and is now 8"]);
    resumed(&[]).says(&["`adapter` was set and is now absent"]);
}

#[test]
fn options_that_cannot_be_meant_are_named() {
    let shop = Workshop::new();
    fs::create_dir(shop.path("plain")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(shop.path(&format!("model/{name}")), shop.path(&format!("plain/{name}"))).unwrap();
    }
    for (command, option) in [
        (&["chat", "plain"][..], "no chat template"),
        (&["serve", "model", "--context", "0"], "--context"),
        (&["serve", "model", "--max-batch", "0"], "--max-batch"),
        (&["serve", "model", "--max-queue", "0"], "expected a number of at least 1"),
        (&["serve", "model", "--key-env", "TANDEM_TEST_EMPTY"], "the variable TANDEM_TEST_EMPTY is empty"),
        (&["chat", "model", "--context", "0"], "--context"),
        (&["chat", "model", "--max-new-tokens", "0"], "--max-new-tokens"),
        (&["generate", "model", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (&["generate", "model", "hi", "--temperature", "-1"], "temperature is -1, expected 0 or more"),
        (&["generate", "model", "hi", "--device", "cuda:99"], "--device cuda:99: "),
        (&["generate", "nope", "hi"], "nope: no such model folder"),
        (&["plan", "--model", "nope/x"], "the command line: `model`"),
        (
            &["eval", "dpo.toml", "--set", "data.eval=preferences.jsonl", "--checkpoint", "nope"],
            "there is no such folder",
        ),
        (&["train", "dpo.toml", "--set", "output=preferences.jsonl"], "preferences.jsonl"),
        (&["train", "dpo.toml", "--set", "output=preferences.jsonl/x"], "preferences.jsonl"),
    ] {
        let output = shop.command(command).env("TANDEM_TEST_EMPTY", "").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
        assert!(stderr.contains(option), "{command:?}: {stderr}");
    }
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let shop = Workshop::new();
    let mut config: serde_json::Value = serde_json::from_str(&shop.read("model/config.json")).unwrap();
    config["intermediate_size"] = 96.into();
    shop.write("model/config.json", &config.to_string());
    shop.run(&["train", "dpo.toml"]).expect(2).says(&["mlp.gate_proj.weight", "96", "64"]);
}

#[test]
fn a_used_folder_is_refused_unless_told() {
    let shop = Workshop::new();
    let short = ["train", "dpo.toml", "--set", "train.steps=2"];
    shop.run(&short).expect(0);
    let before = shop.bytes("run/metrics.jsonl");
    shop.run(&short).expect(2).says(&["run", "--resume", "--overwrite"]);
    assert_eq!(before, shop.bytes("run/metrics.jsonl"), "a refused run must not touch the folder");
    shop.run(&[&short[..], &["--overwrite"]].concat()).expect(0);
}

#[test]
fn what_would_be_lost_is_not_replaced() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    let before = shop.bytes("run/metrics.jsonl");
    for page in [&["report", "run", "--out"][..], &["plan", "dpo.toml", "--html"]] {
        shop.run(&[page, &["run/metrics.jsonl"]].concat()).expect(2).says(&["metrics.jsonl", "no page"]);
        shop.run(&[page, &["page.html"]].concat()).expect(0);
        shop.run(&[page, &["page.html"]].concat()).expect(0);
    }
    std::fs::remove_dir_all(shop.path("run/checkpoints")).unwrap();
    shop.run(&["train", "dpo.toml", "--resume"]).expect(2).says(&["final/", "no checkpoint", "--overwrite"]);
    let own = ["--overwrite", "--set", "data.train=run/metrics.jsonl"];
    shop.run(&[&["train", "dpo.toml"][..], &own].concat()).expect(2).says(&["data.train", "metrics.jsonl"]);
    assert_eq!(before, shop.bytes("run/metrics.jsonl"), "the run is as it was");
    shop.run(&["verify", "run", "--out", "run/again"]).expect(2).says(&["--out", "own folder"]);
}

#[test]
fn a_step_that_is_all_warm_up_is_refused() {
    let shop = Workshop::new();
    let text = shop.read("dpo.toml").replace("steps = 6", "epochs = 1");
    shop.write("short.toml", &text);
    let one = ["train", "short.toml", "--set", "train.batch_size=1000", "--set"];
    let refused = shop.run(&[&one[..], &["train.warmup_ratio=0.1"]].concat());
    refused.expect(2).says(&["one step", "nothing would be learned", "train.warmup_ratio = 0"]);
    shop.run(&[&one[..], &["train.warmup_ratio=0"]].concat()).expect(0);
    // A trial of another run's settings.
    let trial =
        ["train", "dpo.toml", "--overwrite", "--set", "train.steps=1", "--set", "train.warmup_ratio=0.1"];
    shop.run(&trial).expect(0).says(&["learning rate of 0", "stays as it is"]);
}

#[test]
fn resuming_where_nothing_was_saved_starts_and_says_so() {
    // A launcher that always passes --resume must be able to start the first time.
    Workshop::new()
        .run(&["train", "dpo.toml", "--resume"])
        .expect(0)
        .says(&["no complete checkpoint", "step 6/6"]);
}

#[test]
fn a_run_that_bad_input_stopped_leaves_no_used_folder() {
    let shop = Workshop::new();
    let bytes = shop.bytes("model/model.safetensors");
    fs::write(shop.path("model/model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    shop.run(&["train", "dpo.toml"]).expect(2);
    fs::write(shop.path("model/model.safetensors"), &bytes).unwrap();
    shop.run(&["train", "dpo.toml"]).expect(0);
}

#[test]
fn a_partial_launch_environment_is_refused() {
    let shop = Workshop::new();
    let output = shop.command(&["train", "dpo.toml"]).env("RANK", "0").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("RANK=0") && stderr.contains("WORLD_SIZE"), "{stderr}");
}

/// torchrun's agent shows what a rank writes there.
#[test]
fn an_error_is_written_where_the_agent_looks_for_it() {
    let shop = Workshop::new();
    let mut command = shop.command(&["train", "nothing.toml"]);
    let output = command.env("TORCHELASTIC_ERROR_FILE", shop.path("error.json")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error: serde_json::Value = serde_json::from_str(&shop.read("error.json")).unwrap();
    assert!(error["message"]["message"].as_str().unwrap().contains("nothing.toml"), "{error}");
    assert!(error["message"]["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().is_ok(), "{error}");
}
