//! Offloading moves bytes and changes none.

use std::fs;

use serde_json::{Map, Value};
use tandem_train::events::Silent;
use tandem_train::run::evaluation::evaluate;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Event, Observer, Outcome};

use super::ranks::{held_out, log};
use crate::small::Small;

type Run = (Vec<Map<String, Value>>, Vec<u8>);

const ADAPTER: [&str; 3] = ["adapter.kind=lora", "adapter.rank=4", "adapter.targets=all-linear"];

/// A folder for what is offloaded, made if it is not there.
fn scratch(small: &Small) -> String {
    let folder = small.path("scratch");
    fs::create_dir_all(&folder).unwrap();
    format!("compute.offload_dir={}", folder.display())
}

/// The settings of each kind of offload.
fn kinds(small: &Small) -> [Vec<String>; 2] {
    let of = |kind: &str| format!("compute.offload={kind}");
    [vec![of("host")], vec![of("nvme"), scratch(small)]]
}

fn run(small: &Small, name: &str, settings: &[&str]) -> Run {
    small.finish(
        name,
        RunDirPolicy::Overwrite,
        &[&["compute.threads=1", "train.eval_every=3"], settings].concat(),
    );
    let folder = small.path(name).join("final");
    let weights = ["model.safetensors", "adapter_model.safetensors"].map(|file| fs::read(folder.join(file)));
    (log(small, name), weights.into_iter().find_map(Result::ok).expect("the run finished"))
}

fn same_wherever_it_lies(small: &Small, settings: &[&str], places: &[&str], ranks: &[usize]) {
    let eval = held_out(small, "pref_conv.jsonl");
    let settings = [settings, &[&eval]].concat();
    let expected = run(small, "run", &settings);
    assert_eq!(expected.0.len(), 9, "six steps and three evaluations");
    for kind in kinds(small) {
        let kind: Vec<&str> = kind.iter().map(String::as_str).collect();
        for sharding in places {
            for ranks in ranks {
                let mesh = [format!("compute.sharding={sharding}"), format!("compute.devices=cpu:{ranks}")];
                let mesh = mesh.each_ref().map(String::as_str);
                let found = run(small, "run", &[&settings[..], &kind, &mesh].concat());
                assert_eq!(found.0, expected.0, "{settings:?} with {kind:?} on {mesh:?}: the log");
                assert!(found.1 == expected.1, "{settings:?} with {kind:?} on {mesh:?}: the final weights");
            }
        }
    }
    assert_eq!(fs::read_dir(small.path("scratch")).unwrap().count(), 0, "no file stays behind");
}

const PLACES: [&str; 4] = ["ddp", "zero1", "zero2", "zero3"];

#[test]
fn full_training_is_the_same_wherever_weights_and_states_lie() {
    for dtype in ["compute.dtype=f32", "compute.dtype=bf16"] {
        let small = Small::new("dpo");
        same_wherever_it_lies(&small, &["reference.kind=model", dtype], &PLACES, &[1, 2]);
    }
}

#[test]
fn a_precomputed_reference_and_other_optimisers_are_the_same() {
    let small = Small::new("dpo");
    same_wherever_it_lies(&small, &["train.optimizer_state=8bit"], &["zero1", "zero3"], &[2]);
    same_wherever_it_lies(&small, &["train.optimizer=rmsprop"], &["ddp"], &[1]);
}

#[test]
fn an_adapter_on_offloaded_weights_is_the_same() {
    for format in ["f32", "nf4"] {
        let format = format!("compute.format={format}");
        let small = Small::new("dpo");
        let settings = [&ADAPTER[..], &["reference.kind=base", &format]].concat();
        same_wherever_it_lies(&small, &settings, &["ddp", "zero2", "zero3"], &[1, 2]);
    }
    let small = Small::new("dpo");
    let settings =
        [&ADAPTER[..], &["reference.kind=model", "compute.format=int8", "compute.dtype=bf16"]].concat();
    same_wherever_it_lies(&small, &settings, &["zero3"], &[2]);
}

#[test]
fn a_reference_that_follows_is_the_same() {
    let sync = ["reference.kind=sync", "reference.sync_steps=2", "reference.sync_alpha=0.5"];
    let small = Small::new("dpo");
    same_wherever_it_lies(&small, &sync, &["ddp", "zero3"], &[1, 2]);
    same_wherever_it_lies(&small, &[&sync[..], &ADAPTER].concat(), &["ddp"], &[1]);
}

#[test]
fn stages_of_a_model_offload_what_they_hold() {
    let small = Small::new("dpo");
    let settings = ["reference.kind=model", "compute.pipeline=2"];
    let both = [&settings[..], &["compute.devices=cpu:2"]].concat();
    same_wherever_it_lies(&small, &both, &["zero3"], &[2, 4]);
}

#[test]
fn slices_of_a_model_offload_what_they_hold() {
    let small = Small::new("dpo");
    let settings = ["reference.kind=model", "compute.tensor=2", "compute.devices=cpu:2"];
    same_wherever_it_lies(&small, &settings, &["ddp"], &[2]);
}

