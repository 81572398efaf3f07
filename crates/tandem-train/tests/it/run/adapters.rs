//! Runs that train an adapter: stopped and resumed, dropped inputs, stages, and what they leave behind.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tandem_train::Config;
use tandem_train::config::Weights;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::{evaluation, spawn};

use crate::small::Small;

const LORA: [&str; 4] =
    ["adapter.rank=4", "train.learning_rate=1e-2", "train.micro_batch_size=2", "compute.threads=1"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&LORA[..], more].concat()
}

#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been() {
    for (method, own) in [
        ("sft", &["adapter.dropout=0.2"][..]),
        ("dpo", &["reference.kind=base", "compute.format=nf4"]),
        ("dpo", &["reference.kind=sync", "reference.sync_steps=2", "adapter.kind=dora"]),
        ("dpo", &["reference.kind=sync", "reference.sync_steps=2", "adapter.modules_to_save=[\"norm\"]"]),
    ] {
        let small = Small::new(method);
        let settings = with(own);
        let whole = small.finish("whole", RunDirPolicy::Fresh, &settings);
        let divided = [&settings[..], &["compute.devices=cpu:2", "compute.sharding=zero3"]].concat();
        let (first, _) = small.run("stopped", RunDirPolicy::Fresh, Some(3), &divided);
        let rest = small.finish("stopped", RunDirPolicy::Resume, &settings);
        assert_eq!([first.steps, rest.steps].concat(), whole.steps, "{own:?}");
        assert!(small.weights("stopped") == small.weights("whole"), "{own:?}");
    }
}

#[test]
fn a_model_that_follows_the_policy_is_resumed_too() {
    let small = Small::new("dpo");
    let settings = ["reference.kind=sync", "reference.sync_steps=2", "reference.sync_alpha=0.5"];
    let whole = small.finish("whole", RunDirPolicy::Fresh, &settings);
    let divided = [&settings[..], &["compute.devices=cpu:2", "compute.sharding=zero3"]].concat();
    let (first, _) = small.run("stopped", RunDirPolicy::Fresh, Some(3), &divided);
    let rest = small.finish("stopped", RunDirPolicy::Resume, &settings);
    assert_eq!([first.steps, rest.steps].concat(), whole.steps);
    assert!(small.weights("stopped") == small.weights("whole"));
    let still = small.finish("still", RunDirPolicy::Fresh, &["reference.kind=model"]);
    assert_eq!(still.losses[..2], whole.losses[..2], "nothing was pulled yet");
    assert!(still.losses[2..] != whole.losses[2..], "the reference has moved");
}

#[test]
fn dropped_inputs_are_the_same_on_any_number_of_ranks_and_not_twice() {
    let small = Small::new("dpo");
    let settings = with(&["reference.kind=base", "adapter.dropout=0.3"]);
    let one = small.finish("one", RunDirPolicy::Fresh, &settings);
    for ranks in ["cpu:2", "cpu:4"] {
        let devices = format!("compute.devices={ranks}");
        let several =
            small.finish("several", RunDirPolicy::Overwrite, &[&settings[..], &[&devices]].concat());
        assert_eq!(several.steps, one.steps, "{ranks}");
        assert!(small.weights("several") == small.weights("one"), "{ranks}");
    }
    let kept = small.finish("kept", RunDirPolicy::Fresh, &with(&["reference.kind=base"]));
    assert!(kept.losses[1..] != one.losses[1..], "something is dropped");
    let other = small.finish(
        "other",
        RunDirPolicy::Fresh,
        &[&settings[..], &["seed=43", "data.order=sequential"]].concat(),
    );
    let same = small.finish(
        "same",
        RunDirPolicy::Fresh,
        &[&settings[..], &["seed=44", "data.order=sequential"]].concat(),
    );
    assert!(other.losses[1..] != same.losses[1..], "the seed decides what");
}

