//! The teacher of a distillation of the small model.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::formula;

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small")
}

/// Writes the golden's teacher: the small model's tokenizer, and weights of another size.
pub(crate) fn write_teacher(folder: &Path) {
    let golden = fs::read_to_string(small().join("distill.json")).unwrap();
    let teacher = &serde_json::from_str::<Value>(&golden).unwrap()["teacher"];
    fs::create_dir_all(folder).unwrap();
    for file in fs::read_dir(small().join("model")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in teacher["config"].as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(&path, config.to_string()).unwrap();
    let shape =
        |shape: &Value| shape.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let tensors = teacher["tensors"].as_object().unwrap();
    let tensors: Vec<_> = tensors.iter().map(|(name, of)| (name.clone(), shape(of))).collect();
    formula::write_safetensors(folder, &tensors, formula::weight).unwrap();
}
