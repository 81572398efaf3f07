//! Typed access to a `config.json`, with errors that name the key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tandem_kernels::ops::Activation;

use super::{RotaryScaling, RotarySpec};
use crate::{ModelError, Result};

/// Parsed `config.json`. A key that is `null` counts as absent.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Config {
    /// Reads a config file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| ModelError::io(path, e))?;
        Self::parse(path, &text)
    }

    /// Parses the text of a config file; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(Self { path: path.to_owned(), map }),
            Ok(_) => Err(ModelError::format(path, "not a JSON object")),
            Err(e) => Err(ModelError::format(path, format!("not JSON: {e}"))),
        }
    }

    /// Returns the keys and values as they stand in the file.
    pub fn as_map(&self) -> &Map<String, Value> {
        &self.map
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes an error about this config.
    pub fn error(&self, reason: impl Into<String>) -> ModelError {
        ModelError::Config { path: self.path.clone(), reason: reason.into() }
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn expected(&self, key: &str, what: &str, found: &Value) -> ModelError {
        self.error(format!("{key} is {found}, expected {what}"))
    }

    /// Returns a positive integer, if the key is present.
    pub fn count_if(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n > 0 => Ok(Some(n as usize)),
            _ => Err(self.expected(key, "a positive integer", value)),
        }
    }

    /// Returns a positive integer that must be present.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.count_if(key)?.ok_or_else(|| self.error(format!("{key} is missing")))
    }

    /// Returns a token's id, if the key is present.
    pub fn token_id(&self, key: &str) -> Result<Option<u32>> {
        // Older folders have -1 where there is none.
        let Some(value) = self.value(key).filter(|value| value.as_i64() != Some(-1)) else { return Ok(None) };
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map_or_else(|| Err(self.expected(key, "a token id", value)), |id| Ok(Some(id)))
    }

    /// Returns a number, or the default.
    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.value(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.expected(key, "a number", value))
    }

    /// Returns a flag, or the default.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.value(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.expected(key, "true or false", value))
    }

    /// Returns a string, or the default.
    pub fn word<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str> {
        let Some(value) = self.value(key) else { return Ok(default) };
        value.as_str().ok_or_else(|| self.expected(key, "a string", value))
    }

    /// Refuses a flag that turns on something that is not supported.
    pub fn refuse_flag(&self, key: &str) -> Result<()> {
        if self.flag(key, false)? {
            return Err(self.error(format!("{key} is true, which is not supported")));
        }
        Ok(())
    }

    /// Returns the activation named by `key`.
    pub fn activation(&self, key: &str, default: &str) -> Result<Activation> {
        Ok(match self.word(key, default)? {
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            other => {
                return Err(self.error(format!(
                    "{key} is \"{other}\", which is not supported; known: silu, gelu, gelu_new, gelu_pytorch_tanh, \
                     gelu_fast, relu"
                )));
            }
        })
    }

    /// Returns query heads, key/value heads and head width.
    pub fn heads(&self, default_head_dim: Option<usize>) -> Result<(usize, usize, usize)> {
        let (hidden, heads) = (self.count("hidden_size")?, self.count("num_attention_heads")?);
        let kv_heads = self.count_if("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(
                self.error(format!("{heads} attention heads do not share {kv_heads} key/value heads evenly"))
            );
        }
        let head_dim = match self.count_if("head_dim")?.or(default_head_dim) {
            Some(width) => width,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(
                    self.error(format!("hidden_size {hidden} is not a multiple of {heads} attention heads"))
                );
            }
        };
        Ok((heads, kv_heads, head_dim))
    }

    /// Returns `eos_token_id`: none, one, or a list.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>> {
        let Some(value) = self.value("eos_token_id") else { return Ok(Vec::new()) };
        let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids =
            value.as_array().map_or_else(|| one(value).map(|id| vec![id]), |l| l.iter().map(one).collect());
        ids.ok_or_else(|| self.expected("eos_token_id", "a token id or a list of them", value))
    }

    /// Returns each block's window, from `sliding_window`, `use_sliding_window`,
    /// `max_window_layers` and `layer_types`.
    pub fn windows(&self, layers: usize) -> Result<Vec<Option<u32>>> {
        let used = self.flag("use_sliding_window", false)?;
        let window = self.count_if("sliding_window")?.filter(|_| used).map(|w| w as u32);
        let first = self.count_if("max_window_layers")?.unwrap_or(28);
        let Some(types) = self.value("layer_types") else {
            return Ok((0..layers).map(|i| window.filter(|_| i >= first)).collect());
        };
        let types = types.as_array().filter(|t| t.len() == layers);
        let types = types.ok_or_else(|| self.error(format!("layer_types does not list {layers} layers")))?;
        types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") if window.is_some() => Ok(window),
                _ => Err(self.error(format!("layer_types contains {kind}, which is not supported here"))),
            })
            .collect()
    }

    /// Returns the rotary embedding, from `rope_parameters` (transformers 5) or the older keys.
    pub fn rotary(&self, head_dim: usize, default_fraction: f64) -> Result<RotarySpec> {
        let empty = Map::new();
        let table = match self.value("rope_parameters").or_else(|| self.value("rope_scaling")) {
            None => &empty,
            Some(Value::Object(table)) => table,
            Some(other) => return Err(self.expected("rope_parameters", "an object", other)),
        };
        if let Some((layer_type, _)) = table.iter().find(|(_, v)| v.is_object()) {
            return Err(self.error(format!(
                "rope_parameters differ by layer (\"{layer_type}\"), which is not supported"
            )));
        }
        let inner = |key: &str| table.get(key).and_then(Value::as_f64);
        let older = |keys: &[&str]| keys.iter().find_map(|k| self.value(k)?.as_f64());
        let theta =
            inner("rope_theta").or_else(|| older(&["rope_theta", "rotary_emb_base"])).unwrap_or(10_000.0);
        let fraction = inner("partial_rotary_factor")
            .or_else(|| older(&["partial_rotary_factor", "rotary_pct"]))
            .unwrap_or(default_fraction);
        let dims = (head_dim as f64 * fraction) as usize;
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            return Err(self.error(format!("{fraction} of a head of {head_dim} is {dims} rotary dimensions")));
        }
        let required = |key: &str| {
            inner(key).ok_or_else(|| self.error(format!("rope_parameters has no number for {key}")))
        };
        let kind = table.get("rope_type").or_else(|| table.get("type")).and_then(Value::as_str);
        let scaling = match kind.unwrap_or("default") {
            "default" => RotaryScaling::Default,
            "linear" => RotaryScaling::Linear { factor: required("factor")? },
            "llama3" => RotaryScaling::Llama3 {
                factor: required("factor")?,
                low_frequency: required("low_freq_factor")?,
                high_frequency: required("high_freq_factor")?,
                original_positions: inner("original_max_position_embeddings")
                    .or_else(|| older(&["original_max_position_embeddings", "max_position_embeddings"]))
                    .ok_or_else(|| self.error("original_max_position_embeddings is missing"))?,
            },
            other => {
                return Err(self.error(format!(
                    "rope_type is \"{other}\", which is not supported; known: default, linear, llama3"
                )));
            }
        };
        Ok(RotarySpec { theta, dims, scaling })
    }
}
