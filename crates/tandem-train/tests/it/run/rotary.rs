//! Models that rotate by the length of a text: a row's numbers depend on that row alone, in every kind of run.

use serde_json::{Value, json};
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::run::run_dir::RunDirPolicy;

use super::linear_attention::{PLACES, same_everywhere};
use super::tensor::{config_of, write_model};
use crate::small::Small;

/// Tokens up to which texts rotate alike: some rows have fewer, some more.
const SHORT: usize = 56;

fn model(small: &Small, kind: &str) -> String {
    let mut config = config_of("llama");
    let rotation: Value = match kind {
        "dynamic" => json!({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}),
        _ => json!({
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SHORT,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 9.0],
        }),
    };
    config["rope_parameters"] = rotation;
    if kind == "dynamic" {
        config["max_position_embeddings"] = SHORT.into();
    }
    write_model(small, kind, &config)
}

#[test]
fn runs_end_with_the_same_bits_wherever_rows_are_computed() {
    for kind in ["dynamic", "longrope"] {
        let small = Small::new("dpo");
        let model = model(&small, kind);
        same_everywhere(&small, &model, &["reference.kind=model"], &PLACES);
    }
}

#[test]
fn online_answers_and_weights_are_the_same_on_ranks() {
    for kind in ["dynamic", "longrope"] {
        let small = Small::new("online");
        let model = model(&small, kind);
        let places = [&["compute.devices=cpu:2", "compute.sharding=zero3"][..], &["compute.devices=cpu:3"]];
        same_everywhere(&small, &model, &["train.batch_size=6"], &places);
    }
}

/// The reference is computed in batches of other rows than those of the first step.
#[test]
fn a_policy_begins_as_its_precomputed_reference() {
    for kind in ["dynamic", "longrope"] {
        let small = Small::new("dpo");
        let model = model(&small, kind);
        let sets = [model.as_str(), "reference.kind=precompute", "train.micro_batch_tokens=150"];
        let prepared = RunInputs::open(&small.config("run", &sets), &mut Silent).unwrap();
        let pairs = (0..prepared.train.num_rows()).map(|row| prepared.train.pair(row));
        let lengths: Vec<usize> =
            pairs.map(|pair| pair.prompt.len() + pair.chosen.len().max(pair.rejected.len())).collect();
        let longer = lengths.iter().filter(|&&length| length > SHORT).count();
        assert!((8..lengths.len() - 8).contains(&longer), "{longer} of {lengths:?}");
        let heard = small.finish("run", RunDirPolicy::Fresh, &sets);
        assert!(heard.computed_reference);
        assert!((heard.losses[0] - std::f64::consts::LN_2).abs() < 1e-9, "{kind}: {:?}", heard.losses);
    }
}
