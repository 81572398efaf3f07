//! Values of every storage type, against PyPI's `gguf` (`data/make.py`).

use std::path::Path;

use tandem_gguf::Gguf;

fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn values_of_every_type_equal_those_of_pypi_bit_for_bit() {
    let (file, golden) =
        (std::fs::read(data("quants.gguf")).unwrap(), std::fs::read(data("quants.f32")).unwrap());
    let golden: Vec<f32> = golden.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let gguf = Gguf::open(&data("quants.gguf")).unwrap();
    assert_eq!(gguf.tensors().len(), 13);
    let mut golden = golden.as_slice();
    for tensor in gguf.tensors() {
        let count = tensor.shape.iter().product();
        let (expected, rest) = golden.split_at(count);
        golden = rest;
        let bytes = &file[tensor.bytes.clone()];
        let mut found = vec![0.0; count];
        tensor.quant.read(bytes, 0, &mut found);
        assert_eq!(bits(&found), bits(expected), "{}", tensor.name);
        // A range that cuts blocks.
        let mut part = vec![0.0; count - 12];
        tensor.quant.read(bytes, 5, &mut part);
        assert_eq!(bits(&part), bits(&expected[5..count - 7]), "{}", tensor.name);
    }
    assert!(golden.is_empty());
}
