//! TRL's `GRPOTrainer` on given answers and scores, step by step: loss, gradient norm, metrics and final weights.
//!
//! Numbers: `goldens/grpo/*.json`, made by `goldens/grpo_golden.py`. Weights: `goldens/formula.rs`.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tandem_train::Config;
use tandem_train::online::{Answer, Batch, CompletedPrompt};

use crate::formula;
use crate::golden_online::{final_weights_are_trls, goldens, ids, metric_is_trls, model, train_on};

pub(crate) const EOS: u32 = 2;

/// The config of a golden's run, with `more` settings.
pub(crate) fn as_trl(golden: &Value, folder: &Path, more: &[String]) -> Config {
    let args = golden["args"].as_object().unwrap();
    let group = args["num_generations"].as_u64().unwrap();
    let mut text = format!(
        "method = \"grpo\"\nmodel = \"model\"\noutput = \"run\"\n[data]\ntrain = {:?}\ncache = \"cache\"\n\
         max_length = 96\norder = \"sequential\"\n[objective]\nbeta = {}\n[online]\nanswers = {group}\n\
         max_new_tokens = {}\ntemperature = {}\n[train]\nbatch_size = {}\nmicro_batch_size = 1\nsteps = {}\n\
         learning_rate = {}\nschedule = {}\nwarmup_steps = {}\nmax_grad_norm = {}\nweight_decay = {}\n[compute]\n\
         devices = \"cpu\"\ndtype = \"f32\"\nthreads = 2\n[[judges]]\nkind = \"missing_eos\"\n[grpo]\n",
        goldens().join("online/prompts_conv.jsonl"),
        args["beta"],
        args["max_completion_length"],
        args.get("temperature").unwrap_or(&Value::from(1.0)),
        args["per_device_train_batch_size"].as_u64().unwrap() / group,
        args["max_steps"],
        args["learning_rate"],
        args["lr_scheduler_type"],
        args["warmup_steps"],
        args["max_grad_norm"],
        args["weight_decay"],
    );
    for (theirs, ours) in [
        ("loss_type", "loss"),
        ("mask_truncated_completions", "mask_truncated"),
        ("scale_rewards", "scale_rewards"),
        ("epsilon", "epsilon"),
        ("epsilon_high", "epsilon_high"),
        ("delta", "delta"),
        ("importance_sampling_level", "importance_sampling_level"),
        ("use_bias_correction_kl", "use_bias_correction_kl"),
        ("off_policy_mask_threshold", "off_policy_mask_threshold"),
        ("top_entropy_quantile", "top_entropy_quantile"),
    ] {
        if let Some(value) = args.get(theirs) {
            writeln!(text, "{ours} = {value}").unwrap();
        }
    }
    let path = folder.join("run.toml");
    fs::write(&path, text).unwrap();
    Config::load(&path, more).unwrap_or_else(|e| panic!("{e}"))
}

/// The batches that TRL trained on. One with old log-probabilities was answered a step before.
fn batches(golden: &Value) -> Vec<Batch> {
    let of_answer = |(tokens, score, old): (&Value, &Value, &Value)| {
        let tokens = ids(tokens);
        let log_probs = match old {
            Value::Null => vec![0.0; tokens.len()],
            old => serde_json::from_value(old.clone()).unwrap(),
        };
        let (is_ended, score) = (tokens.last() == Some(&EOS), score.as_f64());
        Answer { tokens, is_ended, score, log_probs, ..Answer::default() }
    };
    let of_row = |(row, old): (u32, &Value)| {
        let given = &golden["rows"][row as usize];
        let [tokens, scores] = ["completions", "scores"].map(|key| given[key].as_array().unwrap());
        let answers = tokens.iter().zip(scores).zip(old.as_array().unwrap());
        CompletedPrompt { row, answers: answers.map(|((a, b), c)| of_answer((a, b, c))).collect() }
    };
    let of_step = |(batch, step): (&Value, u64)| {
        let old = batch["old"].as_array().unwrap();
        let is_old = old.iter().any(|row| !row[0].is_null());
        // TRL has them in the first step of two as well, where they are the policy's.
        let is_first = step % 2 == 0;
        Batch {
            step,
            answered_after: if is_old && !is_first { step - 1 } else { step },
            prompts: ids(&batch["rows"]).into_iter().zip(old).map(of_row).collect(),
            replaced: 0,
        }
    };
    golden["batches"].as_array().unwrap().iter().zip(0..).map(of_step).collect()
}

/// Groups of answers are whole, and in several micro-batches.
fn is_trl(name: &str) {
    for micro_batch in ["train.micro_batch_size=1", "train.micro_batch_tokens=48"] {
        is_trl_in(name, micro_batch);
    }
}

fn is_trl_in(name: &str, micro_batch: &str) {
    let text = fs::read_to_string(goldens().join(format!("grpo/{name}.json"))).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    model(&golden, &folder.path().join("model"), formula::weight);
    let config = as_trl(&golden, folder.path(), &[micro_batch.to_owned()]);
    let found = train_on(name, &golden, config, folder.path(), batches(&golden));
    let steps = golden["steps"].as_array().unwrap();
    let not_ours = |key: &str| {
        // No judge scored; TRL counts padding's tokens over the run, and times.
        key.starts_with("rewards/given") || ["num_tokens", "step_time", "epoch"].contains(&key)
    };
    let mut num_compared = 0;
    for (ours, theirs) in found.iter().zip(steps) {
        for (key, theirs) in theirs.as_object().unwrap().iter().filter(|(key, _)| !not_ours(key)) {
            metric_is_trls(name, key, &ours[key], theirs);
            num_compared += 1;
        }
    }
    assert!(num_compared >= 40, "{num_compared} numbers");
    final_weights_are_trls(name, &golden, folder.path());
}

macro_rules! runs {
    ($($name:ident),+) => {
        $(#[test]
        fn $name() {
            is_trl(stringify!($name));
        })+
    };
}

runs!(
    dapo,
    grpo_kl,
    bnpo,
    dr_grpo,
    clipped,
    gspo,
    luspo,
    cispo,
    sapo,
    vespo,
    temperature,
    truncated,
    off_policy,
    entropy
);
