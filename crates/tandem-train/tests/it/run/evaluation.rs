//! Evaluations, samples, the best checkpoint, and what follows from them.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tandem_train::Outcome;
use tandem_train::checkpoint::export;
use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::held_out;
use crate::small::Small;

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn checkpoints(small: &Small, name: &str) -> Vec<String> {
    let entries = fs::read_dir(small.path(name).join("checkpoints")).expect("checkpoints");
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Samples change no number of the training, and every mesh gives the same ones.
#[test]
fn samples_are_the_same_on_every_mesh_and_change_nothing() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_plain.jsonl");
    let common = [eval.as_str(), "train.eval_every=3", "compute.threads=1", "reference.kind=model"];
    let run =
        |name: &str, more: &[&str]| small.finish(name, RunDirPolicy::Fresh, &[&common, more].concat()).steps;
    let none = run("none", &["train.samples=0"]);
    assert!(!small.path("none/samples.jsonl").exists());
    let sampled = ["train.samples=2", "train.sample_tokens=6"];
    let scratch = format!("compute.offload_dir={}", small.path("").display());
    let mut first = None;
    for (name, mesh) in [
        ("one", &[][..]),
        ("three", &["compute.devices=cpu:3"]),
        ("zero3", &["compute.devices=cpu:3", "compute.sharding=zero3"]),
        ("sliced", &["compute.devices=cpu:2", "compute.tensor=2"]),
        ("host", &["compute.offload=host"]),
        ("file", &["compute.offload=nvme", scratch.as_str()]),
        ("adapted", &["adapter={rank=2}", "compute.devices=cpu:2", "train.learning_rate=1"]),
    ] {
        let steps = run(name, &[&sampled[..], mesh].concat());
        let samples = lines(&small.path(name).join("samples.jsonl"));
        let of: Vec<_> = samples.iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(of, [0, 0, 3, 3, 6, 6], "{name}");
        for key in ["place", "prompt", "chosen", "rejected"] {
            assert_eq!(samples[0][key], samples[4][key], "{name}: {key}");
        }
        assert!(samples.iter().all(|line| line["answers"][0]["tokens"].as_u64().unwrap() <= 6), "{name}");
        if name == "adapted" {
            assert_ne!(samples[0]["answers"], samples[4]["answers"], "the adapter takes part");
            continue;
        }
        assert_eq!(steps, none, "{name}");
        let expected = first.get_or_insert_with(|| samples.clone());
        assert_eq!(samples, *expected, "{name}");
    }
}

/// A process that was killed before the last answers is made up for, and lines that a checkpoint took for written
/// are missed.
#[test]
fn the_last_answers_and_lost_lines_are_noticed() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &[]);
    let path = small.path("run/samples.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    let before: String = whole
        .lines()
        .filter(|line| line.contains("\"step\":0,"))
        .fold(String::new(), |text, line| text + line + "\n");
    assert!(before.len() < whole.len());
    fs::write(&path, &before).unwrap();
    let heard = small.finish("run", RunDirPolicy::Resume, &[]);
    assert_eq!((fs::read_to_string(&path).unwrap(), heard.warnings), (whole, Vec::new()));

    let metrics = small.path("run/metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, text.lines().next().unwrap().to_owned() + "\n").unwrap();
    let heard = small.finish("run", RunDirPolicy::Resume, &[]);
    assert!(
        heard.warnings.len() == 1 && heard.warnings[0].contains("ends with step 1"),
        "{:?}",
        heard.warnings
    );
}

/// An answer may be longer than every row.
#[test]
fn answers_have_their_own_length() {
    let small = Small::new("sft");
    small.finish(
        "run",
        RunDirPolicy::Fresh,
        &["train.sample_tokens=150", "train.steps=1", "train.warmup_steps=0"],
    );
    let samples = lines(&small.path("run/samples.jsonl"));
    let answers = samples.iter().map(|line| &line["answers"][0]);
    let told = answers.filter(|answer| answer["tokens"] == 150 || answer["ended"] == true);
    assert_eq!(told.count(), samples.len(), "{samples:?}");
}

#[test]
fn sft_is_sampled_from_the_prompts_of_its_rows() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.sample_tokens=5"]);
    let samples = lines(&small.path("run/samples.jsonl"));
    assert_eq!(samples.len(), 6, "three before and three after");
    for line in &samples {
        assert_eq!(line["split"], "train");
        assert!(!line["prompt"].as_str().unwrap().is_empty() && !line["chosen"].as_str().unwrap().is_empty());
        assert!(line.get("rejected").is_none());
    }
}

/// A learning rate with which the held-out loss falls first and rises then.
const RISES: [&str; 4] =
    ["train.eval_every=1", "train.keep_best=eval/loss", "train.learning_rate=3e-2", "train.steps=12"];

pub fn eval_losses(small: &Small, name: &str) -> Vec<(u64, f64)> {
    let records = lines(&small.path(name).join("metrics.jsonl"));
    let eval = records.iter().filter(|record| record["split"] == "eval");
    eval.map(|record| (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap())).collect()
}

fn best(losses: &[(u64, f64)]) -> u64 {
    losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("an evaluation").0
}

