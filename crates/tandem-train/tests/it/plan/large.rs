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

/// Ranks of a pipeline, and shards of few layers, offload more and less.
#[test]
fn a_cpu_fits_the_rank_that_needs_most_with_what_it_offloads() {
    let sketch = Sketch::small();
    for (ranks, place) in
        [(9, "compute.pipeline=3"), (4, "compute.pipeline=2"), (7, "compute.sharding=zero1")]
    {
        for offload in ["compute.offload=host", "compute.offload=none"] {
            let settings = [place, offload, "reference.kind=model", "compute.checkpointing=block"];
            let plan = sketch.plan(&settings, ranks, &device("cpu"));
            let most = plan.ranks.iter().map(|(_, plan)| plan.ram_bytes() as u64).max();
            assert_eq!(Some(plan.fit().needed), most, "{settings:?}");
        }
    }
}

/// Answers that are compared in pairs stay together, so a small assumption does not make them fit.
#[test]
fn more_answers_than_a_micro_batch_holds_are_planned_as_they_are_cut() {
    // 384 tokens are assumed.
    let sketch = Sketch::small();
    let judge = "judges=[{ kind = \"regex\", pattern = \"a\" }]";
    let tokens = |own: &[&str]| {
        let plan = sketch.plan(&[own, &["online.max_new_tokens=100", judge]].concat(), 1, &device("A10"));
        let rank = plan.fullest();
        (rank.data.max_micro_batch_tokens, rank.load.most_micro_batches)
    };
    let grpo = ["method=grpo", "objective.beta=0.1"];
    for (answers, most, micro_batches) in [("3", 300..=384, 16), ("64", 300..=384, 342)] {
        let answers = format!("online.answers={answers}");
        let found = tokens(&[&grpo[..], &[&answers]].concat());
        assert!(most.contains(&found.0) && found.1 == micro_batches, "{answers}: {found:?}");
    }
    for whole in [&["method=online", "online.pairs=all"][..], &["method=grpo", "train.micro_batch_size=1"]] {
        let found = tokens(&[whole, &["online.answers=64", "objective.beta=0.1"]].concat());
        assert!((6400..6500).contains(&found.0) && found.1 == 16, "{whole:?}: {found:?}");
    }
}
