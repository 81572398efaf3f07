//! Matrices split over ranks: the bits of the same run on one.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tandem_comm::{ElementKind, Operation, threads};
use tandem_kernels::DType;
use tandem_train::Trainer;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::plan::dry_run::{self, TENSOR_GROUP};
use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::{held_out, log};
use crate::small::Small;

/// A small model's config; 513 tokens and 101 channels are not divided evenly.
pub fn config_of(family: &str) -> Value {
    match family {
        "llama" => json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 101,
            "vocab_size": 513, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": false, "eos_token_id": 2,
        }),
        "qwen3, tied" => json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 101,
            "vocab_size": 513, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": true, "eos_token_id": 2,
        }),
        "phi" => json!({
            "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 101, "vocab_size": 513,
            "max_position_embeddings": 1024, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5, "tie_word_embeddings": false, "eos_token_id": 2,
        }),
        "gpt2" => json!({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
            "n_inner": 101, "n_positions": 128, "vocab_size": 513, "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new", "eos_token_id": 2,
        }),
        "gpt-neox" => json!({
            "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 101, "vocab_size": 513,
            "max_position_embeddings": 1024, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.5,
            "use_parallel_residual": true, "tie_word_embeddings": false, "eos_token_id": 2,
        }),
        "qwen3.5" => json!({
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
            "intermediate_size": 101, "vocab_size": 513, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "tie_word_embeddings": false, "eos_token_id": 2, "full_attention_interval": 2,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
            "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
        }),
        other => unreachable!("{other}"),
    }
}

fn model(small: &Small, family: &str) -> String {
    write_model(small, family, &config_of(family))
}

/// Writes a model's folder, without weights, and returns the setting that names it.
pub fn write_model(small: &Small, name: &str, config: &Value) -> String {
    let folder = small.path(name);
    std::fs::create_dir(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(source.join(file), folder.join(file)).unwrap();
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    format!("model={}", folder.display())
}

pub fn on(ranks: usize, tensor: usize, sharding: &str) -> Vec<String> {
    vec![
        format!("compute.devices=cpu:{ranks}"),
        format!("compute.tensor={tensor}"),
        format!("compute.sharding={sharding}"),
        "compute.threads=1".to_owned(),
    ]
}

pub fn finish(small: &Small, name: &str, start: RunDirPolicy, settings: &[&[String]]) {
    let settings = settings.concat();
    small.finish(name, start, &settings.iter().map(String::as_str).collect::<Vec<_>>());
}

pub fn strings(settings: &[&str]) -> Vec<String> {
    settings.iter().map(|s| (*s).to_owned()).collect()
}

/// How far one run's logs and final weights are from another's, relative: the furthest loss or gradient norm, and the furthest
/// tensor over its largest element.
fn distance(small: &Small, run: &str, from: &str) -> (f64, f64) {
    let (found, expected) = (log(small, run), log(small, from));
    assert_eq!(found.len(), expected.len(), "{run}");
    let mut furthest = 0f64;
    for (found, expected) in found.iter().zip(&expected) {
        for key in ["loss", "grad_norm"] {
            let Some(expected) = expected.get(key).and_then(Value::as_f64) else { continue };
            furthest = furthest.max((found[key].as_f64().unwrap() - expected).abs() / expected.abs());
        }
    }
    let (found, expected) = (small.weights(run), small.weights(from));
    let [found, expected] = [&found, &expected].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    assert_eq!(found.names().len(), expected.names().len());
    let mut furthest_weight = 0f64;
    for (name, expected) in expected.tensors() {
        let numbers = |bytes: &[u8]| -> Vec<f64> {
            bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
        };
        let tensor = found.tensor(&name).unwrap();
        assert_eq!(tensor.shape(), expected.shape(), "{name}");
        let (found, expected) = (numbers(tensor.data()), numbers(expected.data()));
        let largest = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
        let worst = found.iter().zip(&expected).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        // Softmax does not see what is added to every key: such a bias has a gradient of rounding alone, which Adam makes large.
        let has_no_gradient = KEY_BIASES.iter().any(|end| name.ends_with(end));
        let worst = worst / if has_no_gradient { 1e3 * largest } else { largest };
        furthest_weight = furthest_weight.max(worst);
    }
    (furthest, furthest_weight)
}

/// Loss and gradient norm of every step within this of one rank's.
const LOGGED: f64 = 1e-5;
/// Every final tensor within this of one rank's, over its largest element. An optimiser that divides by the gradient's size
/// enlarges its rounding, to 7e-6 at the levels of instructions that were tried. A wrong gradient moves weights by the rate,
/// 1e-3, in each step: this is a tenth of one.
const WEIGHTS: f64 = 1e-4;
/// Tensors that hold the biases of keys.
const KEY_BIASES: [&str; 3] = ["k_proj.bias", "c_attn.bias", "query_key_value.bias"];

pub fn is_close(small: &Small, run: &str, from: &str) {
    let (logged, weights) = distance(small, run, from);
    assert!(logged <= LOGGED, "{run}: {logged:.1e} from {from}");
    assert!(weights <= WEIGHTS, "{run}: {weights:.1e} from {from}");
}

/// One run's log and final weights have the bits of another's.
pub fn is_same(small: &Small, run: &str, from: &str) {
    assert_eq!(log(small, run), log(small, from), "{run}: the log");
    assert!(small.weights(run) == small.weights(from), "{run}: the final weights");
}

const RATE: &str = "train.learning_rate=1e-3";

#[test]
fn every_family_trains_to_the_bits_of_one_rank() {
    for family in ["llama", "qwen3, tied", "phi", "gpt2", "gpt-neox", "qwen3.5"] {
        let small = Small::new("dpo");
        let common =
            [model(&small, family), held_out(&small, "pref_conv.jsonl"), "train.eval_every=3".into()];
        let common = [&common[..], &strings(&["reference.kind=model", RATE])].concat();
        finish(&small, "one", RunDirPolicy::Fresh, &[&common]);
        for (ranks, tensor, sharding) in [(2, 2, "ddp"), (4, 4, "ddp"), (4, 2, "zero3")] {
            if tensor == 4 && family == "qwen3, tied" {
                continue;
            }
            let name = format!("{family} on {ranks} ranks, {tensor} slices, {sharding}");
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &on(ranks, tensor, sharding)]);
            is_same(&small, &name, "one");
        }
    }
}

