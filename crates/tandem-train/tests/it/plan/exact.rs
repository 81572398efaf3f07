//! No run takes more than its plan says, whatever the lengths of its rows: format × what trains × reference × placement, each
//! under a cap of exactly that.

use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tandem_comm::threads::groups;
use tandem_kernels::Device;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, Trainer};

use crate::small::Small;

const DEADLINE: Duration = Duration::from_secs(600);
const SEEDS: u64 = 2;

/// Model, format and reference of a run.
const KINDS: [&[&str]; 15] = [
    &[],
    &["compute.format=bf16", "reference.kind=model"],
    &["reference.kind=sync", "reference.sync_steps=2"],
    &["compute.checkpointing=block", "reference.kind=model"],
    &["adapter.rank=4", "reference.kind=base"],
    &["adapter.rank=4", "compute.format=int8"],
    &["adapter.rank=4", "compute.format=fp8"],
    &["adapter.rank=4", "compute.format=int8", "reference.kind=model"],
    &["adapter.rank=4", "compute.format=nf4", "reference.kind=base"],
    &["adapter.start=START", "compute.format=nf4", "reference.kind=adapter"],
    &["adapter.start=START", "compute.format=int8", "reference.adapter=START"],
    &[
        "adapter.kind=dora",
        "adapter.rank=4",
        "compute.format=nf4",
        "reference.kind=sync",
        "reference.sync_steps=2",
    ],
    &["adapter.rank=4", "adapter.dropout=0.1", "compute.format=nf4", "compute.checkpointing=selective"],
    &["adapter.kind=dora", "adapter.rank=4", "compute.format=int8", "reference.kind=base"],
    &[
        "adapter.targets=[\"embed_tokens\", \"lm_head\", \"o_proj\"]",
        "compute.dtype=bf16",
        "reference.kind=base",
    ],
];

/// Ranks and placement of a run.
const PLACES: [(usize, &[&str]); 9] = [
    (1, &[]),
    (1, &["compute.offload=host"]),
    (1, &["compute.offload=nvme", "compute.offload_dir=FOLDER"]),
    (2, &["compute.sharding=zero2"]),
    (2, &["compute.sharding=zero3"]),
    (3, &["compute.sharding=zero3", "compute.offload=nvme", "compute.offload_dir=FOLDER"]),
    (2, &["compute.tensor=2"]),
    (2, &["compute.pipeline=2"]),
    (4, &["compute.pipeline=2", "compute.sharding=zero2"]),
];

/// Averages of weights, optimisers of whole matrices, and noise.
const UPDATES: [&[&str]; 6] = [
    &["train.ema_decay=0.9"],
    &["train.optimizer=schedule_free_adamw", "compute.dtype=bf16"],
    &["train.optimizer=schedule_free_adamw", "adapter.rank=4", "train.optimizer_state=8bit"],
    &["train.optimizer=muon", "train.ema_decay=0.9", "train.optimizer_state=8bit"],
    &["train.optimizer=adafactor", "compute.dtype=bf16"],
    &["train.optimizer=muon", "adapter.rank=4", "train.neftune_noise_alpha=5"],
];

/// Keys of an online run.
const ONLINE: [&[&str]; 12] = [
    &[],
    &["online.algorithm=xpo", "online.steps_per_round=3"],
    &["online.algorithm=nash_md", "adapter.rank=4", "online.max_new_tokens=30"],
    &["online.answers=3", "online.pairs=all", "online.max_new_tokens=40", "online.steps_per_round=2"],
    &["adapter.rank=4", "compute.format=nf4", "online.max_batch=3", "compute.checkpointing=block"],
    &["online.replay_size=9", "online.replay_per_step=3", "compute.dtype=bf16", "reference.kind=sync"],
    &["online.overlap=true", "online.algorithm=xpo"],
    &["method=grpo", "online.answers=3", "online.max_new_tokens=30"],
    &["method=grpo", "online.steps_per_round=2", "objective.beta=0.1", "adapter.rank=4"],
    &["online.overlap=true", "adapter.rank=4", "compute.format=nf4", "online.max_batch=3"],
    // Groups larger than a micro-batch.
    &["method=grpo", "online.answers=7", "online.max_new_tokens=40"],
    &["method=grpo", "online.answers=5", "online.max_new_tokens=40", "data.share_prefix=false"],
];

