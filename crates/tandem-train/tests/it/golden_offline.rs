//! TRL's trainers of preferences beside plain DPO, on the small model, step by step.
//!
//! Numbers: `goldens/small/offline.json` and `bco.json`, made by `goldens/offline_golden.py` and `bco_golden.py`.

use serde_json::{Value, json};

use crate::golden_train::{check_short, read};

fn check(name: &str) {
    check_with(name, &json!({}));
}

/// Checks a run with other arguments than TRL's, which change no number here.
fn check_with(name: &str, arguments: &Value) {
    let golden = read(if name.starts_with("bco") { "bco.json" } else { "offline.json" });
    let mut run = golden["runs"][name].clone();
    for (key, value) in arguments.as_object().unwrap() {
        run["args"][key] = value.clone();
    }
    if run["reference"] == "none" || name.starts_with("bco") {
        // CPO's, ORPO's and BCO's trainers take means of logits over prompts and padding, too, and log a
        // likelihood of 0 where it is no term.
        for step in run["steps"].as_array_mut().unwrap() {
            let step = step.as_object_mut().unwrap();
            step.retain(|key, value| !(key.starts_with("logits/") || key == "nll_loss" && *value == 0.0));
        }
    }
    check_short(&golden, name, &run);
}

#[test]
fn cpo() {
    check("cpo");
}

#[test]
fn cpo_with_label_smoothing_and_half_the_likelihood() {
    check("cpo_smoothed");
}

#[test]
fn cpo_with_a_hinge_is_a_hinge_without_a_reference() {
    check("cpo_hinge");
}

#[test]
fn simpo() {
    check("simpo");
}

#[test]
fn simpo_with_likelihood() {
    check("simpo_sft");
}

/// Its likelihood is also that of the prompts.
#[test]
fn orpo() {
    check("orpo");
}

#[test]
fn aot_sorts_the_whole_batch() {
    check("aot");
    check("aot_smoothed");
}

#[test]
fn unpaired_aot_sorts_the_whole_batch() {
    check("aot_unpaired");
    check("aot_mix");
}

#[test]
fn ld_dpo() {
    check("ld");
}

#[test]
fn ld_dpo_spares_the_likelihood() {
    check("ld_mix");
}

#[test]
fn wpo() {
    check("wpo");
    check("wpo_mix");
}

/// Rows' mismatched completions are those of the row before in the batch.
#[test]
fn kto() {
    check("kto");
}

#[test]
fn kto_with_weights() {
    check("kto_weighted");
}

/// Its shift is the mean of all rewards so far.
#[test]
fn bco() {
    check("bco");
    check("bco_steep");
}

#[test]
fn apo_of_labelled_completions() {
    check("apo_zero_unpaired");
}

/// TRL's own losses change with its micro-batches.
#[test]
fn micro_batches_change_no_number() {
    let cut = json!({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4});
    for name in ["cpo", "simpo_sft", "orpo", "aot", "aot_mix", "ld_mix", "wpo_mix", "kto_weighted", "bco"] {
        check_with(name, &cut);
    }
}
