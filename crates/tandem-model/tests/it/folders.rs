//! Folders good and bad: what is loaded, what is saved, and what the messages say.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{Golden, all, bits, cpu, formula, goldens, tensor_shapes, tensors};
use serde_json::{Map, Value, json};
use tandem_kernels::ops::Activation;
use tandem_kernels::{DType, MemoryKind};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Decoder, LayerId, ModelError, ModelFolder, ParamKind, Save, init, write_policy};

/// The error with its cause, as the command prints them.
fn told(error: Option<ModelError>) -> String {
    let error = error.expect("must be refused");
    std::error::Error::source(&error).map_or(error.to_string(), |cause| format!("{error}: {cause}"))
}

fn open_error(folder: &Path) -> String {
    told(ModelFolder::open(folder).err())
}

fn weights_error(golden: &Golden) -> String {
    told(golden.open().weights(&golden.decoder).err())
}

/// Rewrites a key of the golden's config.
fn set(golden: &Golden, key: &str, value: Value) {
    let path = golden.folder.path().join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.insert(key.into(), value);
    fs::write(&path, Value::Object(config).to_string()).unwrap();
}

#[test]
fn what_is_saved_is_what_was_loaded() {
    for &name in all() {
        let golden = Golden::new(name);
        fs::write(golden.folder.path().join("tokenizer.json"), "{}").unwrap();
        let device = cpu();
        let weights = golden.load(&device);
        let folder = golden.open();
        let out = tempfile::tempdir().unwrap();
        let destination = out.path().join("final");
        // Small shards: the second round reads through an index.
        for shard_bytes in [SHARD_BYTES, 6_000] {
            let save = Save { template: &folder, decoder: &golden.decoder, dtype: DType::F32, shard_bytes };
            save.write_resident(&destination, &device, &weights).unwrap();
            assert_eq!(destination.join("model.safetensors.index.json").exists(), shard_bytes == 6_000);
            let again = ModelFolder::open(&destination).unwrap();
            assert_eq!(again.spec(), folder.spec());
            let files = again.weights(&golden.decoder).unwrap();
            let loaded = files.load(&golden.decoder, &device, MemoryKind::Master).unwrap();
            assert!(bits(&loaded) == bits(&weights), "{name}");
            let once_more = files.load(&golden.decoder, &device, MemoryKind::Master).unwrap();
            assert!(bits(&once_more) == bits(&weights), "{name}: pages that were given back are read again");
            assert_eq!(fs::read_to_string(destination.join("tokenizer.json")).unwrap(), "{}");
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "nothing is left beside the folder");
            // What is the user's stays; of the model's own files those of the last one.
            assert!(shard_bytes == SHARD_BYTES || !destination.join("model.safetensors").exists());
            for other in ["README.md", "model-q4.gguf"] {
                assert!(shard_bytes == SHARD_BYTES || destination.join(other).exists(), "{other}");
                fs::write(destination.join(other), "mine").unwrap();
            }
        }
    }
}

#[test]
fn bf16_is_saved_rounded_to_nearest_even() {
    let (golden, device, weights) = Golden::loaded("gpt2");
    let folder = golden.open();
    let out = tempfile::tempdir().unwrap();
    let destination = out.path().join("final");
    let save =
        Save { template: &folder, decoder: &golden.decoder, dtype: DType::Bf16, shard_bytes: SHARD_BYTES };
    save.write_resident(&destination, &device, &weights).unwrap();
    let again = ModelFolder::open(&destination).unwrap();
    assert_eq!(again.config().word("dtype", "").unwrap(), "bfloat16");
    let loaded =
        again.weights(&golden.decoder).unwrap().load(&golden.decoder, &device, MemoryKind::Master).unwrap();
    for ((name, was), (_, is)) in
        tensors(&golden.decoder, &weights).iter().zip(tensors(&golden.decoder, &loaded))
    {
        let rounded: Vec<f32> = was.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
        assert_eq!(rounded, is, "{name}");
    }
}

