//! Reward models: TRL's runs step by step, the same bits however they are computed, and what is left behind.
//!
//! Numbers: `goldens/small/reward.json`, made by `goldens/reward_golden.py`. Weights: `goldens/formula.rs`.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use tandem_kernels::{DType, Device, Format};
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::{evaluation, spawn};
use tandem_train::{Answers, Config, RewardModel};

use super::ranks::{held_out, log};
use crate::formula;
use crate::small::Small;

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small")
}

pub fn golden() -> Value {
    serde_json::from_str(&fs::read_to_string(goldens().join("reward.json")).unwrap()).unwrap()
}

/// The small model as a sequence classifier with the formula's weights.
pub fn classifier(golden: &Value, folder: &Path) {
    fs::create_dir(folder).unwrap();
    for file in fs::read_dir(goldens().join("model")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    config["architectures"] = json!(["LlamaForSequenceClassification"]);
    config["id2label"] = json!({"0": "LABEL_0"});
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    formula::write_safetensors(folder, &tensors(golden), formula::weight).unwrap();
}

/// Its tensors, by name and shape.
fn tensors(golden: &Value) -> Vec<(String, Vec<usize>)> {
    let shape = |v: &Value| v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let last = golden["runs"]["reward"]["final"].as_object().unwrap();
    last.iter().map(|(name, v)| (name.clone(), shape(&v["shape"]))).collect()
}

fn as_trl(golden: &Value, run: &Value, folder: &Path) -> Config {
    let arg = |key: &str| run["args"].get(key).unwrap_or(&golden["defaults"][key]);
    let micro = arg("per_device_train_batch_size").as_u64().unwrap();
    let centring = run["args"].get("center_rewards_coefficient");
    let centring = centring.map_or(String::new(), |c| format!("center_rewards_coefficient = {c}\n"));
    let text = format!(
        "method = \"reward\"\nmodel = \"model\"\noutput = \"run\"\n[objective]\n{centring}[data]\ntrain = {:?}\ncache = \"cache\"\n\
         max_length = {}\norder = \"sequential\"\n[train]\nbatch_size = {}\nmicro_batch_size = {micro}\nsteps = {}\n\
         learning_rate = 1e-3\nschedule = \"linear\"\nwarmup_steps = 4\nmax_grad_norm = 1.0\nweight_decay = 0.0\n\
         [compute]\ndevices = \"cpu\"\ndtype = \"f32\"\nthreads = 2\n",
        goldens().join(format!("{}.jsonl", run["data"].as_str().unwrap())),
        arg("max_length"),
        micro * arg("gradient_accumulation_steps").as_u64().unwrap(),
        arg("max_steps"),
    );
    let path = folder.join("run.toml");
    fs::write(&path, text).unwrap();
    Config::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{e}"))
}

/// Every step of a run of TRL's, and how long each tensor is in the end and how far it has gone.
fn is_trl(name: &str) {
    let golden = golden();
    let run = &golden["runs"][name];
    let small = Small::new("reward");
    classifier(&golden, &small.path("model"));
    let config = as_trl(&golden, run, &small.path(""));
    spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &false.into()).unwrap_or_else(|e| panic!("{e}"));
    let (found, expected) = (log(&small, "run"), run["steps"].as_array().unwrap());
    assert_eq!(found.len(), expected.len());
    let is_cut = run["args"].get("gradient_accumulation_steps").is_some();
    for (ours, theirs) in found.iter().zip(expected) {
        // TRL takes means of the extremes of micro-batches, and counts the tokens of padded prompts.
        let keys = ["loss", "grad_norm", "learning_rate", "accuracy", "margin", "mean_reward"];
        let extremes = ["min_reward", "max_reward"].into_iter().filter(|_| !is_cut);
        for key in keys.into_iter().chain(extremes) {
            let [ours, theirs] = [&ours[key], &theirs[key]].map(|v| v.as_f64().unwrap_or(f64::NAN));
            // Two f32 implementations; AdamW amplifies what they differ by where gradients nearly vanish.
            let error = (ours - theirs).abs() / theirs.abs().max(1.0);
            assert!(error <= 1e-5, "{name}: {key} is {ours}, TRL has {theirs}: {error:.1e}");
        }
    }
    let bytes = fs::read(small.path("run/final/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (tensor, theirs) in run["final"].as_object().unwrap() {
        let values = file.tensor(tensor).unwrap_or_else(|e| panic!("{tensor}: {e}")).data().to_vec();
        let values = values.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
        let initial = formula::weight(tensor, values.len());
        let squares = values.zip(initial).map(|(v, i)| (v * v, (v - f64::from(i)).powi(2)));
        let (norm, way) = squares.fold((0.0, 0.0), |(norm, way), (n, w)| (norm + n, way + w));
        for (what, ours, allowed) in [("norm", norm, 1e-5), ("step", way, 1e-3)] {
            let theirs = theirs[what].as_f64().unwrap();
            let error = (ours.sqrt() - theirs).abs() / theirs;
            assert!(error <= allowed, "{name}: {what} of {tensor}: {error:.1e}");
        }
    }
}

#[test]
fn steps_are_trls() {
    is_trl("reward");
}

#[test]
fn steps_with_margins_and_centring_are_trls() {
    is_trl("reward_margin");
}

#[test]
fn long_rows_are_left_out_as_in_trl() {
    is_trl("reward_filtered");
}

/// Micro-batches of two pairs; six steps.
const BATCH: [&str; 4] =
    ["train.micro_batch_size=2", "train.learning_rate=1e-3", "compute.threads=1", "train.save_every=0"];

fn same_bits(own: &[&str], places: &[&[&str]]) {
    let small = Small::new("reward");
    let held_out = held_out(&small, "pref_conv.jsonl");
    let run = |place: &[&str]| {
        let all = [&BATCH[..], own, &["train.eval_every=3", &held_out], place].concat();
        small.finish("run", RunDirPolicy::Overwrite, &all);
        (log(&small, "run"), small.weights("run"))
    };
    let expected = run(&["compute.devices=cpu:1"]);
    assert_eq!(expected.0.len(), 9, "six steps and three evaluations");
    let is_evaluation = |line: &&Map<String, Value>| line["split"] == "eval";
    let losses: Vec<_> =
        expected.0.iter().filter(is_evaluation).map(|line| line["loss"].as_f64().unwrap()).collect();
    assert!(losses[1] < losses[0], "it learns: {losses:?}");
    for place in places {
        let found = run(place);
        assert_eq!(found.0, expected.0, "{own:?} {place:?}: the log");
        assert!(found.1 == expected.1, "{own:?} {place:?}: the final weights");
    }
}

#[test]
fn the_bits_are_the_same_wherever_it_is_computed() {
    same_bits(
        &["objective.center_rewards_coefficient=0.1"],
        &[
            &["compute.devices=cpu:2"],
            &["compute.devices=cpu:8", "compute.sharding=zero3"],
            &["compute.devices=cpu:2", "compute.pipeline=2"],
            &["compute.devices=cpu:1", "compute.offload=host"],
            &["compute.devices=cpu:1", "compute.checkpointing=block"],
        ],
    );
}

/// The head trains whole beside the low-rank terms.
#[test]
fn an_adapter_has_the_same_bits_too() {
    let places: [&[&str]; 2] = [
        &["compute.devices=cpu:2", "compute.sharding=zero3"],
        &["compute.devices=cpu:2", "compute.pipeline=2"],
    ];
    same_bits(&["adapter.rank=4", "compute.format=bf16"], &places);
}

#[test]
fn an_adapter_is_written_with_its_head_and_read_again() {
    let small = Small::new("reward");
    let settings = ["adapter.rank=4", "compute.threads=1", "train.save_every=0"];
    small.finish("first", RunDirPolicy::Fresh, &settings);
    let bytes = small.weights("first");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert!(file.tensor("base_model.model.score.weight").is_ok(), "{:?}", file.names());
    let config = fs::read(small.path("first/final/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["task_type"], &config["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["score"])));
    // Without a step nothing changes: what is read is what was written.
    let start = format!("adapter.start={}", small.path("first/final").display());
    small.finish("again", RunDirPolicy::Fresh, &[&start, "train.learning_rate=0", "train.save_every=0"]);
    assert!(small.weights("again") == bytes);

    let language = Small::new("sft");
    language.finish("language", RunDirPolicy::Fresh, &settings);
    let start = format!("adapter.start={}", language.path("language/final").display());
    let error = small.run("other", RunDirPolicy::Fresh, None, &[&start]).1.unwrap_err().to_string();
    assert!(error.contains("is not a reward model's"), "{error}");
}

