//! A run on a GPU beside the same on the processor.

use tandem_train::run::run_dir::RunDirPolicy;

use crate::machine;
use crate::small::Small;

/// Losses of both, which must be near each other: within `tolerance` of the larger of 1 and the loss.
fn near(method: &'static str, settings: &[&str], tolerance: f64) {
    machine();
    let small = Small::new(method);
    let run = |name: &str, place: &[&str]| {
        let slow = ["train.learning_rate=1e-3", "train.steps=4", "train.warmup_steps=0"];
        small.finish(name, RunDirPolicy::Fresh, &[&slow, settings, place].concat()).losses
    };
    let cpu = run("cpu", &["compute.devices=cpu", "compute.dtype=f32", "compute.residual=f32"]);
    let cuda = run("cuda", &["compute.devices=cuda:0"]);
    assert_eq!(cpu.len(), cuda.len());
    for (step, (a, b)) in cpu.iter().zip(&cuda).enumerate() {
        assert!((a - b).abs() <= tolerance * a.abs().max(1.0), "{settings:?}, step {step}: {a} and {b}");
    }
    // Losses that stay where they began would show nothing.
    let moves = cpu.iter().any(|loss| (loss - cpu[0]).abs() > 10.0 * tolerance);
    assert!(moves || tolerance > 1e-3, "{settings:?}: {cpu:?}");
}

/// In f32 the order of sums alone differs, which every update carries on.
const SAME_ARITHMETIC: f64 = 2e-5;

/// bf16 has 8 bits; what it loses in a log-probability beta makes a tenth of.
const IN_BF16: f64 = 2e-2;

#[test]
fn sft() {
    near("sft", &[], SAME_ARITHMETIC);
    near("sft", &["compute.dtype=bf16"], IN_BF16);
}

#[test]
fn a_residual_stream_of_bf16_is_near() {
    near("sft", &["compute.dtype=bf16", "compute.residual=bf16"], IN_BF16);
    let lora = ["adapter.rank=4", "reference.kind=base", "compute.dtype=bf16", "compute.residual=bf16"];
    near("dpo", &lora, IN_BF16);
}

#[test]
fn distillation() {
    near("distill", &[], SAME_ARITHMETIC);
    near("distill", &["distill.beta=1.0", "compute.dtype=bf16"], IN_BF16);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn dpo_with_every_reference() {
    for kind in ["precompute", "model", "sync"] {
        near("dpo", &[&format!("reference.kind={kind}")], SAME_ARITHMETIC);
    }
    near("dpo", &["compute.dtype=bf16"], IN_BF16);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn reward_models() {
    near("reward", &[], SAME_ARITHMETIC);
    near("reward", &["adapter.rank=4", "compute.offload=host"], SAME_ARITHMETIC);
    near("reward", &["compute.dtype=bf16"], IN_BF16);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn adapters_on_every_format() {
    for format in ["f32", "bf16", "int8", "fp8", "nf4"] {
        let format = format!("compute.format={format}");
        near("dpo", &["adapter.rank=4", "reference.kind=base", &format], SAME_ARITHMETIC);
    }
    near("sft", &["adapter.rank=4", "adapter.kind=dora", "adapter.dropout=0.1"], SAME_ARITHMETIC);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn optimizers_and_their_states() {
    for settings in [
        &["train.optimizer=rmsprop", "train.optimizer_state=f32"][..],
        &["train.optimizer=adamw", "train.optimizer_state=bf16"],
        &["train.optimizer=adamw", "train.optimizer_state=8bit"],
        &["train.optimizer=lion", "train.optimizer_state=8bit"],
        &["train.optimizer=sgd", "train.momentum=0.9", "train.learning_rate=0.1"],
        &["train.optimizer=sgd", "train.learning_rate=0.5"],
    ] {
        near("sft", settings, 1e-3);
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn what_is_recomputed_or_offloaded() {
    for settings in [
        &["compute.checkpointing=selective"][..],
        &["compute.checkpointing=block", "compute.offload_activations=true"],
        &["compute.offload=host"],
        &["compute.reduction=fast"],
    ] {
        near("dpo", settings, SAME_ARITHMETIC);
    }
}
