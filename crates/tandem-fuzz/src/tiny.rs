//! A model of a few hundred parameters, and folders of it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::DType;
use tandem_model::init::init_layer;
use tandem_model::io::save::SHARD_BYTES;
use tandem_model::{Adapter, Decoder, ModelFolder, PeftFolder, Save};

/// `config.json`.
pub const CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
  "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-05,
  "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
  "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0
}"#;

/// `adapter_config.json`.
pub const ADAPTER: &str = r#"{
  "base_model_name_or_path": "../base", "bias": "none", "fan_in_fan_out": false, "lora_alpha": 4,
  "lora_dropout": 0.0, "modules_to_save": null, "peft_type": "LORA", "r": 2, "rank_pattern": {}, "alpha_pattern": {},
  "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "use_dora": false, "use_rslora": false
}"#;

/// `tokenizer.json` and `tokenizer_config.json` of a small vocabulary.
pub const TOKENIZER: [&str; 2] = [
    include_str!("../../../goldens/small/model/tokenizer.json"),
    include_str!("../../../goldens/small/model/tokenizer_config.json"),
];

/// Chat template of the same model.
pub const TEMPLATE: &str = include_str!("../../../goldens/small/model/chat_template.jinja");

/// Positions of the tiny model.
const POSITIONS: usize = 32;

/// Writes the `config.json` into a folder, and opens it.
pub fn open(folder: &Path) -> ModelFolder {
    let config = folder.join("config.json");
    if !config.is_file() {
        std::fs::write(&config, CONFIG).expect("a config in a temporary folder");
    }
    ModelFolder::open(folder).expect("the tiny model's config")
}

/// Returns the tiny model's decoder.
pub fn decoder() -> &'static Decoder {
    static DECODER: OnceLock<Decoder> = OnceLock::new();
    DECODER.get_or_init(|| {
        let folder = crate::scratch::folder("tiny");
        Decoder::new(open(&folder).spec().clone(), POSITIONS).expect("the tiny model")
    })
}

/// Returns the decoder under the adapter of [`ADAPTER`].
pub fn adapted() -> &'static Decoder {
    static DECODER: OnceLock<Decoder> = OnceLock::new();
    DECODER.get_or_init(|| {
        let folder = crate::scratch::with_file("tiny-adapter", "adapter_config.json", ADAPTER.as_bytes());
        let config = PeftFolder::open(&folder).expect("the tiny adapter's config").config().clone();
        let adapter = Adapter::new(config, decoder().spec()).expect("the tiny adapter");
        decoder().clone().with_adapter(adapter)
    })
}

/// Returns the tokenizer of [`TOKENIZER`].
pub fn tokenizer() -> &'static Arc<Tokenizer> {
    static LOADED: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    LOADED.get_or_init(|| {
        let folder = tokenizer_folder("tiny-tokenizer");
        std::fs::write(folder.join("chat_template.jinja"), TEMPLATE).expect("a template");
        Arc::new(Tokenizer::from_folder(folder).expect("the tiny tokenizer"))
    })
}

pub(crate) fn tokenizer_folder(name: &str) -> std::path::PathBuf {
    crate::scratch::with_file(name, "tokenizer_config.json", TOKENIZER[1].as_bytes());
    crate::scratch::with_file(name, "tokenizer.json", TOKENIZER[0].as_bytes())
}

/// Writes the tiny model with random weights into `destination`, and as `policy.pt` beside it.
///
/// # Errors
/// As [`Save::write`].
pub fn write_weights(destination: &Path) -> tandem_model::Result<()> {
    let folder = crate::scratch::folder("tiny");
    let template = open(&folder);
    let save = Save { template: &template, decoder: decoder(), dtype: DType::F32, shard_bytes: SHARD_BYTES };
    save.write(destination, &mut |layer, flat| {
        init_layer(decoder(), layer, 1, flat);
        Ok(())
    })?;
    tandem_model::write_policy(&destination.join("policy.pt"), decoder(), DType::F32, &mut |layer, flat| {
        init_layer(decoder(), layer, 1, flat);
        Ok(())
    })?;
    tandem_model::adapter::save_adapter(
        &destination.join("adapter"),
        &template,
        adapted(),
        &mut |layer, flat| {
            tandem_model::adapter::init_layer(adapted(), layer, 1, flat);
            Ok(())
        },
    )
}
