//! Adapters of the `peft` library: read, walked, merged and written again. The numbers come from `goldens/adapter_golden.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{self, Golden, SCORES, by_sequence, cpu, formula, relative_error};
use serde_json::{Value, json};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, MemoryKind};
use tandem_model::adapter::{init_layer, save_adapter};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{
    Adapter, AdapterKind, AdapterWeights, Checkpointing, Decoder, FlatLayer, FlatWeights, LayerExecutor,
    LayerId, LayerWeights, Merged, ModelFolder, PeftFolder, ResidentWeights, Save, WeightSource,
};
use tempfile::TempDir;

const ALL: [&str; 18] = [
    "llama-lora",
    "llama-dora",
    "llama-tables",
    "llama-pattern",
    "qwen2-rslora",
    "gpt2-lora",
    "gpt2-dora",
    "gpt2-table",
    "gpt2-whole",
    "neox-lora",
    "neox-dora",
    "neox-head",
    "phi-lora",
    "tied-table",
    "tied-head",
    "tied-whole",
    "gemma-table",
    "qwen3-dora",
];

/// A golden model and an adapter of it in a folder.
struct Adapted {
    base: Golden,
    folder: TempDir,
    golden: Value,
}

impl Adapted {
    fn new(name: &'static str) -> Self {
        let file = support::goldens().join("../adapters").join(name).with_extension("json");
        let golden: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let model = golden["model"].as_str().unwrap();
        let base = Golden::new(support::all().iter().find(|name| **name == model).unwrap());
        let adapted = Self { base, folder: TempDir::new().unwrap(), golden };
        fs::write(adapted.path().join("adapter_config.json"), adapted.golden["adapter_config"].to_string())
            .unwrap();
        adapted.write(&adapted.tensors());
        adapted
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Name, shape and where the values come from.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let tensor = |(name, entry): (&String, &Value)| {
            let shape = entry[1].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            (name.clone(), shape)
        };
        self.golden["tensors"].as_object().unwrap().iter().map(tensor).collect()
    }

    /// Writes weights; a tensor that peft did not write has values of its own.
    fn write(&self, tensors: &[(String, Vec<usize>)]) {
        let make = |name: &str, count| {
            formula::weight(self.golden["tensors"][name][0].as_str().unwrap_or(name), count)
        };
        formula::write_tensors(&self.path().join("adapter_model.safetensors"), tensors, make).unwrap();
    }

    fn set(&self, key: &str, value: Value) {
        let mut config = self.golden["adapter_config"].clone();
        config[key] = value;
        fs::write(self.path().join("adapter_config.json"), config.to_string()).unwrap();
    }

    fn open(&self) -> PeftFolder {
        PeftFolder::open(self.path()).unwrap()
    }

    fn decoder(&self) -> Decoder {
        let spec = self.base.decoder.spec().clone();
        let adapter = Adapter::new(self.open().config().clone(), &spec).unwrap();
        Decoder::new(spec, 32).unwrap().with_adapter(adapter)
    }

    fn merged(&self) -> Merged {
        Merged::open(&self.base.open(), &self.open(), 32).unwrap()
    }

    fn expected(&self) -> Vec<f32> {
        self.golden["log_prob"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
    }

    /// Log-probs of what `source` gives.
    fn log_probs(&self, decoder: &Decoder, device: &Device, source: &mut dyn WeightSource) -> Vec<f32> {
        let forest = self.base.forest();
        let walk = LayerExecutor::new(decoder, device, DType::F32, Checkpointing::None);
        let mut scores = HeadScores::default();
        walk.forward(source, &forest, &mut scores).unwrap();
        by_sequence(&forest, &scores.log_prob)
    }

    fn merged_log_probs(&self, merged: &Merged) -> Vec<f32> {
        let device = cpu();
        let weights = merged.load(&device, MemoryKind::Master).unwrap();
        self.log_probs(merged.decoder(), &device, &mut ResidentWeights::new(merged.decoder(), &weights, None))
    }

    fn refused(&self) -> String {
        let folder = match PeftFolder::open(self.path()) {
            Ok(folder) => folder,
            Err(error) => return error.to_string(),
        };
        let merged = Merged::open(&self.base.open(), &folder, 32);
        merged.err().expect("refused").to_string()
    }
}

/// Trained parameters, read from an adapter's folder.
fn load(folder: &PeftFolder, decoder: &Decoder, device: &Device) -> FlatWeights {
    let files = folder.weights(decoder).unwrap();
    let mut weights = FlatWeights::zeros(decoder, device, MemoryKind::Master).unwrap();
    for (index, flat) in weights.layers.iter_mut().enumerate() {
        files.read_layer(index, flat.view_mut().into_slice()).unwrap();
    }
    weights
}

/// Base and adapter, side by side.
struct Both<'a> {
    decoder: &'a Decoder,
    base: &'a FlatWeights,
    trained: &'a FlatWeights,
}