/// A model with as many key/value heads as the most slices.
pub fn eight_heads() -> Value {
    let mut config = config_of("llama");
    (config["num_key_value_heads"], config["hidden_size"]) = (8.into(), 48.into());
    config
}

/// Every number of slices, beside the other axes and in either compute type.
#[test]
fn any_number_of_slices_trains_to_the_same_bits() {
    let small = Small::new("dpo");
    let model = write_model(&small, "eight", &eight_heads());
    for dtype in ["f32", "bf16"] {
        let common = [&strings(&["reference.kind=model", RATE])[..], std::slice::from_ref(&model)].concat();
        let common = [&common[..], &[format!("compute.dtype={dtype}")]].concat();
        let one = format!("{dtype} on one");
        finish(&small, &one, RunDirPolicy::Fresh, &[&common]);
        for (ranks, tensor, more) in [
            (2, 2, "compute.checkpointing=selective"),
            (4, 4, "compute.checkpointing=none"),
            (8, 8, "compute.checkpointing=none"),
            (8, 2, "compute.pipeline=2"),
            (4, 4, "train.optimizer_state=bf16"),
        ] {
            // States in bf16 round by their places in whole tensors.
            let small_states = more.starts_with("train.optimizer_state");
            let one = if small_states { format!("{one}, {more}") } else { one.clone() };
            if small_states {
                finish(&small, &one, RunDirPolicy::Fresh, &[&common, &strings(&[more])]);
            }
            let name = format!("{dtype}, {ranks} ranks, {tensor} slices, {more}");
            let own = [on(ranks, tensor, "zero3"), strings(&[more])].concat();
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &own]);
            is_same(&small, &name, &one);
        }
    }
}

/// Head counts that no tree divides agree up to the order of sums.
#[test]
fn three_slices_train_as_one_rank_does() {
    let small = Small::new("dpo");
    let mut config = config_of("llama");
    (config["num_key_value_heads"], config["num_attention_heads"]) = (6.into(), 6.into());
    let common =
        [&strings(&["reference.kind=model", RATE])[..], &[write_model(&small, "six", &config)]].concat();
    finish(&small, "one", RunDirPolicy::Fresh, &[&common]);
    for tensor in [3, 6] {
        let name = format!("{tensor} slices");
        finish(&small, &name, RunDirPolicy::Fresh, &[&common, &on(tensor, tensor, "ddp")]);
        is_close(&small, &name, "one");
    }
}