#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been() {
    let small = Small::new("reward");
    let whole = small.finish("whole", RunDirPolicy::Fresh, &BATCH);
    let divided = [&BATCH[..], &["compute.devices=cpu:2", "compute.sharding=zero3"]].concat();
    let (first, _) = small.run("stopped", RunDirPolicy::Fresh, Some(3), &divided);
    let rest = small.finish("stopped", RunDirPolicy::Resume, &BATCH);
    assert_eq!([first.steps, rest.steps].concat(), whole.steps);
    assert!(small.weights("stopped") == small.weights("whole"));
}

/// A run writes a reward model's folder, and the folder scores as the run's own evaluation does.
#[test]
fn the_final_folder_scores_texts() {
    let golden = golden();
    let small = Small::new("reward");
    classifier(&golden, &small.path("model"));
    let config = as_trl(&golden, &golden["runs"]["reward"], &small.path(""));
    spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &false.into()).unwrap_or_else(|e| panic!("{e}"));
    let folder = small.path("run/final");
    let sets = [
        format!("model={}", folder.display()),
        format!("output={}", small.path("evaluated").display()),
        format!("data.eval={}", goldens().join("pref_conv.jsonl").display()),
    ];
    let config = config.with(&sets).unwrap();
    let record = evaluation::evaluate(&config, None, &mut Silent).unwrap();
    let prepared = RunInputs::open(&config, &mut Silent).unwrap();
    assert!(!prepared.folder.begins_score_head());

    let device = Device::cpu(2, 256 << 20).unwrap();
    let pairs: Vec<_> = (0..prepared.train.num_rows()).map(|row| prepared.train.pair(row)).collect();
    let answers: Vec<[&[u32]; 2]> = pairs.iter().map(|pair| [pair.chosen, pair.rejected]).collect();
    let groups: Vec<Answers> =
        pairs.iter().zip(&answers).map(|(pair, answers)| Answers { prompt: pair.prompt, answers }).collect();
    let mut scorer = RewardModel::open(&folder, &device, Format::F32, DType::F32, 1024).unwrap();
    let scores = scorer.score(&groups).unwrap();
    assert_eq!(scores.len(), 2 * pairs.len());
    let mean = scores.iter().map(|&score| f64::from(score)).sum::<f64>() / scores.len() as f64;
    let least = scores.iter().copied().fold(f32::INFINITY, f32::min);
    // Other micro-batches: sums in another order.
    for (key, ours) in [("mean_reward", mean), ("min_reward", f64::from(least))] {
        let theirs = record.get(key).unwrap();
        assert!((ours - theirs).abs() < 1e-5, "{key}: {ours} and {theirs}");
    }
    // A text alone, as one piece, and in bf16.
    let whole = [pairs[3].prompt, pairs[3].rejected].concat();
    let alone = scorer.score(&[Answers { prompt: &[], answers: &[&whole] }]).unwrap();
    assert!((alone[0] - scores[7]).abs() < 1e-5, "{alone:?} {}", scores[7]);
    let mut rough = RewardModel::open(&folder, &device, Format::Bf16, DType::Bf16, 1024).unwrap();
    for (rough, score) in rough.score(&groups).unwrap().iter().zip(&scores) {
        // bf16 rounds to 2e-3 some ten times in two blocks; rewards here are of order one.
        assert!((rough - score).abs() < 0.1, "{rough} {score}");
    }
    let error = scorer.score(&[Answers { prompt: &[], answers: &[&[]] }]).unwrap_err().to_string();
    assert!(error.contains("a text of group 0 has 0 tokens"), "{error}");
    assert!(scorer.score(&[]).unwrap().is_empty());
}

