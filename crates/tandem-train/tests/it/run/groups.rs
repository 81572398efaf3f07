//! Groups of parameters: learning rates and weight decays of their own, and frozen ones.

use serde_json::{Map, Value};
use tandem_train::run::run_dir::RunDirPolicy;

use super::ranks::log;
use crate::small::Small;

const COMMON: [&str; 3] = ["reference.kind=model", "compute.threads=1", "train.warmup_steps=0"];

fn with<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    [&COMMON[..], settings].concat()
}

/// Trained tensors by name.
fn tensors(small: &Small, run: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(small.path(&format!("{run}/final/model.safetensors"))).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values =
        |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let mut tensors: Vec<_> =
        file.tensors().into_iter().map(|(name, tensor)| (name, values(tensor.data()))).collect();
    assert!(file.tensors().iter().all(|(_, tensor)| tensor.dtype() == safetensors::Dtype::F32));
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

fn norm(line: &Map<String, Value>) -> f64 {
    line["grad_norm"].as_f64().unwrap()
}

#[test]
fn a_frozen_parameter_stays_and_has_no_part_in_the_norm() {
    let small = Small::new("dpo");
    let group = |pattern: &str| format!("train.groups=[{{ parameters = '{pattern}', frozen = true }}]");
    let (norms, rest) = (group("norm"), group("proj|embed|head"));
    small.finish("one", RunDirPolicy::Overwrite, &with(&["train.steps=1", "train.learning_rate=0"]));
    let start = tensors(&small, "one");
    for (run, settings) in [("all", ""), ("norms", &norms), ("rest", &rest)] {
        let settings: Vec<&str> = [settings].into_iter().filter(|text| !text.is_empty()).collect();
        small.finish(run, RunDirPolicy::Overwrite, &with(&[&settings[..], &["train.steps=2"]].concat()));
        for ((name, before), (_, after)) in start.iter().zip(&tensors(&small, run)) {
            let is_frozen = match run {
                "norms" => name.contains("norm"),
                "rest" => !name.contains("norm"),
                _ => false,
            };
            assert_eq!(before == after, is_frozen, "{run}: {name}");
        }
    }
    let [all, norms, rest] = ["all", "norms", "rest"].map(|run| norm(&log(&small, run)[0]));
    assert!(norms < all && rest < all);
    // The squares of both parts are those of all.
    assert!((norms.hypot(rest) - all).abs() <= 1e-6 * all, "{norms} and {rest}, together {all}");
}

/// Powers of two change no bit: half of twice the rate.
#[test]
fn factors_and_decays_are_those_of_the_whole_run() {
    let small = Small::new("dpo");
    let plain = with(&["train.weight_decay=0.125", "train.learning_rate=0.0078125"]);
    small.finish("plain", RunDirPolicy::Overwrite, &plain);
    let groups = "train.groups=[{ parameters = 'norm', learning_rate_factor = 0.5, weight_decay = 0 }, \
                  { parameters = '.', learning_rate_factor = 0.5, weight_decay = 0.125 }]";
    let grouped = with(&["train.weight_decay=0.5", "train.learning_rate=0.015625", groups]);
    small.finish("grouped", RunDirPolicy::Overwrite, &grouped);
    assert!(small.weights("grouped") == small.weights("plain"));
    let other = groups.replacen("0.5", "0.25", 1);
    let grouped = with(&["train.weight_decay=0.5", "train.learning_rate=0.015625", &other]);
    small.finish("grouped", RunDirPolicy::Overwrite, &grouped);
    assert!(small.weights("grouped") != small.weights("plain"));
}

#[test]
fn groups_give_the_same_bits_on_every_mesh_and_after_a_stop() {
    let small = Small::new("dpo");
    for method in ["", "adapter.rank=4"] {
        let pattern = if method.is_empty() { "embed_tokens|norm" } else { "lora_A" };
        let groups = format!(
            "train.groups=[{{ parameters = '{pattern}', frozen = true }}, \
             {{ parameters = 'layers.1', learning_rate_factor = 2, weight_decay = 0.1 }}]"
        );
        let settings = |mesh: &[&'static str]| {
            let own = [method, &groups].into_iter().filter(|text| !text.is_empty());
            let common = ["reference.kind=base", "compute.threads=1"];
            let common = if method.is_empty() { &COMMON[..] } else { &common };
            own.chain(common.iter().copied())
                .chain(mesh.iter().copied())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let run = |name: &str, start, until, mesh: &[&'static str]| {
            let settings = settings(mesh);
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            small.run(name, start, until, &settings).1.unwrap_or_else(|e| panic!("{mesh:?}: {e}"));
        };
        run("one", RunDirPolicy::Overwrite, None, &[]);
        for mesh in [
            &["compute.devices=cpu:3", "compute.sharding=zero1"][..],
            &["compute.devices=cpu:2", "compute.reduction=exact"],
            &["compute.devices=cpu:2", "compute.tensor=2"],
            &["compute.devices=cpu:2", "compute.pipeline=2"],
        ] {
            run("many", RunDirPolicy::Overwrite, None, mesh);
            assert_eq!(log(&small, "many"), log(&small, "one"), "{method} {mesh:?}");
            assert!(small.weights("many") == small.weights("one"), "{method} {mesh:?}");
        }
        run("parts", RunDirPolicy::Overwrite, Some(3), &["compute.devices=cpu:2", "compute.sharding=zero1"]);
        run("parts", RunDirPolicy::Resume, None, &["compute.devices=cpu:3", "compute.sharding=zero2"]);
        assert!(small.weights("parts") == small.weights("one"), "{method}");
    }
}

#[test]
fn groups_that_name_nothing_or_half_a_parameter_are_refused_before_training() {
    let small = Small::new("dpo");
    for (pattern, expected) in [
        ("nothing", "it is in the name of no parameter that trains"),
        ("q_proj", "which are one parameter here"),
        (".", "nothing is left to train"),
    ] {
        let groups = format!("train.groups=[{{ parameters = '{pattern}', frozen = true }}]");
        let (heard, outcome) = small.run("run", RunDirPolicy::Overwrite, None, &with(&[&groups]));
        let text = outcome.expect_err("the group is wrong").to_string();
        assert!(text.contains("train.groups") && text.contains(expected), "{pattern}: {text}");
        assert!(heard.steps.is_empty());
    }
}