/// The data axis adds exactly, whatever each slice of the model does.
#[test]
fn the_data_axis_changes_no_bit() {
    for (family, overrides) in [
        ("llama", &["reference.kind=model"][..]),
        ("phi", &["reference.kind=precompute", "compute.checkpointing=block"]),
        ("gpt2", &["reference.kind=model", "compute.checkpointing=selective", "compute.dtype=bf16"]),
        ("qwen3, tied", &["reference.kind=none", "objective.reference_free=true", "train.optimizer=rmsprop"]),
        ("qwen3.5", &["reference.kind=model", "compute.checkpointing=selective"]),
    ] {
        let small = Small::new("dpo");
        let eval = [held_out(&small, "pref_conv.jsonl"), "train.eval_every=3".to_owned()];
        let common = [&eval[..], &[model(&small, family)], &strings(overrides)].concat();
        finish(&small, "two", RunDirPolicy::Fresh, &[&common, &on(2, 2, "ddp")]);
        let expected = (log(&small, "two"), small.weights("two"));
        for (ranks, sharding) in [(2, "zero3"), (6, "zero1"), (4, "zero2")] {
            let name = format!("{ranks} {sharding}");
            finish(&small, &name, RunDirPolicy::Fresh, &[&common, &on(ranks, 2, sharding)]);
            assert_eq!(log(&small, &name), expected.0, "{family} {name}: the log");
            assert!(small.weights(&name) == expected.1, "{family} {name}: the final weights");
        }
    }
}

#[test]
fn checkpointing_precompute_and_sft_train_as_on_one_rank() {
    let dpo = Small::new("dpo");
    let model_dpo = model(&dpo, "llama");
    for overrides in [
        &["reference.kind=precompute", "compute.checkpointing=block"][..],
        &["reference.kind=precompute", "compute.sharding=zero2", "compute.checkpointing=selective"],
        &["reference.kind=model", "objective.loss={ sigmoid = 1, sft = 0.5 }", "compute.reduction=fast"],
        &[
            "reference.kind=model",
            "objective.loss=ipo",
            "train.optimizer=rmsprop",
            "train.learning_rate=1e-4",
        ],
    ] {
        let common = [&strings(&[RATE])[..], &strings(overrides), std::slice::from_ref(&model_dpo)].concat();
        finish(&dpo, "one", RunDirPolicy::Overwrite, &[&common]);
        let two = strings(&["compute.devices=cpu:4", "compute.tensor=2", "compute.threads=1"]);
        finish(&dpo, "split", RunDirPolicy::Overwrite, &[&common, &two]);
        if overrides.contains(&"compute.reduction=fast") {
            is_close(&dpo, "split", "one");
        } else {
            is_same(&dpo, "split", "one");
        }
    }
    let sft = Small::new("sft");
    let eval = held_out(&sft, "sft_completion.jsonl");
    let common = [model(&sft, "gpt-neox"), eval, RATE.to_owned(), "train.eval_every=2".to_owned()];
    finish(&sft, "one", RunDirPolicy::Fresh, &[&common]);
    finish(&sft, "split", RunDirPolicy::Fresh, &[&common, &on(4, 4, "ddp")]);
    is_same(&sft, "split", "one");
}

#[test]
fn a_run_goes_on_with_another_number_of_slices() {
    let small = Small::new("dpo");
    let common = [model(&small, "gpt2"), "reference.kind=model".to_owned(), RATE.to_owned()];
    let go = |name: &str, start: RunDirPolicy, until: Option<u64>, ranks: &[String]| {
        let settings = [&common[..], ranks].concat();
        let (heard, outcome) =
            small.run(name, start, until, &settings.iter().map(String::as_str).collect::<Vec<_>>());
        outcome.unwrap_or_else(|e| panic!("{e}"));
        heard.warnings
    };
    go("whole", RunDirPolicy::Fresh, None, &on(1, 1, "ddp"));
    go("sliced", RunDirPolicy::Fresh, None, &on(2, 2, "ddp"));
    // Stopped and resumed on as many slices: the same bits.
    go("stopped", RunDirPolicy::Fresh, Some(3), &on(2, 2, "ddp"));
    go("stopped", RunDirPolicy::Resume, None, &on(4, 2, "zero3"));
    assert_eq!(log(&small, "stopped"), log(&small, "sliced"));
    assert!(small.weights("stopped") == small.weights("sliced"));
    // From slices to the whole and on to other slices.
    go("changed", RunDirPolicy::Fresh, Some(2), &on(4, 2, "zero3"));
    let warnings = go("changed", RunDirPolicy::Resume, Some(3), &on(1, 1, "ddp"));
    assert!(!warnings.iter().any(|text| text.starts_with("compute.tensor")), "{warnings:?}");
    go("changed", RunDirPolicy::Resume, Some(4), &on(4, 4, "zero1"));
    go("changed", RunDirPolicy::Resume, None, &on(3, 1, "zero3"));
    is_same(&small, "changed", "whole");
    is_same(&small, "sliced", "whole");
    // Where nothing is learned, what was drawn comes through slices, checkpoints and the final model as it was.
    let still = strings(&["train.learning_rate=0"]);
    go("drawn", RunDirPolicy::Fresh, None, &[on(1, 1, "ddp"), still.clone()].concat());
    go("passed on", RunDirPolicy::Fresh, Some(2), &[on(4, 4, "ddp"), still.clone()].concat());
    go("passed on", RunDirPolicy::Resume, Some(4), &[on(1, 1, "ddp"), still.clone()].concat());
    go("passed on", RunDirPolicy::Resume, None, &[on(4, 2, "zero3"), still].concat());
    assert!(small.weights("passed on") == small.weights("drawn"));
}

