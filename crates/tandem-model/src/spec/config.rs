//! Typed access to a `config.json`, with errors that name the key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tandem_files::MAX_CONFIG;
use tandem_kernels::ops::Activation;

use super::{QueryScale, RotaryScaling, RotarySpec};
use crate::{ModelError, Result};

/// Largest size that a config may name. Products of two sizes then fit 64 bits.
const LARGEST_COUNT: u64 = i32::MAX as u64;

/// Largest width, number of heads or vocabulary that a config may name.
const LARGEST_WIDTH: u64 = 1 << 24;

/// Returns the largest size that a config may name under `key`.
fn largest(key: &str) -> u64 {
    let ends = ["_size", "_dim", "_heads", "n_embd", "n_inner", "n_head"];
    let is_width = ends.iter().any(|end| key.ends_with(end));
    if is_width { LARGEST_WIDTH } else { LARGEST_COUNT }
}

/// Most blocks that a config may name. Lists by block are made before any weight is read.
const MOST_LAYERS: usize = 16_384;

/// Largest width of a head. Tables of rotary angles are made by position before any weight is read.
const MOST_HEAD_WIDTH: usize = 8192;

/// Key of a vision–language model's text model.
const TEXT_CONFIG: &str = "text_config";

/// Returns a number above 0 that f32 holds.
fn as_positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| *number > 0.0 && (*number as f32).is_normal())
}

/// Parsed `config.json`. A key that is `null` counts as absent.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    /// Key of the file whose value this is, if it is not the whole file.
    key: Option<&'static str>,
    map: Map<String, Value>,
}

