//! Numbers that are none, have the wrong sign, or are beyond what anything could hold.

use serde_json::{Value, json};

use super::GENERATE;
use crate::workshop::Workshop;

fn absurd() -> Vec<Value> {
    let big: Value = serde_json::from_str("100000000000000000000000000000000").unwrap();
    let mut values =
        vec![json!(-1), json!(1u64 << 32), json!(1u64 << 62), json!(u64::MAX), json!(10u64.pow(18)), big];
    values.extend([
        json!(1.5),
        json!(-0.5),
        json!(1e300),
        json!("8"),
        json!(true),
        json!([]),
        json!({}),
        json!([1, 2]),
    ]);
    values
}

#[test]
fn sizes_of_a_model() {
    let shop = Workshop::new();
    for key in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ] {
        for value in absurd().into_iter().chain([json!(0)]) {
            let case = format!("{key} = {value}");
            for command in [
                &GENERATE[..],
                &["plan", "--model", "model", "--assume-tokens", "64"],
                &["init-weights", "model", "new"],
            ] {
                shop.refuses_json(
                    &case,
                    "model/config.json",
                    |config| config[key] = value.clone(),
                    command,
                    &[key],
                );
            }
            assert!(!shop.path("new").exists(), "{case}");
        }
    }
}

#[test]
fn sizes_that_the_weights_do_not_have() {
    let shop = Workshop::new();
    for (key, value) in [
        ("vocab_size", 1 << 24),
        ("hidden_size", 1 << 20),
        ("intermediate_size", 1 << 20),
        ("num_hidden_layers", 10_000),
        ("num_attention_heads", 1 << 20),
        ("head_dim", 1 << 20),
    ] {
        let case = format!("{key} = {value}");
        shop.refuses_json(
            &case,
            "model/config.json",
            |config| config[key] = value.into(),
            &GENERATE,
            &["model"],
        );
    }
}

#[test]
fn sizes_that_no_machine_has() {
    let shop = Workshop::new();
    let large = |config: &mut Value| {
        config["hidden_size"] = (1 << 14).into();
        config["vocab_size"] = (1 << 24).into();
    };
    for command in
        [&["train", "dpo.toml", "--set", "weights=random"][..], &["init-weights", "model", "other"]]
    {
        shop.refuses_json(
            command[0],
            "model/config.json",
            large,
            command,
            &["this machine has", "with its swap"],
        );
    }
    let wide = |config: &mut Value| config["head_dim"] = (1 << 24).into();
    let words = ["head_dim is 16777216, expected at most 8192"];
    shop.refuses_json(
        "plan",
        "model/config.json",
        wide,
        &["plan", "--model", "model", "--assume-tokens=64"],
        &words,
    );
    let falling = |config: &mut Value| config["initializer_range"] = (-1).into();
    shop.refuses_json(
        "init",
        "model/config.json",
        falling,
        &["init-weights", "model", "other"],
        &["initializer_range"],
    );
}

#[test]
fn other_numbers_of_a_model() {
    let shop = Workshop::new();
    let beyond =
        [json!(-1), json!(0), json!(-0.5), json!(1e300), json!("8"), json!(true), json!([]), json!({})];
    for key in ["rope_theta", "rms_norm_eps"] {
        for value in &beyond {
            let case = format!("{key} = {value}");
            shop.refuses_json(
                &case,
                "model/config.json",
                |config| config[key] = value.clone(),
                &GENERATE,
                &[key],
            );
        }
    }
    for (kind, keys) in [
        ("linear", &["factor"][..]),
        ("dynamic", &["factor"]),
        ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
        ("yarn", &["factor", "beta_fast", "beta_slow", "attention_factor"]),
        ("longrope", &["factor", "attention_factor", "short_factor", "long_factor"]),
    ] {
        let good = json!({
            "rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128, "short_factor": vec![1.0; 8], "long_factor": vec![1.0; 8],
        });
        for key in keys {
            for value in &beyond {
                let mut rope = good.clone();
                rope[*key] = value.clone();
                let case = format!("{kind}: {key} = {value}");
                let change = |config: &mut Value| config["rope_parameters"] = rope;
                shop.refuses_json(&case, "model/config.json", change, &GENERATE, &[key]);
            }
        }
    }
    for key in ["eos_token_id", "bos_token_id", "pad_token_id"] {
        for value in
            [json!(-2), json!(1u64 << 32), json!(1.5), json!("8"), json!(true), json!({}), json!([-1])]
        {
            let case = format!("{key} = {value}");
            for file in ["model/config.json", "model/generation_config.json"] {
                if !shop.path(file).exists() {
                    shop.write(file, "{}");
                }
                shop.refuses_json(&case, file, |config| config[key] = value.clone(), &GENERATE, &[key]);
            }
        }
    }
    for key in
        ["temperature", "top_p", "top_k", "max_length", "max_new_tokens", "repetition_penalty", "num_beams"]
    {
        for value in [json!("8"), json!(true), json!({}), json!(1e300)] {
            let case = format!("{key} = {value}");
            let change = |config: &mut Value| config[key] = value.clone();
            shop.refuses_json(&case, "model/generation_config.json", change, &GENERATE, &[key]);
        }
    }
}