#[test]
fn each_rank_plans_the_memory_that_it_takes() {
    let small = Small::new("dpo");
    let settings = [
        &on(4, 2, "zero3")[..],
        &[model(&small, "phi"), "reference.kind=model".to_owned(), "data.order=sequential".to_owned()],
    ];
    let settings = settings.concat();
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let config = small.config("run", &settings);
    let planned = |rank: usize| {
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        Plan::make(&config, &prepared, rank, 4).unwrap().arena_bytes()
    };
    let found: Vec<usize> = std::thread::scope(|scope| {
        let ranks = threads::groups(4, Duration::from_secs(600)).into_iter().map(|group| {
            let config = config.clone();
            scope.spawn(move || {
                let mut trainer = Trainer::on_rank(config, RunDirPolicy::Fresh, group, &mut Silent).unwrap();
                trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
                trainer.device().high_water()
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (rank, found) in found.into_iter().enumerate() {
        let planned = planned(rank);
        // The plan is of the largest micro-batch alone; others before it leave gaps in the arena.
        let off = (found as f64 / planned as f64 - 1.0).abs();
        assert!(off < 0.05, "rank {rank}: {found} bytes, {planned} were planned");
    }
    let one = small.config("one", &[settings[4], settings[5], settings[6]]);
    let prepared = RunInputs::open(&one, &mut Silent).unwrap();
    let whole = Plan::make(&one, &prepared, 0, 1).unwrap().arena_bytes();
    assert!(planned(0) < whole / 2, "{} bytes of a slice's part, {whole} of the whole", planned(0));
}

#[test]
fn ranks_or_models_that_cannot_be_divided_are_refused_before_any_starts() {
    let small = Small::new("dpo");
    for (ranks, tensor, expected) in [
        (3, 2, "compute.tensor = 2, but there are 3 ranks: their number must be a multiple of 2"),
        (1, 2, "compute.tensor = 2, but there is 1 rank"),
        (
            4,
            4,
            "4 attention heads with 2 key/value heads cannot be divided evenly among 4 ranks; numbers that divide them: \
             1, 2",
        ),
    ] {
        let settings = on(ranks, tensor, "ddp");
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!small.path("run").exists(), "nothing is written");
        let config = small.config("run", &settings);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let error = Plan::make(&config, &prepared, 0, ranks).unwrap_err().to_string();
        assert!(error.contains(expected), "plan: {error}");
    }
}

#[test]
fn ranks_of_a_group_make_the_same_calls_in_the_same_order() {
    let small = Small::new("dpo");
    let model = model(&small, "llama");
    for sharding in ["ddp", "zero1", "zero2", "zero3"] {
        for (ranks, tensor) in [(2, 2), (4, 2), (8, 4), (256, 4)] {
            let settings =
                [&on(1, tensor, sharding)[..], &[model.clone(), "reference.kind=model".to_owned()]].concat();
            let config = small.config("run", &settings.iter().map(String::as_str).collect::<Vec<_>>());
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            let calls = |rank| dry_run::calls(&config, &prepared, rank, ranks).unwrap();
            // Ranks of a data group hold the same slice, and idle where they have no micro-batch.
            let of = |calls: &[(usize, tandem_comm::Call)], is_meant: &dyn Fn(usize) -> bool| -> Vec<_> {
                calls.iter().filter(|(group, _)| is_meant(*group)).copied().collect()
            };
            let firsts: Vec<_> = (0..tensor).map(calls).collect();
            for rank in 0..ranks {
                let (found, slice, lead) = (calls(rank), rank % tensor, rank / tensor * tensor);
                // Four slices have a group of two ranks for each level of their sums.
                let pairs = TENSOR_GROUP + 1..if tensor == 4 { TENSOR_GROUP + 3 } else { TENSOR_GROUP + 1 };
                let in_data = |group: usize| group != TENSOR_GROUP && !pairs.contains(&group);
                assert!(
                    of(&found, &in_data) == of(&firsts[slice], &in_data),
                    "{sharding}: rank {rank} of {ranks}"
                );
                let in_tensor = |group: usize| group == TENSOR_GROUP;
                assert!(
                    of(&found, &in_tensor) == of(&calls(lead), &in_tensor),
                    "{sharding}: rank {rank} of {ranks}"
                );
                for (level, pair) in pairs.clone().enumerate().filter(|_| rank < 8) {
                    let other = calls(rank ^ (1 << level));
                    let in_pair = |group: usize| group == pair;
                    assert!(of(&found, &in_pair) == of(&other, &in_pair), "{sharding}: rank {rank}, {level}");
                }
            }
        }
    }
}

/// The formulas of docs/ranks.md.
#[test]
fn slices_send_what_the_documentation_says() {
    let small = Small::new("dpo");
    let families = ["llama", "phi", "gpt2", "gpt-neox"].map(|family| (family, model(&small, family)));
    let dtypes = [DType::F32, DType::Bf16];
    let modes = ["none", "selective", "block"];
    let cases = dtypes.into_iter().flat_map(|d| modes.map(|m| (d, m)));
    for ((dtype, mode), (family, model)) in cases.flat_map(|c| families.iter().map(move |f| (c, f))) {
        let overrides = [
            model.clone(),
            format!("compute.dtype={dtype}"),
            format!("compute.checkpointing={mode}"),
            "train.micro_batch_size=8".to_owned(),
        ];
        let settings = [&on(4, 4, "ddp")[..], &overrides].concat();
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let config = small.config("run", &settings);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let rows = prepared.batches(&config).rows(0).to_vec();
        let forest = prepared.batcher(&config).build(&prepared.train, &rows[..]).unwrap().forest;
        let (t, r) = (forest.num_tokens(), forest.scored_rows().0.len());
        let (layers, width) = (prepared.decoder.spec().num_layers, prepared.decoder.spec().hidden_size);
        let summed = (4 * layers - 1) * t + 4 * r;
        let gathered = match *family {
            "phi" => (3 * layers - 1) * t + 2 * r,
            "gpt-neox" => (5 * layers - 3) * t + 4 * r,
            _ => (6 * layers - 4) * t + 5 * r,
        };
        let gathered = gathered + if mode == "none" { 0 } else { r };
        let summed = summed + if mode == "block" { (layers - 1) * t + r } else { 0 };
        let norms = match *family {
            "phi" => 2 * layers + 2,
            "llama" => 2 * layers + 1,
            _ => 4 * layers + 2,
        };
        // Of all ranks: a pair halves rows that need not be even.
        let calls: Vec<_> =
            (0..4).flat_map(|rank| dry_run::calls(&config, &prepared, rank, 4).unwrap()).collect();
        // The tensor group, and the two groups of two ranks in which it sums.
        let slices = TENSOR_GROUP..=TENSOR_GROUP + 2;
        let sent = |kind: ElementKind| -> u64 {
            let of_kind = calls.iter().filter(|(group, call)| slices.contains(group) && call.kind == kind);
            let size = |group: usize| if group == TENSOR_GROUP { 4 } else { 2 };
            of_kind.map(|(group, call)| call.bytes_sent(size(*group))).sum()
        };
        let in_f32 = if dtype == DType::F32 { summed + gathered } else { summed };
        let expected = 3 * 4 * in_f32 * width + 4 * 2 * 4 * norms * width;
        assert_eq!(sent(ElementKind::F32), expected as u64, "{family} in {dtype}, {mode}");
        let in_bf16 = if dtype == DType::F32 { 0 } else { gathered };
        assert_eq!(sent(ElementKind::Bf16), (3 * 2 * in_bf16 * width) as u64, "{family}");
        let of_head = 8 * 4 * (5 * r + 2 * forest.predictions.len());
        // The norm adds a sum in f64, and four integers.
        assert_eq!(sent(ElementKind::F64), (3 * of_head + 2 * 3 * 8) as u64, "{family}: the head");
        assert_eq!(sent(ElementKind::I64), 2 * 3 * 4 * 8, "{family}: the norm");
        let is_meant = |operation| {
            use Operation::{AllGather, AllReduce, ReduceScatter};
            matches!(operation, AllReduce(_) | AllGather | ReduceScatter(_))
        };
        assert!(calls.iter().all(|(g, call)| !slices.contains(g) || is_meant(call.operation)), "{family}");
    }
}
