//! Folders of vision–language models: the text model trains, the rest goes along.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use tandem_kernels::{DType, MemoryKind};
use tandem_model::adapter::save_adapter;
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Adapter, AdapterKind, Decoder, FlatWeights, ModelFolder, PeftFolder, Save, Targets};

use crate::support::{Golden, adapted, all, bits, cpu, tensor_shapes};

fn seeing() -> impl Iterator<Item = Golden> {
    all().iter().map(|&name| Golden::new(name)).filter(|golden| golden.open().family().sees())
}

fn config_of(folder: &Path) -> Map<String, Value> {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Changes the golden's config.
fn change(golden: &Golden, change: impl FnOnce(&mut Map<String, Value>)) {
    let mut config = config_of(golden.folder.path());
    change(&mut config);
    fs::write(golden.folder.path().join("config.json"), Value::Object(config).to_string()).unwrap();
}

/// A safetensors file: names, types, shapes and bytes.
type File = Vec<(String, String, Vec<usize>, Vec<u8>)>;

fn read(path: &Path) -> File {
    let bytes = fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let mut tensors = Vec::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let numbers = |key: &str| -> Vec<usize> {
            entry[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
        };
        let (shape, offsets) = (numbers("shape"), numbers("data_offsets"));
        let dtype = entry["dtype"].as_str().unwrap().to_owned();
        tensors.push((name.clone(), dtype, shape, bytes[start + offsets[0]..start + offsets[1]].to_vec()));
    }
    tensors
}

/// Asserts that every tensor of a file lies where its elements are aligned.
fn assert_aligned(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let size = match entry["dtype"].as_str().unwrap() {
            "F32" => 4,
            "I64" => 8,
            "BF16" | "F16" => 2,
            _ => 1,
        };
        let offset = start + entry["data_offsets"][0].as_u64().unwrap() as usize;
        let is_empty = entry["shape"].as_array().unwrap().contains(&json!(0));
        assert!(is_empty || offset.is_multiple_of(size), "{name} is not aligned");
    }
}

fn write(path: &Path, tensors: &File) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

/// Tensors of other parts, in types that no weights of ours have.
fn others(golden: &Golden) -> File {
    let prefix = match golden.open().family().model_type {
        "qwen2_5_vl" => "visual.",
        "qwen3_vl" | "qwen3_5" => "model.visual.",
        _ => "vision_tower.",
    };
    let tensor = |name: &str, dtype: &str, shape: &[usize], width: usize| {
        let count: usize = shape.iter().product::<usize>() * width;
        let bytes = (0..count).map(|i| (i * 37 % 251) as u8).collect();
        (format!("{prefix}{name}"), dtype.to_owned(), shape.to_vec(), bytes)
    };
    vec![
        tensor("a.weight", "BF16", &[3, 1], 2),
        tensor("b.steps", "I64", &[], 8),
        tensor("c.mask", "BOOL", &[5], 1),
        tensor("d.weight", "F16", &[2, 3, 1, 1], 2),
        tensor("self_attn.q_proj.weight", "F32", &[4, 2], 4),
        tensor("empty", "F32", &[0, 2], 4),
    ]
}

fn with_others(golden: &Golden) -> File {
    let path = golden.folder.path().join("model.safetensors");
    let (mut file, others) = (read(&path), others(golden));
    file.extend(others.iter().cloned());
    write(&path, &file);
    others
}

fn load(golden: &Golden, folder: &ModelFolder) -> FlatWeights {
    folder.weights(&golden.decoder).unwrap().load(&golden.decoder, &cpu(), MemoryKind::Master).unwrap()
}