#[test]
fn inputs_of_blocks_that_wait_in_host_memory_change_nothing() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_conv.jsonl");
    let activations = ["compute.checkpointing=block", "compute.offload_activations=true"];
    for settings in [
        &["reference.kind=model"][..],
        &["reference.kind=model", "compute.offload=host", "compute.devices=cpu:2", "compute.sharding=zero2"],
        &["reference.kind=model", "compute.pipeline=2", "compute.devices=cpu:2"],
    ] {
        let settings = [settings, &[eval.as_str()]].concat();
        let expected = run(&small, "here", &settings);
        let found = run(&small, "away", &[&settings[..], &activations].concat());
        assert!(found == expected, "{settings:?}");
    }
}

#[test]
fn a_run_stopped_under_one_offload_goes_on_under_another() {
    let small = Small::new("dpo");
    let model = ["reference.kind=model", "compute.threads=1"];
    let whole = small.finish("whole", RunDirPolicy::Fresh, &model);
    let scratch = scratch(&small);
    let nvme = ["compute.offload=nvme", scratch.as_str()];
    let mut start = RunDirPolicy::Fresh;
    let mut steps = Vec::new();
    for (settings, until) in [
        (&nvme[..], Some(1)),
        (&[&nvme[..], &["compute.devices=cpu:2", "compute.sharding=zero3"]].concat(), Some(3)),
        (&["compute.offload=host", "compute.devices=cpu:2"], Some(4)),
        (&nvme, None),
    ] {
        let (heard, outcome) = small.run("parts", start, until, &[&model[..], settings].concat());
        let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(matches!(outcome, Outcome::Finished(_)), until.is_none());
        assert_eq!(heard.warnings, [""; 0], "none of the keys alters the run");
        steps.extend(heard.steps);
        start = RunDirPolicy::Resume;
    }
    assert_eq!(steps, whole.steps);
    assert!(small.weights("parts") == small.weights("whole"));
}

#[test]
fn evaluation_reads_offloaded_weights() {
    let small = Small::new("dpo");
    let eval = held_out(&small, "pref_conv.jsonl");
    small.finish("run", RunDirPolicy::Fresh, &["reference.kind=model", &eval]);
    let checkpoint = small.path("run/checkpoints/step-000006");
    let loss = |settings: &[&str]| {
        let config = small.config("run", &[&["reference.kind=model", &eval], settings].concat());
        evaluate(&config, Some(&checkpoint), &mut Silent).unwrap().get("loss").unwrap()
    };
    let expected = loss(&[]);
    for kind in kinds(&small) {
        let kind: Vec<&str> = kind.iter().map(String::as_str).collect();
        assert_eq!(loss(&kind).to_bits(), expected.to_bits());
        assert_eq!(loss(&[&kind[..], &["compute.sharding=zero3"]].concat()).to_bits(), expected.to_bits());
    }
}

/// A plan's bytes, and a run's.
#[derive(Default)]
struct Planned {
    device: usize,
    host: usize,
    file: usize,
    text: String,
}

impl Observer for Planned {
    fn event(&mut self, event: &Event<'_>) {
        if let Event::Plan(plan) = event {
            *self = Self {
                device: plan.arena_bytes(),
                host: plan.host_bytes(),
                file: plan.file_bytes(),
                text: plan.to_string(),
            };
        }
    }
}

#[test]
fn a_plan_tells_device_host_and_file_apart_and_a_run_needs_what_it_says() {
    let small = Small::new("dpo");
    let scratch = scratch(&small);
    let planned = |settings: &[&str]| {
        let mut planned = Planned::default();
        let common = ["reference.kind=model", "train.save_every=0", "compute.threads=1"];
        let config = small.config("run", &[&common, settings].concat());
        let mut trainer = tandem_train::Trainer::new(config, RunDirPolicy::Overwrite, &mut planned).unwrap();
        trainer.run(&mut planned, &false.into()).unwrap();
        let placement = trainer.placement();
        let marks = [Some(&placement.device), placement.host(), placement.file()];
        let marks = marks.map(|device| device.map_or(0, tandem_kernels::Device::high_water));
        assert_eq!(marks, [planned.device, planned.host, planned.file], "{settings:?}");
        planned
    };
    let none = planned(&[]);
    let host = planned(&["compute.offload=host"]);
    let nvme = planned(&["compute.offload=nvme", &scratch]);
    assert_eq!((none.host, none.file, host.file), (0, 0, 0));
    assert!(3 * host.device < 2 * none.device, "{} of {}", host.device, none.device);
    assert_eq!(nvme.device, host.device);
    assert!(nvme.host < host.host && nvme.file > 0);
    assert!(host.text.contains("in host memory:") && !host.text.contains("in the file:"), "{}", host.text);
    assert!(nvme.text.contains("in the file:"), "{}", nvme.text);
    let block = planned(&["compute.checkpointing=block"]);
    let away = planned(&["compute.checkpointing=block", "compute.offload_activations=true"]);
    assert!(away.device < block.device && away.host > 0);
}

#[test]
fn a_folder_that_will_not_do_is_refused_before_any_rank_starts() {
    let small = Small::new("dpo");
    fs::write(small.path("file"), "").unwrap();
    for (name, expected) in [("missing", "it does not exist"), ("file", "it is not a folder")] {
        let folder = small.path(name);
        let setting = format!("compute.offload_dir={}", folder.display());
        let settings = ["compute.offload=nvme", &setting, "compute.devices=cpu:2"];
        let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(
            error.to_string().contains(&format!("compute.offload_dir = {}", folder.display())),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
        assert!(!small.path("run").exists(), "nothing is written");
    }
}