#[test]
fn a_language_model_scores_nothing_and_a_reward_model_predicts_nothing() {
    let device = Device::cpu(1, 64 << 20).unwrap();
    let error = RewardModel::open(&goldens().join("model"), &device, Format::F32, DType::F32, 64);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("has no head that scores texts"), "{error}");
    let small = Small::new("dpo");
    classifier(&golden(), &small.path("model"));
    let model = format!("model={}", small.path("model").display());
    let error = small.run("run", RunDirPolicy::Fresh, None, &[&model]).1.unwrap_err().to_string();
    assert!(error.contains("this is a reward model"), "{error}");
}

/// Each rank scores whole sequences from its part of the model.
#[test]
fn a_sharded_reward_model_trains_to_the_bits_of_a_whole_one() {
    let small = Small::new("reward");
    for more in [
        &[][..],
        &["compute.dtype=bf16"],
        &["adapter.kind=dora", "adapter.rank=4", "compute.dtype=bf16"],
        &["adapter.targets=[\"embed_tokens\", \"down_proj\"]"],
    ] {
        small.finish("one", RunDirPolicy::Overwrite, more);
        let tensor = [&["compute.devices=cpu:4", "compute.tensor=2", "compute.sharding=zero3"][..], more];
        small.finish("two", RunDirPolicy::Overwrite, &tensor.concat());
        assert_eq!(log(&small, "two"), log(&small, "one"));
        assert!(small.weights("two") == small.weights("one"), "the final weights");
    }
}