impl WeightSource for Both<'_> {
    fn prefetch(&mut self, _: LayerId) -> tandem_model::Result<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> tandem_model::Result<LayerWeights<'_>> {
        let index = self.decoder.index(layer);
        let base = FlatLayer::new(self.decoder.layout(layer), self.base.layers[index].view(), None);
        let weights = FlatLayer::new(self.decoder.trained(layer), self.trained.layers[index].view(), None);
        let adapter = AdapterWeights { adapter: self.decoder.adapter().unwrap(), layer, weights };
        Ok(LayerWeights::new(base).with_adapter(Some(adapter)))
    }

    fn release(&mut self, _: LayerId) {}
}

#[test]
fn a_merged_model_has_the_log_probs_of_peft() {
    let mut failures = Vec::new();
    for name in ALL {
        let adapted = Adapted::new(name);
        let error = relative_error(&adapted.merged_log_probs(&adapted.merged()), &adapted.expected());
        println!("{name}: {error:.1e}");
        if error > SCORES {
            failures.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}

#[test]
fn base_and_adapter_have_the_log_probs_of_peft() {
    let mut failures = Vec::new();
    for name in ALL {
        let adapted = Adapted::new(name);
        let decoder = adapted.decoder();
        let device = cpu();
        let (base, trained) = (adapted.base.load(&device), load(&adapted.open(), &decoder, &device));
        let mut source = Both { decoder: &decoder, base: &base, trained: &trained };
        let found = adapted.log_probs(&decoder, &device, &mut source);
        let error = relative_error(&found, &adapted.expected());
        println!("{name}: {error:.1e}");
        let merged = relative_error(&adapted.merged_log_probs(&adapted.merged()), &found);
        if error > SCORES || merged > SCORES {
            failures.push(format!("{name}: {error:.1e}, merged {merged:.1e}"));
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}

/// Name, shape and bytes of every tensor of a file.
fn contents(file: PathBuf) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(file).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView)| {
        (name, (view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

#[test]
fn what_is_written_is_what_peft_wrote() {
    for name in ALL {
        let adapted = Adapted::new(name);
        let (decoder, device) = (adapted.decoder(), cpu());
        let trained = load(&adapted.open(), &decoder, &device);
        let base = adapted.base.open();
        let out = adapted.path().join("again");
        save_adapter(&out, &base, &decoder, &mut |layer, flat| {
            flat.copy_from_slice(trained.layers[decoder.index(layer)].view().as_slice());
            Ok(())
        })
        .unwrap();
        let mut theirs = contents(adapted.path().join("adapter_model.safetensors"));
        // The base's own tables are not the adapter's.
        theirs.retain(|name, _| !name.contains(".base_layer."));
        assert!(contents(out.join("adapter_model.safetensors")) == theirs, "{name}");
        let again = PeftFolder::open(&out).unwrap();
        let resolved = Adapter::new(again.config().clone(), decoder.spec()).unwrap();
        let first = decoder.adapter().unwrap();
        assert_eq!((resolved.matrices(), resolved.saved()), (first.matrices(), first.saved()), "{name}");
        assert_eq!(resolved.scale(), first.scale());
        assert_eq!(again.config().kind, first.config().kind);
        assert_eq!(again.base_folder().unwrap(), adapted.base.folder.path());
    }
}

#[test]
fn a_merged_folder_is_an_ordinary_model() {
    for name in ["llama-dora", "neox-head", "tied-table", "tied-whole", "gpt2-table"] {
        let adapted = Adapted::new(name);
        let (merged, template) = (adapted.merged(), adapted.base.open());
        let out = adapted.path().join("merged");
        let save = Save {
            template: &template,
            decoder: merged.decoder(),
            dtype: DType::F32,
            shard_bytes: SHARD_BYTES,
        };
        save.write(&out, &mut |layer, flat| {
            merged.read_layer(layer, flat).unwrap();
            Ok(())
        })
        .unwrap();
        let model = ModelFolder::open(&out).unwrap();
        let parted = matches!(name, "tied-table" | "gpt2-table");
        assert_eq!(model.spec().head.tied, template.spec().head.tied && !parted, "{name}");
        let decoder = Decoder::new(model.spec().clone(), 32).unwrap();
        let device = cpu();
        let weights = model.weights(&decoder).unwrap().load(&decoder, &device, MemoryKind::Master).unwrap();
        let found = adapted.log_probs(&decoder, &device, &mut ResidentWeights::new(&decoder, &weights, None));
        assert_eq!(found, adapted.merged_log_probs(&merged), "{name}");
    }
}

#[test]
fn older_spellings_are_read() {
    let rename = |name: &'static str, from: &str, to: &str| {
        let adapted = Adapted::new(name);
        let expected = adapted.merged_log_probs(&adapted.merged());
        let mut golden = adapted.golden.clone();
        let mut renamed = serde_json::Map::new();
        for (name, entry) in adapted.golden["tensors"].as_object().unwrap() {
            renamed.insert(name.replace(from, to), entry.clone());
        }
        assert_ne!(Value::Object(renamed.clone()), golden["tensors"], "{name}");
        golden["tensors"] = Value::Object(renamed);
        let older = Adapted { golden, ..adapted };
        older.write(&older.tensors());
        assert_eq!(older.merged_log_probs(&older.merged()), expected, "{name}");
    };
    rename("llama-dora", "lora_magnitude_vector", "lora_magnitude_vector.weight");
    rename("neox-dora", "lora_magnitude_vector", "lora_magnitude_vector.weight");
    rename("phi-lora", "lm_head.", "lm_head.modules_to_save.");
    rename("neox-head", "lm_head.", "embed_out.");
}

#[test]
fn every_tensor_that_does_not_fit_is_named() {
    let adapted = Adapted::new("llama-lora");
    let mut tensors = adapted.tensors();
    let first = tensors.remove(0);
    tensors[0].1[0] += 1;
    tensors.push(("base_model.model.lm_head.lora_A.weight".into(), vec![4, 16]));
    adapted.write(&tensors);
    let message = adapted.refused();
    let lines: Vec<&str> = message.lines().collect();
    assert!(
        lines[0].ends_with("adapter_model.safetensors: 3 of the tensors do not fit adapter_config.json:"),
        "{message}"
    );
    assert!(message.contains(&format!("missing: {} [4, 24]", first.0)), "{message}");
    assert!(
        message.contains(&format!("wrong shape: {} is [17, 4], expected [16, 4]", tensors[0].0)),
        "{message}"
    );
    assert!(message.contains("left over: base_model.model.lm_head.lora_A.weight [4, 16]"), "{message}");
}

#[test]
fn copies_of_tables_must_be_those_of_the_base() {
    let adapted = Adapted::new("llama-tables");
    let copy = "base_model.model.model.embed_tokens.base_layer.weight";
    let mut other = Adapted { golden: adapted.golden.clone(), ..adapted };
    other.golden["tensors"][copy][0] = "another".into();
    other.write(&other.tensors());
    let message = other.refused();
    assert!(
        message.contains(&format!("{copy} is no copy of the base's model.embed_tokens.weight")),
        "{message}"
    );
    let both = Adapted::new("tied-head");
    both.set("modules_to_save", json!(["embed_tokens"]));
    assert!(both.refused().contains("both name lm_head"), "{}", both.refused());
    // Trained apart from the head, where the model says that they are one.
    let tied = Adapted::new("tied-whole");
    let tensors: Vec<_> = tied.tensors().into_iter().filter(|(name, _)| !name.contains("lm_head")).collect();
    tied.write(&tensors);
    assert!(tied.refused().contains("missing: base_model.model.lm_head.weight"), "{}", tied.refused());
}

#[test]
fn what_would_compute_something_else_is_refused_by_name() {
    let adapted = Adapted::new("llama-lora");
    for (key, value) in [
        ("peft_type", json!("LOHA")),
        ("task_type", json!("SEQ_CLS")),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("rank_pattern", json!({"q_proj": 2})),
        ("alpha_pattern", json!({"q_proj": 2})),
        ("layers_to_transform", json!([0])),
        ("layer_replication", json!([[0, 2], [1, 2]])),
        ("exclude_modules", json!(["layers.0.q_proj"])),
        ("trainable_token_indices", json!([1, 2])),
        ("target_parameters", json!(["experts.w"])),
        ("alora_invocation_tokens", json!([1])),
        ("use_qalora", json!(true)),
        ("use_bdlora", json!({"nblocks": 2})),
        ("arrow_config", json!({"top_k": 3})),
        ("an_option_of_the_future", json!(2)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("r", json!(0)),
        ("lora_dropout", json!(1.0)),
        ("target_modules", json!(null)),
        ("modules_to_save", json!("lm_head")),
    ] {
        adapted.set(key, value);
        let message = adapted.refused();
        assert!(message.contains(&format!("adapter_config.json: {key} ")), "{key}: {message}");
    }
    // How it was begun and where it runs do not matter.
    for (key, value) in [
        ("init_lora_weights", json!("gaussian")),
        ("fan_in_fan_out", json!(true)),
        ("bias", json!("none")),
        ("ensure_weight_tying", json!(true)),
        ("loftq_config", json!({"loftq_bits": 4})),
        ("revision", json!("main")),
    ] {
        adapted.set(key, value);
        adapted.merged();
    }
}

#[test]
fn adapters_below_a_folder_are_listed() {
    let tree = TempDir::new().unwrap();
    let open = |path: &Path| PeftFolder::open(path).map(|_| ()).map_err(|error| error.to_string());
    assert!(open(&tree.path().join("none")).unwrap_err().ends_with("no such adapter folder"));
    assert!(open(tree.path()).unwrap_err().ends_with("holds no adapter_config.json"));
    let checkpoint = tree.path().join("step-000010");
    fs::create_dir(&checkpoint).unwrap();
    ["cursor.json", "manifest.json"].iter().for_each(|name| fs::write(checkpoint.join(name), "{}").unwrap());
    for error in [open(&checkpoint).unwrap_err(), ModelFolder::open(&checkpoint).err().unwrap().to_string()] {
        assert!(
            error.contains("a checkpoint of a run") && error.contains("`tandem checkpoint export`"),
            "{error}"
        );
    }
    fs::remove_dir_all(checkpoint).unwrap();
    let adapted = Adapted::new("llama-lora");
    for name in ["ref", "old"] {
        fs::create_dir(tree.path().join(name)).unwrap();
        let file = "adapter_config.json";
        fs::copy(adapted.path().join(file), tree.path().join(name).join(file)).unwrap();
    }
    let message = open(tree.path()).unwrap_err();
    assert!(message.ends_with("there are adapters in it: old, ref; name one of these folders"), "{message}");
    open(&tree.path().join("ref")).unwrap();
    let message = PeftFolder::open(&tree.path().join("ref")).unwrap().base_folder().unwrap_err().to_string();
    assert!(message.contains("names the base model \"../base\""), "{message}");
    // Relative to the adapter.
    fs::create_dir(tree.path().join("base")).unwrap();
    fs::write(tree.path().join("base/config.json"), "{}").unwrap();
    let base = PeftFolder::open(&tree.path().join("ref")).unwrap().base_folder().unwrap();
    assert_eq!(base, tree.path().join("ref/../base"));
}

/// The buffers of what trains, by layer.
fn fresh(decoder: &Decoder, seed: u64) -> Vec<Vec<f32>> {
    let layer = |&layer: &LayerId| {
        let mut flat = vec![f32::NAN; decoder.trained(layer).len];
        init_layer(decoder, layer, seed, &mut flat);
        flat
    };
    decoder.layers().iter().map(layer).collect()
}

#[test]
fn a_fresh_adapter_adds_nothing_and_is_the_same_in_every_stage() {
    use std::sync::Arc;

    use tandem_model::PipelineStage;
    for name in ["llama-lora", "llama-tables", "neox-lora", "gpt2-table"] {
        let adapted = Adapted::new(name);
        let decoder = Arc::new(adapted.decoder());
        let all = fresh(&decoder, 7);
        assert_ne!(all, fresh(&decoder, 8), "{name}");
        for index in 0..2 {
            let stage = Decoder::staged(&decoder, PipelineStage { index, count: 2 }).unwrap();
            for (layer, flat) in stage.layers().into_iter().zip(fresh(&stage, 7)) {
                assert_eq!(flat, all[decoder.index(layer)], "{name}: {layer}");
            }
        }
        let adapter = decoder.adapter().unwrap();
        for layer in decoder.layers() {
            let (layout, flat) = (decoder.trained(layer), &all[decoder.index(layer)]);
            for matrix in adapter.matrices() {
                let parts = matrix.part.low_rank().unwrap();
                let (Some(a), Some(b)) = (layout.param(parts.a), layout.param(parts.b)) else { continue };
                let (zero, drawn) =
                    if b.part == tandem_model::ParamKind::TokenLoraB { (a, b) } else { (b, a) };
                assert!(flat[zero.range()].iter().all(|&v| v == 0.0), "{name}: {:?}", zero.part);
                let drawn = &flat[drawn.range()];
                assert!(drawn.iter().all(|v| v.is_finite() && *v != 0.0), "{name}");
                if zero.part == parts.b {
                    let bound = 1.0 / (a.cols as f32).sqrt();
                    assert!(drawn.iter().all(|v| v.abs() <= bound), "{name}: beyond {bound}");
                }
            }
        }
    }
}

#[test]
fn a_stage_reads_its_own_layers() {
    use std::sync::Arc;

    use tandem_model::PipelineStage;
    for name in ["llama-tables", "tied-whole"] {
        let adapted = Adapted::new(name);
        let (decoder, device) = (Arc::new(adapted.decoder()), cpu());
        let all = load(&adapted.open(), &decoder, &device);
        for index in 0..2 {
            let stage = Decoder::staged(&decoder, PipelineStage { index, count: 2 }).unwrap();
            let own = load(&adapted.open(), &stage, &device);
            for (layer, flat) in stage.layers().into_iter().zip(&own.layers) {
                let whole = &all.layers[decoder.index(layer)];
                assert_eq!(flat.view().as_slice::<f32>(), whole.view().as_slice::<f32>(), "{name}: {layer}");
            }
        }
    }
}

#[test]
fn the_kind_is_read() {
    let config = |name| PeftFolder::open(Adapted::new(name).path()).unwrap().config().clone();
    assert_eq!(config("llama-dora").kind, AdapterKind::Dora);
    let rslora = config("qwen2-rslora");
    assert_eq!(
        (rslora.kind, rslora.rank, rslora.alpha, rslora.rank_stabilized),
        (AdapterKind::Lora, 4, 40.0, true)
    );
}

/// `goldens/check_adapters.py`, with the interpreter that `TANDEM_TEST_PYTHON` names.
#[test]
fn peft_loads_what_is_written() {
    let Some(python) = std::env::var_os("TANDEM_TEST_PYTHON") else {
        eprintln!("skipped: TANDEM_TEST_PYTHON names no interpreter with peft to compare with");
        return;
    };
    let has = Command::new(&python).args(["-c", "import peft, transformers"]).output();
    if !has.expect("TANDEM_TEST_PYTHON starts").status.success() {
        eprintln!("skipped: the interpreter of TANDEM_TEST_PYTHON has no peft");
        return;
    }
    let tests = std::env::current_exe().unwrap();
    let binary = tests.ancestors().nth(2).unwrap().join("examples/adapter");
    assert!(binary.is_file(), "build it first: cargo build --release -p tandem-model --example adapter");
    let script = support::goldens().join("../check_adapters.py");
    let output = Command::new(&python).arg(script).arg(binary).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    // The script goes on with adapters of every model golden.
    let outcomes = text(&output.stdout);
    assert!(outcomes.lines().all(|line| line.contains(": equal")), "{outcomes}");
    for name in ALL {
        assert!(outcomes.lines().any(|line| line.starts_with(&format!("{name}: "))), "{name}: {outcomes}");
    }
}
