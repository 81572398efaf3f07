//! Adapters over tensor-parallel ranks: the bits of the same run on one.

use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_train::Config;
use tandem_train::config::Weights;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;

use super::ranks::{held_out, log};
use super::tensor::{config_of, eight_heads, finish, is_close, is_same, on, strings, write_model};
use crate::small::Small;

const LORA: [&str; 4] =
    ["adapter.rank=4", "train.learning_rate=1e-2", "train.micro_batch_size=2", "reference.kind=base"];

const DORA: &str = "adapter.kind=dora";
/// A matrix of each kind, the token table and the head.
const TABLES: &str =
    "adapter.targets=[\"q_proj\", \"o_proj\", \"up_proj\", \"down_proj\", \"embed_tokens\", \"lm_head\"]";

/// Settings of an adapter on a model.
fn settings(model: &str, more: &[&str]) -> Vec<String> {
    [strings(&LORA), strings(more), vec![model.to_owned()]].concat()
}

#[test]
fn any_number_of_slices_trains_an_adapter_to_the_same_bits() {
    let small = Small::new("dpo");
    let model = write_model(&small, "eight", &eight_heads());
    let kinds: [&[&str]; 3] = [&[], &[DORA], &[TABLES]];
    for (dtype, kind) in ["f32", "bf16"].into_iter().flat_map(|dtype| kinds.map(|kind| (dtype, kind))) {
        let dtype = format!("compute.dtype={dtype}");
        let eval = [held_out(&small, "pref_conv.jsonl"), "train.eval_every=3".to_owned()];
        let common = [&settings(&model, &[kind, &[&dtype]].concat())[..], &eval].concat();
        let dtype = format!("{} {dtype}", kind.first().map_or("lora", |kind| &kind[..16]));
        let one = format!("{dtype} on one");
        finish(&small, &one, RunDirPolicy::Fresh, &[&common]);
        for (ranks, tensor, more) in [
            (2, 2, "compute.sharding=ddp"),
            (4, 4, "compute.checkpointing=selective"),
            (8, 8, "compute.checkpointing=block"),
            (4, 2, "compute.sharding=zero3"),
            (4, 2, "compute.pipeline=2"),
        ] {
            let name = format!("{dtype}, {ranks} ranks, {tensor} slices, {more}");
            let own = [on(ranks, tensor, "zero1"), strings(&[more])].concat();
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &own]);
            is_same(&small, &name, &one);
        }
    }
}

/// Slices of a key matrix are shorter than the adapter's rank, the whole matrix is longer.
#[test]
fn an_adapter_of_a_long_rank_has_the_same_bits_on_short_slices() {
    let small = Small::new("dpo");
    let mut config = eight_heads();
    (config["num_attention_heads"], config["num_key_value_heads"]) = (4.into(), 2.into());
    config["head_dim"] = 32.into();
    let model = write_model(&small, "two", &config);
    for dtype in ["f32", "bf16"] {
        for (rank, targets) in [(48, "k_proj"), (20, "k_proj"), (48, "o_proj")] {
            let more = [
                format!("adapter.rank={rank}"),
                format!("adapter.targets=[\"{targets}\"]"),
                format!("compute.dtype={dtype}"),
                "train.steps=3".to_owned(),
            ];
            let common = [settings(&model, &[]), more.to_vec()].concat();
            let one = format!("{dtype} {targets} {rank} on one");
            finish(&small, &one, RunDirPolicy::Fresh, &[&common]);
            let name = format!("{dtype} {targets} {rank} on two");
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &on(2, 2, "ddp")]);
            is_same(&small, &name, &one);
        }
    }
}

/// Masks follow an element's place in the whole activation, for columns and for rows.
#[test]
fn inputs_are_dropped_as_on_one_rank() {
    let small = Small::new("dpo");
    let model = write_model(&small, "eight", &eight_heads());
    for (dtype, kind) in
        [("f32", "adapter.rslora=true"), ("bf16", "adapter.rslora=true"), ("f32", TABLES), ("bf16", DORA)]
    {
        let dtype = format!("compute.dtype={dtype}");
        let common = settings(&model, &["adapter.dropout=0.3", kind, &dtype]);
        finish(&small, "one", RunDirPolicy::Overwrite, &[&common]);
        finish(&small, "kept", RunDirPolicy::Overwrite, &[&common, &strings(&["adapter.dropout=0"])]);
        assert!(log(&small, "one") != log(&small, "kept"), "something is dropped");
        for tensor in [2, 4, 8] {
            let name = format!("{tensor} slices, {dtype}, {}", &kind[..16]);
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &on(tensor, tensor, "ddp")]);
            is_same(&small, &name, "one");
        }
    }
}