/// From a language model's folder, the head is initialised at random, and the run says so.
#[test]
fn a_language_model_begins_a_head_and_the_run_tells_of_it() {
    let golden = golden();
    let small = Small::new("reward");
    let folder = small.path("model");
    classifier(&golden, &folder);
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    fs::write(folder.join("config.json"), config.replace("SequenceClassification", "CausalLM")).unwrap();
    let mut tensors = tensors(&golden);
    tensors.retain(|(name, _)| name != "score.weight");
    tensors.push(("lm_head.weight".to_owned(), vec![512, 64]));
    formula::write_safetensors(&folder, &tensors, formula::weight).unwrap();
    let [model, weights] = [folder.clone(), folder.join("model.safetensors")];
    let [model, weights] = [format!("model={}", model.display()), format!("weights={}", weights.display())];
    let head = |seed: u64| {
        let seed = format!("seed={seed}");
        let still =
            ["train.learning_rate=0", "train.steps=1", "train.warmup_steps=0", &model, &weights, &seed];
        let heard = small.finish("run", RunDirPolicy::Overwrite, &still);
        assert!(
            heard.warnings[0].contains("the head that scores texts starts at random"),
            "{:?}",
            heard.warnings
        );
        let bytes = small.weights("run");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let layer = file.tensor("model.norm.weight").unwrap().data().to_vec();
        let base: Vec<u8> =
            formula::weight("model.norm.weight", 64).iter().flat_map(|w| w.to_le_bytes()).collect();
        assert!(layer == base, "the base's weights are its own");
        assert!(file.tensor("lm_head.weight").is_err());
        file.tensor("score.weight").unwrap().data().to_vec()
    };
    let first = head(1);
    assert!(first == head(1) && first != head(2), "it follows from the seed");
}