#[test]
fn a_failed_save_leaves_the_old_folder_whole() {
    let (golden, device, weights) = Golden::loaded("llama");
    let folder = golden.open();
    let out = tempfile::tempdir().unwrap();
    let destination = out.path().join("final");
    let save =
        Save { template: &folder, decoder: &golden.decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
    save.write_resident(&destination, &device, &weights).unwrap();
    let before = fs::read(destination.join("model.safetensors")).unwrap();
    let failure = save.write(&destination, &mut |layer, _| match layer {
        LayerId::Head => Err(ModelError::Invalid("the disk is full".into())),
        _ => Ok(()),
    });
    assert_eq!(failure.unwrap_err().to_string(), "the disk is full");
    assert_eq!(fs::read(destination.join("model.safetensors")).unwrap(), before);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "the unfinished folder is gone");
}

#[test]
fn values_that_are_not_finite_are_not_saved() {
    let golden = Golden::new("llama");
    let folder = golden.open();
    let out = tempfile::tempdir().unwrap();
    let destination = out.path().join("final");
    let save =
        Save { template: &folder, decoder: &golden.decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
    for value in [f32::NAN, f32::INFINITY] {
        let failure = save.write(&destination, &mut |layer, flat| {
            if layer == LayerId::Head {
                flat[0] = value;
            }
            Ok(())
        });
        let message = failure.unwrap_err().to_string();
        assert!(message.contains("a value of ") && message.contains(&format!(" is {value}, ")), "{message}");
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }
}

#[test]
fn the_tokenizers_end_is_added_to_those_of_the_model() {
    let (golden, device, weights) = Golden::loaded("llama");
    let generation = golden.folder.path().join("generation_config.json");
    let out = tempfile::tempdir().unwrap();
    let destination = out.path().join("final");
    let saved = |eos: u32| {
        let folder = golden.open().with_eos(Some(eos));
        let save =
            Save { template: &folder, decoder: &golden.decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
        save.write_resident(&destination, &device, &weights).unwrap();
        ["config.json", "generation_config.json"].map(|name| {
            let bytes = fs::read(destination.join(name)).ok()?;
            let config: Map<String, Value> = serde_json::from_slice(&bytes).unwrap();
            config.get("eos_token_id").cloned()
        })
    };
    assert_eq!(saved(2), [Some(json!(2)), None]);
    assert_eq!(saved(4), [Some(json!([4, 2])), None]);
    fs::write(&generation, "{\"eos_token_id\": 2, \"top_k\": 5}").unwrap();
    assert_eq!(saved(2), [Some(json!(2)), Some(json!(2))]);
    assert_eq!(saved(4), [Some(json!(4)), Some(json!([4, 2]))]);
    fs::write(&generation, "{\"eos_token_id\": [3, 4]}").unwrap();
    assert_eq!(saved(4), [Some(json!(2)), Some(json!([3, 4]))]);
    fs::write(&generation, "{}").unwrap();
    assert_eq!(saved(4), [Some(json!(4)), Some(json!([4, 2]))]);
}

#[test]
fn templates_beside_the_default_one_are_saved() {
    let (golden, device, weights) = Golden::loaded("llama");
    let write = |name: &str, text: &str| {
        let path = golden.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("chat_template.jinja", "default");
    write("additional_chat_templates/tool_use.jinja", "tools");
    write("additional_chat_templates/notes.txt", "no template");
    let out = tempfile::tempdir().unwrap();
    let destination = out.path().join("final");
    let saved = |folder: ModelFolder| {
        let save =
            Save { template: &folder, decoder: &golden.decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
        save.write_resident(&destination, &device, &weights).unwrap();
        assert!(!destination.join("additional_chat_templates/notes.txt").exists());
        ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
            .map(|name| fs::read_to_string(destination.join(name)).ok())
    };
    let texts = |texts: [Option<&str>; 2]| texts.map(|text| text.map(str::to_owned));
    assert_eq!(saved(golden.open()), texts([Some("default"), Some("tools")]));
    // A template in their place; the last save's do not stay.
    assert_eq!(saved(golden.open().with_chat_template("own".into())), texts([Some("own"), None]));
    // An adapter's template comes before the base's.
    let adapter = tempfile::tempdir().unwrap();
    let of_adapter = || golden.open().with_tokenizer_of(adapter.path()).unwrap();
    assert_eq!(saved(of_adapter()), texts([Some("default"), Some("tools")]));
    fs::write(adapter.path().join("tokenizer_config.json"), "{\"chat_template\": \"config's\"}").unwrap();
    assert_eq!(saved(of_adapter()), texts([None, None]));
    fs::write(adapter.path().join("chat_template.jinja"), "adapter's").unwrap();
    assert_eq!(saved(of_adapter()), texts([Some("adapter's"), None]));
    write("tokenizer.json", "base's");
    write("special_tokens_map.json", "base's");
    let tokenizer = || fs::read_to_string(destination.join("tokenizer.json")).unwrap();
    saved(of_adapter());
    assert_eq!(tokenizer(), "base's");
    fs::write(adapter.path().join("tokenizer.json"), "adapter's").unwrap();
    saved(of_adapter());
    assert_eq!(tokenizer(), "adapter's");
    assert!(!destination.join("special_tokens_map.json").exists(), "the base's belongs to its tokenizer");
}

#[test]
fn half_precision_folders_are_widened() {
    let golden = Golden::new("gpt-neox");
    let shapes = tensor_shapes(&golden.decoder);
    let mut entries = Map::new();
    let mut data: Vec<u8> = Vec::new();
    let mut expected = Vec::new();
    for (i, (name, shape)) in shapes.iter().enumerate() {
        let (start, values) = (data.len(), formula::weight(name, shape.iter().product()));
        let dtype = ["F16", "BF16", "F32"][i % 3];
        for &v in &values {
            match dtype {
                "F16" => data.extend(half::f16::from_f32(v).to_le_bytes()),
                "BF16" => data.extend(half::bf16::from_f32(v).to_le_bytes()),
                _ => data.extend(v.to_le_bytes()),
            }
        }
        let narrowed = values.iter().map(|&v| match dtype {
            "F16" => half::f16::from_f32(v).to_f32(),
            "BF16" => half::bf16::from_f32(v).to_f32(),
            _ => v,
        });
        expected.push((name.clone(), narrowed.collect::<Vec<f32>>()));
        entries.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    write_raw(golden.folder.path(), &entries, &data);
    let device = cpu();
    assert_eq!(tensors(&golden.decoder, &golden.load(&device)), expected);
}

/// A safetensors file from a header and data.
fn write_raw(folder: &Path, header: &Map<String, Value>, data: &[u8]) {
    let header = Value::Object(header.clone()).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

#[test]
fn a_module_may_have_the_name_that_transformers_5_gives_it_in_memory() {
    let golden = Golden::new("gpt-neox");
    let device = cpu();
    let expected = bits(&golden.load(&device));
    let path = golden.folder.path().join("model.safetensors");
    // The header keeps its length.
    let file = fs::read(&path).unwrap();
    let (header, data) = file.split_at(8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize);
    let header = String::from_utf8(header[8..].to_vec()).unwrap();
    assert!(header.contains("\"embed_out.weight\""));
    let header = header.replace("\"embed_out.weight\"", "\"lm_head.weight\"  ");
    let renamed = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    fs::write(&path, renamed).unwrap();
    assert!(bits(&golden.load(&device)) == expected);
}

#[test]
fn fp4_is_refused_in_one_sentence() {
    let golden = Golden::new("llama");
    set(&golden, "quantization_config", json!({"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}));
    let message = weights_error(&golden);
    assert!(
        message.contains("bnb_4bit_quant_type is \"fp4\", but nf4") && message.lines().count() == 1,
        "{message}"
    );
}

/// The golden's weights with a changed list of tensors.
fn rewrite(golden: &Golden, change: impl Fn(&mut Vec<(String, Vec<usize>)>)) {
    let mut tensors = tensor_shapes(&golden.decoder);
    change(&mut tensors);
    formula::write_safetensors(golden.folder.path(), &tensors, formula::weight).unwrap();
}

#[test]
fn every_tensor_that_does_not_fit_is_listed_in_one_error() {
    let golden = Golden::new("llama");
    rewrite(&golden, |tensors| {
        tensors.retain(|(name, _)| name != "model.norm.weight");
        tensors.iter_mut().find(|(n, _)| n == "lm_head.weight").unwrap().1 = vec![64, 8];
        tensors.push(("model.layers.2.mlp.down_proj.weight".into(), vec![16, 24]));
        tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![2]));
    });
    let message = weights_error(&golden);
    let lines: Vec<&str> = message.lines().map(str::trim).collect();
    assert!(lines[0].ends_with("model.safetensors: 3 of the tensors do not fit config.json:"), "{message}");
    assert_eq!(
        lines[1..],
        [
            "wrong shape: lm_head.weight is [64, 8], expected [64, 16]",
            "missing: model.norm.weight [16]",
            "left over: model.layers.2.mlp.down_proj.weight [16, 24] f32",
        ]
    );
}

#[test]
fn a_tensor_of_another_type_is_named() {
    let golden = Golden::new("llama");
    let mut entries = Map::new();
    let mut data = Vec::new();
    for (name, shape) in tensor_shapes(&golden.decoder) {
        let (start, count) = (data.len(), shape.iter().product::<usize>());
        let (dtype, width) = if name == "model.norm.weight" { ("I64", 8) } else { ("F32", 4) };
        data.resize(start + width * count, 0u8);
        entries.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    write_raw(golden.folder.path(), &entries, &data);
    let message = weights_error(&golden);
    assert!(message.contains("wrong type: model.norm.weight is i64, expected f32, bf16 or f16"), "{message}");
}

#[test]
fn a_stored_copy_of_a_tied_table_must_equal_it() {
    let golden = Golden::new("llama-tied");
    // The same values under the head's name: what `save_file` of a tied model leaves.
    let table = |name: &str, n| {
        formula::weight(if name == "lm_head.weight" { "model.embed_tokens.weight" } else { name }, n)
    };
    let mut tensors = tensor_shapes(&golden.decoder);
    tensors.push(("lm_head.weight".into(), vec![64, 16]));
    formula::write_safetensors(golden.folder.path(), &tensors, table).unwrap();
    assert!(golden.open().weights(&golden.decoder).is_ok());
    formula::write_safetensors(golden.folder.path(), &tensors, formula::weight).unwrap();
    let message = weights_error(&golden);
    let expected =
        "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings makes them one";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn folders_of_the_bare_model_and_old_masks_are_read() {
    let golden = Golden::new("gpt2");
    let device = cpu();
    let named = bits(&golden.load(&device));
    // The hub's own gpt2: no prefix, causal masks beside the weights.
    let full = |name: &str, n| formula::weight(&format!("transformer.{name}"), n);
    let mut tensors = tensor_shapes(&golden.decoder);
    tensors.iter_mut().for_each(|(name, _)| *name = name.replace("transformer.", ""));
    tensors.push(("h.0.attn.bias".into(), vec![1, 1, 32, 32]));
    tensors.push(("h.0.attn.masked_bias".into(), vec![1]));
    formula::write_safetensors(golden.folder.path(), &tensors, full).unwrap();
    assert!(bits(&golden.load(&device)) == named);
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let golden = Golden::new("llama");
    let tensors = tensor_shapes(&golden.decoder);
    for (bad, told) in [(f32::NAN, "holds NaN"), (f32::NEG_INFINITY, "holds -inf")] {
        let damaged = |name: &str, n| {
            let mut weights = formula::weight(name, n);
            if name == "model.layers.1.mlp.down_proj.weight" {
                weights[n - 1] = bad;
            }
            weights
        };
        formula::write_safetensors(golden.folder.path(), &tensors, damaged).unwrap();
        let files = golden.open().weights(&golden.decoder).unwrap();
        let loaded = files.load(&golden.decoder, &cpu(), MemoryKind::Master).map(drop);
        let error = loaded.expect_err("a weight is not finite").to_string();
        assert!(error.contains("model.layers.1.mlp.down_proj.weight") && error.contains(told), "{error}");
    }
}

#[test]
fn a_file_cut_short_is_named() {
    let golden = Golden::new("llama");
    let path = golden.folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in [0, 5, 40, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let message = weights_error(&golden);
        assert!(message.contains("model.safetensors"), "{message}");
        if length > 0 {
            assert!(message.contains("cut short"), "{length} bytes: {message}");
        }
    }
}

#[test]
fn an_index_that_lies_is_named() {
    let golden = Golden::new("llama");
    let folder = golden.folder.path();
    fs::rename(folder.join("model.safetensors"), folder.join("one.safetensors")).unwrap();
    let write = |map: Value| {
        fs::write(folder.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
            .unwrap();
        weights_error(&golden)
    };
    let message = write(json!({"model.norm.weight": "two.safetensors"}));
    assert!(message.contains("two.safetensors: No such file"), "{message}");
    let message = write(json!({"model.nrom.weight": "one.safetensors"}));
    assert!(
        message.contains("names \"one.safetensors\" as the file of model.nrom.weight, which is not in it"),
        "{message}"
    );
}

#[test]
fn folders_without_what_is_needed_say_so() {
    let folder = tempfile::tempdir().unwrap();
    assert!(open_error(&folder.path().join("nowhere")).ends_with("nowhere: no such model folder"));
    assert!(open_error(folder.path()).contains("config.json: No such file"));
    fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert!(open_error(folder.path()).contains("config.json: not JSON"));
    let golden = Golden::new("llama");
    fs::remove_file(golden.folder.path().join("model.safetensors")).unwrap();
    assert!(weights_error(&golden).contains("holds no weights; looked for model.safetensors"));
}

#[test]
fn what_a_config_may_not_ask_for_is_refused_with_a_sentence() {
    let cases = [
        (
            "llama",
            "architectures",
            json!(["MixtralForCausalLM"]),
            "architecture MixtralForCausalLM is not supported; known: LlamaForCausalLM, MistralForCausalLM",
        ),
        (
            "llama",
            "architectures",
            json!("MixtralForCausalLM"),
            "architectures is \"MixtralForCausalLM\", expected a list of class names",
        ),
        ("llama", "architectures", json!([3]), "architectures is [3], expected a list of class names"),
        (
            "llama",
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "a classifier of 2 labels is no reward model",
        ),
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "spiral", "factor": 2.0}),
            "rope_type is \"spiral\", which is not supported; known: default, linear, dynamic, llama3, yarn, longrope, proportional",
        ),
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "linear"}),
            "rope_parameters has no number for factor",
        ),
        (
            "llama",
            "rope_parameters",
            json!({"rope_theta": "500000"}),
            "rope_parameters.rope_theta is \"500000\", expected a positive number",
        ),
        ("llama", "rope_scaling", json!({"type": 3}), "rope_scaling.type is 3, expected a string"),
        (
            "llama",
            "rope_scaling",
            json!({"type": "linear", "factor": 0}),
            "rope_scaling.factor is 0, expected a positive number",
        ),
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            "rope_parameters.short_factor is [1.0], expected a list of 2 positive numbers",
        ),
        (
            "llama",
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1.0}}),
            "rope_parameters differ by layer (\"full_attention\")",
        ),
        ("gemma3", "rope_parameters", json!({"rope_theta": 1.0}), "expected by layer type here"),
        ("gemma2", "sliding_window", Value::Null, "but sliding_window is absent or null"),
        (
            "gemma2",
            "query_pre_attn_scalar",
            json!(0),
            "query_pre_attn_scalar is 0, expected a positive number",
        ),
        (
            "mistral-window",
            "layer_types",
            json!(["full_attention", "full_attention"]),
            "not supported in this family",
        ),
        ("smollm3", "no_rope_layers", json!([1, 0, 1]), "expected a list of 4 times 0 or 1"),
        ("llama", "vocab_size", json!(1_000_000_000_000_000_000_u64), "expected at most 16777216"),
        ("llama", "num_hidden_layers", json!(u64::MAX), "expected at most 2147483647"),
        (
            "llama",
            "num_hidden_layers",
            json!(1_000_000_000),
            "num_hidden_layers is 1000000000, expected at most",
        ),
        (
            "llama",
            "hidden_act",
            json!("quick_gelu"),
            "hidden_act is \"quick_gelu\", which is not supported; known: silu",
        ),
        ("llama", "rms_norm_eps", json!(-1), "rms_norm_eps is -1, expected a number above 0, at most 1"),
        ("gpt2", "layer_norm_epsilon", json!(0.0), "layer_norm_epsilon is 0, expected a number above 0"),
        ("llama", "initializer_range", json!(1e300), "expected a number that f32 holds"),
        ("llama", "hidden_size", json!("wide"), "hidden_size is \"wide\", expected a positive integer"),
        ("llama", "hidden_size", Value::Null, "hidden_size is missing"),
        ("llama", "hidden_size", json!(1 << 25), "hidden_size is 33554432, expected at most 16777216"),
        (
            "llama",
            "num_key_value_heads",
            json!(3),
            "num_attention_heads is 4, expected a multiple of num_key_value_heads, 3",
        ),
        ("phi", "qk_layernorm", json!(true), "qk_layernorm is true, which is not supported"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "scale_attn_by_inverse_layer_idx is true"),
        (
            "qwen2-window",
            "layer_types",
            json!(["full_attention", "chunked_attention"]),
            "layer_types contains \"chunked_attention\"",
        ),
    ];
    for (name, key, value, expected) in cases {
        let golden = Golden::new(name);
        set(&golden, key, value);
        let message = open_error(golden.folder.path());
        assert!(message.contains("config.json: ") && message.contains(expected), "{key}: {message}");
    }
}