impl Config {
    /// Reads a config file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = tandem_files::read_text(path, MAX_CONFIG).map_err(|e| ModelError::io(path, e))?;
        Self::parse(path, &text)
    }

    /// Parses the text of a config file; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(Self { path: path.to_owned(), key: None, map }),
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
        let reason = match self.key {
            None => reason.into(),
            Some(key) => format!("{key}: {}", reason.into()),
        };
        ModelError::Config { path: self.path.clone(), reason }
    }

    /// Returns the config of a vision–language model's text model: `text_config`, or this config in
    /// older folders that have no such key.
    pub(crate) fn text_config(&self) -> Result<Self> {
        match (self.inner(), self.value(TEXT_CONFIG)) {
            (Some(map), _) => Ok(Self { path: self.path.clone(), key: Some(TEXT_CONFIG), map: map.clone() }),
            (None, Some(other)) => Err(self.expected(TEXT_CONFIG, "an object", other)),
            (None, None) => Ok(self.clone()),
        }
    }

    /// Returns the keys of an inner text model's config, if there is one.
    fn inner(&self) -> Option<&Map<String, Value>> {
        self.value(TEXT_CONFIG)?.as_object()
    }

    /// Adds numbers under the keys that are absent: transformers leaves out of an inner config what
    /// its class has anyway.
    #[must_use]
    pub(crate) fn with_defaults(mut self, defaults: &[(&str, u64)]) -> Self {
        for &(key, default) in defaults {
            self.map.entry(key).or_insert_with(|| default.into());
        }
        self
    }

    /// Names the kind of rotary embedding with positions in three dimensions, which are equal in text,
    /// as the ordinary one.
    #[must_use]
    pub(crate) fn without_mrope(mut self) -> Self {
        for table in ["rope_scaling", "rope_parameters"] {
            let Some(Value::Object(table)) = self.map.get_mut(table) else { continue };
            for key in ["type", "rope_type"] {
                if table.get(key).is_some_and(|kind| kind == "mrope") {
                    table.insert(key.into(), "default".into());
                }
            }
        }
        self
    }

    /// Returns a string that must be one of those listed.
    pub(crate) fn expect_word<'a>(&'a self, key: &str, known: &[&str]) -> Result<&'a str> {
        match self.word(key, "")? {
            word if known.contains(&word) => Ok(word),
            word => Err(self.error(format!(
                "{key} is \"{word}\", which is not supported here; known: {}",
                known.join(", ")
            ))),
        }
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
            Some(n) if n > 0 && n <= largest(key) => Ok(Some(n as usize)),
            Some(n) if n > 0 => Err(self.expected(key, &format!("at most {}", largest(key)), value)),
            _ => Err(self.expected(key, "a positive integer", value)),
        }
    }

    /// Returns a positive integer that must be present.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.count_if(key)?.ok_or_else(|| self.error(format!("{key} is missing")))
    }

    /// Returns a positive integer of at most `most`.
    pub(crate) fn at_most(&self, key: &str, most: usize) -> Result<usize> {
        match self.count(key)? {
            count if count <= most => Ok(count),
            count => Err(self.error(format!("{key} is {count}, expected at most {most}"))),
        }
    }

    /// Returns the number of blocks.
    pub fn num_layers(&self, key: &str) -> Result<usize> {
        self.at_most(key, MOST_LAYERS)
    }

    /// Returns an integer that may be zero, if the key is present.
    pub fn count_or_zero(&self, key: &str) -> Result<Option<usize>> {
        match self.value(key) {
            Some(value) if value.as_u64() == Some(0) => Ok(Some(0)),
            _ => self.count_if(key),
        }
    }

    /// Returns a token's id, if the key is present.
    pub fn token_id(&self, key: &str) -> Result<Option<u32>> {
        // Older folders have -1 where there is none.
        let Some(value) = self.value(key).filter(|value| value.as_i64() != Some(-1)) else { return Ok(None) };
        let id = value.as_u64().filter(|id| *id < LARGEST_WIDTH).map(|id| id as u32);
        id.map_or_else(|| Err(self.expected(key, "a token id", value)), |id| Ok(Some(id)))
    }

    /// Returns the row of the token table that is the padding's. -1 is the last one, as in torch.
    pub(crate) fn padding_row(&self) -> Result<Option<u32>> {
        match self.value("pad_token_id").and_then(Value::as_i64) {
            Some(-1) => Ok(self.count("vocab_size")?.checked_sub(1).map(|last| last as u32)),
            _ => self.token_id("pad_token_id"),
        }
    }

    /// Returns a number, or the default.
    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.value(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| (*number as f32).is_finite());
        number.ok_or_else(|| self.expected(key, "a number that f32 holds", value))
    }

    /// Returns the number that a norm adds to a mean square or a variance, or the default.
    pub fn epsilon(&self, key: &str, default: f64) -> Result<f64> {
        match self.number(key, default)? {
            epsilon if epsilon > 0.0 && epsilon <= 1.0 => Ok(epsilon),
            epsilon => Err(self.error(format!("{key} is {epsilon}, expected a number above 0, at most 1"))),
        }
    }

    /// Returns a positive number, or the default.
    pub fn positive(&self, key: &str, default: f64) -> Result<f64> {
        match self.number(key, default)? {
            n if n > 0.0 => Ok(n),
            n => Err(self.error(format!("{key} is {n}, expected a positive number"))),
        }
    }

    /// Returns a number of at least 0, or the default.
    pub fn not_negative(&self, key: &str, default: f64) -> Result<f64> {
        match self.number(key, default)? {
            n if n >= 0.0 => Ok(n),
            n => Err(self.error(format!("{key} is {n}, expected a number of at least 0"))),
        }
    }

    /// Returns a soft cap: the default where the key is absent, none where it is `null`.
    pub fn cap(&self, key: &str, default: Option<f64>) -> Result<Option<f32>> {
        Ok(match self.map.get(key) {
            None => default.map(|cap| cap as f32),
            Some(Value::Null) => None,
            Some(_) => Some(self.positive(key, 1.0)? as f32),
        })
    }

    /// Returns a flag for each layer, written as 0 and 1 or as booleans, if the key is present.
    pub fn flags_by_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let one = |v: &Value| v.as_bool().or_else(|| v.as_u64().filter(|n| *n < 2).map(|n| n == 1));
        let list = value.as_array().filter(|list| list.len() == layers);
        let list = list.and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.expected(key, &format!("a list of {layers} times 0 or 1"), value))
    }

    /// Returns whether the config has a key.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// Returns whether the config has rotary parameters.
    pub fn has_rotary(&self) -> bool {
        self.value("rope_parameters").or_else(|| self.value("rope_scaling")).is_some()
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

    /// Lists the keys that ask for dropout in training, with their rates.
    pub fn dropout(&self) -> Vec<(&str, f64)> {
        const KEYS: [&str; 8] = [
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "embedding_dropout",
            "embd_dropout",
            "hidden_dropout",
            "resid_pdrop",
            "residual_dropout",
        ];
        let inner = self.inner();
        let value = |key: &str| inner.and_then(|map| map.get(key)).or_else(|| self.value(key));
        let rate = |key: &&'static str| Some((*key, value(key)?.as_f64().filter(|rate| *rate > 0.0)?));
        KEYS.iter().filter_map(rate).collect()
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
            "relu2" => Activation::ReluSquared,
            other => {
                return Err(self.error(format!(
                    "{key} is \"{other}\", which is not supported; known: silu, gelu, gelu_new, gelu_pytorch_tanh, \
                     gelu_fast, relu, relu2"
                )));
            }
        })
    }

    /// Returns query heads, key/value heads and head width.
    pub fn heads(&self, default_head_dim: Option<usize>) -> Result<(usize, usize, usize)> {
        let (hidden, heads) = (self.count("hidden_size")?, self.count("num_attention_heads")?);
        let kv_heads = self.count_if("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.error(format!(
                "num_attention_heads is {heads}, expected a multiple of num_key_value_heads, {kv_heads}"
            )));
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
        if head_dim > MOST_HEAD_WIDTH {
            return Err(self.error(format!("head_dim is {head_dim}, expected at most {MOST_HEAD_WIDTH}")));
        }
        Ok((heads, kv_heads, head_dim))
    }

    /// Checks the numbers of a `generation_config.json`. Its defaults of sampling are not used; a file in which
    /// they are no numbers is damaged.
    pub(crate) fn check_generation(&self) -> Result<()> {
        self.check_special_tokens()?;
        for key in ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"] {
            self.number(key, 0.0)?;
        }
        for key in ["top_k", "max_length", "max_new_tokens", "min_length", "num_beams"] {
            let Some(value) = self.value(key) else { continue };
            // Some write -1 where there is no limit.
            let is_count = value.as_i64().is_some_and(|count| (-1..=LARGEST_COUNT as i64).contains(&count));
            if !is_count {
                return Err(self.expected(key, &format!("an integer of at most {LARGEST_COUNT}"), value));
            }
        }
        self.flag("do_sample", false).map(drop)
    }

    /// Checks the ids of special tokens, which may be absent.
    pub(crate) fn check_special_tokens(&self) -> Result<()> {
        self.token_id("bos_token_id")?;
        self.token_id("pad_token_id")?;
        self.eos_token_ids().map(drop)
    }

    /// Returns `eos_token_id`: none, one, or a list.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>> {
        let Some(value) = self.value("eos_token_id") else { return Ok(Vec::new()) };
        let one = |v: &Value| v.as_u64().filter(|id| *id < LARGEST_WIDTH).map(|id| id as u32);
        let ids =
            value.as_array().map_or_else(|| one(value).map(|id| vec![id]), |l| l.iter().map(one).collect());
        ids.ok_or_else(|| self.expected("eos_token_id", "a token id or a list of them", value))
    }

    /// Returns the sliding window: the default where the key is absent, none where it is `null`.
    pub fn sliding_window(&self, default: Option<u32>) -> Result<Option<u32>> {
        match self.map.get("sliding_window") {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => Ok(self.count_if("sliding_window")?.map(|window| window as u32)),
        }
    }

    /// Returns each block's window: that of `sliding_window` where `layer_types`, or else `slides`, says
    /// so.
    pub fn windows(
        &self,
        layers: usize,
        window: Option<u32>,
        slides: impl Fn(usize) -> bool,
    ) -> Result<Vec<Option<u32>>> {
        let types = match self.value("layer_types") {
            None => (0..layers).map(slides).collect(),
            Some(types) => self.layer_types(types, layers, "sliding_attention")?,
        };
        let window_of = |slides: bool| match (slides, window) {
            (false, _) => Ok(None),
            (true, Some(window)) => Ok(Some(window)),
            (true, None) => {
                Err(self.error("layers have sliding_attention, but sliding_window is absent or null"))
            }
        };
        types.into_iter().map(window_of).collect()
    }

    /// Returns for each block whether it has linear attention: where `layer_types`, or else `is_linear`,
    /// says so.
    pub(crate) fn linear_blocks(
        &self,
        blocks: usize,
        is_linear: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>> {
        match self.value("layer_types") {
            None => Ok((0..blocks).map(is_linear).collect()),
            Some(types) => self.layer_types(types, blocks, "linear_attention"),
        }
    }

    /// Returns for each layer whether its attention is of this kind rather than full.
    fn layer_types(&self, types: &Value, layers: usize, other: &str) -> Result<Vec<bool>> {
        let list = types.as_array().filter(|list| list.len() == layers);
        let list = list.ok_or_else(|| self.error(format!("layer_types does not list {layers} layers")))?;
        list.iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(false),
                Some(kind) if kind == other => Ok(true),
                _ => Err(self.error(format!("layer_types contains {kind}, which is not supported here"))),
            })
            .collect()
    }

    /// Refuses keys of the config that change the model in a way that is not supported.
    pub fn refuse_key(&self, key: &str) -> Result<()> {
        match self.value(key) {
            None => Ok(()),
            Some(value) => {
                Err(self.error(format!("{key} is {value}, which is not supported in this family")))
            }
        }
    }

    /// Returns the rotary embedding, from `rope_parameters` (transformers 5) or the older keys.
    pub(crate) fn rotary(&self, head_dim: usize, keys: RotaryKeys) -> Result<RotarySpec> {
        let (name, table) = self.rotary_table()?;
        if let Some((layer_type, _)) = table.iter().find(|(_, v)| v.is_object()) {
            return Err(self.error(format!(
                "{name} differ by layer (\"{layer_type}\"), which is not supported in this family"
            )));
        }
        RotaryTable { config: self, name, table, outer: table }.spec(head_dim, keys)
    }

    /// Returns the rotary embeddings of full and of sliding attention: from `rope_parameters` by layer
    /// type, or from the older keys, which scale full attention alone; `local_theta` names the older key
    /// of the base of sliding attention.
    pub(crate) fn rotary_by_type(
        &self,
        head_dim: usize,
        [full, sliding]: [RotaryKeys; 2],
        local_theta: Option<&str>,
    ) -> Result<[RotarySpec; 2]> {
        let (name, table) = self.rotary_table()?;
        let by_type = table.keys().any(|key| key == "full_attention" || key == "sliding_attention");
        if name == "rope_parameters" && !by_type && !table.is_empty() {
            return Err(self.error(
                "rope_parameters are expected by layer type here: {\"full_attention\": {…}, \"sliding_attention\": {…}}",
            ));
        }
        let empty = Map::new();
        let of = |key: &str| match table.get(key) {
            None | Some(Value::Null) => Ok(&empty),
            Some(Value::Object(table)) => Ok(table),
            Some(other) => Err(self.expected(&format!("{name}.{key}"), "an object", other)),
        };
        let full_table = if by_type { of("full_attention")? } else { table };
        let sliding_table = if by_type { of("sliding_attention")? } else { &empty };
        let full =
            RotaryTable { config: self, name, table: full_table, outer: table }.spec(head_dim, full)?;
        let theta = match local_theta {
            Some(key) => self.number(key, sliding.theta)?,
            None => sliding.theta,
        };
        let sliding = RotaryKeys { theta, theta_key: None, ..sliding };
        let sliding =
            RotaryTable { config: self, name, table: sliding_table, outer: table }.spec(head_dim, sliding)?;
        Ok([full, sliding])
    }

    /// Returns the scale of queries by position, which lies among the rotary parameters.
    pub(crate) fn query_scale(&self) -> Result<Option<QueryScale>> {
        let (name, table) = self.rotary_table()?;
        RotaryTable { config: self, name, table, outer: table }.query_scale()
    }

    /// Returns the table of rotary parameters and its key. As in transformers the older key wins.
    fn rotary_table(&self) -> Result<(&'static str, &Map<String, Value>)> {
        static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
        for key in ["rope_scaling", "rope_parameters"] {
            match self.value(key) {
                None => {}
                Some(Value::Object(table)) if table.is_empty() => {}
                Some(Value::Object(table)) => return Ok((key, table)),
                Some(other) => return Err(self.expected(key, "an object", other)),
            }
        }
        Ok(("rope_parameters", &EMPTY))
    }
}

