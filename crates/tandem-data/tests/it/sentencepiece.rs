//! SentencePiece tokenizers of GGUF files: the tokens and texts of transformers
//! (`goldens/gguf_sentencepiece.py`).

use std::path::{Path, PathBuf};

use tandem_data::tokenizer::Tokenizer;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/gguf/sentencepiece").join(name)
}

#[test]
fn tokens_and_texts_are_those_of_transformers() {
    for name in ["llama", "gemma", "phi"] {
        let tokenizer = Tokenizer::from_folder(golden(&format!("{name}.gguf"))).unwrap();
        let cases: Vec<(String, Vec<u32>, String)> =
            serde_json::from_slice(&std::fs::read(golden(&format!("{name}.json"))).unwrap()).unwrap();
        assert!(cases.len() >= 10, "{name}");
        for (text, ids, decoded) in cases {
            assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), decoded, "{name}: {text:?}");
        }
    }
}