#[test]
fn dropout_in_a_config_is_ignored() {
    let golden = Golden::new("phi");
    let spec = golden.open().spec().clone();
    set(&golden, "resid_pdrop", json!(0.9));
    assert_eq!(golden.open().spec(), &spec);
}

#[test]
fn widths_whose_product_is_absurd_are_refused() {
    let golden = Golden::new("llama");
    for key in ["hidden_size", "intermediate_size"] {
        set(&golden, key, json!(1 << 24));
    }
    set(&golden, "head_dim", json!(64));
    let error = ModelFolder::open(golden.folder.path()).err().unwrap().to_string();
    assert!(error.contains("about 1.7e15 parameters, expected at most 1.0e13: check the widths"), "{error}");
}

/// Rewrites a key of the golden's inner text config.
fn set_in_text(golden: &Golden, key: &str, value: Value) {
    let path = golden.folder.path().join("config.json");
    let config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut text = config["text_config"].clone();
    text[key] = value;
    set(golden, "text_config", text);
}

#[test]
fn gelu_is_the_tanh_approximation_in_gemma_1_alone() {
    for (name, key, expected) in [
        ("gemma", "hidden_act", Activation::GeluTanh),
        ("gemma2", "hidden_activation", Activation::Gelu),
        ("gemma3", "hidden_activation", Activation::Gelu),
    ] {
        let golden = Golden::new(name);
        set(&golden, key, json!("gelu"));
        assert_eq!(golden.open().spec().mlp.activation, expected, "{name}");
    }
}

