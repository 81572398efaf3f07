//! Settings that may not change a result, and settings that may change it by rounding only.

use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

#[test]
fn threads_do_not_change_a_bit() {
    for dtype in ["compute.dtype=f32", "compute.dtype=bf16"] {
        let small = Small::new("dpo");
        let one = small.finish("1", RunDirPolicy::Fresh, &[dtype, "compute.threads=1"]);
        for threads in ["2", "3"] {
            let setting = format!("compute.threads={threads}");
            let several = small.finish(threads, RunDirPolicy::Fresh, &[dtype, &setting]);
            assert_eq!(several.steps, one.steps, "{dtype} {threads} threads");
            assert!(small.weights(threads) == small.weights("1"), "{dtype} {threads} threads");
        }
    }
}

#[test]
fn recomputing_activations_does_not_change_a_bit() {
    let small = Small::new("dpo");
    let none = small.finish("none", RunDirPolicy::Fresh, &[]);
    for policy in ["selective", "block"] {
        let setting = format!("compute.checkpointing={policy}");
        assert_eq!(small.finish(policy, RunDirPolicy::Fresh, &[&setting]).steps, none.steps, "{policy}");
        assert!(small.weights(policy) == small.weights("none"), "{policy}");
    }
}

/// The cut of a batch changes the order of f32 sums, nothing else.
#[test]
fn losses_do_not_depend_on_the_cut_of_a_batch() {
    for extra in ["objective.loss={sigmoid = 1.0, sft = 0.5}", "objective.loss=ipo"] {
        let small = Small::new("dpo");
        let settings = |cut: &'static str| [extra, cut, "train.learning_rate=1e-3"];
        let whole = small.finish("8", RunDirPolicy::Fresh, &settings("train.micro_batch_size=8")[..]);
        for (name, cut) in [("3", "train.micro_batch_size=3"), ("1", "train.micro_batch_size=1")] {
            let parts = small.finish(name, RunDirPolicy::Fresh, &settings(cut)[..]);
            for (a, b) in whole.losses.iter().zip(&parts.losses) {
                assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{extra} {cut}: {a} and {b}");
            }
        }
    }
}

#[test]
fn evaluation_does_not_depend_on_its_batch_size() {
    let small = Small::new("dpo");
    let eval = format!(
        "data.eval={:?}",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/small/pref_plain.jsonl")
    );
    let settings = |cut: &'static str| [eval.clone(), cut.to_owned(), "train.learning_rate=0".to_owned()];
    let run = |name: &str, cut: &'static str| {
        let settings = settings(cut);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        small.finish(name, RunDirPolicy::Fresh, &settings).eval_losses
    };
    let (all, one) = (run("16", "train.micro_batch_size=16"), run("1", "train.micro_batch_size=1"));
    assert_eq!(all.len(), 2, "one evaluation before the first step and one after the last");
    for (all, one) in all.iter().zip(&one) {
        assert!((all - one).abs() < 1e-6, "{all} {one}");
    }
}

#[test]
fn sharing_the_prompt_changes_rounding_only() {
    let small = Small::new("dpo");
    let shared = small.finish("shared", RunDirPolicy::Fresh, &["train.learning_rate=1e-3"]);
    let apart =
        small.finish("apart", RunDirPolicy::Fresh, &["train.learning_rate=1e-3", "data.share_prefix=false"]);
    for (a, b) in shared.losses.iter().zip(&apart.losses) {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{a} and {b}");
    }
}
