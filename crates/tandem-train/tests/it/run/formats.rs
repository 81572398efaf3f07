//! Frozen weights in fewer bits: how much memory loading takes, and folders that are quantised already.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tandem_comm::{ProcessGroup, threads};
use tandem_kernels::{DType, Device, Format, MemoryKind, MemoryUse};
use tandem_model::WeightSource;
use tandem_model::save::SHARD_BYTES;
use tandem_model::{Decoder, LayerId, ModelFolder, ParamKind, Save, init};
use tandem_train::config::{Config, Weights};
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::placement::MemoryPlacement;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir;
use tandem_train::weights::Packings;
use tandem_train::weights::initial_weights::InitialWeights;
use tandem_train::{Event, Observer, Outcome, Trainer};

use crate::small::Small;

const ADAPTER: [&str; 2] = ["adapter.rank=4", "compute.threads=1"];

/// Room for everything here: a measure would be no measure if an arena of the plan's size were its bound.
fn device() -> Device {
    Device::cpu(1, 1 << 28).unwrap()
}

/// A folder like the small model's, of a larger one, with its weights.
fn larger_model(small: &Small) -> PathBuf {
    let folder = small.path("larger");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
    fs::create_dir(&folder).unwrap();
    for file in fs::read_dir(source).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let path = folder.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", json!(256)),
        ("num_hidden_layers", json!(6)),
        ("head_dim", json!(64)),
        ("intermediate_size", json!(704)),
        ("dtype", json!("bfloat16")),
    ] {
        config.insert(key.to_owned(), value);
    }
    fs::write(&path, Value::Object(config).to_string()).unwrap();
    let template = ModelFolder::open(&folder).unwrap();
    let decoder = Decoder::new(template.spec().clone(), 96).unwrap();
    let weights = init::init(&decoder, &device(), MemoryKind::Master, 3).unwrap();
    let whole = small.path("larger-whole");
    let save = Save { template: &template, decoder: &decoder, dtype: DType::Bf16, shard_bytes: SHARD_BYTES };
    save.write_resident(&whole, &device(), &weights).unwrap();
    whole
}

/// Bytes of the largest piece: in f32, packed, and of the scales that packing it makes.
fn largest_piece(packings: &Packings, decoder: &Decoder) -> [usize; 3] {
    let mut largest = [0; 3];
    for layer in decoder.layers() {
        for piece in packings.packing(layer).pieces() {
            let scales = if piece.format == Format::Nf4 { 4 * piece.flat.len().div_ceil(64) } else { 0 };
            for (most, bytes) in largest.iter_mut().zip([4 * piece.flat.len(), piece.bytes.len(), scales]) {
                *most = (*most).max(bytes.next_multiple_of(64));
            }
        }
    }
    largest
}

/// Memory of loading frozen weights: at its peak, and afterwards.
fn load(
    config: &Config,
    prepared: &RunInputs,
    device: &Device,
    group: &mut ProcessGroup,
) -> (MemoryUse, usize) {
    let decoder = &prepared.decoder;
    let start = InitialWeights::for_policy(config, &prepared.folder, decoder).unwrap();
    let weights = start
        .frozen(config, decoder, &MemoryPlacement::all_in(device.clone()), group, MemoryKind::Weights, None)
        .unwrap();
    let memory = device.memory();
    drop(weights);
    let stays = memory.current[MemoryKind::Weights as usize];
    (memory, stays)
}

