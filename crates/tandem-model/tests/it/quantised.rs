//! Folders that bitsandbytes has quantised, as transformers saves them: `goldens/quantised_golden.py` made them. Folders of
//! FP8 weights are made of them here.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::support::{Golden, SCORES, cpu, formula, goldens, relative_error, tensor_shapes};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use tandem_kernels::numerics::e4m3;
use tandem_kernels::{Bytes, DType, Device, Forest, Format, MemoryKind, bf16, ops};
use tandem_model::save::SHARD_BYTES;
use tandem_model::{
    Checkpointing, Decoder, FlatWeights, LayerExecutor, ModelFolder, Packing, ResidentWeights, Save,
    TensorParallelShard,
};
use tempfile::TempDir;

const FOLDERS: [&str; 3] = ["llama-nf4", "llama-int8", "gpt2-nf4"];

fn folder(name: &str) -> PathBuf {
    goldens().join("../quantised").join(name)
}

fn decoder(folder: &ModelFolder) -> Decoder {
    Decoder::new(folder.spec().clone(), 32).unwrap()
}

fn load(folder: &ModelFolder, device: &Device) -> (Decoder, FlatWeights) {
    let decoder = decoder(folder);
    let weights = folder.weights(&decoder).unwrap().load(&decoder, device, MemoryKind::Master).unwrap();
    (decoder, weights)
}

