//! The same bits on any number of ranks.

use serde_json::{Map, Value};
use tandem_train::run::run_dir::RunDirPolicy;

use super::tensor;
use crate::small::Small;

/// Log of a run, without the clock's and the process's numbers.
pub fn log(small: &Small, name: &str) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(small.path(name).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Map<_, _>>(line).unwrap());
    let timeless = lines.map(|mut line| {
        let volatile = ["time", "tokens_per_second", "memory", "arena", "time_generate", "time_judge"];
        line.retain(|key, _| !volatile.contains(&key.as_str()));
        line
    });
    timeless.collect()
}

fn on(ranks: usize) -> String {
    format!("compute.devices=cpu:{ranks}")
}

/// A few rows to evaluate on, in the form of the method's data.
pub fn held_out(small: &Small, file: &str) -> String {
    let goldens = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
    let rows = std::fs::read_to_string(goldens.join(file)).unwrap();
    let few: String = rows.lines().take(5).map(|line| format!("{line}\n")).collect();
    std::fs::write(small.path("held_out.jsonl"), few).unwrap();
    format!("data.eval={}", small.path("held_out.jsonl").display())
}

/// Batches of 8 rows are two to four micro-batches here: of 8 ranks, some never have one.
fn same_on_every_number_of_ranks(small: &Small, overrides: &[&str]) {
    let common = ["compute.threads=1", "train.eval_every=3"];
    let mut first = None;
    for ranks in [1, 3, 8] {
        let name = format!("on{ranks}");
        let devices = on(ranks);
        let all = [overrides, &common, &[devices.as_str()]].concat();
        small.finish(&name, RunDirPolicy::Overwrite, &all);
        let found = (log(small, &name), small.weights(&name));
        assert_eq!(found.0.len(), 9, "six steps and three evaluations");
        let expected = first.get_or_insert_with(|| found.clone());
        assert_eq!(expected.0, found.0, "{overrides:?} on {ranks} ranks: the log");
        assert!(expected.1 == found.1, "{overrides:?} on {ranks} ranks: the final weights");
    }
}

#[test]
fn dpo_is_the_same_on_any_number_of_ranks() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_conv.jsonl");
    for overrides in [
        &["reference.kind=model"][..],
        &["reference.kind=model", "compute.sharding=zero2"],
        &["reference.kind=model", "compute.sharding=zero3"],
        &["reference.kind=precompute", "compute.sharding=zero3", "compute.checkpointing=selective"],
        &["reference.kind=none", "objective.reference_free=true", "compute.sharding=zero1"],
        &["reference.kind=model", "objective.loss=ipo", "train.optimizer=rmsprop", "compute.sharding=zero1"],
        &["reference.kind=model", "objective.loss={ sigmoid = 1, sft = 0.5 }", "compute.checkpointing=block"],
        &["reference.kind=model", "compute.sharding=zero3", "compute.dtype=bf16"],
    ] {
        same_on_every_number_of_ranks(&small, &[overrides, &[eval.as_str()]].concat());
    }
}

#[test]
fn every_sharding_gives_the_same_as_none() {
    let small = Small::new("dpo");
    for dtype in ["f32", "bf16"] {
        let dtype = format!("compute.dtype={dtype}");
        let mut first = None;
        for sharding in ["ddp", "zero1", "zero2", "zero3"] {
            let all = [
                "reference.kind=model",
                "compute.devices=cpu:3",
                "compute.threads=1",
                &dtype,
                &format!("compute.sharding={sharding}"),
            ];
            small.finish(sharding, RunDirPolicy::Overwrite, &all);
            let found = (log(&small, sharding), small.weights(sharding));
            assert!(*first.get_or_insert_with(|| found.clone()) == found, "{sharding} in {dtype}");
        }
    }
}

/// With a tied table the embedding's gradient is emitted twice in a walk, and its weights are fetched at both ends.
#[test]
fn a_tied_table_is_the_same_on_any_number_of_ranks() {
    let small = Small::new("dpo");
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
    let model = small.path("tied");
    std::fs::create_dir(&model).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(source.join(file), model.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["tie_word_embeddings"] = true.into();
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let model = format!("model={}", model.display());
    let eval = held_out(&small, "pref_conv.jsonl");
    for dtype in ["compute.dtype=f32", "compute.dtype=bf16"] {
        let all = [&model, &eval, "reference.kind=model", "compute.sharding=zero3", dtype];
        same_on_every_number_of_ranks(&small, &all);
    }
}

#[test]
fn sft_is_the_same_on_any_number_of_ranks() {
    let small = Small::new("sft");
    let eval = held_out(&small, "sft_completion.jsonl");
    same_on_every_number_of_ranks(&small, &[eval.as_str()]);
    same_on_every_number_of_ranks(
        &small,
        &[eval.as_str(), "compute.dtype=bf16", "train.batch_size=3", "compute.sharding=zero1"],
    );
}

#[test]
fn a_precomputed_reference_is_computed_once_and_then_shared() {
    let small = Small::new("dpo");
    let folder = small.path("cache");
    let files = || {
        let names = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("reference-")).count()
    };
    let precompute = ["reference.kind=precompute", "compute.threads=1"];
    small.finish("three", RunDirPolicy::Fresh, &[&precompute[..], &["compute.devices=cpu:3"]].concat());
    assert_eq!(files(), 1);
    small.finish("two", RunDirPolicy::Fresh, &[&precompute[..], &["compute.devices=cpu:2"]].concat());
    assert_eq!(files(), 1, "found by its key, not computed anew");
    assert!(small.weights("two") == small.weights("three"));
}