#[test]
fn loading_takes_what_stays_and_one_piece() {
    let small = Small::new("dpo");
    let model = larger_model(&small);
    let model = format!("model={:?}", model.to_str().unwrap());
    for format in Format::ALL {
        for ranks in [1, 2, 3] {
            let own =
                [format!("compute.format={format}"), model.clone(), format!("compute.devices=cpu:{ranks}")];
            let settings: Vec<&str> = ADAPTER
                .into_iter()
                .chain(own.iter().map(String::as_str))
                .chain(["compute.sharding=zero3"])
                .collect();
            let config = small.config("run", &settings);
            let config = Config { weights: Weights::Folder, ..config };
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            let packings = Packings::new(&prepared.decoder, format, DType::F32);
            let [values, packed, scales] = largest_piece(&packings, &prepared.decoder);
            let layers = prepared.decoder.layers();
            let counts = |rank: usize| -> usize {
                layers.iter().map(|&layer| packings.packing(layer).counts(ranks)[rank]).sum()
            };
            let full: usize = layers.iter().map(|&l| 4 * prepared.decoder.layout(l).len).sum();
            let found: Vec<(MemoryUse, usize)> = std::thread::scope(|scope| {
                let groups = threads::groups(ranks, Duration::from_secs(600));
                let (config, prepared) = (&config, &prepared);
                let ranks: Vec<_> = groups
                    .into_iter()
                    .map(|mut group| scope.spawn(move || load(config, prepared, &device(), &mut group)))
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for (rank, (memory, stays)) in found.into_iter().enumerate() {
                let what = format!("{format}, rank {rank} of {ranks}: {memory:?}");
                assert!((counts(rank)..counts(rank) + 64 * layers.len()).contains(&stays), "{what}");
                // A piece that two ranks have parts of is packed whole before it is cut.
                let cut = if ranks > 1 { packed } else { 0 };
                assert!(memory.peak <= stays + values + scales + cut, "{what}");
                if format == Format::Nf4 {
                    assert!(memory.peak * 4 < full, "{what}");
                }
                // The dry run counts the same.
                let (mut group, _) = tandem_comm::recorder::group(rank, ranks);
                let (planned, _) = load(&config, &prepared, &Device::meta(), &mut group);
                assert_eq!((planned.peak, planned.at_peak), (memory.peak, memory.at_peak), "{what}");
            }
        }
    }
}

/// Whole runs: the plan's peak is the run's.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_run_takes_what_its_plan_says() {
    let small = Small::new("dpo");
    let model = larger_model(&small);
    let model = format!("model={:?}", model.to_str().unwrap());
    for format in Format::ALL {
        for reference in ["base", "precompute", "model"] {
            let own = [
                format!("compute.format={format}"),
                model.clone(),
                format!("reference.kind={reference}"),
                "train.steps=2".to_owned(),
            ];
            let settings: Vec<&str> = ADAPTER.into_iter().chain(own.iter().map(String::as_str)).collect();
            let name = format!("{format}-{reference}");
            let config = small.config(&name, &settings);
            let config = Config { weights: Weights::Folder, ..config };
            let prepared = RunInputs::open(&config, &mut Silent).unwrap();
            let plan = Plan::make(&config, &prepared, 0, 1).unwrap();
            let planned = plan.phases.iter().map(|phase| phase.memory.peak).max().unwrap();
            let mut trainer = Trainer::new(config, run_dir::RunDirPolicy::Fresh, &mut Silent).unwrap();
            let outcome = trainer.run(&mut Silent, &AtomicBool::new(false)).unwrap();
            assert!(matches!(outcome, Outcome::Finished(_)));
            let measured = trainer.device().memory().peak;
            println!("{name}: planned {planned}, measured {measured}");
            assert!(measured <= planned && measured * 20 >= planned * 19, "{name}: {measured} of {planned}");
        }
    }
}

/// The golden folders have no tokens: those of the small model stand in, as nothing here looks at them.
fn quantised(small: &Small, name: &str, settings: &[&str]) -> (Config, RunInputs) {
    let config = small.config(name, settings);
    let config = Config { weights: Weights::Folder, ..config };
    let prepared = RunInputs::open(&small.config(name, &["compute.threads=1"]), &mut Silent).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/quantised").join(name);
    let folder = ModelFolder::open(&path).unwrap();
    let decoder = Arc::new(Decoder::new(folder.spec().clone(), 32).unwrap());
    (config, RunInputs { folder, decoder, ..prepared })
}

const MATRICES: [ParamKind; 4] =
    [ParamKind::QkvWeight, ParamKind::OutWeight, ParamKind::UpWeight, ParamKind::DownWeight];

/// Every matrix of the blocks, as a fetch brings it, and its bits as f32.
fn fetched(config: &Config, prepared: &RunInputs) -> Vec<u32> {
    let (device, decoder) = (device(), &prepared.decoder);
    let start = InitialWeights::for_policy(config, &prepared.folder, decoder).unwrap();
    let mut source = start
        .frozen(
            config,
            decoder,
            &MemoryPlacement::all_in(device),
            &mut ProcessGroup::alone(),
            MemoryKind::Weights,
            None,
        )
        .unwrap();
    let blocks = decoder.layers().into_iter().filter(|layer| matches!(layer, LayerId::Block(_)));
    let mut bits = Vec::new();
    for layer in blocks {
        let weights = source.fetch(layer).unwrap();
        for part in MATRICES {
            let view = weights.get(part).unwrap();
            bits.extend(view.as_slice::<f32>().iter().map(|x| x.to_bits()));
        }
        source.release(layer);
    }
    bits
}

/// Bits of the values in the files.
fn read(prepared: &RunInputs) -> Vec<u32> {
    let decoder = &prepared.decoder;
    let files = prepared.folder.weights(decoder).unwrap();
    let mut bits = Vec::new();
    for (index, layer) in decoder.layers().into_iter().enumerate() {
        let layout = decoder.layout(layer);
        let mut flat = vec![0.0; layout.len];
        files.read_layer(index, &mut flat).unwrap();
        for part in MATRICES.into_iter().filter_map(|part| layout.param(part)) {
            bits.extend(flat[part.range()].iter().map(|x: &f32| x.to_bits()));
        }
    }
    bits
}

/// Without a word in the config an adapter stands on codes and scales as they are stored.
#[test]
fn a_quantised_base_keeps_its_format() {
    let small = Small::new("dpo");
    for (name, format) in
        [("llama-nf4", Format::Nf4), ("llama-int8", Format::Int8), ("gpt2-nf4", Format::Nf4)]
    {
        let (config, prepared) = quantised(&small, name, &ADAPTER);
        let expected = read(&prepared);
        let start = |config: &Config| {
            InitialWeights::for_policy(config, &prepared.folder, &prepared.decoder)
                .unwrap()
                .frozen_format(config)
        };
        assert_eq!(start(&config), format, "{name}");
        assert!(fetched(&config, &prepared) == expected, "{name}");
        let (plain, _) =
            quantised(&small, name, &["adapter.rank=4", "compute.threads=1", "compute.format=f32"]);
        assert_eq!(start(&plain), Format::F32, "{name}");
        assert!(fetched(&plain, &prepared) == expected, "{name} as f32");
        let (full, _) = quantised(&small, name, &["compute.threads=1"]);
        assert_eq!(start(&full), Format::F32, "{name}: every weight trains");
        // Another format is made of the values: those of an ordinary folder that holds them.
        let device = device();
        let (decoder, folder) = (&prepared.decoder, &prepared.folder);
        let weights = folder.weights(decoder).unwrap().load(decoder, &device, MemoryKind::Master).unwrap();
        let path = small.path(&format!("{name}-dequantised"));
        let save = Save { template: folder, decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
        save.write_resident(&path, &device, &weights).unwrap();
        let other = if format == Format::Nf4 { Format::Int8 } else { Format::Nf4 };
        let other = format!("compute.format={other}");
        let (config, _) = quantised(&small, name, &["adapter.rank=4", "compute.threads=1", &other]);
        let found = fetched(&config, &prepared);
        let dequantised = RunInputs { folder: ModelFolder::open(&path).unwrap(), ..prepared };
        assert!(found == fetched(&config, &dequantised), "{name}, {other}");
        assert!(found != expected, "{name}, {other}");
    }
}

/// A fingerprint of weights that are seen as they are packed needs their values.
#[test]
fn what_is_seen_is_what_stored_weights_stand_for() {
    let small = Small::new("dpo");
    let (config, prepared) = quantised(&small, "llama-nf4", &ADAPTER);
    let (device, decoder) = (device(), &prepared.decoder);
    let start = InitialWeights::for_policy(&config, &prepared.folder, decoder).unwrap();
    let mut seen = 0.0;
    let see =
        &mut |_: LayerId, values: &[f32]| seen += values.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    start
        .frozen(
            &config,
            decoder,
            &MemoryPlacement::all_in(device),
            &mut ProcessGroup::alone(),
            MemoryKind::Weights,
            Some(see),
        )
        .unwrap();
    let files = prepared.folder.weights(decoder).unwrap();
    let mut expected = 0.0;
    for (index, layer) in decoder.layers().into_iter().enumerate() {
        let mut flat = vec![0.0f32; decoder.layout(layer).len];
        files.read_layer(index, &mut flat).unwrap();
        expected += flat.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    }
    assert!((seen - expected).abs() < 1e-9 * expected, "{seen} {expected}");
}

/// Full training from a quantised folder is told of.
#[test]
fn training_every_weight_of_a_quantised_folder_warns() {
    let small = Small::new("dpo");
    let model = larger_model(&small);
    let path = model.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.insert(
        "quantization_config".to_owned(),
        json!({"quant_method": "bitsandbytes", "load_in_8bit": true, "load_in_4bit": false}),
    );
    fs::write(&path, Value::Object(config).to_string()).unwrap();
    let model = format!("model={:?}", model.to_str().unwrap());
    struct Warnings(Vec<String>);
    impl Observer for Warnings {
        fn event(&mut self, event: &Event<'_>) {
            if let Event::Warning(text) = event {
                self.0.push((*text).to_owned());
            }
        }
    }
    for (settings, expected) in [(&["compute.threads=1"][..], 1), (&ADAPTER, 0)] {
        let settings: Vec<&str> = settings.iter().copied().chain([model.as_str()]).collect();
        let config = small.config("run", &settings);
        let config = Config { weights: Weights::Folder, ..config };
        let mut warnings = Warnings(Vec::new());
        RunInputs::open(&config, &mut warnings).unwrap();
        let found: Vec<_> = warnings.0.iter().filter(|text| text.contains("holds int8 weights")).collect();
        assert_eq!(found.len(), expected, "{:?}", warnings.0);
    }
}
