//! Optimiser states in bf16 and 8 bits: the same bits wherever they lie, and after a stop.

use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::log;
use super::tensor::{config_of, write_model};
use crate::small::Small;

const FORMS: [&str; 2] = ["train.optimizer_state=bf16", "train.optimizer_state=8bit"];
const COMMON: [&str; 3] = ["reference.kind=model", "compute.threads=1", "train.learning_rate=1e-3"];

/// Ranks, sharding, replicas, slices and stages as settings.
fn on(ranks: usize, sharding: &str, replicate: usize, tensor: usize, pipeline: usize) -> [String; 5] {
    [
        format!("compute.devices=cpu:{ranks}"),
        format!("compute.sharding={sharding}"),
        format!("compute.replicate={replicate}"),
        format!("compute.tensor={tensor}"),
        format!("compute.pipeline={pipeline}"),
    ]
}

fn with<'a>(mesh: &'a [String], settings: &[&'a str]) -> Vec<&'a str> {
    COMMON.into_iter().chain(settings.iter().copied()).chain(mesh.iter().map(String::as_str)).collect()
}

#[test]
fn every_mesh_gives_the_same_bits_and_none_those_of_f32() {
    let small = Small::new("dpo");
    for optimizer in [
        &["train.optimizer=adamw"][..],
        &["train.optimizer=rmsprop"],
        &["train.optimizer=lion", "train.learning_rate=1e-4"],
        &["train.optimizer=sgd", "train.momentum=0.9", "train.learning_rate=1e-2"],
        &["train.optimizer=schedule_free_adamw"],
        &["train.optimizer=muon"],
    ] {
        let of = |form: &[&'static str]| [optimizer, form].concat();
        let optimizer = format!("{optimizer:?}");
        let one = on(1, "ddp", 1, 1, 1);
        small.finish("f32", RunDirPolicy::Overwrite, &with(&one, &of(&[])));
        let mut runs = vec![small.weights("f32")];
        for form in FORMS {
            small.finish("one", RunDirPolicy::Overwrite, &with(&one, &of(&[form])));
            let expected = (log(&small, "one"), small.weights("one"));
            for (found, exact) in expected.0.iter().zip(log(&small, "f32")) {
                let [found, exact] = [found, &exact].map(|line| line["loss"].as_f64().unwrap());
                assert!((found - exact).abs() < 0.02 * exact, "{optimizer} {form}: {found}, in f32 {exact}");
            }
            for mesh in [
                on(3, "zero1", 1, 1, 1),
                on(4, "zero2", 1, 1, 1),
                on(4, "zero3", 2, 1, 1),
                on(4, "zero3", 1, 1, 2),
            ] {
                small.finish("many", RunDirPolicy::Overwrite, &with(&mesh, &of(&[form])));
                assert_eq!(log(&small, "many"), expected.0, "{optimizer} {form} on {mesh:?}: the log");
                assert!(small.weights("many") == expected.1, "{optimizer} {form} on {mesh:?}: the weights");
            }
            runs.push(expected.1);
        }
        assert!(runs[0] != runs[1] && runs[1] != runs[2] && runs[0] != runs[2], "each form is another");
    }
}

/// Stops between steps, on one mesh, and goes on with another; a part of the checkpoints is written from a copy.
#[test]
fn stopped_and_resumed_elsewhere_equals_never_stopped() {
    let small = Small::new("dpo");
    for form in FORMS {
        let settings = [form, "train.weight_decay=0.1"];
        small.finish("whole", RunDirPolicy::Overwrite, &with(&on(1, "ddp", 1, 1, 1), &settings));
        let mut start = RunDirPolicy::Overwrite;
        for (mesh, copied, until) in [
            (on(2, "zero1", 1, 1, 1), true, Some(1)),
            (on(3, "ddp", 1, 1, 1), false, Some(3)),
            (on(4, "zero3", 2, 1, 1), true, Some(4)),
            (on(2, "zero2", 1, 1, 2), false, Some(5)),
            (on(1, "ddp", 1, 1, 1), true, None),
        ] {
            let copied = format!("train.async_checkpoints={copied}");
            let all = with(&mesh, &[&settings[..], &[&copied]].concat());
            let (heard, outcome) = small.run("parts", start, until, &all);
            outcome.unwrap_or_else(|e| panic!("{form} on {mesh:?}: {e}"));
            // Of three micro-batches the fourth rank has none.
            let others = heard.warnings.iter().filter(|text| !text.contains("nothing to compute"));
            assert_eq!(others.count(), 0, "{:?}", heard.warnings);
            start = RunDirPolicy::Resume;
        }
        assert_eq!(log(&small, "parts"), log(&small, "whole"), "{form}");
        assert!(small.weights("parts") == small.weights("whole"), "{form}");
    }
}

/// Every optimiser with states in f32, stopped on one mesh and resumed on others.
#[test]
fn every_optimizer_resumes_on_another_number_of_ranks() {
    let small = Small::new("dpo");
    for optimizer in [
        &["train.optimizer=lion", "train.learning_rate=1e-4"][..],
        &["train.optimizer=sgd"],
        &["train.optimizer=sgd", "train.momentum=0.9", "train.dampening=0.5"],
        &["train.optimizer=sgd", "train.momentum=0.9", "train.nesterov=true"],
        &["train.optimizer=schedule_free_adamw"],
        &["train.optimizer=muon", "train.adjust_lr_fn=original", "train.nesterov=false"],
        &["train.optimizer=adafactor"],
        &["train.optimizer=adafactor", "adapter.rank=4", "reference.kind=base"],
    ] {
        let settings = [optimizer, &["train.weight_decay=0.1"]].concat();
        small.finish("whole", RunDirPolicy::Overwrite, &with(&on(1, "ddp", 1, 1, 1), &settings));
        let mut start = RunDirPolicy::Overwrite;
        for (mesh, until) in [
            (on(3, "zero1", 1, 1, 1), Some(1)),
            (on(4, "zero3", 2, 1, 1), Some(3)),
            (on(2, "zero2", 1, 1, 2), Some(5)),
            (on(1, "ddp", 1, 1, 1), None),
        ] {
            let (_, outcome) = small.run("parts", start, until, &with(&mesh, &settings));
            outcome.unwrap_or_else(|e| panic!("{optimizer:?} on {mesh:?}: {e}"));
            start = RunDirPolicy::Resume;
        }
        assert_eq!(log(&small, "parts"), log(&small, "whole"), "{optimizer:?}");
        assert!(small.weights("parts") == small.weights("whole"), "{optimizer:?}");
    }
}

/// 101 channels and 513 tokens are not divided evenly, so what all slices hold lies elsewhere on each. A checkpoint has the
/// first one's states of that: were the others' not the same, a resumed run would differ.
#[test]
fn what_all_slices_hold_is_kept_alike_on_each() {
    for family in ["phi", "gpt2"] {
        let small = Small::new("dpo");
        let model = write_model(&small, family, &config_of(family));
        for form in FORMS {
            let settings = [form, &model];
            let mesh = on(2, "ddp", 1, 2, 1);
            small.finish("whole", RunDirPolicy::Overwrite, &with(&mesh, &settings));
            small.run("parts", RunDirPolicy::Overwrite, Some(3), &with(&mesh, &settings)).1.unwrap();
            small.finish("parts", RunDirPolicy::Resume, &with(&mesh, &settings));
            assert_eq!(log(&small, "parts"), log(&small, "whole"), "{family} {form}");
            assert!(small.weights("parts") == small.weights("whole"), "{family} {form}");
            // And on data ranks.
            small.finish("divided", RunDirPolicy::Overwrite, &with(&on(4, "zero3", 1, 2, 1), &settings));
            assert!(small.weights("divided") == small.weights("whole"), "{family} {form}");
            // Against one rank blocks and draws are others.
            small.finish("one", RunDirPolicy::Overwrite, &with(&on(1, "ddp", 1, 1, 1), &settings));
            for (found, one) in log(&small, "whole").iter().zip(log(&small, "one")) {
                let [found, one] = [found, &one].map(|line| line["loss"].as_f64().unwrap());
                assert!((found - one).abs() < 0.01 * one, "{family} {form}: {found}, on one rank {one}");
            }
        }
    }
}

/// The form may change with a warning: what was kept is read as f32 and kept in the new form.
#[test]
fn another_form_on_resume_is_told_and_begins_with_what_was_kept() {
    let small = Small::new("dpo");
    let mesh = on(2, "zero2", 1, 1, 1);
    small.finish("f32", RunDirPolicy::Overwrite, &with(&mesh, &[]));
    small.run("run", RunDirPolicy::Overwrite, Some(2), &with(&mesh, &[])).1.unwrap();
    for (form, until) in [(FORMS[1], Some(4)), (FORMS[0], Some(5)), ("train.optimizer_state=f32", None)] {
        let (heard, outcome) = small.run("run", RunDirPolicy::Resume, until, &with(&mesh, &[form]));
        outcome.unwrap_or_else(|e| panic!("{form}: {e}"));
        let expected = |w: &String| w.starts_with("train.optimizer_state was ") && w.contains("differs");
        assert!(heard.warnings.len() == 1 && heard.warnings.iter().all(expected), "{:?}", heard.warnings);
    }
    for (found, exact) in log(&small, "run").iter().zip(log(&small, "f32")) {
        let [found, exact] = [found, &exact].map(|line| line["loss"].as_f64().unwrap());
        assert!((found - exact).abs() < 0.02 * exact, "{found}, in f32 {exact}");
    }
}

/// 8, 4 and 2 + 1/32 bytes per parameter for AdamW, half of it for RMSprop, nothing for SGD; a checkpoint's copy has the masters' 4 more.
#[test]
fn the_plan_counts_states_and_their_copies_as_they_are_kept() {
    let small = Small::new("dpo");
    for (form, width) in [("f32", 4.0), ("bf16", 2.0), ("8bit", 1.0 + 1.0 / 64.0)] {
        let form = format!("train.optimizer_state={form}");
        for (optimizer, states, average) in [
            ("train.optimizer=adamw", 2.0, 0.0),
            ("train.optimizer=rmsprop", 1.0, 0.0),
            ("train.optimizer=lion", 1.0, 0.0),
            ("train.optimizer=sgd", 0.0, 0.0),
            // The base sequence holds weights, and is f32.
            ("train.optimizer=schedule_free_adamw", 1.0, 4.0),
            // An average of the weights is f32, whatever the form of the states.
            ("train.optimizer=adamw", 2.0, 0.99),
            ("train.optimizer=sgd", 0.0, 0.99),
        ] {
            if states == 0.0 && width != 4.0 {
                // What has no states has no form of them.
                continue;
            }
            let ema = (0.0..1.0).contains(&average).then(|| format!("train.ema_decay={average}"));
            let ema = ema.filter(|_| average > 0.0);
            let average = if average > 0.0 { 4.0 } else { 0.0 };
            for mesh in [on(1, "ddp", 1, 1, 1), on(2, "zero1", 1, 1, 1), on(3, "zero3", 1, 1, 1)] {
                let config = small.config(
                    "run",
                    &with(
                        &mesh,
                        &[
                            &[form.as_str(), optimizer][..],
                            &ema.iter().map(String::as_str).collect::<Vec<_>>(),
                        ]
                        .concat(),
                    ),
                );
                let prepared = RunInputs::open(&config, &mut Silent).unwrap();
                let ranks = config.compute.devices.num_ranks();
                let mut found = [0.0; 2];
                for rank in 0..ranks {
                    let plan = Plan::make(&config, &prepared, rank, ranks).unwrap().to_json();
                    let train = &plan["phases"].as_array().unwrap()[0];
                    for (sum, kind) in found.iter_mut().zip(["optimizer", "checkpoint copy"]) {
                        *sum += train["bytes_at_peak"][kind].as_f64().unwrap_or(0.0);
                    }
                }
                let decoder = &prepared.decoder;
                let elements: usize =
                    decoder.layers().into_iter().map(|layer| decoder.layout(layer).len).sum();
                // The arena rounds each buffer of four layers up to 64 bytes, on every rank: codes, scales, masters, and average.
                let rounding = (6 * 4 * 64 * ranks) as f64;
                let kept = states * width + average;
                for (found, each) in found.into_iter().zip([kept, 4.0 + kept]) {
                    let expected = each * elements as f64;
                    assert!(
                        (expected..=expected + rounding).contains(&found),
                        "{form} {optimizer} {mesh:?}: {found}, expected {expected}"
                    );
                }
            }
        }
    }
}
