//! GGUF files beside the folders that they stand for (`goldens/gguf_golden.py`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tandem_kernels::{DType, MemoryKind};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Decoder, ModelFolder, Save, TensorParallelShard};

use crate::support::{bits, cpu, formula, tensors};

const MODELS: [&str; 4] = ["llama", "qwen2", "qwen3", "gemma"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/gguf").join(name)
}

/// The golden's folder and its GGUF file.
fn both(name: &str) -> (ModelFolder, ModelFolder) {
    let folder = golden(name);
    (ModelFolder::open(&folder).unwrap(), ModelFolder::open(&folder.join("model.gguf")).unwrap())
}

#[test]
fn weights_are_those_of_the_folder_bit_for_bit_whole_and_in_shards() {
    let device = cpu();
    for name in MODELS {
        let (folder, gguf) = both(name);
        let whole = Arc::new(Decoder::new(folder.spec().clone(), 16).unwrap());
        let shard = |index| Decoder::sliced(&whole, TensorParallelShard { index, count: 2 }).unwrap();
        for decoder in [whole.clone(), shard(0), shard(1)] {
            let load = |folder: &ModelFolder| {
                let files = folder.weights(&decoder).unwrap();
                bits(&files.load(&decoder, &device, MemoryKind::Master).unwrap())
            };
            assert!(load(&gguf) == load(&folder), "{name}");
        }
    }
}

#[test]
fn the_metadata_describe_the_same_decoder() {
    for name in MODELS {
        let (folder, gguf) = both(name);
        let mut expected = folder.spec().clone();
        // GGUF does not say how weights were initialised; the golden's folder names no end.
        expected.init = gguf.spec().init;
        expected.eos_token_ids = vec![263];
        assert_eq!(*gguf.spec(), expected, "{name}");
    }
}

#[test]
fn what_is_saved_is_an_ordinary_folder() {
    let device = cpu();
    for name in MODELS {
        let (_, gguf) = both(name);
        let decoder = Decoder::new(gguf.spec().clone(), 16).unwrap();
        let weights = gguf.weights(&decoder).unwrap().load(&decoder, &device, MemoryKind::Master).unwrap();
        let out = tempfile::tempdir().unwrap();
        let destination = out.path().join("final");
        let save = Save { template: &gguf, decoder: &decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
        save.write_resident(&destination, &device, &weights).unwrap();
        let again = ModelFolder::open(&destination).unwrap();
        assert_eq!(again.spec(), gguf.spec(), "{name}");
        let loaded = again.weights(&decoder).unwrap().load(&decoder, &device, MemoryKind::Master).unwrap();
        assert!(bits(&loaded) == bits(&weights), "{name}");
        let json = |file: &str| -> Value {
            serde_json::from_slice(&fs::read(destination.join(file)).unwrap()).unwrap()
        };
        assert_eq!(json("generation_config.json")["eos_token_id"], 263);
        assert_eq!(json("tokenizer_config.json")["eos_token"], "<|im_end|>");
        assert!(
            json("tokenizer_config.json")["chat_template"]
                .as_str()
                .unwrap()
                .contains("add_generation_prompt")
        );
        assert_eq!(json("tokenizer.json")["model"]["vocab"].as_object().unwrap().len(), 265);
    }
}

#[test]
fn a_folder_stands_for_its_only_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |name: &str| fs::copy(golden("llama").join("model.gguf"), folder.path().join(name)).unwrap();
    let refusal = || ModelFolder::open(folder.path()).err().expect("must be refused").to_string();
    copy("a.gguf");
    assert_eq!(ModelFolder::open(folder.path()).unwrap().spec().num_layers, 2);
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(refusal().contains("holds tokenizer.json beside a.gguf"), "{}", refusal());
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    copy("b.gguf");
    assert!(refusal().contains("several GGUF files, such as a.gguf and b.gguf"), "{}", refusal());
}

/// Files that llama.cpp's converter made of golden models (`goldens/gguf_families.py`).
#[test]
fn every_architecture_gives_the_decoder_and_the_weights_that_it_was_made_from() {
    let device = cpu();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/gguf/families");
    let mut failures = Vec::new();
    let mut checked = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        checked += 1;
        let made_from = tempfile::tempdir().unwrap();
        fs::copy(file.with_extension("json"), made_from.path().join("config.json")).unwrap();
        let made_from = ModelFolder::open(made_from.path()).unwrap();
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let gguf = match ModelFolder::open(&file) {
            Ok(gguf) => gguf,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        let mut expected = made_from.spec().clone();
        // GGUF does not say how weights were initialised, and these files name no padding token.
        expected.init = gguf.spec().init;
        expected.embedding.padding = gguf.spec().embedding.padding;
        if *gguf.spec() != expected {
            failures.push(format!("{name}: {:?}\nexpected {expected:?}", gguf.spec()));
            continue;
        }
        let decoder = Decoder::new(expected, 16).unwrap();
        let files = match gguf.weights(&decoder) {
            Ok(files) => files,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        let weights = files.load(&decoder, &device, MemoryKind::Master).unwrap();
        for (tensor, found) in tensors(&decoder, &weights) {
            let expected = formula::weight(&tensor, found.len());
            // llama.cpp stores some norms as one more: a bit is lost.
            let near = |(a, b): (&f32, &f32)| a == b || tensor.contains("norm") && (a - b).abs() < 1.3e-7;
            if !found.iter().zip(&expected).all(near) {
                failures.push(format!("{name}: {tensor} differs"));
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    assert!(checked >= 18, "{checked} files");
}

/// Early files of Gemma 2 say nothing of caps; llama.cpp has those of the paper, as transformers has.
#[test]
fn gemma_2_without_caps_has_those_of_its_family() {
    const KEY: &[u8] = b"logit_softcapping";
    let mut bytes = fs::read(golden("families/gemma2.gguf")).unwrap();
    let places: Vec<usize> =
        (0..bytes.len() - KEY.len()).filter(|&at| bytes[at..].starts_with(KEY)).collect();
    assert_eq!(places.len(), 2);
    for at in places {
        bytes[at..at + KEY.len()].fill(b'x');
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    fs::write(&file, bytes).unwrap();
    let model = ModelFolder::open(&file).unwrap();
    assert_eq!((model.spec().attention.softcap, model.spec().head.shape.softcap), (Some(50.0), Some(30.0)));
}
