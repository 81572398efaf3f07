//! A model that no machine here could hold, from its config.json alone.

use tandem_kernels::MemoryKind;

use super::sketch::{Sketch, device};

/// The shape of Llama 3 70B.
const LARGE: [usize; 6] = [8192, 28672, 80, 64, 8, 128_256];
const PARAMETERS: usize = 70_553_706_496;

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn seventy_billion_parameters_on_64_devices_are_planned_without_weights() {
    let sketch = Sketch::new(LARGE, 2048, 4096);
    let settings = ["compute.sharding=zero3", "compute.checkpointing=block", "compute.dtype=bf16"];
    let plan = sketch.plan(&settings, 64, &device("H100"));
    assert_eq!(plan.ranks.iter().map(|(ranks, _)| ranks.len()).sum::<usize>(), 64);
    let rank = plan.fullest();
    assert_eq!(rank.num_parameters, PARAMETERS);
    let load = &rank.phases[0];
    // A sixty-fourth of f32 masters, of two moments, and of the reference: in bf16 but for its table of tokens.
    let table = LARGE[0] * LARGE[5];
    for (kind, bytes, more) in
        [(MemoryKind::Master, 4, 0), (MemoryKind::Optimizer, 8, 0), (MemoryKind::Reference, 2, 2 * table)]
    {
        let expected = ((PARAMETERS * bytes + more) / 64) as f64;
        let found = load.memory.at_peak[kind as usize] as f64;
        assert!((found / expected - 1.0).abs() < 0.01, "{}: {found}, {expected} expected", kind.name());
    }
    // Two gathered layers of the policy and two of the reference at most; the head's matrix in bf16 is the largest.
    let gathered = rank.phases[1].memory.at_peak[MemoryKind::Gathered as usize];
    assert!(gathered > 0 && gathered < 4 * 2 * 128_256 * 8192, "{gathered}");
    assert!(plan.fit().fits(), "{}", plan.verdict());
    // Six operations a parameter and token, two for the reference, and almost two to compute blocks again, but for their last
    // products. The table of tokens costs nothing, and the head sees two thirds of them. Attention comes on top.
    let per_token = rank.phases[1].flops / 4096.0 / PARAMETERS as f64;
    assert!((9.0..10.5).contains(&per_token), "{per_token}");
}

/// A micro-batch has no part of a group, so a small assumption does not make it fit.
#[test]
fn a_group_of_answers_is_planned_whole_whatever_is_assumed() {
    // 384 tokens are assumed.
    let sketch = Sketch::small();
    let judge = "judges=[{ kind = \"regex\", pattern = \"a\" }]";
    let settings = ["method=grpo", "objective.beta=0.1", "online.max_new_tokens=100", judge];
    let tokens = |answers: &str| {
        let plan = sketch.plan(&[&settings[..], &[answers]].concat(), 1, &device("A10"));
        plan.fullest().data.max_micro_batch_tokens
    };
    let [few, many] = ["online.answers=3", "online.answers=64"].map(tokens);
    assert!((300..=384).contains(&few) && (6400..6500).contains(&many), "{few} and {many} tokens");
}