#[test]
fn a_cap_on_the_logits_has_no_effect_in_gemma_3_with_a_vision_tower() {
    let golden = Golden::new("gemma3-vision");
    set_in_text(&golden, "final_logit_softcapping", json!(3.0));
    assert_eq!(golden.open().spec().head.shape.softcap, None);
    let golden = Golden::new("gemma3");
    set(&golden, "final_logit_softcapping", json!(3.0));
    assert_eq!(golden.open().spec().head.shape.softcap, Some(3.0));
}

#[test]
fn a_pattern_in_letters_is_passed_over_where_layer_types_are_listed() {
    let golden = Golden::new("exaone4");
    let layers = golden.open().spec().num_layers;
    let mut types = vec!["sliding_attention"; layers];
    types[layers - 1] = "full_attention";
    set(&golden, "layer_types", json!(types));
    set(&golden, "sliding_window_pattern", json!("LLLG"));
    let windows = golden.open().spec().attention.windows.clone();
    assert!(windows[..layers - 1].iter().all(Option::is_some) && windows[layers - 1].is_none());
    set(&golden, "layer_types", Value::Null);
    let message = open_error(golden.folder.path());
    assert!(message.contains("sliding_window_pattern is \"LLLG\", expected"), "{message}");
}

#[test]
fn absent_keys_have_the_defaults_of_their_class_in_transformers() {
    let golden = Golden::new("cohere");
    set(&golden, "rope_parameters", Value::Null);
    set(&golden, "rope_theta", Value::Null);
    assert_eq!(golden.open().spec().rotary[0].as_ref().unwrap().theta, 500_000.0);
    // GPT-NeoX has names of its own beside the table, and no others.
    let golden = Golden::new("gpt-neox");
    set(&golden, "rope_parameters", Value::Null);
    set(&golden, "rope_scaling", Value::Null);
    let rotary = |keys: &[(&str, f64)]| {
        keys.iter().for_each(|(key, value)| set(&golden, key, json!(value)));
        let spec = golden.open().spec().rotary[0].clone().unwrap();
        keys.iter().for_each(|(key, _)| set(&golden, key, Value::Null));
        (spec.theta, spec.dims)
    };
    for key in ["rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct"] {
        set(&golden, key, Value::Null);
    }
    let default = rotary(&[]);
    assert_eq!(default.0, 10_000.0);
    assert_eq!(rotary(&[("rope_theta", 100.0), ("partial_rotary_factor", 1.0)]), default);
    let own = rotary(&[("rotary_emb_base", 100.0), ("rotary_pct", 1.0)]);
    assert_eq!(own, (100.0, default.1 * 4));
    let golden = Golden::new("qwen2-5-vl");
    set_in_text(&golden, "rms_norm_eps", Value::Null);
    assert_eq!(golden.open().spec().norm.eps, 1e-5);
}

