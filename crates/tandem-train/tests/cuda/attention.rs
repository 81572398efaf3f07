//! Kernels of attention that were timed: the same on every rank, and those of the record in a run that goes on.
//!
//! GPU 7 of the emulated machine has both kinds, the others have one. Which of them is the faster one is not tested.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use tandem_kernels::cuda;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::verify::{RecordedRun, Request};

use crate::small::Small;
use crate::{HOPPER, machine, skipped};

/// Settings of a run with heads of 64 numbers on a GPU that has both kinds.
struct Hopper {
    small: Small,
    settings: Vec<String>,
}

impl Hopper {
    /// Returns nothing, with a line, where there is no such GPU.
    fn new(test: &str) -> Option<Self> {
        machine();
        let ordinal = if cuda::is_stand_in() { HOPPER } else { 0 };
        if cuda::list().unwrap()[ordinal].capability != cuda::WGMMA {
            skipped(test, "it needs a GPU of compute capability 9.0");
            return None;
        }
        let small = Small::new("sft");
        let model = wide_heads(&small.path("model"));
        let settings = vec![
            format!("model={}", model.display()),
            format!("compute.devices=cuda:{ordinal}"),
            "compute.dtype=bf16".to_owned(),
            "train.steps=4".to_owned(),
        ];
        Some(Self { small, settings })
    }

    fn settings<'a>(&'a self, own: &[&'a str]) -> Vec<&'a str> {
        self.settings.iter().map(String::as_str).chain(own.iter().copied()).collect()
    }

    fn run(&self, name: &str, start: RunDirPolicy, until: Option<u64>, own: &[&str]) {
        let (heard, outcome) = self.small.run(name, start, until, &self.settings(own));
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(heard.warnings, [""; 0], "{name}");
    }

    fn whole(&self, name: &str, own: &[&str]) -> Vec<u8> {
        self.run(name, RunDirPolicy::Fresh, None, own);
        self.small.weights(name)
    }

    /// The arithmetic of each start that changed something.
    fn arithmetics(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.small.path(name).join("provenance.json")).unwrap();
        let record: serde_json::Value = serde_json::from_str(&text).unwrap();
        let starts = record["starts"].as_array().unwrap();
        starts.iter().map(|start| start["arithmetic"][0].as_str().unwrap().to_owned()).collect()
    }
}

/// Makes the folder of a model with heads of 64 numbers.
fn wide_heads(folder: &Path) -> std::path::PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
    fs::create_dir_all(folder).unwrap();
    for file in fs::read_dir(source).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"head_dim\": 16"));
    fs::write(&path, text.replace("\"head_dim\": 16", "\"head_dim\": 64")).unwrap();
    folder.to_owned()
}

#[test]
fn a_run_takes_the_kernels_that_were_timed_and_keeps_them() {
    let Some(hopper) = Hopper::new("a_run_takes_the_kernels_that_were_timed_and_keeps_them") else { return };
    let by_warps = hopper.whole("mma", &["compute.attention=mma"]);
    let by_groups = hopper.whole("wgmma", &["compute.attention=wgmma"]);
    assert!(by_warps != by_groups, "the kinds have other bits");
    let auto = hopper.whole("auto", &["compute.attention=auto"]);
    let [ref arithmetic] = hopper.arithmetics("auto")[..] else { panic!("one start") };
    let takes_groups = cuda::names_wgmma(arithmetic);
    assert!(auto == if takes_groups { by_groups } else { by_warps }, "{arithmetic}");

    // A run that has begun with either kind goes on with it.
    for (kind, name) in [("mma", "from-mma"), ("wgmma", "from-wgmma")] {
        hopper.run(name, RunDirPolicy::Fresh, Some(2), &[&format!("compute.attention={kind}")]);
        let config = fs::read_to_string(hopper.small.path(name).join("config.toml")).unwrap();
        let told = format!("attention = \"{kind}\"");
        assert!(config.contains(&told), "{config}");
        fs::write(hopper.small.path(name).join("config.toml"), config.replace(&told, "attention = \"auto\""))
            .unwrap();
        hopper.run(name, RunDirPolicy::Resume, None, &["compute.attention=auto"]);
        assert!(hopper.small.weights(name) == hopper.small.weights(kind), "{kind}");
        let arithmetics = hopper.arithmetics(name);
        assert!(
            arithmetics.iter().all(|name| cuda::names_wgmma(name) == (kind == "wgmma")),
            "{arithmetics:?}"
        );
    }

    // And again from the record.
    let recorded = RecordedRun::open(&hopper.small.path("auto")).unwrap();
    let request = Request {
        scratch: hopper.small.path("again"),
        keeps_checkpoints: false,
        overridden: Vec::new(),
        force: false,
        runs_commands: false,
    };
    let config = hopper.small.config("auto", &hopper.settings(&["compute.attention=auto"]));
    let stretch = recorded.stretch(None, None).unwrap();
    let verdict = recorded.recompute(stretch, config, &request, &mut Silent, &AtomicBool::new(false));
    assert!(verdict.unwrap().expect("nobody stops it").is_same());
}

#[test]
fn ranks_without_warpgroups_have_all_take_warps() {
    let Some(hopper) = Hopper::new("ranks_without_warpgroups_have_all_take_warps") else { return };
    if !cuda::is_stand_in() {
        skipped("ranks_without_warpgroups_have_all_take_warps", "it needs GPUs of two kinds");
        return;
    }
    let both = format!("compute.devices=cuda:0,{HOPPER}");
    let (heard, outcome) = hopper.small.run(
        "both",
        RunDirPolicy::Fresh,
        None,
        &hopper.settings(&[&both, "compute.attention=auto"]),
    );
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(heard.losses.len() == 4);
    let alone = hopper.whole("alone", &["compute.devices=cuda:0", "compute.attention=auto"]);
    assert!(hopper.small.weights("both") == alone);
    assert!(!cuda::names_wgmma(&hopper.arithmetics("alone")[0]));
    // As in f32, which has no kernels by warpgroups.
    hopper.run("f32", RunDirPolicy::Fresh, None, &["compute.dtype=f32", "compute.attention=auto"]);
    assert!(!cuda::names_wgmma(&hopper.arithmetics("f32")[0]));
}
