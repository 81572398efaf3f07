//! Malformed files: an error that names what is wrong, and no large allocation.

use std::path::PathBuf;

use tandem_gguf::Gguf;

/// Writer of small GGUF files.
struct Bytes(Vec<u8>);

impl Bytes {
    /// Begins a file that announces these counts.
    fn new(tensors: u64, keys: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }

    fn u32(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(mut self, n: u64) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Self {
        let mut longer = self.u64(text.len() as u64);
        longer.0.extend(text.as_bytes());
        longer
    }

    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let longer = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(longer, |bytes, &dim| bytes.u64(dim)).u32(kind).u64(offset)
    }

    /// Returns the message of the error that opening the file gives.
    fn refusal(self) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().join("x.gguf");
        std::fs::write(&path, self.0).unwrap();
        Gguf::open(&path).unwrap_err().to_string()
    }
}

fn refused(bytes: Bytes, expected: &str) {
    let message = bytes.refusal();
    assert!(message.contains("x.gguf") && message.contains(expected), "{message}");
}

#[test]
fn counts_and_sizes_beyond_the_file_are_refused() {
    let huge = u64::MAX;
    refused(Bytes::new(0, huge), "metadata keys");
    refused(Bytes::new(huge, 0), "tensors");
    refused(Bytes::new(0, 1).u64(huge).u64(0), "bytes of a metadata key");
    refused(Bytes::new(0, 1).text("a.b").u32(9).u32(8).u64(huge), "elements of a.b");
    refused(Bytes::new(0, 1).text("a.b").u32(9).u32(0).u64(1 << 40), "elements of a.b");
    refused(Bytes::new(1, 0).tensor("blk.0.attn_q.weight", &[huge, 32], 0, 0), "blk.0.attn_q.weight");
    refused(Bytes::new(1, 0).tensor("w", &[1 << 40, 1 << 40], 0, 0), "tensor w");
    refused(Bytes::new(1, 0).tensor("w", &[64], 0, huge - 31), "tensor w");
    refused(Bytes::new(1, 0).tensor("w", &[64], 0, 0), "ends beyond the file's");
}

#[test]
fn malformed_headers_are_refused_by_name() {
    refused(Bytes(b"GGML1234".to_vec()), "not a GGUF file");
    refused(Bytes(b"GGUF".to_vec()).u32(1).u64(0).u64(0), "version 1");
    refused(Bytes(b"GGUF".to_vec()).u32(3 << 24).u64(0).u64(0), "big-endian");
    refused(Bytes::new(0, 1).text("a.b").u32(99).u64(0), "a.b has unknown type 99");
    refused(Bytes::new(0, 1).text("a.b").u32(9).u32(9).u64(1).u64(0), "array of arrays");
    refused(Bytes::new(1, 0).tensor("w", &[256], 16, 0), "w is iq2_xxs, which is not supported");
    refused(Bytes::new(1, 0).tensor("w", &[31], 2, 0), "multiple of 32");
    refused(Bytes::new(1, 0).tensor("w", &[32], 2, 7), "no multiple of the alignment");
    refused(Bytes::new(1, 0).tensor("w", &[1; 5], 0, 0), "5 dimensions");
    refused(Bytes::new(0, 1).text("split.count").u32(4).u32(3), "llama-gguf-split --merge");
    refused(Bytes::new(0, 1).text("general.alignment").u32(4).u32(24), "power of two");
}

#[test]
fn every_truncation_is_refused() {
    let whole = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quants.gguf")).unwrap();
    for len in (0..whole.len() - 32).step_by(7) {
        let message = Bytes(whole[..len].to_vec()).refusal();
        assert!(message.contains("cut short"), "{len}: {message}");
    }
}
