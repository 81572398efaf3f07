//! Remarks about keys without effect.

use super::{EXAMPLE, SMALL_SFT, load, load_with};

fn notes(text: &str, overrides: &[&str], total_steps: u64) -> Vec<String> {
    load_with(text, overrides).1.unwrap_or_else(|e| panic!("{e}")).notes(total_steps)
}

#[test]
fn a_config_whose_keys_all_count_has_no_remarks() {
    assert_eq!(load(EXAMPLE).notes(20), [""; 0]);
    assert_eq!(load(SMALL_SFT).notes(3), [""; 0]);
    let counts = ["logging.tensorboard=true", "logging.run=r", "logging.grace_s=1", "train.sample_tokens=8"];
    assert_eq!(notes(SMALL_SFT, &counts, 3), [""; 0]);
    let early = ["reference.kind=sync", "reference.sync_steps=19", "train.warmup_steps=19"];
    assert_eq!(notes(&EXAMPLE.replace("model = \"models/llama-small-ref\"", ""), &early, 20), [""; 0]);
}

#[test]
fn each_key_without_effect_has_a_remark() {
    let pairs = EXAMPLE.replace("model = \"models/llama-small-ref\"", "");
    for (text, overrides, expected) in [
        (
            &*pairs,
            &["reference.kind=sync"][..],
            "reference.sync_steps = 512: no pull comes before the last of 20",
        ),
        (&*pairs, &["reference.kind=sync", "reference.sync_steps=20"], "reference.sync_steps = 20"),
        (
            &*pairs,
            &["reference.kind=model", "train.warmup_steps=20"],
            "the warm-up has 20 steps and the run 20",
        ),
        (SMALL_SFT, &["train.samples=0", "train.sample_tokens=8"], "train.sample_tokens = 8 has no effect"),
        (SMALL_SFT, &["data.share_prefix=false"], "data.share_prefix = false has no effect"),
        (SMALL_SFT, &["logging.grace_s=3"], "logging.grace_s = 3 has no effect"),
        (SMALL_SFT, &["logging.run=mine"], "logging.run = \"mine\" has no effect"),
        (
            SMALL_SFT,
            &["train.groups=[{ parameters = 'embed', frozen = true }, { parameters = '.' }]"],
            "the last group, parameters = \".\", has no effect",
        ),
    ] {
        let notes = notes(text, overrides, 20);
        assert!(notes.len() == 1 && notes[0].contains(expected), "{overrides:?}: {notes:?}");
    }
}
