//! Distillation over the policy's own answers, alone or among given completions.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::online::{Answer, Batch, CompletedPrompt};
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Trainer};

use super::meshes::Mesh;
use super::ranks::log;
use crate::small::Small;

const ORDER: [&str; 3] = ["data.order=sequential", "train.steps=3", "train.samples=0"];
const OWN: &str = "distill.lmbda=1.0";

fn numbers(small: &Small, name: &str, key: &str) -> Vec<f64> {
    log(small, name).iter().map(|line| line[key].as_f64().unwrap()).collect()
}

/// Compares what two runs train on, which went different ways to the same completions.
fn are_near(small: &Small, [own, given]: [&str; 2]) {
    for key in ["loss", "grad_norm", "distill/forward_kl", "distill/reverse_kl", "mean_token_accuracy"] {
        let [own, given] = [own, given].map(|name| numbers(small, name, key));
        assert_eq!(own.len(), 3);
        for (own, given) in own.iter().zip(&given) {
            assert!((own - given).abs() <= 2e-6 * given.abs().max(1.0), "{key}: {own}, given {given}");
        }
    }
}

/// The completions of a data set, as if the policy had given them.
fn as_answers(config: &Config) -> impl Fn(u32) -> CompletedPrompt + use<> {
    let given = RunInputs::open(config, &mut Silent).unwrap().train;
    move |row| {
        let tokens = given.scored(row as usize).tokens[given.prompt_tokens(row as usize).len()..].to_vec();
        CompletedPrompt { row, answers: vec![Answer { tokens, is_ended: true, ..Answer::default() }] }
    }
}

/// Given completions have TRL's numbers (`golden_distill`), and so have the same completions as answers.
#[test]
fn answers_are_trained_on_as_completions_of_the_data_are() {
    for average in ["distill.average=token", "distill.average=sequence"] {
        let small = Small::new("distill");
        let settings = [&ORDER[..], &[average]].concat();
        small.finish("given", RunDirPolicy::Fresh, &settings);
        let answered = as_answers(&small.config("given", &settings));
        let batch = |step: u64| {
            let prompts = (8 * step as u32..8 * step as u32 + 8).map(&answered).collect();
            Batch { step, answered_after: step, prompts, replaced: 0 }
        };
        let config = small.config("own", &[&settings[..], &[OWN]].concat());
        let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut Silent).unwrap();
        trainer.answered((0..3).map(batch));
        trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
        are_near(&small, ["own", "given"]);
        assert_eq!(numbers(&small, "own", "distill/own_answers"), [1.0; 3]);
    }
}

#[test]
fn rows_that_keep_their_completions_are_those_of_a_run_without_answers() {
    let small = Small::new("distill");
    small.finish("given", RunDirPolicy::Fresh, &ORDER);
    small.finish("own", RunDirPolicy::Fresh, &[&ORDER[..], &["distill.lmbda=1e-40"]].concat());
    are_near(&small, ["own", "given"]);
    assert_eq!(numbers(&small, "own", "distill/own_answers"), [0.0; 3]);
    let sampled = fs::read_to_string(small.path("own/samples.jsonl")).unwrap();
    assert_eq!(sampled, "", "nothing was sampled");
}

/// The mean over completions is another one where their lengths differ.
#[test]
fn completions_of_any_length_weigh_the_same_if_asked() {
    let small = Small::new("distill");
    small.finish("token", RunDirPolicy::Fresh, &ORDER);
    small.finish("sequence", RunDirPolicy::Fresh, &[&ORDER[..], &["distill.average=sequence"]].concat());
    let [token, sequence] = ["token", "sequence"].map(|name| numbers(&small, name, "loss")[0]);
    let [forward, other] = ["token", "sequence"].map(|name| numbers(&small, name, "distill/forward_kl")[0]);
    assert!(token != sequence && (token - sequence).abs() < 0.1, "{token} and {sequence}");
    assert_eq!(forward, other, "metrics are means over tokens");
}

const MIXED: [&str; 4] =
    ["distill.lmbda=0.5", "online.answers=2", "online.max_new_tokens=12", "online.samples_every=1"];

#[test]
fn a_share_of_the_rows_is_answered() {
    let small = Small::new("distill");
    small.finish("run", RunDirPolicy::Fresh, &MIXED);
    let shares = numbers(&small, "run", "distill/own_answers");
    assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)), "{shares:?}");
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    // 48 rows; four standard errors.
    assert!((0.21..0.79).contains(&mean), "{shares:?}");
    let sampled = fs::read_to_string(small.path("run/samples.jsonl")).unwrap();
    let lines: Vec<Value> = sampled.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() as f64, 8.0 * shares.iter().sum::<f64>(), "the others have no answers");
    for line in lines {
        assert!(line["prompt"].as_str().is_some_and(|prompt| !prompt.is_empty()), "{line}");
        assert_eq!(line["answers"].as_array().map(Vec::len), Some(2), "{line}");
        assert!(line.get("pairs").is_none());
    }
}

#[test]
fn answers_on_a_few_meshes() {
    let few = [(3, "ddp", 1), (4, "zero2", 2), (6, "zero3", 3)];
    let few = few.map(|(ranks, sharding, replicate)| Mesh::data(ranks, sharding, replicate));
    super::equivalence::same_on(&few, 3, "distill", &MIXED);
    let adapted =
        [OWN, "online.max_new_tokens=12", "adapter.rank=4", "compute.format=nf4", "online.overlap=true"];
    super::equivalence::same_on(&few[1..], 3, "distill", &adapted);
}

#[test]
fn answers_resume_bit_for_bit() {
    super::resume::resumed_equals_unstopped("distill", &[&MIXED[..], &["online.steps_per_round=3"]].concat());
    super::resume::resumed_equals_unstopped(
        "distill",
        &[OWN, "online.max_new_tokens=12", "online.overlap=true", "distill.temperature=2.0"],
    );
}

/// Held-out completions are given ones, whatever is trained on.
#[test]
fn held_out_completions_are_compared() {
    let small = Small::new("distill");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/sft_completion.jsonl");
    let eval = format!("data.eval={}", data.display());
    let settings = ["train.steps=2", "train.eval_every=1", "online.max_new_tokens=12"];
    let first = |lmbda: &str| {
        let online = &settings[..if lmbda == "distill.lmbda=0.0" { 2 } else { 3 }];
        small.finish("run", RunDirPolicy::Overwrite, &[online, &[lmbda, &eval]].concat());
        let lines = fs::read_to_string(small.path("run/metrics.jsonl")).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let evaluations: Vec<Value> = lines.filter(|line| line["split"] == "eval").collect();
        assert_eq!(evaluations.len(), 3);
        evaluations[0]["loss"].as_f64().unwrap()
    };
    let losses = ["distill.lmbda=0.0", "distill.lmbda=0.5", OWN].map(first);
    assert_eq!([losses[1], losses[2]], [losses[0]; 2]);
}

#[test]
fn a_prompt_without_room_is_named() {
    let small = Small::new("distill");
    let error = |settings: &[&str]| {
        let config = small.config("run", settings);
        RunInputs::open(&config, &mut Silent).map(drop).expect_err("it has no room").to_string()
    };
    let found = error(&["distill.lmbda=0.5", "online.max_new_tokens=90"]);
    assert!(
        found.contains("sft_completion.jsonl:1: with distill.lmbda = 0.5") && found.contains("no room for"),
        "{found}"
    );
    // Where prompts alone are read, those without room are left out, as in other online runs.
    let found = error(&[OWN, "online.max_new_tokens=94"]);
    assert!(found.contains("no row"), "{found}");
}