#[test]
fn stages_of_an_adapted_model_give_the_bits_of_one() {
    for own in [
        &["reference.kind=base"][..],
        &["reference.kind=sync", "reference.sync_steps=2", "compute.format=nf4"],
        &["reference.kind=precompute", "compute.format=int8", "adapter.kind=dora"],
        &["reference.kind=model", "compute.format=fp8", "compute.dtype=bf16"],
    ] {
        let small = Small::new("dpo");
        let settings = with(own);
        let one = small.finish("one", RunDirPolicy::Fresh, &settings);
        for mesh in [&["compute.devices=cpu:2"][..], &["compute.devices=cpu:4", "compute.sharding=zero3"]] {
            let staged = [&settings[..], mesh, &["compute.pipeline=2"]].concat();
            let found = small.finish("staged", RunDirPolicy::Overwrite, &staged);
            assert_eq!(found.steps, one.steps, "{own:?} {mesh:?}");
            assert!(small.weights("staged") == small.weights("one"), "{own:?} {mesh:?}");
        }
    }
}

#[test]
fn formats_are_near_one_another_and_not_the_same() {
    let small = Small::new("dpo");
    let losses = ["f32", "bf16", "int8", "fp8", "nf4"].map(|format| {
        let format = format!("compute.format={format}");
        small.finish("run", RunDirPolicy::Overwrite, &with(&["reference.kind=base", &format])).losses
    });
    for (index, one) in losses.iter().enumerate() {
        for other in &losses[index + 1..] {
            assert_eq!(one[0], other[0], "the first loss is ln 2 in any format");
            assert!(one[1..] != other[1..], "the format is used");
            let apart = one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 0.1, "{one:?} and {other:?}");
        }
    }
}

#[test]
fn checkpointing_changes_no_bit() {
    let small = Small::new("dpo");
    let settings = with(&["reference.kind=base", "adapter.kind=dora", "adapter.dropout=0.1"]);
    let all = small.finish("all", RunDirPolicy::Fresh, &settings);
    for mode in ["selective", "block"] {
        let mode = format!("compute.checkpointing={mode}");
        let less = small.finish("less", RunDirPolicy::Overwrite, &[&settings[..], &[&mode]].concat());
        assert_eq!(less.steps, all.steps, "{mode}");
    }
}

#[test]
fn a_trained_adapter_starts_the_next_run_where_it_ended() {
    let small = Small::new("sft");
    small.finish("first", RunDirPolicy::Fresh, &with(&["train.eval_every=6", &eval(&small)]));
    let start = format!("adapter.start={}", small.path("first/final").display());
    let own = ["train.learning_rate=0", "train.steps=1", "train.micro_batch_size=2", &start, &eval(&small)];
    let again = small.finish("again", RunDirPolicy::Fresh, &own);
    let first =
        small.run("first", RunDirPolicy::Resume, None, &with(&["train.eval_every=6", &eval(&small)])).0;
    assert!(first.steps.is_empty(), "it is finished");
    assert_eq!(small.weights("again"), small.weights("first"));
    assert_eq!(again.eval_losses.len(), 2, "before and after");
}

/// The reference is another model than the policy's start, or the policy alone drops inputs.
#[test]
fn a_trained_adapter_need_not_start_where_its_reference_does() {
    let small = Small::new("dpo");
    for (name, rate) in [("first", "train.learning_rate=3e-2"), ("other", "train.learning_rate=1e-2")] {
        small.finish(name, RunDirPolicy::Fresh, &with(&[rate, "train.warmup_steps=0", "train.steps=4"]));
    }
    let start = format!("adapter.start={}", small.path("first/final").display());
    let other = format!("reference.adapter={}", small.path("other/final").display());
    let own = ["train.steps=1", "compute.dtype=f32", &start];
    for differing in [
        &["reference.kind=base"][..],
        &["reference.kind=adapter", &other],
        &["reference.kind=precompute", &other],
        &["adapter.dropout=0.4"],
    ] {
        let heard = small.finish("next", RunDirPolicy::Overwrite, &[&own, differing].concat());
        let apart = (heard.losses[0] - std::f64::consts::LN_2).abs();
        assert!(apart > 1e-3, "{differing:?}: a loss of {} tells nothing", heard.losses[0]);
    }
    // The default reference is the policy's start, whose loss is exactly 1/2.
    let kto = Small::new("kto");
    let first = |name: &str, more: &[&str]| {
        kto.finish(name, RunDirPolicy::Fresh, &[&own[..], more].concat()).losses[0]
    };
    assert!((first("start", &[]) - 0.5).abs() < 1e-6);
    assert!((first("base", &["reference.kind=base"]) - 0.5).abs() > 1e-3);
}

