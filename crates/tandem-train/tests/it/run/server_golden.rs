//! TRL's `GRPOTrainer` on answers and log-probabilities that a server gives to an adapter: loss, gradient norm and metrics of every
//! step.
//!
//! Numbers: `goldens/grpo/served_*.json`, made by `goldens/grpo_golden.py`.

use std::fs;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Trainer, judges};

use super::fake::{Fake, Reply, Request};
use super::vllm;
use crate::formula;
use crate::golden_grpo;
use crate::golden_online::{goldens, ids, metric_is_trls, model};

fn golden(name: &str) -> Value {
    let text = fs::read_to_string(goldens().join(format!("grpo/{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A server that gives the golden's answers to its prompts.
fn server(golden: &Value) -> Fake {
    let golden = golden.clone();
    let complete = move |request: &Request| {
        let rows = golden["rows"].as_array().unwrap();
        let row =
            rows.iter().position(|row| row["prompt"] == request.body["prompt"]).expect("a known prompt");
        let choice = |index: usize| {
            let tokens = &rows[row]["completions"][index];
            let is_ended = ids(tokens).last() == Some(&golden_grpo::EOS);
            json!({
                "index": index,
                "logprobs": { "token_logprobs": golden["served"][row][index] },
                "finish_reason": if is_ended { "stop" } else { "length" },
                "stop_reason": null,
                "prompt_token_ids": request.body["prompt"],
                "token_ids": tokens,
            })
        };
        let choices: Vec<Value> =
            (0..rows[row]["completions"].as_array().unwrap().len()).map(choice).collect();
        json!({ "model": request.body["model"], "choices": choices }).to_string()
    };
    vllm::start(move |request, _| match request.path.as_str() {
        "completions" => Reply::Http(200, complete(request)),
        _ => Reply::Usual,
    })
}

fn is_trl(name: &str, ratio: &str, more: &[&str]) {
    let golden = golden(&format!("served_{name}"));
    let folder = tempfile::tempdir().unwrap();
    // The weights' names are those of any run of the model.
    model(&self::golden("dapo"), &folder.path().join("model"), formula::weight);
    let adapter = folder.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    fs::write(adapter.join("adapter_config.json"), golden["adapter"]["config"].to_string()).unwrap();
    let tensors: Vec<(String, Vec<usize>)> =
        serde_json::from_value(golden["adapter"]["tensors"].clone()).unwrap();
    formula::write_tensors(&adapter.join("adapter_model.safetensors"), &tensors, formula::weight).unwrap();
    let scores: Vec<Vec<f64>> = golden["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| serde_json::from_value(row["scores"].clone()).unwrap())
        .collect();
    let function = format!("served {name} {}", more.join(" "));
    judges::register(&function, move |group, answer| {
        let line: usize = group.place.rsplit_once(':').unwrap().1.parse().unwrap();
        let answer = group.answers.iter().position(|other| std::ptr::eq(other, answer)).unwrap();
        Some(scores[line - 1][answer])
    });
    let server = server(&golden);
    let arg = |key: &str| golden["args"].get(format!("vllm_importance_sampling_{key}")).map(Value::to_string);
    let mut settings = vec![
        format!("adapter.start={:?}", adapter.display().to_string()),
        format!("online.server.base_url={:?}", server.address),
        "online.server.model=base".to_owned(),
        format!("online.server.importance_sampling={ratio}"),
        format!("grpo.num_iterations={}", golden["args"]["num_iterations"]),
        format!("judges=[{{ kind = \"own\", function = {function:?} }}]"),
    ];
    for (theirs, ours) in [("clip_max", "max"), ("clip_min", "min")] {
        settings.extend(arg(theirs).map(|value| format!("online.server.importance_sampling_{ours}={value}")));
    }
    settings.extend(more.iter().map(|&setting| setting.to_owned()));
    let config = golden_grpo::as_trl(&golden, folder.path(), &settings);
    Trainer::new(config, RunDirPolicy::Fresh, &mut Silent)
        .unwrap()
        .run(&mut Silent, &AtomicBool::new(false))
        .unwrap();
    let found = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let found: Vec<Value> = found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps = golden["steps"].as_array().unwrap();
    assert_eq!(found.len(), steps.len());
    let not_ours =
        |key: &str| key.starts_with("rewards/given") || ["num_tokens", "step_time", "epoch"].contains(&key);
    for (ours, theirs) in found.iter().zip(steps) {
        for (key, theirs) in theirs.as_object().unwrap().iter().filter(|(key, _)| !not_ours(key)) {
            metric_is_trls(name, key, &ours[key], theirs);
        }
    }
}

macro_rules! runs {
    ($($name:ident),+) => {
        $(#[test]
        fn $name() {
            is_trl(stringify!($name), stringify!($name), &[]);
        })+
    };
}

runs!(sequence_mask, token_mask, token_truncate, sequence_truncate, none);

#[test]
fn temperature() {
    is_trl("temperature", "sequence_mask", &[]);
}

/// Old log-probabilities are gathered from every rank.
#[test]
fn ranks_change_nothing() {
    is_trl("sequence_mask", "sequence_mask", &["compute.devices=cpu:2"]);
}
