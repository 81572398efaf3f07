//! Averages of the weights: evaluated, saved and exported, with the same bits on every mesh.

use std::fs;
use std::path::Path;

use tandem_train::checkpoint::{Checkpoint, Checkpoints, export};
use tandem_train::events::Silent;
use tandem_train::run::evaluation;
use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::{held_out, log};
use crate::small::Small;

/// Settings whose evaluations are of other weights than those that train.
const AVERAGES: [&[&str]; 3] = [
    &["train.ema_decay=0.9"],
    &["train.optimizer=schedule_free_adamw"],
    &["train.optimizer=schedule_free_adamw", "train.optimizer_state=8bit", "train.betas=[0.4, 0.99]"],
];

/// Ranks and placement of runs that must agree.
const MESHES: [&[&str]; 7] = [
    &["compute.devices=cpu:3"],
    &["compute.devices=cpu:3", "compute.sharding=zero1"],
    &["compute.devices=cpu:4", "compute.sharding=zero2", "compute.replicate=2"],
    &["compute.devices=cpu:2", "compute.sharding=zero3", "compute.offload=host"],
    &["compute.devices=cpu:2", "compute.sharding=zero2", "compute.pipeline=2", "train.samples=0"],
    &["compute.offload=nvme", "compute.offload_dir=FOLDER"],
    &["compute.devices=cpu:2", "compute.tensor=2"],
];

fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let spec = checkpoint.tensors().find(|spec| spec.name == name).unwrap_or_else(|| panic!("no {name}"));
    let mut numbers = vec![0.0; spec.shape.iter().product()];
    checkpoint.read(name, 0, &mut numbers).unwrap();
    numbers
}

fn model_of(folder: &Path) -> Vec<u8> {
    let files = ["model.safetensors", "adapter_model.safetensors"].map(|file| folder.join(file));
    fs::read(files.iter().find(|file| file.exists()).expect("weights")).unwrap()
}

/// Runs what is averaged with each kind of training on the meshes that `is_wanted` takes by the three indices.
fn same_averages(is_wanted: impl Fn([usize; 3]) -> bool) {
    let kinds = [&["reference.kind=model"][..], &["adapter.rank=4"], &["compute.dtype=bf16"]];
    for (average, settings) in AVERAGES.into_iter().enumerate() {
        for (kind, keys) in kinds.into_iter().enumerate() {
            let small = Small::new("dpo");
            let eval = held_out(&small, "pref_plain.jsonl");
            let common =
                [settings, keys, &["compute.threads=1", "train.eval_every=1", "train.samples=1", &eval]]
                    .concat();
            small.finish("one", RunDirPolicy::Fresh, &common);
            let expected = (log(&small, "one"), small.weights("one"));
            let folder = format!("compute.offload_dir={}", small.path("").display());
            for (_, mesh) in MESHES.iter().enumerate().filter(|(mesh, _)| is_wanted([average, kind, *mesh])) {
                // Blocks of 8-bit states begin elsewhere in a slice.
                if mesh.contains(&"compute.tensor=2") && settings.contains(&"train.optimizer_state=8bit") {
                    continue;
                }
                let mesh: Vec<_> = mesh
                    .iter()
                    .map(|&key| if key.ends_with("FOLDER") { folder.as_str() } else { key })
                    .collect();
                small.finish("many", RunDirPolicy::Overwrite, &[&common[..], &mesh].concat());
                assert_eq!(log(&small, "many"), expected.0, "{settings:?} {keys:?} on {mesh:?}: the log");
                assert!(
                    small.weights("many") == expected.1,
                    "{settings:?} {keys:?} on {mesh:?}: the weights"
                );
            }
        }
    }
}