/// Settings of a reward model.
const REWARD: [&[&str]; 2] = [&[], &["adapter.rank=4", "compute.format=nf4"]];

/// Settings of a distillation. The teacher is larger than the policy.
const DISTILL: [&[&str]; 7] = [
    &["data.take=chosen"],
    &["data.take=chosen", "distill.beta=0.0", "compute.checkpointing=block", "compute.dtype=bf16"],
    &["data.take=chosen", "adapter.rank=4", "compute.format=nf4", "distill.temperature=2.0"],
    &["data.take=chosen", "compute.format=int8", "distill.beta=1.0"],
    &["data.take=chosen", "distill.lmbda=0.5", "online.answers=9", "online.max_new_tokens=24"],
    // Given completions are longer than answers.
    &[
        "data.take=chosen",
        "distill.lmbda=0.5",
        "online.answers=2",
        "online.max_new_tokens=4",
        "data.share_prefix=false",
    ],
    &[
        "distill.lmbda=0.5",
        "data.take=chosen",
        "online.max_new_tokens=24",
        "adapter.rank=4",
        "online.overlap=true",
    ],
];

/// Settings of labelled completions. Pairs are two of them.
const LABELLED: [&[&str]; 4] = [
    &["objective.loss=bco"],
    &["objective.loss=kto", "compute.dtype=bf16"],
    &["objective.loss=apo_zero_unpaired", "adapter.rank=4", "compute.format=nf4"],
    &["objective.loss=bco", "reference.kind=model", "compute.checkpointing=block"],
];

/// Settings of every run: steps of ten rows, checkpoints, evaluations.
const RUN: [&str; 6] = [
    "train.batch_size=10",
    "train.steps=7",
    "train.save_every=3",
    "train.eval_every=3",
    "compute.threads=1",
    "data.max_length=400",
];