/// The same weights are another model with other norms, and other sums with prompts that are not shared.
#[test]
fn a_precomputed_reference_is_of_one_configuration() {
    let small = Small::new("dpo");
    let mut config = tensor::config_of("llama");
    tensor::write_model(&small, "one", &config);
    config["rms_norm_eps"] = 1e-2.into();
    tensor::write_model(&small, "other", &config);
    let computed = |name: &str, model: &str, more: &str| {
        let model = format!("model={}", small.path(model).display());
        let sets = [model.as_str(), more, "reference.kind=precompute", "train.steps=1"];
        let heard = small.finish(name, RunDirPolicy::Fresh, &sets);
        assert!((heard.losses[0] - std::f64::consts::LN_2).abs() < 1e-6, "{name}: {:?}", heard.losses);
        heard.computed_reference
    };
    assert!(computed("first", "one", "data.share_prefix=true"));
    assert!(!computed("again", "one", "data.share_prefix=true"));
    assert!(computed("norm", "other", "data.share_prefix=true"));
    assert!(computed("apart", "one", "data.share_prefix=false"));
}

#[test]
fn a_run_stopped_on_one_number_of_ranks_goes_on_with_another() {
    let small = Small::new("dpo");
    let model = ["reference.kind=model", "compute.threads=1"];
    small.finish("whole", RunDirPolicy::Fresh, &model);
    let mut start = RunDirPolicy::Fresh;
    for (ranks, sharding, replicate, until) in [
        (2, "zero1", 1, Some(2)),
        (3, "ddp", 1, Some(3)),
        (6, "zero3", 2, Some(4)),
        (2, "zero2", 1, Some(5)),
        (4, "zero3", 1, None),
    ] {
        let mesh =
            [on(ranks), format!("compute.sharding={sharding}"), format!("compute.replicate={replicate}")];
        let mesh = mesh.each_ref().map(String::as_str);
        let (_, outcome) = small.run("parts", start, until, &[&model[..], &mesh].concat());
        outcome.unwrap_or_else(|e| panic!("{e}"));
        start = RunDirPolicy::Resume;
    }
    assert_eq!(log(&small, "parts"), log(&small, "whole"));
    assert!(small.weights("parts") == small.weights("whole"));
}

#[test]
fn the_fast_sum_differs_in_the_last_bits_only_and_in_bf16_in_more() {
    let small = Small::new("sft");
    let run = |name: &str, overrides: &[&str]| {
        small.finish(name, RunDirPolicy::Fresh, &[overrides, &["compute.threads=1"]].concat());
        log(&small, name)
    };
    let exact = run("exact", &[]);
    for (dtype, near) in [("f32", 1e-4), ("bf16", 1e-2)] {
        for sharding in ["ddp", "zero1", "zero2", "zero3"] {
            let name = format!("{sharding} in {dtype}");
            let [sharding, travels] =
                [format!("compute.sharding={sharding}"), format!("compute.reduce_dtype={dtype}")];
            let settings = ["compute.reduction=fast", "compute.devices=cpu:2", &sharding, &travels];
            let fast = run(&name, &settings);
            for (exact, fast) in exact.iter().zip(&fast) {
                for key in ["loss", "grad_norm"] {
                    let [exact, fast] = [exact, fast].map(|line| line[key].as_f64().unwrap());
                    assert!((exact - fast).abs() <= near * exact.abs(), "{name} {key}: {exact} and {fast}");
                }
            }
            let differs =
                exact.iter().zip(&fast).any(|(exact, fast)| exact["grad_norm"] != fast["grad_norm"]);
            assert!(differs || dtype == "f32", "{name}: nothing was rounded");
        }
    }
}

#[test]
fn replicas_that_cannot_be_are_refused_before_any_rank_starts() {
    let small = Small::new("dpo");
    for (settings, expected) in [
        (["compute.devices=cpu:4", "compute.sharding=ddp", "compute.replicate=2"], "\"ddp\" shards nothing"),
        (
            ["compute.devices=cpu:4", "compute.sharding=zero3", "compute.replicate=3"],
            "compute.replicate = 3, but there are 4 ranks: their number must be a multiple of 3",
        ),
        (
            ["compute.tensor=2", "compute.sharding=zero1", "compute.replicate=2"],
            "compute.tensor = 2 and compute.replicate = 2, but there is 1 rank: their number must be a multiple of 4",
        ),
    ] {
        let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!small.path("run").exists(), "nothing is written");
    }
}

#[test]
fn an_error_on_every_rank_is_told_once_and_nobody_hangs() {
    let small = Small::new("dpo");
    let missing = small.path("missing.jsonl");
    let train = format!("data.train={}", missing.display());
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &["compute.devices=cpu:3", &train]);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("missing.jsonl"), "{error}");
}
