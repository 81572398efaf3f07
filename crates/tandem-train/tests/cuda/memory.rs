//! Requests of GPU memory, and their refusals.

use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_kernels::cuda;
use tandem_kernels::cuda::driver::Region;
use tandem_model::{Decoder, ModelFolder};
use tandem_train::events::{Event, Observer, Silent};
use tandem_train::inputs::ModelSpecs;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;

use crate::small::Small;
use crate::{all_gpus, machine, skipped};

/// High-water mark of the arena, by step.
fn arenas(small: &Small, name: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(small.path(name).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line["arena"].as_u64()).collect()
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_takes_what_its_plan_says_and_never_more() {
    machine();
    for (method, settings) in [
        ("dpo", &[][..]),
        ("dpo", &["compute.dtype=bf16"]),
        ("dpo", &["adapter.rank=4", "compute.format=nf4"]),
        ("dpo", &["adapter.rank=4", "compute.format=fp8", "compute.fp8_matmul=true"]),
        (
            "dpo",
            &["adapter.rank=4", "compute.format=fp8", "compute.fp8_matmul=true", "compute.fp8_backward=true"],
        ),
        ("distill", &["compute.dtype=bf16"]),
    ] {
        let small = Small::new(method);
        small.finish(
            "run",
            RunDirPolicy::Fresh,
            &[&["compute.devices=cuda:0", "train.steps=3"], settings].concat(),
        );
        let plan = std::fs::read_to_string(small.path("run").join("plan.json")).unwrap();
        let plan: Value = serde_json::from_str(&plan).unwrap();
        let planned = plan["arena_bytes"].as_u64().unwrap();
        let arenas = arenas(&small, "run");
        assert!(arenas.iter().all(|&arena| arena == planned), "{settings:?}: {arenas:?}, planned {planned}");
    }
}

#[test]
fn a_gpu_without_warpgroups_is_told_before_anything_is_loaded() {
    machine();
    if tandem_kernels::cuda::list().unwrap()[0].capability == tandem_kernels::cuda::WGMMA {
        return;
    }
    let settings = ["compute.devices=cuda:0", "compute.dtype=bf16", "compute.attention=wgmma"];
    let config = Small::new("dpo").config("run", &settings);
    let error = spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &AtomicBool::new(false))
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("compute.attention = \"wgmma\": GPU 0 ("), "{error}");
    assert!(error.contains("and only those of 9.0 multiply by warpgroups"), "{error}");
}

#[test]
fn a_model_without_kernels_by_warpgroups_is_refused() {
    let settings = ["compute.devices=cuda:0", "compute.dtype=bf16", "compute.attention=wgmma"];
    let config = Small::new("dpo").config("run", &settings);
    let decoder = Decoder::new(ModelFolder::open(&config.model).unwrap().spec().clone(), 1).unwrap();
    let error = ModelSpecs::from_config(&config, &decoder).err().unwrap().to_string();
    assert_eq!(
        error,
        "compute.attention = \"wgmma\": the model's heads have 16 numbers, and kernels that multiply by warpgroups are for 33 to \
         64 and 97 to 128; leave it out"
    );
}

#[test]
fn a_gpu_that_is_too_small_is_told_before_anything_is_loaded() {
    let count = machine();
    let small = Small::new("dpo");
    let settings = ["compute.devices=cuda:0", "compute.memory=1MiB"];
    let config = small.config("run", &settings);
    let error = spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &AtomicBool::new(false))
        .unwrap_err()
        .to_string();
    assert!(error.contains("compute.memory allows 1"), "{error}");
    assert!(error.contains("nothing was loaded"), "{error}");
    let config = small.config("run", &[&format!("compute.devices=cuda:{count}")]);
    let error = spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &AtomicBool::new(false))
        .unwrap_err()
        .to_string();
    let named = format!("compute.devices = \"cuda:{count}\" names GPU {count}");
    assert_eq!(error, format!("{named}, but this process may use {count}, counted from 0"));
}

/// Takes what is free of a GPU when the first step is about to begin.
struct Hog(usize, Option<Box<dyn Region>>);

impl Observer for Hog {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Started { .. }) {
            let gpu = cuda::open(self.0).unwrap();
            let free = gpu.free_memory().unwrap();
            let region = gpu.reserve(free).unwrap();
            region.grow(free).unwrap();
            self.1 = Some(region);
        }
    }
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_gpu_that_fills_up_is_told_with_the_plan_and_what_to_change() {
    machine();
    if !cuda::is_stand_in() {
        let test = "a_gpu_that_fills_up_is_told_with_the_plan_and_what_to_change";
        return skipped(test, "somebody else may need this machine's GPUs");
    }
    let _all = all_gpus();
    let small = Small::new("dpo");
    let config = small.config("run", &["compute.devices=cuda:4", "reference.kind=model"]);
    let mut hog = Hog(4, None);
    let error = spawn::train(&config, RunDirPolicy::Fresh, &mut hog, &AtomicBool::new(false)).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    let text = error.to_string();
    for part in ["out of memory: ", " 0 of the ", " are free", "optimizer", "--set "] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}
