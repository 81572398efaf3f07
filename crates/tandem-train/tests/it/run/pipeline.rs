//! Layers over ranks: the same bits as on one.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde_json::{Map, Value};
use tandem_comm::{Call, ElementKind, Operation, threads};
use tandem_model::LayerId;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::{Plan, dry_run};
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Trainer};

use super::ranks::{held_out, log};
use super::tensor::config_of;
use crate::small::Small;

/// Writes the folder of a model of so many blocks, without weights, and returns the setting that names it.
fn model(small: &Small, family: &str, blocks: usize) -> String {
    let mut config = config_of(family);
    let key = if family == "gpt2" { "n_layer" } else { "num_hidden_layers" };
    config[key] = blocks.into();
    super::tensor::write_model(small, family, &config)
}

/// Ranks, stages, slices and sharding as settings.
fn on(ranks: usize, stages: usize, slices: usize, sharding: &str) -> Vec<String> {
    strings(&[
        &format!("compute.devices=cpu:{ranks}"),
        &format!("compute.pipeline={stages}"),
        &format!("compute.tensor={slices}"),
        &format!("compute.sharding={sharding}"),
        "compute.threads=1",
    ])
}

fn strings(settings: &[&str]) -> Vec<String> {
    settings.iter().map(|s| (*s).to_owned()).collect()
}

fn finish(small: &Small, name: &str, settings: &[&[String]]) -> (Vec<Map<String, Value>>, Vec<u8>) {
    let settings = settings.concat();
    small.finish(name, RunDirPolicy::Overwrite, &settings.iter().map(String::as_str).collect::<Vec<_>>());
    (log(small, name), small.weights(name))
}

fn config(small: &Small, name: &str, settings: &[&[String]]) -> Config {
    small.config(name, &settings.concat().iter().map(String::as_str).collect::<Vec<_>>())
}

/// Each way to divide the ranks must end with the log and the weights that one stage of as many slices has.
fn same_as_one_stage(small: &Small, common: &[String], slices: usize, ways: &[(usize, usize, &str)]) {
    let expected = finish(small, "one", &[common, &on(slices, 1, slices, "ddp")]);
    for &(ranks, stages, sharding) in ways {
        let found = finish(small, "staged", &[common, &on(ranks, stages, slices, sharding)]);
        let way = format!("{common:?}: {ranks} ranks, {stages} stages, {slices} slices, {sharding}");
        assert_eq!(found.0, expected.0, "{way}: the log");
        assert!(found.1 == expected.1, "{way}: the final weights");
    }
}

/// A step has two to four micro-batches: fewer than stages, and on some data ranks none.
#[test]
fn every_family_trains_as_on_one_rank() {
    for (family, overrides) in [
        ("llama", &["reference.kind=model", "objective.loss={ sigmoid = 1, aot = 1 }"][..]),
        ("qwen3, tied", &["reference.kind=model", "train.optimizer=rmsprop"]),
        ("phi", &["reference.kind=precompute", "compute.checkpointing=block"]),
        ("gpt2", &["reference.kind=model", "compute.checkpointing=selective", "compute.dtype=bf16"]),
        ("gpt-neox", &["reference.kind=none", "objective.reference_free=true"]),
        ("qwen3.5", &["reference.kind=model", "compute.checkpointing=block"]),
    ] {
        let small = Small::new("dpo");
        let common = [model(&small, family, 4), held_out(&small, "pref_conv.jsonl")];
        let common = [&common[..], &strings(overrides), &strings(&["train.eval_every=3"])].concat();
        same_as_one_stage(&small, &common, 1, &[(4, 4, "zero1"), (6, 3, "zero3")]);
        same_as_one_stage(&small, &common, 2, &[(8, 2, "zero3")]);
    }
}

