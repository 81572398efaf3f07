//! Offload from GPUs: the bits of runs that keep everything on them, in the memory that the plan says.

use std::fs;
use std::path::Path;

use tandem_kernels::Device;
use tandem_train::events::Silent;
use tandem_train::run::evaluation::evaluate;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Event, Observer, Trainer};

use crate::small::Small;
use crate::{machine, placed};

/// A folder for what is offloaded, made if it is not there.
fn scratch(small: &Small) -> String {
    let folder = small.path("scratch");
    fs::create_dir_all(&folder).unwrap();
    format!("compute.offload_dir={}", folder.display())
}

/// Compares runs that offload to a file, each on some GPUs, with one that does not.
fn same_from_a_file(method: &'static str, settings: &[&str], places: &[&[&str]]) {
    machine();
    let small = Small::new(method);
    let run = |name: &str, place: &[&str]| {
        let steps = small
            .finish(name, RunDirPolicy::Overwrite, &[settings, place, &["train.steps=3"]].concat())
            .steps;
        (steps, small.weights(name))
    };
    let (expected, weights) = run("here", &["compute.devices=cuda:0"]);
    let folder = scratch(&small);
    for place in places.iter().filter_map(|place| placed(place)) {
        let file = ["compute.offload=nvme", folder.as_str()];
        let found = run("file", &[&file[..], &place].concat());
        assert_eq!(found.0, expected, "{settings:?} on {place:?}");
        assert!(found.1 == weights, "{settings:?} on {place:?}: the final weights");
    }
    assert_eq!(fs::read_dir(small.path("scratch")).unwrap().count(), 0, "no file stays behind");
}

