//! Planned against measured memory: every rank's high-water mark is its plan's, to the byte.
//! `bench/memory` does the same at hundreds of megabytes, with the process's memory beside it.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tandem_comm::threads::groups;
use tandem_kernels::Device;
use tandem_train::Trainer;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

const DEADLINE: Duration = Duration::from_secs(600);

/// Runs on so many ranks, and what tells them from a plain run.
const RUNS: [(&str, usize, &[&str]); 20] = [
    ("full f32, precomputed reference", 1, &[]),
    ("full bf16, reference model", 1, &["compute.dtype=bf16", "reference.kind=model"]),
    ("LoRA bf16, base", 1, &["adapter.rank=4", "compute.dtype=bf16", "reference.kind=base"]),
    ("DoRA f32, precomputed reference", 1, &["adapter.kind=dora", "adapter.rank=4"]),
    ("QLoRA", 1, &["adapter.rank=4", "compute.format=nf4", "compute.dtype=bf16", "reference.kind=base"]),
    ("LoRA int8, a second model", 1, &["adapter.rank=4", "compute.format=int8", "reference.kind=model"]),
    ("two adapters on 4 bits", 1, &["adapter.start=START", "compute.format=nf4", "reference.kind=adapter"]),
    ("8-bit states", 1, &["train.optimizer_state=8bit", "reference.kind=model"]),
    ("blocks' inputs alone", 1, &["compute.checkpointing=block", "reference.kind=model"]),
    ("a reference that follows", 1, &["reference.kind=sync", "reference.sync_steps=2"]),
    ("no copy for checkpoints", 1, &["train.async_checkpoints=false", "compute.reduction=fast"]),
    ("zero2", 2, &["compute.sharding=zero2", "reference.kind=model"]),
    ("zero3", 2, &["compute.sharding=zero3", "reference.kind=model", "compute.dtype=bf16"]),
    ("zero3, LoRA int8", 2, &["compute.sharding=zero3", "adapter.rank=4", "compute.format=int8"]),
    (
        "zero3, two adapters on 4 bits",
        2,
        &["compute.sharding=zero3", "adapter.start=START", "compute.format=nf4", "reference.kind=adapter"],
    ),
    ("offload to the host", 1, &["compute.offload=host", "reference.kind=model", "compute.dtype=bf16"]),
    (
        "QLoRA, offload to the host",
        1,
        &[
            "adapter.rank=4",
            "compute.format=nf4",
            "reference.kind=base",
            "compute.offload=host",
            "compute.checkpointing=block",
            "compute.offload_activations=true",
        ],
    ),
    ("offload to a file", 1, &["compute.offload=nvme", "compute.offload_dir=FOLDER"]),
    (
        "zero3, offload to a file",
        2,
        &[
            "compute.offload=nvme",
            "compute.offload_dir=FOLDER",
            "compute.sharding=zero3",
            "reference.kind=model",
        ],
    ),
    ("two stages", 2, &["compute.pipeline=2", "reference.kind=model"]),
];

/// Bytes that each rank was told to take, and took: of its arena, of host memory beside it, of its file.
fn planned_and_taken(small: &Small, ranks: usize, settings: &[&str]) -> Vec<[(usize, usize); 3]> {
    let devices = format!("compute.devices=cpu:{ranks}");
    let settings = [&["compute.threads=1", &devices], settings].concat();
    let config = small.config("run", &settings);
    std::thread::scope(|scope| {
        let rank = |group: tandem_comm::ProcessGroup| {
            let config = &config;
            scope.spawn(move || {
                let (rank, ranks) = (group.rank(), group.size());
                let mut trainer =
                    Trainer::on_rank(config.clone(), RunDirPolicy::Overwrite, group, &mut Silent).unwrap();
                trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
                let prepared = RunInputs::open(config, &mut Silent).unwrap();
                let plan = Plan::make(config, &prepared, rank, ranks).unwrap();
                let placement = trainer.placement();
                let taken = |memory: Option<&Device>| memory.map_or(0, Device::high_water);
                [
                    (plan.arena_bytes(), trainer.device().high_water()),
                    (plan.host_bytes(), taken(placement.host())),
                    (plan.file_bytes(), taken(placement.file())),
                ]
            })
        };
        let ranks: Vec<_> = groups(ranks, DEADLINE).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn the_arena_takes_what_was_planned() {
    let small = Small::new("dpo");
    small.finish("start", RunDirPolicy::Fresh, &["adapter.rank=4", "reference.kind=base"]);
    let start = format!("adapter.start={}", small.path("start/final").display());
    let folder = format!("compute.offload_dir={}", small.path("").display());
    let mut wrong = String::new();
    for (name, ranks, settings) in RUNS {
        let place = |&setting: &&'static str| match setting {
            "adapter.start=START" => &start[..],
            "compute.offload_dir=FOLDER" => &folder[..],
            other => other,
        };
        let settings: Vec<&str> = settings.iter().map(place).collect();
        for (rank, memories) in planned_and_taken(&small, ranks, &settings).into_iter().enumerate() {
            for (memory, (planned, taken)) in ["arena", "host", "file"].iter().zip(memories) {
                if (planned, taken) == (0, 0) {
                    continue;
                }
                let line = format!("{name}, rank {rank}, {memory}: {planned} planned, {taken} taken\n");
                print!("{line}");
                if planned != taken {
                    wrong += &line;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
