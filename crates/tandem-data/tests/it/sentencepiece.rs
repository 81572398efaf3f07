//! SentencePiece tokenizers of GGUF files: the tokens and texts of transformers
//! (`goldens/gguf_sentencepiece.py`).

use std::path::{Path, PathBuf};

use tandem_data::text_stream::TextStream;
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

/// The decoder leaves out the space at the beginning of a text.
#[test]
fn a_text_goes_on_with_its_space() {
    let tokenizer = Tokenizer::from_folder(golden("llama.gguf")).unwrap();
    let whole = "Hello world and others";
    let ids = tokenizer.encode(whole).unwrap();
    let text_of = |mut stream: TextStream, ids: &[u32]| {
        let pieces: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces + &stream.finish().unwrap()
    };
    assert_eq!(text_of(TextStream::new(&tokenizer, &[]), &ids), whole);
    let inside: String = ids.iter().map(|&id| tokenizer.text_inside(id, true).unwrap()).collect();
    assert_eq!(inside, format!(" {whole}"));
    // Behind the token that begins a text.
    let bytes: Vec<u8> = ids[1..].iter().flat_map(|&id| tokenizer.bytes(id).unwrap()).collect();
    assert_eq!(bytes, inside.as_bytes());
    let mut has_space = false;
    for at in 1..ids.len() {
        let before = tokenizer.decode(&ids[..at], true).unwrap();
        let rest = text_of(TextStream::continuing(&tokenizer, &[], &ids[..at]), &ids[at..]);
        assert_eq!(format!("{before}{rest}"), whole, "{at}");
        has_space |= rest.starts_with(' ');
    }
    assert!(has_space);
}
