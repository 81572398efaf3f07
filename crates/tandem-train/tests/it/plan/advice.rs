//! Advice for a run that does not fit.

use tandem_train::plan::advise::advice::{advise, in_words, possible};
use tandem_train::plan::advise::change::overrides_of;
use tandem_train::plan::advise::search::search;
use tandem_train::plan::{Plan, RunPlan};

use super::sketch::{Sketch, device};

/// Bytes that a rank needs.
fn needed(sketch: &Sketch, overrides: &[&str], ranks: usize) -> u64 {
    sketch.plan(overrides, ranks, &device("A10")).fit().needed
}

/// The advice for a cap of so many bytes.
fn advice(sketch: &Sketch, cap: u64, ranks: usize) -> Option<Vec<&'static str>> {
    let config = sketch.config(&[&format!("compute.memory={cap}B")]);
    let device = device("A10");
    let outline = sketch.outline(&config);
    let plan = RunPlan::make(&config, &outline, ranks, &device).unwrap();
    assert!(!plan.fit().fits(), "there would be nothing to advise");
    let changes = possible(&config, ranks > 1);
    let found = advise(&config, &outline, ranks, &device, &changes)?;
    assert!(found.plan.fit().needed <= cap);
    // The patch does what the advice says, through a config file like any other.
    let changed = config.with(&found.overrides).unwrap();
    assert_eq!(
        Plan::new(&changed, &outline, 0, ranks).unwrap().arena_bytes() as u64,
        found.plan.fit().needed
    );
    Some(found.overrides)
}

/// Each cap is what one of the changes needs: it is advised, or one before it that needs no more.
#[test]
fn the_first_change_that_suffices_is_advised() {
    let order = [
        "compute.checkpointing=selective",
        "compute.checkpointing=block",
        "reference.kind=precompute",
        "compute.sharding=zero1",
        "compute.sharding=zero2",
        "compute.sharding=zero3",
        "train.micro_batch_size=1",
    ];
    let mut advised = Vec::new();
    // Activations take most of the one, weights and states of the other.
    for sketch in [Sketch::small(), Sketch::new([128, 352, 4, 4, 2, 1000], 32, 96)] {
        let whole = needed(&sketch, &[], 4);
        let each = order.map(|change| needed(&sketch, &[change], 4));
        for cap in each.into_iter().filter(|&cap| cap < whole) {
            let first = each.iter().position(|&needed| needed <= cap).expect("the change itself");
            assert_eq!(advice(&sketch, cap, 4), Some(vec![order[first]]), "{cap} bytes");
            advised.push(order[first]);
        }
    }
    advised.sort_unstable();
    advised.dedup();
    assert!(advised.len() >= 4, "{advised:?}");
}

#[test]
fn several_changes_are_advised_where_one_does_not_suffice_and_none_of_them_in_vain() {
    let sketch = Sketch::small();
    let single = needed(&sketch, &["compute.sharding=zero3"], 2);
    let all = ["compute.sharding=zero3", "compute.checkpointing=block", "compute.offload=host"];
    let both = needed(&sketch, &all, 2);
    assert!(both < single);
    let found = advice(&sketch, both, 2).expect("two changes suffice");
    assert!(found.len() > 1, "{found:?}");
    for left_out in 0..found.len() {
        let mut rest = found.clone();
        rest.remove(left_out);
        assert!(needed(&sketch, &rest, 2) > both, "{found:?} without {}", found[left_out]);
    }
}

/// Counts how often several changes are advised for such shares, in fortieths, of the memory that is needed. Without any one of
/// them, each of which is in force, the plan does not fit.
fn count_heaps(shares: impl Iterator<Item = u64> + Clone) -> usize {
    let device = device("cpu");
    let mut heaps = 0;
    for (sketch, ranks) in [
        (Sketch::small(), 1),
        (Sketch::small(), 4),
        (Sketch::new([128, 352, 4, 4, 2, 1000], 32, 96), 2),
        (Sketch::new([64, 160, 6, 4, 2, 4000], 64, 640), 2),
    ] {
        let config = sketch.config(&[]);
        let whole = RunPlan::sketch(&config, &sketch.outline(&config), ranks, &device).unwrap().fit().needed;
        for share in shares.clone() {
            let config = sketch.config(&[&format!("compute.memory={}B", whole * share / 40)]);
            let outline = sketch.outline(&config);
            let changes = possible(&config, ranks > 1);
            let Some(found) = advise(&config, &outline, ranks, &device, &changes) else { continue };
            heaps += usize::from(found.changes.len() > 1);
            for left_out in &found.changes {
                let rest: Vec<_> =
                    found.changes.iter().filter(|change| *change != left_out).copied().collect();
                // Of every rank: one of them may need a little more than the first.
                let overrides = overrides_of(&rest);
                let plan =
                    RunPlan::make(&config.with(&overrides).unwrap(), &outline, ranks, &device).unwrap();
                assert!(
                    !plan.fit().fits(),
                    "{share} of 40, {ranks} ranks: {:?} without {left_out:?}",
                    found.overrides
                );
            }
        }
    }
    heaps
}

#[test]
fn nothing_is_advised_in_vain() {
    let heaps = count_heaps((1..40).step_by(4));
    assert!(heaps > 5, "{heaps}");
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nothing_is_advised_in_vain_whatever_the_cap() {
    let heaps = count_heaps(1..40);
    assert!(heaps > 20, "{heaps}");
}

#[test]
fn where_nothing_helps_what_is_missing_is_said() {
    let sketch = Sketch::small();
    assert_eq!(advice(&sketch, 100_000, 1), None);
    let config = sketch.config(&["compute.memory=100000B"]);
    let text = in_words(&config, &sketch.outline(&config), 1, &device("A10"));
    let heap = "no change makes it fit; with adapter.kind=lora, adapter.rank=16, compute.checkpointing=block, compute.format=nf4, ";
    assert!(text.starts_with(heap), "{text}");
}

#[test]
fn a_search_lists_plans_that_fit_the_fastest_first() {
    let sketch = Sketch::small();
    let cap = needed(&sketch, &["compute.sharding=zero3"], 4);
    let config = sketch.config(&[&format!("compute.memory={cap}B")]);
    let found = search(&config, &sketch.outline(&config), 4, &device("A10"));
    assert!(found.len() > 3, "{}", found.len());
    assert!(found.is_sorted_by(|a, b| a.plan.estimate.step_seconds <= b.plan.estimate.step_seconds));
    for plan in &found {
        assert!(plan.plan.fit().fits(), "{:?}", plan.overrides);
        let changed = config.with(&plan.overrides).unwrap();
        let again = RunPlan::sketch(&changed, &sketch.outline(&changed), 4, &device("A10")).unwrap();
        assert_eq!(again.fit(), plan.plan.fit(), "{:?}", plan.overrides);
    }
    let divides =
        |key: &str| found.iter().any(|plan| plan.overrides.iter().any(|text| text.starts_with(key)));
    assert!(
        divides("compute.tensor=2") && divides("compute.pipeline=2") && divides("compute.sharding=zero3")
    );
}