#[test]
fn numbers_of_a_run() {
    let shop = Workshop::new();
    let good = shop.dpo_toml("run");
    for (table, keys) in [
        ("train", &["learning_rate", "batch_size", "steps", "warmup_steps", "weight_decay", "clip_norm"][..]),
        ("train", &["eval_every", "save_every", "keep", "max_skipped", "ema_decay", "eps"]),
        ("data", &["max_length", "max_prompt_length", "train_rows"]),
        ("objective", &["beta", "label_smoothing"]),
        ("compute", &["threads", "tensor", "pipeline"]),
        ("adapter", &["rank", "alpha", "dropout"]),
    ] {
        for key in keys {
            for value in
                ["-1", "-0.5", "nan", "inf", "1e400", "9223372036854775808", "\"8\"", "[]", "{}", "true"]
            {
                let set = format!("{table}.{key}={value}");
                shop.refuses(&set, &["plan", "dpo.toml", "--set", &set], &[key]);
            }
        }
    }
    for weight in ["1e12", "1e300", "-1", "0", "nan", "inf", "\"a\""] {
        let rows = format!("train = [{{ path = \"preferences.jsonl\", weight = {weight} }}]");
        let text = good.replace("train = \"preferences.jsonl\"", &rows);
        shop.refuses_with(&rows, "dpo.toml", text.as_bytes(), &["train", "dpo.toml"], &["weight"]);
    }
    for set in [
        "compute.devices=cpu:1000000",
        "compute.threads=1000000000",
        "train.batch_size=1000000000000",
        "adapter.rank=1000000000",
        "data.max_length=1000000000000",
    ] {
        shop.refuses(set, &["train", "dpo.toml", "--set", set], &[]);
    }
    // The plan looks at every step.
    for set in ["train.steps=10000001", "train.steps=1000000000000", "train.steps=9223372036854775807"] {
        shop.refuses(set, &["train", "dpo.toml", "--set", set], &["train.steps"]);
    }
    let epochs = good.replace("steps = 6", "epochs = 1");
    for value in ["1e38", "4294967296", "1e9"] {
        let text = epochs.replace("epochs = 1", &format!("epochs = {value}"));
        shop.refuses_with(
            value,
            "dpo.toml",
            text.as_bytes(),
            &["train", "dpo.toml"],
            &["train.epochs", "steps"],
        );
    }
}

#[test]
fn numbers_on_the_command_line() {
    let shop = Workshop::new();
    for option in [
        "--temperature=-1",
        "--temperature=nan",
        "--temperature=inf",
        "--top-p=-1",
        "--top-p=2",
        "--top-p=nan",
        "--min-p=2",
        "--repetition-penalty=0",
        "--repetition-penalty=nan",
        "--top-k=-1",
        "--threads=0",
        "--threads=1000000000",
        "--max-new-tokens=0",
        "--max-new-tokens=-1",
        "--max-new-tokens=1e9",
        "--seed=-1",
        "--stop=",
    ] {
        let outcome = shop.run_bounded(option, &["generate", "model", "the quick", option]);
        outcome.expect(2);
    }
    for tokens in ["0", "-1", "9223372036854775808", "1000000000000"] {
        let option = format!("--assume-tokens={tokens}");
        shop.run_bounded(&option, &["plan", "--model", "model", &option]).expect(2);
    }
    // It ends where the model's context ends.
    shop.run_bounded(
        "as many as there are",
        &["generate", "model", "the quick", "--max-new-tokens=1000000000"],
    )
    .expect(0);
    let long = "the quick ".repeat(1000);
    let words = ["prompt 0 has", "the model's context of 256"];
    shop.refuses("a long prompt", &["generate", "model", &long], &words);
}
