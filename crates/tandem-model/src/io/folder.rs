//! HF model folders, and GGUF files that stand for one.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_files::{CHAT_TEMPLATE, TOKENIZER_FILES, TokenizerOverride};
use tandem_gguf::{FolderFiles, Gguf};
use tandem_kernels::{DType, Format};

use super::archive::TensorArchive;
use super::load::WeightFiles;
use super::new_folder::{FURTHER_FILES, check_files, copy_files, copy_further_templates, write_file};
use super::quantised::FP8_BLOCK;
use super::torch;
use crate::decoder::Decoder;
use crate::families::{Family, family_of, scorer_family_of};
use crate::layout::ParamKind;
use crate::spec::Config;
use crate::spec::{DecoderSpec, HeadSpec};
use crate::{ModelError, Result};

/// HF model folder: `config.json`, weights, tokenizer and chat template. A GGUF file, or a folder
/// that holds one and no other weights, stands for the folder that it was made from.
pub struct ModelFolder {
    path: PathBuf,
    config: Config,
    family: &'static Family,
    spec: DecoderSpec,
    weights: Option<PathBuf>,
    /// True if no folder holds the weights.
    is_random: bool,
    gguf: Option<Gguf>,
    /// Seed of a score head that the weights lack.
    score_seed: Option<u64>,
    /// Chat template that saved models have instead of the folder's.
    chat_template: Option<String>,
    /// Files of an adapter's folder, which saved models have instead of the folder's.
    tokenizer: Option<TokenizerOverride>,
    /// EOS of the tokenizer, which ends generation by saved models.
    eos: Option<u32>,
}

/// Key of `config.json` that describes the quantisation of the weights.
pub(crate) const QUANTISATION: &str = "quantization_config";

/// Weight files, in the order of preference.
const WEIGHT_FILES: [&str; 4] =
    ["model.safetensors", "model.safetensors.index.json", "policy.pt", "pytorch_model.bin"];

/// FP8 weights by a `quantization_config`.
struct Fp8Method {
    /// True if a block of rows and columns shares a scale, false if rows or the whole matrix do.
    in_blocks: bool,
}

impl Fp8Method {
    fn find(how: &Value) -> Option<Self> {
        match how.get("quant_method").and_then(Value::as_str)? {
            "fp8" => {
                Some(Self { in_blocks: how.get("weight_block_size").is_some_and(|size| !size.is_null()) })
            }
            "compressed-tensors" if how.get("format").and_then(Value::as_str) == Some("float-quantized") => {
                let mut groups = how.get("config_groups").and_then(Value::as_object)?.values();
                let is_block = |group: &Value| group["weights"]["strategy"] == "block";
                Some(Self { in_blocks: groups.any(is_block) })
            }
            _ => None,
        }
    }
}

impl ModelFolder {
    /// Reads the config of a language model's folder, and no weights.
    ///
    /// # Errors
    /// If there is no such folder, no `config.json` in it, or the config describes something
    /// unsupported, or a reward model.
    pub fn open(path: &Path) -> Result<Self> {
        let (config, gguf) = read_config(path)?;
        if scorer_family_of(&config)?.is_some() {
            return Err(config.error(
                "this is a reward model, which scores texts and predicts no tokens; take a language model, or method = \"reward\"",
            ));
        }
        let family = family_of(&config)?;
        Self::new(path, config, gguf, family)
    }

    /// Reads the config of a reward model's folder, and no weights. It is a sequence classifier of
    /// `transformers` with one label, or a language model, whose score head is drawn from `seed`
    /// when weights are read.
    ///
    /// # Errors
    /// As [`ModelFolder::open`]; if a classifier has more labels than one.
    pub fn open_reward(path: &Path, seed: u64) -> Result<Self> {
        let (config, gguf) = read_config(path)?;
        let scorer = scorer_family_of(&config)?;
        let family = scorer.map_or_else(|| family_of(&config), Ok)?;
        if family.scorer_class().is_none() {
            return Err(config.error(format!(
                "{} cannot begin a reward model: transformers has no sequence classifier of it",
                family.architecture
            )));
        }
        let pad = config.token_id("pad_token_id")?;
        let mut folder = Self::new(path, config, gguf, family)?;
        folder.spec.head = HeadSpec::score(pad);
        folder.score_seed = scorer.is_none().then_some(seed);
        Ok(folder)
    }