/// Pairs of lengths as they come: some prompts are long, and some answers.
fn write_pairs(small: &Small, name: &str, mut seed: u64, rows: usize) -> String {
    let mut next = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut words = |most: u64| {
        let most = if next(3) == 0 { most } else { most / 6 };
        let words = (0..1 + next(most)).map(|_| ["no", "yes", "it", "was", "so"][next(5) as usize]);
        words.collect::<Vec<_>>().join(" ")
    };
    let mut text = String::new();
    for _ in 0..rows {
        let [prompt, chosen, rejected] = [100, 40, 40].map(&mut words);
        let _ = writeln!(
            text,
            "{{\"prompt\": \"{prompt}\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}"
        );
    }
    let path = small.path(name);
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// Bytes of a rank's arena, of host memory beside it, of its file.
type Memories = [usize; 3];

fn planned(config: &Config, ranks: usize) -> Vec<Plan> {
    let prepared = RunInputs::open(config, &mut Silent).unwrap();
    (0..ranks).map(|rank| Plan::make(config, &prepared, rank, ranks).unwrap()).collect()
}

/// Memory that each rank took by its end.
fn taken(config: &Config, ranks: usize) -> Vec<Memories> {
    std::thread::scope(|scope| {
        let rank = |group: tandem_comm::ProcessGroup| {
            scope.spawn(move || {
                let mut trainer =
                    Trainer::on_rank(config.clone(), RunDirPolicy::Overwrite, group, &mut Silent).unwrap();
                trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
                let placement = trainer.placement();
                let [host, file] =
                    [placement.host(), placement.file()].map(|memory| memory.map_or(0, Device::high_water));
                [placement.high_water(), host, file]
            })
        };
        let ranks: Vec<_> = groups(ranks, DEADLINE).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The pass that precomputes the reference, and evaluations, cut all rows into micro-batches; a step has its own rows alone.
#[test]
fn other_passes_do_not_make_steps_larger() {
    let small = Small::new("dpo");
    let train = |settings: &[&str]| {
        let config = small.config("run", &[&["train.batch_size=1", "train.steps=3"], settings].concat());
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let plan = Plan::make(&config, &prepared, 0, 1).unwrap();
        let phase = |name: &str| plan.phases.iter().find(|phase| phase.name == name).unwrap().memory.peak;
        (phase("train"), phase("evaluate"))
    };
    let eval = format!("data.eval={}", small.config("any", &[]).data.train[0].path.display());
    let (steps, evaluation) = train(&[&eval, "train.micro_batch_size=1"]);
    let (same, larger) = train(&[&eval, "train.micro_batch_tokens=4096"]);
    assert_eq!(same, steps);
    assert!(larger > evaluation, "{larger} {evaluation}");
}

/// One run of each kind, in one place after another.
#[test]
fn a_run_of_each_kind_takes_what_was_planned() {
    let small = Small::new("dpo");
    small.finish("start", RunDirPolicy::Fresh, &["adapter.rank=4", "reference.kind=base"]);
    let in_turn = |small: &Small, kinds: &[&'static [&'static str]], num_places: usize| {
        for ((index, kind), place) in (0..).zip(kinds).zip(PLACES[..num_places].iter().cycle()) {
            let seed = index % SEEDS;
            take_what_is_planned(small, seed..seed + 1, &[kind], &[*place]);
        }
    };
    // Places that slice or stage the model come last; adapters, reward models and answers have fewer of them.
    in_turn(&small, &KINDS, 6);
    take_what_is_planned(&small, 0..1, &KINDS[..1], &PLACES[6..]);
    let adapted = KINDS.iter().find(|kind| kind.contains(&"compute.format=int8")).expect("an adapter");
    take_what_is_planned(&small, 0..1, &[&[*adapted], &KINDS[12..]].concat(), &PLACES[6..]);
    in_turn(&Small::new("reward"), &REWARD, 6);
    let online = Small::new("online");
    in_turn(&online, &ONLINE, 6);
    // A stage that generates beside its steps, with layers that are unpacked.
    take_what_is_planned(&online, 0..1, &ONLINE[9..], &PLACES[7..]);
    in_turn(&Small::new("distill"), &DISTILL, 6);
    let labelled = Small::new("kto");
    in_turn(&labelled, &LABELLED, 6);
    take_what_is_planned(&labelled, 0..1, &LABELLED[..1], &PLACES[4..]);
}

/// Matrices that are updated whole are not divided by columns or rows.
#[test]
fn updates_of_other_kinds_take_what_was_planned() {
    let small = Small::new("dpo");
    let [whole, _, file, zero2, zero3, .., stages, _] = PLACES;
    take_what_is_planned(&small, 0..1, &UPDATES, &[whole, file, zero2, zero3, stages]);
}

/// Held-out prompts are answered by averages, while the weights that train are kept beside them.
#[test]
fn online_runs_that_evaluate_an_average_take_what_was_planned() {
    const AVERAGED: [&[&str]; 3] = [
        &["train.optimizer=schedule_free_adamw"],
        &[
            "train.optimizer=schedule_free_adamw",
            "method=grpo",
            "online.answers=7",
            "online.max_new_tokens=40",
        ],
        &["train.optimizer=schedule_free_adamw", "online.overlap=true"],
    ];
    let [whole, _, file, _, zero3, ..] = PLACES;
    take_what_is_planned(&Small::new("online"), 0..1, &AVERAGED, &[whole, file, zero3]);
}

/// One prompt a step, whose completions are in several micro-batches, alone or among given completions.
#[test]
fn runs_that_divide_completions_take_what_was_planned() {
    const ONE: [&str; 2] = ["train.batch_size=1", "train.micro_batch_tokens=100"];
    let grpo = ["method=grpo", "online.answers=8", "online.max_new_tokens=48"];
    let adapter = [&grpo[..], &["adapter.rank=4", "objective.beta=0.1"]].concat();
    let apart = [&grpo[..], &["data.share_prefix=false"]].concat();
    let online = Small::new("online");
    for own in [&grpo[..], &adapter, &apart] {
        let plans = planned(&online.config("run", &[own, &ONE].concat()), 1);
        let found = (plans[0].data.max_micro_batch_tokens, plans[0].load.most_micro_batches);
        assert!(found.0 < 170 && found.1 > 3, "{own:?}: {found:?}");
    }
    let settings: Vec<Vec<&str>> =
        [&grpo[..], &adapter, &apart].iter().map(|own| [own, &ONE[..]].concat()).collect();
    let settings: Vec<&[&str]> = settings.iter().map(Vec::as_slice).collect();
    take_what_is_planned(&online, 0..1, &settings, &[PLACES[0], PLACES[4], PLACES[7]]);
    let mixed = ["data.take=chosen", "distill.lmbda=0.5", "online.answers=6", "online.max_new_tokens=10"];
    let alone = [&mixed[..], &ONE].concat();
    take_what_is_planned(&Small::new("distill"), 0..2, &[&mixed[..], &alone], &PLACES[..1]);
}

/// Many short prompts are read at once, and one long prompt alone; completions end before all prompts are read.
#[test]
fn prompts_of_any_length_take_what_was_planned() {
    let small = Small::new("online");
    let train = small.path("short.jsonl");
    let row = |words: usize| format!("{{\"prompt\": \"{}\"}}\n", vec!["so"; words].join(" "));
    fs::write(&train, (0..23).map(|i| row(if i == 9 { 30 } else { 1 + i % 2 })).collect::<String>()).unwrap();
    let grpo = ["method=grpo", "online.answers=5", "train.batch_size=8"];
    let cut = ["train.micro_batch_size=1", "train.micro_batch_tokens=60"];
    for (ranks, place) in [
        (1, &["compute.sharding=ddp"][..]),
        (1, &["compute.sharding=zero3"]),
        (6, &["compute.sharding=zero3", "train.batch_size=6"]),
        (4, &["compute.sharding=zero3", "compute.tensor=2", "compute.pipeline=2", "online.overlap=true"]),
    ] {
        for (tokens, cut) in ["online.max_new_tokens=2", "online.max_new_tokens=9"].into_iter().zip(cut) {
            let more = [tokens, cut, "train.steps=3", "compute.threads=1"];
            let settings = grpo.iter().chain(&more).chain(place).map(|&setting| setting.to_owned());
            let own = [format!("data.train={}", train.display()), format!("compute.devices=cpu:{ranks}")];
            let found = others(&small, &settings.chain(own).collect::<Vec<_>>(), ranks);
            assert!(found.is_empty(), "{place:?} {tokens} {cut}: {found:?}");
        }
    }
}

/// Without held-out rows, ranks that sample nothing put their weights aside for those that do.
#[test]
fn samples_of_an_average_take_what_was_planned_on_every_rank() {
    let small = Small::new("sft");
    for sharding in ["zero1", "zero3"] {
        let settings = [
            "train.optimizer=schedule_free_adamw",
            "train.samples=2",
            "compute.threads=1",
            "compute.devices=cpu:4",
        ];
        let sharding = format!("compute.sharding={sharding}");
        let settings: Vec<String> = settings.map(str::to_owned).into_iter().chain([sharding]).collect();
        let found = others(&small, &settings, 4);
        assert!(found.is_empty(), "{settings:?}: {found:?}");
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn no_run_takes_more_than_was_planned() {
    let small = Small::new("dpo");
    small.finish("start", RunDirPolicy::Fresh, &["adapter.rank=4", "reference.kind=base"]);
    takes_what_is_planned(&small, &KINDS, &PLACES);
}

/// Of each pair two rows are scored, or one.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nor_does_a_reward_model() {
    let whole: Vec<_> =
        PLACES.into_iter().filter(|(_, of_place)| of_place != &["compute.tensor=2"]).collect();
    takes_what_is_planned(&Small::new("reward"), &REWARD, &whole);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nor_does_a_distillation() {
    takes_what_is_planned(&Small::new("distill"), &DISTILL, &PLACES[..6]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nor_do_labelled_completions() {
    takes_what_is_planned(&Small::new("kto"), &LABELLED, &PLACES);
}

/// Answers are as long as they come; what is planned is the most that they may take.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn nor_does_an_online_run() {
    takes_what_is_planned(&Small::new("online"), &ONLINE, &PLACES);
}

/// Ranks of a run that take something else than was planned, under a cap of what was, in words.
fn others(small: &Small, settings: &[String], ranks: usize) -> Vec<String> {
    let config = |more: &[String]| {
        let settings: Vec<&str> = settings.iter().chain(more).map(String::as_str).collect();
        small.config("run", &settings)
    };
    let plans = planned(&config(&[]), ranks);
    let cap = plans.iter().map(Plan::ram_bytes).max().unwrap();
    let taken = taken(&config(&[format!("compute.memory={cap}B")]), ranks);
    let other = |(rank, (plan, taken)): (usize, (&Plan, Memories))| {
        let planned = [plan.arena_bytes(), plan.host_bytes(), plan.file_bytes()];
        (planned != taken).then(|| format!("rank {rank}: {planned:?} planned, {taken:?} taken"))
    };
    plans.iter().zip(taken).enumerate().filter_map(other).collect()
}

fn takes_what_is_planned(small: &Small, kinds: &[&[&str]], places: &[(usize, &[&str])]) {
    take_what_is_planned(small, 0..SEEDS, kinds, places);
}

fn take_what_is_planned(small: &Small, seeds: Range<u64>, kinds: &[&[&str]], places: &[(usize, &[&str])]) {
    let start = small.path("start/final").display().to_string();
    let folder = small.path("").display().to_string();
    let mut wrong = String::new();
    let mut runs = 0;
    for seed in seeds {
        let train = write_pairs(small, &format!("train-{seed}.jsonl"), 2 * seed, 40);
        let eval = write_pairs(small, &format!("eval-{seed}.jsonl"), 2 * seed + 1, 11);
        for &of_kind in kinds {
            for &(ranks, of_place) in places {
                // Refused: nf4 whose units the small model's shards would cut.
                if of_place == ["compute.tensor=2"] && of_kind.contains(&"compute.format=nf4") {
                    continue;
                }
                runs += 1;
                let cuts = ["train.micro_batch_size=2", "train.micro_batch_tokens=160"];
                let own_cut =
                    of_kind.iter().copied().find(|setting| setting.starts_with("train.micro_batch"));
                let cut = own_cut.unwrap_or(cuts[(seed + runs) as usize % 2]);
                let place = |text: &&str| text.replace("START", &start).replace("FOLDER", &folder);
                let mut settings: Vec<String> =
                    RUN.iter().chain(&[cut]).chain(of_kind).chain(of_place).map(place).collect();
                settings.extend([
                    format!("data.train={train}"),
                    format!("compute.devices=cpu:{ranks}"),
                    format!("seed={seed}"),
                ]);
                settings.push(format!("data.eval={eval}"));
                for other in others(small, &settings, ranks) {
                    let _ = writeln!(wrong, "{of_kind:?} {of_place:?} {cut} seed {seed}, {other}");
                }
            }
        }
    }
    print!("{runs} runs\n{wrong}");
    // What is planned is made resident at once, so that no run takes less.
    assert!(wrong.is_empty(), "{wrong}");
}