#[test]
fn end_tokens_come_from_both_configs() {
    let golden = Golden::new("llama");
    assert_eq!(golden.open().spec().eos_token_ids, [2]);
    fs::write(golden.folder.path().join("generation_config.json"), "{\"eos_token_id\": [7, 2]}").unwrap();
    assert_eq!(golden.open().spec().eos_token_ids, [2, 7]);
}

#[test]
fn learned_positions_end_where_they_end() {
    let golden = Golden::new("gpt2");
    let refused = Decoder::new(golden.decoder.spec().clone(), 33).unwrap_err();
    assert!(
        refused.to_string().contains("33 tokens do not fit a model with 32 learned positions"),
        "{refused}"
    );
    // Angles go on for ever.
    assert!(Decoder::new(Golden::new("llama").decoder.spec().clone(), 1000).is_ok());
}

#[test]
fn fresh_weights_follow_the_config() {
    let device = cpu();
    let golden = Golden::new("gpt2");
    let decoder = &golden.decoder;
    let weights = init::init(decoder, &device, MemoryKind::Master, 3).unwrap();
    assert!(bits(&weights) == bits(&init::init(decoder, &device, MemoryKind::Master, 3).unwrap()));
    assert!(bits(&weights) != bits(&init::init(decoder, &device, MemoryKind::Master, 4).unwrap()));
    let block = decoder.index(LayerId::Block(0));
    let param = |part: ParamKind| {
        let place = decoder.layout(LayerId::Block(0)).param(part).unwrap().range();
        weights.layers[block].view().as_slice::<f32>()[place].to_vec()
    };
    assert!(param(ParamKind::Norm1Weight).iter().all(|&w| w == 1.0));
    assert!(param(ParamKind::QkvBias).iter().all(|&w| w == 0.0));
    let deviation = |w: Vec<f32>| (w.iter().map(|w| w * w).sum::<f32>() / w.len() as f32).sqrt();
    // 1,024 numbers: the deviation's standard error is 2.2 %. GPT-2 halves what writes to the residual stream of
    // two layers.
    assert!((deviation(param(ParamKind::UpWeight)) / 0.02 - 1.0).abs() < 0.1);
    assert!((deviation(param(ParamKind::DownWeight)) / 0.01 - 1.0).abs() < 0.1);
    let gemma = Golden::new("gemma");
    let weights = init::init(&gemma.decoder, &device, MemoryKind::Master, 3).unwrap();
    let norms = gemma.decoder.layout(LayerId::Head).param(ParamKind::FinalNormWeight).unwrap().range();
    let head = &weights.layers[gemma.decoder.index(LayerId::Head)];
    assert!(head.view().as_slice::<f32>()[norms].iter().all(|&w| w == 0.0), "Gemma's norms are 1 + w");
}