    fn new(path: &Path, config: Config, gguf: Option<Gguf>, family: &'static Family) -> Result<Self> {
        let mut spec = family.spec(&config)?;
        let generation = path.join("generation_config.json");
        let generation = match &gguf {
            Some(gguf) => Some(Config::parse(gguf.path(), &gguf.generation_config()?.to_string())?),
            None if generation.symlink_metadata().is_ok() => Some(Config::read(&generation)?),
            None => None,
        };
        config.check_special_tokens()?;
        config.word("dtype", "")?;
        config.word("torch_dtype", "")?;
        if let Some(generation) = generation {
            generation.check_generation()?;
            for id in generation.eos_token_ids()? {
                if !spec.eos_token_ids.contains(&id) {
                    spec.eos_token_ids.push(id);
                }
            }
        }
        for id in config.eos_token_ids()? {
            if !spec.eos_token_ids.contains(&id) {
                spec.eos_token_ids.push(id);
            }
        }
        let mut folder = Self {
            path: path.to_owned(),
            config,
            family,
            spec,
            weights: None,
            is_random: false,
            gguf,
            score_seed: None,
            chat_template: None,
            tokenizer: None,
            eos: None,
        };
        // transformers ties the head of a vision–language model that says nothing, unless the files
        // hold one.
        let says = folder.config.as_map().contains_key("tie_word_embeddings");
        if family.sees() && !says && folder.weight_file().is_some() {
            folder.spec.head.tied = !folder.archive()?.holds(family, ParamKind::HeadWeight);
        }
        Ok(folder)
    }

    /// Sets the chat template of models that are saved with this folder's tokenizer.
    #[must_use]
    pub fn with_chat_template(mut self, template: String) -> Self {
        self.chat_template = Some(template);
        self
    }

    /// Sets the adapter's folder whose tokenizer files saved models have instead of this folder's.
    ///
    /// # Errors
    /// The adapter's `tokenizer_config.json` cannot be read.
    pub fn with_tokenizer_of(mut self, adapter: &Path) -> Result<Self> {
        let opened = TokenizerOverride::open(adapter);
        self.tokenizer = Some(opened.map_err(|e| ModelError::io(&adapter.join("tokenizer_config.json"), e))?);
        Ok(self)
    }

    /// Sets the tokenizer's EOS, at which saved models end generation too.
    #[must_use]
    pub fn with_eos(mut self, eos: Option<u32>) -> Self {
        self.eos = eos;
        self
    }