/// Fused and interleaved projections, biases, linear attention, some modules, tied and untied heads, and modules that train
/// whole.
#[test]
fn adapters_of_every_family_train_to_the_bits_of_one_rank() {
    for (family, more) in [
        ("llama", &["adapter.targets=[\"k_proj\", \"v_proj\", \"up_proj\", \"down_proj\"]"][..]),
        ("qwen3, tied", &["adapter.modules_to_save=[\"norm\"]"]),
        ("phi", &["reference.kind=precompute"]),
        ("gpt2", &["train.optimizer_state=bf16"]),
        ("gpt-neox", &["reference.kind=sync", "reference.sync_steps=2"]),
        ("qwen3.5", &[]),
        ("llama", &[DORA, "adapter.targets=[\"k_proj\", \"v_proj\", \"up_proj\", \"down_proj\"]"]),
        ("qwen3, tied", &[TABLES, "compute.dtype=bf16"]),
        ("qwen3, tied", &[DORA, "adapter.modules_to_save=[\"embed_tokens\"]", "compute.pipeline=2"]),
        ("phi", &[DORA, "compute.dtype=bf16"]),
        ("phi", &["adapter.targets=[\"embed_tokens\", \"lm_head\"]", "reference.kind=precompute"]),
        ("gpt2", &["adapter.targets=[\"wte\", \"lm_head\", \"c_attn\"]"]),
        ("gpt2", &[DORA, "train.optimizer_state=bf16"]),
        ("gpt-neox", &[DORA, "reference.kind=sync", "reference.sync_steps=2"]),
        ("gpt-neox", &["adapter.targets=[\"embed_in\", \"lm_head\"]", "compute.pipeline=2"]),
        ("qwen3.5", &[DORA, "compute.checkpointing=block"]),
    ] {
        let small = Small::new("dpo");
        let common = settings(&write_model(&small, family, &config_of(family)), more);
        let one = on(1, 1, "ddp").into_iter().chain(strings(&["compute.pipeline=1"]));
        finish(&small, "one", RunDirPolicy::Fresh, &[&common, &one.collect::<Vec<_>>()]);
        finish(&small, family, RunDirPolicy::Fresh, &[&common, &on(4, 2, "zero3")]);
        is_same(&small, family, "one");
    }
}

#[test]
fn an_adapter_goes_on_with_another_number_of_slices_and_starts_another_run() {
    for kind in [&["adapter.dropout=0.1"][..], &[DORA], &[TABLES, "train.optimizer_state=bf16"]] {
        goes_on_with_another_number_of_slices(kind);
    }
}

fn goes_on_with_another_number_of_slices(kind: &[&str]) {
    let small = Small::new("dpo");
    let model = write_model(&small, "eight", &eight_heads());
    let common = settings(&model, kind);
    finish(&small, "whole", RunDirPolicy::Fresh, &[&common]);
    let go = |start, until, ranks: &[String]| {
        let settings = [&common[..], ranks].concat();
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        let (heard, outcome) = small.run("stopped", start, until, &settings);
        outcome.unwrap_or_else(|e| panic!("{e}"));
        // The model's weights are random.
        let warned = heard.warnings.iter().any(|text| !text.contains("trains on random weights"));
        assert!(!warned, "{:?}", heard.warnings);
    };
    go(RunDirPolicy::Fresh, Some(2), &on(2, 2, "zero3"));
    go(RunDirPolicy::Resume, Some(4), &on(4, 4, "ddp"));
    go(RunDirPolicy::Resume, None, &on(1, 1, "ddp"));
    is_same(&small, "stopped", "whole");
    // A folder is cut as it is read, and is a reference too.
    let start = format!("adapter.start={}", small.path("whole/final").display());
    let reference = format!("reference.adapter={}", small.path("whole/final").display());
    let start = [strings(&[&start, "reference.kind=adapter", &reference, "train.steps=2"]), vec![model]];
    let start = [&start.concat()[..], &strings(&["train.learning_rate=1e-2"])].concat();
    finish(&small, "second", RunDirPolicy::Fresh, &[&start]);
    finish(&small, "second, sliced", RunDirPolicy::Fresh, &[&start, &on(4, 4, "zero3")]);
    is_same(&small, "second, sliced", "second");
}