/// Sharded state of a stage may have several copies among the stage's ranks.
#[test]
fn stages_go_with_replicas_of_what_is_divided() {
    let small = Small::new("dpo");
    let common = [model(&small, "qwen3, tied", 3), "reference.kind=model".to_owned()];
    let expected = finish(&small, "one", &[&common, &on(1, 1, 1, "ddp")]);
    for (ranks, stages, sharding) in [(8, 2, "zero3"), (8, 2, "zero2"), (12, 3, "zero1"), (4, 2, "zero2")] {
        let replicas = strings(&["compute.replicate=2"]);
        let found = finish(&small, "staged", &[&common, &on(ranks, stages, 1, sharding), &replicas]);
        assert!(found == expected, "{ranks} ranks, {stages} stages, {sharding}");
    }
}

/// More micro-batches than stages, one alone, and data ranks that have none.
#[test]
fn any_number_of_micro_batches_goes_through_the_stages() {
    let small = Small::new("dpo");
    let common = [model(&small, "qwen3, tied", 3), "reference.kind=model".to_owned()];
    for rows in [1, 3, 8] {
        let common = [&common[..], &[format!("train.micro_batch_size={rows}")]].concat();
        let ways = [(2, 2, "ddp"), (4, 2, "zero3"), (9, 3, "zero3")];
        same_as_one_stage(&small, &common, 1, &ways);
    }
}

#[test]
fn kto_trains_as_on_one_rank() {
    let small = Small::new("kto");
    let common =
        [model(&small, "llama", 4), held_out(&small, "unpaired.jsonl"), "train.eval_every=3".to_owned()];
    same_as_one_stage(&small, &common, 1, &[(4, 2, "zero1"), (6, 3, "zero3")]);
}

#[test]
fn sft_trains_as_on_one_rank() {
    let small = Small::new("sft");
    let common = [model(&small, "gpt2", 3), held_out(&small, "sft_completion.jsonl")];
    let common = [&common[..], &strings(&["train.eval_every=2"])].concat();
    same_as_one_stage(&small, &common, 1, &[(2, 2, "ddp"), (3, 3, "zero1"), (6, 3, "zero2")]);
    same_as_one_stage(&small, &common, 2, &[(6, 3, "ddp")]);
}