#[test]
fn what_is_beside_the_text_model_is_saved_as_it_was() {
    let mut checked = 0;
    for golden in seeing() {
        let others = with_others(&golden);
        fs::write(golden.folder.path().join("preprocessor_config.json"), "{\"size\": 28}").unwrap();
        let folder = golden.open();
        let (device, weights) = (cpu(), load(&golden, &folder));
        let out = tempfile::tempdir().unwrap();
        for (dtype, shard_bytes) in [(DType::F32, SHARD_BYTES), (DType::Bf16, SHARD_BYTES), (DType::F32, 500)]
        {
            let destination = out.path().join("final");
            let save = Save { template: &folder, decoder: &golden.decoder, dtype, shard_bytes };
            save.write_resident(&destination, &device, &weights).unwrap();
            let files = fs::read_dir(&destination).unwrap().map(|file| file.unwrap().path());
            let files = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
            let files = files.inspect(|path| assert_aligned(path));
            let found: File = files.flat_map(|path| read(&path)).collect();
            for tensor in &others {
                assert!(found.contains(tensor), "{}: {} in {dtype}", golden.name, tensor.0);
            }
            assert_eq!(found.len(), others.len() + tensor_shapes(&golden.decoder).len());
            assert!(destination.join("preprocessor_config.json").is_file());
            let again = ModelFolder::open(&destination).unwrap();
            assert_eq!(again.spec(), folder.spec());
            if dtype == DType::F32 {
                assert!(bits(&load(&golden, &again)) == bits(&weights), "{}", golden.name);
            }
            let says = &config_of(&destination)["tie_word_embeddings"];
            assert_eq!(says, &json!(folder.spec().head.tied), "{}", golden.name);
        }
        checked += 1;
    }
    assert!(checked >= 4, "{checked} goldens of vision–language models");
}

#[test]
fn tensors_of_no_part_are_left_over() {
    for golden in seeing() {
        let path = golden.folder.path().join("model.safetensors");
        let mut file = read(&path);
        file.push(("audio_tower.weight".to_owned(), "F32".to_owned(), vec![1], vec![0; 4]));
        write(&path, &file);
        let error = golden.open().weights(&golden.decoder).err().unwrap().to_string();
        assert!(error.contains("left over: audio_tower.weight [1] f32"), "{error}");
    }
}

#[test]
fn names_in_memory_are_read() {
    for golden in seeing() {
        let expected = bits(&golden.load(&cpu()));
        let path = golden.folder.path().join("model.safetensors");
        let mut file = read(&path);
        for (name, ..) in &mut file {
            for (in_files, in_memory) in [
                ("language_model.model.", "model.language_model."),
                ("language_model.lm_head.", "lm_head."),
                ("model.layers.", "model.language_model.layers."),
                ("model.norm.", "model.language_model.norm."),
                ("model.embed_tokens.", "model.language_model.embed_tokens."),
            ] {
                if let Some(rest) = name.strip_prefix(in_files) {
                    *name = format!("{in_memory}{rest}");
                    break;
                }
            }
        }
        write(&path, &file);
        assert!(bits(&golden.load(&cpu())) == expected, "{}", golden.name);
    }
}

#[test]
fn an_untied_head_in_the_files_decides_where_the_config_says_nothing() {
    for (name, tied) in [("mistral3", false), ("mistral3-ministral3", true)] {
        let golden = Golden::new(name);
        let spec = golden.open().spec().clone();
        assert_eq!(spec.head.tied, tied);
        change(&golden, |config| _ = config.remove("tie_word_embeddings"));
        assert_eq!(golden.open().spec(), &spec, "{name}");
    }
}

/// Gemma 3's folders on the hub name in `text_config` only what differs from the class.
#[test]
fn sizes_that_a_text_config_leaves_out_are_those_of_its_class() {
    let golden = Golden::new("gemma3-vision");
    change(&golden, |config| {
        let text = config["text_config"].as_object_mut().unwrap();
        for key in ["num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"] {
            text.remove(key);
        }
    });
    let folder = golden.open();
    let attention = &folder.spec().attention;
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (8, 4, 256));
    assert_eq!(folder.spec().vocab_size, 262_208);
}