/// How a family reads its rotary embedding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RotaryKeys {
    /// `rope_theta` where it is absent.
    pub(crate) theta: f64,
    /// Key of the base beside the table, as in older folders; `None` if it may lie in the table alone.
    pub(crate) theta_key: Option<&'static str>,
    /// Key of the rotating part beside the table.
    pub(crate) fraction_key: &'static str,
    /// Part of a head that rotates where `partial_rotary_factor` is absent. `None` if the family's
    /// heads always rotate whole, as those of Llama in transformers 5.
    pub(crate) fraction: Option<f64>,
    /// Whether "su" and "yarn" mean longrope, as in older folders of Phi-3.
    pub(crate) old_names_mean_longrope: bool,
    /// Whether "dynamic" with an `alpha` stretches the base once for all lengths, as in Hunyuan.
    pub(crate) alpha_stretches: bool,
}

impl RotaryKeys {
    /// Heads that rotate whole, with this base.
    pub(crate) const fn whole(theta: f64) -> Self {
        Self {
            theta,
            theta_key: Some("rope_theta"),
            fraction_key: "partial_rotary_factor",
            fraction: None,
            old_names_mean_longrope: false,
            alpha_stretches: false,
        }
    }

    /// Heads of which this fraction rotates unless the config says otherwise.
    pub(crate) const fn partial(fraction: f64) -> Self {
        Self { fraction: Some(fraction), ..Self::whole(10_000.0) }
    }
}