/// In f32 the two shares of a tied table are added at the end of the step rather than micro-batch by micro-batch.
#[test]
fn the_fast_sum_differs_in_the_last_bits_only() {
    let small = Small::new("dpo");
    let settings = strings(&["reference.kind=model", "compute.reduction=fast", "train.learning_rate=1e-3"]);
    let common = [settings, vec![model(&small, "qwen3, tied", 3)]].concat();
    let one = finish(&small, "one", &[&common, &on(1, 1, 1, "ddp")]);
    for (ranks, stages, sharding) in [(2, 2, "ddp"), (3, 3, "ddp"), (4, 2, "zero3")] {
        let found = finish(&small, "staged", &[&common, &on(ranks, stages, 1, sharding)]);
        for (found, expected) in found.0.iter().zip(&one.0) {
            for key in ["loss", "grad_norm"] {
                let [found, expected] = [found, expected].map(|line| line[key].as_f64().unwrap());
                let off = (found - expected).abs() / expected.abs();
                assert!(off <= 1e-4, "{stages} stages, {sharding}: {key} {found}, expected {expected}");
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_stages() {
    let small = Small::new("dpo");
    for family in ["llama", "gpt2"] {
        let common = [model(&small, family, 4), "reference.kind=model".to_owned()];
        let whole = finish(&small, "whole", &[&common, &on(1, 1, 1, "ddp")]);
        let mut start = RunDirPolicy::Overwrite;
        for (ranks, stages, sharding, until) in [
            (2, 2, "ddp", Some(1)),
            (1, 1, "ddp", Some(2)),
            (6, 3, "zero3", Some(3)),
            (2, 1, "zero2", Some(4)),
            (4, 4, "zero1", Some(5)),
            (4, 2, "zero3", None),
        ] {
            let settings = [&common[..], &on(ranks, stages, 1, sharding)].concat();
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let (heard, outcome) = small.run("parts", start, until, &settings);
            outcome.unwrap_or_else(|e| panic!("{e}"));
            // The model's weights are random.
            let warned = heard.warnings.iter().any(|text| !text.contains("trains on random weights"));
            assert!(!warned, "{:?}", heard.warnings);
            start = RunDirPolicy::Resume;
        }
        assert_eq!(log(&small, "parts"), whole.0, "{family}");
        assert!(small.weights("parts") == whole.1, "{family}");
    }
}

/// Weights from files are read by each stage, and what the run writes is whole and can be read again.
#[test]
fn stages_read_and_write_model_folders() {
    let small = Small::new("sft");
    let start = model(&small, "qwen3, tied", 3);
    finish(&small, "start", &[&[start], &strings(&["train.steps=1"]), &on(3, 3, 1, "zero1")]);
    // The folder's own weights, no longer drawn from the seed.
    let folder = small.path("start").join("final").display().to_string();
    let weights = small.path("start").join("final/model.safetensors").display().to_string();
    let common = [format!("model={folder}"), format!("weights={weights}")];
    same_as_one_stage(&small, &common, 1, &[(2, 2, "ddp"), (6, 3, "zero3")]);
    same_as_one_stage(&small, &common, 2, &[(4, 2, "zero3")]);
}

#[test]
fn a_precomputed_reference_is_the_same_for_any_number_of_stages() {
    let small = Small::new("dpo");
    let files = || {
        let names = std::fs::read_dir(small.path("cache")).unwrap().map(|file| file.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("reference-")).count()
    };
    let common = [model(&small, "qwen3, tied", 3), "reference.kind=precompute".to_owned()];
    let staged = finish(&small, "staged", &[&common, &on(6, 3, 1, "zero3")]);
    assert_eq!(files(), 1);
    let one = finish(&small, "one", &[&common, &on(1, 1, 1, "ddp")]);
    assert_eq!(files(), 1, "found by its key, not computed anew");
    assert!(staged == one);
    std::fs::remove_dir_all(small.path("cache")).unwrap();
    assert!(finish(&small, "anew", &[&common, &on(1, 1, 1, "ddp")]) == one);
}

/// A gradient beyond the range of the sums on one stage leaves the step out on all.
#[test]
fn a_step_that_one_stage_cannot_take_is_taken_by_none() {
    let small = Small::new("sft");
    let common = [model(&small, "llama", 3), "train.max_skipped=2".to_owned()];
    // Weights of infinite size after one step: from then on nothing is finite.
    let common = [&common[..], &strings(&["train.learning_rate=1e30", "train.warmup_steps=0"])].concat();
    let outcome = |ways: &[String]| {
        let settings = [&common[..], ways].concat();
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let (heard, outcome) = small.run("run", RunDirPolicy::Overwrite, None, &settings);
        (heard.steps.len(), heard.skipped, outcome.unwrap_err().to_string())
    };
    let expected = outcome(&on(1, 1, 1, "ddp"));
    assert_eq!(expected.1.len(), 3, "{expected:?}");
    let mut found = outcome(&on(3, 3, 1, "ddp"));
    // Of several ranks the message names the one that tells it.
    assert!(found.2.ends_with(&expected.2), "{found:?}");
    found.2.clone_from(&expected.2);
    assert_eq!(found, expected);
}

#[test]
fn each_stage_plans_the_memory_that_it_takes_and_needs_no_more_later() {
    let small = Small::new("dpo");
    let settings = strings(&["reference.kind=model", "data.order=sequential", "train.micro_batch_size=2"]);
    for (family, sharding) in [("llama", "ddp"), ("gpt2", "zero3")] {
        let common = [&settings[..], &[model(&small, family, 6)]].concat();
        let config = config(&small, "run", &[&common, &on(3, 3, 1, sharding)]);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let plan = |rank: usize| Plan::make(&config, &prepared, rank, 3).unwrap();
        assert_eq!([0, 1, 2].map(|rank| plan(rank).under_way), [3, 2, 1]);
        let run = |steps: u64| -> Vec<usize> {
            let groups = threads::groups(3, Duration::from_secs(600)).into_iter();
            std::thread::scope(|scope| {
                let ranks = groups.map(|group| {
                    let mut config = config.clone();
                    config.train.length = tandem_train::config::Length::Steps(steps);
                    scope.spawn(move || {
                        let mut trainer =
                            Trainer::on_rank(config, RunDirPolicy::Overwrite, group, &mut Silent).unwrap();
                        trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
                        trainer.device().high_water()
                    })
                });
                ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let found = run(8);
        assert_eq!(run(40), found, "{family}: high-water marks after 40 steps and after 8");
        for (rank, found) in found.into_iter().enumerate() {
            // The plan is of the largest micro-batch alone; others before it leave gaps in the arena.
            let planned = plan(rank).arena_bytes();
            let off = (found as f64 / planned as f64 - 1.0).abs();
            assert!(off < 0.05, "{family}, rank {rank}: {found} bytes, {planned} were planned");
        }
        let whole = Plan::make(&config, &prepared, 0, 3).unwrap().arena_bytes();
        let one = self::config(&small, "one", &[&common, &on(1, 1, 1, "ddp")]);
        let one = Plan::make(&one, &prepared, 0, 1).unwrap().arena_bytes();
        assert!(whole < one, "{whole} bytes of a stage, {one} of the whole");
    }
}

#[test]
fn ranks_or_models_that_cannot_be_divided_are_refused_before_any_starts() {
    let small = Small::new("dpo");
    let model = model(&small, "llama", 3);
    for (ranks, stages, slices, expected) in [
        (3, 2, 1, "compute.pipeline = 2, but there are 3 ranks: their number must be a multiple of 2"),
        (1, 2, 1, "compute.pipeline = 2, but there is 1 rank"),
        (
            6,
            2,
            2,
            "compute.tensor = 2 and compute.pipeline = 2, but there are 6 ranks: their number must be a multiple of 4",
        ),
        (4, 4, 1, "3 blocks cannot be divided among 4 stages, each of which needs one at least"),
    ] {
        let settings = [&on(ranks, stages, slices, "ddp")[..], std::slice::from_ref(&model)];
        let overrides = settings.concat();
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &overrides);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!small.path("run").exists(), "nothing is written");
        let config = config(&small, "run", &settings);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let error = Plan::make(&config, &prepared, 0, ranks).unwrap_err().to_string();
        assert!(error.contains(expected), "plan: {error}");
    }
}

/// In every group all ranks make the same collective calls in the same order, and every message has its receiver.
#[test]
fn every_rank_of_up_to_1024_makes_the_same_calls_and_receives_what_is_sent() {
    let small = Small::new("dpo");
    let model = model(&small, "qwen3, tied", 4);
    for sharding in ["ddp", "zero1", "zero2", "zero3"] {
        for (ranks, stages, slices) in
            [(2, 2, 1), (4, 4, 1), (12, 3, 2), (8, 2, 1), (256, 4, 2), (1024, 4, 1)]
        {
            let settings =
                [&on(1, stages, slices, sharding)[..], &[model.clone(), "reference.kind=model".into()]];
            let config = config(&small, "run", &settings);
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            let all: Vec<Vec<(usize, Call)>> =
                (0..ranks).map(|rank| dry_run::calls(&config, &prepared, rank, ranks).unwrap()).collect();
            let pipeline = if slices > 1 { 3 } else { 2 };
            let is_message =
                |call: &Call| matches!(call.operation, Operation::Send { .. } | Operation::Recv { .. });
            // The members of each rank's group of a number: splits off the data group have its members.
            let members = |group: usize, rank: usize| -> usize {
                let (of_model, slice) = (slices * stages, rank % slices);
                match group {
                    0 => 0,
                    dry_run::TENSOR_GROUP if slices > 1 => rank - slice,
                    _ if group == pipeline => rank / of_model * of_model + slice,
                    _ => rank % of_model,
                }
            };
            let mut firsts: HashMap<(usize, usize), Vec<Call>> = HashMap::new();
            for (rank, calls) in all.iter().enumerate() {
                let groups: std::collections::BTreeSet<usize> =
                    calls.iter().map(|(group, _)| *group).collect();
                for group in groups {
                    let in_group = calls.iter().filter(|(of, call)| *of == group && !is_message(call));
                    let collectives: Vec<Call> = in_group.map(|(_, call)| *call).collect();
                    let first =
                        firsts.entry((group, members(group, rank))).or_insert_with(|| collectives.clone());
                    assert!(*first == collectives, "{sharding}: rank {rank} of {ranks}, group {group}");
                }
            }
            let messages = |rank: usize, of: &dyn Fn(Operation) -> bool| -> Vec<(ElementKind, usize)> {
                let of_pipeline =
                    all[rank].iter().filter(|(group, call)| *group == pipeline && of(call.operation));
                of_pipeline.map(|(_, call)| (call.kind, call.len)).collect()
            };
            let mut num_messages = 0;
            for rank in 0..ranks {
                let stage = rank / slices % stages;
                for other in (0..stages).filter(|&other| other != stage) {
                    let peer = rank - stage * slices + other * slices;
                    let sent = messages(rank, &|op| op == Operation::Send { to: other });
                    let received = messages(peer, &|op| op == Operation::Recv { from: stage });
                    assert_eq!(sent, received, "{sharding}: from rank {rank} to {peer} of {ranks}");
                    num_messages += sent.len();
                }
                assert!(all[rank].iter().all(|(group, call)| *group == pipeline || !is_message(call)));
            }
            assert!(num_messages > 0);
        }
    }
}

/// The formulas of docs/ranks.md.
#[test]
fn stages_send_what_the_documentation_says() {
    let small = Small::new("dpo");
    for (family, is_tied) in [("llama", false), ("gpt2", true)] {
        let common =
            [model(&small, family, 3), "reference.kind=model".into(), "train.micro_batch_size=2".into()];
        for slices in [1, 2] {
            let config = config(&small, "run", &[&common, &on(3 * slices, 3, slices, "ddp")]);
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            let rows = prepared.batches(&config).rows(0).to_vec();
            let mut batcher = prepared.batcher(&config);
            let cuts = batcher.cut(&prepared.train, &rows).into_iter();
            let tokens: usize = cuts
                .map(|cut| batcher.build(&prepared.train, &rows[cut][..]).unwrap().forest.num_tokens())
                .sum();
            let decoder = &prepared.decoder;
            let stream = 4 * tokens * decoder.spec().hidden_size;
            let table = 8 * decoder.layout(LayerId::Embedding).len;
            for stage in 0..3 {
                // The slices of a stage together.
                let calls: Vec<_> = (stage * slices..(stage + 1) * slices)
                    .flat_map(|rank| dry_run::calls(&config, &prepared, rank, 3 * slices).unwrap())
                    .collect();
                let sent = |kind: ElementKind| -> u64 {
                    let is_sent = |op| matches!(op, Operation::Send { .. });
                    let calls = calls.iter().map(|(_, call)| call);
                    let calls = calls.filter(|call| is_sent(call.operation) && call.kind == kind);
                    calls.map(|call| call.bytes_sent(3)).sum()
                };
                // Forward for the reference and the policy, backward for the policy.
                let expected = usize::from(stage < 2) * 2 * stream + usize::from(stage > 0) * stream;
                assert_eq!(sent(ElementKind::F32), expected as u64, "{family}, stage {stage}");
                // Each slice has all of a position table.
                if slices == 1 {
                    let expected = if is_tied && stage != 1 { table } else { 0 };
                    assert_eq!(sent(ElementKind::I64), expected as u64, "{family}, stage {stage}: tied");
                }
            }
        }
    }
}