/// The token table is the text model's, and so is the row that look-ups do not train.
#[test]
fn the_padding_token_is_that_of_the_text_config() {
    for (name, default) in [("mistral3", None), ("mistral3-ministral3", Some(11)), ("gemma3-vision", Some(0))]
    {
        let padding = |key: Option<Value>| {
            let golden = Golden::new(name);
            change(&golden, |config| {
                config.insert("pad_token_id".into(), json!(5));
                let text = config["text_config"].as_object_mut().unwrap();
                text.remove("pad_token_id");
                text.extend(key.map(|value| ("pad_token_id".to_owned(), value)));
            });
            golden.open().spec().embedding.padding
        };
        let found = [None, Some(Value::Null), Some(json!(7))].map(padding);
        assert_eq!(found, [default, None, Some(7)], "{name}");
    }
}

/// As Qwen's own folders are: what transformers 5 puts in `text_config` lies beside `vision_config`.
#[test]
fn a_text_config_may_lie_flat() {
    let golden = Golden::new("qwen2-5-vl");
    let spec = golden.open().spec().clone();
    change(&golden, |config| {
        let Some(Value::Object(text)) = config.remove("text_config") else { unreachable!() };
        config.extend(text.into_iter().filter(|(key, _)| key != "model_type"));
    });
    assert_eq!(golden.open().spec(), &spec);
}

#[test]
fn errors_name_the_inner_config() {
    let refused = |name: &'static str, key: &str, value: Value| {
        let golden = Golden::new(name);
        change(&golden, |config| {
            _ = config["text_config"].as_object_mut().unwrap().insert(key.into(), value);
        });
        ModelFolder::open(golden.folder.path()).err().unwrap().to_string()
    };
    let error = refused("gemma3-vision", "rms_norm_eps", json!("small"));
    assert!(error.contains("config.json: text_config: rms_norm_eps is \"small\""), "{error}");
    let error = refused("mistral3", "model_type", json!("llama"));
    assert!(
        error.contains("model_type is \"llama\", which is not supported here; known: mistral"),
        "{error}"
    );
    let golden = Golden::new("gemma3-vision");
    change(&golden, |config| _ = config.insert("text_config".into(), json!(3)));
    let error = ModelFolder::open(golden.folder.path()).err().unwrap().to_string();
    assert!(error.contains("text_config is 3, expected an object"), "{error}");
}

#[test]
fn no_reward_model_begins_from_one() {
    for golden in seeing() {
        let error = ModelFolder::open_reward(golden.folder.path(), 0).err().unwrap().to_string();
        assert!(error.contains("transformers has no sequence classifier of it"), "{error}");
    }
}

/// The vision tower has modules of the same last names: peft must not give them terms.
#[test]
fn an_adapter_names_the_modules_of_the_text_model_alone() {
    for golden in seeing() {
        let folder = golden.open();
        let config = adapted::config(AdapterKind::Lora, Targets::AllLinear, &[]);
        let decoder = Decoder::new(folder.spec().clone(), 16)
            .unwrap()
            .with_adapter(Adapter::new(config, folder.spec()).unwrap());
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("adapter");
        save_adapter(&path, &folder, &decoder, &mut |_, flat| {
            flat.fill(0.5);
            Ok(())
        })
        .unwrap();
        let written: Value =
            serde_json::from_slice(&fs::read(path.join("adapter_config.json")).unwrap()).unwrap();
        let pattern = regex::Regex::new(&format!("^(?:{})$", written["target_modules"].as_str().unwrap()));
        let pattern = pattern.unwrap();
        assert!(pattern.is_match("model.language_model.layers.1.self_attn.q_proj"), "{pattern}");
        assert!(!pattern.is_match("model.vision_tower.encoder.layers.0.self_attn.q_proj"), "{pattern}");
        let file = read(&path.join("adapter_model.safetensors"));
        let first = "base_model.model.model.language_model.layers.0.";
        assert!(file.iter().any(|(name, ..)| name.starts_with(first)), "{}", golden.name);
        let read_again = PeftFolder::open(&path).unwrap();
        let again = Adapter::new(read_again.config().clone(), folder.spec()).unwrap();
        assert_eq!(again.matrices(), decoder.adapter().unwrap().matrices());
        read_again.weights(&decoder).unwrap();
    }
}