/// The training rows, held out as well.
fn eval(small: &Small) -> String {
    format!("data.eval={}", small.config("any", &[]).data.train[0].path.display())
}

#[test]
fn a_checkpoint_is_evaluated_with_the_reference_that_it_holds() {
    let small = Small::new("dpo");
    for kind in ["full", "lora"] {
        let mut own = vec![
            "reference.kind=sync",
            "reference.sync_steps=2",
            "train.eval_every=6",
            "train.micro_batch_size=2",
        ];
        if kind == "lora" {
            own.push("adapter.rank=4");
        }
        let held_out = eval(&small);
        own.push(&held_out);
        let heard = small.finish(kind, RunDirPolicy::Fresh, &own);
        let checkpoint = small.path(kind).join("checkpoints/step-000006");
        let record = evaluation::evaluate(&small.config(kind, &own), Some(&checkpoint), &mut Silent).unwrap();
        assert_eq!(record.get("loss"), heard.eval_losses.last().copied(), "{kind}");
    }
}

/// Puts `table`, the tensor of a model's file, into an adapter's as `peft` puts its copy of a table that is a target.
fn put_copy(adapter: &Path, shape: Vec<usize>, table: &[u8]) {
    let file = adapter.join("adapter_model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let name = "base_model.model.model.embed_tokens.base_layer.weight";
    tensors.retain(|(other, _)| other != name);
    tensors.push((name.to_owned(), TensorView::new(Dtype::F32, shape, table).unwrap()));
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(&file, bytes).unwrap();
}

#[test]
fn an_adapter_of_another_base_is_refused_by_file_and_tensor() {
    let small = Small::new("dpo");
    let own = ["train.steps=1", "train.warmup_steps=0", "compute.threads=1"];
    small.finish("base", RunDirPolicy::Fresh, &own);
    let model = format!("model={:?}", small.path("base/final").to_str().unwrap());
    let config = |name: &str, more: &[&str]| Config {
        weights: Weights::Folder,
        ..small.config(name, &[&own[..], &[&model], more].concat())
    };
    let train =
        |config: &Config| spawn::train(config, RunDirPolicy::Overwrite, &mut Silent, &AtomicBool::new(false));
    // It has learned nothing: a run that starts from it has the loss that it must begin with.
    let table = ["adapter.rank=2", "adapter.targets=[\"embed_tokens\"]", "train.learning_rate=0"];
    train(&config("adapter", &table)).unwrap();

    let bytes = std::fs::read(small.path("base/final/model.safetensors")).unwrap();
    let base = SafeTensors::deserialize(&bytes).unwrap();
    let base = base.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!(base.dtype(), Dtype::F32);
    let mut other = base.data().to_vec();
    other[0] ^= 1;
    let adapter = small.path("adapter/final");
    let start = format!("adapter.start={:?}", adapter.to_str().unwrap());
    let second = format!("reference.adapter={:?}", adapter.to_str().unwrap());
    let uses = [
        &[&start[..], "reference.kind=base"][..],
        &["adapter.rank=2", "reference.kind=adapter", &second],
        &["adapter.rank=2", "reference.kind=precompute", &second],
    ];
    for (table, fits) in [(base.data(), true), (&other, false)] {
        put_copy(&adapter, base.shape().to_vec(), table);
        for own in uses {
            let outcome = train(&config("next", own));
            if fits {
                assert!(outcome.is_ok(), "{own:?}: {outcome:?}");
                continue;
            }
            let error = outcome.unwrap_err().to_string();
            let file = adapter.join("adapter_model.safetensors");
            for part in [
                file.to_str().unwrap(),
                "base_model.model.model.embed_tokens.base_layer.weight is no copy of the base's \
                 model.embed_tokens.weight; the adapter is another base's",
            ] {
                assert!(error.contains(part), "{own:?}: {error}");
            }
        }
    }
    // Weights that are drawn are not compared.
    let drawn = small.config("drawn", &[&own[..], &[&start, "reference.kind=base"]].concat());
    train(&drawn).unwrap();
}
