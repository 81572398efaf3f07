// Weights from a formula: the twin of formula.py, where the formula is written down.
//
// Tests include this file with `#[path]`; it is not part of any crate.

use std::path::Path;

fn fnv1a32(text: &str) -> u32 {
    text.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Element `index` of the stream called `name`, in [-1, 1).
fn unit(name_hash: u32, index: u32) -> f32 {
    let mut x = name_hash.wrapping_add(index.wrapping_mul(0x9E37_79B9));
    x ^= x >> 16;
    x = x.wrapping_mul(0x85EB_CA6B);
    x ^= x >> 13;
    x = x.wrapping_mul(0xC2B2_AE35);
    x ^= x >> 16;
    (x >> 8) as f32 * (1.0 / 8_388_608.0) - 1.0
}

/// (centre, spread) of the tensor called `name`.
fn scale(name: &str) -> (f32, f32) {
    let mut parts = name.rsplit('.');
    let last = parts.next().unwrap_or_default();
    let parent = parts.next().unwrap_or_default();
    if last == "bias" {
        (0.0, 0.05)
    } else if last == "lora_magnitude_vector" {
        (0.5, 0.1)
    } else if parent.contains("norm") || parent.starts_with("ln_") {
        (1.0, 0.1)
    } else {
        (0.0, 0.15)
    }
}

/// The tensor called `name`, row-major.
pub fn weight(name: &str, count: usize) -> Vec<f32> {
    let ((centre, spread), hash) = (scale(name), fnv1a32(name));
    (0..count as u32).map(|i| centre + spread * unit(hash, i)).collect()
}

/// The same tensor moved a little: a reference model that is not the policy.
pub fn perturbed(name: &str, count: usize) -> Vec<f32> {
    let hash = fnv1a32(&format!("{name}#reference"));
    weight(name, count).into_iter().zip(0..).map(|(w, i)| w + 0.02 * unit(hash, i)).collect()
}

/// Writes `model.safetensors` (f32) into a folder: tensors by name and shape, values from `make`.
pub fn write_safetensors(
    folder: &Path,
    tensors: &[(String, Vec<usize>)],
    make: impl Fn(&str, usize) -> Vec<f32>,
) -> std::io::Result<()> {
    write_tensors(&folder.join("model.safetensors"), tensors, make)
}

/// As [`write_safetensors`], a file of any name.
pub fn write_tensors(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    make: impl Fn(&str, usize) -> Vec<f32>,
) -> std::io::Result<()> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = data.len();
        for value in make(name, shape.iter().product()) {
            data.extend_from_slice(&value.to_le_bytes());
        }
        header.insert(
            name.clone(),
            serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    std::fs::write(path, file)
}