    /// Returns the EOS that was set.
    pub(crate) fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Returns the names of the tokenizer's files but those that an adapter's take the place of.
    fn own_tokenizer_files(&self) -> Vec<&'static str> {
        let hidden = |name: &str| self.tokenizer.as_ref().is_some_and(|adapter| adapter.hides(name));
        TOKENIZER_FILES.into_iter().filter(|name| !hidden(name)).collect()
    }

    /// Copies the tokenizer's files, with the chat template that was set.
    pub(crate) fn copy_tokenizer(&self, folder: &Path) -> Result<()> {
        self.copy_files(&self.own_tokenizer_files(), folder)?;
        let mut templates = self.path.as_path();
        if let Some(adapter) = &self.tokenizer {
            copy_files(adapter.folder(), adapter.names(), folder)?;
            if adapter.replaces_template() {
                templates = adapter.folder();
            }
        }
        match &self.chat_template {
            Some(template) => write_file(&folder.join(CHAT_TEMPLATE), template.as_bytes()),
            None => copy_further_templates(templates, folder),
        }
    }

    /// Sets the padding token of a reward model.
    #[must_use]
    pub fn with_pad(mut self, pad: u32) -> Self {
        self.spec.head = HeadSpec::score(Some(pad));
        self
    }

    /// Divides the logits by a temperature. Log-probabilities are then those of sampling at it.
    ///
    /// # Errors
    /// If the model caps its logits, which comes after.
    pub fn with_temperature(mut self, temperature: f32) -> Result<Self> {
        let shape = &mut self.spec.head.shape;
        if temperature == 1.0 {
            return Ok(self);
        }
        if shape.softcap.is_some() {
            return Err(ModelError::Invalid(format!(
                "{} caps its logits, and a temperature other than 1 in training is not supported with that; set the \
                 temperature to 1",
                self.path.display()
            )));
        }
        shape.logit_scale = Some(shape.logit_scale.unwrap_or(1.0) / temperature);
        Ok(self)
    }

    /// Returns whether this is a language model's folder read as a reward model.
    pub fn begins_score_head(&self) -> bool {
        self.score_seed.is_some()
    }

    /// Reads the weights from another file: a safetensors file or index, or a file of `torch.save`
    /// (`policy.pt`).
    #[must_use]
    pub fn with_weights(mut self, file: &Path) -> Self {
        self.weights = Some(file.to_owned());
        self
    }

    /// Says that the weights are drawn at random. An adapter on them then names no base.
    #[must_use]
    pub fn with_random_weights(mut self) -> Self {
        self.is_random = true;
        self
    }

    pub(crate) fn has_random_weights(&self) -> bool {
        self.is_random
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the `config.json`.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the architecture.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// Returns the spec.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// Returns the type to store this model's weights in: bf16 if its config says so, else f32.
    pub fn stored_type(&self) -> DType {
        let named = |key| self.config.word(key, "").unwrap_or_default();
        if named("dtype") == "bfloat16" || named("torch_dtype") == "bfloat16" {
            DType::Bf16
        } else {
            DType::F32
        }
    }

    /// Returns the format in which the folder's weights are quantised, if they are and the format can
    /// keep them: FP8 in blocks of 128 × 128 is none. Weights from another file are not quantised.
    pub fn quantised(&self) -> Option<Format> {
        let how = self.config.as_map().get(QUANTISATION).filter(|_| self.weights.is_none())?;
        let is = |key: &str| how.get(key).and_then(Value::as_bool) == Some(true);
        if is("load_in_8bit") {
            return Some(Format::Int8);
        }
        let fp8 = Fp8Method::find(how);
        if fp8.is_some() {
            return fp8.filter(|fp8| !fp8.in_blocks).map(|_| Format::Fp8);
        }
        let is_nf4 = how.get("bnb_4bit_quant_type").and_then(Value::as_str) == Some("nf4");
        (is("load_in_4bit") && is_nf4).then_some(Format::Nf4)
    }

    /// Returns the name of the type in which the folder's weights are quantised, if they are.
    pub fn quantisation(&self) -> Option<&'static str> {
        let how = self.config.as_map().get(QUANTISATION).filter(|_| self.weights.is_none());
        let fp8 = how.and_then(Fp8Method::find).map(|_| Format::Fp8);
        self.quantised().or(fp8).map(Format::name)
    }

    /// Returns the file that weights are read from, if there is one.
    pub fn weight_file(&self) -> Option<PathBuf> {
        let usual = || WEIGHT_FILES.iter().map(|name| self.path.join(name)).find(|file| file.is_file());
        let gguf = || self.gguf.as_ref().map(|gguf| gguf.path().to_owned());
        self.weights.clone().or_else(gguf).or_else(usual)
    }

    /// Copies those of the named files that the folder has.
    pub(crate) fn copy_files(&self, names: &[&str], folder: &Path) -> Result<()> {
        let Some(gguf) = &self.gguf else { return copy_files(&self.path, names, folder) };
        let files: FolderFiles = gguf.tokenizer_files()?;
        for name in names {
            if let Some(bytes) = files.get(name) {
                write_file(&folder.join(name), bytes)?;
            }
        }
        Ok(())
    }

    /// Checks that the files which a trained model's folder gets from this one can be read: it is written after the last
    /// step.
    ///
    /// # Errors
    /// The first that cannot, or is longer than such files are.
    pub fn check_copied(&self) -> Result<()> {
        match self.gguf {
            Some(_) => Ok(()),
            None => check_files(&self.path, &[&self.own_tokenizer_files()[..], &FURTHER_FILES].concat()),
        }
    }

    /// Opens the weights, and checks every name, shape and type against the decoder. Reads no
    /// elements, except a stored copy of a tied table.
    ///
    /// # Errors
    /// If there are none, a file is malformed, or tensors are missing, left over, or of another
    /// shape or type: one error lists all of them.
    pub fn weights(&self, decoder: &Decoder) -> Result<WeightFiles> {
        let how = self.config.as_map().get(QUANTISATION).filter(|_| self.weights.is_none());
        let method = how.and_then(|how| how.get("quant_method")).and_then(Value::as_str);
        if let Some((method, how)) = method.zip(how)
            && method != "bitsandbytes"
            && Fp8Method::find(how).is_none()
        {
            return Err(self.config.error(format!(
                "{QUANTISATION}.quant_method is \"{method}\", but only weights that bitsandbytes quantised, and FP8 \
                 weights (\"fp8\", \"compressed-tensors\" with the format \"float-quantized\"), can be read; use the \
                 unquantised model"
            )));
        }
        if let Some(size) = how.and_then(|how| how.get("weight_block_size")).filter(|size| !size.is_null())
            && *size != serde_json::json!([FP8_BLOCK, FP8_BLOCK])
        {
            return Err(self.config.error(format!(
                "{QUANTISATION}.weight_block_size is {size}, but FP8 weights are read in blocks of [{FP8_BLOCK}, \
                 {FP8_BLOCK}] alone; use the unquantised model"
            )));
        }
        let fp4 = |how: &Value| {
            // Folders of 8 bits have the type of 4 bits too, which means nothing there.
            how.get("load_in_4bit").and_then(Value::as_bool) == Some(true)
                && how.get("bnb_4bit_quant_type").and_then(Value::as_str) == Some("fp4")
        };
        if how.is_some_and(fp4) {
            return Err(self.config.error(format!(
                "{QUANTISATION}.bnb_4bit_quant_type is \"fp4\", but nf4 is the only 4-bit type that is read; \
                 use the unquantised model, and set compute.format"
            )));
        }
        WeightFiles::new(self.archive()?, self.family, decoder, self.score_seed)
    }

    /// Checks the headers of the weight files against the files' lengths. Reads no elements.
    ///
    /// # Errors
    /// If there are none, or a file is malformed.
    pub fn check_weights(&self) -> Result<()> {
        self.archive().map(drop)
    }

    /// Opens the files of the weights.
    pub(crate) fn archive(&self) -> Result<TensorArchive> {
        let file = self.weight_file().ok_or_else(|| {
            ModelError::format(
                &self.path,
                format!("holds no weights; looked for {}", WEIGHT_FILES.join(", ")),
            )
        })?;
        let extension = file.extension().and_then(|e| e.to_str()).unwrap_or_default();
        match (&self.gguf, extension) {
            (Some(gguf), _) if self.weights.is_none() => TensorArchive::open_gguf(gguf),
            (_, "json") => TensorArchive::open_index(&file),
            (_, "safetensors") => TensorArchive::open(&file),
            _ => torch::open(&file),
        }
    }
}

fn read_config(path: &Path) -> Result<(Config, Option<Gguf>)> {
    if let Some(file) = tandem_gguf::find(path)? {
        let gguf = Gguf::open(&file)?;
        let config = Config::parse(&file, &gguf.config()?.to_string())?;
        return Ok((config, Some(gguf)));
    }
    if !path.is_dir() {
        return Err(ModelError::format(path, "no such model folder"));
    }
    let config = path.join("config.json");
    if !config.exists() && path.join("adapter_config.json").exists() {
        let problem = "a folder of an adapter, where a whole model is needed: `tandem merge` makes one";
        return Err(ModelError::format(path, problem));
    }
    if !config.exists() && is_checkpoint(path) {
        let problem =
            "a checkpoint of a run, where a model is needed: `tandem checkpoint export` makes one of it";
        return Err(ModelError::format(path, problem));
    }
    Ok((Config::read(&config)?, None))
}

/// Returns whether a folder is a run's checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    ["cursor.json", "manifest.json"].iter().all(|name| folder.join(name).is_file())
}
