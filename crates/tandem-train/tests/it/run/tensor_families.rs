//! Every model of the goldens on slices, trained whole or by an adapter: the weights of one rank.

use std::path::Path;

use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tandem_train::run::run_dir::RunDirPolicy;

use super::tensor::{finish, is_same, on, strings, write_model};
use crate::small::Small;

/// Key/value heads of the models below: as many as the most slices.
const HEADS: u64 = 8;
/// Tokens of the small runs' tokenizer.
const VOCABULARY: u64 = 513;

/// Configs of the goldens by name, widened to [`HEADS`] key/value heads.
fn widened() -> Vec<(String, Value)> {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/models");
    let files = std::fs::read_dir(goldens).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    let read = |path: &std::path::PathBuf| {
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut config = golden["config"].clone();
        if config["text_config"].is_object() {
            widen(&mut config["text_config"]);
        } else {
            widen(&mut config);
        }
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), config)
    };
    files.iter().map(read).collect()
}

/// Multiplies heads, and the width where a head's is derived from it.
fn widen(config: &mut Value) {
    let number = |config: &Value, key: &str| config.get(key).and_then(Value::as_u64);
    let heads = ["num_key_value_heads", "num_attention_heads", "n_head"];
    let heads = heads.iter().find_map(|key| number(config, key)).expect("a number of heads");
    let factor = HEADS.div_ceil(heads);
    let mut keys = vec!["num_key_value_heads", "num_attention_heads", "n_head"];
    keys.extend(["linear_num_key_heads", "linear_num_value_heads"]);
    if number(config, "head_dim").is_none() {
        keys.extend(["hidden_size", "n_embd", "embedding_size"]);
    }
    for key in keys {
        if let Some(n) = number(config, key) {
            config[key] = (n * factor).into();
        }
    }
    if config.get("n_positions").is_some() {
        config["n_positions"] = 64.into();
    }
    config["vocab_size"] = VOCABULARY.into();
    config["eos_token_id"] = json!(2);
    config["bos_token_id"] = json!(1);
    config["pad_token_id"] = json!(0);
}

/// Adds a tensor beside the text model, which is copied.
fn add_vision(folder: &Path) {
    let bytes = [0u8; 8];
    let tensor = TensorView::new(safetensors::Dtype::F32, vec![2], &bytes).unwrap();
    serialize_to_file([("visual.weight", tensor)], None, &folder.join("model.safetensors")).unwrap();
}

/// Names of the token table and the head in every family.
const TABLES: &str = r"adapter.targets='(.*\.)?(embed_tokens|wte|embed_in|lm_head|embed_out)'";
const WHOLE: &[&str] = &["reference.kind=model"];
const DORA: &[&str] = &["adapter.kind=dora", "adapter.rank=4", "reference.kind=base"];
const OF_TABLES: &[&str] = &[TABLES, "adapter.rank=4", "reference.kind=base"];

/// Trains every model that `takes` on one rank and on each number of slices.
fn same_on(slices: &[usize], dtypes: &[&str], trained: &[&str], takes: impl Fn(&str) -> bool) {
    for (name, config) in widened().into_iter().filter(|(name, _)| takes(name)) {
        let small = Small::new("dpo");
        let model = write_model(&small, &name, &config);
        if config["text_config"].is_object() {
            add_vision(&small.path(&name));
        }
        for dtype in dtypes {
            let dtype = format!("compute.dtype={dtype}");
            let common = [model.as_str(), "train.learning_rate=1e-3", &dtype];
            let common = [&common[..], trained, &["train.steps=2", "data.max_length=48"]];
            let common = strings(&common.concat());
            let one = format!("{name}, {dtype}, on one");
            finish(&small, &one, RunDirPolicy::Fresh, &[&common, &on(1, 1, "ddp")]);
            for &tensor in slices {
                let run = format!("{name}, {dtype}, {tensor} slices");
                finish(&small, &run, RunDirPolicy::Fresh, &[&common, &on(tensor, tensor, "ddp")]);
                is_same(&small, &run, &one);
            }
        }
    }
}

#[test]
fn a_model_of_each_shape_of_block_trains_to_the_same_weights() {
    same_on(&[4], &["bf16"], WHOLE, |name| ["gemma2", "cohere", "qwen3-5", "exaone4"].contains(&name));
}

#[test]
fn an_adapter_of_each_shape_of_block_trains_to_the_same_weights() {
    same_on(&[4], &["bf16"], DORA, |name| ["gemma2", "cohere", "qwen3-5", "exaone4"].contains(&name));
    same_on(&[4], &["bf16"], OF_TABLES, |name| ["gemma2", "cohere", "exaone4"].contains(&name));
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn every_golden_model_trains_to_the_same_weights() {
    assert!(widened().len() > 40, "{} models", widened().len());
    same_on(&[2, 4, 8], &["f32", "bf16"], WHOLE, |_| true);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn adapters_of_every_golden_model_train_to_the_same_weights() {
    for trained in [DORA, OF_TABLES] {
        same_on(&[2, 4, 8], &["f32", "bf16"], trained, |_| true);
    }
}
