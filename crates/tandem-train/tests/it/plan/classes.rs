//! Plans of many ranks: those of a class are equal, and are made once.

use tandem_train::plan::{Plan, RunPlan, rank_classes};

use super::sketch::{Sketch, device};

/// Ranks and overrides.
const MESHES: [(usize, &[&str]); 8] = [
    (6, &["compute.sharding=ddp"]),
    (24, &["compute.sharding=zero1"]),
    (10, &["compute.sharding=zero2", "compute.dtype=bf16"]),
    (24, &["compute.sharding=zero3"]),
    (16, &["compute.sharding=zero3", "compute.replicate=4", "compute.dtype=bf16"]),
    (16, &["compute.sharding=zero2", "compute.tensor=2", "compute.pipeline=2"]),
    (12, &["compute.sharding=ddp", "compute.pipeline=4", "train.batch_size=7"]),
    (8, &["compute.sharding=zero1", "compute.replicate=2", "adapter={ rank = 4 }"]),
];

/// Layers of [`Sketch::small`].
const LAYERS: usize = 6;
const CACHE_LINE: usize = 64;

/// Bytes of a plan: in each memory, and of each kind at each phase's peak.
fn bytes(plan: &Plan) -> Vec<usize> {
    let whole = [plan.arena_bytes(), plan.host_bytes(), plan.file_bytes(), plan.under_way];
    let phases = plan.phases.iter();
    let phases = phases.flat_map(|phase| phase.memory.at_peak.into_iter().chain([phase.high_water]));
    whole.into_iter().chain(phases).collect()
}

#[test]
fn every_rank_of_a_class_has_the_plan_of_its_first() {
    let sketch = Sketch::small();
    for (num_ranks, overrides) in MESHES {
        let config = sketch.config(overrides);
        let outline = sketch.outline(&config);
        let classes = rank_classes(&config, &outline, num_ranks).unwrap();
        let mut seen: Vec<usize> = classes.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..num_ranks), "{num_ranks}, {overrides:?}: each rank once");
        for ranks in classes {
            let plan = |rank| bytes(&Plan::new(&config, &outline, rank, num_ranks).unwrap());
            let first = plan(ranks[0]);
            // A part of a frozen layer ends between two units of a few bytes.
            let slack = if overrides.contains(&"compute.sharding=zero3") { LAYERS * CACHE_LINE } else { 0 };
            for &rank in &ranks[1..] {
                let near = plan(rank).iter().zip(&first).all(|(a, b)| a.abs_diff(*b) <= slack);
                assert!(near, "{num_ranks}, {overrides:?}: rank {rank} and {}", ranks[0]);
            }
        }
    }
}

/// What is planned does not grow with the ranks: each is one more member of a class.
#[test]
fn thousands_of_ranks_have_few_classes() {
    // A model whose layers have more blocks of shards than there are ranks.
    let sketch = Sketch::new([1024, 4096, 8, 16, 8, 32_000], 1024, 1024);
    for sharding in ["ddp", "zero1", "zero2", "zero3"] {
        let sharding = format!("compute.sharding={sharding}");
        for more in [&[][..], &["compute.tensor=8", "compute.pipeline=2"]] {
            let config = sketch.config(&[&[sharding.as_str()], more].concat());
            let outline = sketch.outline(&config);
            for num_ranks in [1024, 4096] {
                let classes = rank_classes(&config, &outline, num_ranks).unwrap();
                assert!(classes.len() <= 64, "{sharding} {more:?}: {} classes", classes.len());
            }
        }
    }
}

#[test]
fn ranks_that_never_compute_are_told() {
    let sketch = Sketch::small();
    let h100 = device("H100-80GB");
    let idle = |overrides: &[&str], ranks: usize| {
        let plan = sketch.plan(overrides, ranks, &h100);
        let json = plan.ranks[0].1.to_json()["idle_data_ranks"].as_u64().unwrap();
        (plan.verdict(), json)
    };
    // One pair a micro-batch, so 16 micro-batches a step.
    let (text, json) = idle(&["train.micro_batch_size=1"], 1024);
    assert!(
        text.contains(
            "1,008 of 1,024 ranks have nothing to compute: a step of 16 rows has at most 16 micro-batches; raise \
             train.batch_size (about 1,024 gives every rank one)"
        ),
        "{text}"
    );
    assert_eq!(json, 1008);
    let (text, json) = idle(&["train.micro_batch_size=1", "compute.tensor=2"], 64);
    assert!(
        text.contains("32 of 64 ranks have nothing to compute: a step of 16 rows has at most 16 micro-batches for 32 copies"),
        "{text}"
    );
    assert_eq!(json, 16);
    let (text, json) = idle(&["train.micro_batch_size=1"], 16);
    assert!(!text.contains("nothing to compute") && json == 0, "{text}");
}

/// Threads exchange through each other's memory; processes have buffers for each group.
#[test]
fn buffers_between_processes_are_counted() {
    let sketch = Sketch::small();
    let buffers = |overrides: &[&str], ranks: usize| {
        let config = sketch.config(overrides);
        let plan = Plan::new(&config, &sketch.outline(&config), 0, ranks).unwrap();
        (plan.exchange_buffers, plan.outside)
    };
    let (none, outside) = buffers(&["compute.devices=cpu:4"], 4);
    assert_eq!(none, 0);
    // The world, and the group of the sums.
    let (tcp, beside) = buffers(&["compute.devices=cpu"], 4);
    assert_eq!(tcp as u64, 2 * tandem_comm::tcp::buffer_bytes(4));
    assert_eq!(beside - outside, tcp);
    let (mpi, _) = buffers(&["compute.devices=cpu", "compute.engine=mpi"], 4);
    assert_eq!(mpi as u64, 2 * tandem_comm::mpi::buffer_bytes(4));
    let (more, _) = buffers(&["compute.devices=cpu", "compute.tensor=2", "compute.sharding=zero3"], 4);
    assert!(more > tcp, "{more} bytes");
    let text = sketch.plan(&["compute.devices=cpu"], 4, &device("H100-80GB")).verdict();
    assert!(!text.contains("between processes"), "of a GPU's box nothing is said: {text}");
}

#[test]
fn a_plan_of_all_ranks_names_each_once() {
    let sketch = Sketch::small();
    let plan: RunPlan = sketch.plan(&["compute.sharding=zero3"], 300, &device("H100-80GB"));
    let mut seen: Vec<usize> = plan.ranks.iter().flat_map(|(ranks, _)| ranks.iter().copied()).collect();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..300));
}
