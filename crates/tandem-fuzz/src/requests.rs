//! Requests to the server.

use std::cell::OnceCell;

use tandem_cli::Requests;
use tandem_kernels::DType;
use tandem_model::init::init_layer;
use tandem_model::io::save::SHARD_BYTES;
use tandem_model::{Decoder, ModelFolder, Save};

use crate::{scratch, tiny};

/// Most bytes of an answer to a refused request.
const MOST_ANSWER: usize = 16 << 10;

/// Opens the tiny model with as many tokens as its tokenizer has.
fn open() -> Requests {
    let config = tiny::CONFIG.replace("\"vocab_size\": 16", "\"vocab_size\": 512");
    let template = scratch::with_file("served-config", "config.json", config.as_bytes());
    let template = ModelFolder::open(&template).expect("the tiny model's config");
    let decoder = Decoder::new(template.spec().clone(), 1).expect("the tiny model");
    let folder = scratch::folder("served");
    let save = Save { template: &template, decoder: &decoder, dtype: DType::F32, shard_bytes: SHARD_BYTES };
    let written = save.write(&folder, &mut |layer, flat| {
        init_layer(&decoder, layer, 1, flat);
        Ok(())
    });
    written.expect("a model in a temporary folder");
    for (name, text) in [
        ("tokenizer.json", tiny::TOKENIZER[0]),
        ("tokenizer_config.json", tiny::TOKENIZER[1]),
        ("chat_template.jinja", tiny::TEMPLATE),
    ] {
        std::fs::write(folder.join(name), text).expect("a file in a temporary folder");
    }
    Requests::open(&folder).expect("the tiny model")
}

/// Reads a request's body as one of chat completions, and of text completions. A refused one gets JSON with a
/// client's error.
pub(crate) fn body(bytes: &[u8]) {
    thread_local! {
        static SERVER: OnceCell<Requests> = const { OnceCell::new() };
    }
    SERVER.with(|server| {
        let server = server.get_or_init(open);
        for is_chat in [true, false] {
            let Err((status, answer)) = server.read(is_chat, bytes) else { continue };
            assert!((400..500).contains(&status) && answer.len() < MOST_ANSWER, "{status}: {answer}");
            let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
            assert!(answer["error"]["message"].is_string(), "{answer}");
        }
    });
}