/// `final/` has the weights of the best step, whose checkpoint stays beside the newest ones.
#[test]
fn the_best_checkpoint_is_kept_and_becomes_the_model() {
    for (method, mesh) in [
        ("dpo", &["reference.kind=model"][..]),
        ("sft", &["compute.devices=cpu:3", "compute.sharding=zero3"]),
        ("sft", &["adapter={rank=2}", "compute.sharding=zero1", "compute.devices=cpu:2"]),
    ] {
        let small = Small::new(method);
        let file = if method == "sft" { "sft_messages.jsonl" } else { "pref_plain.jsonl" };
        let eval = held_out(&small, file);
        let all = [&RISES[..], &[eval.as_str(), "train.keep=1", "train.save_every=4"], mesh].concat();
        small.finish("whole", RunDirPolicy::Fresh, &all);
        let losses = eval_losses(&small, "whole");
        assert_eq!(losses.len(), 13, "{losses:?}");
        let best = best(&losses);
        assert!(best < 12, "{method} {mesh:?}: the last step is the best, which tests nothing: {losses:?}");
        let kept = format!("step-{best:06}");
        assert_eq!(checkpoints(&small, "whole"), [kept.as_str(), "step-000012"], "{method} {mesh:?}");
        let out = small.path("exported");
        export(&small.config("whole", &all), &small.path("whole/checkpoints").join(&kept), &out)
            .unwrap_or_else(|error| panic!("{error}"));
        let file = ["model.safetensors", "adapter_model.safetensors"];
        let file = file.iter().find(|file| out.join(file).exists()).expect("weights");
        assert!(fs::read(out.join(file)).unwrap() == small.weights("whole"), "{method} {mesh:?}");

        // A run that stops in between knows its best step when it goes on.
        small.run("stopped", RunDirPolicy::Fresh, Some(best.max(1) + 1), &all).1.unwrap();
        small.finish("stopped", RunDirPolicy::Resume, &all);
        assert_eq!(eval_losses(&small, "stopped"), losses, "{method} {mesh:?}");
        assert!(small.weights("stopped") == small.weights("whole"), "{method} {mesh:?}");
    }
}

/// Evaluations of other rows are not compared with those before, and a best checkpoint that is gone is told before
/// the run goes on.
#[test]
fn the_best_of_other_rows_does_not_count() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_plain.jsonl");
    let falls =
        ["train.eval_every=1", "train.keep_best=eval/loss", "train.learning_rate=0.1", "train.keep=1"];
    let all = [&falls[..], &[eval.as_str()]].concat();
    small.run("run", RunDirPolicy::Fresh, Some(4), &all).1.unwrap();
    let before = eval_losses(&small, "run");
    let best_before = best(&before);
    assert!(best_before < 4, "the last step is the best, which tests nothing: {before:?}");
    let other = [&all[..], &["data.eval_rows=3"]].concat();
    let heard = small.finish("run", RunDirPolicy::Resume, &other);
    let told = |warning: &&String| warning.contains("other held-out rows");
    assert_eq!(heard.warnings.iter().filter(told).count(), 1, "{:?}", heard.warnings);
    let after: Vec<_> = eval_losses(&small, "run").into_iter().filter(|(step, _)| *step > 4).collect();
    assert_eq!(after.len(), 2);
    let kept = checkpoints(&small, "run");
    assert!(kept.contains(&format!("step-{:06}", best(&after))), "{after:?} {kept:?}");
    assert!(!kept.contains(&format!("step-{best_before:06}")), "{kept:?}");

    small.run("gone", RunDirPolicy::Fresh, Some(4), &all).1.unwrap();
    let gone = format!("step-{best_before:06}");
    fs::remove_dir_all(small.path("gone/checkpoints").join(&gone)).unwrap();
    let (heard, outcome) = small.run("gone", RunDirPolicy::Resume, None, &all);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(&gone) && error.contains("train.keep_best"), "{error}");
    assert_eq!(heard.steps.len(), 0);
}

#[test]
fn a_run_without_improvement_ends_early_and_stays_ended() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_plain.jsonl");
    let patience = ["train.early_stopping_patience=2", "train.steps=40"];
    let all = [&RISES[..3], &[eval.as_str()], &patience].concat();
    let steps = small.finish("run", RunDirPolicy::Fresh, &all).steps.len();
    let losses = eval_losses(&small, "run");
    assert!(steps < 40, "{losses:?}");
    assert_eq!(steps as u64, best(&losses) + 2, "{losses:?}");
    let weights = small.weights("run");
    assert_eq!(small.finish("run", RunDirPolicy::Resume, &all).steps.len(), 0);
    assert!(small.weights("run") == weights);
    assert_eq!(eval_losses(&small, "run"), losses);
}

#[test]
fn without_eval_first_nothing_is_evaluated_before_the_first_step() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_plain.jsonl");
    small.finish("run", RunDirPolicy::Fresh, &[&eval, "train.eval_first=false"]);
    assert_eq!(eval_losses(&small, "run").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [6]);
}

/// The model card says what the run was, and nothing about where it was.
#[test]
fn the_model_has_a_card() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["adapter={rank=2}"]);
    let card = fs::read_to_string(small.path("run/final/README.md")).unwrap();
    for part in ["library_name: peft", "sft_completion.jsonl", "mean_token_accuracy", "learning_rate = 0.01"]
    {
        assert!(card.contains(part), "{part} is not in\n{card}");
    }
    let place = small.path("");
    assert!(!card.contains(place.to_str().unwrap()), "{card}");
    // It goes with the run, and one that a person wrote stays.
    fs::write(small.path("run/final/README.md"), "mine").unwrap();
    let stopped = small.run("run", RunDirPolicy::Overwrite, Some(1), &["adapter={rank=2}"]).1;
    assert!(matches!(stopped, Ok(Outcome::Stopped(_))));
    let left: Vec<_> = fs::read_dir(small.path("run/final")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