/// Any two of average, kind and mesh come together once.
#[test]
fn every_mesh_has_the_same_averages() {
    same_averages(|[average, kind, mesh]| (average + kind + mesh).is_multiple_of(3));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn every_mesh_has_the_same_averages_of_each_kind() {
    same_averages(|_| true);
}

/// Training has the same bits whether it is evaluated at every step or at none, and after stops on other meshes.
#[test]
fn evaluations_and_stops_change_nothing() {
    for settings in AVERAGES {
        for kind in [&["reference.kind=model"][..], &["adapter.rank=4", "reference.kind=base"]] {
            let small = Small::new("dpo");
            let eval = held_out(&small, "pref_plain.jsonl");
            let common = [settings, kind, &["compute.threads=1", "train.weight_decay=0.1"]].concat();
            let never = [&common[..], &["train.samples=0"]].concat();
            let steps = small.finish("never", RunDirPolicy::Fresh, &never).steps;
            let often = [&common[..], &["train.eval_every=1", &eval]].concat();
            assert_eq!(small.finish("often", RunDirPolicy::Fresh, &often).steps, steps, "{settings:?}");
            assert!(small.weights("often") == small.weights("never"), "{settings:?}");
            let mut start = RunDirPolicy::Fresh;
            for (mesh, until) in [
                (&["compute.devices=cpu:3", "compute.sharding=zero1"][..], Some(1)),
                (
                    &["compute.devices=cpu:2", "compute.sharding=zero3", "train.async_checkpoints=false"],
                    Some(3),
                ),
                (&["compute.devices=cpu:2", "compute.pipeline=2", "train.samples=0"], Some(5)),
                (&[], None),
            ] {
                small
                    .run("parts", start, until, &[&often[..], mesh].concat())
                    .1
                    .unwrap_or_else(|e| panic!("{e}"));
                start = RunDirPolicy::Resume;
            }
            assert_eq!(log(&small, "parts"), log(&small, "often"), "{settings:?} {kind:?}");
            assert!(small.weights("parts") == small.weights("often"), "{settings:?} {kind:?}");
            // Other weights train than are evaluated.
            small.finish(
                "plain",
                RunDirPolicy::Fresh,
                &[kind, &["train.samples=0", "compute.threads=1"]].concat(),
            );
            assert!(small.weights("plain") != small.weights("never"), "{settings:?} {kind:?}");
        }
    }
}

/// The model of a run, that of its last checkpoint, and the held-out loss of both are the last evaluation's.
#[test]
fn the_model_and_its_checkpoint_are_what_was_evaluated() {
    for settings in AVERAGES {
        for kind in [&["reference.kind=model"][..], &["adapter.rank=4"]] {
            let small = Small::new("dpo");
            let eval = held_out(&small, "pref_plain.jsonl");
            let all = [settings, kind, &["compute.threads=1", "train.eval_every=2", &eval]].concat();
            let heard = small.finish("run", RunDirPolicy::Fresh, &all);
            let checkpoint = small.path("run/checkpoints/step-000006");
            let (config, out) = (small.config("run", &all), small.path("exported"));
            export(&config, &checkpoint, &out).unwrap_or_else(|e| panic!("{e}"));
            assert!(model_of(&out) == small.weights("run"), "{settings:?} {kind:?}");
            let record = evaluation::evaluate(&config, Some(&checkpoint), &mut Silent).unwrap();
            assert_eq!(record.get("loss"), heard.eval_losses.last().copied(), "{settings:?} {kind:?}");
        }
    }
}

#[test]
fn the_best_average_becomes_the_model() {
    for settings in AVERAGES {
        let small = Small::new("sft");
        let eval = held_out(&small, "sft_messages.jsonl");
        let all = [
            settings,
            &["train.eval_every=1", "train.keep_best=eval/loss", "train.learning_rate=0.1", "train.steps=12"],
            &["compute.devices=cpu:2", "compute.sharding=zero2", "train.save_every=4", &eval],
        ]
        .concat();
        let heard = small.finish("run", RunDirPolicy::Fresh, &all);
        let losses = &heard.eval_losses;
        let best = (0..losses.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap();
        assert!(0 < best && best < 12, "{settings:?}: {losses:?}");
        let (config, out) = (small.config("run", &all), small.path("exported"));
        export(&config, &small.path(&format!("run/checkpoints/step-{best:06}")), &out).unwrap();
        assert!(model_of(&out) == small.weights("run"), "{settings:?}");
    }
}

/// Held-out prompts are answered by the average, those of the training by the weights that train.
#[test]
fn answers_to_held_out_prompts_are_the_averages() {
    let small = Small::new("online");
    let prompts =
        concat!("data.eval=", env!("CARGO_MANIFEST_DIR"), "/../../goldens/online/prompts_conv.jsonl");
    let common =
        ["compute.threads=1", "method=grpo", "online.answers=3", "train.warmup_steps=0", "train.steps=4"];
    let evaluated = |name: &str| -> Vec<_> {
        log(&small, name).into_iter().filter(|line| line["split"] == "eval").collect()
    };
    for settings in AVERAGES {
        let mut expected = None;
        for place in [
            &["compute.devices=cpu:1"][..],
            &["compute.devices=cpu:2", "compute.sharding=zero3"],
            &["compute.devices=cpu:2", "compute.pipeline=2"],
            &["compute.offload=host"],
        ] {
            let own = [&common, settings, place, &["adapter.rank=4", "train.save_every=1", "train.keep=0"]]
                .concat();
            let all = [&own[..], &[prompts, "train.eval_every=2"]].concat();
            small.finish("run", RunDirPolicy::Overwrite, &all);
            let steps = small.finish("without", RunDirPolicy::Overwrite, &own).steps;
            let trained: Vec<_> =
                log(&small, "run").into_iter().filter(|line| line["split"] == "train").collect();
            assert_eq!(trained, log(&small, "without"), "{all:?}: an evaluation changes nothing");
            assert_eq!(steps.len(), 4);
            // The weights that answer are those that train, to the bit.
            assert!(trained.iter().all(|line| line["sampling/ratio"] == 1.0), "{all:?}: {trained:?}");
            let found = evaluated("run");
            assert_eq!(*expected.get_or_insert_with(|| found.clone()), found, "{all:?}");
        }
        let found = expected.unwrap();
        for (record, step) in found.iter().zip([0, 2, 4]).skip(1) {
            let (config, out) = (
                small.config("run", &[&common, settings, &["adapter.rank=4"]].concat()),
                small.path(&format!("exported-{step}")),
            );
            let _ = fs::remove_dir_all(&out);
            export(&config, &small.path(&format!("run/checkpoints/step-{step:06}")), &out).unwrap();
            let start = format!("adapter.start={}", out.display());
            small.finish("again", RunDirPolicy::Overwrite, &[&common[..], &[prompts, &start]].concat());
            let again = &evaluated("again")[0];
            for key in ["reward", "reward_std", "completions/mean_length"] {
                assert!(
                    record[key].is_number() && record[key] == again[key],
                    "{settings:?} {step}: {record:?} {again:?}"
                );
            }
        }
        assert_ne!(found[1]["reward"], found[2]["reward"]);
    }
}

/// Against the formula, over the checkpoints of every step.
#[test]
fn an_average_follows_the_weights() {
    let small = Small::new("sft");
    small.finish("run", RunDirPolicy::Fresh, &["train.ema_decay=0.6", "train.save_every=1", "train.keep=0"]);
    let checkpoints = Checkpoints::for_run(&small.path("run"));
    let mut expected: Option<Vec<f64>> = None;
    for step in 1..=6 {
        let checkpoint = Checkpoint::open(&checkpoints.folder_of(step)).unwrap();
        let [policy, average] =
            ["policy", "average"].map(|group| numbers(&checkpoint, &format!("{group}/block.1.up_weight")));
        let policy = policy.iter().map(|&x| f64::from(x));
        expected = Some(match expected {
            None => policy.collect(),
            Some(before) => before.iter().zip(policy).map(|(before, now)| 0.6 * before + 0.4 * now).collect(),
        });
        for (found, expected) in average.iter().zip(expected.as_ref().unwrap()) {
            assert!((f64::from(*found) - expected).abs() < 1e-7, "step {step}: {found}, expected {expected}");
        }
    }
}