#[test]
fn policy_pt_gives_the_weights_of_its_folder() {
    let golden = Golden::new("llama-tied");
    let device = cpu();
    let policy = golden.open().with_weights(&goldens().join("policy.pt"));
    let loaded =
        policy.weights(&golden.decoder).unwrap().load(&golden.decoder, &device, MemoryKind::Master).unwrap();
    assert!(bits(&loaded) == bits(&golden.load(&device)));
    // Without safetensors in the folder it is found by itself.
    fs::remove_file(golden.folder.path().join("model.safetensors")).unwrap();
    fs::copy(goldens().join("policy.pt"), golden.folder.path().join("policy.pt")).unwrap();
    assert!(bits(&golden.load(&device)) == bits(&loaded));
}

#[test]
fn an_exported_policy_pt_gives_the_same_weights() {
    let device = cpu();
    for &name in all() {
        let golden = Golden::new(name);
        let weights = golden.load(&device);
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("policy.pt");
        if golden.open().family().sees() {
            let read = |_, _: &mut [f32]| unreachable!("refused before anything is read");
            let error = write_policy(&path, &golden.decoder, DType::F32, &mut { read }).unwrap_err();
            assert!(error.to_string().contains("export a folder"), "{error}");
            continue;
        }
        let read = |layer, flat: &mut [f32]| {
            flat.copy_from_slice(weights.layers[golden.decoder.index(layer)].view().as_slice::<f32>());
            Ok(())
        };
        write_policy(&path, &golden.decoder, DType::F32, &mut { read }).unwrap();
        let folder = golden.open().with_weights(&path);
        let files = folder.weights(&golden.decoder).unwrap();
        let loaded = files.load(&golden.decoder, &device, MemoryKind::Master).unwrap();
        assert!(bits(&loaded) == bits(&weights), "{name}");
        let whole = fs::metadata(&path).unwrap().len();
        write_policy(&path, &golden.decoder, DType::Bf16, &mut { read }).unwrap();
        folder.weights(&golden.decoder).unwrap();
        assert!(fs::metadata(&path).unwrap().len() < whole, "{name}");
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "nothing is left beside the file");
    }
}