/// Rotary parameters in a config.
struct RotaryTable<'a> {
    config: &'a Config,
    /// Key of the table.
    name: &'static str,
    table: &'a Map<String, Value>,
    /// Table that `table` is an entry of; itself where layers do not differ.
    outer: &'a Map<String, Value>,
}

impl RotaryTable<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.table.get(key).filter(|v| !v.is_null())
    }

    fn expected(&self, key: &str, what: &str, found: &Value) -> ModelError {
        self.config.expected(&format!("{}.{key}", self.name), what, found)
    }

    /// Returns a positive finite number, if the key is present.
    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match as_positive(value) {
            Some(n) => Ok(Some(n)),
            None => Err(self.expected(key, "a positive number that f32 holds", value)),
        }
    }

    /// Returns a number that lies in the table, or beside it under the key `older` in older folders.
    fn number_or_older(&self, key: &str, older: Option<&str>) -> Result<Option<f64>> {
        if let Some(number) = self.number(key)? {
            return Ok(Some(number));
        }
        let Some((older, value)) = older.and_then(|key| Some((key, self.config.value(key)?))) else {
            return Ok(None);
        };
        match as_positive(value) {
            Some(n) => Ok(Some(n)),
            None => Err(self.config.expected(older, "a positive number that f32 holds", value)),
        }
    }

    fn required(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.config.error(format!("{} has no number for {key}", self.name)))
    }

    /// Returns whether the ends of YaRN's ramp are whole dimensions. transformers looks for the key
    /// outside of the entries by layer type, and so must whoever wants its numbers.
    fn truncate(&self) -> Result<bool> {
        let Some(value) = self.outer.get("truncate").filter(|v| !v.is_null()) else { return Ok(true) };
        value.as_bool().ok_or_else(|| self.expected("truncate", "true or false", value))
    }

    /// Returns one divisor for each rotated pair.
    fn divisors(&self, key: &str, pairs: usize) -> Result<Vec<f64>> {
        let missing = || self.config.error(format!("{} has no list for {key}", self.name));
        let value = self.value(key).ok_or_else(missing)?;
        let list = value.as_array().filter(|list| list.len() == pairs);
        let list = list.and_then(|list| list.iter().map(as_positive).collect::<Option<Vec<_>>>());
        list.ok_or_else(|| self.expected(key, &format!("a list of {pairs} positive numbers"), value))
    }

    /// Returns the positions of the first training: beside the table, in it, or the model's own.
    fn original_positions(&self) -> Result<f64> {
        let own = self.config.count_if("original_max_position_embeddings")?.map(|n| n as f64);
        let found = match own {
            Some(positions) => Some(positions),
            None => self.number("original_max_position_embeddings")?,
        };
        let found = match found {
            Some(positions) => Some(positions),
            None => self.config.count_if("max_position_embeddings")?.map(|n| n as f64),
        };
        found.ok_or_else(|| self.config.error("original_max_position_embeddings is missing"))
    }

    fn spec(&self, head_dim: usize, keys: RotaryKeys) -> Result<RotarySpec> {
        let theta = self.number_or_older("rope_theta", keys.theta_key)?.unwrap_or(keys.theta);
        let kind = match self.value("rope_type").map(|v| ("rope_type", v)) {
            Some(found) => Some(found),
            None => self.value("type").map(|v| ("type", v)),
        };
        let kind = match kind {
            None => "default",
            Some((key, value)) => value.as_str().ok_or_else(|| self.expected(key, "a string", value))?,
        };
        let given = self.number_or_older("partial_rotary_factor", Some(keys.fraction_key))?;
        let fraction = match (keys.fraction, given) {
            (Some(default), given) => given.unwrap_or(default),
            (None, given) if kind == "proportional" => given.unwrap_or(1.0),
            // transformers 5 rotates whole heads of the default kind, and fails with the others.
            (None, Some(given)) if kind != "default" && given != 1.0 => {
                return Err(self.config.error(format!(
                    "partial_rotary_factor is {given}, but heads of this family rotate whole"
                )));
            }
            (None, _) => 1.0,
        };
        let part = (head_dim as f64 * fraction) as usize;
        // Its pairs are those of the whole head.
        let dims = if kind == "proportional" && part <= head_dim { head_dim } else { part };
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            return Err(self.config.error(format!(
                "partial_rotary_factor {fraction} of head_dim {head_dim} is {dims} rotary dimensions, expected an even \
                 number from 2 to {head_dim}"
            )));
        }
        let kind = match kind {
            "su" | "yarn" if keys.old_names_mean_longrope => "longrope",
            kind => kind,
        };
        if let Some(alpha) = self.number("alpha")?.filter(|_| keys.alpha_stretches && kind == "dynamic") {
            let width = head_dim as f64;
            return Ok(RotarySpec::plain(theta * alpha.powf(width / (width - 2.0)), dims));
        }
        let scaling = self.scaling(kind, part)?;
        Ok(RotarySpec { scaling, ..RotarySpec::plain(theta, dims) })
    }

    /// Returns the scaling of a kind, of which `dims` dimensions rotate.
    fn scaling(&self, kind: &str, dims: usize) -> Result<RotaryScaling> {
        let max_positions = || self.config.count("max_position_embeddings");
        Ok(match kind {
            "default" => RotaryScaling::Default,
            "linear" => RotaryScaling::Linear { factor: self.required("factor")? },
            "dynamic" => {
                if dims == 2 {
                    return Err(self
                        .config
                        .error("rope_type \"dynamic\" needs more than 2 rotary dimensions"));
                }
                RotaryScaling::Dynamic { factor: self.required("factor")?, max_positions: max_positions()? }
            }
            "llama3" => RotaryScaling::Llama3 {
                factor: self.required("factor")?,
                low_frequency: self.required("low_freq_factor")?,
                high_frequency: self.required("high_freq_factor")?,
                original_positions: self.original_positions()?,
            },
            "yarn" => {
                let original_positions = self.original_positions()?;
                let factor = match self.number("factor")? {
                    Some(factor) => factor,
                    None => max_positions()? as f64 / original_positions,
                };
                // YaRN's equation 22, with DeepSeek's two factors on its logarithm.
                let scale = |times: f64| if factor <= 1.0 { 1.0 } else { 0.1 * times * factor.ln() + 1.0 };
                let own = (self.zero_or_more("mscale")?, self.zero_or_more("mscale_all_dim")?);
                let attention_factor = match (self.number("attention_factor")?, own) {
                    (Some(given), _) => given,
                    (None, (Some(some), Some(all))) if some != 0.0 && all != 0.0 => scale(some) / scale(all),
                    _ => scale(1.0),
                };
                RotaryScaling::Yarn {
                    factor,
                    beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
                    original_positions,
                    truncate: self.truncate()?,
                    attention_factor,
                }
            }
            "longrope" => {
                let original_positions = self.original_positions()?;
                let factor = match self.number("factor")? {
                    Some(factor) => factor,
                    None => max_positions()? as f64 / original_positions,
                };
                let attention_factor = match self.number("attention_factor")? {
                    Some(given) => given,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / original_positions.ln()).sqrt(),
                };
                RotaryScaling::Long {
                    short: self.divisors("short_factor", dims / 2)?,
                    long: self.divisors("long_factor", dims / 2)?,
                    original_positions: original_positions as usize,
                    attention_factor,
                }
            }
            "proportional" => RotaryScaling::Proportional {
                factor: self.number("factor")?.unwrap_or(1.0),
                turning: dims / 2,
            },
            other => {
                return Err(self.config.error(format!(
                    "rope_type is \"{other}\", which is not supported; known: default, linear, dynamic, llama3, \
                     yarn, longrope, proportional"
                )));
            }
        })
    }

    /// Returns a number that is not negative, if the key is present.
    fn zero_or_more(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|n| (*n as f32).is_finite() && *n >= 0.0) {
            Some(n) => Ok(Some(n)),
            None => Err(self.expected(key, "a number that is not negative", value)),
        }
    }

    /// Returns the scale of queries by position.
    fn query_scale(&self) -> Result<Option<QueryScale>> {
        let Some(beta) = self.zero_or_more("llama_4_scaling_beta")?.filter(|beta| *beta > 0.0) else {
            return Ok(None);
        };
        Ok(Some(QueryScale { beta, original_positions: self.original_positions()? }))
    }
}