/// Tensors of a file, to be changed and written anew.
struct Tensors(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors();
        Self(
            tensors.into_iter().map(|(n, t)| (n, t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect(),
        )
    }

    fn write(&self, path: &Path) {
        let views = self.0.iter().map(|(name, dtype, shape, data)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(path, serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
    }

    fn get(&mut self, name: &str) -> &mut (String, Dtype, Vec<usize>, Vec<u8>) {
        self.0.iter_mut().find(|tensor| tensor.0 == name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn remove(&mut self, name: &str) {
        let before = self.0.len();
        self.0.retain(|tensor| tensor.0 != name);
        assert_eq!(self.0.len(), before - 1, "no {name}");
    }

    fn numbers(&mut self, name: &str) -> Vec<f32> {
        self.get(name).3.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// The folder with its tensors changed.
fn changed(name: &str, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let copy = TempDir::new().unwrap();
    fs::copy(folder(name).join("config.json"), copy.path().join("config.json")).unwrap();
    let mut tensors = Tensors::read(&folder(name).join("model.safetensors"));
    change(&mut tensors);
    tensors.write(&copy.path().join("model.safetensors"));
    copy
}

fn refusal(folder: &Path) -> String {
    let folder = ModelFolder::open(folder).unwrap();
    folder.weights(&decoder(&folder)).err().expect("must be refused").to_string()
}

#[test]
fn logits_are_those_of_transformers() {
    let device = cpu();
    for name in FOLDERS {
        let mut expected = Tensors::read(&folder(name).join("expected.safetensors"));
        let tokens = &expected.get("tokens").3;
        let tokens: Vec<u32> =
            tokens.chunks_exact(8).map(|b| u32::from_le_bytes(b[..4].try_into().unwrap())).collect();
        let (decoder, weights) = load(&ModelFolder::open(&folder(name)).unwrap(), &device);
        let walk = LayerExecutor::new(&decoder, &device, DType::F32, Checkpointing::None);
        let forest = Forest::sequence(tokens).unwrap();
        let rows: Vec<u32> = (0..forest.num_tokens() as u32).collect();
        let logits =
            walk.logits(&mut ResidentWeights::new(&decoder, &weights, None), &forest, &rows).unwrap();
        // bitsandbytes' own int8 product rounds activations, too: another computation.
        let answers =
            if name.ends_with("nf4") { &["dequantised", "quantised"][..] } else { &["dequantised"] };
        for answer in answers {
            let error = relative_error(logits.view().as_slice(), &expected.numbers(answer));
            assert!(error <= SCORES, "{name}, {answer}: {error:.1e}");
        }
    }
}

/// Packed as stored, weights stand for what is read of them, and codes and scales are those of the file.
#[test]
fn what_is_stored_is_packed_as_it_is() {
    let device = cpu();
    for (name, format) in FOLDERS.into_iter().zip([Format::Nf4, Format::Int8, Format::Nf4]) {
        let folder = ModelFolder::open(&folder(name)).unwrap();
        assert_eq!(folder.quantised(), Some(format));
        let decoder = decoder(&folder);
        let files = folder.weights(&decoder).unwrap();
        let mut num_stored = 0;
        for (index, layer) in decoder.layers().into_iter().enumerate() {
            let packing = Packing::new(&decoder, layer, format, DType::F32);
            for piece in packing.pieces() {
                let is_quantised = piece.format == format;
                assert_eq!(files.is_stored(index, &piece.flat, piece.format), is_quantised, "{name} {layer}");
                if !is_quantised {
                    continue;
                }
                num_stored += 1;
                let mut packed = Bytes::new(&device, MemoryKind::Weights, piece.bytes.len()).unwrap();
                files.pack_stored(&device, index, &piece.flat, packed.view_mut()).unwrap();
                let mut found =
                    device.alloc(MemoryKind::Weights, piece.rows, piece.cols, DType::F32).unwrap();
                ops::unpack(&device, packed.view(), format, found.view_mut()).unwrap();
                let mut expected = vec![f32::NAN; piece.flat.len()];
                files.read_range(index, piece.flat.clone(), &mut expected).unwrap();
                assert!(found.view().as_slice::<f32>() == expected, "{name} {layer} {:?}", piece.flat);
                let other = if format == Format::Nf4 { Format::Int8 } else { Format::Nf4 };
                assert!(!files.is_stored(index, &piece.flat, other));
            }
        }
        assert_eq!(num_stored, if name == "gpt2-nf4" { 4 } else { 14 }, "{name}");
    }
}

/// A rank that holds a slice of the model reads its blocks of quantised matrices.
#[test]
fn slices_are_parts_of_the_whole() {
    let device = cpu();
    for name in FOLDERS {
        let folder = ModelFolder::open(&folder(name)).unwrap();
        let (whole, weights) = load(&folder, &device);
        let whole = Arc::new(whole);
        for index in 0..2 {
            let slice = Decoder::sliced(&whole, TensorParallelShard { index, count: 2 }).unwrap();
            let part = folder.weights(&slice).unwrap().load(&slice, &device, MemoryKind::Master).unwrap();
            let plain = TempDir::new().unwrap();
            let dequantised = plain.path().join("dequantised");
            let save =
                Save { template: &folder, decoder: &whole, dtype: DType::F32, shard_bytes: SHARD_BYTES };
            save.write_resident(&dequantised, &device, &weights).unwrap();
            let dequantised = ModelFolder::open(&dequantised).unwrap();
            let expected =
                dequantised.weights(&slice).unwrap().load(&slice, &device, MemoryKind::Master).unwrap();
            assert!(values(&part) == values(&expected), "{name}, slice {index}");
        }
    }
}

fn values(weights: &FlatWeights) -> Vec<u32> {
    weights.layers.iter().flat_map(|l| l.view().as_slice::<f32>().iter().map(|x| x.to_bits())).collect()
}

/// A written folder is not quantised, and says so.
#[test]
fn a_saved_model_is_an_ordinary_one() {
    let device = cpu();
    for name in FOLDERS {
        let template = ModelFolder::open(&folder(name)).unwrap();
        let (decoder, weights) = load(&template, &device);
        let out = TempDir::new().unwrap();
        let path = out.path().join("final");
        let save =
            Save { template: &template, decoder: &decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
        save.write_resident(&path, &device, &weights).unwrap();
        let config: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        assert_eq!(config.get("quantization_config"), None, "{name}");
        let saved = ModelFolder::open(&path).unwrap();
        assert_eq!(saved.quantised(), None);
        assert!(values(&load(&saved, &device).1) == values(&weights), "{name}");
    }
}

/// bitsandbytes keeps codes in any type that the user asks for (bf16, so that FSDP takes them): the bytes are the same.
#[test]
fn codes_may_be_stored_in_another_type() {
    let device = cpu();
    let copy = changed("llama-nf4", |tensors| {
        let (_, dtype, shape, _) = tensors.get("model.layers.0.mlp.up_proj.weight");
        (*dtype, *shape) = (Dtype::BF16, vec![shape[0] / 2, 1]);
    });
    let as_it_was = load(&ModelFolder::open(&folder("llama-nf4")).unwrap(), &device).1;
    assert!(values(&load(&ModelFolder::open(copy.path()).unwrap(), &device).1) == values(&as_it_was));
}

const UP: &str = "model.layers.0.mlp.up_proj.weight";

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let advice = "use the unquantised model, and set compute.format";
    let rename = |tensors: &mut Tensors, from: &str, to: &str| tensors.get(from).0 = to.to_owned();
    let state = format!("{UP}.quant_state.bitsandbytes__nf4");
    let edit_state = |tensors: &mut Tensors, from: &str, to: &str| {
        let (_, _, shape, data) = tensors.get(&state);
        let text = String::from_utf8(data.clone()).unwrap();
        assert!(text.contains(from), "{text}");
        *data = text.replace(from, to).into_bytes();
        *shape = vec![data.len()];
    };
    type Change<'a> = Box<dyn FnOnce(&mut Tensors) + 'a>;
    let nf4: Vec<(Change, String)> = vec![
        (
            Box::new(|t| rename(t, &state, &format!("{UP}.quant_state.bitsandbytes__fp4"))),
            format!("unsupported: {UP} is fp4, but nf4 is the only supported 4-bit type; {advice}"),
        ),
        (
            Box::new(|t| {
                t.remove(&format!("{UP}.nested_absmax"));
                t.remove(&format!("{UP}.nested_quant_map"));
                let (_, dtype, shape, data) = t.get(&format!("{UP}.absmax"));
                (*dtype, *data) = (Dtype::F32, vec![0; 4 * shape[0]]);
            }),
            format!(
                "unsupported: {UP} is nf4 without double quantisation, which is required \
                 (bnb_4bit_use_double_quant); {advice}"
            ),
        ),
        (
            Box::new(|t| edit_state(t, "\"blocksize\": 64", "\"blocksize\": 128")),
            format!("unsupported: {UP}: blocksize is 128; only 64 can be read: quantise the weights again"),
        ),
        (
            Box::new(|t| edit_state(t, "[320, 64]", "[64, 320]")),
            format!("wrong shape: {state} says [64,320], expected [320, 64]"),
        ),
        (Box::new(|t| edit_state(t, "{", "")), format!("malformed: {state}: ")),
        (
            Box::new(|t| edit_state(t, "nested_offset", "offset")),
            format!("malformed: {state} has no number for nested_offset"),
        ),
        (Box::new(|t| t.remove(&format!("{UP}.quant_map"))), format!("missing: {UP}.quant_map")),
        (
            Box::new(|t| t.get(&format!("{UP}.quant_map")).3[4..8].copy_from_slice(&(-0.7f32).to_le_bytes())),
            format!(
                "unsupported: {UP}: quant_map[1] is -0.7, expected -0.6961928: another quantisation than nf4's"
            ),
        ),
        (
            Box::new(|t| {
                let (_, _, shape, data) = t.get(UP);
                shape[0] -= 1;
                data.pop();
            }),
            format!("unsupported: {UP}: weight has 10239 elements, expected 10240 for a 320x64 matrix"),
        ),
    ];
    for (change, expected) in nf4 {
        let message = refusal(changed("llama-nf4", change).path());
        assert!(
            message.contains(&format!("1 of the tensors does not fit config.json:\n  {expected}")),
            "{message}"
        );
    }
    let stem = UP.strip_suffix("weight").unwrap();
    let int8: Vec<(Change, String)> = vec![
        (
            Box::new(|t| t.get(&format!("{stem}weight_format")).3[0] = 3),
            format!("unsupported: {stem}weight_format says that rows are not stored in order; {advice}"),
        ),
        (
            Box::new(|t| {
                let (_, _, shape, data) = t.get(&format!("{stem}SCB"));
                shape[0] -= 1;
                data.truncate(4 * shape[0]);
            }),
            format!("wrong shape: {UP}: SCB has 63 elements, expected 64 for a 64x64 matrix"),
        ),
        (
            Box::new(|t| t.get(UP).2 = vec![32, 128]),
            format!("wrong shape: {UP} is [32, 128], expected [64, 64]"),
        ),
        (Box::new(|t| t.get(UP).1 = Dtype::U8), format!("wrong type: {UP} is u8, expected i8")),
    ];
    for (change, expected) in int8 {
        let message = refusal(changed("llama-int8", change).path());
        assert!(
            message.contains(&format!("1 of the tensors does not fit config.json:\n  {expected}")),
            "{message}"
        );
    }
    // Two at once, and one that is no longer quantised as far as anyone can tell.
    let message = refusal(
        changed("llama-int8", |tensors| {
            tensors.remove(&format!("{stem}SCB"));
            tensors.get("model.layers.1.mlp.up_proj.weight_format").3[0] = 1;
        })
        .path(),
    );
    for problem in [
        format!("wrong type: {UP} is i8, expected f32, bf16 or f16"),
        "unsupported: model.layers.1.mlp.up_proj.weight_format says".to_owned(),
    ] {
        assert!(message.contains(&problem), "{message}");
    }
}

/// GPT-NeoX's fused matrix has its rows in another order than ours, and so its blocks.
#[test]
fn fused_heads_in_another_order_are_refused() {
    let golden = Golden::new("gpt-neox");
    let path = golden.folder.path();
    formula::write_safetensors(path, &tensor_shapes(&golden.decoder), formula::weight).unwrap();
    let mut tensors = Tensors::read(&path.join("model.safetensors"));
    let name = "gpt_neox.layers.0.attention.query_key_value.weight";
    let (_, dtype, shape, data) = tensors.get(name);
    let rows = shape[0];
    (*dtype, *data) = (Dtype::I8, vec![1; shape.iter().product()]);
    tensors.0.push((name.replace("weight", "SCB"), Dtype::F32, vec![rows], vec![0; 4 * rows]));
    tensors.write(&path.join("model.safetensors"));
    let message = refusal(path);
    assert!(
        message.contains(&format!(
            "1 of the tensors does not fit config.json:\n  unsupported: {name} is quantised with its heads in another order"
        )),
        "{message}"
    );
}

#[test]
fn other_quantisations_are_refused() {
    let copy = changed("llama-nf4", |_| {});
    let path = copy.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"bitsandbytes\"", "\"gptq\"")).unwrap();
    let message = refusal(copy.path());
    assert!(
        message.ends_with(
            "config.json: quantization_config.quant_method is \"gptq\", but only weights that bitsandbytes quantised, and \
             FP8 weights (\"fp8\", \"compressed-tensors\" with the format \"float-quantized\"), can be read; use the \
             unquantised model"
        ),
        "{message}"
    );
}

/// The nf4 model's weights in f32, in a folder.
fn dequantised() -> TempDir {
    let device = cpu();
    let template = ModelFolder::open(&folder("llama-nf4")).unwrap();
    let (decoder, weights) = load(&template, &device);
    let out = TempDir::new().unwrap();
    let save = Save { template: &template, decoder: &decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
    save.write_resident(&out.path().join("f32"), &device, &weights).unwrap();
    out
}

fn set_quantisation(folder: &Path, how: &Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = how.clone();
    fs::write(path, config.to_string()).unwrap();
}

/// Makes an FP8 folder of the model, and one in f32 of what its codes and scales stand for. Blocks are of `block` rows and
/// columns; scales are stored under `word`, rounded to bf16 if `is_bf16`.
fn fp8(how: &Value, word: &str, is_bf16: bool, block: impl Fn(usize, usize) -> [usize; 2]) -> [TempDir; 2] {
    let whole = dequantised();
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    for folder in &folders {
        fs::copy(whole.path().join("f32/config.json"), folder.path().join("config.json")).unwrap();
    }
    set_quantisation(folders[0].path(), how);
    let mut plain = Tensors::read(&whole.path().join("f32/model.safetensors"));
    let mut quantised = Tensors(Vec::new());
    for (name, dtype, shape, data) in &mut plain.0 {
        if !name.ends_with("_proj.weight") {
            quantised.0.push((name.clone(), *dtype, shape.clone(), data.clone()));
            continue;
        }
        let (rows, cols) = (shape[0], shape[1]);
        let [height, width] = block(rows, cols);
        let (tall, wide) = (rows.div_ceil(height), cols.div_ceil(width));
        let mut weights: Vec<f32> =
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let mut scales = vec![0.0f32; tall * wide];
        let place = |i: usize| i / cols / height * wide + i % cols / width;
        for (i, weight) in weights.iter().enumerate() {
            scales[place(i)] = scales[place(i)].max(weight.abs() / 448.0);
        }
        if is_bf16 {
            scales.iter_mut().for_each(|scale| *scale = bf16::from_f32(*scale).to_f32());
        }
        let codes = weights.iter().enumerate().map(|(i, x)| e4m3::from_f32(x / scales[place(i)]));
        let codes: Vec<u8> = codes.collect();
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight = e4m3::to_f32(codes[i]) * scales[place(i)];
        }
        *data = weights.iter().flat_map(|x| x.to_le_bytes()).collect();
        quantised.0.push((name.clone(), Dtype::F8_E4M3, shape.clone(), codes));
        let (dtype, bytes) = if is_bf16 {
            let bytes = scales.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
            (Dtype::BF16, bytes)
        } else {
            (Dtype::F32, scales.iter().flat_map(|x| x.to_le_bytes()).collect())
        };
        let scale_shape = if scales.len() == 1 { vec![1] } else { vec![tall, wide] };
        quantised.0.push((name.replace("weight", word), dtype, scale_shape, bytes));
    }
    quantised.write(&folders[0].path().join("model.safetensors"));
    plain.write(&folders[1].path().join("model.safetensors"));
    folders
}

fn fine_grained() -> Value {
    json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
}

fn compressed(strategy: &str) -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": strategy}}},
    })
}

#[test]
fn fp8_folders_are_read_with_the_scales_of_tensors_rows_and_blocks() {
    let device = cpu();
    let cases = [
        fp8(&fine_grained(), "weight_scale_inv", false, |_, _| [128, 128]),
        fp8(&fine_grained(), "weight_scale_inv", true, |_, _| [128, 128]),
        fp8(&compressed("block"), "weight_scale", false, |_, _| [128, 128]),
        fp8(&compressed("channel"), "weight_scale", true, |_, cols| [1, cols]),
        fp8(&compressed("tensor"), "weight_scale", false, |rows, cols| [rows, cols]),
        fp8(&json!({"quant_method": "fp8"}), "weight_scale_inv", false, |rows, cols| [rows, cols]),
    ];
    for (case, [folder, plain]) in cases.iter().enumerate() {
        let folder = ModelFolder::open(folder.path()).unwrap();
        let expected = load(&ModelFolder::open(plain.path()).unwrap(), &device).1;
        let (decoder, weights) = load(&folder, &device);
        assert!(values(&weights) == values(&expected), "case {case}");
        let has_rows = case >= 3;
        assert_eq!(folder.quantised(), has_rows.then_some(Format::Fp8), "case {case}");
        assert_eq!(folder.quantisation(), Some("fp8"), "case {case}");
        // As stored, where a row has one scale.
        let files = folder.weights(&decoder).unwrap();
        for (index, layer) in decoder.layers().into_iter().enumerate() {
            for piece in Packing::new(&decoder, layer, Format::Fp8, DType::F32).pieces() {
                let is_stored = files.is_stored(index, &piece.flat, Format::Fp8);
                // A matrix whose only block is the whole of it has a scale for its rows.
                let is_narrow = piece.cols <= 128;
                assert_eq!(
                    is_stored,
                    piece.format == Format::Fp8 && (has_rows || is_narrow),
                    "case {case} {layer} {:?}",
                    piece.flat
                );
                if !is_stored {
                    continue;
                }
                let mut packed = Bytes::new(&device, MemoryKind::Weights, piece.bytes.len()).unwrap();
                files.pack_stored(&device, index, &piece.flat, packed.view_mut()).unwrap();
                let mut found =
                    device.alloc(MemoryKind::Weights, piece.rows, piece.cols, DType::F32).unwrap();
                ops::unpack(&device, packed.view(), piece.format, found.view_mut()).unwrap();
                let expected = expected.layers[index].view().as_slice::<f32>()[piece.flat.clone()].to_vec();
                assert!(found.view().as_slice::<f32>() == expected, "case {case} {layer} {:?}", piece.flat);
            }
        }
    }
}

#[test]
fn fp8_folders_that_cannot_be_read_are_refused_by_name() {
    type Change<'a> = &'a dyn Fn(&mut Tensors);
    let channel = |change: Change| {
        let [folder, _] = fp8(&compressed("channel"), "weight_scale", false, |_, cols| [1, cols]);
        let path = folder.path().join("model.safetensors");
        let mut tensors = Tensors::read(&path);
        change(&mut tensors);
        tensors.write(&path);
        folder
    };
    let scale = UP.replace("weight", "weight_scale");
    let cases: [(Change, String); 4] = [
        (
            &|t| t.get(&scale).2 = vec![160, 2],
            format!(
                "wrong shape: {scale} is [160, 2], expected [1], [320, 1] for rows or [3, 1] for blocks of 128x128"
            ),
        ),
        (&|t| t.get(UP).1 = Dtype::F8_E5M2, format!("wrong type: {UP} is f8_e5m2, expected f8_e4m3")),
        (&|t| t.get(UP).2 = vec![64, 320], format!("wrong shape: {UP} is [64, 320], expected [320, 64]")),
        (
            &|t| t.get(&scale).3[..4].copy_from_slice(&f32::INFINITY.to_le_bytes()),
            format!("not finite: {scale} holds inf"),
        ),
    ];
    for (change, expected) in cases {
        let message = refusal(channel(change).path());
        assert!(
            message.contains(&format!("1 of the tensors does not fit config.json:\n  {expected}")),
            "{message}"
        );
    }
    // Codes are looked at when they are read.
    let damaged = channel(&|t| t.get(UP).3[700] = 0xff);
    let folder = ModelFolder::open(damaged.path()).unwrap();
    let (decoder, device) = (decoder(&folder), cpu());
    let files = folder.weights(&decoder).unwrap();
    let error = files.load(&decoder, &device, MemoryKind::Master).err().expect("must be refused").to_string();
    assert!(error.contains(&format!("{UP} holds NaN, expected finite weights")), "{error}");
    let mut refused = Vec::new();
    for (index, layer) in decoder.layers().into_iter().enumerate() {
        for piece in Packing::new(&decoder, layer, Format::Fp8, DType::F32).pieces() {
            if files.is_stored(index, &piece.flat, Format::Fp8) {
                let mut packed = Bytes::new(&device, MemoryKind::Weights, piece.bytes.len()).unwrap();
                refused.extend(files.pack_stored(&device, index, &piece.flat, packed.view_mut()).err());
            }
        }
    }
    assert_eq!(refused.len(), 1);
    assert!(refused[0].to_string().contains(&format!("{UP} holds NaN, expected finite weights")));
    for (how, expected) in [
        (
            json!({"quant_method": "fp8", "weight_block_size": [64, 64]}),
            "quantization_config.weight_block_size is [64,64], but FP8 weights are read in blocks of [128, 128] alone; use \
             the unquantised model",
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "quantization_config.quant_method is \"compressed-tensors\", but only weights that bitsandbytes quantised, and \
             FP8 weights",
        ),
    ] {
        let folder = channel(&|_| {});
        set_quantisation(folder.path(), &how);
        let message = refusal(folder.path());
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn matrices_that_fp8_products_cannot_have_are_refused_by_name() {
    // Its feed-forward layers are 24 wide.
    let mut spec = Golden::new("llama").decoder.spec().clone();
    let check = |spec| Packing::check_fp8(&Decoder::new(spec, 16).unwrap(), DType::Bf16);
    assert_eq!(
        check(spec.clone()).unwrap_err().to_string(),
        "model.layers.0.mlp.down_proj.weight is of a matrix [16, 24], which FP8 products cannot have: both must be multiples \
         of 16; remove compute.fp8_matmul"
    );
    spec.mlp.width = 32;
    check(spec).unwrap();
}
