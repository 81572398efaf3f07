//! TRL's `GKDTrainer` on given completions, on the small model, step by step.
//!
//! Numbers: `goldens/small/distill.json`, made by `goldens/distill_golden.py`.

use crate::golden_train::{TOKEN_MEANS, check_short, read};

fn check(name: &str) {
    check_cut(name, name);
}

/// Checks the run `name`, which cuts the batches of the run `whole` into pieces.
fn check_cut(name: &str, whole: &str) {
    let golden = read("distill.json");
    let mut run = golden["runs"][name].clone();
    let of_tokens = ["distill/forward_kl", "distill/reverse_kl", "distill/teacher_entropy"];
    for (step, whole) in golden["runs"][whole]["steps"].as_array().unwrap().iter().enumerate() {
        for key in TOKEN_MEANS.into_iter().chain(of_tokens).filter(|key| whole.get(key).is_some()) {
            run["steps"][step][key] = whole[key].clone();
        }
    }
    check_short(&golden, name, &run);
}

#[test]
fn forward_kl_to_a_teacher_of_another_size() {
    check("forward_kl");
}

#[test]
fn reverse_kl() {
    check("reverse_kl");
}

#[test]
fn jensen_shannon_divergences() {
    check("jsd_0.1");
    check("jsd_0.5");
    check("jsd_0.9_same_size");
}

#[test]
fn divergences_are_means_over_the_tokens_of_the_whole_batch() {
    check_cut("jsd_0.5_2x4", "jsd_0.5");
}

#[test]
fn temperatures_divide_the_logits_of_both() {
    check("forward_kl_cool");
    check("jsd_0.5_hot");
    check("reverse_kl_hot");
}