/// A model whose shards have whole units of 16,384 weights: rows of a head, and of an eighth of the channels.
fn wide() -> Value {
    let mut config = config_of("llama");
    for (key, value) in
        [("hidden_size", 256), ("head_dim", 64), ("num_key_value_heads", 8), ("intermediate_size", 512)]
    {
        config[key] = value.into();
    }
    config
}

/// A shard has the codes and scales of the whole matrix, drawn or read.
#[test]
fn quantised_weights_are_cut_to_the_bits_of_one_rank() {
    let small = Small::new("dpo");
    let model = write_model(&small, "wide", &wide());
    let short = strings(&["train.steps=2", "train.warmup_steps=0"]);
    finish(&small, "base", RunDirPolicy::Fresh, &[std::slice::from_ref(&model), &short]);
    let read = format!("model={}", small.path("base/final").display());
    for (format, model, weights, kind) in [
        ("nf4", &model, Weights::Random, "adapter.kind=lora"),
        ("int8", &model, Weights::Random, "adapter.kind=lora"),
        ("nf4", &read, Weights::Folder, "adapter.kind=lora"),
        ("fp8", &read, Weights::Folder, "adapter.kind=lora"),
        ("nf4", &read, Weights::Folder, DORA),
        ("int8", &model, Weights::Random, DORA),
        ("fp8", &model, Weights::Random, DORA),
        ("nf4", &model, Weights::Random, TABLES),
        ("int8", &read, Weights::Folder, TABLES),
    ] {
        let format = format!("compute.format={format}");
        let common = [settings(model, &[&format, kind]), short.clone()].concat();
        let train = |name: &str, more: &[String]| {
            let settings = [&common[..], more].concat();
            let settings: Vec<_> = settings.iter().map(String::as_str).collect();
            let config = Config { weights: weights.clone(), ..small.config(name, &settings) };
            let stop = AtomicBool::new(false);
            spawn::train(&config, RunDirPolicy::Overwrite, &mut Silent, &stop).unwrap();
        };
        train("one", &[]);
        for (ranks, tensor, sharding) in [(2, 2, "ddp"), (4, 2, "zero3"), (4, 4, "ddp")] {
            train("sliced", &on(ranks, tensor, sharding));
            is_same(&small, "sliced", "one");
        }
    }
}

/// A unit of nf4 that would lie on two ranks.
#[test]
fn a_boundary_within_a_unit_is_refused_by_tensor() {
    let small = Small::new("dpo");
    let model = write_model(&small, "eight", &eight_heads());
    let settings = [settings(&model, &["compute.format=nf4"]), on(2, 2, "ddp")].concat();
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let error = small.run("run", RunDirPolicy::Fresh, None, &settings).1.unwrap_err().to_string();
    assert!(error.contains("q_proj.weight [64, 48] in nf4 cannot be divided among 2 ranks"), "{error}");
}

/// Sums whose order depends on the ranks: of three slices, and of two without blocks.
#[test]
fn slices_that_keep_no_bits_train_an_adapter_as_one_rank_does() {
    let small = Small::new("dpo");
    let mut config = config_of("llama");
    (config["num_key_value_heads"], config["num_attention_heads"]) = (6.into(), 6.into());
    let model = write_model(&small, "six", &config);
    for kind in ["adapter.kind=lora", DORA, TABLES] {
        let common = [settings(&model, &[kind]), strings(&["train.learning_rate=1e-3"])];
        finish(&small, "one", RunDirPolicy::Overwrite, &[&common[0], &common[1]]);
        finish(&small, "three", RunDirPolicy::Overwrite, &[&common[0], &common[1], &on(3, 3, "ddp")]);
        is_close(&small, "three", "one");
        let plain = [on(2, 2, "ddp"), strings(&["compute.sum_blocks=false"])].concat();
        finish(&small, "two", RunDirPolicy::Overwrite, &[&common[0], &common[1], &plain]);
        is_close(&small, "two", "one");
    }
}

#[test]
fn an_adapter_generates_over_slices_as_on_one_rank() {
    for kind in ["adapter.kind=lora", DORA, TABLES] {
        let small = Small::new("online");
        let model = write_model(&small, "eight", &eight_heads());
        let common = settings(&model, &[kind]);
        finish(&small, "one", RunDirPolicy::Fresh, &[&common]);
        finish(&small, "two", RunDirPolicy::Fresh, &[&common, &on(2, 2, "ddp")]);
        is_same(&small, "two", "one");
    }
}