#[test]
fn a_failed_export_leaves_the_older_file() {
    let golden = Golden::new("llama-tied");
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("policy.pt");
    fs::write(&path, "older").unwrap();
    let fail = |layer, _: &mut [f32]| match layer {
        LayerId::Head => Err(ModelError::Invalid("the source went away".into())),
        _ => Ok(()),
    };
    let error = write_policy(&path, &golden.decoder, DType::F32, &mut { fail }).err();
    assert!(told(error).contains("the source went away"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "older");
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "no half file is left");
}

/// `goldens/check_policy.py`, with the interpreter that `TANDEM_TEST_PYTHON` names.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn torch_loads_an_exported_policy_pt() {
    let Some(python) = std::env::var_os("TANDEM_TEST_PYTHON") else {
        eprintln!("skipped: TANDEM_TEST_PYTHON names no interpreter with transformers");
        return;
    };
    let has = Command::new(&python).args(["-c", "import torch, transformers"]).output();
    if !has.expect("TANDEM_TEST_PYTHON starts").status.success() {
        eprintln!("skipped: the interpreter of TANDEM_TEST_PYTHON has no transformers");
        return;
    }
    let device = cpu();
    let golden = all().iter().map(|name| Golden::new(name));
    // A vision–language model has no policy.pt.
    let golden: Vec<_> = golden.filter(|golden| !golden.open().family().sees()).collect();
    let mut command = Command::new(&python);
    command.arg(goldens().join("../check_policy.py"));
    for golden in &golden {
        let weights = golden.load(&device);
        let path = golden.folder.path().join("policy.pt");
        let read = |layer, flat: &mut [f32]| {
            flat.copy_from_slice(weights.layers[golden.decoder.index(layer)].view().as_slice::<f32>());
            Ok(())
        };
        write_policy(&path, &golden.decoder, DType::F32, &mut { read }).unwrap();
        command.arg(golden.folder.path());
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().count(), golden.len());
}

#[test]
fn a_pickle_that_asks_for_more_than_tensors_is_refused_by_name() {
    let golden = Golden::new("llama-tied");
    let hostile = golden.open().with_weights(&goldens().join("hostile.pt"));
    let message = hostile.weights(&golden.decoder).err().expect("must be refused").to_string();
    assert!(message.contains("hostile.pt: the pickle asks for posix.system"), "{message}");
}

#[test]
fn a_policy_cut_short_or_garbled_is_refused_and_never_panics() {
    let golden = Golden::new("llama-tied");
    let whole = fs::read(goldens().join("policy.pt")).unwrap();
    let path = golden.folder.path().join("policy.pt");
    let attempt = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        golden.open().with_weights(&path).weights(&golden.decoder).err().map(|e| e.to_string())
    };
    for length in [0, 3, 100, whole.len() / 2, whole.len() - 30] {
        let message = attempt(&whole[..length]).expect("must be refused");
        assert!(message.contains("policy.pt"), "{message}");
    }
    // The pickle is the first member: every byte of it set to something else in turn.
    for at in (0..1500).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        _ = attempt(&bytes);
    }
}