const ONE: &[&str] = &["compute.devices=cuda:1"];
const ZERO1: &[&str] = &["compute.devices=cuda:0,1", "compute.sharding=zero1"];
const ZERO2: &[&str] = &["compute.devices=cuda:2,3", "compute.sharding=zero2"];
const ZERO3: &[&str] = &["compute.devices=cuda:0,1", "compute.sharding=zero3"];

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn full_training_from_a_file() {
    same_from_a_file("dpo", &["reference.kind=model"], &[ONE, ZERO1, ZERO2, ZERO3]);
    same_from_a_file("dpo", &["compute.dtype=bf16", "reference.kind=precompute"], &[ONE, ZERO3]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn every_optimizer_from_a_file() {
    for settings in [
        ["train.optimizer=rmsprop", "train.optimizer_state=f32"],
        ["train.optimizer=adamw", "train.optimizer_state=bf16"],
        ["train.optimizer=adamw", "train.optimizer_state=8bit"],
    ] {
        same_from_a_file("sft", &settings, &[ONE]);
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn an_adapter_on_weights_in_a_file() {
    let nf4 = ["adapter.rank=4", "compute.format=nf4", "reference.kind=base"];
    same_from_a_file("dpo", &nf4, &[ONE, ZERO3]);
    let int8 = ["adapter.rank=4", "compute.format=int8", "reference.kind=model", "compute.dtype=bf16"];
    same_from_a_file("dpo", &int8, &[ONE]);
    same_from_a_file("sft", &["adapter.rank=4", "compute.format=bf16"], &[ZERO3]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_reference_in_a_file_that_follows() {
    let sync = ["reference.kind=sync", "reference.sync_steps=2", "reference.sync_alpha=0.5"];
    same_from_a_file("dpo", &sync, &[ONE, ZERO3]);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_stopped_under_one_offload_goes_on_under_another() {
    machine();
    let small = Small::new("dpo");
    let settings = ["reference.kind=model", "compute.dtype=bf16"];
    let whole =
        small.finish("whole", RunDirPolicy::Fresh, &[&settings[..], &["compute.devices=cuda:0"]].concat());
    let folder = scratch(&small);
    let file = ["compute.offload=nvme", folder.as_str()];
    let (mut start, mut steps) = (RunDirPolicy::Fresh, Vec::new());
    for (place, until) in [
        ([&file[..], ONE].concat(), Some(1)),
        ([&file[..], ZERO3].concat(), Some(3)),
        ([&["compute.offload=host"], ONE].concat(), Some(4)),
        ([&file[..], ONE].concat(), None),
    ] {
        let Some(place) = placed(&place) else { return };
        let (heard, outcome) = small.run("parts", start, until, &[&settings, &place[..]].concat());
        outcome.unwrap_or_else(|e| panic!("{place:?}: {e}"));
        steps.extend(heard.steps);
        start = RunDirPolicy::Resume;
    }
    assert_eq!(steps, whole.steps);
    assert!(small.weights("parts") == small.weights("whole"));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn inputs_of_blocks_that_wait_in_host_memory_change_nothing() {
    machine();
    let activations = ["compute.checkpointing=block", "compute.offload_activations=true"];
    for (settings, place) in [
        (&["reference.kind=model"][..], ONE),
        (&["adapter.rank=4", "reference.kind=base", "compute.dtype=bf16"], ZERO2),
        (&["reference.kind=model", "compute.offload=host"], ZERO3),
        (&["reference.kind=model", "compute.pipeline=2"], &["compute.devices=cuda:0,1"]),
    ] {
        let Some(place) = placed(place) else { continue };
        let small = Small::new("dpo");
        let run = |name: &str, more: &[&str]| {
            let few = ["train.steps=3"];
            let steps =
                small.finish(name, RunDirPolicy::Fresh, &[settings, &place, more, &few].concat()).steps;
            (steps, small.weights(name))
        };
        assert!(run("here", &[]) == run("away", &activations), "{settings:?} on {place:?}");
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn an_evaluation_reads_weights_in_a_file() {
    machine();
    let small = Small::new("dpo");
    let eval = format!("data.eval={}", small.path("held_out.jsonl").display());
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small");
    fs::copy(goldens.join("pref_conv.jsonl"), small.path("held_out.jsonl")).unwrap();
    let settings = ["reference.kind=model", "compute.devices=cuda:0", "train.steps=2", &eval];
    small.finish("run", RunDirPolicy::Fresh, &settings);
    let checkpoint = small.path("run/checkpoints/step-000002");
    let folder = scratch(&small);
    let [here, file] = [&[][..], &["compute.offload=nvme", &folder]].map(|offload: &[&str]| {
        let config = small.config("run", &[&settings[..], offload].concat());
        evaluate(&config, Some(&checkpoint), &mut Silent).unwrap().get("loss").unwrap()
    });
    assert_eq!(here.to_bits(), file.to_bits());
}

/// A plan's bytes on the device, in host memory and in the file.
#[derive(Default)]
struct Planned([usize; 3]);

impl Observer for Planned {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Plan(plan) = event {
            self.0 = [plan.arena_bytes(), plan.host_bytes(), plan.file_bytes()];
        }
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_takes_of_every_memory_what_its_plan_says() {
    machine();
    let small = Small::new("dpo");
    let folder = scratch(&small);
    let taken = |settings: &[&str]| {
        let mut planned = Planned::default();
        let common = ["compute.devices=cuda:0", "train.steps=2"];
        let config = small.config("run", &[&common, settings].concat());
        let mut trainer = Trainer::new(config, RunDirPolicy::Overwrite, &mut planned).unwrap();
        trainer.run(&mut planned, &false.into()).unwrap();
        let placement = trainer.placement();
        let memories = [Some(&placement.device), placement.host(), placement.file()];
        let marks = memories.map(|memory| memory.map_or(0, Device::high_water));
        assert_eq!(marks, planned.0, "{settings:?}");
        marks
    };
    let file = ["compute.offload=nvme", folder.as_str()];
    let [here, host, disk] = [&["compute.offload=none"][..], &["compute.offload=host"], &file]
        .map(|offload| taken(&[offload, &["reference.kind=model"]].concat()));
    assert_eq!((here[2], host[2], disk[0]), (0, 0, host[0]));
    assert!(host[0] < here[0] && disk[2] > 0, "{here:?} {host:?} {disk:?}");
    taken(&[&file[..], &["adapter.rank=4", "compute.format=nf4", "reference.kind=model"]].concat());
    let block = taken(&["compute.checkpointing=block"]);
    let away = taken(&["compute.checkpointing=block", "compute.offload_activations=true"]);
    assert!(away[0] < block[0] && away[1] > block[1], "{block:?} {away:?}");
}
